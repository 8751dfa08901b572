"""The chat page of ``chat --web`` for everybody: ``python app.py MODEL [PORT]``.

``chat --web`` serves its page to one user of this machine, who needs a key. A Space is public: this
page needs no key, has low limits, and may be shown in a frame of huggingface.co.
"""

import sys

from starlette.middleware import Middleware

from glm4v_patched.inference.answer_worker import load_answerer
from glm4v_patched.inference.questions import Generation, ModelOptions
from glm4v_patched.inference.serving.answer_queue import AnswerQueue
from glm4v_patched.inference.serving.app import make_app
from glm4v_patched.inference.serving.connections import run_server
from glm4v_patched.inference.serving.limits import ServerLimits
from glm4v_patched.inference.serving.serve import open_listener

NO_FRAMES, HUB_FRAMES = b"frame-ancestors 'none'", b"frame-ancestors https://huggingface.co"
LIMITS = ServerLimits(
    hosts=None, max_body_bytes=8 * 10**6, max_pixels=12 * 10**6, max_images=4, max_requests=16
)


class AllowFrame:
    """ASGI middleware that lets huggingface.co show the page in a frame."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        async def send_with_frame(message):
            if message["type"] == "http.response.start":
                message["headers"] = [
                    (name, value.replace(NO_FRAMES, HUB_FRAMES))
                    for name, value in message["headers"]
                    if name != b"x-frame-options"
                ]
            await send(message)

        await self.app(scope, receive, send_with_frame)


def main(model: str, port: int) -> None:
    """Serve the page until the process is stopped."""
    listener = open_listener("0.0.0.0", port)
    options, generation = ModelOptions(model=model, device="cpu"), Generation(max_new_tokens=32)
    queue = AnswerQueue({"demo": load_answerer(options, options.find(), generation)})

    def print_address() -> None:
        print(f"the page is http://127.0.0.1:{listener.getsockname()[1]}/", flush=True)

    app = make_app(queue, generation, LIMITS, print_address, with_page=True)
    app.user_middleware.insert(0, Middleware(AllowFrame))
    run_server(app, listener, on_exit=queue.stop)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 7860)
