"""One assembly: the recipe, the bench and the loss curves train what comes out of it."""

import ast
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments

import glm4v_patched
from glm4v_patched.bench.settings import Settings
from glm4v_patched.engine import prepare, trainable
from glm4v_patched.engine.deepspeed.config import deepspeed_config
from glm4v_patched.engine.environment import training_environment
from glm4v_patched.engine.memory_plan import GIB, Batch, decide
from glm4v_patched.engine.options import ADAMW, MAX_GRAD_NORM, EngineOptions
from glm4v_patched.engine.prepare import make_optimizer, prepare_model, start
from glm4v_patched.finetune.worker import OPTIMIZERS
from tests.helpers.recipes import recipe
from tests.helpers.tiny import grown_image, pictures, text, tiny_model

PACKAGE = Path(glm4v_patched.__file__).parent
LOSS_CURVE = PACKAGE.parent / "docs" / "benchmarks" / "loss_curve.py"
# What makes a model trainable: called by the assembly, and by nothing else.
PARTS = {
    *("checkpoint_layers", "compile_layers", "select_weights", "continue_adapters"),
    *("upcast_trained", "quantization_options", "gather_whole_layers", "gather_in_place"),
    *("take_norms_in_place", "limit_run_ahead", "AdamW", "AdamW8bit", "get_peft_model"),
    *("initialize", "compile"),
}
PLAIN = EngineOptions(
    tower="full", language="full", offload=False, compile=False, stage3_max_live_parameters=1e9
)


def called(path: Path) -> set[str]:
    """Names of the functions and methods that a file calls."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    names = [getattr(call.func, "attr", getattr(call.func, "id", "")) for call in calls]
    return set(names)


def test_nothing_else_builds_a_model_for_training():
    builders = {
        path.relative_to(PACKAGE).as_posix(): found
        for path in [*PACKAGE.rglob("*.py")]
        if (found := called(path) & PARTS)
        # What the parts themselves call; remote/ is the model, and these train nothing.
        and path.parent.name not in ("remote", "deepspeed", "inference", "serving", "models")
        and path.name
        not in (
            "trainable.py",
            "compilation.py",
            "activation_checkpointing.py",
            "generation_worker.py",
        )
    }
    regular_expressions = {name for name, found in builders.items() if found == {"compile"}}
    assert builders.keys() - regular_expressions == {"engine/prepare.py"}
    for name in regular_expressions:
        assert "torch.compile(" not in (PACKAGE / name).read_text()
    assert not called(LOSS_CURVE) & PARTS and "start" in called(LOSS_CURVE)
    assert "start" in called(PACKAGE / "bench" / "worker.py")
    assert "prepare_model" in called(PACKAGE / "finetune" / "worker.py")


def test_recipe_and_bench_ask_for_the_same_where_neither_says_anything():
    asked = {"engine": {}, "trained": "lora_lm", "trainer.max_steps": 1000}
    from_recipe = recipe(asked).engine_options()
    from_bench = Settings(trained="lora_lm").engine_options()
    batch = Batch(rows=1, row_length=2114, processes=2)
    config = tiny_model().config
    for free in (0, 24 * 2**30, 141 * 2**30):
        found = [decide(config, one, batch, free, 1000) for one in (from_recipe, from_bench)]
        recipes, benches = [vars(one).copy() for one in found]
        # The bench names what it measures: transformers' own choice, and the config's.
        assert benches.pop("attn_implementation") == "sdpa"
        assert benches.pop("loss_chunk_size") == config.loss_chunk_size
        assert recipes.pop("attn_implementation") is recipes.pop("loss_chunk_size") is None
        if not free:  # without a GPU nothing is compiled, unless it is asked for
            assert (recipes.pop("compile"), benches.pop("compile")) == (False, True)
            benches.pop("stage3_max_live_parameters"), recipes.pop("stage3_max_live_parameters")
        assert recipes == benches


def test_the_optimizer_is_the_trainers():
    arguments = TrainingArguments("out", use_cpu=True, report_to="none")
    assert arguments.max_grad_norm == MAX_GRAD_NORM
    assert OPTIMIZERS["adamw"] == "adamw_torch_fused"
    asked = {
        "betas": (arguments.adam_beta1, arguments.adam_beta2),
        "eps": arguments.adam_epsilon,
        "weight_decay": arguments.weight_decay,
    }
    assert asked == ADAMW
    (group,) = make_optimizer(tiny_model(), PLAIN, 0.5).param_groups
    assert group["fused"] and group["lr"] == 0.5
    assert {name: group[name] for name in ADAMW} == ADAMW


def test_the_environment_is_one_and_what_the_reader_sets_stays(monkeypatch):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    found = training_environment(2)
    assert found["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert found["OMP_NUM_THREADS"] == "4"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = training_environment(2, on_cpu=True)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in found and found["OMP_NUM_THREADS"] == "1"
    assert (found["CUDA_VISIBLE_DEVICES"], found["DS_ACCELERATOR"]) == ("", "cpu")
    for user in ("finetune/launch.py", "bench/command.py"):
        assert "training_environment" in called(PACKAGE / user)


@pytest.mark.parametrize("open_choice", ["tower", "offload", "compile"])
def test_what_is_not_decided_is_not_built(open_choice):
    with pytest.raises(AssertionError, match="comes first"):
        prepare_model(replace(PLAIN, **{open_choice: "auto"}), tiny_model)


def test_one_process_trains_clipped_in_fp32_under_autocast():
    def build(dtype, **_):
        return tiny_model().to(dtype)

    options = replace(PLAIN, zero_stage=0, trained="lora_lm")
    engine = start(options, build, 1, 0.1)
    trained = [weight for weight in engine.model.parameters() if weight.requires_grad]
    assert {weight.dtype for weight in trained} == {torch.float32}
    ids = torch.tensor([text(5) + grown_image() + text(9)])
    batch = {"input_ids": ids, "labels": ids, "pixel_values": pictures(1).bfloat16()}
    loss = engine.forward(batch) * 1e4
    engine.backward(loss)
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


def test_an_offloaded_optimizer_takes_no_more_memory_than_it_has_numbers():
    """torch rounds pinned blocks up to powers of two."""
    zero = deepspeed_config(replace(PLAIN, offload=True))["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": False}


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("compiled", [False, True])
def test_what_a_continued_run_may_change_changes_no_group_of_a_checkpoint(policy, compiled):
    """ZeRO-3 saves and loads fp32 weights by its groups."""
    options = replace(PLAIN, tower=policy, language=policy, compile=compiled)
    assert deepspeed_config(options)["zero_optimization"]["sub_group_size"] == 5e8


def test_the_limit_of_memory_holds_while_the_model_is_built_unless_it_is_quantised(monkeypatch):
    done, total = [], 100 * GIB
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (total, total))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", done.append)

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
    assert done == ["build", 0.25]
    done.clear()
    prepare_model(replace(options, memory_limit=None), build)
    assert done == ["build"]
