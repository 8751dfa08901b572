"""``glm4v-patched serve``: what is wrong is told, then one of two servers is started.

Imports no torch before it must.
"""

import os
import shlex
import socket
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from ...engine.options import require_packages
from ...models.base import ModelSource
from ...models.find import find_source
from ...option_fields import from_namespace
from ...terminal_text import pip_install
from ..questions import Generation, ModelOptions
from .guard import address_of
from .limits import MOST_MEGAPIXELS, ServerLimits
from .vllm import environment_of, find_vllm, vllm_command

LOCAL_NAME = "localhost"


def serve(options: Namespace) -> None:
    """Serve until the process is told to end."""
    limits, generation = _limits(options), from_namespace(Generation, options)
    asked = from_namespace(ModelOptions, options)
    name = options.served_model_name or options.model
    names = [name, *(each for each, _ in options.adapter)]
    if twice := [each for each in {*names} if names.count(each) > 1]:
        raise ValueError(f"--adapter {twice[0]}: another that is served has this name, too")
    program = choose_vllm(options)
    if not program:
        require_packages("serve")
    asked.place()
    listener = listen(options.host, options.port)
    base = asked.find()
    others = find_adapters(base, dict(options.adapter), options.weights)
    if program:
        address = options.host, options.port
        command = vllm_command(program, base, name, others, address, generation)
        print(f"vLLM serves {name}: {shlex.join(command)}", flush=True)
        listener.close()
        os.execve(program, command, environment_of(limits))

    from ..answer_worker import load_answerer
    from .answer_queue import AnswerQueue
    from .app import make_app
    from .connections import run_server

    if limits.api_key is None and not is_local(options.host):
        print(f"whoever reaches {options.host} may use this server: there is no --api-key")
    if others:  # a recorded step has the adapters that it was recorded with
        asked = replace(asked, cache="dynamic")
    answerer = load_answerer(asked, base, generation)
    answerer.model, using = with_adapters(answerer.model, base, others)
    queue = AnswerQueue(dict.fromkeys(names, answerer), using)

    def tell() -> None:
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        print(f"{' and '.join(names)} is served at {url} (Ctrl-C ends it)", flush=True)

    app = make_app(queue, generation, limits, tell)
    run_server(app, listener, on_exit=queue.stop)  # else it would be waited for, and cut off


def _limits(options: Namespace) -> ServerLimits:
    if options.max_image_megapixels > MOST_MEGAPIXELS:
        raise ValueError(
            f"--max-image-megapixels {options.max_image_megapixels}: more than "
            f"{MOST_MEGAPIXELS} are refused by Pillow"
        )
    variable = "GLM4V_PATCHED_API_KEY"  # where other users do not see it
    key = os.environ.get(variable) if options.api_key is None else options.api_key
    if key is not None and not (key.isascii() and key.isprintable() and key and " " not in key):
        where = variable if options.api_key is None else "--api-key"
        raise ValueError(f"{where} is empty, or has spaces or letters beyond ASCII: give another")
    limits = from_namespace(ServerLimits, options, api_key=key, hosts=hosts_of(options.host, key))
    pixels = options.max_image_megapixels * 10**6
    return replace(limits, max_body_bytes=options.max_body_mb * 10**6, max_pixels=pixels)


def choose_vllm(options: Namespace) -> str | None:
    """vLLM's program, if it is to serve."""
    if options.engine == "transformers":
        return None
    cannot = {
        "--device cpu": options.device == "cpu",
        "weights in fewer bytes": options.weights is not None,
        "--port 0": options.port == 0,
    }
    told = " and ".join(each for each, is_asked in cannot.items() if is_asked)
    program = find_vllm()
    if program and not told:
        return program
    if options.engine == "auto":
        return None
    if told:
        raise ValueError(
            f"--engine vllm does not take {told}; leave it out, or take --engine transformers"
        )
    raise RuntimeError(f"vllm is not installed: {pip_install('glm4v-patched[vllm]')}")


def find_adapters(
    base: ModelSource, adapters: Mapping[str, str], weights: str | None
) -> dict[str, ModelSource]:
    """By their names, the adapters that are served beside a model."""
    others = {}
    for each, folder in adapters.items():
        told = f"--adapter {each}={folder}"
        found = find_source(folder, weights=weights)
        if found.adapters is None:
            raise ValueError(f"{told}: it is a model; expected LoRA adapters")
        if _place(found) != _place(base):
            raise ValueError(
                f"{told}: they are adapters of {found.model}, and the model that is served is "
                f"{base.model}; expected one and the same"
            )
        others[each] = found
    return others


def _place(base: ModelSource) -> tuple[str, str | None]:
    is_folder = os.path.isdir(base.model)
    return os.path.realpath(base.model) if is_folder else base.model, base.revision


def with_adapters(
    model: Any, base: ModelSource, others: Mapping[str, ModelSource]
) -> tuple[Any, Callable[[str], AbstractContextManager]]:
    """The model with all adapters on it, and a context for each name in which its own are used."""
    if not others:
        return model, lambda name: nullcontext()

    from ...engine.trainable import load_trainable_adapters

    # Names of modules have no dots, those of clients may.
    own = {name: f"adapters_{number}" for number, name in enumerate(others)}
    for name, found in others.items():
        assert found.adapters is not None
        model = load_trainable_adapters(model, found.adapters, own[name])
    model.eval().requires_grad_(False)

    @contextmanager
    def using(name: str) -> Iterator[None]:
        if name not in own and base.adapters is None:
            with model.disable_adapter():
                yield
        else:
            model.set_adapter(own.get(name, "default"))
            yield

    return model, using


def listen(host: str, port: int) -> socket.socket:
    """A socket at the address, at once: until one listens, others may bind it, and would fail when
    they have loaded a model. Connections wait in it until they are accepted."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"--host {host} --port {port} cannot be listened at: {error}; give another, or "
            "--port 0 for one that is free"
        ) from None


def hosts_of(host: str, api_key: str | None) -> list[str] | None:
    """Names that clients may call the server by, where no key keeps the web's pages out: those of
    this machine, if others reach it, and what it was told to listen at."""
    if api_key:
        return None
    others = () if is_local(host) else (socket.gethostname().lower(),)
    return [*dict.fromkeys((LOCAL_NAME, *others, host.lower()))]


def is_local(host: str) -> bool:
    """Whether only this machine reaches the address."""
    address = address_of(host)
    return host.lower() == LOCAL_NAME if address is None else address.is_loopback
