"""A tiny cogagent answers, scores and merges as the glm-4v that it is made of.

tests/models/test_adopt.py loads one without this package, tests/patch/test_auto_classes.py with
``apply()``.
"""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from glm4v_patched.cli import main
from glm4v_patched.models.find import find_source
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.cogagent import permute_file, permuted, write_cogagent
from tests.helpers.tiny import update_json

ON_CPU = ["--device", "cpu", "--max-new-tokens", "6"]


class Pair(NamedTuple):
    """A glm-4v's folder and that of the cogagent."""

    glm4v: Path
    cogagent: Path


@pytest.fixture(scope="module")
def models(files, tmp_path_factory) -> Pair:
    folder = tmp_path_factory.mktemp("cogagent")
    return Pair(files.model, write_cogagent(files.model, folder / "cogagent"))


@pytest.fixture(scope="module")
def adapters(files, models) -> Pair:
    folder = models.cogagent.with_name("adapters")
    shutil.copytree(files.adapters, folder)
    update_json(folder / "adapter_config.json", base_model_name_or_path=str(models.cogagent))
    permute_file(folder / "adapter_model.safetensors", models.glm4v)
    return Pair(files.adapters, folder)


def test_answers_and_scores_are_equal(adapters, referenced, tmp_path, capsys):
    answers, scores = [], []
    for name, model in zip(Pair._fields, adapters, strict=True):
        out = tmp_path / name
        data = ["--data", str(referenced)]
        assert main(["evaluate", str(model), *data, "--out", str(out), *ON_CPU]) == 0
        answers.append((out / "answers.jsonl").read_text().splitlines())
        metrics = json.loads((out / "metrics.json").read_text())
        scores.append({k: v for k, v in metrics.items() if k not in ("model", "settings")})
    assert answers[0] == answers[1] and len({json.loads(x)["answer"] for x in answers[0]}) > 2
    assert scores[0] == scores[1] and len(scores[0]) > 1


def test_merged_weights_are_permuted_alike(models, adapters, tmp_path):
    for name, folder in zip(Pair._fields, adapters, strict=True):
        assert main(["merge", str(folder), "--out", str(tmp_path / name)]) == 0
    merged = [load_file(tmp_path / name / "model.safetensors") for name in Pair._fields]
    config = GLM4VForCausalLM.from_pretrained(models.glm4v).config
    for name, expected in permuted(merged[0], config).items():
        torch.testing.assert_close(merged[1][name], expected, rtol=1e-6, atol=1e-6)


def test_only_a_model_with_the_published_code_is_noted_as_not_compared(models, tmp_path, capsys):
    published = Path(shutil.copytree(models.cogagent, tmp_path / "published"))
    architectures = ["ChatGLMForConditionalGeneration"]
    update_json(published / "config.json", architectures=architectures)
    for model, noted in ((models.glm4v, 0), (models.cogagent, 0), (published, 1)):
        find_source(str(model))
        assert capsys.readouterr().err.count("`glm4v-patched compare FOLDER`") == noted
