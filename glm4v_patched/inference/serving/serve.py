"""``glm4v-patched serve``: what is wrong is told, then one of two servers is started.

Imports no torch before it must.
"""

import errno
import importlib.util
import ipaddress
import os
import shlex
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from ...models.base import Base
from ...models.check_weights import quantised_by
from ...models.find import find_source
from ...models.placement import place
from ...models.quantised_weights import check_weights
from ...terminal_text import pip_install
from ..questions import Generation
from .limits import Limits
from .vllm import environment_of, find_vllm, require_plugin, vllm_command

ENGINES = ("auto", "transformers", "vllm")
LOCAL_NAME = "localhost"


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What the command line asks for.

    Args:
        model: Folder of a model or of adapters, or an id of the Hub.
        name: Of the model, for clients.
        adapters: Folders of LoRA adapters on the same model, or ids of the Hub, by the names that
            clients ask for them.
        engine: One of :data:`ENGINES`; "auto" is vLLM on a GPU where it is installed.
        port: 0 for any that is free.
    """

    model: str
    name: str
    revision: str | None = None
    device: Any = "cuda"
    weights: str | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)
    engine: str = "auto"
    host: str = "127.0.0.1"
    port: int = 8000
    generation: Generation = Generation()
    limits: Limits = Limits()


def serve(request: ServeOptions) -> None:
    """Serve until the process is told to end.

    Raises:
        ValueError: the model, the address or the options cannot be used, before torch is imported.
        RuntimeError: a package or a GPU is missing.
    """
    engine, program = choose_engine(request)
    if engine == "vllm":
        serve_by_vllm(request, program)
    else:
        serve_by_transformers(request)


def choose_engine(request: ServeOptions) -> tuple[str, str]:
    """ "vllm" or "transformers", and vLLM's program.

    Raises:
        ValueError: vLLM cannot do what is asked for; RuntimeError: it is not installed.
    """
    program = find_vllm() or ""
    cannot = [
        told
        for is_asked, told in (
            (request.device == "cpu", "--device cpu"),
            (request.weights is not None, "weights in fewer bytes"),
            (request.port == 0, "--port 0"),
        )
        if is_asked
    ]
    if request.engine == "transformers":
        return "transformers", program
    if request.engine == "auto":
        return "vllm" if program and not cannot else "transformers", program
    if cannot:
        raise ValueError(
            f"--engine vllm does not take {' and '.join(cannot)}; leave it out, or take --engine "
            "transformers"
        )
    if not program:
        raise RuntimeError(f"vllm is not installed: {pip_install('glm4v-patched[vllm]')}")
    return "vllm", program


def serve_by_vllm(request: ServeOptions, program: str) -> None:
    """Become vLLM's server.

    Raises:
        ValueError, RuntimeError: as :func:`serve`.
    """
    require_plugin()
    place(1, request.device)
    with hold_address(request.host, request.port):  # until vLLM ends, which this process becomes
        listen(request.host, request.port).close()
        base, others = find_all(request)
        address = request.host, request.port
        command = vllm_command(program, base, request.name, others, address, request.generation)
        print(f"vLLM serves {request.name}: {shlex.join(command)}", flush=True)
        limits = replace(request.limits, most_at_once=None)
        os.execve(command[0], command, environment_of(limits))


def serve_by_transformers(request: ServeOptions) -> None:
    """Serve with this package's own code.

    Raises:
        ValueError, RuntimeError: as :func:`serve`.
    """
    require_packages("serve", ("starlette", "uvicorn"))
    check_weights(request.weights, request.device)
    placement = place(1, request.device)
    with hold_address(request.host, request.port):
        listener = listen(request.host, request.port)
    base, others = find_all(request)

    from ...models.loading import config_of, load
    from ..answer_worker import Answerer
    from ..decoding.static_cache import chosen
    from .answer_queue import AnswerQueue
    from .app import make_app
    from .connections import run_server

    if request.limits.api_key is None and not is_local(request.host):
        print(f"whoever reaches {request.host} may use this server: there is no --api-key")
    loaded = load(base, "cpu" if placement.on_cpu else "cuda", request.weights)
    model, using = with_adapters(loaded.model, base, others)
    # A recorded step has the adapters that it was recorded with.
    method = request.weights or quantised_by(base.model, base.revision)
    cache = "dynamic" if others else chosen("auto", str(request.device), 0, method)
    answerer = Answerer(loaded._replace(model=model), request.generation, cache)
    engine = AnswerQueue(answerer, config_of(base).seq_length, using)
    names = [request.name, *others]

    def tell() -> None:
        told = " and ".join(names)
        print(f"{told} is served at {url_of(listener)} (Ctrl-C ends it)", flush=True)

    app = make_app(engine, names, request.generation, request.limits, tell)
    run_server(app, listener, on_exit=engine.stop)  # else it would be waited for, and cut off


def find_all(request: ServeOptions) -> tuple[Base, dict[str, Base]]:
    """The model, and by their names the adapters that are served beside it.

    Raises:
        ValueError: as :func:`find_source`; or adapters are of another model, or have its name.
    """
    base = find_source(request.model, request.revision, request.weights)
    others = {}
    for name, folder in request.adapters.items():
        found = find_source(folder, weights=request.weights)
        if found.adapters is None:
            raise ValueError(f"--adapter {name}={folder}: it is a model; expected LoRA adapters")
        if _place(found) != _place(base):
            raise ValueError(
                f"--adapter {name}={folder}: they are adapters of {found.model}, and the model "
                f"that is served is {base.model}; expected one and the same"
            )
        if name == request.name:
            raise ValueError(f"--adapter {name}={folder}: the model has this name, too")
        others[name] = found
    return base, others


def _place(base: Base) -> tuple[str, str | None]:
    is_folder = os.path.isdir(base.model)
    return os.path.realpath(base.model) if is_folder else base.model, base.revision


def with_adapters(
    model: Any, base: Base, others: Mapping[str, Base]
) -> tuple[Any, Callable[[str], AbstractContextManager]]:
    """The model with all adapters on it, and a context for each name in which its own are used."""
    if not others:
        return model, lambda name: nullcontext()

    from ...engine.trainable import continue_adapters

    # Names of modules have no dots, those of clients may.
    own = {name: f"adapters_{number}" for number, name in enumerate(others)}
    for name, found in others.items():
        assert found.adapters is not None
        model = continue_adapters(model, found.adapters, own[name])
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


def require_packages(command: str, names: Sequence[str]) -> None:
    """Raise ``RuntimeError`` if a package that a command needs is missing."""
    if missing := [name for name in names if not is_installed(name)]:
        raise RuntimeError(f"{command} needs {' and '.join(missing)}: {pip_install(*missing)}")


def is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # None stands for it in sys.modules, as for one that must not be imported
        return False


def listen(host: str, port: int) -> socket.socket:
    """A socket at the address. Connections wait in it until they are accepted.

    Raises:
        ValueError: there is no such address here, or it is in use.
    """
    if not 0 <= port <= 65535:  # getaddrinfo() takes the lower 16 bits of others
        raise ValueError(f"--port {port}: expected 0 to 65535")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # At once: until one listens, others may bind the same address (SO_REUSEADDR), and would
        # fail when they have loaded a model.
        listener.listen()
    except OSError as error:
        told = error.strerror or error
        raise ValueError(
            f"--host {host} --port {port} cannot be listened at: {told}; give another, or --port 0 "
            "for one that is free"
        ) from None
    return listener


def hold_address(host: str, port: int) -> socket.socket:
    """Take an address before anything listens there: vLLM does so only when it has loaded a model,
    and lets others bind the address until then. Given up when the socket is closed, also by the
    end of a program that this process has become.

    Raises:
        ValueError: another ``serve`` holds it, or the system refuses.
    """
    held = socket.socket(socket.AF_UNIX)
    if port:  # else each gets one of its own
        try:
            held.bind(f"\0glm4v-patched serve {host}:{port}")  # a name of the kernel's, and no file
        except OSError as error:
            told = f"cannot be held ({error.strerror or error})"
            if error.errno == errno.EADDRINUSE:
                told = (
                    "another glm4v-patched serve is starting or running there; give another port, "
                    "or end that one"
                )
            raise ValueError(f"--host {host} --port {port}: {told}") from None
    held.set_inheritable(True)
    return held


def url_of(listener: socket.socket) -> str:
    """What clients take as ``base_url``."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def hosts_of(host: str, api_key: str | None) -> tuple[str, ...] | None:
    """Names that clients may call the server by, where no key keeps the web's pages out: those of
    this machine, if others reach it, and what it was told to listen at."""
    if api_key:
        return None
    others = () if is_local(host) else (socket.gethostname().lower(),)
    return tuple(dict.fromkeys((LOCAL_NAME, *others, host.lower())))


def is_local(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == LOCAL_NAME


def api_key_of(given: str | None, variable: str) -> str | None:
    """The key from the command line, or from the environment, where other users do not see it."""
    key = given if given is not None else os.environ.get(variable)
    if key is None:
        return None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        where = "--api-key" if given is not None else variable
        raise ValueError(f"{where} is empty, or has spaces or letters beyond ASCII: give another")
    return key
