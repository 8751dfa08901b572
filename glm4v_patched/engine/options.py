"""The engine's options; needs no torch, so that mistakes are reported at once."""

import importlib.util
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from ..option_fields import EXACT, REFUSE_OTHERS, option
from ..terminal_text import pip_install
from .activation_policies import EVERY, POLICIES

TRAINED = ("full", "lm", "lora_lm", "lora_all", "qlora")
"""full: all weights; lm: all but the vision tower and its projector; lora_lm: LoRA on the language
model; lora_all: on the vision tower, too; qlora: as lora_lm, on weights of 4 bits."""

PARTS = ("tower", "projector", "language_model")
"""Of the model: the vision tower's layers and embeddings; what projects its output (the projector); the rest. What is trained may also be some of them, as "tower+projector"."""

Precision = Literal["bf16", "fp32"]
"""Of the computation and of what is saved."""

Optimizer = Literal["adamw", "adamw_8bit"]
"""adamw: two moments in fp32; adamw_8bit: in 8 bits (bitsandbytes), 6 bytes less for a weight."""

Target = Literal["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "fc1", "fc2"]
TARGETS: tuple[str, ...] = get_args(Target)
LANGUAGE_TARGETS = TARGETS[:4]
TOWER_TARGETS = (*TARGETS[:2], *TARGETS[4:])
"""Linear layers that LoRA can be put on."""

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
    "serve": ["starlette", "uvicorn"],
}
# What transformers needs to load weights that were saved quantized, by the method in their config.
QUANTIZER_PACKAGES = {
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
PACKAGES |= QUANTIZER_PACKAGES

_POLICY: dict[str, Any] = {
    "pattern": f"^(auto|{'|'.join(POLICIES)}|every [1-9][0-9]{{0,8}})$",
    "expected": f"auto, {', '.join(POLICIES)} or {EVERY}, N > 0",
    "strict": True,
}


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """Adapters, where ``trained`` asks for them: the section ``lora`` of a recipe."""

    __pydantic_config__ = REFUSE_OTHERS

    rank: int = option(
        8, "Rank of the adapters; the model's layers have at most 4096.", ge=1, le=4096, strict=True
    )
    alpha: int | None = option(
        None,
        "What they add is multiplied by alpha / rank; null: twice the rank. Here and below, "
        "adapters that go on being trained keep what they have where null is said.",
        ge=1,
        le=2**31 - 1,
        strict=True,
    )
    dropout: float | None = option(
        None, "Of their input, in training; null: 0.", ge=0, lt=1, strict=True
    )
    targets: tuple[Target, ...] | Literal["all-linear"] | None = option(
        None,
        'The linear layers that have adapters, of each layer of what "trained" says (fc1 and fc2 '
        "are the vision tower's, dense_... the language model's); null: query_key_value.",
        expected=f"a list of {', '.join(TARGETS)}, or all-linear or null",
    )
    use_rslora: bool | None = option(
        None, "Multiply by alpha / sqrt(rank) instead; null: false.", strict=True
    )
    use_dora: bool | None = option(
        None,
        "Learn the weights' magnitudes, too (not with engine.zero_stage 3); null: false.",
        strict=True,
    )

    @property
    def names(self) -> tuple[str, ...]:
        """Of the linear layers that have adapters, as far as what is trained has them; the default
        is what published ones have."""
        if self.targets == "all-linear":
            return TARGETS
        return ("query_key_value",) if self.targets is None else self.targets


@dataclass(frozen=True, kw_only=True)
class EngineSection:
    """How it is computed: numbers may round differently, what is learned is the same.

    The section ``engine`` of a recipe, and options of ``bench``. "auto" is decided by
    :func:`memory_plan.decide`.
    """

    __pydantic_config__ = REFUSE_OTHERS

    zero_stage: Annotated[Literal[0, 1, 2, 3], EXACT] = option(
        3,
        "Of DeepSpeed; 0 is a single process without it. What is trained is then held in fp32, and "
        "computed with under autocast where precision is bf16.",
    )
    precision: Precision = option("bf16", "Of the computation and of what is saved.")
    fp8: bool = option(
        False,
        "Matrix products in fp8 (GPUs of compute capability 8.9 and newer, bf16 otherwise): "
        "faster, and rounded more coarsely. What is saved is bf16 as without it.",
        strict=True,
    )
    tower: str = option(
        "auto",
        'Which activations the vision tower\'s layers keep; "auto" is the fastest for which the '
        'GPUs\' free memory suffices ("full" on a CPU).',
        **_POLICY,
    )
    language: str = option("auto", "The same for the language model's layers.", **_POLICY)
    compile: Annotated[Literal[True, False, "auto"], EXACT] = option(
        "auto",
        'Compile the layers; "auto": on a GPU, for 300 steps or more. Compiling takes about a '
        "minute, and a step is then a quarter shorter.",
    )
    optimizer: Optimizer = option(
        "adamw", "AdamW with its states in fp32, or in 8 bits (bitsandbytes)."
    )
    offload: Annotated[Literal[True, False, "auto"], EXACT] = option(
        "auto",
        'Keep the optimizer\'s states and the fp32 weights on the CPU; "auto": where nothing else '
        "fits.",
    )
    memory_limit: float | None = option(
        None,
        "GiB that torch may allocate on a GPU, where others use it, too; null: all that is free.",
        ge=1,
        le=1e6,
        strict=True,
    )
    zero_hpz_partition_size: int = option(
        1,
        "DeepSpeed's ZeRO++ (hpZ): the GPUs of one machine, which then keep a second copy of the "
        "weights between them, so that the backward pass gathers nothing over the network; 1 for "
        "none.",
        ge=1,
        le=2**31 - 1,
        strict=True,
    )
    zero_quantized_weights: bool = option(
        False,
        "DeepSpeed's ZeRO++ (qwZ): gather weights in 8 bits; needs CUDA's compiler.",
        strict=True,
    )
    zero_quantized_gradients: bool = option(
        False,
        "DeepSpeed's ZeRO++ (qgZ): sum gradients in 4 bits; needs CUDA's compiler.",
        strict=True,
    )


@dataclass(frozen=True, kw_only=True)
class EngineOptions(EngineSection):
    """How a model is trained: the section, with what no recipe says. Decided, no field that was
    "auto" (None for a number) still is, before :mod:`prepare` acts by it."""

    trained: str = "full"  # one of TRAINED, or PARTS joined by "+"
    lora: LoraOptions = LoraOptions()
    # Weights that are held in fp8 and not sharded are kept transposed, too, for the backward pass,
    # which otherwise transposes each where it is used; decide() may turn it off for its memory.
    store_transposed: bool = True
    attn_implementation: str | None = None  # of transformers; None is its choice
    # DeepSpeed's: weights that may stay gathered between a layer's forward and its backward.
    stage3_max_live_parameters: float | None = None
    skip_logits: bool = True  # the loss comes from supervised positions alone, in chunks
    loss_chunk_size: int | None = None  # positions of a chunk; None: as the model's config says

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
    def stores_fp8(self) -> bool:
        """Whether frozen weights are in fp8 also between their uses: under LoRA, where they are not
        saved. Second copies (hpZ) are DeepSpeed's to gather, which takes one type at a time."""
        return self.fp8 and is_lora(self.trained) and self.zero_hpz_partition_size == 1

    @property
    def stores_transposed(self) -> bool:
        return self.store_transposed and self.stores_fp8 and self.zero_stage < 3

    @property
    def shrinks_after_build(self) -> bool:
        """Whether frozen weights are on one GPU, smaller than they are built."""
        return self.trained == "qlora" or (self.stores_fp8 and self.zero_stage < 3)

    @property
    def gathers_whole_layers(self) -> bool:
        """Whether ZeRO-3 has to gather each layer at once, and nothing inside of it: where it is
        compiled, holds weights in fp8 beside biases in bf16, or is checkpointed selectively, which
        fails where the recomputation runs a collective that the forward did not run."""
        asked = [POLICIES.get(name) for name in (self.tower, self.language)]
        selective = any(policy and policy.widest_linear is not None for policy in asked)
        return self.zero_stage == 3 and (self.compile is True or self.stores_fp8 or selective)


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


def trained_parts(trained: str) -> frozenset[str]:
    """The parts whose own weights are trained; none of LoRA."""
    if is_lora(trained):
        return frozenset()
    return frozenset({"full": PARTS, "lm": ("language_model",)}.get(trained, trained.split("+")))


def parts_with_rates(trained: str) -> frozenset[str]:
    """The parts that may have learning rates of their own: those in which anything is trained."""
    if trained == "lora_all":
        return frozenset({"tower", "language_model"})
    return trained_parts(trained) or frozenset({"language_model"})


def part_of_parameter(name: str) -> str:
    """The part of the model that a weight belongs to, by its name."""
    if ".vision." not in name:
        return "language_model"
    inside = (".vision.transformer.", ".vision.patch_embedding.")  # of "transformer.vision."
    return "tower" if any(start in name for start in inside) else "projector"


def trains_tower(trained: str) -> bool:
    """Whether gradients flow through the vision tower."""
    return trained == "lora_all" or "tower" in trained_parts(trained)


def trains_vision(trained: str) -> bool:
    """Whether what an image becomes changes with every step."""
    return trains_tower(trained) or "projector" in trained_parts(trained)


def require_packages(choice: str, typed: str | None = None) -> None:
    """Raise ``RuntimeError`` naming what a choice, ``typed`` so, needs and does not find."""
    missing = [name for name in PACKAGES.get(choice, []) if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(
            f"{typed or choice} needs {' and '.join(missing)}: {pip_install(*missing)}"
        )
