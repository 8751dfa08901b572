"""Checks of the versions of Python and of installed packages.

Versions are read from the metadata that pip installed; no package is imported.
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
# Packages that require versions of each other. A version that another package does not support
# causes errors far from the cause.
INTERDEPENDENT_PACKAGES = [
    "torch",
    "transformers",
    "deepspeed",
    "accelerate",
    "peft",
    "torchvision",
    "torchaudio",
    "tokenizers",
    "huggingface-hub",
    "safetensors",
    "bitsandbytes",
    "liger-kernel",
    "triton",
]


def check_packages() -> Iterator[Finding]:
    """Yield the findings about Python and the packages."""
    yield from _check_requirements()
    yield from _check_interdependence()


def _installed_version(name: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(name)
    return None


def _check_requirements() -> Iterator[Finding]:
    """Check Python and all packages against this package's own requirements."""
    if _installed_version(DISTRIBUTION) is not None:
        requirements = [Requirement(text) for text in requires(DISTRIBUTION) or []]
        python = SpecifierSet(metadata(DISTRIBUTION)["Requires-Python"])
    else:
        text = f"{DISTRIBUTION} is not installed by pip, so the versions it needs are unknown"
        yield Finding("packages", WARNING, text, pip_install("glm4v-patched[train]"))
        requirements, python = [Requirement(SUPPORTED_DEEPSPEED)], SpecifierSet()
    python_version = platform.python_version()
    if Version(python_version) in python:
        yield Finding("Python", OK, python_version)
    else:
        yield Finding("Python", FAILS, python_version, f"expected Python {python}")
    for requirement in requirements:
        if requirement.marker is None or requirement.marker.evaluate({"extra": "train"}):
            yield _check_requirement(requirement)


def _check_requirement(requirement: Requirement) -> Finding:
    name, supported = requirement.name, requirement.specifier
    cure = pip_install(f"{name}{supported}")
    if (text := _installed_version(name)) is None:
        return Finding(name, FAILS, "it is not installed", cure)
    installed = Version(text)
    if supported.contains(installed, prereleases=True):
        return Finding(name, OK, str(installed))
    is_older = any(
        specifier.operator in (">=", "==", ">") and not specifier.contains(installed)
        for specifier in supported
    )
    # Training refuses to start with an untested DeepSpeed, because its private names change between
    # versions.
    verdict: Any = FAILS if is_older or name == "deepspeed" else WARNING
    tested = str(supported) or "any version"
    return Finding(name, verdict, f"{installed} is installed, tested with {tested}", cure)


def _check_interdependence() -> Iterator[Finding]:
    """Check the requirements that installed packages have of each other."""
    versions = {
        name: installed
        for name in INTERDEPENDENT_PACKAGES
        if (installed := _installed_version(name)) is not None
    }
    is_consistent = True
    for name in versions:
        for requirement in map(Requirement, requires(name) or []):
            installed = versions.get(canonicalize_name(requirement.name))
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if not (applies and installed):
                continue
            if requirement.specifier.contains(installed, prereleases=True):
                continue
            is_consistent = False
            text = f"{name} {versions[name]} needs {requirement.name}{requirement.specifier}"
            text += f", and {installed} is installed"
            cure = pip_install("--upgrade", name)
            if name.startswith("torch"):
                cure += f"; or, if you do not need it: pip uninstall {name}"
            # A torchvision built for another torch makes the import of transformers fail.
            is_pinned = any(specifier.operator == "==" for specifier in requirement.specifier)
            verdict: Any = FAILS if is_pinned else WARNING
            yield Finding("versions together", verdict, text, cure)
    if is_consistent:
        text = "the packages are compatible with each other"
        yield Finding("versions together", OK, text)
