"""Monkey patches that are applied and reverted as a set, all or none, for any model."""

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AttributePatch:
    """One attribute to be replaced, and the function that makes its replacement.

    Args:
        owner: ``package.module`` or ``package.module:Class``, the object that has the attribute in
            its ``vars``.
        name: The attribute's name.
        replace: Function that takes the original, as it is in ``vars(owner)``, and returns the
            replacement.
    """

    owner: str
    name: str
    replace: Callable[[Any], object]

    def __str__(self) -> str:
        return f"{self.owner.replace(':', '.')}.{self.name}"


class PatchSet:
    """A set of attribute patches, applied and reverted together."""

    def __init__(self, patches: Sequence[AttributePatch]):
        self._patches = tuple(patches)
        # For each patch that is applied: the patch, its owner, the original and the replacement.
        self._replaced: list[tuple[AttributePatch, Any, object, object]] = []

    @property
    def is_applied(self) -> bool:
        return bool(self._replaced)

    def apply(self) -> None:
        """Replace all attributes, or none if an error is raised.

        Raises:
            AttributeError, ImportError: an attribute or its owner does not exist.
        """
        owners = [(patch, pkgutil.resolve_name(patch.owner)) for patch in self._patches]
        if missing := [str(patch) for patch, owner in owners if patch.name not in vars(owner)]:
            raise AttributeError(
                f"nothing was patched, because these cannot be found: {', '.join(missing)}; "
                "install versions that this package supports, or repair the installation"
            )
        replaced = []
        for patch, owner in owners:
            original = vars(owner)[patch.name]
            replaced.append((patch, owner, original, patch.replace(original)))
        # Set attributes only after everything that can fail.
        for patch, owner, _, replacement in replaced:
            setattr(owner, patch.name, replacement)
        self._replaced = replaced

    def revert(self) -> None:
        """Restore all originals.

        Raises:
            RuntimeError: other code has replaced an attribute since; nothing is restored.
        """
        replaced_later = [
            str(patch)
            for patch, owner, _, replacement in self._replaced
            if vars(owner).get(patch.name) is not replacement
        ]
        if replaced_later:
            raise RuntimeError(
                f"nothing was undone, because other code has replaced these since: "
                f"{', '.join(replaced_later)}; undo those replacements first"
            )
        for patch, owner, original, _ in self._replaced:
            setattr(owner, patch.name, original)
        self._replaced = []
