"""What a user may choose, by name; needs no torch, so that mistakes are answered at once."""

import importlib.util

# full: all weights; lm: all but the vision tower and its adapter; lora_lm: LoRA on the language
# model; lora_all: on both towers; qlora: as lora_lm, on weights of 4 bits.
TRAINED = ("full", "lm", "lora_lm", "lora_all", "qlora")

# Of activations, from all kept to all computed again; "every N" lies between none and full.
POLICIES = ("none", "linear", "selective", "attention", "full")
# These count what runs inside of a layer, where ZeRO-3 must then gather nothing.
SELECTIVE_POLICIES = ("linear", "selective", "attention")

# A number of weights that is more than any model has.
ALL_WEIGHTS = 1e12

# adamw: two moments in fp32; adamw_8bit: in 8 bits (bitsandbytes), 6 bytes less for a weight.
OPTIMIZERS = ("adamw", "adamw_8bit")

# What choices import, beside what all training needs.
PACKAGES = {
    "lora_lm": ["peft"],
    "lora_all": ["peft"],
    "qlora": ["peft", "bitsandbytes"],
    "adamw_8bit": ["bitsandbytes"],
    "liger": ["liger_kernel"],
}


def check_trained(trained: str) -> None:
    """Raises ``ValueError`` if there is no such choice of weights."""
    if trained not in TRAINED:
        raise ValueError(f"trained is {trained!r}; expected one of {', '.join(TRAINED)}")


def trains_tower(trained: str) -> bool:
    """Whether gradients flow through the vision tower."""
    return trained in ("full", "lora_all")


def check_optimizer(optimizer: str) -> None:
    """Raises ``ValueError`` if there is no such optimizer."""
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"the optimizer is {optimizer!r}; expected {' or '.join(OPTIMIZERS)}")


def require_packages(choice: str) -> None:
    """Raise ``RuntimeError`` naming what a choice needs and does not find."""
    missing = [name for name in PACKAGES.get(choice, []) if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(
            f"{choice} needs {' and '.join(missing)}: pip install {' '.join(missing)}"
        )


def check_policy(name: str, policy: str, or_auto: bool = False) -> None:
    """Raises ``ValueError`` if there is no such policy; ``name`` says whose."""
    kind, _, number = str(policy).partition(" ")  # a recipe may hold anything
    is_every = kind == "every" and number.isdecimal() and int(number) > 0
    if is_every or policy in POLICIES or (or_auto and policy == "auto"):
        return
    expected = ", ".join((("auto",) if or_auto else ()) + POLICIES)
    raise ValueError(f"the {name}'s policy is {policy!r}; expected {expected} or 'every N', N > 0")


def gathers_whole_layers(zero_stage: int, compiled: bool, *policies: str) -> bool:
    """Whether ZeRO-3 has to gather each layer at once, and nothing inside of it.

    Not only for compiled layers: torch's selective checkpoints fail where the recomputation runs a
    collective that the forward did not run.
    """
    return zero_stage == 3 and (compiled or not {*policies}.isdisjoint(SELECTIVE_POLICIES))
