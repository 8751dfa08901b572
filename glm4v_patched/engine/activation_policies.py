"""Activation checkpointing policies: which activations of a layer are saved, which recomputed.

A policy is a record of :data:`POLICIES`. :mod:`activation_checkpointing` applies it,
:mod:`memory_plan` estimates its memory, and recipe and bench select it by name. Needs no torch.
"""

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class LayerSizes:
    """Numbers of activations and multiply-adds of one token in one transformer layer.

    A field ``..._macs`` is a number of multiply-adds. The other fields are numbers of channels: of
    elements in the dtype of the computation.

    A linear layer is narrow if its number of output channels is at most 1.25 times the hidden size:
    ``query_key_value`` (only of the language model), ``dense``, and ``dense_4h_to_h`` or ``fc2``.
    The other linear layers are wide.
    """

    layer_input: float
    attention_output: float
    narrow_outputs: float  # of narrow linear layers
    wide_outputs: float  # of wide linear layers
    saved_by_autograd: float  # everything that backward needs without checkpointing
    elementwise_macs: float  # multiply-adds that would take as long as the element-wise operations
    wide_macs: float
    narrow_macs: float
    attention_macs: float


@dataclass(frozen=True)
class Policy:
    """A choice of the activations that a layer saves for backward, and of those it recomputes.

    Attributes:
        saves: Fields of :class:`LayerSizes` that are saved.
        recomputes: Fields of :class:`LayerSizes` that are computed again in backward.
        max_saved_width: For selective checkpointing: the output of a linear layer is saved if its
            number of channels is at most this multiple of the hidden size. None for the policies
            "none" and "full".
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
_RECOMPUTED_FIELDS = ("elementwise_macs", "wide_macs", "narrow_macs", "attention_macs")
_ALL_POLICIES = (
    Policy("none", saves=("saved_by_autograd",), recomputes=()),
    Policy("linear", saves=_SAVED_FIELDS, recomputes=_RECOMPUTED_FIELDS[:1], max_saved_width=inf),
    Policy(
        "selective",
        saves=_SAVED_FIELDS[:3],
        recomputes=_RECOMPUTED_FIELDS[:2],
        max_saved_width=1.25,
    ),
    Policy(
        "attention", saves=_SAVED_FIELDS[:2], recomputes=_RECOMPUTED_FIELDS[:3], max_saved_width=0
    ),
    Policy("full", saves=_SAVED_FIELDS[:1], recomputes=_RECOMPUTED_FIELDS),
)
POLICIES = {policy.name: policy for policy in _ALL_POLICIES}
"""Policies by name, from no recomputation ("none") to recomputing everything ("full").

The name "every N" is accepted, too: every Nth layer, beginning with the first, has the policy
"full", and the others have "none".
"""
EVERY_N = "every N"


def policies_of_layers(name: str, num_layers: int) -> list[Policy]:
    """Return the policy of each layer.

    Args:
        name: A key of :data:`POLICIES`, or "every N".
    """
    if name in POLICIES:
        return [POLICIES[name]] * num_layers
    period = int(name.split()[1])
    return [POLICIES["none" if index % period else "full"] for index in range(num_layers)]
