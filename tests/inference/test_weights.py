"""Weights in fewer bytes: which are, which stay as they are, and what is refused."""

import pytest
import torch

from glm4v_patched.cli import main
from glm4v_patched.inference import loading
from glm4v_patched.inference.answering import Answerer
from glm4v_patched.inference.loading import load
from glm4v_patched.inference.questions import Generation, read_questions
from glm4v_patched.inference.source import WEIGHTS, find_source
from glm4v_patched.remote.loss import OutputLayer


def has_package(monkeypatch) -> None:
    from glm4v_patched.inference import source

    monkeypatch.setattr(source, "require_packages", lambda choice: None)


@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_layers_have_8_bits_and_the_rest_stays_as_it_is(files, weights):
    pytest.importorskip("torchao", reason="torchao is missing: pip install torchao")
    base = find_source(str(files.model), weights=weights)
    held, plain = load(base, "cpu", weights), load(base, "cpu")
    generation = Generation(max_new_tokens=4)
    answerers = [Answerer(loaded, generation) for loaded in (held, plain)]
    prompts = [question.prompt for question in read_questions(files.data)][:2]
    changed = set()
    for name, module in plain.model.named_modules():
        if isinstance(module, torch.nn.Linear):
            weight = held.model.get_submodule(name).weight
            if type(weight.data) is not type(module.weight.data):
                changed.add(name.split(".layers")[0])
            else:
                assert torch.equal(weight, module.weight), name
    assert changed == {"transformer.encoder", "transformer.vision.transformer"}
    batch = answerers[0].encode(prompts)
    with torch.no_grad():
        got, want = (answerer.model(**batch).logits for answerer in answerers)
    error = (got - want).norm() / want.norm()
    assert 0 < error < 0.1
    assert len(answerers[0].answer(prompts)) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--load-in-8bit"], "--load-in-8bit needs a GPU, and --device is cpu"),
        (["--load-in-4bit"], "--load-in-4bit needs a GPU, and --device is cpu"),
    ],
)
@pytest.mark.parametrize("command", ["chat", "serve"])
def test_what_needs_a_gpu_is_told(files, monkeypatch, capsys, command, arguments, message):
    monkeypatch.setattr(loading, "load", lambda *_: pytest.fail("the model was loaded"))
    assert main([command, str(files.model), "--device", "cpu", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_two_ways_at_once_are_refused(files, capsys):
    with pytest.raises(SystemExit):
        main(["chat", str(files.model), "--load-in-8bit", "--torchao", "int8"])
    assert "--torchao: not allowed with argument --load-in-8bit" in capsys.readouterr().err


def test_torchao_under_adapters_is_refused(files, monkeypatch):
    has_package(monkeypatch)
    with pytest.raises(ValueError, match="--torchao int8 does not take adapters .*: merge them"):
        find_source(str(files.adapters), weights="int8")
    assert find_source(str(files.adapters), weights="8bit").adapters == files.adapters


@pytest.mark.parametrize("weights", sorted(WEIGHTS))
def test_a_missing_package_is_named(files, monkeypatch, weights):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    package = "torchao" if weights in ("int8", "fp8") else "bitsandbytes"
    with pytest.raises(RuntimeError, match=f"needs .*{package}"):
        find_source(str(files.model), weights=weights)


@pytest.mark.gpu
@pytest.mark.parametrize("weights", sorted(WEIGHTS))
def test_each_way_answers_on_a_gpu(files, weights):
    package = "torchao" if weights in ("int8", "fp8") else "bitsandbytes"
    pytest.importorskip(package, reason=f"{package} is missing: pip install {package}")
    base = find_source(str(files.model), weights=weights)
    loaded = load(base, "cuda", weights)
    prompts = [question.prompt for question in read_questions(files.data)][:2]
    assert len(Answerer(loaded, Generation(max_new_tokens=4)).answer(prompts)) == 2
    assert type(loaded.model.transformer.output_layer) is OutputLayer
