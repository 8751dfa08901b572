"""Reversible replacement of attributes. Knows no model.

A :class:`PatchSet` replaces all of its attributes or none, can be undone, and refuses to undo what
somebody else has replaced since.
"""

import pkgutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Swap:
    """One attribute and how its replacement is made.

    Args:
        owner: Where the attribute is defined (not inherited): ``"package.module"`` or
            ``"package.module:Class"``.
        name: The attribute.
        replace: Takes the attribute as its owner holds it (a classmethod stays one) and returns
            what takes its place.
    """

    owner: str
    name: str
    replace: Callable[[Any], object]

    @property
    def full_name(self) -> str:
        return f"{self.owner.replace(':', '.')}.{self.name}"

    def find_owner(self) -> object:
        """The module or class that holds the attribute.

        Raises:
            AttributeError, ImportError: it is not there any more, or cannot be imported.
        """
        owner = pkgutil.resolve_name(self.owner)
        if self.name not in vars(owner):
            raise AttributeError(f"{self.owner} does not define {self.name}")
        return owner


@dataclass
class _Replaced:
    swap: Swap
    owner: object
    original: object
    replacement: object

    def is_current(self) -> bool:
        return vars(self.owner).get(self.swap.name) is self.replacement


class PatchSet:
    """Attributes that are replaced together. Safe to call from several threads."""

    def __init__(self, swaps: Sequence[Swap]):
        self._swaps = tuple(swaps)
        self._replaced: list[_Replaced] = []
        self._lock = threading.Lock()

    @property
    def is_applied(self) -> bool:
        return bool(self._replaced)

    def apply(self) -> None:
        """Replace all attributes; nothing happens if they are replaced already.

        Raises:
            AttributeError: an attribute is not where it was; names all such, replaces none.
        """
        with self._lock:
            if self._replaced:
                return
            owners, moved = [], []
            for swap in self._swaps:
                try:
                    owners.append(swap.find_owner())
                except (AttributeError, ImportError) as error:
                    moved.append(f"{swap.full_name} ({error})")
            if moved:
                raise AttributeError(
                    f"nothing was patched, because these cannot be found: {', '.join(moved)}; "
                    "install versions that this package supports, or repair the installation"
                )
            replaced = []
            for swap, owner in zip(self._swaps, owners, strict=True):
                original = vars(owner)[swap.name]
                replaced.append(_Replaced(swap, owner, original, swap.replace(original)))
            # Only now, when nothing can fail any more.
            for one in replaced:
                setattr(one.owner, one.swap.name, one.replacement)
            self._replaced = replaced

    def revert(self) -> None:
        """Put the originals back; nothing happens if nothing is replaced.

        Raises:
            RuntimeError: somebody replaced an attribute after us; names it and whose it is now,
                and undoes nothing.
        """
        with self._lock:
            taken = [
                f"{one.swap.full_name} (now of {_origin(vars(one.owner).get(one.swap.name))})"
                for one in self._replaced
                if not one.is_current()
            ]
            if taken:
                raise RuntimeError(
                    f"nothing was undone, because these were replaced by others since: "
                    f"{', '.join(taken)}; undo those first"
                )
            for one in self._replaced:
                setattr(one.owner, one.swap.name, one.original)
            self._replaced = []


def _origin(attribute: object) -> str:
    """Module and name of whatever stands in a class or module now."""
    function: Any = getattr(attribute, "__func__", attribute)
    # functools.wraps copies the name and module of what is wrapped; the code tells the truth.
    code = getattr(function, "__code__", None)
    if code is not None:
        module = function.__globals__.get("__name__", "?")
        return f"{module}.{getattr(code, 'co_qualname', code.co_name)}"
    return f"{type(function).__module__}.{type(function).__qualname__}"
