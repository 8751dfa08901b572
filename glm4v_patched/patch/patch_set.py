"""Attributes that are replaced together: all or none, and put back together. Knows no model."""

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Swap:
    """One attribute and how its replacement is made."""

    owner: str  # where it is defined (not inherited): "package.module[:Class]"
    name: str
    replace: Callable[[Any], object]  # takes the attribute as its owner holds it

    def __str__(self) -> str:
        return f"{self.owner.replace(':', '.')}.{self.name}"


@dataclass(frozen=True)
class _Replaced:
    swap: Swap
    owner: Any
    original: object
    replacement: object


class PatchSet:
    """Can be undone, and refuses to undo what somebody else has replaced since."""

    def __init__(self, swaps: Sequence[Swap]):
        self._swaps = tuple(swaps)
        self._replaced: list[_Replaced] = []

    @property
    def is_applied(self) -> bool:
        return bool(self._replaced)

    def apply(self) -> None:
        """Replace all attributes; ``AttributeError`` with all that are not where they were, and
        none is replaced."""
        replaced, moved = [], []
        for swap in self._swaps:
            try:
                owner = pkgutil.resolve_name(swap.owner)
                original = vars(owner)[swap.name]
            except (AttributeError, ImportError, KeyError) as error:
                moved.append(f"{swap} ({error!r})")
            else:
                replaced.append(_Replaced(swap, owner, original, swap.replace(original)))
        if moved:
            raise AttributeError(
                f"nothing was patched, because these cannot be found: {', '.join(moved)}; "
                "install versions that this package supports, or repair the installation"
            )
        # Only now, when nothing can fail any more.
        for one in replaced:
            setattr(one.owner, one.swap.name, one.replacement)
        self._replaced = replaced

    def revert(self) -> None:
        """Put the originals back; ``RuntimeError`` if somebody replaced an attribute after us, with
        its name, and nothing is undone."""
        taken = [
            str(one.swap)
            for one in self._replaced
            if vars(one.owner).get(one.swap.name) is not one.replacement
        ]
        if taken:
            raise RuntimeError(
                f"nothing was undone, because these were replaced by others since: "
                f"{', '.join(taken)}; undo those first"
            )
        for one in self._replaced:
            setattr(one.owner, one.swap.name, one.original)
        self._replaced = []
