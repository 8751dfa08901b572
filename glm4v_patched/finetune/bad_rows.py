"""Rows of a stream that cannot be used, which are detected only while training."""

from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from ..terminal_text import write_line
from .divergence import CHECK_INTERVAL, NoResult, max_over_processes

MAX_PRINTED = 20


class BadRow(NoResult):
    """A row that cannot be used has ended the run, after a checkpoint; raised on all processes."""


class BadRowTracker(TrainerCallback):
    """Prints the skipped rows, and ends a run that cannot go on.

    The run ends at most :data:`divergence.CHECK_INTERVAL` steps after the row, because processes
    share their problems only at such intervals. A run that makes its last step before that is
    complete.

    Args:
        ends_run: Whether a row that cannot be used ends the run. A data set that cannot be read
            any further always ends it.

    Attributes:
        has_ended_run: Whether a problem has ended the run.
        problems: The problems of this process as an ordered set: a stream repeats its rows.
        fatal: Those of the problems that end the run.
        num_skipped: How many rows all processes skipped; 0 until :meth:`conclude`.
    """

    def __init__(self, ends_run: bool):
        self.ends_run, self.has_ended_run = ends_run, False
        self.problems: dict[str, None] = {}
        self.fatal: dict[str, None] = {}
        self.num_skipped = 0

    def record(self, problems: list[str], unreadable: list[str]) -> None:
        """Record problems of a batch: of its rows, and of data sets that cannot be read further."""
        if not self.ends_run:
            new_problems = [problem for problem in problems if problem not in self.problems]
            self._print(new_problems[: max(MAX_PRINTED - len(self.problems), 0)])
        self.problems |= dict.fromkeys([*problems, *unreadable])
        self.fatal |= dict.fromkeys([*unreadable, *(problems if self.ends_run else ())])

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step >= state.max_steps:
            return control
        num_fatal = len(self.fatal)
        if dist.is_initialized():
            if state.global_step % CHECK_INTERVAL and not control.should_log:
                return control
            [num_fatal] = max_over_processes(torch.tensor([num_fatal], device=args.device))
        if num_fatal:
            self.has_ended_run = control.should_save = control.should_training_stop = True
            control.should_log = True  # so that the checkpoint has the whole history
        return control

    def conclude(self, step: int) -> None:
        """Count the skipped rows of all processes, which must all call this.

        Raises:
            BadRow: A row has ended the run.
        """
        by_process: list[Any] = [(len(self.problems), [*self.fatal])]
        if dist.is_initialized():
            by_process = [None] * dist.get_world_size()
            dist.all_gather_object(by_process, (len(self.problems), [*self.fatal]))
        self.num_skipped = sum(num_problems for num_problems, _ in by_process)
        if not self.has_ended_run:  # fatal problems of the last steps are not printed yet
            self._print([*self.fatal][:MAX_PRINTED])
            return
        problems = [problem for _, fatal in by_process for problem in fatal]
        num_more = len(problems) - MAX_PRINTED
        more = f"\n  and {num_more} more" if num_more > 0 else ""
        cure = ", or skip them (data.on_bad: skip)," if self.ends_run else ""
        raise BadRow(
            "rows cannot be used:\n  " + "\n  ".join(problems[:MAX_PRINTED]) + more + "\n"
            f"the training so far is in checkpoint-{step}: correct the rows{cure} and resume"
        )

    def _print(self, problems: list[str]) -> None:
        for problem in problems:
            write_line(f"skipped: {problem}")
