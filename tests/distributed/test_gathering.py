"""ZeRO-3 gives the same numbers with gathers in place as with DeepSpeed's copies.

Two processes train by the recipe's loop: with weights gathered in place, with DeepSpeed's copies
out of a buffer, and in fp8.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle, AllGatherHandle
from safetensors.torch import load_file

from glm4v_patched.engine import fp8
from glm4v_patched.engine.deepspeed import zero3
from glm4v_patched.engine.deepspeed.internals import local_shard
from glm4v_patched.engine.kernels.fp8_linear import Fp8StoredLinear
from glm4v_patched.engine.options import EngineOptions
from glm4v_patched.engine.prepare import prepare_model
from glm4v_patched.finetune.assembly import build_trainer, init_training
from glm4v_patched.finetune.trainer import RecipeTrainer
from glm4v_patched.finetune.training_arguments import LoopOptions, engine_arguments
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.distributed.strategies import save_on_rank_0
from tests.helpers.fp8 import PLAIN, build
from tests.helpers.processes import run_two_processes
from tests.helpers.tiny import expanded_image, golden_json, random_pixels, text, tiny_config
from tests.remote.inputs import assert_close

pytestmark = pytest.mark.slow

STEPS = 4
TRAINED = ("full", "lora_all")
FP8_CASES = [("lora_all", "full"), ("lm", "selective")]  # trained, and the layers' policy


def batch(number: int) -> dict[str, torch.Tensor]:
    """Return the batch of a process, the same in each step."""
    image = expanded_image()
    ids = torch.tensor([[*image, *text(9, seed=number)]])
    labels = ids.clone()
    labels[:, : len(image)] = -100
    return {"input_ids": ids, "labels": labels, "pixel_values": random_pixels(1, seed=number)}


def model_with_odd_weights(dtype: torch.dtype) -> GLM4VForCausalLM:
    """Build a model with biases of 97 elements, of which each of two processes has 49."""
    vision = golden_json("config.json")["vision_config"] | {"intermediate_size": 97}
    config = tiny_config(initializer_range=0.05, vision_config=vision)
    return GLM4VForCausalLM._from_config(config, attn_implementation="sdpa", dtype=dtype)


def make_trainer(
    folder: Path, options: EngineOptions, build: Callable, rate: float, **zero
) -> RecipeTrainer:
    kwargs = {
        "output_dir": str(folder / "out"),
        "max_steps": STEPS,
        "learning_rate": rate,
        "report_to": "none",
    }
    kwargs |= {
        "logging_steps": 1,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "seed": 3,
    }
    kwargs |= engine_arguments(options, on_cpu=True) | {"per_device_train_batch_size": 1}
    kwargs["deepspeed"]["zero_optimization"] |= zero
    arguments = init_training(options, kwargs)
    inputs = batch(arguments.process_index)
    return build_trainer(
        partial(prepare_model, options, build),
        arguments,
        LoopOptions(),
        train_dataset=range(2 * STEPS),
        data_collator=lambda _: inputs,
    )


def losses_of(trainer: RecipeTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def count_instances(cls: type):
    return mock.patch.object(cls, "__init__", autospec=True, side_effect=cls.__init__)


def train(folder: Path, trained: str, in_place: bool) -> dict:
    # So few live parameters that a layer is released while the gather with it is still awaited.
    options = EngineOptions(
        trained=trained,
        precision="fp32",
        tower="attention",
        language="full",
        stage3_max_live_parameters=20_000,
        offload=False,
        compile=False,
    )
    prefetched = {"stage3_prefetch_bucket_size": 100_000}
    handles = zero3._Gather, AllGatherCoalescedHandle, AllGatherHandle
    with ExitStack() as stack:
        if not in_place:
            for name in ("gather_in_place", "norm_in_place"):
                stack.enter_context(mock.patch.object(zero3, name, lambda original: original))
        trainer = make_trainer(folder, options, model_with_odd_weights, 0.001, **prefetched)
        ours, *theirs = [stack.enter_context(count_instances(handle)) for handle in handles]
        trainer.train()
    engine = trainer.model_wrapped
    weights = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter):
            weights[name] = parameter.detach().clone()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    results = {
        "losses": losses_of(trainer),
        "norms": [entry["grad_norm"] for entry in logged],
        "norms by": engine.optimizer.get_grad_norm_direct.__module__,
        "weights": weights,
        "in place": ours.call_count,
        "by DeepSpeed": sum(count.call_count for count in theirs),
    }
    engine.destroy()
    return results


def train_in_fp8(folder: Path, stage: int, trained: str, policy: str) -> dict:
    """Train in fp8; return the losses, and dtypes and bytes of this process's layer shards.

    Under ZeRO-3 with the policy "full" nothing stays gathered: all is gathered twice a step.
    """
    live = 0.0 if policy == "full" else 1e9
    options = replace(PLAIN, zero_stage=stage, trained=trained, tower=policy, language=policy)
    options = replace(options, stage3_max_live_parameters=live)
    load = partial(GLM4VForCausalLM.from_pretrained, folder / "model", attn_implementation="sdpa")
    trainer = make_trainer(folder, options, load, 0.01)
    trainer.train()
    results: dict = {"losses": losses_of(trainer)}
    layers = [module for module in trainer.model.modules() if isinstance(module, Fp8StoredLinear)]
    results["dtypes"] = {(local_shard(m.weight).dtype, m.weight_scale.dtype) for m in layers}
    results["bytes"] = sum(local_shard(m.weight).nbytes for m in layers)
    trainer.save_model(str(folder / f"{trained} {stage}"))
    trainer.model_wrapped.destroy()
    return results


def on_each_rank(folder: Path) -> None:
    cases = product(TRAINED, (True, False))
    results: dict = {case: train(folder, *case) for case in cases}
    fp8._allow_cpu = True
    for trained, policy in FP8_CASES:
        for stage in (2, 3):
            results[trained, stage] = train_in_fp8(folder, stage, trained, policy)
    save_on_rank_0(results, folder / "results.pt")
    torch.distributed.barrier()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gathers")
    build().save_pretrained(folder / "model")
    run_two_processes(on_each_rank, folder, seconds=500)
    return folder


@pytest.fixture(scope="module")
def results(folder) -> dict:
    return torch.load(folder / "results.pt", weights_only=False)


@pytest.mark.parametrize("trained", TRAINED)
def test_gathers_and_norms_in_place_give_the_same_numbers_without_copies(results, trained):
    in_place, copied = results[trained, True], results[trained, False]
    assert in_place["losses"] == copied["losses"]
    assert_close(in_place["weights"], copied["weights"])
    assert in_place["in place"] == copied["by DeepSpeed"] > 0
    assert in_place["by DeepSpeed"] == copied["in place"] == 0
    assert in_place["norms"] == pytest.approx(copied["norms"], rel=1e-12)
    assert in_place["norms by"] == "glm4v_patched.engine.deepspeed.zero3"
    assert copied["norms by"].startswith("deepspeed.")


def test_fp8_losses_are_the_same_with_sharded_weights_and_shards_are_bytes(results):
    for trained, _ in FP8_CASES:
        losses, unsharded = (results[trained, stage]["losses"] for stage in (3, 2))
        assert losses[0] == pytest.approx(unsharded[0], rel=1e-5)
        # Updates round differently.
        assert losses == pytest.approx(unsharded, rel=0.05) and losses[-1] < losses[0] - 0.05
    sharded = results["lora_all", 3]
    assert sharded["dtypes"] == {(torch.uint8, torch.int32)}
    assert results["lora_all", 2]["bytes"] == 2 * sharded["bytes"] > 0
    assert not results["lm", 3]["dtypes"]


def test_weights_trained_in_fp8_are_saved_in_bf16(folder, results):
    saved = load_file(folder / "lm 3" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert len(saved) >= len([*build().parameters()])
