"""Record what clients send: ``python -m tests.inference.clients.record NAME COMMAND...``.

COMMAND is ``talks.py`` or ``talks.mjs`` and a client. Address, key and stop are appended to it,
then the arguments after ``--``. Our own server answers, without a model and with numbered ids.
"""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import uvicorn

from tests.helpers.serving import EchoQueue, echo_app, numbered_ids

RECORDED = Path(__file__).parent / "recorded"
STOP = "Turn"
"""With it, the first answer is empty."""


def main(name: str, command: list[str]) -> None:
    requests: list[dict] = []
    app = echo_app(EchoQueue())

    async def recording(scope, receive, send) -> None:
        messages, more = [], scope["type"] == "http" and scope["method"] == "POST"
        while more:
            messages.append(await receive())
            more = messages[-1].get("more_body", False)
        if messages:
            body = json.loads(b"".join(message["body"] for message in messages))
            requests.append({"path": scope["path"], "body": body})

        async def receive_again():
            return messages.pop(0) if messages else await receive()

        await app(scope, receive_again, send)

    with pytest.MonkeyPatch.context() as patch:
        numbered_ids(patch)
        server = uvicorn.Server(uvicorn.Config(recording, port=0, log_level="warning"))
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started:
            thread.join(0.05)
        port = server.servers[0].sockets[0].getsockname()[1]
        at = command.index("--") if "--" in command else len(command)
        arguments = [f"http://127.0.0.1:{port}/v1", "none", STOP]
        ran = subprocess.run([*command[:at], *arguments, *command[at + 1 :]], capture_output=True)
        server.should_exit = True
        thread.join()
    print(ran.stderr.decode()[-3000:])
    answers = json.loads(ran.stdout.splitlines()[-1])  # some clients print more lines before
    print(json.dumps(answers, indent=1))
    lines = ",\n  ".join(json.dumps(request) for request in requests)
    text = f'{{\n "answers": {json.dumps(answers)},\n "requests": [\n  {lines}\n ]\n}}\n'
    (RECORDED / f"{name}.json").write_text(text)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
