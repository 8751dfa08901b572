"""Measures one workload: what every process of a group runs.

``python -m torch.distributed.run --nproc_per_node N -m glm4v_patched.bench.worker SETTINGS OUT``.
"""

import json
import os
import statistics
import sys
import time
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM

from ..engine.memory_plan import GIB, decide, free_memory
from ..engine.prepare import join_processes, local_device, start
from ..engine.trainable import quantise
from ..patch.auto_classes import apply
from ..remote.configuration_chatglm import ChatGLMConfig
from ..remote.loss import IGNORE_INDEX
from ..remote.modeling_chatglm import GLM4VForCausalLM
from .accounting import memory_parts
from .profiling import profile_step
from .roofline import measured_ceiling, synchronize, useful_flop
from .settings import Settings
from .sizes import batch_of, config_of, options_of

LEARNING_RATE = 1e-5
VERSIONS = (
    *("torch", "transformers", "deepspeed", "peft", "bitsandbytes", "liger-kernel"),
    "glm4v-patched",
)


def measure(settings: Settings) -> dict | None:
    """Build the model with random weights, train it, and return what was seen (on rank 0)."""
    device = local_device().type
    side, products, held = (8192, 20, 1500) if device == "cuda" else (512, 3, 3)
    ceiling = measured_ceiling(device, side, products)
    held_ceiling = measured_ceiling(device, side, held)
    if device == "cuda":
        torch.cuda.empty_cache()
    torch.manual_seed(0)
    asked, config = options_of(settings), config_of(settings)
    join_processes(asked)
    limit = None if settings.memory_limit is None else settings.memory_limit * GIB
    batch_sizes = batch_of(settings, config, int(os.environ.get("WORLD_SIZE", 1)))
    options = decide(config, asked, batch_sizes, free_memory(limit))
    build = partial(_build, settings, config)
    trainer = start(options, build, settings.micro_batch, LEARNING_RATE, settings.zero_changes())
    batch = _batch(config, settings, device)
    if settings.reuse_features:
        batch["image_features"] = _features(trainer.model, batch.pop("pixel_values"))
    seconds, losses = [], []
    for step in range(settings.warm_up + settings.steps):
        if step == settings.warm_up and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        synchronize(device)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        began = time.perf_counter()
        losses.append(trainer.step(batch))
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    peaks = {"peak_allocated_gib": None, "peak_reserved_gib": None}
    if device == "cuda":
        peaks["peak_allocated_gib"] = torch.cuda.max_memory_allocated() / GIB
        peaks["peak_reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    losses = [loss.item() for loss in losses]
    seconds = seconds[settings.warm_up :]
    median = statistics.median(seconds)
    rate = settings.micro_batch / median
    lengths = settings.text_lengths()
    work = statistics.mean(
        useful_flop(config, settings.trained, length, _supervised(length), settings.reuse_features)
        for length in lengths
    )
    positions = config.vision.num_image_tokens + 2 + statistics.mean(lengths)
    row = {
        "samples_per_s_per_gpu": rate,
        "tokens_per_s_per_gpu": rate * positions,
        "roofline_share": rate * work / ceiling,
        "step_s": {"median": median, "fastest": min(seconds), "slowest": max(seconds)},
        "useful_tflop_per_sample": work / 1e12,
        "ceiling_tflops": ceiling / 1e12,
        "held_ceiling_tflops": held_ceiling / 1e12,  # 1,500 products, a few steps long
        **peaks,
        "memory_gib": memory_parts(trainer, batch) if device == "cuda" else None,
        "policies": {
            "tower": options.tower,
            "language": options.language,
            "gathered": options.stage3_max_live_parameters,
        },
        "losses": losses,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "versions": {"python": sys.version.split()[0], **_versions()},
    }
    if settings.profile:
        row |= profile_step(lambda: trainer.step(batch))
    return row if int(os.environ.get("RANK", 0)) == 0 else None


def _build(settings: Settings, config: ChatGLMConfig, **given) -> nn.Module:
    """Random weights, where the recipe loads a folder; ``given`` is what it gives
    ``from_pretrained``."""
    is_quantised = given.pop("quantization_config", None) is not None
    given.pop("device_map", None)
    if not is_quantised:
        _cap_memory(settings)
    if settings.against is not None:
        original = AutoConfig.from_pretrained(settings.against, trust_remote_code=True)
        model = AutoModelForCausalLM.from_config(
            original, trust_remote_code=True, dtype=given["dtype"]
        )
        model.gradient_checkpointing_enable()
        return model
    if settings.liger:
        apply(rms_norm=True, swiglu=True)
    model = GLM4VForCausalLM._from_config(config, **given)
    if is_quantised:
        # The cap comes after: a model that is loaded is never whole on the GPU, this one is.
        quantise(model, local_device())
        _cap_memory(settings)
    return model


def _cap_memory(settings: Settings) -> None:
    """Let torch allocate no more than the limit; the driver's and NCCL's own are beside it."""
    if settings.memory_limit is None or not torch.cuda.is_available():
        return
    torch.cuda.empty_cache()
    share = settings.memory_limit * GIB / torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(share)


def _batch(config: ChatGLMConfig, settings: Settings, device: str) -> dict[str, Tensor]:
    """Samples of one image and then text, learned in its second half: padded rows, or one row."""
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", 0)))
    ids_of_text = min(config.boi_token_id, config.pad_token_id)
    image = torch.tensor([config.boi_token_id, config.pad_token_id, config.eoi_token_id])
    lengths = settings.text_lengths()
    texts = [torch.randint(0, ids_of_text, (length,), generator=generator) for length in lengths]
    ids = [torch.cat((image, text)) for text in texts]
    labels = [sample.clone() for sample in ids]
    for sample, length in zip(labels, lengths, strict=True):
        sample[: len(sample) - _supervised(length)] = IGNORE_INDEX
    if settings.packed:
        positions = torch.cat([torch.arange(len(sample)) for sample in ids])
        batch = {"input_ids": torch.cat(ids), "labels": torch.cat(labels)}
        batch = {name: row[None] for name, row in (batch | {"position_ids": positions}).items()}
    else:
        batch = {
            "input_ids": pad_sequence(ids, batch_first=True),
            "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORE_INDEX),
        }
        if lengths[-1] < lengths[0]:
            masks = [torch.ones_like(sample) for sample in ids]
            batch["attention_mask"] = pad_sequence(masks, batch_first=True)
    side = config.vision.image_size
    shape = (settings.micro_batch, config.vision.in_channels, side, side)
    name = "pixel_values" if settings.against is None else "images"
    batch[name] = torch.randn(shape, generator=generator).bfloat16()
    return {name: values.to(device) for name, values in batch.items()}


def _supervised(text_tokens: int) -> int:
    """Of a sample's text, how much is learned."""
    return text_tokens - text_tokens // 2


def _features(model: nn.Module, pixels: Tensor) -> Tensor:
    """What a first epoch would have kept of these pictures."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    with torch.no_grad():
        return base.transformer.get_image_features(pixels, return_dict=True).pooler_output


def _versions() -> dict[str, str]:
    found = {}
    for name in VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    row = measure(Settings.from_json(sys.argv[1]))
    if row is not None:
        Path(sys.argv[2]).write_text(json.dumps(row))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    # DeepSpeed's and inductor's threads take long to end, and nothing is left to save.
    os._exit(0)
