"""Weights in fewer bytes: which are, which stay as they are, and what is refused."""

import gc
import json
import weakref
from contextlib import contextmanager
from functools import partial
from math import ceil

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn import Linear
from transformers import CompileConfig, StaticCache
from transformers.quantizers import HfQuantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizer_bnb_8bit import Bnb8BitHfQuantizer

from glm4v_patched.bench import generation_worker
from glm4v_patched.cli import main
from glm4v_patched.engine import trainable
from glm4v_patched.inference.answer_worker import Answerer
from glm4v_patched.inference.questions import Generation, read_questions
from glm4v_patched.models import find, loading
from glm4v_patched.models.find import find_source
from glm4v_patched.models.loading import load
from glm4v_patched.models.quantised_weights import WEIGHTS, kept_cache
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
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


def bytes_of(weights: str, rows: int, columns: int) -> int:
    """Of a matrix in fp32, by hand: numbers, and their scales in fp32."""
    if weights == "4bit":  # a scale of 8 bits for 64 numbers; of 256 scales, one; the two tables
        blocks = ceil(rows * columns / 64)
        return ceil(rows * columns / 2) + blocks + 4 * ceil(blocks / 256) + 4 * 16 + 4 * 256
    # torchao's integers have a zero point of 8 bits, too.
    return rows * columns + rows * {"int8": 5, "fp8": 4, "8bit": 4}[weights]


@pytest.mark.parametrize("weights", sorted(WEIGHTS))
def test_bytes_are_counted_with_scales(tmp_path, weights):
    needs(weights)
    held, plain = built(tmp_path, weights), tiny_model()
    counted = generation_worker.bytes_a_token(plain)
    for name, module in plain.transformer.encoder.named_modules():
        if type(module) is Linear:
            weight = held.transformer.encoder.get_submodule(name).weight
            assert generation_worker.bytes_held(weight) == bytes_of(
                weights, *module.weight.shape
            ), name
            counted += bytes_of(weights, *module.weight.shape) - 4 * module.weight.numel()
    assert generation_worker.bytes_a_token(held) == counted
    # By hand: 128 rows of 64 numbers, with their scales.
    told = {"int8": 8832, "fp8": 8704, "8bit": 8704, "4bit": 5316}
    assert bytes_of(weights, 128, 64) == told[weights]


def test_bytes_of_an_unknown_class_are_not_guessed():
    class Packed(torch.nn.Parameter):
        pass

    with pytest.raises(RuntimeError, match="how many bytes a Packed of .* has is not known"):
        generation_worker.bytes_held(Packed(torch.zeros(2)))


@pytest.mark.parametrize("weights", sorted(WEIGHTS))
def test_what_is_built_holds_its_weights_as_what_is_loaded(tmp_path, weights):
    needs(weights)
    tiny_model().save_pretrained(tmp_path / "model")
    build = partial(GLM4VForCausalLM.from_pretrained, tmp_path / "model", dtype="auto")

    def kinds(model) -> dict[str, tuple]:
        linear = {n: m for n, m in model.named_modules() if isinstance(m, Linear)}
        of = generation_worker.bytes_held
        return {n: (type(m), type(m.weight), of(m.weight)) for n, m in linear.items()}

    assert kinds(built(tmp_path, weights)) == kinds(loading.hold(build, "cpu", weights))


@contextmanager
def makes_room():
    """A model, and a list to which ``count`` adds how many of its layers' weights are there."""
    model = tiny_model()
    linears = [m for n, m in model.named_modules() if type(m) is Linear and ".layers." in n]
    alive, left = [weakref.ref(linear.weight) for linear in linears], []
    del linears

    def count() -> None:
        gc.collect()
        left.append(sum(each() is not None for each in alive))

    yield model, count
    assert len(left) == len(alive) > 8
    # The one before may still be there.
    assert all(found <= len(alive) - done + 1 for done, found in enumerate(left))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_layer_makes_room_for_its_successor(monkeypatch, bits):
    """Weights that are on the device already: never all of both kinds."""
    monkeypatch.setattr(trainable, "require_packages", lambda *choice: None)
    with makes_room() as (model, count):

        def replaced(linear):
            count()
            return torch.nn.Identity()

        monkeypatch.setattr(trainable, f"_in_{bits}_bits", replaced)
        trainable.quantise(model, "cpu", bits)


@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_so_does_one_of_torchao(monkeypatch, weights):
    needs(weights)
    put = Linear.__setattr__
    with makes_room() as (model, count):

        def counted(module, name, value):
            if name == "weight":
                count()
            put(module, name, value)

        monkeypatch.setattr(Linear, "__setattr__", counted)
        loading.hold(lambda: model, "cpu", weights)


@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_a_step_with_weights_of_torchao_is_one_graph(tmp_path, weights):
    needs(weights)
    model = built(tmp_path, weights)
    ids = torch.arange(1, 7).view(2, 3)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False}
    given |= {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
    torch._dynamo.reset()
    counters.clear()
    compiled = CompileConfig(backend="aot_eager", mode=None, fullgraph=True, dynamic=False)
    compiled._compile_all_devices = True
    want = model.generate(**given)
    cache = StaticCache(config=model.config, max_cache_len=16)
    got = model.generate(**given, past_key_values=cache, compile_config=compiled)
    assert torch.equal(got, want)
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def test_transformers_compiles_no_layers_of_bitsandbytes():
    """Why WEIGHTS says so. Where this fails, a static cache may be allowed."""
    assert HfQuantizer.is_compileable.fget(None) is False
    for quantizer in (Bnb4BitHfQuantizer, Bnb8BitHfQuantizer):
        assert quantizer.is_compileable is HfQuantizer.is_compileable
    assert [name for name, held in WEIGHTS.items() if not held.compiled] == ["4bit", "8bit"]


def test_llm_int8_does_not_say_in_each_product_that_it_casts(tmp_path, caplog):
    needs("8bit")
    model = built(tmp_path, "8bit")
    with torch.no_grad():
        model(input_ids=torch.ones(1, 3, dtype=torch.long))
    assert "cast" not in caplog.text


STATIC = ["--cache", "static", "--load-in-4bit"]  # serve has no --cache
ON_CPU = ["--device", "cpu", "--load-in-8bit"]
REFUSED = [(c, STATIC, "--cache static with --load-in-4bit") for c in ("chat", "answer")]
REFUSED += [(c, ON_CPU, "--load-in-8bit needs a GPU") for c in ("chat", "answer", "serve")]


@pytest.mark.parametrize(("command", "arguments", "named"), REFUSED)
def test_ways_that_the_device_or_the_cache_do_not_allow_are_refused(
    files, tmp_path, monkeypatch, capsys, command, arguments, named
):
    monkeypatch.setattr(loading, "load", lambda *_: pytest.fail("the model was loaded"))
    if command == "answer":
        arguments = [*arguments, "--data", str(files.data), "--out", str(tmp_path / "out.jsonl")]
    if command == "serve":
        arguments = [*arguments, "--port", "0"]
    assert main([command, str(files.model), *arguments]) == 1
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cache", "weights", "kept"),
    [
        ("auto", None, "static"),
        ("auto", "int8", "static"),
        ("auto", "8bit", "dynamic"),
        ("dynamic", "int8", "dynamic"),
    ],
)
def test_steps_that_are_not_compiled_keep_a_dynamic_cache(cache, weights, kept):
    assert kept_cache(cache, weights, otherwise="static") == kept


def test_two_ways_at_once_are_refused(files, capsys):
    with pytest.raises(SystemExit):
        main(["chat", str(files.model), "--load-in-8bit", "--torchao", "int8"])
    assert "--torchao: not allowed with argument --load-in-8bit" in capsys.readouterr().err


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
