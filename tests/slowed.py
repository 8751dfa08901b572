"""Make functions sleep before they work: ``sitecustomize.py`` of the processes of test_silence.py.

The environment variable ``SLOWED`` has the functions, as ``MODULE:FUNCTION,...``. Processes that
these processes start have it, too. The ticker prints every second.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import time
from functools import wraps

SECONDS = 10
TICKER = "glm4v_patched.terminal_text"


def slowed(function, name: str):
    """Return the function, which sleeps at its first call."""
    calls = []

    @wraps(function)
    def sleep_first(*arguments, **options):
        if not calls:
            calls.append(None)
            print(f"(slow: {name})", file=sys.stderr, flush=True)
            time.sleep(SECONDS)
        return function(*arguments, **options)

    return sleep_first


class Slower(importlib.abc.MetaPathFinder):
    """Replaces functions of modules as soon as these are imported."""

    def __init__(self, steps: list[str]):
        self.steps = steps

    def find_spec(self, name, path, target=None):
        names = [step for step in self.steps if step.partition(":")[0] == name]
        if not names and name != TICKER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module) -> None:
            execute(module)
            if name == TICKER:
                module.NEXT_LINE_SECONDS = 1.0
            for step in names:
                function = step.partition(":")[2]
                setattr(module, function, slowed(getattr(module, function), step))

        spec.loader.exec_module = exec_module
        return spec


if "SLOWED" in os.environ:
    sys.meta_path.insert(0, Slower(os.environ["SLOWED"].split(",")))
