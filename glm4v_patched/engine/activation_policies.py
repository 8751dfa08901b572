"""Activation checkpointing policies: which activations of a layer are saved, which recomputed.

A policy is a record of :data:`POLICIES`. :mod:`activation_checkpointing` applies it,
:mod:`memory_plan` estimates its memory, and recipe and bench select it by name. Needs no torch.
"""

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class LayerSizes:
    """Activations and work of one token in one layer.

    A field ``..._macs`` is a number of multiply-adds. The other fields are numbers of channels, in
    the dtype of the computation.

    A linear layer is narrow if it has at most 1.25 times as many output channels as the transformer
    layer: ``query_key_value`` (of the language model), ``dense`` and ``dense_4h_to_h`` or ``fc2``.
    The others are wide.
    """

    layer_input: float  # what a checkpoint saves
    attention_output: float
    narrow_outputs: float  # of narrow linear layers
    wide_outputs: float  # of wide linear layers
    saved_by_autograd: float  # everything that backward needs without checkpointing
    elementwise_macs: float  # multiply-adds that take as long as the element-wise operations
    wide_macs: float
    narrow_macs: float
    attention_macs: float


@dataclass(frozen=True)
class Policy:
    """A choice of the activations that a layer saves for backward, and of those it recomputes.

    Attributes:
        saves: Fields of :class:`LayerSizes` that are saved.
        recomputes: Fields of :class:`LayerSizes` that are computed again in backward.
        max_saved_width: For selective checkpointing: the widest saved output of a linear layer, in
            multiples of the layer's width. None for the policies "none" and "full".
    """

    name: str
    saves: tuple[str, ...]
    recomputes: tuple[str, ...]
    max_saved_width: float | None = None

    def saved_channels(self, sizes: LayerSizes) -> float:
        """Return the saved channels per token."""
        return sum(getattr(sizes, name) for name in self.saves)

    def recomputed_macs(self, sizes: LayerSizes) -> float:
        """Return the recomputed multiply-adds per token."""
        return sum(getattr(sizes, name) for name in self.recomputes)


# From "linear" on, each policy saves one field more than the next one, and recomputes one fewer.
_SAVED_FIELDS = ("layer_input", "attention_output", "narrow_outputs", "wide_outputs")
_WORK_FIELDS = ("elementwise_macs", "wide_macs", "narrow_macs", "attention_macs")
_ALL_POLICIES = (
    Policy("none", saves=("saved_by_autograd",), recomputes=()),
    Policy("linear", saves=_SAVED_FIELDS, recomputes=_WORK_FIELDS[:1], max_saved_width=inf),
    Policy("selective", saves=_SAVED_FIELDS[:3], recomputes=_WORK_FIELDS[:2], max_saved_width=1.25),
    Policy("attention", saves=_SAVED_FIELDS[:2], recomputes=_WORK_FIELDS[:3], max_saved_width=0),
    Policy("full", saves=_SAVED_FIELDS[:1], recomputes=_WORK_FIELDS),
)
POLICIES = {policy.name: policy for policy in _ALL_POLICIES}
"""Policies by name, from no recomputation ("none") to recomputing everything ("full").

"every N" lies between them: every Nth layer, beginning with the first, is "full", the others
"none".
"""
EVERY_N = "every N"


def policies_of_layers(name: str, layers: int) -> list[Policy]:
    """Return the policies of a number of layers, by a name that the section ``engine`` accepts."""
    if name in POLICIES:
        return [POLICIES[name]] * layers
    period = int(name.split()[1])
    return [POLICIES["none" if index % period else "full"] for index in range(layers)]
