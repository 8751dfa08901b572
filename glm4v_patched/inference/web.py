"""``glm4v-patched chat --web``: the server, with a page, for this machine alone."""

import secrets
from argparse import Namespace
from dataclasses import replace
from urllib.parse import urlencode

from ..engine.options import require_packages
from ..option_fields import from_namespace
from .questions import Generation, ModelOptions
from .serving.limits import ServerLimits
from .serving.serve import hosts_of, listen

HOST = "127.0.0.1"
PORT = 7860
MAX_BODY_BYTES = 128 * 10**6
"""Of a question: all images of the conversation come with it, as base64."""


def chat_in_browser(options: Namespace) -> None:
    """Show a page of one or two models until the process is told to end; only who knows the address
    that is printed can ask."""
    if options.image:
        raise ValueError(f"--image {options.image[0]}: with --web, images are given in the page")
    if options.other == options.model:
        raise ValueError(f"the second model ({options.other}) is the first one: give another")
    asked, generation = from_namespace(ModelOptions, options), from_namespace(Generation, options)
    require_packages("serve", "chat --web")
    asked.place()
    listener = listen(HOST, PORT if options.port is None else options.port)
    names = [options.model] if options.other is None else [options.model, options.other]
    bases = {name: replace(asked, model=name).find() for name in names}

    from .answer_worker import load_answerer
    from .serving.answer_queue import AnswerQueue
    from .serving.app import make_app
    from .serving.connections import run_server

    queue = AnswerQueue({n: load_answerer(asked, base, generation) for n, base in bases.items()})
    limits = ServerLimits(
        api_key=secrets.token_urlsafe(32),
        hosts=hosts_of(HOST, None),
        max_body_bytes=MAX_BODY_BYTES,
    )
    # No browser sends what stands behind the #, and no other user of the machine sees it.
    start = {"key": limits.api_key} | ({"system": options.system} if options.system else {})

    def tell() -> None:
        address = f"http://{HOST}:{listener.getsockname()[1]}/#{urlencode(start)}"
        print(f"the page is {address} (Ctrl-C ends it)", flush=True)

    app = make_app(queue, generation, limits, tell, with_page=True)
    run_server(app, listener, on_exit=queue.stop)
