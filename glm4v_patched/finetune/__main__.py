"""Train on several machines: ``torchrun --nnodes N ... -m glm4v_patched.finetune RECIPE``.

Every process that torchrun or DeepSpeed's launcher starts runs this module. Process 0 does what
:mod:`launch` does on a single machine: it checks recipe, data and checkpoint, locks ``out``, and
writes the plan there. The others wait for the plan. ``out`` has to be on a disk that all machines
see under the same path, because all processes write a checkpoint, and process 0 marks it complete.
"""

import argparse
import json
import os
import socket
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..engine.environment import training_environment
from ..models.base import read_training_report
from ..models.placement import Placement, place_processes
from ..terminal_text import error_text
from .arguments import add_recipe, add_start
from .ending import describe_end
from .job import resolve_recipe
from .launch import prepared
from .preflight import validate_recipe
from .process import exit_process, run
from .recipe.file import RecipeError

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# How long processes wait for the plan: the data check may take hours. If process 0 dies, the
# launcher ends the others.
MAX_WAIT = timedelta(days=7)


def main(argv: Sequence[str] | None = None) -> int:
    """Run as process 0 or as another, by the rank in the environment; return the exit status."""
    options = _parse_arguments(argv)
    try:
        rank, placement = _rank_and_placement(options.device == "cpu")
        local_world_size = placement.local_processes or placement.processes
        # torch reads some of these variables when it is imported.
        os.environ.update(training_environment(local_world_size, placement.on_cpu))
        # The PYTHONWARNINGS among them has no effect on a process that already runs.
        warnings.simplefilter("ignore", FutureWarning)
        store = _join_store()
        return _follow(rank, store) if rank else _lead(options, placement, store)
    except RecipeError as error:
        print(error, file=sys.stderr)  # each line begins with file and line
    except (ValueError, RuntimeError, OSError) as error:
        print(f"glm4v_patched.finetune: {error_text(error)}", file=sys.stderr)
    return 1


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m glm4v_patched.finetune", description="A recipe on several machines."
    )
    add_recipe(parser)
    add_start(parser)
    # DeepSpeed's launcher passes this option. It is not read: LOCAL_RANK has the same value.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    return parser.parse_intermixed_args(argv)


def _rank_and_placement(on_cpu: bool) -> tuple[int, Placement]:
    """Return the rank of this process, and the placement of all processes.

    Raises:
        ValueError: No launcher has started this process.
    """
    if missing := [name for name in LAUNCHER_VARIABLES if not os.environ.get(name)]:
        raise ValueError(
            f"{', '.join(missing)} not set: start this module with torchrun or DeepSpeed's "
            "launcher on each machine (docs/more_machines.md); on a single machine use "
            "glm4v-patched train RECIPE"
        )
    world_size = int(os.environ["WORLD_SIZE"])
    # Set by torchrun and by DeepSpeed's launcher.
    local_size = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or world_size
    return int(os.environ["RANK"]), Placement(world_size, on_cpu, int(local_size))


def _join_store() -> Any:
    """Return torch's key-value store, by which processes communicate before they join a group."""
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", timeout=timedelta(minutes=30)))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefixed = dist.PrefixStore(f"glm4v_patched/{attempt}", store)
    prefixed.set_timeout(MAX_WAIT)
    return prefixed


def _lead(options: argparse.Namespace, placement: Placement, store: Any) -> int:
    """Run process 0: prepare the run, and let the others begin."""
    try:
        local = placement.local_processes, options.device
        recipe, _ = validate_recipe(options.recipe, options.overrides, *local, placement.processes)
        job = resolve_recipe(recipe)
        # This checks only that several processes have ZeRO; the GPUs were checked above.
        place_processes(placement.processes, "cpu", job.options.zero_stage)
        start = options.resume_from or options.resume, options.overwrite
        accept = options.accept_changed_data
        with prepared(job, placement, *start, accept) as plan:
            store.set("plan", json.dumps([str(plan.path), _text(plan.path)]))
            hosts = [store.get(f"seen/{rank}").decode() for rank in range(1, placement.processes)]
            if without_plan := sorted({*hosts} - {""}):
                raise ValueError(
                    f"{plan.path} of {socket.gethostname()} is missing, or another file, on "
                    f"{', '.join(without_plan)}; out has to be on a disk that all machines see, "
                    "under the same path"
                )
            store.set("go", "go")
            status = run(plan.path)
            if not status:
                print(describe_end(job, placement.on_cpu), flush=True)
            elif error := read_training_report(plan.path.parent).get("error"):
                print(f"glm4v_patched.finetune: {error}", file=sys.stderr)
    except BaseException:
        # The other processes may wait for either key. If the launcher has ended, the store is gone.
        with suppress(RuntimeError):
            store.set("plan", "null")
            store.set("go", "")
        raise
    exit_process(status)


def _follow(rank: int, store: Any) -> int:
    """Run any other process: wait for the plan, and train."""
    if message := json.loads(store.get("plan")):
        path, text = Path(message[0]), message[1]
        store.set(f"seen/{rank}", "" if _text(path) == text else socket.gethostname())
        if store.get("go"):
            exit_process(run(path))
    print("glm4v_patched.finetune: not started; see the error of process 0", file=sys.stderr)
    return 1


def _text(file: Path) -> str | None:
    """Return the contents of a file, or None if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return None


if __name__ == "__main__":
    sys.exit(main())
