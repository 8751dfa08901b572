"""Run a function of a test file as one of two ranks: ``rank.py MODULE FUNCTION FOLDER``.

Started by :func:`tests.helpers.processes.run_two_processes`.
"""

import sys
from importlib import import_module
from pathlib import Path

import deepspeed  # noqa: F401  (before the ranks are forked)
import torch

from tests.distributed.strategies import start_deepspeed

name, function, folder = sys.argv[1:]
module = import_module(f"tests.distributed.{name}")

if __name__ == "__main__":
    torch.set_num_threads(1)
    start_deepspeed()
    getattr(module, function)(Path(folder))
    torch.distributed.destroy_process_group()
