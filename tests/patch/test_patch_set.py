"""Replacing attributes: all of them or none, reversible, never over somebody else's."""

import sys
from types import ModuleType

import pytest

from glm4v_patched.patch.patch_set import PatchSet, Swap


@pytest.fixture
def library(monkeypatch):
    """A module ``library`` with a function and a class, and one that inherits."""

    class Loader:
        @classmethod
        def load(cls, name):
            return f"{cls.__name__} {name}"

    class Special(Loader):
        pass

    module = ModuleType("library")
    module.Loader, module.Special, module.save = Loader, Special, lambda name: f"saved {name}"
    monkeypatch.setitem(sys.modules, "library", module)
    return module


def louder(original):
    function = getattr(original, "__func__", original)

    def replacement(*args):
        return function(*args).upper()

    return classmethod(replacement) if isinstance(original, classmethod) else replacement


def fails(original):
    raise ValueError("no kernel")


SWAPS = [Swap("library:Loader", "load", louder), Swap("library", "save", louder)]


@pytest.mark.parametrize(
    "swap, kind, named",
    [
        (Swap("library:Loader", "fetch", louder), AttributeError, "library.Loader.fetch"),
        (Swap("library.files", "save", louder), AttributeError, "library.files.save"),
        (Swap("library:Special", "load", louder), AttributeError, "library.Special.load"),
        (Swap("library", "save", fails), ValueError, "no kernel"),
    ],
    ids=["attribute", "module", "inherited", "no replacement"],
)
def test_where_one_cannot_be_replaced_none_is(swap, kind, named, library):
    patches = PatchSet([*SWAPS, swap])
    with pytest.raises(kind, match=named):
        patches.apply()
    assert [library.Loader.load("a"), library.save("c")] == ["Loader a", "saved c"]
    assert not patches.is_applied


def test_an_attribute_deleted_by_others_is_theirs_too(library):
    patches = PatchSet(SWAPS)
    patches.apply()
    assert [library.Special.load("a"), library.save("c")] == ["SPECIAL A", "SAVED C"]
    del library.save
    with pytest.raises(RuntimeError, match="library.save"):
        patches.revert()
