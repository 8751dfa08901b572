"""The engine's options. Needs no torch: a user's mistakes are reported before its slow import."""

import importlib.util
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from ..cpu import has_bf16
from ..option_fields import EXACT, REFUSE_OTHERS, option
from ..terminal_text import pip_install
from .activation_policies import EVERY_N, POLICIES

TRAINED_CHOICES = ("full", "lm", "lora_lm", "lora_all", "qlora")
"""Values of the option ``trained``: which weights are trained.

full: all weights; lm: the language model's, without vision tower and projector; lora_lm: LoRA on
the language model; lora_all: LoRA on the vision tower, too; qlora: as lora_lm, on 4-bit weights.
"""

MODEL_PARTS = ("tower", "projector", "language_model")
"""Parts of the model. tower: the vision tower's layers and embeddings; projector: the other weights
of the vision part; language_model: the rest. The option ``trained`` may also be a list of these
names, joined by "+"."""

Precision = Literal["auto", "bf16", "fp32"]
"""Dtype of the computation and of saved weights."""

Optimizer = Literal["adamw", "adamw_8bit"]
"""adamw: two moments in fp32; adamw_8bit: in 8 bits (bitsandbytes), 6 bytes less per weight."""

LoraTarget = Literal["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "fc1", "fc2"]
LORA_TARGETS: tuple[str, ...] = get_args(LoraTarget)
"""Linear layers that can have LoRA adapters: the first four are in each layer of the language
model, and all except dense_h_to_4h and dense_4h_to_h are in each layer of the vision tower."""
LANGUAGE_TARGETS = LORA_TARGETS[:4]
TOWER_TARGETS = (*LORA_TARGETS[:2], *LORA_TARGETS[4:])

UNLIMITED_PARAMETERS = 1e12
"""A number above that of any model's weights: no limit for stage3_max_live_parameters."""

# Packages that one choice needs, beside those that every training needs. The keys are values of
# trained, optimizer and --weights, methods of quantization, and the command serve.
REQUIRED_PACKAGES = {
    "lora_lm": ["peft"],
    "lora_all": ["peft"],
    "qlora": ["peft", "bitsandbytes"],
    "adamw_8bit": ["bitsandbytes"],
    "4bit": ["bitsandbytes"],
    "8bit": ["bitsandbytes"],
    "serve": ["starlette", "uvicorn"],
}
# Packages that transformers needs to load quantized weights, by the method in their config.
QUANTIZER_PACKAGES = {
    "aqlm": ["aqlm"],
    "auto-round": ["auto_round"],
    "awq": ["gptqmodel"],
    "bitsandbytes": ["bitsandbytes"],
    "compressed-tensors": ["compressed_tensors"],
    "gptq": ["gptqmodel", "optimum"],
    "hqq": ["hqq"],
    "quanto": ["optimum"],
    "quark": ["quark"],
    "torchao": ["torchao"],
    "vptq": ["vptq"],
}
REQUIRED_PACKAGES |= QUANTIZER_PACKAGES

_POLICY_CHECKS: dict[str, Any] = {
    "pattern": f"^(auto|{'|'.join(POLICIES)}|every [1-9][0-9]{{0,8}})$",
    "expected": f"auto, {', '.join(POLICIES)} or {EVERY_N}, N > 0",
    "strict": True,
}


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """LoRA adapters, if ``trained`` uses them: the section ``lora`` of a recipe.

    For adapters that are trained further, null keeps their own setting.
    """

    __pydantic_config__ = REFUSE_OTHERS

    rank: int = option(
        8,
        "Rank of the adapters, at most 4096 (the model's hidden size).",
        ge=1,
        le=4096,
        strict=True,
    )
    alpha: int | None = option(
        None,
        "The adapters' output is multiplied by alpha / rank; null: twice the rank. Here and below, "
        "null keeps the setting of adapters that are trained further.",
        ge=1,
        le=2**31 - 1,
        strict=True,
    )
    dropout: float | None = option(
        None, "Dropout of the adapters' input in training; null: 0.", ge=0, lt=1, strict=True
    )
    targets: tuple[LoraTarget, ...] | Literal["all-linear"] | None = option(
        None,
        "The linear layers with adapters, in each transformer layer of the trained parts (fc1 and "
        "fc2 are the vision tower's, dense_... the language model's); null: query_key_value.",
        expected=f"a list of {', '.join(LORA_TARGETS)}, or all-linear or null",
    )
    use_rslora: bool | None = option(
        None, "Multiply by alpha / sqrt(rank) instead (rsLoRA); null: false.", strict=True
    )
    use_dora: bool | None = option(
        None,
        "Train the weights' magnitudes, too (DoRA; not with engine.zero_stage 3); null: false.",
        strict=True,
    )

    @property
    def target_names(self) -> tuple[str, ...]:
        """Names of the linear layers with adapters.

        "all-linear" includes layers of the vision tower, also if the tower gets no adapters. The
        default is that of the adapters published for this model.
        """
        if self.targets == "all-linear":
            return LORA_TARGETS
        return ("query_key_value",) if self.targets is None else self.targets


@dataclass(frozen=True, kw_only=True)
class EngineSection:
    """How a training is computed: speed, memory and rounding; not what is trained.

    The section ``engine`` of a recipe, and options of ``bench``. :func:`memory_plan.decide_options`
    replaces "auto".
    """

    __pydantic_config__ = REFUSE_OTHERS

    zero_stage: Annotated[Literal[0, 1, 2, 3], EXACT] = option(
        3,
        "DeepSpeed's ZeRO stage; 0 is one process without DeepSpeed, with trained weights in fp32, "
        "and with autocast if precision is bf16.",
    )
    precision: Precision = option(
        "auto",
        'Dtype of the computation and of saved weights; "auto": fp32 on CPUs without instructions '
        "for bf16, where it is two to three times faster, bf16 elsewhere.",
    )
    fp8: bool = option(
        False,
        "Matrix products in fp8 (GPUs of compute capability 8.9 and newer), all else in bf16: "
        "faster, with coarser rounding. Weights are saved in bf16.",
        strict=True,
    )
    tower: str = option(
        "auto",
        "Activation checkpointing of the vision tower's layers: which activations are saved; the "
        'others are recomputed. "auto": the fastest policy that fits into the GPUs\' free memory '
        '("full" on a CPU).',
        **_POLICY_CHECKS,
    )
    language: str = option("auto", "The same for the language model's layers.", **_POLICY_CHECKS)
    compile: Annotated[Literal[True, False, "auto"], EXACT] = option(
        "auto",
        'Compile the layers; "auto": on a GPU, for 300 steps or more. Compiling takes about a '
        "minute, and shortens a step by a quarter.",
    )
    optimizer: Optimizer = option(
        "adamw", "AdamW with its moments in fp32, or in 8 bits (bitsandbytes)."
    )
    offload: Annotated[Literal[True, False, "auto"], EXACT] = option(
        "auto",
        'Keep optimizer states and fp32 weights on the CPU; "auto": if nothing else fits.',
    )
    memory_limit: float | None = option(
        None,
        "GiB that torch may allocate on a GPU that other programs use, too; null: all free memory.",
        ge=1,
        le=1e6,
        strict=True,
    )
    zero_hpz_partition_size: int = option(
        1,
        "DeepSpeed's ZeRO++ (hpZ): the number of GPUs of a machine that share a second copy of the "
        "weights, so that backward gathers nothing over the network; 1: no second copy.",
        ge=1,
        le=2**31 - 1,
        strict=True,
    )


@dataclass(frozen=True, kw_only=True)
class EngineOptions(EngineSection):
    """Everything that determines how a model is trained: the section ``engine`` and other fields.

    The options must be decided before :mod:`prepare` uses them: no field may be "auto", and
    ``stage3_max_live_parameters`` must be a number.

    Attributes:
        trained: One of :data:`TRAINED_CHOICES`, or :data:`MODEL_PARTS` joined by "+".
        may_store_transposed_fp8: Whether fp8 weights may also be stored transposed, so that the
            backward pass need not transpose them each time. :attr:`stores_transposed_fp8` says
            whether they are. ``decide_options`` may turn the option off to save memory.
        stage3_max_live_parameters: DeepSpeed's limit of the number of weights that stay gathered
            from a layer's forward to its backward.
    """

    trained: str = "full"
    lora: LoraOptions = LoraOptions()
    may_store_transposed_fp8: bool = True
    stage3_max_live_parameters: float | None = None

    @property
    def is_decided(self) -> bool:
        """Whether nothing is "auto" any more."""
        settings = (self.tower, self.language, self.offload, self.compile, self.precision)
        return "auto" not in settings and self.stage3_max_live_parameters is not None

    @property
    def policies(self) -> dict[str, str | float | None]:
        """The decided policies, for reports; "gathered" is ``stage3_max_live_parameters``."""
        live = self.stage3_max_live_parameters
        return {"tower": self.tower, "language": self.language, "gathered": live}

    @property
    def stores_fp8(self) -> bool:
        """Whether frozen weights are stored in fp8.

        They are stored in fp8 only under LoRA, whose checkpoints do not contain them, and not with
        hpZ (a second copy of the shards within a machine), because DeepSpeed gathers this copy in
        one dtype at a time.
        """
        return self.fp8 and is_lora(self.trained) and self.zero_hpz_partition_size == 1

    @property
    def stores_transposed_fp8(self) -> bool:
        """Whether weights in fp8 are also stored transposed; weights that ZeRO-3 shards are not."""
        return self.may_store_transposed_fp8 and self.stores_fp8 and self.zero_stage < 3

    @property
    def quantizes_after_build(self) -> bool:
        """Whether frozen weights are quantized only after the model was built on the GPU."""
        return self.trained == "qlora" or (self.stores_fp8 and self.zero_stage < 3)

    @property
    def gathers_whole_layers(self) -> bool:
        """Whether ZeRO-3 must gather each layer as a whole, not its submodules one by one.

        Three options need this: compiled layers; weights stored in fp8, whose biases are in bf16;
        and selective checkpointing, which fails if the recomputation runs a collective that forward
        did not run.
        """
        policies = [POLICIES.get(name) for name in (self.tower, self.language)]
        is_selective = any(policy and policy.max_saved_width is not None for policy in policies)
        return self.zero_stage == 3 and (self.compile is True or self.stores_fp8 or is_selective)


def choose_precision(on_cpu: bool) -> tuple[Literal["bf16", "fp32"], str]:
    """Return the precision for "auto", and the reason; on GPUs the reason is empty."""
    if not on_cpu:
        return "bf16", ""
    if has_bf16():
        return "bf16", "this CPU has instructions for bf16"
    return "fp32", "this CPU has no instructions for bf16"


def check_trained(trained: str) -> None:
    """Raise ``ValueError`` if there is no such choice of trained weights."""
    parts = trained.split("+")
    if trained not in TRAINED_CHOICES and ({*parts} - {*MODEL_PARTS} or len({*parts}) < len(parts)):
        raise ValueError(
            f"trained is {trained!r}; expected one of {', '.join(TRAINED_CHOICES)}, or one or more "
            f"of {', '.join(MODEL_PARTS)}, joined by +"
        )


def is_lora(trained: str) -> bool:
    """Return whether adapters are trained, and not the model's own weights."""
    return trained in ("lora_lm", "lora_all", "qlora")


def trained_parts(trained: str) -> frozenset[str]:
    """Return the parts of the model whose own weights are trained; none for LoRA."""
    if is_lora(trained):
        return frozenset()
    abbreviations = {"full": MODEL_PARTS, "lm": ("language_model",)}
    return frozenset(abbreviations.get(trained, trained.split("+")))


def parts_with_learning_rates(trained: str) -> frozenset[str]:
    """Return the parts with trained weights or adapters, which may have their own learning rate."""
    if trained == "lora_all":
        return frozenset({"tower", "language_model"})
    return trained_parts(trained) or frozenset({"language_model"})


def part_of_parameter(name: str) -> str:
    """Return the part of the model that contains the parameter of this name."""
    if ".vision." not in name:
        return "language_model"
    tower_modules = (".vision.transformer.", ".vision.patch_embedding.")
    return "tower" if any(module in name for module in tower_modules) else "projector"


def trains_tower(trained: str) -> bool:
    """Return whether gradients flow through the vision tower."""
    return trained == "lora_all" or "tower" in trained_parts(trained)


def trains_tower_or_projector(trained: str) -> bool:
    """Return whether tower or projector are trained, so that the embeddings of images change."""
    return trains_tower(trained) or "projector" in trained_parts(trained)


def require_packages(choice: str, subject: str | None = None) -> None:
    """Raise ``RuntimeError`` if packages that a choice needs are not installed.

    Args:
        choice: A key of :data:`REQUIRED_PACKAGES`. Other choices need no package.
        subject: Subject of the message's sentence, by default ``choice``.
    """
    packages = REQUIRED_PACKAGES.get(choice, [])
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(
            f"{subject or choice} needs {' and '.join(missing)}: {pip_install(*missing)}"
        )
