"""Policies: which activations of a layer are kept and which are computed again. Needs no torch.

A policy is one record of :data:`POLICIES`. :mod:`activation_checkpointing` applies it,
:mod:`memory_plan` estimates its memory, the recipe and the bench take it by its name.
"""

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class LayerSizes:
    """Of one token in one layer: channels of the dtype that is computed with, and multiply-adds
    (``..._work``).

    Narrow are linear layers no wider than 1.25 times the layer: of the language model query, key
    and value (one projection), ``dense`` and ``dense_4h_to_h``; of the tower ``dense`` and ``fc2``.
    """

    layer_input: float  # which a checkpoint keeps
    attention_output: float
    narrow_outputs: float
    wide_outputs: float
    saved_by_autograd: float  # all that backward takes of a layer that is not checkpointed
    elementwise_work: float
    wide_work: float
    narrow_work: float
    attention_work: float


@dataclass(frozen=True)
class Policy:
    """What a layer keeps from forward to backward, and what it computes a second time.

    ``keeps`` and ``recomputes`` are fields of :class:`LayerSizes`. Where ``widest_linear`` is a
    number, the layer is checkpointed selectively: kept are outputs of linear layers up to so many
    times its width.
    """

    name: str
    keeps: tuple[str, ...]
    recomputes: tuple[str, ...]
    widest_linear: float | None = None

    def channels(self, sizes: LayerSizes) -> float:
        """Kept of a token."""
        return sum(getattr(sizes, name) for name in self.keeps)

    def work(self, sizes: LayerSizes) -> float:
        """Multiply-adds done again for a token."""
        return sum(getattr(sizes, name) for name in self.recomputes)


# In the order in which more memory keeps more of them, and more of the others is not done again.
_KEPT = ("layer_input", "attention_output", "narrow_outputs", "wide_outputs")
_WORK = ("elementwise_work", "wide_work", "narrow_work", "attention_work")
_ALL = (
    # What autograd or the compiler asks for.
    Policy("none", keeps=("saved_by_autograd",), recomputes=()),
    Policy("linear", keeps=_KEPT, recomputes=_WORK[:1], widest_linear=inf),
    Policy("selective", keeps=_KEPT[:3], recomputes=_WORK[:2], widest_linear=1.25),
    Policy("attention", keeps=_KEPT[:2], recomputes=_WORK[:3], widest_linear=0),
    Policy("full", keeps=_KEPT[:1], recomputes=_WORK),
)
POLICIES = {policy.name: policy for policy in _ALL}
"""From all kept to all computed again. "every N" lies between none and full: every Nth layer, from
the first, is full, the others none."""
EVERY = "every N"


def policies_of_layers(name: str, layers: int) -> list[Policy]:
    """The policy of each of so many layers; ``ValueError`` if there is none of that name."""
    check_policy("layer", name)
    if name in POLICIES:
        return [POLICIES[name]] * layers
    every = int(name.split()[1])
    return [POLICIES["none" if index % every else "full"] for index in range(layers)]


def check_policy(whose: str, name: object, or_auto: bool = False) -> None:
    """Raises ``ValueError`` if there is no such policy."""
    kind, _, number = str(name).partition(" ")  # a recipe may hold anything
    is_every = kind == "every" and number.isdecimal() and int(number) > 0
    if is_every or name in POLICIES or (or_auto and name == "auto"):
        return
    expected = ", ".join((("auto",) if or_auto else ()) + tuple(POLICIES))
    raise ValueError(f"the {whose}'s policy is {name!r}; expected {expected} or 'every N', N > 0")
