"""One assembly: the recipe, the bench and the loss curves train what comes out of it."""

import ast
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import TrainingArguments

import glm4v_patched
from glm4v_patched.bench.settings import Settings
from glm4v_patched.engine import prepare, trainable
from glm4v_patched.engine.deepspeed import config as deepspeed
from glm4v_patched.engine.deepspeed.config import deepspeed_config, require_zero_plus_plus
from glm4v_patched.engine.memory_plan import GIB, Batch, decide
from glm4v_patched.engine.options import ADAMW, MAX_GRAD_NORM, EngineOptions, LoraOptions
from glm4v_patched.engine.prepare import make_optimizer, prepare_model, start
from glm4v_patched.engine.trainable import continue_adapters, select_weights
from glm4v_patched.finetune.worker import OPTIMIZERS
from tests.helpers.recipes import recipe
from tests.helpers.tiny import grown_image, pictures, text, tiny_model

PACKAGE = Path(glm4v_patched.__file__).parent
# What makes a model trainable: called by the assembly, by the parts themselves, and by nothing else
# that trains.
PARTS = {
    *("checkpoint_layers", "compile_layers", "select_weights", "continue_adapters"),
    *("upcast_trained", "quantization_options", "gather_whole_layers", "gather_in_place"),
    *("take_norms_in_place", "limit_run_ahead", "AdamW", "AdamW8bit", "get_peft_model"),
    *("initialize", "torch.compile"),
}
MAY_CALL = {"remote", "deepspeed", "inference", "decoding", "serving", "models", "prepare.py"}
MAY_CALL |= {"trainable.py", "compilation.py", "activation_checkpointing.py"}
MAY_CALL |= {"generation_worker.py"}
PLAIN = EngineOptions(
    tower="full", language="full", offload=False, compile=False, stage3_max_live_parameters=1e9
)
ZERO_PLUS_PLUS = {
    "zero_hpz_partition_size": 8,
    "zero_quantized_weights": True,
    "zero_quantized_gradients": True,
}


def called(path: Path) -> set[str]:
    """What a file calls, as ``torch.compile`` and, of any object, ``compile``."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return {name for call in calls for name in (ast.unparse(call.func), *_last(call.func))}


def _last(function: ast.expr) -> list[str]:
    return [function.attr] if isinstance(function, ast.Attribute) else []


def test_nothing_else_builds_a_model_for_training():
    files = [path for path in PACKAGE.rglob("*.py") if not {*path.parts[-2:]} & MAY_CALL]
    curve = PACKAGE.parent / "docs" / "benchmarks" / "loss_curve.py"
    assert {path: found for path in (*files, curve) if (found := called(path) & PARTS)} == {}
    assert "start" in called(curve) & called(PACKAGE / "bench" / "worker.py")
    assert "prepare_model" in called(PACKAGE / "finetune" / "worker.py")
    for user in ("finetune/launch.py", "bench/command.py"):
        assert "training_environment" in called(PACKAGE / user)


def test_recipe_and_bench_ask_for_the_same_where_neither_says_anything():
    from_recipe = recipe({"engine": {}, "trained": "lora_lm"}).engine_options()
    from_bench = Settings(trained="lora_lm").engine_options()
    batch = Batch(rows=1, row_length=2114, processes=2)
    config = tiny_model().config
    for free in (0, 24 * GIB, 141 * GIB):
        recipes, benches = (decide(config, o, batch, free, 1000) for o in (from_recipe, from_bench))
        # The bench names what it measures: transformers' own choice, and the config's.
        assert benches.attn_implementation == "sdpa" and recipes.attn_implementation is None
        assert benches.loss_chunk_size == config.loss_chunk_size
        same = {"attn_implementation": None, "loss_chunk_size": None}
        if not free:  # without a GPU nothing is compiled, unless it is asked for
            assert (recipes.compile, benches.compile) == (False, True)
            same |= {"compile": False, "stage3_max_live_parameters": 1e9}
        assert replace(recipes, **same) == replace(benches, **same)


def test_the_optimizer_is_the_trainers():
    arguments = TrainingArguments("out", use_cpu=True, report_to="none")
    assert arguments.max_grad_norm == MAX_GRAD_NORM
    assert OPTIMIZERS["adamw"] == "adamw_torch_fused"
    assert {
        "betas": (arguments.adam_beta1, arguments.adam_beta2),
        "eps": arguments.adam_epsilon,
        "weight_decay": arguments.weight_decay,
    } == ADAMW
    (group,) = make_optimizer(tiny_model(), PLAIN, 0.5).param_groups
    assert group["fused"] and group["lr"] == 0.5
    assert {name: group[name] for name in ADAMW} == ADAMW


def test_one_process_trains_clipped_in_fp32_under_autocast():
    def build(dtype, **_):
        return tiny_model().to(dtype)

    engine = start(replace(PLAIN, zero_stage=0, trained="lora_lm"), build, 1, 0.1)
    trained = [weight for weight in engine.model.parameters() if weight.requires_grad]
    assert {weight.dtype for weight in trained} == {torch.float32}
    ids = torch.tensor([text(5) + grown_image() + text(9)])
    batch = {"input_ids": ids, "labels": ids, "pixel_values": pictures(1).bfloat16()}
    engine.backward(engine.forward(batch) * 1e4)
    norms = []
    engine.optimizer.register_step_pre_hook(
        lambda *_: norms.append(torch.nn.utils.get_total_norm([w.grad for w in trained]).item())
    )
    before = [weight.clone() for weight in trained]
    engine.update()
    assert norms == [pytest.approx(MAX_GRAD_NORM, rel=1e-3)]
    assert any(not torch.equal(old, new) for old, new in zip(before, trained, strict=True))
    assert len(engine.optimizer_tensors()) >= 2 * len(trained) and not engine.gradient_buffers()
    engine.set_learning_rate(0.25)
    assert {group["lr"] for group in engine.optimizer.param_groups} == {0.25}


@pytest.mark.parametrize("skip_logits", [True, False])
def test_what_is_asked_reaches_the_model(skip_logits):
    given = {}

    def build(**options):
        given.update(options)
        return tiny_model()

    options = replace(PLAIN, attn_implementation="eager", precision="fp32", loss_chunk_size=7)
    options = replace(options, skip_logits=skip_logits)
    model = prepare_model(options, partial(build, extra=1))
    assert given == {"dtype": torch.float32, "attn_implementation": "eager", "extra": 1}
    assert model.config.skip_logits is skip_logits
    assert model.config.loss_chunk_size == 7 and model.training


def test_the_limit_of_memory_holds_while_the_model_is_built_unless_it_is_quantised(monkeypatch):
    done, total = [], 100 * GIB
    for name, function in {
        "is_available": lambda: True,
        "set_device": lambda device: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda: (total, total),
        "set_per_process_memory_fraction": done.append,
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)

    def build(**given):
        done.append("build")
        return tiny_model(dtype=given["dtype"])

    options = replace(PLAIN, trained="lora_lm", memory_limit=25.0)
    prepare_model(options, build)
    assert done[:2] == [0.25, "build"]
    done.clear()
    monkeypatch.setattr(prepare, "quantization_options", lambda *given: {})
    monkeypatch.setattr(trainable, "require_packages", lambda choice: None)
    prepare_model(replace(options, trained="qlora"), build)
    prepare_model(replace(options, memory_limit=None), build)
    assert done == ["build", 0.25, "build"]


# What is trained


@pytest.mark.parametrize(
    ("trained", "inside", "outside"),
    [
        ("full", "vision", None),
        ("lm", "encoder", "vision"),
        ("lora_lm", "encoder", "vision"),
        ("lora_all", "vision", None),
    ],
)
def test_what_is_trained(trained, inside, outside):
    model = select_weights(tiny_model(), trained)
    learned = [name for name, p in model.named_parameters() if p.requires_grad]
    assert any(inside in name for name in learned)
    assert not any(outside and outside in name for name in learned)
    assert all("lora_" in name for name in learned) == trained.startswith("lora")


@pytest.mark.parametrize("trained", ["all", "tower+towr", "tower+tower", ""])
def test_an_unknown_choice_of_weights_is_refused(trained):
    with pytest.raises(
        ValueError, match=re.escape(f"{trained!r}; expected one of full, lm, lora_lm")
    ):
        select_weights(tiny_model(), trained)


@pytest.mark.parametrize(
    ("said", "alpha"), [({}, 6), ({"alpha": 5}, 5), ({"dropout": 0.25, "use_rslora": True}, 6)]
)
def test_what_is_said_of_lora_reaches_peft(said, alpha):
    model = select_weights(tiny_model(), "lora_lm", LoraOptions(rank=3, **said))
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha) == (3, alpha)
    assert config.lora_dropout == said.get("dropout", 0)
    assert config.use_rslora is said.get("use_rslora", False) and not config.use_dora


@pytest.mark.parametrize("change", ["more", "fewer"])
def test_adapters_that_do_not_fit_their_config_are_refused(tmp_path, change):
    """peft would warn, and leave what it does not find as new adapters begin."""
    select_weights(tiny_model(), "lora_lm").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    name = next(iter(tensors))
    if change == "more":
        tensors[name.replace("lora", "lara")] = tensors[name].clone()
    else:
        del tensors[name]
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    told = f"holds {len(tensors)} tensors, of which 1 do not fit its adapter_config.json"
    with pytest.raises(ValueError, match=told):
        continue_adapters(tiny_model(), tmp_path)


# What DeepSpeed is given


def zero_of(**changes) -> dict:
    return deepspeed_config(replace(PLAIN, **changes))["zero_optimization"]


def test_an_offloaded_optimizer_takes_no_more_memory_than_it_has_numbers():
    """torch rounds pinned blocks up to powers of two."""
    assert zero_of(offload=True)["offload_optimizer"] == {"device": "cpu", "pin_memory": False}


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("compiled", [False, True])
def test_what_a_continued_run_may_change_changes_no_group_of_a_checkpoint(policy, compiled):
    """ZeRO-3 saves and loads fp32 weights by its groups."""
    assert zero_of(tower=policy, language=policy, compile=compiled)["sub_group_size"] == 5e8


@pytest.mark.parametrize("name", ZERO_PLUS_PLUS)
def test_what_a_recipe_names_of_zero_plus_plus_reaches_deepspeed_and_nothing_else_does(name):
    value = ZERO_PLUS_PLUS[name]
    asked = recipe({f"engine.{name}": value}).engine_options()
    zero = zero_of(**{name: getattr(asked, name)})
    assert {known: zero[known] for known in ZERO_PLUS_PLUS if known in zero} == {name: value}
    assert not ZERO_PLUS_PLUS.keys() & zero_of().keys()


def test_zero_plus_plus_that_cannot_be_is_told_with_both_numbers(monkeypatch, words):
    shared = replace(PLAIN, zero_hpz_partition_size=8)
    quantized = replace(PLAIN, zero_quantized_gradients=True)
    require_zero_plus_plus(shared, processes=16, on_cpu=False)
    require_zero_plus_plus(PLAIN, processes=1, on_cpu=True)
    with words.refused(ValueError, "is 8", "12 processes"):
        require_zero_plus_plus(shared, processes=12, on_cpu=False)
    with words.refused(ValueError, "CPU"):
        require_zero_plus_plus(quantized, processes=2, on_cpu=True)
    monkeypatch.setattr(deepspeed, "has_nvcc", lambda: False)
    with words.refused(ValueError, "nvcc"):
        require_zero_plus_plus(quantized, processes=2, on_cpu=False)
