"""Measures one workload: what every process of a group runs.

``python -m torch.distributed.run --nproc_per_node N -m glm4v_patched.bench.worker SETTINGS OUT``.
"""

import json
import os
import statistics
import sys
import time
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from ..remote.configuration_chatglm import ChatGLMConfig
from ..remote.modeling_chatglm import GLM4VForCausalLM
from ..training.activations import checkpoint_layers
from ..training.compilation import compile_layers, gather_whole_layers
from ..training.weights import quantise, select_weights
from ..training.zero import zero_config
from .roofline import measured_ceiling, synchronize, useful_flop
from .settings import Settings

GIB = 2**30
LEARNING_RATE = 1e-5


def measure(settings: Settings) -> dict | None:
    """Build the model with random weights, train it, and return what was seen (on rank 0)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    ceiling = measured_ceiling(device, *(() if device == "cuda" else (512, 3)))
    if device == "cuda":
        torch.cuda.empty_cache()
    torch.manual_seed(0)
    trainer = _Zero(settings, device) if settings.zero_stage else _Plain(settings, device)
    model, config = trainer.model, trainer.config
    batch = _batch(config, settings, device)
    if settings.reuse_features:
        batch["image_features"] = _features(model, batch.pop("pixel_values"))
    memory = {"before the first step": _allocated(device)}
    seconds, losses = [], []
    for step in range(settings.warm_up + settings.steps):
        if step == settings.warm_up and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            memory["between steps"] = _allocated(device)
        synchronize(device)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        start = time.perf_counter()
        losses.append(trainer.step(batch))
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    losses = [loss.item() for loss in losses]
    seconds = seconds[settings.warm_up :]
    median = statistics.median(seconds)
    rate = settings.micro_batch / median
    supervised = int((batch["labels"][0] != -100).sum())
    work = useful_flop(
        config, settings.workload, settings.text_tokens, supervised, settings.reuse_features
    )
    positions = config.vision.num_image_tokens + 2 + settings.text_tokens
    row = {
        "samples_per_s_per_gpu": rate,
        "tokens_per_s_per_gpu": rate * positions,
        "roofline_share": rate * work / ceiling,
        "step_s": {"median": median, "fastest": min(seconds), "slowest": max(seconds)},
        "useful_tflop_per_sample": work / 1e12,
        "ceiling_tflops": ceiling / 1e12,
        "peak_allocated_gib": None,
        "peak_reserved_gib": None,
        "memory_gib": memory,
        "losses": losses,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "versions": {"python": sys.version.split()[0], **_versions()},
    }
    if device == "cuda":
        row["peak_allocated_gib"] = torch.cuda.max_memory_allocated() / GIB
        row["peak_reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    return row if int(os.environ.get("RANK", 0)) == 0 else None


def _build(settings: Settings, device: str) -> tuple[nn.Module, ChatGLMConfig]:
    """Random weights of the real size in bf16, with what is not trained frozen."""
    changes = json.loads(Path(settings.config).read_text()) if settings.config else {}
    config = ChatGLMConfig(**changes)
    if settings.workload != "qlora":
        _cap_memory(settings)
    if settings.against is not None:
        original = AutoConfig.from_pretrained(settings.against, trust_remote_code=True)
        model = AutoModelForCausalLM.from_config(
            original, trust_remote_code=True, dtype=torch.bfloat16
        )
        model = select_weights(model, settings.workload).train()
        model.gradient_checkpointing_enable()
        return model, config
    config.skip_logits = True
    config.loss_chunk_size = settings.loss_chunk
    model = GLM4VForCausalLM._from_config(config, dtype=torch.bfloat16)
    if settings.workload == "qlora":
        # The cap comes after: a model that is loaded is never whole on the GPU, this one is.
        quantise(model, device)
        _cap_memory(settings)
    model = select_weights(model, settings.workload).train()
    checkpoint_layers(model, settings.tower, settings.language)
    if settings.compile:
        compile_layers(model)
    return model, config


def _cap_memory(settings: Settings) -> None:
    """Let torch allocate no more than the limit; the driver's and NCCL's own are beside it."""
    if settings.memory_limit is None or not torch.cuda.is_available():
        return
    torch.cuda.empty_cache()
    share = settings.memory_limit * GIB / torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(share)


class _Zero:
    """DeepSpeed at stage 1 to 3, with torch's AdamW."""

    def __init__(self, settings: Settings, device: str):
        import deepspeed
        from transformers.integrations import HfDeepSpeedConfig

        deepspeed.init_distributed(verbose=False)
        ours = settings.against is None
        options = zero_config(
            settings.zero_stage,
            whole_layers=ours and settings.compile,
            kept_gathered=settings.kept_gathered,
            offload_optimizer=settings.offload,
        )
        del options["gradient_accumulation_steps"]
        options |= {
            "train_micro_batch_size_per_gpu": settings.micro_batch,
            "gradient_clipping": 0.0,
        }
        self.hf_config = HfDeepSpeedConfig(options)  # alive while the model is built
        # Under stage 3 DeepSpeed puts every new parameter on its device, sharded.
        with nullcontext() if settings.zero_stage == 3 else torch.device(device):
            self.model, self.config = _build(settings, device)
        if ours and settings.compile and settings.zero_stage == 3:
            gather_whole_layers(self.model)
        self.engine, *_ = deepspeed.initialize(
            model=self.model, config=options, optimizer=_optimizer(self.model)
        )

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        loss = self.engine(**batch).loss
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()


class _Plain:
    """One process, nothing sharded."""

    def __init__(self, settings: Settings, device: str):
        with torch.device(device):
            self.model, self.config = _build(settings, device)
        self.optimizer = _optimizer(self.model)

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)


def _batch(config: ChatGLMConfig, settings: Settings, device: str) -> dict[str, Tensor]:
    """Rows of one image and then text, learned in its second half."""
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", 0)))
    rows, length = settings.micro_batch, settings.text_tokens
    ids_of_text = min(config.boi_token_id, config.pad_token_id)
    text = torch.randint(0, ids_of_text, (rows, length), generator=generator)
    image = torch.tensor([config.boi_token_id, config.pad_token_id, config.eoi_token_id])
    ids = torch.cat((image.expand(rows, 3), text), dim=1)
    labels = ids.clone()
    labels[:, : 3 + length // 2] = -100
    side = config.vision.image_size
    pixels = torch.randn(rows, config.vision.in_channels, side, side, generator=generator)
    name = "pixel_values" if settings.against is None else "images"
    batch = {"input_ids": ids, "labels": labels, name: pixels.bfloat16()}
    return {name: values.to(device) for name, values in batch.items()}


def _features(model: nn.Module, pixels: Tensor) -> Tensor:
    """What a first epoch would have kept of these pictures."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    with torch.no_grad():
        return base.transformer.get_image_features(pixels)


def _allocated(device: str) -> float | None:
    return torch.cuda.memory_allocated() / GIB if device == "cuda" else None


def _versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "transformers", "deepspeed", "peft", "bitsandbytes", "glm4v-patched"):
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
