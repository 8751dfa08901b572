"""Measure ``glm4v-patched serve`` with many concurrent clients, each with an image.

``python docs/benchmarks/serve_clients.py MODEL --out rows.json`` starts the server (``--engine``,
``--weights``), sends requests one after the other, then by 64 concurrent clients, then 500 more
while hostile clients open 400 connections and send invalid requests, and ends it. The row in the
file has answers per second, the slowest response of ``/health``, the statuses of hostile requests,
and the GPU's memory before and after.
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
PARTIAL_REQUESTS = b"", HEADERS, HEADERS + b"Content-Type: application/json\r\n\r\n{"
"""Beginnings of requests that are never finished: nothing, some headers, part of a body."""
SIZE = 31_000_000
AT_ONCE = 6


def question(seed: int) -> dict:
    """Return a message in OpenAI's format, with a unique image and a text."""
    noise = random.Random(seed).randbytes(40 * 40 * 3)
    image = Image.frombytes("RGB", (40, 40), noise).resize((SIDE, SIDE))
    file = io.BytesIO()
    image.save(file, "JPEG")
    url = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
    image_part = {"type": "image_url", "image_url": {"url": url}}
    return {"role": "user", "content": [image_part, {"type": "text", "text": "What is it?"}]}


def fetch(url: str, body: dict | None = None, timeout: float = 300) -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as reply:
        return json.loads(reply.read() or b"{}")


class Clients:
    """Clients of a server, which request answers of ``tokens`` tokens."""

    def __init__(self, url: str, model: str, tokens: int):
        self.url, self.model, self.tokens = url, model, tokens

    def ask(self, seed: int) -> int:
        """Send a request, and return the number of tokens of its answer."""
        body = {"model": self.model, "messages": [question(seed)], "max_tokens": self.tokens}
        reply = fetch(f"{self.url}/chat/completions", body)
        return reply["usage"]["completion_tokens"]

    def at_once(self, number: int, clients: int, first: int) -> dict:
        """Send ``number`` requests by concurrent clients; return answers and tokens per second."""
        start = time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            tokens = sum(pool.map(self.ask, range(first, first + number)))
        seconds = time.perf_counter() - start
        return {
            "answers_per_s": round(number / seconds, 3),
            "tokens_per_s": round(tokens / seconds, 1),
        }


class Watch(threading.Thread):
    """A thread that requests ``/health`` four times a second and stores the response times."""

    def __init__(self, url: str):
        super().__init__(daemon=True)
        self.url, self.seconds, self.ends = url, [], threading.Event()

    def run(self) -> None:
        while not (self.seconds and self.ends.wait(0.25)):
            start = time.perf_counter()
            fetch(self.url.removesuffix("/v1") + "/health", timeout=60)
            self.seconds.append(time.perf_counter() - start)


def open_partial_requests(port: int, count: int) -> list[socket.socket]:
    """Open connections with unfinished requests. The server may close some of them."""
    opened = []
    for number in range(count):
        connection = socket.create_connection(("127.0.0.1", port))
        with suppress(OSError):
            connection.sendall(PARTIAL_REQUESTS[number % len(PARTIAL_REQUESTS)])
        opened.append(connection)
    return opened


def hostile_bodies(model: str) -> dict[str, bytes]:
    request = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]})
    item, unclosed = '{"a": 1}', request.removesuffix("}")
    return {
        "31 MB of text": request.replace("Hello", "word " * (SIZE // 5)).encode(),
        "31 MB of objects": f'{unclosed}, "a": [{", ".join([item] * (SIZE // 10))}]}}'.encode(),
        "temperature 1e308": f'{unclosed}, "temperature": 1e308}}'.encode(),
    }


def answered_with(url: str, body: bytes) -> int | str:
    """Return a request's status, "closed" for a closed connection, or "no answer" for a timeout."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, http.client.HTTPException) as error:
        timed_out = isinstance(getattr(error, "reason", error), TimeoutError)
        return "no answer" if timed_out else "closed"


def gpu(field: str = "name") -> str | None:
    """Return a field of nvidia-smi for the GPU that the server uses; None without a GPU."""
    if shutil.which("nvidia-smi") is None:
        return None
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    options = [f"--id={first}", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    command = ["nvidia-smi", *options]
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
    clients.at_once(options.clients, options.clients, 10**6)  # warm-up
    alone = clients.at_once(options.alone, 1, 0)
    together = clients.at_once(2 * options.clients, options.clients, 1000)
    before = gpu("memory.used")
    address, bodies = f"{url}/chat/completions", hostile_bodies(clients.model)
    connections, watch = open_partial_requests(options.port, 400), Watch(url)
    watch.start()
    with ThreadPoolExecutor(AT_ONCE * len(bodies)) as pool:
        sent = {
            name: [pool.submit(answered_with, address, body) for _ in range(AT_ONCE)]
            for name, body in bodies.items()
        }
        many = clients.at_once(options.requests, options.clients, 2000)
    watch.ends.set()
    watch.join()
    for connection in connections:
        connection.close()
    return {
        "hostile": {
            name: sorted({str(answer.result()) for answer in answers})
            for name, answers in sent.items()
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
    parser.add_argument("model", nargs="?", help="the model to serve (default: a tiny one)")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--weights", help="as for serve")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--alone", type=int, default=6, help="requests one after the other")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument(
        "--out", type=Path, required=True, help="JSON file to which the row is appended"
    )
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
    settings = {name: getattr(options, name) for name in ("weights", "clients", "new_tokens")}
    row = {"engine": options.engine, "model": Path(model).name, **settings, "gpu": gpu(), **row}
    rows = json.loads(options.out.read_text()) if options.out.exists() else []
    lines = ",\n".join(map(json.dumps, [*rows, row]))
    options.out.write_text(f"[\n{lines}\n]\n")
    print(json.dumps(row))


if __name__ == "__main__":
    main()
