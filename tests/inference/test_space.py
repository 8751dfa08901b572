"""``hub_upload/space``: the folder of a Space, started as its image starts it."""

import re
import sys
import urllib.request
from pathlib import Path

import openai
import yaml

from tests.helpers.processes import serving
from tests.helpers.serving import about, data_url, png

SPACE = Path(__file__).resolve().parents[2] / "hub_upload" / "space"


def test_the_space_shows_its_page_to_everybody_and_answers(files, tmp_path):
    command = [sys.executable, str(SPACE / "app.py"), str(files.model), "0"]
    with serving(command, r"the page is (\S+)/", tmp_path / "log") as (url, _):
        page = urllib.request.urlopen(url, timeout=60)
        assert "x-frame-options" not in page.headers
        assert "frame-ancestors https://huggingface.co" in page.headers["content-security-policy"]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="null", max_retries=0, timeout=60)
        reply = client.chat.completions.create(model="demo", messages=about(data_url(png())))
        assert reply.usage.completion_tokens > 0


def test_the_card_names_the_port_that_the_page_has():
    card = yaml.safe_load((SPACE / "README.md").read_text().split("---")[1])
    [port] = re.findall(r"else (\d+)\)$", (SPACE / "app.py").read_text(), re.M)
    assert (card["sdk"], card["app_port"]) == ("docker", int(port))
    start = 'CMD ["python", "app.py", "demo_output/trained"]'
    assert (SPACE / "Dockerfile").read_text().splitlines()[-1] == start
