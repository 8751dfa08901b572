"""Rows of a stream that cannot be used, which are only found as they are learned."""

from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import TrainerCallback

from .divergence import CHECK_INTERVAL, NoResult, max_over_processes

MOST_TOLD = 20


class BadRow(NoResult):
    """A run has ended, with a checkpoint, at a row that cannot be used; on all processes."""


class BadRowTracker(TrainerCallback):
    """Tells of rows that were left out, and ends the run where it cannot go on.

    It ends at most :data:`divergence.READ_EVERY` steps later, for no process waits for the others
    in each step; a run that has made all of its steps is whole.

    Args:
        ends: Whether a run ends after one such row; after a set that cannot be read on, all do.
    """

    def __init__(self, ends: bool):
        self.ends, self.has_ended = ends, False
        # Each once: a set may be passed through several times.
        self.found: dict[str, None] = {}
        self.ending: dict[str, None] = {}
        """Those of :attr:`found` after which the run cannot go on."""
        self.number = 0
        """How many rows were left out, of all processes; known once the run has ended."""

    def see(self, faults: list[str], unreadable: list[str]) -> None:
        """Take note of what is wrong with rows of a batch, and of sets that cannot be read on."""
        if not self.ends:
            new = [fault for fault in faults if fault not in self.found]
            self._tell(new[: max(MOST_TOLD - len(self.found), 0)])
        self.found |= dict.fromkeys([*faults, *unreadable])
        self.ending |= dict.fromkeys([*unreadable, *(faults if self.ends else ())])

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step >= state.max_steps:
            return control
        has_to_end = len(self.ending)
        if dist.is_initialized():
            if state.global_step % CHECK_INTERVAL and not control.should_log:
                return control
            [has_to_end] = max_over_processes(torch.tensor([has_to_end], device=args.device))
        if has_to_end:
            self.has_ended = control.should_save = control.should_training_stop = True
            control.should_log = True  # as before each checkpoint
        return control

    def conclude(self, step: int) -> None:
        """Raises :class:`BadRow` if the run has ended with one; all processes must ask."""
        of_all: list[Any] = [(len(self.found), [*self.ending])]
        if dist.is_initialized():
            of_all = [None] * dist.get_world_size()
            dist.all_gather_object(of_all, (len(self.found), [*self.ending]))
        self.number = sum(number for number, _ in of_all)
        if not self.has_ended:  # those of the last steps, of which nothing has been told
            self._tell([*self.ending][:MOST_TOLD])
            return
        faults = [fault for _, ending in of_all for fault in ending]
        more = f"\n  and {len(faults) - MOST_TOLD} more" if len(faults) > MOST_TOLD else ""
        cure = ", or leave them out (data.on_bad: skip)," if self.ends else ""
        raise BadRow(
            "rows cannot be used:\n  " + "\n  ".join(faults[:MOST_TOLD]) + more + "\ncheckpoint-"
            f"{step} has what was learned until then: correct them{cure} and continue"
        )

    def _tell(self, faults: list[str]) -> None:
        for fault in faults:
            tqdm.write(f"left out: {fault}")
