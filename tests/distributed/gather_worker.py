"""Two processes train with weights gathered in place, and copied out of a buffer.

Started by test_gathering.py with a folder. Rank 0 writes ``gathers.pt`` there: for each of what is
trained, and each way to gather, the losses of both ranks, the trained weights, and how many gathers
were made in place and how many by DeepSpeed, whether what gathers was replaced once only, the norms
of the gradients, which are taken in place where the gathers are, and who took them.
"""

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest import mock

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle, AllGatherHandle

from glm4v_patched.engine.activation_checkpointing import checkpoint_layers
from glm4v_patched.engine.deepspeed import gather as gathering
from glm4v_patched.engine.deepspeed.config import deepspeed_config
from glm4v_patched.engine.deepspeed.gradient_norm import take_norms_in_place
from glm4v_patched.engine.deepspeed.internals import Replacements
from glm4v_patched.engine.options import EngineOptions
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.distributed.strategies import of_both_ranks, save_on_first
from tests.helpers.start_deepspeed import start_deepspeed
from tests.helpers.steps import select_weights, trainable
from tests.helpers.tiny import golden_json, grown_image, pictures, text, tiny_config

STEPS = 4
HANDLES_OF_DEEPSPEED = (AllGatherCoalescedHandle, AllGatherHandle)
TRAINED = ("all", "lora_both", "frozen_vision")


def model_with_odd_weights() -> GLM4VForCausalLM:
    """Biases of 97 numbers, of which two processes hold 49 each."""
    torch.manual_seed(0)
    vision = golden_json("config.json")["vision_config"] | {"intermediate_size": 97}
    config = tiny_config(initializer_range=0.05, vision_config=vision)
    return GLM4VForCausalLM._from_config(config, attn_implementation="sdpa")


def batch(step: int) -> dict[str, torch.Tensor]:
    seed = 2 * step + torch.distributed.get_rank()
    ids = torch.tensor([[*grown_image(), *text(9, seed=seed)]])
    return {"input_ids": ids, "labels": ids, "pixel_values": pictures(1, seed=seed)}


def counted(kind: type):
    return mock.patch.object(kind, "__init__", autospec=True, side_effect=kind.__init__)


def train(trained: str, in_place: bool) -> dict:
    # A layer is released while a gather that holds it and others is still being waited for.
    asked = EngineOptions(
        precision="fp32", tower="attention", language="full", stage3_max_live_parameters=20_000
    )
    options = deepspeed_config(replace(asked, offload=False, compile=False), 1, 1, 0.0)
    options["zero_optimization"]["stage3_prefetch_bucket_size"] = 100_000
    model = select_weights(model_with_odd_weights(), trained)
    checkpoint_layers(model, "attention", "full")
    gathering.gather_whole_layers(model)
    replacements = Replacements()
    if in_place:
        gathering.gather_in_place(model, replacements)
        take_norms_in_place(model, replacements)
    optimizer = torch.optim.SGD(trainable(model), lr=0.001)
    engine, *_ = deepspeed.initialize(model=model, config=options, optimizer=optimizer)
    kinds = gathering._Gather, *HANDLES_OF_DEEPSPEED
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
    norms_by = engine.optimizer.get_grad_norm_direct.__module__
    replacements.revert()
    weights = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter):
            weights[name] = parameter.detach().clone()
    losses = of_both_ranks(losses)
    engine.destroy()
    return {
        "losses": losses,
        "norms": norms,
        "norms by": norms_by,
        "weights": weights,
        "in place": ours.call_count,
        "by DeepSpeed": sum(count.call_count for count in theirs),
        "replaced once": gathers_of[0] == gathers_of[-1],
    }


if __name__ == "__main__":
    start_deepspeed()
    found = {(trained, way): train(trained, way) for trained in TRAINED for way in (True, False)}
    save_on_first(found, Path(sys.argv[1], "gathers.pt"))
    torch.distributed.barrier()
