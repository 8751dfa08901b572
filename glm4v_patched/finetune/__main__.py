"""Train on several machines: ``torchrun --nnodes N ... -m glm4v_patched.finetune RECIPE``.

Every process that torchrun or DeepSpeed's launcher starts runs this module. Process 0 does what
:mod:`launch` does on a single machine: it checks recipe, data and checkpoint, locks ``out``, and
writes the plan there. The others wait for the plan. ``out`` has to be on a disk that all machines
see under the same path, because all processes write a checkpoint, and process 0 marks it complete.

The processes communicate by keys of torch's store: process 0 sets ``plan`` to the path and text of
the plan. Each other process reads that file, and sets ``seen/RANK`` to "", or to its host's name if
the file differs. Process 0 then sets ``go``; its value is empty if the training must not start.
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
from .arguments import add_recipe, add_run_options
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
    """Run process 0 or another one, by the variable RANK, and return the exit status."""
    options = _parse_arguments(argv)
    try:
        rank, placement = _rank_and_placement(options.device == "cpu")
        # torch reads some of these variables when it is imported.
        os.environ.update(training_environment(placement.local_world_size, placement.on_cpu))
        # One of them is PYTHONWARNINGS, which has no effect on a process that already runs.
        warnings.simplefilter("ignore", FutureWarning)
        store = _join_store()
        if rank == 0:
            return _run_process_0(options, placement, store)
        return _run_other_process(rank, store)
    except RecipeError as error:
        print(error, file=sys.stderr)  # each line begins with file and line
    except (ValueError, RuntimeError, OSError) as error:
        print(f"glm4v_patched.finetune: {error_text(error)}", file=sys.stderr)
    return 1


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m glm4v_patched.finetune", description="Train a recipe on several machines."
    )
    add_recipe(parser)
    add_run_options(parser)
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
    # torchrun sets the first of these variables, DeepSpeed's launcher the second.
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


def _run_process_0(options: argparse.Namespace, placement: Placement, store: Any) -> int:
    """Prepare the run, let the other processes begin, and train."""
    try:
        recipe, _ = validate_recipe(
            options.recipe,
            options.overrides,
            placement.local_processes,
            options.device,
            world_size=placement.processes,
        )
        job = resolve_recipe(recipe)
        # This checks only that several processes have ZeRO; the GPUs were checked above.
        place_processes(placement.processes, "cpu", job.options.zero_stage)
        with prepared(
            job,
            placement,
            resume=options.resume_from or options.resume,
            overwrite=options.overwrite,
            accept_changed_data=options.accept_changed_data,
        ) as plan:
            store.set("plan", json.dumps([str(plan.path), _text_or_none(plan.path)]))
            replies = [store.get(f"seen/{rank}").decode() for rank in range(1, placement.processes)]
            if hosts_without_plan := sorted({*replies} - {""}):
                raise ValueError(
                    f"{plan.path} of {socket.gethostname()} is missing or different on "
                    f"{', '.join(hosts_without_plan)}; out has to be on a disk that all machines "
                    "see, under the same path"
                )
            store.set("go", "go")
            status = run(plan.path)
            if not status:
                print(describe_end(job, placement.on_cpu), flush=True)
            elif error := read_training_report(plan.path.parent).get("error"):
                print(f"glm4v_patched.finetune: {error}", file=sys.stderr)
    except BaseException:
        # The other processes wait for one of these keys. If the launcher has ended, the store is
        # gone.
        with suppress(RuntimeError):
            store.set("plan", "null")
            store.set("go", "")
        raise
    exit_process(status)


def _run_other_process(rank: int, store: Any) -> int:
    """Wait for the plan, and train."""
    if message := json.loads(store.get("plan")):
        path, text = Path(message[0]), message[1]
        store.set(f"seen/{rank}", "" if _text_or_none(path) == text else socket.gethostname())
        if store.get("go"):
            exit_process(run(path))
    print("glm4v_patched.finetune: not started; see the error of process 0", file=sys.stderr)
    return 1


def _text_or_none(file: Path) -> str | None:
    """Return the contents of a file, or None if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return None


if __name__ == "__main__":
    sys.exit(main())
