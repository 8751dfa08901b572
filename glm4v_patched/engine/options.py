"""The engine's options; needs no torch, so that mistakes are reported at once."""

import importlib.util
from dataclasses import dataclass
from typing import Any

from ..terminal_text import pip_install
from .activation_policies import POLICIES

TRAINED = ("full", "lm", "lora_lm", "lora_all", "qlora")
"""full: all weights; lm: all but the vision tower and its adapter; lora_lm: LoRA on the language
model; lora_all: on the vision tower, too; qlora: as lora_lm, on weights of 4 bits."""

PARTS = ("tower", "adapter", "language_model")
"""Of the model: the vision tower's layers and embeddings; what projects its output (the adapter, no
LoRA); the rest. What is trained may also be some of them, as "tower+adapter"."""

LANGUAGE_TARGETS = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
TOWER_TARGETS = ("query_key_value", "dense", "fc1", "fc2")
"""Linear layers that LoRA can be put on."""

OPTIMIZERS = ("adamw", "adamw_8bit")
"""adamw: two moments in fp32; adamw_8bit: in 8 bits (bitsandbytes), 6 bytes less for a weight."""

MAX_GRAD_NORM = 1.0
"""Gradients are clipped to this norm."""

ADAMW: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
"""As TrainingArguments has them by default."""

ALL_WEIGHTS = 1e12
"""A number of weights that is more than any model has."""

# What choices import, beside what all training needs.
PACKAGES = {
    "lora_lm": ["peft"],
    "lora_all": ["peft"],
    "qlora": ["peft", "bitsandbytes"],
    "adamw_8bit": ["bitsandbytes"],
    "4bit": ["bitsandbytes"],
    "8bit": ["bitsandbytes"],
    "--pictures": ["matplotlib"],
    "serve": ["starlette", "uvicorn"],
}
# What transformers needs to load weights that were saved quantised, by the method in their config.
OF_QUANTISERS = {
    "aqlm": ["aqlm"],
    "auto-round": ["auto_round"],
    "awq": ["gptqmodel"],
    "bitsandbytes": ["bitsandbytes"],
    "compressed-tensors": ["compressed_tensors"],
    "gptq": ["gptqmodel"],
    "hqq": ["hqq"],
    "quanto": ["optimum"],
    "quark": ["quark"],
    "torchao": ["torchao"],
    "vptq": ["vptq"],
}
PACKAGES |= OF_QUANTISERS


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """Adapters, in peft's words. None is the default, or what adapters have that go on being
    trained; of ``alpha`` the default is twice the rank."""

    rank: int = 8
    alpha: int | None = None
    dropout: float | None = None
    targets: tuple[str, ...] | None = None
    use_rslora: bool | None = None
    use_dora: bool | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Of the linear layers that have adapters; the default is what published ones have."""
        return ("query_key_value",) if self.targets is None else self.targets


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How a model is trained. "auto" (None for a number) is decided by
    :func:`memory_plan.decide`, before :mod:`prepare` acts by it."""

    trained: str = "full"  # one of TRAINED, or PARTS joined by "+"
    lora: LoraOptions = LoraOptions()
    precision: str = "bf16"  # or fp32: of the computation and of what is saved
    zero_stage: int = 3  # of DeepSpeed; 0 is a single process without it
    fp8: bool = False  # matrix products of both towers' layers
    # Weights that are held in fp8 and not sharded are kept transposed, too, for the backward pass,
    # which otherwise transposes each where it is used; decide() may turn it off for its memory.
    keep_transposed: bool = True
    attn_implementation: str | None = None  # of transformers; None is its choice
    tower: str = "auto"  # policy of kept activations of the vision tower's layers
    language: str = "auto"  # of the language model's
    compile: bool | str = "auto"  # "auto": on a GPU, where the steps make up for its time
    optimizer: str = "adamw"  # one of OPTIMIZERS
    offload: bool | str = "auto"  # the optimizer's states and fp32 weights are on the CPU
    # DeepSpeed's: weights that may stay gathered between a layer's forward and its backward.
    stage3_max_live_parameters: float | None = None
    memory_limit: float | None = None  # GiB that torch may allocate on a GPU
    # DeepSpeed's ZeRO++: processes that share a second copy of the weights, gathers in 8 bits, sums
    # of gradients in 4.
    zero_hpz_partition_size: int = 1
    zero_quantized_weights: bool = False
    zero_quantized_gradients: bool = False
    skip_logits: bool = True  # the loss comes from supervised positions alone, in chunks
    loss_chunk_size: int | None = None  # positions of a chunk; None: as the model's config says
    # Of deepspeed.zero3; of the last, 0 is any number.
    gather_in_place: bool = True
    norms_in_place: bool = True
    layers_ahead: int = 3

    @property
    def is_decided(self) -> bool:
        asked = (self.tower, self.language, self.offload, self.compile)
        return "auto" not in asked and self.stage3_max_live_parameters is not None

    @property
    def policies(self) -> dict[str, str | float | None]:
        """What reports say of them; weights that may stay ``gathered`` as a number."""
        live = self.stage3_max_live_parameters
        return {"tower": self.tower, "language": self.language, "gathered": live}

    @property
    def holds_fp8(self) -> bool:
        """Whether frozen weights are in fp8 also between their uses: under LoRA, where they are not
        saved. Second copies (hpZ) are DeepSpeed's to gather, which takes one type at a time."""
        return self.fp8 and is_lora(self.trained) and self.zero_hpz_partition_size == 1

    @property
    def keeps_transposed(self) -> bool:
        return self.keep_transposed and self.holds_fp8 and self.zero_stage < 3

    @property
    def quantises_built(self) -> bool:
        """Whether frozen weights are on one GPU, smaller than they are built."""
        return self.trained == "qlora" or (self.holds_fp8 and self.zero_stage < 3)

    @property
    def gathers_whole_layers(self) -> bool:
        """Whether ZeRO-3 has to gather each layer at once, and nothing inside of it: where it is
        compiled, holds weights in fp8 beside biases in bf16, or is checkpointed selectively, which
        fails where the recomputation runs a collective that the forward did not run."""
        asked = [POLICIES.get(name) for name in (self.tower, self.language)]
        selective = any(policy and policy.widest_linear is not None for policy in asked)
        return self.zero_stage == 3 and (self.compile is True or self.holds_fp8 or selective)


def check_trained(trained: str) -> None:
    """Raises ``ValueError`` if there is no such choice of weights."""
    parts = trained.split("+")
    if trained not in TRAINED and ({*parts} - {*PARTS} or len({*parts}) < len(parts)):
        raise ValueError(
            f"trained is {trained!r}; expected one of {', '.join(TRAINED)}, or parts of "
            f"{'+'.join(PARTS)}"
        )


def is_lora(trained: str) -> bool:
    """Whether adapters are trained, and not weights of the model."""
    return trained in ("lora_lm", "lora_all", "qlora")


def parts_trained(trained: str) -> frozenset[str]:
    """The parts whose own weights are trained; none of LoRA."""
    if is_lora(trained):
        return frozenset()
    return frozenset({"full": PARTS, "lm": ("language_model",)}.get(trained, trained.split("+")))


def parts_with_rates(trained: str) -> frozenset[str]:
    """The parts that may have learning rates of their own: those in which anything is trained."""
    if trained == "lora_all":
        return frozenset({"tower", "language_model"})
    return parts_trained(trained) or frozenset({"language_model"})


def part_of(name: str) -> str:
    """The part of the model that a weight belongs to, by its name."""
    if ".vision." not in name:
        return "language_model"
    inside = (".vision.transformer.", ".vision.patch_embedding.")  # of "transformer.vision."
    return "tower" if any(start in name for start in inside) else "adapter"


def trains_tower(trained: str) -> bool:
    """Whether gradients flow through the vision tower."""
    return trained == "lora_all" or "tower" in parts_trained(trained)


def trains_vision(trained: str) -> bool:
    """Whether what an image becomes changes with every step."""
    return trains_tower(trained) or "adapter" in parts_trained(trained)


def require_packages(choice: str, typed: str | None = None) -> None:
    """Raise ``RuntimeError`` naming what a choice, ``typed`` so, needs and does not find."""
    missing = [name for name in PACKAGES.get(choice, []) if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(
            f"{typed or choice} needs {' and '.join(missing)}: {pip_install(*missing)}"
        )
