"""Detect a diverged training: loss, gradients or weights that are NaN or infinite ("nonfinite").

The GPU counts the nonfinite steps, so that no step waits for it. The counts are read when the
Trainer reads the loss anyway, and every :data:`CHECK_INTERVAL` steps. They are reduced over all
processes, so that all processes end together.
"""

import logging
import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import TrainerCallback

from ..engine.deepspeed.internals import is_sharded, unpadded_shard
from ..terminal_text import listed, pluralize

logger = logging.getLogger(__name__)

CHECK_INTERVAL = 10  # steps
MAX_NAMES = 5  # of weights in a message


class NoResult(RuntimeError):
    """The training ended without a model; all processes raise it at the same point."""


class Diverged(NoResult):
    """Loss, gradients or weights are NaN or infinite."""


class DivergenceMonitor(TrainerCallback):
    """Ends a run after several steps in a row whose loss or gradient norm is nonfinite.

    The run ends at most :data:`CHECK_INTERVAL` - 1 steps later. No checkpoint is saved after a
    nonfinite step. If a weight is nonfinite before the first step, :class:`Diverged` is raised.

    Args:
        limit: Number of nonfinite steps in a row that end the run; at most the steps of the run.

    Attributes:
        verdict: Why the run was ended, or None.
        is_nonfinite: Whether the last step was nonfinite; up to date after steps that are logged,
            saved or evaluated.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.verdict: str | None = None
        self.is_nonfinite = False
        self._rates: dict[int, float] = {}

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._step_is_nonfinite = torch.zeros((), dtype=torch.bool, device=args.device)
        # Nonfinite steps in a row up to now, the most that there were, and the step at which they
        # first reached the limit, or 0.
        self._counts = torch.zeros(3, dtype=torch.int64, device=args.device)
        self._nonfinite_sum = torch.zeros((), dtype=torch.float64, device=args.device)
        # max_steps includes the steps before a checkpoint, so a resumed run has the same limit.
        self.limit = min(self.limit, state.max_steps)
        message = "the model has weights that are NaN or infinite before the first step"
        require_finite_weights(model.named_parameters(), message)

    def record(self, loss: Tensor, norm: Tensor | float | None) -> Tensor:
        """Record the loss of a batch, and return it, or 0 if it is nonfinite.

        The Trainer logs a sum of losses, in which one NaN would hide the other losses.
        :meth:`pop_nonfinite_loss` returns the sum of the losses that were replaced by 0.

        Args:
            loss: Scalar.
            norm: Norm of all gradients, or None if it is not known. DeepSpeed returns a negative
                norm for nonfinite gradients.
        """
        is_finite = torch.isfinite(loss)
        self._step_is_nonfinite |= ~is_finite
        if norm is not None:
            norm = torch.as_tensor(norm, device=loss.device)
            self._step_is_nonfinite |= ~torch.isfinite(norm) | (norm < 0)
        self._nonfinite_sum += torch.where(is_finite, 0, loss)
        return torch.where(is_finite, loss, 0)

    def pop_nonfinite_loss(self) -> float:
        """Return the sum of the nonfinite losses of all processes since the last call; 0 for none.

        All processes must call this.
        """
        total = self._nonfinite_sum.clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        self._nonfinite_sum.zero_()
        return total.item()

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        self._rates[state.global_step + 1] = optimizer.param_groups[0]["lr"]

    def on_step_end(self, args, state, control, **kwargs):
        step, counts = state.global_step, self._counts
        counts[0] = (counts[0] + 1) * self._step_is_nonfinite
        counts[1] = torch.maximum(counts[0], counts[1])
        counts[2] += step * ((counts[0] == self.limit) & (counts[2] == 0))
        self._step_is_nonfinite.zero_()
        # The condition is the same on all processes, because they reduce the counts together.
        is_last = step >= state.max_steps
        is_read = control.should_log or control.should_save or control.should_evaluate
        if step % CHECK_INTERVAL and not (is_read or is_last):
            return control
        streak, longest, last_step = max_over_processes(counts)
        self.is_nonfinite = streak > 0
        if self.is_nonfinite and control.should_save:
            logger.warning(
                "no checkpoint is saved after step %d, whose loss or gradient norm is NaN or "
                "infinite",
                step,
            )
            control.should_save = False
        if longest >= self.limit:
            self.verdict = self._describe_end(last_step)
            control.should_training_stop = control.should_log = True
            control.should_save = False
        return control

    def _describe_end(self, last_step: int) -> str:
        """Return why the run ends, after ``limit`` nonfinite steps up to ``last_step``."""
        first_step = max(last_step - self.limit + 1, 1)
        steps = f"step {last_step}"
        if self.limit > 1:
            steps = f"{self.limit} steps in a row, {first_step} to {last_step}"
        text = f"the loss or the gradient norm was NaN or infinite in {steps}"
        if first_step in self._rates:
            text += f" (learning rate {self._rates[first_step]:g} at step {first_step})"
        if first_step == 1:
            text += "; it was so from the first step on: check the model and the data"
        return text


def max_over_processes(counts: Tensor) -> list[int]:
    """Return the maximum of each element over all processes, which must all call this."""
    if dist.is_initialized():
        counts = counts.clone()
        dist.all_reduce(counts, op=dist.ReduceOp.MAX)
    return counts.tolist()


def json_number(number: float) -> float | str:
    """Return a number for JSON, which lacks NaN and infinity: they become "nan", "inf", "-inf"."""
    return number if math.isfinite(number) else str(number)


def require_finite_weights(named: Iterable[tuple[str, nn.Parameter]], message: str) -> None:
    """Raise :class:`Diverged` on all processes if a weight of any process is NaN or infinite.

    All processes must call this. Each process reads its own shards once; this takes milliseconds on
    a GPU, and on a CPU a tenth of the time for saving the weights.

    Args:
        named: Names and parameters.
        message: The beginning of the error's message.
    """
    names, tensors = [], []
    for name, parameter in named:
        if parameter.is_floating_point():
            names.append(name.removeprefix("base_model.model."))
            # Under ZeRO-3 this is the process's shard; the last shard's padding is left out.
            tensors.append(unpadded_shard(parameter) if is_sharded(parameter) else parameter.data)
    if not tensors:
        return
    with torch.no_grad():
        # A sum runs at memory bandwidth, on a CPU ten times as fast as isfinite. Only tensors whose
        # sum is not finite are read again: finite numbers may add up to infinity.
        suspects = (~torch.stack([tensor.sum().float() for tensor in tensors]).isfinite()).int()
        for index in suspects.nonzero().flatten().tolist():
            suspects[index] = (~tensors[index].isfinite()).any()
    flags = max_over_processes(suspects)
    nonfinite = [name for name, is_nonfinite in zip(names, flags, strict=True) if is_nonfinite]
    if nonfinite:
        tensors_in_words = pluralize(len(nonfinite), "tensor")
        raise Diverged(f"{message}, in {tensors_in_words}: {listed(nonfinite, MAX_NAMES)}")
