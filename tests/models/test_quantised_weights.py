"""Weights in fewer bytes: which are, which stay as they are, and what is refused."""

import gc
import json
import weakref

import pytest
import torch
from torch.nn import Linear

from glm4v_patched.bench import generation_worker
from glm4v_patched.cli import main
from glm4v_patched.engine import trainable
from glm4v_patched.inference.answer_worker import Answerer
from glm4v_patched.inference.questions import Generation, read_questions
from glm4v_patched.models import find, loading
from glm4v_patched.models.find import find_source
from glm4v_patched.models.loading import load
from glm4v_patched.models.quantised_weights import WEIGHTS, kept_cache
from tests.helpers.tiny import golden_json, tiny_model


def needs(weights: str) -> None:
    package = "torchao" if WEIGHTS[weights].package == "torchao" else "bitsandbytes"
    pytest.importorskip(package, reason=f"{package} is missing: pip install {package}")


def asked(files) -> list:
    return [question.prompt for question in read_questions(files.data)][:2]


@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_layers_have_8_bits_and_the_rest_stays_as_it_is(files, weights):
    needs(weights)
    base = find_source(str(files.model), weights=weights)
    held, plain = load(base, "cpu", weights), load(base, "cpu")
    answerers = [Answerer(loaded, Generation(max_new_tokens=4)) for loaded in (held, plain)]
    changed = set()
    for name, module in plain.model.named_modules():
        if isinstance(module, Linear):
            weight = held.model.get_submodule(name).weight
            if type(weight.data) is not type(module.weight.data):
                changed.add(name.split(".layers")[0])
            else:
                assert torch.equal(weight, module.weight), name
    assert changed == {"transformer.encoder", "transformer.vision.transformer"}
    batch = answerers[0].encode(asked(files))
    with torch.no_grad():
        got, want = (answerer.model(**batch).logits for answerer in answerers)
    assert 0 < (got - want).norm() / want.norm() < 0.1
    assert len(answerers[0].answer(asked(files))) == 2


def built(tmp_path, weights: str | None):
    """As the bench builds it."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(golden_json("config.json")))
    settings = {"config": str(config), "attn_implementation": "sdpa", "compile_layers": False}
    return generation_worker.build(settings | {"device": "cpu", "weights": weights})


@pytest.mark.parametrize("weights", sorted(WEIGHTS))
def test_bytes_are_counted_with_scales(tmp_path, weights):
    needs(weights)
    layer = built(tmp_path, weights).transformer.encoder.layers[0].self_attention.query_key_value
    # By hand: 128 rows of 64 numbers, with their scales.
    told = {"int8": 8832, "fp8": 8704, "8bit": 8704, "4bit": 5316}
    assert generation_worker.bytes_held(layer.weight) == told[weights]


@pytest.mark.parametrize("bits", [4, 8])
def test_a_layer_makes_room_for_its_successor(monkeypatch, bits):
    """Weights that are on the device already: never all of both kinds."""
    monkeypatch.setattr(trainable, "require_packages", lambda *choice: None)
    model, left = tiny_model(), []
    alive = [m.weight for n, m in model.named_modules() if type(m) is Linear and ".layers." in n]
    alive = [weakref.ref(weight) for weight in alive]

    def replaced(linear):
        gc.collect()
        left.append(sum(each() is not None for each in alive))
        return torch.nn.Identity()

    monkeypatch.setattr(trainable, f"_in_{bits}_bits", replaced)
    trainable.quantise(model, "cpu", bits)
    assert len(left) == len(alive) > 8
    # The one before may still be there.
    assert all(found <= len(alive) - done + 1 for done, found in enumerate(left))


REFUSED = [
    ("answer", ["--cache", "static", "--load-in-4bit"], "--cache static with --load-in-4bit"),
    ("chat", ["--device", "cpu", "--load-in-8bit"], "--load-in-8bit needs a GPU"),
    ("serve", ["--device", "cpu", "--load-in-8bit", "--port", "0"], "--load-in-8bit needs a GPU"),
]


@pytest.mark.parametrize(("command", "arguments", "named"), REFUSED)
def test_ways_that_the_device_or_the_cache_do_not_allow_are_refused(
    files, tmp_path, monkeypatch, capsys, command, arguments, named
):
    monkeypatch.setattr(loading, "load", lambda *_: pytest.fail("the model was loaded"))
    if command == "answer":
        arguments = [*arguments, "--data", str(files.data), "--out", str(tmp_path / "out.jsonl")]
    assert main([command, str(files.model), *arguments]) == 1
    assert named in capsys.readouterr().err


def test_steps_that_are_not_compiled_keep_a_dynamic_cache():
    assert kept_cache("auto", None, otherwise="static") == "static"
    assert kept_cache("auto", "int8", otherwise="static") == "static"
    assert kept_cache("auto", "8bit", otherwise="static") == "dynamic"
    assert kept_cache("dynamic", "int8", otherwise="static") == "dynamic"


def test_torchao_under_adapters_is_refused(files, monkeypatch):
    monkeypatch.setattr(find, "require_packages", lambda *choice: None)
    with pytest.raises(ValueError, match="--torchao int8 does not take adapters .*: merge them"):
        find_source(str(files.adapters), weights="int8")
    assert find_source(str(files.adapters), weights="8bit").adapters == files.adapters


@pytest.mark.parametrize("weights", sorted(WEIGHTS))
def test_a_missing_package_is_named(files, monkeypatch, weights):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    package = "torchao" if weights in ("int8", "fp8") else "bitsandbytes"
    with pytest.raises(RuntimeError, match=f"^{WEIGHTS[weights].option} needs .*{package}"):
        find_source(str(files.model), weights=weights)


@pytest.mark.gpu
@pytest.mark.parametrize("weights", sorted(WEIGHTS))
def test_each_way_answers_on_a_gpu(files, weights):
    needs(weights)
    loaded = load(find_source(str(files.model), weights=weights), "cuda", weights)
    assert len(Answerer(loaded, Generation(max_new_tokens=4)).answer(asked(files))) == 2
    assert type(loaded.model.transformer.output_layer) is torch.nn.Linear
