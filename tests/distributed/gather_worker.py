"""Two processes train with weights gathered in place, and copied out of a buffer.

Started by test_gathering.py with a folder. Rank 0 writes ``gathers.pt`` there: for each of what is
trained, and each way to gather, the losses of both ranks, the trained weights, and how many gathers
were made in place and how many were copied.
"""

import sys
from pathlib import Path
from unittest import mock

import deepspeed
import torch
from deepspeed.runtime.zero import partition_parameters
from start_deepspeed import start_deepspeed
from steps import select_weights, small_model, trainable
from tiny import grown_image, pictures, text

from glm4v_patched.training import gathering
from glm4v_patched.training.activations import checkpoint_layers
from glm4v_patched.training.zero import zero_config

STEPS = 4
TRAINED = ("all", "lora_both", "frozen_vision")


def batch(step: int) -> dict[str, torch.Tensor]:
    seed = 2 * step + torch.distributed.get_rank()
    ids = torch.tensor([[*grown_image(), *text(9, seed=seed)]])
    return {"input_ids": ids, "labels": ids, "pixel_values": pictures(1, seed=seed)}


def train(trained: str, in_place: bool) -> dict:
    # A layer is released while a gather that holds it and others is still being waited for.
    options = zero_config(3, bf16=False, whole_layers=True, kept_gathered=20_000)
    options["zero_optimization"]["stage3_prefetch_bucket_size"] = 100_000
    options |= {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0}
    del options["gradient_accumulation_steps"]
    model = select_weights(small_model(), trained)
    checkpoint_layers(model, "attention", "full")
    gathering.gather_whole_layers(model, in_place)
    optimizer = torch.optim.SGD(trainable(model), lr=0.001)
    engine, *_ = deepspeed.initialize(model=model, config=options, optimizer=optimizer)
    made = {"in place": gathering._Gather, "copied": partition_parameters.AllGatherCoalescedHandle}
    counted = {
        name: mock.patch.object(kind, "__init__", autospec=True, side_effect=kind.__init__)
        for name, kind in made.items()
    }
    losses = []
    with counted["in place"] as of_ours, counted["copied"] as of_deepspeed:
        for step in range(STEPS):
            loss = engine(**batch(step)).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    weights = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter):
            weights[name] = parameter.detach().clone()
    everyone = [None, None]
    torch.distributed.all_gather_object(everyone, losses)
    engine.destroy()
    counts = {"in place": of_ours.call_count, "copied": of_deepspeed.call_count}
    return {"losses": everyone, "weights": weights, "gathers": counts}


if __name__ == "__main__":
    start_deepspeed()
    found = {(trained, way): train(trained, way) for trained in TRAINED for way in (True, False)}
    if torch.distributed.get_rank() == 0:
        torch.save(found, Path(sys.argv[1], "gathers.pt"))
    torch.distributed.barrier()
