"""Start a recipe on several processes of this machine and wait for it."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from .recipe import Recipe
from .zero import path_of_processes, require_deepspeed


def runs_on_cpu(processes: int) -> bool:
    """True unless there is a GPU for each process."""
    return torch.cuda.device_count() < processes


def launch(recipe: Recipe, processes: int) -> None:
    """Train with NCCL where there is a GPU for each process, otherwise with gloo on the CPU.

    Raises:
        RuntimeError: DeepSpeed or what it needs is missing, or the training failed.
    """
    on_cpu = runs_on_cpu(processes)
    require_deepspeed(on_cpu)
    folder = Path(recipe.out)
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "recipe.json"
    recipe.write(settings)
    environment = os.environ | {"PATH": path_of_processes(), "TOKENIZERS_PARALLELISM": "false"}
    # DeepSpeed calls collectives by names that torch 2.13 deprecates: a warning each would bury the
    # progress bar.
    environment.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")
    environment.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // processes, 1)))
    if on_cpu:
        environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
    # Port 0: the launcher picks a free one, so that two trainings can run side by side.
    command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    command += ["-m", "glm4v_patched.training.recipe", str(settings)]
    done = subprocess.run(command, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(
            f"training on {processes} processes failed with exit status {done.returncode}; the "
            f"first error above says why (settings: {settings})"
        )
