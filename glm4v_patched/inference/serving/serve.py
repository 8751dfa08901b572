"""``glm4v-patched serve``: check the options, then start our own server or vLLM's.

torch is imported only after the checks.
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
from ...terminal_text import pip_install, write_line
from ..questions import Generation, ModelOptions
from .guard import parse_address
from .limits import MAX_MEGAPIXELS, ServerLimits
from .vllm import find_vllm, vllm_command, vllm_environment

LOCAL_NAME = "localhost"


def serve(options: Namespace) -> None:
    """Serve until the process is stopped."""
    limits, generation = _server_limits(options), from_namespace(Generation, options)
    model_options = from_namespace(ModelOptions, options)
    name = options.served_model_name or options.model
    names = [name, *(adapter_name for adapter_name, _ in options.adapter)]
    if repeated := [other for other in {*names} if names.count(other) > 1]:
        raise ValueError(
            f"--adapter {repeated[0]}: another model or adapter is served by this name; choose "
            "another name"
        )
    vllm_program = choose_vllm(options)
    if not vllm_program:
        require_packages("serve")
    model_options.placement()
    listener = open_listener(options.host, options.port)
    base = model_options.find()
    adapters = find_adapters(base, dict(options.adapter), options.weights)
    if vllm_program:
        address = options.host, options.port
        command = vllm_command(vllm_program, base, name, adapters, address, generation)
        command += ["--dtype", options.dtype]
        write_line(f"vLLM serves {name}: {shlex.join(command)}")
        listener.close()
        os.execve(vllm_program, command, vllm_environment(limits))

    from ..answer_worker import load_answerer
    from .answer_queue import AnswerQueue
    from .app import make_app
    from .connections import run_server

    if limits.api_key is None and not is_local(options.host):
        write_line(f"anyone who can reach {options.host} may use this server: --api-key is not set")
    if adapters:  # a CUDA graph always uses the adapters that were active at its capture
        model_options = replace(model_options, cache="dynamic")
    answerer = load_answerer(model_options, base, generation)
    answerer.model, activate = add_adapters(answerer.model, base, adapters)
    queue = AnswerQueue(dict.fromkeys(names, answerer), activate)

    def print_address() -> None:
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        print(f"{' and '.join(names)} is served at {url} (Ctrl-C ends it)", flush=True)

    app = make_app(queue, generation, limits, print_address)
    # Without on_exit, uvicorn would wait for the current answers and then cut them off.
    run_server(app, listener, on_exit=queue.stop)


def _server_limits(options: Namespace) -> ServerLimits:
    if options.max_image_megapixels > MAX_MEGAPIXELS:
        raise ValueError(
            f"--max-image-megapixels {options.max_image_megapixels}: Pillow refuses images of more "
            f"than {MAX_MEGAPIXELS} megapixels; give at most {MAX_MEGAPIXELS}"
        )
    variable = "GLM4V_PATCHED_API_KEY"  # other users can see commands, but not their environment
    key = os.environ.get(variable) if options.api_key is None else options.api_key
    if key is not None and not (key.isascii() and key.isprintable() and key and " " not in key):
        source = variable if options.api_key is None else "--api-key"
        raise ValueError(
            f"{source} is empty, or has spaces or characters outside of ASCII: give another key"
        )
    limits = from_namespace(
        ServerLimits, options, api_key=key, hosts=allowed_hosts(options.host, key)
    )
    pixels = options.max_image_megapixels * 10**6
    return replace(limits, max_body_bytes=options.max_body_mb * 10**6, max_pixels=pixels)


def choose_vllm(options: Namespace) -> str | None:
    """Return the path of vLLM's program if vLLM is to serve, otherwise None.

    Raises:
        ValueError: --engine vllm is given with options that vLLM does not support.
        RuntimeError: --engine vllm is given, but vLLM is not installed.
    """
    if options.engine == "transformers":
        return None
    unsupported = {
        "--device cpu": options.device == "cpu",
        f"--weights {options.weights}": options.weights is not None,
        "--port 0": options.port == 0,
    }
    conflicts = " and ".join(option for option, is_set in unsupported.items() if is_set)
    program = find_vllm()
    if program and not conflicts:
        return program
    if options.engine == "auto":
        return None
    if conflicts:
        raise ValueError(
            f"--engine vllm does not support {conflicts}; leave it out, or use --engine "
            "transformers"
        )
    raise RuntimeError(f"vllm is not installed: {pip_install('glm4v-patched[vllm]')}")


def find_adapters(
    base: ModelSource, adapters: Mapping[str, str], weights: str | None
) -> dict[str, ModelSource]:
    """Find the adapters of the options --adapter, by name.

    Args:
        adapters: Folders by name.
        weights: The option --weights.

    Raises:
        ValueError: A folder has no LoRA adapters, or adapters of another model than ``base``.
    """
    sources = {}
    for name, folder in adapters.items():
        option = f"--adapter {name}={folder}"
        source = find_source(folder, weights=weights)
        if source.adapters is None:
            raise ValueError(f"{option}: this is a model; expected LoRA adapters")
        if _base_identity(source) != _base_identity(base):
            raise ValueError(
                f"{option}: these are adapters of {source.model}, but the model that is served is "
                f"{base.model}; both must be the same"
            )
        sources[name] = source
    return sources


def _base_identity(base: ModelSource) -> tuple[str, str | None]:
    """Return the base model's resolved path or its id on the Hub, and its revision."""
    is_folder = os.path.isdir(base.model)
    return os.path.realpath(base.model) if is_folder else base.model, base.revision


def add_adapters(
    model: Any, base: ModelSource, adapters: Mapping[str, ModelSource]
) -> tuple[Any, Callable[[str], AbstractContextManager]]:
    """Return the model with all adapters loaded, and a function that activates adapters by name.

    The function returns a context in which the model uses only the adapters of this name.
    """
    if not adapters:
        return model, lambda name: nullcontext()

    from ...engine.trainable import load_adapters

    # Names that clients use may have dots, but names of torch modules may not.
    module_names = {name: f"adapters_{index}" for index, name in enumerate(adapters)}
    for name, source in adapters.items():
        assert source.adapters is not None
        model = load_adapters(model, source.adapters, module_names[name])
    model.eval().requires_grad_(False)

    @contextmanager
    def activate(name: str) -> Iterator[None]:
        if name not in module_names and base.adapters is None:
            with model.disable_adapter():
                yield
        else:
            model.set_adapter(module_names.get(name, "default"))
            yield

    return model, activate


def open_listener(host: str, port: int) -> socket.socket:
    """Return a listening socket, or raise ``ValueError``.

    The socket is opened before a model is loaded, so that a port in use is reported at once and
    nobody else can take it. Connections wait until they are accepted.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"cannot listen on --host {host} --port {port}: {error}; give another, or --port 0 for "
            "a free port"
        ) from None


def allowed_hosts(host: str, api_key: str | None) -> list[str] | None:
    """Return the host names that clients may use.

    The names are localhost, ``host``, and this machine's name if other machines can reach the
    server. If there is an API key, the result is None, which allows all names.
    """
    if api_key:
        return None
    own_names = () if is_local(host) else (socket.gethostname().lower(),)
    return [*dict.fromkeys((LOCAL_NAME, *own_names, host.lower()))]


def is_local(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    address = parse_address(host)
    return host.lower() == LOCAL_NAME if address is None else address.is_loopback
