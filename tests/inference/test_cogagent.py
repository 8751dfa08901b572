"""A tiny cogagent through all commands: its answers are those of the glm-4v that it is made of."""

import asyncio
import io
import json
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from glm4v_patched.cli import main
from glm4v_patched.inference.questions import Generation
from glm4v_patched.inference.serving.answer_queue import AnswerQueue
from glm4v_patched.inference.serving.app import make_app
from glm4v_patched.inference.serving.limits import ServerLimits
from glm4v_patched.models.base import ModelSource, identify
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.cogagent import permuted, write_cogagent, write_cogagent_adapters
from tests.helpers.fresh_process import run_without_package
from tests.helpers.processes import cpu_environment, run_with_limit
from tests.helpers.serving import about, call, data_url, png

ON_CPU = ["--device", "cpu", "--max-new-tokens", "6"]

WITHOUT_PACKAGE = 'import sys; sys.modules["glm4v_patched"] = None  # cannot be imported'
# Takes the folders of a cogagent and of a glm-4v.
SAME_LOGITS = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoProcessor

logits = []
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    with torch.no_grad():
        logits.append(model(**processor(text="Hello, which shapes?", return_tensors="pt")).logits)
    assert model.config.original_rope is (folder == sys.argv[2])
assert torch.allclose(*logits, atol=1e-4), (logits[0] - logits[1]).abs().max()
"""


class Pair(NamedTuple):
    """A glm-4v's folder and that of the cogagent."""

    glm4v: Path
    cogagent: Path


def as_published(model: Path, folder: Path) -> Path:
    """Copy a cogagent; its config names the published class."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["ChatGLMForConditionalGeneration"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def models(files, tmp_path_factory) -> Pair:
    folder = tmp_path_factory.mktemp("cogagent")
    return Pair(files.model, write_cogagent(files.model, folder / "cogagent"))


@pytest.fixture(scope="module")
def adapters(files, models) -> Pair:
    folder = models.cogagent.with_name("adapters")
    return Pair(files.adapters, write_cogagent_adapters(files.adapters, folder, *models))


@pytest.mark.parametrize("kind", ["models", "adapters"])
def test_answers_and_scores_are_equal(request, kind, referenced, tmp_path, capsys):
    lines, scores = [], []
    for name, model in zip(Pair._fields, request.getfixturevalue(kind), strict=True):
        out = tmp_path / name
        data = ["--data", str(referenced)]
        assert main(["answer", str(model), *data, "--out", f"{out}.jsonl", *ON_CPU]) == 0
        lines.append(Path(f"{out}.jsonl").read_text())
        assert main(["evaluate", str(model), *data, "--out", str(out), *ON_CPU]) == 0
        metrics = json.loads((out / "metrics.json").read_text())
        scores.append(
            {key: value for key, value in metrics.items() if key not in ("model", "settings")}
        )
    answers = {json.loads(line)["answer"] for line in lines[0].splitlines()}
    assert lines[0] == lines[1] and len(answers) > 2
    assert scores[0] == scores[1] and len(scores[0]) > 1


def test_chats_are_equal(adapters, tmp_path, monkeypatch, capsys):
    Image.new("RGB", (56, 56), "orange").save(tmp_path / "cat.png")
    outputs = []
    for model in adapters:
        monkeypatch.setattr("sys.stdin", io.StringIO("What is it?\nAnd now?\n"))
        assert main(["chat", str(model), "--image", str(tmp_path / "cat.png"), *ON_CPU]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] and len(outputs[0]) > 20


def test_served_answers_are_equal(adapters, load_answerer):
    body = {"model": "tiny", "messages": about(data_url(png())), "max_tokens": 6}
    replies = []
    for model in adapters:
        queue = AnswerQueue({"tiny": load_answerer(model)})
        app = make_app(queue, Generation(max_new_tokens=6), ServerLimits(), print)
        status, reply = asyncio.run(call(app, body))
        queue.stop()
        queue.join()
        assert status == 200, reply
        replies.append(reply["choices"][0]["message"]["content"])
    assert replies[0] == replies[1] and replies[0]


def test_merged_weights_are_permuted_alike_and_load_without_this_package(
    models, adapters, tmp_path
):
    for name, folder in zip(Pair._fields, adapters, strict=True):
        assert main(["merge", str(folder), "--out", str(tmp_path / name)]) == 0
    merged = [load_file(tmp_path / name / "model.safetensors") for name in Pair._fields]
    config = GLM4VForCausalLM.from_pretrained(models.glm4v).config
    for name, expected in permuted(merged[0], config).items():
        torch.testing.assert_close(merged[1][name], expected, rtol=1e-6, atol=1e-6)
    folders = [str(tmp_path / name) for name in reversed(Pair._fields)]
    run_without_package(WITHOUT_PACKAGE + SAME_LOGITS, tmp_path, *folders)


def test_a_script_under_the_run_entry_gets_our_code(models, tmp_path):
    published = as_published(models.cogagent, tmp_path / "published")
    (tmp_path / "script.py").write_text(
        f'{SAME_LOGITS}\nassert type(model).__module__.startswith("glm4v_patched")'
    )
    command = [sys.executable, "-m", "glm4v_patched.run", "script.py", published, models.glm4v]
    ended = run_with_limit([*map(str, command)], 300, cpu_environment(), tmp_path)
    assert ended.status == 0, ended.output[-3000:]


def test_doctor_checks_a_recipe_for_it(models, referenced, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"{{model: {models.cogagent}, out: {tmp_path}/out, trained: lora_all, "
        f"data: {{train: {referenced}}}, trainer: {{max_steps: 1, learning_rate: 1.0e-3, "
        "per_device_train_batch_size: 1}}"
    )
    main(["doctor", str(recipe), "--device", "cpu", "--json"])
    findings = {x["check"]: x for x in json.loads(capsys.readouterr().out)["findings"]}
    assert findings["model"]["verdict"] == findings["data"]["verdict"] == "ok"


def test_only_a_model_with_the_published_code_is_noted_as_not_compared(
    models, referenced, tmp_path, capsys
):
    published = as_published(models.cogagent, tmp_path / "published")
    noted = []
    for number, model in enumerate((*models, published)):
        out = ["--out", str(tmp_path / f"{number}.jsonl")]
        assert main(["answer", str(model), "--data", str(referenced), *out, *ON_CPU]) == 0
        noted.append(capsys.readouterr().err.count("`glm4v-patched compare FOLDER`"))
    assert noted == [0, 0, 1]


def test_adapters_of_one_rotation_are_refused_on_the_other(adapters, models, tmp_path, capsys):
    """If they have a training's record, as those of a recipe."""
    folder = shutil.copytree(adapters.glm4v, tmp_path / "adapters")
    record = {"base": identify(ModelSource(str(models.glm4v)))}
    (folder / "training.json").write_text(json.dumps(record))
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(models.cogagent)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    assert main(["chat", str(folder), *ON_CPU]) == 1
    message = capsys.readouterr().err
    assert "has changed since the adapters in" in message and "config.json: " in message
