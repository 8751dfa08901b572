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
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..engine.environment import training_environment
from ..models.base import read_report
from ..models.placement import Placement, place
from ..terminal_text import error_text, listed
from .arguments import add_recipe, add_start
from .ending import describe_end
from .launch import prepared
from .preflight import check, faults_of_packages
from .process import leave, run
from .recipe import Recipe
from .recipe_file import RecipeError
from .run_folder import RECIPE

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Data may be checked for hours; who waits is ended by its launcher if process 0 is gone.
LONGEST_WAIT = timedelta(days=7)


@dataclass(frozen=True)
class Process:
    """Which one of all processes this is; ``local_size`` of them are on this machine."""

    rank: int
    world_size: int
    local_size: int

    @classmethod
    def of_environment(cls) -> "Process":
        """Raises ``ValueError`` if no launcher has started this process."""
        if missing := [name for name in VARIABLES if not os.environ.get(name)]:
            raise ValueError(
                f"{', '.join(missing)} not set: this is started by torchrun or by DeepSpeed's "
                "launcher, on each machine (docs/more_machines.md); on one machine: glm4v-patched "
                "train RECIPE"
            )
        world_size = int(os.environ["WORLD_SIZE"])
        # The first is torchrun's, the second DeepSpeed's.
        local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or world_size
        return cls(int(os.environ["RANK"]), world_size, int(local))


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    try:
        process = Process.of_environment()
        on_cpu = options.device == "cpu"
        # Before torch is imported, which reads some of it.
        os.environ.update(training_environment(process.local_size, on_cpu))
        # As training_environment asks of processes that it starts.
        warnings.simplefilter("ignore", FutureWarning)
        return _run(options, process)
    except RecipeError as error:
        print(error, file=sys.stderr)  # each line begins with where it is
    except (ValueError, RuntimeError, OSError) as error:
        print(f"glm4v_patched.finetune: {error_text(error)}", file=sys.stderr)
    return 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m glm4v_patched.finetune", description="A recipe on several machines."
    )
    add_recipe(parser)
    add_start(parser)
    # DeepSpeed's launcher passes it, and sets LOCAL_RANK, too.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args(argv)
    if any(text.startswith("-") for text in rest):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.overrides += rest
    return options


def _run(options: argparse.Namespace, process: Process) -> int:
    store = _join_store()
    if process.rank:
        return _follow(process, store)
    try:
        recipe = _read(options, process)
        placement = Placement(process.world_size, options.device == "cpu", process.local_size)
        start = options.resume_from or options.resume, options.overwrite
        with prepared(recipe, placement, *start, options.accept_changed_data) as (plan, _):
            told = {"path": str(plan.path), "text": _text(plan.path)}
            store.set("start", json.dumps(told))
            _require_all_see(store, process, plan.path)
            store.set("go", "")
            status = run(plan.path)
            if not status:
                print(describe_end(plan.recipe, plan.placement.on_cpu), flush=True)
            elif fault := read_report(plan.path.parent).get("error"):
                print(f"glm4v_patched.finetune: {fault}", file=sys.stderr)
    except BaseException as error:
        # Whichever they wait for. The store is gone if the launcher has ended.
        with suppress(RuntimeError):
            for key in ("start", "go"):
                store.set(key, json.dumps({"error": type(error).__name__}))
        raise
    leave(status)


def _read(options: argparse.Namespace, process: Process) -> Recipe:
    """The recipe, checked for this machine.

    Raises:
        RecipeError: it cannot be, here or on so many processes.
    """
    recipe, _ = check(options.recipe, options.overrides, process.local_size, options.device)
    # Of all processes: there may be more than this machine has GPUs, but not without ZeRO.
    place(process.world_size, "cpu", recipe.engine.zero_stage)
    return recipe


def _join_store() -> Any:
    """torch's store of this run, where processes leave notes for each other before they join."""
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", timeout=timedelta(minutes=30)))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    found = dist.PrefixStore(f"glm4v_patched/{attempt}", store)
    found.set_timeout(LONGEST_WAIT)
    return found


def _follow(process: Process, store: Any) -> int:
    """What all processes but the first do."""
    told = json.loads(store.get("start"))
    if "error" not in told:
        path, fault = Path(told["path"]), ""
        try:
            if _text(path) != told["text"]:
                raise ValueError(f"{path.absolute()} is not there, or another file")
            missing = faults_of_packages(Recipe.read(path.with_name(RECIPE)).flat())
            fault = "; ".join(each.text for each in missing)
        except (ValueError, RuntimeError) as error:
            fault = str(error)
        store.set(f"seen/{process.rank}", fault and f"{socket.gethostname()}: {fault}")
        if not store.get("go"):
            leave(run(path))
    print("glm4v_patched.finetune: not begun; process 0 says why", file=sys.stderr)
    return 1


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return None


def _require_all_see(store: Any, process: Process, plan: Path) -> None:
    """Raise ``ValueError`` if a machine does not see what this one has written."""
    told = [store.get(f"seen/{rank}").decode() for rank in range(1, process.world_size)]
    if faults := list(dict.fromkeys(filter(None, told))):
        raise ValueError(
            f"{len(faults)} machines or processes cannot take part; out has to be on a disk that "
            f"all machines see, under the same path, as {plan} on {socket.gethostname()}\n  - "
            + listed(faults, most=20, between="\n  - ")
        )


if __name__ == "__main__":
    sys.exit(main())
