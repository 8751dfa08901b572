"""Weights in fewer bytes: which are, which stay as they are, and what is refused."""

import gc
import importlib.metadata
import weakref
from functools import partial

import pytest
import torch
from torch.nn import Linear

from glm4v_patched.cli import main
from glm4v_patched.engine import fp8, trainable
from glm4v_patched.engine.kernels.fp8_linear import Fp8StoredLinear
from glm4v_patched.engine.options import REQUIRED_PACKAGES, LoraOptions
from glm4v_patched.inference.answer_worker import Answerer
from glm4v_patched.inference.questions import Generation, read_questions
from glm4v_patched.models import loading
from glm4v_patched.models.find import find_source
from glm4v_patched.models.loading import load_with_processor
from glm4v_patched.models.quantized_weights import WEIGHT_FORMATS, choose_cache_implementation
from tests.helpers.cogagent import write_cogagent
from tests.helpers.tiny import expanded_image, random_pixels, text, tiny_model


def asked(files) -> list:
    return [question.prompt for question in read_questions(files.data)][:2]


@pytest.mark.parametrize("kind", ["model", "adapters"])
def test_only_layers_of_both_towers_are_stored_in_fp8(files, monkeypatch, kind):
    monkeypatch.setattr(fp8, "_allow_cpu", True)
    base = find_source(str(getattr(files, kind)), weights="fp8")
    in_fp8, plain = load_with_processor(base, "cpu", "fp8"), load_with_processor(base, "cpu")
    assert not any(weight.requires_grad for weight in plain.model.parameters())
    held_layers = set()
    for name, module in plain.model.named_modules():
        if isinstance(module, Linear):
            other = in_fp8.model.get_submodule(name)
            if type(other) is Fp8StoredLinear:
                tower = "tower" if ".vision." in name else "language"
                held_layers.add(f"{tower} {name.removesuffix('.base_layer').rpartition('.')[2]}")
            else:
                assert torch.equal(other.weight, module.weight), name
    tower = {f"tower {name}" for name in ("query_key_value", "fc1", "fc2")}
    names = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
    assert held_layers == tower | {f"language {name}" for name in names}
    answerers = [Answerer(loaded, Generation(max_new_tokens=4)) for loaded in (in_fp8, plain)]
    batch = answerers[0].encode(asked(files))
    with torch.no_grad():
        actual, want = (answerer.model(**batch).logits for answerer in answerers)
    assert 0 < (actual - want).norm() / want.norm() < 0.2
    assert len(answerers[0].answer(asked(files))) == 2


def test_adapters_load_onto_a_model_that_is_stored_in_fp8(tmp_path, monkeypatch):
    """As a server puts several on one model."""
    monkeypatch.setattr(fp8, "_allow_cpu", True)
    torch.manual_seed(0)
    lora = LoraOptions(targets=("dense_h_to_4h", "dense_4h_to_h", "fc1", "fc2"))
    trained = trainable.select_weights(tiny_model(torch.bfloat16), "lora_all", lora)
    for name, weight in trained.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.05)
    trained.save_pretrained(tmp_path)

    def build(**options):
        return tiny_model(torch.bfloat16)

    row = torch.tensor([[*text(3), *expanded_image()]])
    with_it = {"input_ids": row, "pixel_values": random_pixels(1).bfloat16()}
    later = trainable.load_adapters(loading.build_on_device(build, "cpu", "fp8"), tmp_path)
    before = loading.build_on_device(build, "cpu", "fp8", tmp_path)
    none = loading.build_on_device(build, "cpu", "fp8")
    with torch.no_grad():
        actual, want, without = (model.eval()(**with_it).logits for model in (later, before, none))
    assert (actual - want).norm() < 0.5 * (without - want).norm()


@pytest.mark.parametrize("way", [4, 8, "fp8"])
def test_quantizing_frees_each_old_weight_before_the_next_layer(monkeypatch, way):
    """Weights that are on the device already: never all of both kinds."""
    monkeypatch.setattr(fp8, "_allow_cpu", True)
    model, alive_counts, hold = tiny_model(), [], Fp8StoredLinear.quantize_weight
    layers = [m for n, m in model.named_modules() if type(m) is Linear and ".layers." in n]
    alive = [weakref.ref(layer.weight) for layer in layers]
    del layers

    def replaced(linear, kind):
        gc.collect()
        alive_counts.append(sum(weight() is not None for weight in alive))
        return torch.nn.Identity() if kind == way else None

    def held(linear, stores_transposed):
        replaced(linear, None)
        hold(linear, stores_transposed)

    monkeypatch.setattr(trainable, "_make_quantized", replaced)
    monkeypatch.setattr(Fp8StoredLinear, "quantize_weight", held)
    if way == "fp8":
        loading.build_on_device(lambda: model, "cpu", "fp8")
    else:
        trainable.quantize_linear_layers(model, "cpu", way)
        assert len(alive_counts) == len(alive)
    assert len(alive_counts) > 8
    # The one before may still be there.
    assert all(count <= len(alive) - n + 1 for n, count in enumerate(alive_counts))


def test_bitsandbytes_skips_layers_outside_of_both_towers(monkeypatch):
    """As those of one that is quantized when it is built."""
    # Which transformers 4.57 asks for, of bitsandbytes.
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "1.0")
    quantization = trainable.quantization_options(torch.bfloat16, "cpu")["quantization_config"]
    for name, module in tiny_model().named_modules():
        if type(module) is Linear:
            left_out = any(name.startswith(one) for one in quantization.llm_int8_skip_modules)
            assert left_out == (".layers." not in name), name


REFUSED = [
    ("answer", ["--cache", "static", "--weights", "4bit"], "--cache static with --weights 4bit"),
    ("answer", ["--cache", "static", "--weights", "8bit"], "--cache static with --weights 8bit"),
    ("chat", ["--device", "cpu", "--weights", "8bit"], "--weights 8bit needs a GPU"),
    ("serve", ["--device", "cpu", "--weights", "fp8", "--port", "0"], "--weights fp8 needs a GPU"),
]


@pytest.mark.parametrize(("command", "arguments", "named"), REFUSED)
def test_weights_that_the_device_or_cache_does_not_support_are_refused(
    files, tmp_path, monkeypatch, capsys, command, arguments, named
):
    monkeypatch.setattr(
        loading, "load_with_processor", lambda *_: pytest.fail("the model was loaded")
    )
    if command == "answer":
        arguments = [*arguments, "--data", str(files.data), "--out", str(tmp_path / "out.jsonl")]
    assert main([command, str(files.model), *arguments]) == 1
    assert named in capsys.readouterr().err


def test_quantized_weights_get_a_dynamic_cache():
    assert choose_cache_implementation("auto", None, default="static") == "static"
    assert choose_cache_implementation("auto", "fp8", default="static") == "static"
    assert choose_cache_implementation("auto", "8bit", default="static") == "dynamic"
    assert choose_cache_implementation("dynamic", "fp8", default="static") == "dynamic"
    assert choose_cache_implementation("auto", "compressed-tensors", default="static") == "dynamic"
    with pytest.raises(ValueError, match="--cache static with a model saved by compressed-tensors"):
        choose_cache_implementation("static", "compressed-tensors", default="static")


def test_a_missing_package_or_gpu_is_named(files, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="fp8 needs a GPU"):
        loading.build_on_device(partial(pytest.fail, "the model was built"), "cuda", "fp8")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="^--weights 4bit needs .*bitsandbytes"):
        find_source(str(files.model), weights="4bit")


@pytest.mark.gpu
@pytest.mark.parametrize("weights", sorted(WEIGHT_FORMATS))
def test_each_weight_format_answers_on_a_gpu(files, weights):
    if weights in REQUIRED_PACKAGES:
        reason = "bitsandbytes is missing: pip install bitsandbytes"
        pytest.importorskip("bitsandbytes", reason=reason)
    loaded = load_with_processor(find_source(str(files.model), weights=weights), "cuda", weights)
    assert len(Answerer(loaded, Generation(max_new_tokens=4)).answer(asked(files))) == 2
    assert type(loaded.model.transformer.output_layer) is torch.nn.Linear


@pytest.mark.gpu
@pytest.mark.parametrize("weights", [None, *sorted(WEIGHT_FORMATS)])
def test_a_cogagent_on_a_gpu_computes_what_its_glm_4v_does(files, tmp_path, weights):
    """Nothing permutes the channels of quantized weights."""
    if weights in REQUIRED_PACKAGES:
        pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes")
    logits = []
    for folder in (files.model, write_cogagent(files.model, tmp_path / "cogagent")):
        source = find_source(str(folder), weights=weights)
        answerer = Answerer(load_with_processor(source, "cuda", weights), Generation())
        inputs = answerer.encode(asked(files))
        with torch.no_grad():
            logits.append(answerer.model(**inputs).logits.float())
            answerer.model.config.original_rope ^= True
            other_rotation = answerer.model(**inputs).logits.float()
    glm4v, cogagent = logits
    difference, limit = (cogagent - glm4v).norm(), 0.05 * glm4v.norm()
    assert difference < limit and difference < 0.5 * (other_rotation - glm4v).norm()
