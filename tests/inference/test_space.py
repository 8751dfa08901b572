"""``hub_upload/space``: the program and the card of a Space."""

import re
import runpy
import sys
from pathlib import Path

import yaml
from starlette.testclient import TestClient

from tests.helpers.serving import CHAT, about, data_url, png

SPACE = Path(__file__).resolve().parents[2] / "hub_upload" / "space"


def test_the_space_shows_its_page_to_everybody_and_answers(files, served, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["app.py", str(files.model), "0"])
    runpy.run_path(str(SPACE / "app.py"), run_name="__main__")
    with TestClient(served.pop(), "https://any.hf.space") as client:
        assert "the page is http://127.0.0.1:" in capsys.readouterr().out
        headers = client.get("/").headers
        assert "x-frame-options" not in headers
        assert "frame-ancestors https://huggingface.co" in headers["content-security-policy"]
        body = {"model": "demo", "messages": about(data_url(png()))}
        reply = client.post(CHAT, json=body, headers={"Authorization": "Bearer null"}).json()
        assert reply["usage"]["completion_tokens"] > 0


def test_the_card_names_the_port_that_the_page_has():
    card = yaml.safe_load((SPACE / "README.md").read_text().split("---")[1])
    [port] = re.findall(r"else (\d+)\)$", (SPACE / "app.py").read_text(), re.M)
    assert (card["sdk"], card["app_port"]) == ("docker", int(port))
    start = 'CMD ["python", "app.py", "demo_output/trained"]'
    assert (SPACE / "Dockerfile").read_text().splitlines()[-1] == start
