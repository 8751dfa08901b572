"""Replacing attributes: all of them or none, reversible, never over somebody else's."""

import sys
from types import ModuleType

import pytest

from glm4v_patched.patch.patch_set import PatchSet, Swap


@pytest.fixture
def library(monkeypatch):
    """A module ``library`` with a function and a class."""

    class Loader:
        @classmethod
        def load(cls, name):
            return f"{cls.__name__} {name}"

        @staticmethod
        def check(name):
            return f"checked {name}"

    class Special(Loader):
        pass

    module = ModuleType("library")
    module.Loader, module.Special, module.save = Loader, Special, lambda name: f"saved {name}"
    monkeypatch.setitem(sys.modules, "library", module)
    return module


def louder(original):
    """A replacement that calls the original, of whatever kind that is."""
    kind = type(original) if isinstance(original, (classmethod, staticmethod)) else None
    function = original.__func__ if kind else original

    def replacement(*args):
        return function(*args).upper()

    return kind(replacement) if kind else replacement


SWAPS = [
    Swap("library:Loader", "load", louder),
    Swap("library:Loader", "check", louder),
    Swap("library", "save", louder),
]


def answers(library) -> list[str]:
    return [library.Loader.load("a"), library.Loader().check("b"), library.save("c")]


QUIET = ["Loader a", "checked b", "saved c"]


@pytest.mark.parametrize(
    "swap, full_name",
    [
        (Swap("library:Loader", "fetch", louder), "library.Loader.fetch"),
        (Swap("library:Saver", "load", louder), "library.Saver.load"),
        (Swap("library.files", "save", louder), "library.files.save"),
        (Swap("library:Special", "load", louder), "library.Special.load"),
    ],
    ids=["attribute", "class", "module", "inherited"],
)
def test_a_symbol_that_moved_is_named_and_nothing_is_replaced(swap, full_name, library):
    patches = PatchSet([*SWAPS, swap])
    with pytest.raises(
        AttributeError, match=f"nothing was patched.*cannot be found: {full_name} \\("
    ):
        patches.apply()
    assert answers(library) == QUIET and not patches.is_applied


def test_nothing_is_replaced_when_a_replacement_cannot_be_made(library):
    def fails(original):
        raise ValueError("no kernel")

    patches = PatchSet([*SWAPS[:2], Swap("library", "save", fails)])
    with pytest.raises(ValueError, match="no kernel"):
        patches.apply()
    assert answers(library) == QUIET and not patches.is_applied


def test_an_attribute_deleted_by_others_is_theirs_too(library):
    patches = PatchSet(SWAPS)
    patches.apply()
    del library.save
    with pytest.raises(RuntimeError, match="library.save"):
        patches.revert()
