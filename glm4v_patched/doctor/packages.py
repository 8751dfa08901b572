"""Versions of Python and of packages, against what this package and they themselves allow.

Read from what pip wrote; nothing is imported.
"""

import platform
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from ..engine.deepspeed.config import SUPPORTED_DEEPSPEED
from ..terminal_text import pip_install
from .findings import FAILS, OK, WARNING, Finding

DISTRIBUTION = "glm4v-patched"
# A version of one of these that another one does not allow ends in errors far from their cause.
INTERDEPENDENT_PACKAGES = ["torch", "transformers", "deepspeed", "accelerate", "peft", "torchvision", "torchaudio"]
INTERDEPENDENT_PACKAGES += ["tokenizers", "huggingface-hub", "safetensors", "bitsandbytes", "liger-kernel", "triton"]


def check_packages() -> Iterator[Finding]:
    yield from _check_requirements()
    yield from _check_interdependence()


def _installed_version(name: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(name)
    return None


def _check_requirements() -> Iterator[Finding]:
    if _installed_version(DISTRIBUTION) is not None:
        wanted = [Requirement(text) for text in requires(DISTRIBUTION) or []]
        python = SpecifierSet(metadata(DISTRIBUTION)["Requires-Python"])
    else:
        text = f"{DISTRIBUTION} is not installed by pip, so that nothing says which versions it needs"
        yield Finding("packages", WARNING, text, pip_install("glm4v-patched[train]"))
        wanted, python = [Requirement(SUPPORTED_DEEPSPEED)], SpecifierSet()
    found = platform.python_version()
    if Version(found) in python:
        yield Finding("Python", OK, found)
    else:
        yield Finding("Python", FAILS, found, f"expected Python {python}")
    for requirement in wanted:
        if requirement.marker is None or requirement.marker.evaluate({"extra": "train"}):
            yield _check_requirement(requirement)


def _check_requirement(requirement: Requirement) -> Finding:
    name, range_ = requirement.name, requirement.specifier
    cure = pip_install(f"{name}{range_}")
    if (installed := _installed_version(name)) is None:
        return Finding(name, FAILS, "is not installed", cure)
    found = Version(installed)
    if range_.contains(found, prereleases=True):
        return Finding(name, OK, str(found))
    # DeepSpeed's names change with its versions, and training refuses to start.
    is_older = any(
        each.operator in (">=", "==", ">") and not each.contains(found) for each in range_
    )
    verdict: Any = FAILS if is_older or name == "deepspeed" else WARNING
    return Finding(name, verdict, f"{found}, tested with {str(range_) or 'any'}", cure)


def _check_interdependence() -> Iterator[Finding]:
    there = {name: found for name in INTERDEPENDENT_PACKAGES if (found := _installed_version(name)) is not None}
    is_sound = True
    for name in there:
        for requirement in map(Requirement, requires(name) or []):
            found = there.get(canonicalize_name(requirement.name))
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if not (applies and found) or requirement.specifier.contains(found, prereleases=True):
                continue
            is_sound = False
            needs = f"{name} {there[name]} needs {requirement.name}{requirement.specifier}"
            cure = pip_install("--upgrade", name)
            if name.startswith("torch"):
                cure += f"; or, where it is not used: pip uninstall {name}"
            # torchvision, built for another torch, cannot be imported, nor then transformers.
            is_pinned = any(each.operator == "==" for each in requirement.specifier)
            verdict: Any = FAILS if is_pinned else WARNING
            yield Finding("versions together", verdict, f"{needs}, and {found} is installed", cure)
    if is_sound:
        yield Finding("versions together", OK, "none of these packages refuses another one")
