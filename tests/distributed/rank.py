"""Run a function of a test file as one of two ranks: ``rank.py MODULE FUNCTION FOLDER``.

Started by :func:`tests.helpers.processes.run_two_processes`.
"""

import sys
from importlib import import_module
from pathlib import Path

import torch

from tests.distributed.strategies import start_deepspeed

if __name__ == "__main__":
    module, function, folder = sys.argv[1:]
    torch.set_num_threads(1)
    start_deepspeed()
    getattr(import_module(f"tests.distributed.{module}"), function)(Path(folder))
    torch.distributed.destroy_process_group()
