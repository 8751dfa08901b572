"""Measures one workload: what every process of a group runs.

``python -m torch.distributed.run --nproc_per_node N -m glm4v_patched.bench.worker SETTINGS OUT``.
"""

import json
import math
import os
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.benchmark import timer

from ..engine.fp8 import require_fp8
from ..engine.memory_plan import GIB, decide, free_memory
from ..engine.prepare import Engine, join_processes, local_device, start
from ..engine.trainable import build_random
from ..remote.configuration_chatglm import ChatGLMConfig
from ..remote.loss import IGNORE_INDEX
from .roofline import batch_of, config_of, measured_ceiling, supervised, useful_flop
from .settings import Settings

LEARNING_RATE = 1e-5


def measure(settings: Settings) -> dict | None:
    """Build the model with random weights, train it, and return what was seen (on rank 0)."""
    on_gpu = local_device().type == "cuda"
    ceiling = measured_ceiling(*(8192, 20) if on_gpu else (512, 3))
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    asked, config = settings.engine_options(), config_of(settings)
    join_processes(asked)
    sizes = batch_of(settings, config, int(os.environ.get("WORLD_SIZE", 1)))
    require_fp8(asked, config)
    options = decide(config, asked, sizes, free_memory(settings.memory_limit))
    build = partial(build_random, config)
    trainer = start(options, build, settings.micro_batch, LEARNING_RATE)
    batch = _batch(config, settings)
    if settings.reuse_features:  # what a first epoch would have kept of these pictures
        model: Any = trainer.model
        with torch.no_grad():
            found = model.get_image_features(batch.pop("pixel_values"), return_dict=True)
        batch["image_features"] = found.pooler_output
    times, losses = _train(trainer, batch, settings.warm_up, settings.steps)
    require_learning(losses)
    peaks = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    allocated, reserved = (peak / GIB if on_gpu else None for peak in peaks)
    median, work = statistics.median(times), useful_flop(config, settings)
    rate = settings.micro_batch / median
    positions = config.vision.num_image_tokens + 2 + statistics.mean(settings.text_lengths())
    row = {
        "samples_per_s_per_gpu": rate,
        "tokens_per_s_per_gpu": rate * positions,
        "roofline_share": rate * work / ceiling,
        "step_s": {"median": median, "fastest": min(times), "slowest": max(times)},
        "useful_tflop_per_sample": work / 1e12,
        "ceiling_tflops": ceiling / 1e12,
        "peak_allocated_gib": allocated,
        "peak_reserved_gib": reserved,
        "policies": options.policies,
        "losses": losses,
    }
    return row if int(os.environ.get("RANK", 0)) == 0 else None


def require_learning(losses: list[float]) -> None:
    """Raises RuntimeError for losses of steps in which nothing can have been learned."""
    if not all(map(math.isfinite, losses)):
        raise RuntimeError(f"a loss is no finite number: {losses}")
    if len(set(losses)) == 1:
        raise RuntimeError(f"the loss stayed {losses[0]} in {len(losses)} steps: nothing learned")


def _train(trainer: Engine, batch: dict, warm_up: int, steps: int) -> tuple[list, list]:
    """Seconds of each step after those to warm up, and the losses of all."""
    times, losses = [], []
    for step in range(warm_up + steps):
        if step == warm_up and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        began = timer()  # once the GPU is done
        losses.append(trainer.step(batch))
        times.append(timer() - began)
    return times[warm_up:], [loss.item() for loss in losses]


def _batch(config: ChatGLMConfig, settings: Settings) -> dict[str, Tensor]:
    """Samples of one image and then text, learned in its second half: padded rows, or one row."""
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", 0)))
    most = min(config.boi_token_id, config.pad_token_id)  # text has smaller ids
    image = torch.tensor([config.boi_token_id, config.pad_token_id, config.eoi_token_id])
    lengths = settings.text_lengths()
    texts = [torch.randint(0, most, (length,), generator=generator) for length in lengths]
    ids = [torch.cat((image, text)) for text in texts]
    labels = [sample.clone() for sample in ids]
    for sample, length in zip(labels, lengths, strict=True):
        sample[: len(sample) - supervised(length)] = IGNORE_INDEX
    pad = partial(pad_sequence, batch_first=True)
    batch = {"input_ids": pad(ids), "labels": pad(labels, padding_value=IGNORE_INDEX)}
    if settings.packed:
        positions = torch.cat([torch.arange(len(sample)) for sample in ids])[None]
        batch = {"input_ids": torch.cat(ids)[None], "labels": torch.cat(labels)[None]}
        batch["position_ids"] = positions
    elif lengths[-1] < lengths[0]:
        batch["attention_mask"] = pad([torch.ones_like(sample) for sample in ids])
    vision = config.vision
    shape = (settings.micro_batch, vision.in_channels, vision.image_size, vision.image_size)
    batch["pixel_values"] = torch.randn(shape, generator=generator).bfloat16()
    return {name: values.to(local_device()) for name, values in batch.items()}


if __name__ == "__main__":
    row = measure(Settings(**json.loads(sys.argv[1])))
    if row is not None:
        Path(sys.argv[2]).write_text(json.dumps(row))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    # DeepSpeed's and inductor's threads take long to end, and nothing is left to save.
    os._exit(0)
