"""What a user may choose, by name; needs no torch, so that mistakes are answered at once."""

# full: all weights; lm: all but the vision tower and its adapter; lora_lm: LoRA on the language
# model; lora_all: on both towers; qlora: as lora_lm, on weights of 4 bits.
TRAINED = ("full", "lm", "lora_lm", "lora_all", "qlora")
TRAINING_THE_TOWER = ("full", "lora_all")

# Of activations, from all kept to all computed again; "every N" lies between none and full.
POLICIES = ("none", "selective", "attention", "full")
# These count what runs inside of a layer, where ZeRO-3 must then gather nothing.
SELECTIVE_POLICIES = ("selective", "attention")


def check_trained(trained: str) -> None:
    """Raises ``ValueError`` if there is no such choice of weights."""
    if trained not in TRAINED:
        raise ValueError(f"trained is {trained!r}; expected one of {', '.join(TRAINED)}")


def check_policy(name: str, policy: str) -> None:
    """Raises ``ValueError`` if there is no such policy; ``name`` says whose."""
    kind, _, number = str(policy).partition(" ")  # a recipe may hold anything
    if policy in POLICIES or (kind == "every" and number.isdecimal() and int(number) > 0):
        return
    expected = ", ".join(POLICIES)
    raise ValueError(f"the {name}'s policy is {policy!r}; expected {expected} or 'every N', N > 0")
