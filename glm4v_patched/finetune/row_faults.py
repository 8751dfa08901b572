"""Rows of a stream that cannot be used, which are only found as they are learned."""

import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import TrainerCallback

from .divergence import READ_EVERY, highest

MOST_TOLD = 20


class BadRow(RuntimeError):
    """A run has ended, with a checkpoint, at a row that cannot be used; on all processes."""


class RowFaults(TrainerCallback):
    """Tells of rows that were left out, and ends the run after one if it is to.

    Args:
        ends: Whether a run ends, at most :data:`divergence.READ_EVERY` steps later, for no process
            waits for the others in each step; one that has made all of its steps is whole.
    """

    def __init__(self, ends: bool):
        self.ends, self.has_ended = ends, False
        self.found: list[str] = []

    def see(self, faults: list[str]) -> None:
        """Take note of what is wrong with rows of a batch, a line each."""
        if not self.ends:
            for fault in faults[: max(MOST_TOLD - len(self.found), 0)]:
                tqdm.write(f"left out: {fault}")
        self.found += faults

    @property
    def number(self) -> int:
        """How many rows were left out, of this process."""
        return len(self.found)

    def on_step_end(self, args, state, control, **kwargs):
        if not self.ends or state.global_step >= state.max_steps:
            return control
        if dist.is_initialized() and state.global_step % READ_EVERY and not control.should_log:
            return control
        [found] = highest(torch.tensor([len(self.found)], device=args.device))
        if found:
            self.has_ended = control.should_save = control.should_training_stop = True
        return control

    def require_none(self, step: int) -> None:
        """Raises :class:`BadRow` if the run has ended with one; all processes must ask."""
        if not self.has_ended:
            return
        found = [self.found]
        if dist.is_initialized():
            found = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(found, self.found)
        faults = [fault for of_process in found for fault in of_process]
        more = f"\n  and {len(faults) - MOST_TOLD} more" if len(faults) > MOST_TOLD else ""
        raise BadRow(
            "rows cannot be used:\n  " + "\n  ".join(faults[:MOST_TOLD]) + more + "\ncheckpoint-"
            f"{step} has what was learned until then: correct them, or leave them out "
            "(data.on_bad: skip), and continue"
        )
