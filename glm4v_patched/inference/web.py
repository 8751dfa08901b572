"""``glm4v-patched chat --web``: the API server with a chat page, for this machine only."""

import secrets
from argparse import Namespace
from dataclasses import replace
from urllib.parse import urlencode

from ..engine.options import require_packages
from ..option_fields import from_namespace
from .questions import Generation, ModelOptions
from .serving.limits import ServerLimits
from .serving.serve import allowed_hosts, open_listener

PAGE_HOST = "127.0.0.1"
PAGE_PORT = 7860
MAX_PAGE_BODY_BYTES = 128 * 10**6
"""Large, because with each question, the page sends all images of the conversation as base64."""


def chat_in_browser(options: Namespace) -> None:
    """Serve a chat page for one or two models until the process is stopped.

    The printed address contains a random API key, so only people who know the address can ask.
    """
    if options.image:
        raise ValueError(
            f"--image {options.image[0]}: with --web, images are added in the page; leave it out"
        )
    if options.other == options.model:
        raise ValueError(
            f"the second model ({options.other}) is the same as the first: choose another, or "
            "leave it out"
        )
    model_options = from_namespace(ModelOptions, options)
    generation = from_namespace(Generation, options)
    require_packages("serve", "chat --web")
    model_options.placement()
    listener = open_listener(PAGE_HOST, PAGE_PORT if options.port is None else options.port)
    names = [options.model] if options.other is None else [options.model, options.other]
    bases = {name: replace(model_options, model=name).find() for name in names}

    from .answer_worker import load_answerer
    from .serving.answer_queue import AnswerQueue
    from .serving.app import make_app
    from .serving.connections import run_server

    queue = AnswerQueue(
        {name: load_answerer(model_options, base, generation) for name, base in bases.items()}
    )
    limits = ServerLimits(
        api_key=secrets.token_urlsafe(32),
        hosts=allowed_hosts(PAGE_HOST, None),
        max_body_bytes=MAX_PAGE_BODY_BYTES,
    )
    # The key is in the fragment (#). Browsers do not send it, so no log of requests contains it.
    fragment = {"key": limits.api_key} | ({"system": options.system} if options.system else {})

    def print_address() -> None:
        address = f"http://{PAGE_HOST}:{listener.getsockname()[1]}/#{urlencode(fragment)}"
        print(f"the page is {address} (Ctrl-C ends it)", flush=True)

    app = make_app(queue, generation, limits, print_address, with_page=True)
    run_server(app, listener, on_exit=queue.stop)
