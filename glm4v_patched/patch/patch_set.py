"""Attributes that are replaced together: all or none, and put back together. Knows no model."""

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AttributePatch:
    """One attribute and how its replacement is made."""

    owner: str  # where it is defined (not inherited): "package.module[:Class]"
    name: str
    replace: Callable[[Any], object]  # takes the attribute as its owner holds it

    def __str__(self) -> str:
        return f"{self.owner.replace(':', '.')}.{self.name}"


class PatchSet:
    """Can be undone, and refuses to undo what somebody else has replaced since."""

    def __init__(self, swaps: Sequence[AttributePatch]):
        self._swaps = tuple(swaps)
        # Of each: its owner, what that held, and what it holds now.
        self._replaced: list[tuple[AttributePatch, Any, object, object]] = []

    @property
    def is_applied(self) -> bool:
        return bool(self._replaced)

    def apply(self) -> None:
        """Replace all attributes; where one or its owner cannot be found, none is replaced and an
        ``AttributeError`` or ``ImportError`` names it."""
        found = [(swap, pkgutil.resolve_name(swap.owner)) for swap in self._swaps]
        if moved := [str(swap) for swap, owner in found if swap.name not in vars(owner)]:
            raise AttributeError(
                f"nothing was patched, because these cannot be found: {', '.join(moved)}; "
                "install versions that this package supports, or repair the installation"
            )
        replaced = []
        for swap, owner in found:
            original = vars(owner)[swap.name]
            replaced.append((swap, owner, original, swap.replace(original)))
        # Only now, when nothing can fail any more.
        for swap, owner, _, replacement in replaced:
            setattr(owner, swap.name, replacement)
        self._replaced = replaced

    def revert(self) -> None:
        """Put the originals back; ``RuntimeError`` if somebody replaced an attribute after us, with
        its name, and nothing is undone."""
        taken = [
            str(swap)
            for swap, owner, _, replacement in self._replaced
            if vars(owner).get(swap.name) is not replacement
        ]
        if taken:
            raise RuntimeError(
                f"nothing was undone, because these were replaced by others since: "
                f"{', '.join(taken)}; undo those first"
            )
        for swap, owner, original, _ in self._replaced:
            setattr(owner, swap.name, original)
        self._replaced = []
