"""Logits that are NaN or infinite are no answer: each command ends with one line that names why."""

import asyncio
import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm4v_patched.cli import main
from glm4v_patched.inference.answer_worker import Answerer
from glm4v_patched.inference.decoding import loop
from glm4v_patched.inference.nonfinite import (
    NonFiniteLogits,
    describe_cause,
    has_finite_logits,
    require_finite_logits,
)
from glm4v_patched.inference.questions import Generation
from glm4v_patched.inference.serving.answer_queue import AnswerQueue
from glm4v_patched.inference.serving.app import make_app
from glm4v_patched.inference.serving.limits import ServerLimits
from glm4v_patched.models.find import find_source
from glm4v_patched.models.loading import load_with_processor
from tests.helpers.serving import call

WEIGHT = "transformer.encoder.layers.1.mlp.dense_4h_to_h.weight"
CAUSE = f"the logits are NaN or infinite, because the weight {WEIGHT} is"
ASKED = [{"role": "user", "content": "What is it?"}]


@pytest.fixture(scope="module")
def diverged(files, tmp_path_factory) -> Path:
    """A model with an infinite number in one weight and a NaN in another."""
    folder = Path(shutil.copytree(files.model, tmp_path_factory.mktemp("diverged") / "model"))
    weights = load_file(folder / "model.safetensors")
    weights[WEIGHT].view(-1)[3] = float("inf")
    weights["transformer.output_layer.weight"].view(-1)[-1] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def loaded(diverged):
    return load_with_processor(find_source(str(diverged)), "cpu")


def test_each_command_ends_with_one_line_that_names_the_weight(
    diverged, referenced, tmp_path, capsys, monkeypatch
):
    options = [str(diverged), "--device", "cpu", "--max-new-tokens", "4"]
    data = ["--data", str(referenced)]
    for command in (
        ["answer", *options, *data, "--out", str(tmp_path / "answers.jsonl"), "--num-beams", "2"],
        ["evaluate", *options, *data],
        ["evaluate", *options, *data, "--out", str(tmp_path / "evaluation"), "--temperature", "1"],
        ["chat", *options],
    ):
        monkeypatch.setattr("sys.stdin", io.StringIO("What is it?\n"))
        assert main(command) == 1
        captured = capsys.readouterr()
        message = captured.err.partition("glm4v-patched: ")[2].strip()
        assert CAUSE in message and len(message.splitlines()) == 1, message
        assert "!" not in captured.out
    assert not any(path.stat().st_size for path in tmp_path.rglob("*.jsonl"))


def test_a_request_gets_the_line_and_the_log_has_it_once(loaded, capsys):
    broken = Answerer(loaded, Generation(max_new_tokens=6))
    queue = AnswerQueue({"m": broken})
    app = make_app(queue, broken.generation, ServerLimits(hosts=["localhost"]), lambda: None)
    body = {"model": "m", "messages": ASKED, "max_tokens": 4}
    for request_body in (body, body | {"stream": True}):
        status, reply = asyncio.run(call(app, request_body))
        assert status == 500 and CAUSE in reply["error"]["message"]
        assert capsys.readouterr().out.count(CAUSE) == 1
    queue.stop()


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("generation", [{}, {"temperature": 1.0}])
def test_no_token_of_such_logits_is_handed_on(loaded, monkeypatch, late, generation):
    monkeypatch.setitem(loop.MAX_LAG, "cpu", late)

    class Put:
        def __init__(self):
            self.given = []

        def put(self, tokens):
            self.given.append(tokens)

        def end(self):
            self.given.append("end")

    for cache in ("static", "dynamic"):
        streamer = Put()
        answerer = Answerer(loaded, Generation(max_new_tokens=6, **generation), cache)
        with pytest.raises(NonFiniteLogits, match=CAUSE):
            answerer.answer([ASKED], streamer=streamer)
        assert len(streamer.given) == 1  # the prompt


@pytest.mark.parametrize("cache", ["static", "dynamic"])
@pytest.mark.parametrize("ends_at", [0, 2, 5])
def test_logits_that_become_infinite_on_the_way_are_no_answer(answerer, cache, ends_at):
    """The last ones are looked at again: NaN stays in a cache."""
    answerer = Answerer((answerer.model, answerer.processor), answerer.generation, cache)
    answerer.eos_token_ids = []
    calls = []

    def spoil(module, arguments, output):
        calls.append(1)
        if len(calls) > ends_at:
            output.logits[-1] = float("nan")

    hook = answerer.model.register_forward_hook(spoil)
    with pytest.raises(NonFiniteLogits, match="the logits are NaN or infinite after the prompt"):
        answerer.answer([ASKED, ASKED])
    hook.remove()
    assert answerer.answer([ASKED])[0].text


def test_what_overflows_is_found_where_it_does(files, adapted):
    inputs = adapted.encode([ASKED])
    model = adapted.model
    name = "transformer.encoder.layers.1.self_attention.query_key_value"
    layer = model.get_submodule(f"base_model.model.{name}")
    before, layer.scaling = layer.scaling, {"default": 1e39}
    try:
        with pytest.raises(NonFiniteLogits) as error:
            require_finite_logits(model, inputs)
    finally:
        layer.scaling = before
    message = str(error.value)
    assert f"all weights are finite, but the output of {name} is not, in float32" in message
    assert message.endswith("; adapters are multiplied by 1e+39 (lora_alpha / r)")
    assert len(model._forward_hooks) == 0
    require_finite_logits(model, inputs)


def test_a_buffer_such_as_the_scale_of_a_quantized_layer_is_named_like_a_weight():
    layer = torch.nn.Linear(2, 2)
    layer.register_buffer("scale", torch.tensor(float("nan")))
    assert "because the weight scale is" in describe_cause(layer, {})


def test_images_are_blamed_where_they_are_the_cause(files, answerer):
    image = json.loads(files.data.read_text().splitlines()[0])["messages"][0]
    image = image | {"image": str(files.data.parent / image["image"])}
    inputs = answerer.encode([[image]])
    inputs["pixel_values"][0, 0, 0, 0] = float("nan")
    assert not torch.isfinite(answerer.model(**inputs).logits[0, -1]).all()
    message = describe_cause(answerer.model, inputs)
    assert message == (
        "the logits are NaN or infinite, because the input pixel_values is NaN or infinite; all "
        "weights are finite"
    )
    with pytest.raises(NonFiniteLogits, match="because the input pixel_values is"):
        answerer.answer_encoded(inputs)


def test_a_settings_number_that_makes_all_of_it_nan_ends_each_command(files, tmp_path, capsys):
    for of_what, file, change, named in (
        (files.model, "config.json", {"rope_ratio": float("nan")}, "rope_ratio"),
        (files.adapters, "adapter_config.json", {"lora_alpha": 1e308}, "lora_alpha is 1e+308"),
    ):
        folder = Path(shutil.copytree(of_what, tmp_path / file))
        values = json.loads((folder / file).read_text()) | change
        (folder / file).write_text(json.dumps(values))
        out = ["--out", str(tmp_path / "out")]
        data = ["--data", str(files.data)]
        for command in (
            ["answer", str(folder), *data, *out, "--device", "cpu"],
            ["evaluate", str(folder), *data, "--device", "cpu"],
            ["chat", str(folder), "--device", "cpu"],
            ["serve", str(folder), "--device", "cpu", "--port", "0"],
            *([["merge", str(folder), *out]] if "adapter" in file else []),
        ):
            assert main(command) == 1
            message = capsys.readouterr().err.partition("glm4v-patched: ")[2].strip()
            assert named in message and file in message and len(message.splitlines()) == 1, message


def test_one_number_among_the_logits_of_a_row_suffices():
    nan, inf = float("nan"), float("inf")
    rows = {(1, nan, 2): False, (1, inf, 2): False, (1, -inf, 2): True, (-inf,) * 3: False}
    assert has_finite_logits(torch.tensor([*rows])).tolist() == [*rows.values()]
