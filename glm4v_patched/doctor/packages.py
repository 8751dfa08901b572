"""Versions of Python and of packages, against what this package and they themselves allow.

Read from what pip wrote; nothing is imported.
"""

import platform
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ..engine.deepspeed.config import SUPPORTED_DEEPSPEED
from ..terminal_text import pip_install
from .findings import FAILS, OK, WARNING, Finding

OURS = "glm4v-patched"
# A version of one of these that another one does not allow ends in errors far from their cause.
JOINED: tuple[str, ...] = (
    "torch",
    "transformers",
    "deepspeed",
    "accelerate",
    "peft",
    "torchvision",
    "torchaudio",
)
JOINED += ("tokenizers", "huggingface-hub", "safetensors", "bitsandbytes", "liger-kernel", "triton")


def check_packages() -> Iterator[Finding]:
    yield from _check_requirements()
    yield from _check_each_other()


def _check_requirements() -> Iterator[Finding]:
    try:
        wanted = [Requirement(text) for text in requires(OURS) or []]
        python = SpecifierSet(metadata(OURS)["Requires-Python"])
    except PackageNotFoundError:
        text = f"{OURS} is not installed by pip, so that nothing says which versions it needs"
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
    asked = Requirement(f"{name}{range_}")
    try:
        found = Version(version(name))
    except PackageNotFoundError:
        return Finding(name, FAILS, "is not installed", pip_install(str(asked)))
    if range_.contains(found, prereleases=True):
        return Finding(name, OK, str(found))
    text = f"{found}, tested with {str(range_) or 'any'}"
    # DeepSpeed's names change with its versions, and training refuses to start.
    newer = name != "deepspeed" and not _is_older(found, range_)
    return Finding(name, WARNING if newer else FAILS, text, pip_install(str(asked)))


def _is_older(found: Version, wanted: SpecifierSet) -> bool:
    return any(each.operator in (">=", "==", ">") and not each.contains(found) for each in wanted)


def _check_each_other() -> Iterator[Finding]:
    clashes = []
    for name in JOINED:
        try:
            wanted = [Requirement(text) for text in requires(name) or []]
        except PackageNotFoundError:
            continue
        for requirement in wanted:
            other = re.sub(r"[-_.]+", "-", requirement.name.lower())
            if other not in JOINED or not _applies(requirement):
                continue
            try:
                found = version(other)
            except PackageNotFoundError:
                continue
            if not requirement.specifier.contains(found, prereleases=True):
                needs = f"{name} {version(name)} needs {other}{requirement.specifier}"
                clashes.append((requirement, f"{needs}, and {found} is installed"))
    for requirement, text in clashes:
        # torchvision, built for another torch, cannot be imported, nor then transformers.
        pinned = any(each.operator == "==" for each in requirement.specifier)
        name = text.partition(" ")[0]
        cure = pip_install("--upgrade", name)
        if name.startswith("torch"):
            cure += "; or, where it is not used: pip uninstall " + name
        yield Finding("versions together", FAILS if pinned else WARNING, text, cure)
    if not clashes:
        yield Finding("versions together", OK, "none of these packages refuses another one")


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})
