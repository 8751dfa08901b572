"""Measures one workload: what every process of a group runs.

``python -m torch.distributed.run --nproc_per_node N -m glm4v_patched.bench.worker SETTINGS OUT``.
"""

import json
import os
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM

from ..engine.activation_checkpointing import checkpoint_layers
from ..engine.compilation import compile_layers
from ..engine.deepspeed.config import zero_config
from ..engine.deepspeed.gather import gather_whole_layers
from ..engine.deepspeed.gradient_norm import take_norms_in_place
from ..engine.deepspeed.throttle import limit_run_ahead
from ..engine.memory_plan import GIB, Kept, choose_kept, free_memory
from ..engine.options import gathers_whole_layers, require_packages
from ..engine.trainable import quantise, select_weights
from ..patch.auto_classes import apply
from ..remote.configuration_chatglm import ChatGLMConfig
from ..remote.loss import IGNORE_INDEX
from ..remote.modeling_chatglm import GLM4VForCausalLM
from .accounting import allocated, memory_parts
from .profiling import profile_step
from .roofline import measured_ceiling, synchronize, useful_flop
from .settings import Settings
from .sizes import config_of, training_of

LEARNING_RATE = 1e-5
VERSIONS = (
    *("torch", "transformers", "deepspeed", "peft", "bitsandbytes", "liger-kernel"),
    "glm4v-patched",
)


def measure(settings: Settings) -> dict | None:
    """Build the model with random weights, train it, and return what was seen (on rank 0)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    side, products, held = (8192, 20, 1500) if device == "cuda" else (512, 3, 3)
    ceiling = measured_ceiling(device, side, products)
    held_ceiling = measured_ceiling(device, side, held)
    if device == "cuda":
        torch.cuda.empty_cache()
    torch.manual_seed(0)
    trainer = _Zero(settings, device) if settings.zero_stage else _Plain(settings, device)
    model, config = trainer.model, trainer.config
    batch = _batch(config, settings, device)
    if settings.reuse_features:
        batch["image_features"] = _features(model, batch.pop("pixel_values"))
    seconds, losses = [], []
    for step in range(settings.warm_up + settings.steps):
        if step == settings.warm_up and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        synchronize(device)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        start = time.perf_counter()
        losses.append(trainer.step(batch))
        synchronize(device)
        seconds.append(time.perf_counter() - start)
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
        "policies": asdict(trainer.kept),
        "losses": losses,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "versions": {"python": sys.version.split()[0], **_versions()},
    }
    if settings.profile:
        row |= profile_step(lambda: trainer.step(batch))
    return row if int(os.environ.get("RANK", 0)) == 0 else None


def _build(settings: Settings, device: str, config: ChatGLMConfig, kept: Kept) -> nn.Module:
    """Random weights in bf16, with what is not trained frozen."""
    if settings.trained != "qlora":
        _cap_memory(settings)
    if settings.against is not None:
        original = AutoConfig.from_pretrained(settings.against, trust_remote_code=True)
        model = AutoModelForCausalLM.from_config(
            original, trust_remote_code=True, dtype=torch.bfloat16
        )
        model = select_weights(model, settings.trained).train()
        model.gradient_checkpointing_enable()
        return model
    if settings.liger:
        apply(rms_norm=True, swiglu=True)
    config.skip_logits = not settings.all_logits
    config.loss_chunk_size = settings.loss_chunk_size
    model = GLM4VForCausalLM._from_config(
        config, dtype=torch.bfloat16, attn_implementation=settings.attn_implementation
    )
    if settings.trained == "qlora":
        # The cap comes after: a model that is loaded is never whole on the GPU, this one is.
        quantise(model, device)
        _cap_memory(settings)
    model = select_weights(model, settings.trained).train()
    checkpoint_layers(model, kept.tower, kept.language)
    if settings.compile:
        compile_layers(model)
    return model


def _kept(settings: Settings, config: ChatGLMConfig) -> Kept:
    training = training_of(settings, config, int(os.environ.get("WORLD_SIZE", 1)))
    limit = None if settings.memory_limit is None else settings.memory_limit * GIB
    asked = Kept(settings.tower, settings.language, settings.stage3_max_live_parameters)
    return choose_kept(config, training, free_memory(limit), asked)


def _cap_memory(settings: Settings) -> None:
    """Let torch allocate no more than the limit; the driver's and NCCL's own are beside it."""
    if settings.memory_limit is None or not torch.cuda.is_available():
        return
    torch.cuda.empty_cache()
    share = settings.memory_limit * GIB / torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(share)


class _Trainer:
    """One training step in three parts, of a model with its optimizer."""

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        loss = self.forward(batch)
        self.backward(loss)
        self.update()
        return loss.detach()


class _Zero(_Trainer):
    """DeepSpeed at stage 1 to 3."""

    def __init__(self, settings: Settings, device: str):
        import deepspeed
        from transformers.integrations import HfDeepSpeedConfig

        deepspeed.init_distributed(verbose=False)
        before = allocated()
        self.config = config_of(settings)
        self.kept = _kept(settings, self.config)
        ours = settings.against is None
        policies = self.kept.tower, self.kept.language
        whole_layers = ours and gathers_whole_layers(
            settings.zero_stage, settings.compile, *policies
        )
        options = zero_config(
            settings.zero_stage,
            whole_layers=whole_layers,
            kept_gathered=self.kept.gathered,
            offload_optimizer=settings.offload,
        )
        options["zero_optimization"] |= settings.zero_changes()
        del options["gradient_accumulation_steps"]
        options |= {
            "train_micro_batch_size_per_gpu": settings.micro_batch,
            "gradient_clipping": 0.0,
        }
        self.hf_config = HfDeepSpeedConfig(options)  # alive while the model is built
        # Under stage 3 DeepSpeed puts every new parameter on its device, sharded.
        with nullcontext() if settings.zero_stage == 3 else torch.device(device):
            self.model = _build(settings, device, self.config, self.kept)
        if whole_layers:
            gather_whole_layers(self.model, settings.gather_in_place)
        if ours and settings.zero_stage == 3 and settings.layers_ahead:
            limit_run_ahead(self.model, settings.layers_ahead)
        if ours and settings.zero_stage == 3:
            take_norms_in_place(self.model)
        self.weights = allocated() - before
        self.engine, *_ = deepspeed.initialize(
            model=self.model, config=options, optimizer=_optimizer(self.model, settings.optimizer)
        )

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.engine(**batch).loss

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def update(self) -> None:
        self.engine.step()

    def optimizer_tensors(self) -> list[Tensor]:
        """States, and the fp32 weights that they belong to."""
        zero = self.engine.optimizer
        name = "fp32_partitioned_groups_flat"
        if not hasattr(zero, name):
            name = "single_partition_of_fp32_groups"
        return [*getattr(zero, name), *_state_tensors(zero.optimizer)]

    def gradient_buffers(self) -> list[Tensor]:
        """Stage 3 has one, for this process's shares of all gradients."""
        if self.engine.zero_optimization_stage() != 3:
            return []
        return [self.engine.optimizer.grad_partitions_flat_buffer]


class _Plain(_Trainer):
    """One process, nothing sharded."""

    def __init__(self, settings: Settings, device: str):
        self.config = config_of(settings)
        self.kept = _kept(settings, self.config)
        before = allocated()
        with torch.device(device):
            self.model = _build(settings, device, self.config, self.kept)
        self.weights = allocated() - before
        self.optimizer = _optimizer(self.model, settings.optimizer)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch).loss

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def optimizer_tensors(self) -> list[Tensor]:
        return _state_tensors(self.optimizer)

    def gradient_buffers(self) -> list[Tensor]:
        return []


def _state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, Tensor)]


def _optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name == "adamw":
        return torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)
    require_packages(name)
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(trained, lr=LEARNING_RATE)


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
