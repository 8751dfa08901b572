"""What a row was measured with."""

import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

PACKAGES = "torch", "transformers", "deepspeed", "peft", "bitsandbytes", "liger-kernel"


def versions() -> dict[str, str]:
    """Of Python and of those packages that are installed."""
    found = {"python": sys.version.split()[0]}
    for name in (*PACKAGES, "glm4v-patched"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
