"""ZeRO-3 gathers weights in place as DeepSpeed copies them.

Two processes train with weights gathered in place, and copied out of a buffer; and in fp8.
"""

import random
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import (
    AllGatherCoalescedHandle,
    AllGatherHandle,
    ZeroParamStatus,
)

from glm4v_patched.engine import fp8
from glm4v_patched.engine.activation_checkpointing import checkpoint_layers
from glm4v_patched.engine.deepspeed import zero3
from glm4v_patched.engine.deepspeed.config import deepspeed_config
from glm4v_patched.engine.deepspeed.internals import shard_of
from glm4v_patched.engine.kernels.fp8_linear import HeldLinear
from glm4v_patched.engine.options import EngineOptions
from glm4v_patched.engine.prepare import start
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.distributed.strategies import (
    averaged,
    of_both_ranks,
    save_on_first,
    select_weights,
    trainable,
)
from tests.helpers.fp8 import PLAIN, build
from tests.helpers.processes import run_two_processes
from tests.helpers.tiny import golden_json, grown_image, pictures, text, tiny_config
from tests.remote.rows import assert_close

pytestmark = pytest.mark.slow

STEPS = 4
TRAINED = ("all", "lora_both")
IN_FP8 = [("lora_all", "full"), ("lm", "selective")]  # what is trained, and the policy of layers


def batch(seed: int) -> dict[str, torch.Tensor]:
    seed = 2 * seed + torch.distributed.get_rank()
    ids = torch.tensor([[*grown_image(), *text(9, seed=seed)]])
    return {"input_ids": ids, "labels": ids, "pixel_values": pictures(1, seed=seed)}


def model_with_odd_weights() -> GLM4VForCausalLM:
    """Biases of 97 numbers, of which two processes hold 49 each."""
    torch.manual_seed(0)
    vision = golden_json("config.json")["vision_config"] | {"intermediate_size": 97}
    config = tiny_config(initializer_range=0.05, vision_config=vision)
    return GLM4VForCausalLM._from_config(config, attn_implementation="sdpa")


def counted(kind: type):
    return mock.patch.object(kind, "__init__", autospec=True, side_effect=kind.__init__)


def train(trained: str, in_place: bool) -> dict:
    # A layer is released while a gather that holds it and others is still being waited for.
    options = EngineOptions(
        precision="fp32",
        tower="attention",
        language="full",
        stage3_max_live_parameters=20_000,
        offload=False,
        compile=False,
        gather_in_place=in_place,
        norms_in_place=in_place,
    )
    config = deepspeed_config(options, 1, 1, 0.0)
    config["zero_optimization"]["stage3_prefetch_bucket_size"] = 100_000
    model = select_weights(model_with_odd_weights(), trained)
    checkpoint_layers(model, options.tower, options.language)
    zero3.adapt_zero3(model, options)
    optimizer = torch.optim.SGD(trainable(model), lr=0.001)
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)
    kinds = zero3._Gather, AllGatherCoalescedHandle, AllGatherHandle
    losses, norms, gathers_of = [], [], []
    with ExitStack() as stack:
        ours, *theirs = [stack.enter_context(counted(kind)) for kind in kinds]
        for step in range(STEPS):
            loss = engine(**batch(step)).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            norms.append(float(engine.get_global_grad_norm()))
            gathers_of.append([p.all_gather_coalesced for p in engine.module.parameters()])
    weights = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter):
            weights[name] = parameter.detach().clone()
    found = {
        "losses": of_both_ranks(losses),
        "norms": norms,
        "norms by": engine.optimizer.get_grad_norm_direct.__module__,
        "weights": weights,
        "in place": ours.call_count,
        "by DeepSpeed": sum(count.call_count for count in theirs),
        "replaced once": gathers_of[0] == gathers_of[-1],
    }
    engine.destroy()
    return found


def in_fp8(load, stage: int, trained: str, policy: str) -> dict:
    """Return the losses, what each process holds of the layers between two steps, and the types of
    what is saved. Every step has the same batch. Under ZeRO-3 nothing stays gathered, so that all
    is gathered twice a step."""
    torch.manual_seed(3)  # adapters
    inputs = batch(0)
    inputs["pixel_values"] = inputs["pixel_values"].bfloat16()
    live = 0.0 if policy == "full" else 1e9
    options = replace(PLAIN, zero_stage=stage, trained=trained, tower=policy, language=policy)
    engine = start(replace(options, stage3_max_live_parameters=live), load, 1, 0.01)
    found: dict = {"losses": [averaged(engine.step(inputs)) for _ in range(STEPS)]}
    layers = [module for module in engine.model.modules() if isinstance(module, HeldLinear)]
    found["held"] = {(shard_of(m.weight).dtype, m.weight_scale.dtype) for m in layers}
    found["bytes"] = sum(shard_of(m.weight).nbytes for m in layers)
    if stage == 3:
        state = engine.engine._zero3_consolidated_16bit_state_dict()
        found["saved"] = state and {name: tensor.dtype for name, tensor in state.items()}
    engine.engine.destroy()
    return found


def many_under_way(gathers: int = 500, under_way: int = 4) -> int:
    """How many weights of all sizes are not both processes' shards, after so many gathers of which
    so many are under way at once. Coalesced ones by gloo would end a process about once in 10,000,
    so none is coalesced here."""
    group, rank = torch.distributed.group.WORLD, torch.distributed.get_rank()
    sizes = random.Random(0)
    gather = zero3.gather_in_place(not_ours)
    waiting: list[tuple] = []
    wrong = 0
    for number in range(gathers + under_way):
        if number < gathers:
            lengths = [sizes.randrange(1, 4000) for _ in range(sizes.randrange(1, 13))]
            shards = [torch.full((length,), number % 50 + rank).bfloat16() for length in lengths]
            weights = [sharded(shard, place, group) for place, shard in enumerate(shards)]
            waiting.append((gather(weights), weights, number % 50))
        if number >= under_way:
            work, weights, lowest = waiting.pop(0)
            work.wait()
            for weight in weights:
                first, second = weight.data.chunk(2)
                wrong += not ((first == lowest).all() and (second == lowest + 1).all())
    assert not waiting
    return wrong


def not_ours(*_, **__) -> None:
    raise AssertionError("weights are gathered in place, each by itself on a CPU")


def sharded(shard: torch.Tensor, number: int, group: object) -> SimpleNamespace:
    """A weight of which this process has a half, as DeepSpeed leaves it."""
    return SimpleNamespace(
        ds_id=number,
        ds_numel=2 * shard.numel(),
        ds_shape=(2 * shard.numel(),),
        ds_status=ZeroParamStatus.NOT_AVAILABLE,
        ds_secondary_tensor=None,
        ds_process_group=group,
        ds_tensor=shard,
        device=shard.device,
        dtype=shard.dtype,
        data=shard.new_empty(0),
    )


def on_each_rank(folder: Path) -> None:
    process_group = torch.distributed.ProcessGroup
    with mock.patch.object(process_group, "allgather_into_tensor_coalesced", not_ours):
        wrong = many_under_way()
    found = {(of, in_place): train(of, in_place) for of in TRAINED for in_place in (True, False)}
    found["wrong"] = wrong
    fp8._on_cpu = True
    load = partial(GLM4VForCausalLM.from_pretrained, folder / "model", attn_implementation="sdpa")
    for trained, policy in IN_FP8:
        for stage in (2, 3):
            found[trained, stage] = in_fp8(load, stage, trained, policy)
    save_on_first(found, folder / "found.pt")
    torch.distributed.barrier()


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("gathers")
    build().save_pretrained(folder / "model")
    run_two_processes(on_each_rank, folder, seconds=300)
    return torch.load(folder / "found.pt", weights_only=False)


@pytest.mark.parametrize("trained", TRAINED)
def test_gathers_and_norms_in_place_change_no_number_and_copy_nothing(found, trained):
    in_place, copied = found[trained, True], found[trained, False]
    assert in_place["losses"] == copied["losses"]
    assert_close(in_place["weights"], copied["weights"])
    assert in_place["in place"] == copied["by DeepSpeed"] > 0
    assert in_place["by DeepSpeed"] == copied["in place"] == 0
    assert in_place["replaced once"]
    assert in_place["norms"] == pytest.approx(copied["norms"], rel=1e-12)
    assert in_place["norms by"] == "glm4v_patched.engine.deepspeed.zero3"
    assert copied["norms by"].startswith("deepspeed.")


def test_many_gathers_of_all_sizes_under_way_at_once(found):
    assert found["wrong"] == 0


def test_in_fp8_losses_are_those_of_whole_weights_and_what_is_held_is_bytes(found):
    for trained, _ in IN_FP8:
        losses, whole = (found[trained, stage]["losses"] for stage in (3, 2))
        assert losses[0] == pytest.approx(whole[0], rel=1e-5)
        # Updates differ in how they round.
        assert losses == pytest.approx(whole, rel=0.05) and losses[-1] < losses[0] - 0.05
    sharded = found["lora_all", 3]
    assert sharded["held"] == {(torch.uint8, torch.int32)}
    assert found["lora_all", 2]["bytes"] == 2 * sharded["bytes"] > 0
    assert not found["lm", 3]["held"]


def test_in_fp8_what_is_saved_is_in_bf16(found):
    saved = found["lm", 3]["saved"]
    assert saved.keys() == build().state_dict().keys()
    inverse = "transformer.rotary_pos_emb.inv_freq"
    assert {dtype for name, dtype in saved.items() if name != inverse} == {torch.bfloat16}
