"""What ``glm4v-patched serve`` gives to many clients at once, each with an image.

``python docs/benchmarks/serve_clients.py MODEL --out rows.json`` starts the server (``--engine``,
``--weights``), asks it one after the other, then by 64 clients at once, then 500 times more while
hostile clients open 400 connections and send what is to be refused, and ends it. The row of
the file has answers per second, how long the slowest look at ``/health`` took, what hostile
requests were answered with, and the GPU's memory before and after.
"""

import argparse
import base64
import http.client
import io
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from PIL import Image

from glm4v_patched.demo.images import draw_data_set
from glm4v_patched.demo.tiny_model import IMAGE_SIDE, build_from_scratch

SIDE = 1120
HEADERS = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9000\r\n"
HELD = b"", HEADERS, HEADERS + b"Content-Type: application/json\r\n\r\n{"
"""What held connections have sent: nothing, some headers, the beginning of a body."""
SIZE = 31_000_000
AT_ONCE = 6


def question(seed: int) -> dict:
    """An image that no other question has, and words: OpenAI's messages."""
    noise = random.Random(seed).randbytes(40 * 40 * 3)
    image = Image.frombytes("RGB", (40, 40), noise).resize((SIDE, SIDE))
    file = io.BytesIO()
    image.save(file, "JPEG")
    url = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
    shown = {"type": "image_url", "image_url": {"url": url}}
    return {"role": "user", "content": [shown, {"type": "text", "text": "What is it?"}]}


def fetch(url: str, body: dict | None = None, timeout: float = 300) -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as reply:
        return json.loads(reply.read() or b"{}")


class Clients:
    """Ask the server at an address for answers of ``tokens`` tokens, which end at no other."""

    def __init__(self, url: str, model: str, tokens: int):
        self.url, self.model, self.tokens = url, model, tokens

    def ask(self, seed: int) -> int:
        """The tokens of an answer."""
        body = {"model": self.model, "messages": [question(seed)], "max_tokens": self.tokens}
        reply = fetch(f"{self.url}/chat/completions", body)
        return reply["usage"]["completion_tokens"]

    def at_once(self, number: int, clients: int, first: int) -> dict:
        """Answers and tokens per second of so many requests."""
        start = time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            tokens = sum(pool.map(self.ask, range(first, first + number)))
        took = time.perf_counter() - start
        return {"answers_per_s": round(number / took, 3), "tokens_per_s": round(tokens / took, 1)}


class Watch(threading.Thread):
    """Looks at ``/health`` four times a second, and remembers how long that took."""

    def __init__(self, url: str):
        super().__init__(daemon=True)
        self.url, self.seconds, self.ends = url, [], threading.Event()

    def run(self) -> None:
        while not (self.seconds and self.ends.wait(0.25)):
            start = time.perf_counter()
            fetch(self.url.removesuffix("/v1") + "/health", timeout=60)
            self.seconds.append(time.perf_counter() - start)


def hold(port: int, number: int) -> list[socket.socket]:
    """Connections that stop in the middle. The server may end those that are too many."""
    opened = []
    for each in range(number):
        connection = socket.create_connection(("127.0.0.1", port))
        with suppress(OSError):
            connection.sendall(HELD[each % len(HELD)])
        opened.append(connection)
    return opened


def hostile_bodies(model: str) -> dict[str, bytes]:
    asked = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]})
    some, told = '{"a": 1}', asked.removesuffix("}")
    return {
        "31 MB of text": asked.replace("Hello", "word " * (SIZE // 5)).encode(),
        "31 MB of objects": f'{told}, "a": [{", ".join([some] * (SIZE // 10))}]}}'.encode(),
        "temperature 1e308": f'{told}, "temperature": 1e308}}'.encode(),
    }


def answered_with(url: str, body: bytes) -> int | str:
    """A request's status, or that the server has closed the connection, or has not answered."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, http.client.HTTPException) as error:
        is_late = isinstance(getattr(error, "reason", error), TimeoutError)
        return "no answer" if is_late else "closed"


def gpu(what: str = "name") -> str | None:
    """What the driver says of the GPU that the server takes; None where there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    asked = [f"--id={first}", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    command = ["nvidia-smi", *asked]
    return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()[0]


def wait_for(url: str, server: subprocess.Popen, seconds: int = 400) -> float:
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with status {server.returncode}")
        try:
            fetch(f"{url}/models", timeout=5)
            return time.perf_counter() - start
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"the server did not answer within {seconds} s")


def measure(options: argparse.Namespace, server: subprocess.Popen, url: str) -> dict:
    ready = wait_for(url, server)
    clients = Clients(url, fetch(f"{url}/models")["data"][0]["id"], options.new_tokens)
    clients.at_once(options.clients, options.clients, 10**6)  # warms it up
    alone = clients.at_once(options.alone, 1, 0)
    together = clients.at_once(2 * options.clients, options.clients, 1000)
    before = gpu("memory.used")
    at, bodies = f"{url}/chat/completions", hostile_bodies(clients.model)
    held, watch = hold(options.port, 400), Watch(url)
    watch.start()
    with ThreadPoolExecutor(AT_ONCE * len(bodies)) as pool:
        sent = {
            name: [pool.submit(answered_with, at, body) for _ in range(AT_ONCE)]
            for name, body in bodies.items()
        }
        many = clients.at_once(options.requests, options.clients, 2000)
    watch.ends.set()
    watch.join()
    for connection in held:
        connection.close()
    return {
        "hostile": {
            name: sorted({str(each.result()) for each in answers}) for name, answers in sent.items()
        },
        "ready_s": round(ready, 1),
        "alone": alone,
        "together": together,
        "times": round(together["answers_per_s"] / alone["answers_per_s"], 2),
        "among_hostile_clients": many,
        "health_s": {
            "median": round(statistics.median(watch.seconds), 3),
            "slowest": round(max(watch.seconds), 3),
        },
        "gpu_mib": {"before": before, "after": gpu("memory.used"), "requests": options.requests},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("model", nargs="?", help="what serve takes (default: a tiny one)")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--weights", help="of serve")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--alone", type=int, default=6, help="requests one after the other")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, required=True, help="a file to add the row to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        serve(options, options.model or tiny_model(Path(folder)))


def tiny_model(folder: Path) -> str:
    rows = draw_data_set(folder / "images", 8, seed=0, side=IMAGE_SIDE)
    build_from_scratch(folder / "model", rows, seed=0)
    return str(folder / "model")


def serve(options: argparse.Namespace, model: str) -> None:
    command = [sys.executable, "-m", "glm4v_patched", "serve", model]
    command += ["--engine", options.engine, "--device", options.device, "--port", str(options.port)]
    command += ["--weights", options.weights] if options.weights else []
    with subprocess.Popen(command, stdout=sys.stderr) as server:
        try:
            row = measure(options, server, f"http://127.0.0.1:{options.port}/v1")
        finally:
            server.terminate()
    asked = {name: getattr(options, name) for name in ("weights", "clients", "new_tokens")}
    row = {"engine": options.engine, "model": Path(model).name, **asked, "gpu": gpu(), **row}
    rows = json.loads(options.out.read_text()) if options.out.exists() else []
    lines = ",\n".join(map(json.dumps, [*rows, row]))
    options.out.write_text(f"[\n{lines}\n]\n")
    print(json.dumps(row))


if __name__ == "__main__":
    main()
