"""A recipe on several machines: ``torchrun --nnodes N ... -m glm4v_patched.finetune RECIPE``.

Each process that torchrun (or DeepSpeed's launcher) starts runs this. Process 0 does what
:mod:`launch` does on a single machine: it checks recipe, data and checkpoint, locks ``out`` and
writes what the others read there. The others wait for it. ``out`` has to be on a disk that all
machines see, under the same path: a checkpoint is written by all processes, and complete when one
of them has seen all its files.
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
from ..models.base import read_report
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
# Data may be checked for hours; who waits is ended by its launcher if process 0 is gone.
LONGEST_WAIT = timedelta(days=7)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse_arguments(argv)
    try:
        rank, placement = _rank_and_placement(options.device == "cpu")
        here = placement.local_processes or placement.processes
        # Before torch is imported, which reads some of it.
        os.environ.update(training_environment(here, placement.on_cpu))
        # As training_environment asks of processes that it starts.
        warnings.simplefilter("ignore", FutureWarning)
        store = _join_store()
        return _follow(rank, store) if rank else _lead(options, placement, store)
    except RecipeError as error:
        print(error, file=sys.stderr)  # each line begins with where it is
    except (ValueError, RuntimeError, OSError) as error:
        print(f"glm4v_patched.finetune: {error_text(error)}", file=sys.stderr)
    return 1


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m glm4v_patched.finetune", description="A recipe on several machines."
    )
    add_recipe(parser)
    add_start(parser)
    # DeepSpeed's launcher passes it, and sets LOCAL_RANK, too.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    return parser.parse_intermixed_args(argv)


def _rank_and_placement(on_cpu: bool) -> tuple[int, Placement]:
    """Which one of all processes this is, and where all run.

    Raises ``ValueError`` if no launcher has started this process.
    """
    if missing := [name for name in LAUNCHER_VARIABLES if not os.environ.get(name)]:
        raise ValueError(
            f"{', '.join(missing)} not set: this is started by torchrun or by DeepSpeed's "
            "launcher, on each machine (docs/more_machines.md); on one machine: glm4v-patched "
            "train RECIPE"
        )
    world_size = int(os.environ["WORLD_SIZE"])
    # The first is torchrun's, the second DeepSpeed's.
    local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or world_size
    return int(os.environ["RANK"]), Placement(world_size, on_cpu, int(local))


def _join_store() -> Any:
    """torch's store of this run, where processes leave notes for each other before they join."""
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", timeout=timedelta(minutes=30)))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    found = dist.PrefixStore(f"glm4v_patched/{attempt}", store)
    found.set_timeout(LONGEST_WAIT)
    return found


def _lead(options: argparse.Namespace, placement: Placement, store: Any) -> int:
    """What the first process does: prepare, and have the others begin."""
    try:
        here = placement.local_processes, options.device
        recipe, _ = validate_recipe(options.recipe, options.overrides, *here, placement.processes)
        job = resolve_recipe(recipe)
        # Of all processes: there may be more than this machine has GPUs, but not without ZeRO.
        place_processes(placement.processes, "cpu", job.options.zero_stage)
        start = options.resume_from or options.resume, options.overwrite
        accept = options.accept_changed_data
        with prepared(job, placement, *start, accept) as plan:
            store.set("plan", json.dumps([str(plan.path), _text(plan.path)]))
            seen = [store.get(f"seen/{rank}").decode() for rank in range(1, placement.processes)]
            if blind := sorted({*seen} - {""}):
                raise ValueError(
                    f"{plan.path} of {socket.gethostname()} is not there, or another file, on "
                    f"{', '.join(blind)}; out has to be on a disk that all machines see, under the "
                    "same path"
                )
            store.set("go", "go")
            status = run(plan.path)
            if not status:
                print(describe_end(job, placement.on_cpu), flush=True)
            elif fault := read_report(plan.path.parent).get("error"):
                print(f"glm4v_patched.finetune: {fault}", file=sys.stderr)
    except BaseException:
        # Whichever they wait for. The store is gone if the launcher has ended.
        with suppress(RuntimeError):
            store.set("plan", "null")
            store.set("go", "")
        raise
    exit_process(status)


def _follow(rank: int, store: Any) -> int:
    """What all processes but the first do."""
    if told := json.loads(store.get("plan")):
        path, text = Path(told[0]), told[1]
        store.set(f"seen/{rank}", "" if _text(path) == text else socket.gethostname())
        if store.get("go"):
            exit_process(run(path))
    print("glm4v_patched.finetune: not begun; process 0 says why", file=sys.stderr)
    return 1


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return None


if __name__ == "__main__":
    sys.exit(main())
