"""Notices that a training has diverged: a loss, gradients or weights that are NaN or infinite.

Nothing here waits for a GPU in each step. Whether a step was finite is kept on the device and read
where the Trainer reads the loss anyway, and every :data:`READ_EVERY` steps; what was read is the
same on all processes, so that they end together, whoever saw it.
"""

import logging
import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import TrainerCallback

from ..engine.deepspeed.internals import is_sharded, unpadded_shard
from ..terminal_text import listed

logger = logging.getLogger(__name__)

CHECK_INTERVAL = 10
NAMED = 5


class NoResult(RuntimeError):
    """The training has ended without a model; all processes raise it at the same place."""


class Diverged(NoResult):
    """Loss, gradients or weights are NaN or infinite."""


class DivergenceMonitor(TrainerCallback):
    """Ends a run after so many steps in a row whose loss or gradient norm is NaN or infinite.

    It ends after at most :data:`READ_EVERY` - 1 more steps, and ``verdict`` says why; else that is
    None. After a step that was not finite no checkpoint is saved. A model that holds NaN or
    infinity before the first step is refused with :class:`Diverged`.

    Args:
        limit: How many steps in a row; of a shorter run, all.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.verdict: str | None = None
        self.is_bad = False
        """Whether the last step was not finite, where it was logged, saved or evaluated."""
        self._rates: dict[int, float] = {}

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._step_is_bad = torch.zeros((), dtype=torch.bool, device=args.device)
        # Bad steps: in a row up to now, the most in a row, the last of the first `limit` in a row.
        self._counts = torch.zeros(3, dtype=torch.int64, device=args.device)
        self._left_out = torch.zeros((), dtype=torch.float64, device=args.device)
        # Of the whole run: one that is continued ends where it would have ended.
        self.limit = min(self.limit, state.max_steps)
        told = "the model holds NaN or infinity before the first step"
        require_finite_weights(model.named_parameters(), told)

    def see(self, loss: Tensor, norm: Tensor | float | None) -> Tensor:
        """Take note of a batch; returns the loss, or 0 for one that is not finite.

        Added to others, such a loss would hide all that follow. What was left out here,
        :meth:`pop_nonfinite_loss` gives back.

        Args:
            loss: Without dimensions.
            norm: Of all gradients, where it is known; negative is how DeepSpeed says "not finite".
        """
        finite = torch.isfinite(loss)
        self._step_is_bad |= ~finite
        if norm is not None:
            norm = torch.as_tensor(norm, device=loss.device)
            self._step_is_bad |= ~torch.isfinite(norm) | (norm < 0)
        kept = torch.where(finite, loss, 0)
        self._left_out += torch.where(finite, 0, loss)
        return kept

    def pop_nonfinite_loss(self) -> float:
        """0, or the NaN or infinity among all processes' losses since the last call."""
        total = self._left_out.clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        self._left_out.zero_()
        return total.item()

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        self._rates[state.global_step + 1] = optimizer.param_groups[0]["lr"]

    def on_step_end(self, args, state, control, **kwargs):
        step, counts = state.global_step, self._counts
        counts[0] = (counts[0] + 1) * self._step_is_bad
        counts[1] = torch.maximum(counts[0], counts[1])
        counts[2] += step * ((counts[0] == self.limit) & (counts[2] == 0))
        self._step_is_bad.zero_()
        # The same on all processes: they wait for each other here.
        is_last = step >= state.max_steps
        asked = control.should_log or control.should_save or control.should_evaluate
        if step % CHECK_INTERVAL and not (asked or is_last):
            return control
        now, most, ended = max_over_processes(counts)
        self.is_bad = now > 0
        if now and control.should_save:
            logger.warning("no checkpoint is saved after step %d, which was not finite", step)
            control.should_save = False
        if most >= self.limit:
            first = max(ended - self.limit + 1, 1)
            rate = self._rates.get(first)
            self.verdict = (
                "the loss or the gradient norm was NaN or infinite in "
                f"{'step' if self.limit == 1 else f'{self.limit} steps in a row, {first} to'} "
                f"{ended}{'' if rate is None else f' (learning rate {rate:g} at step {first})'}"
            )
            if first == 1:
                self.verdict += "; there was no step before: see whether model and data are right"
            control.should_training_stop = control.should_log = True
            control.should_save = False
        return control


def max_over_processes(counts: Tensor) -> list[int]:
    """The highest of each count among all processes, which all must ask."""
    if dist.is_initialized():
        counts = counts.clone()
        dist.all_reduce(counts, op=dist.ReduceOp.MAX)
    return counts.tolist()


def json_number(number: float) -> float | str:
    """A number that JSON has; for others "nan", "inf" or "-inf", which ``float`` reads."""
    return number if math.isfinite(number) else str(number)


def require_finite_weights(named: Iterable[tuple[str, nn.Parameter]], told: str) -> None:
    """Raise :class:`Diverged`, on all processes, which all must ask, if one holds NaN or infinity
    among its weights; ``told`` begins the message.

    Each process reads what it holds, once: milliseconds on a GPU, on a CPU a tenth of the time of
    writing it.
    """
    names, parts = [], []
    for name, parameter in named:
        if parameter.is_floating_point():
            names.append(name.removeprefix("base_model.model."))
            # What this process holds; under ZeRO-3 without the padding of the last shard.
            parts.append(unpadded_shard(parameter) if is_sharded(parameter) else parameter.data)
    if not parts:
        return
    with torch.no_grad():
        # A sum reads memory as fast as it comes, ten times as fast as isfinite on a CPU. Only a sum
        # that is not finite needs a second look: finite numbers may add up to infinity.
        suspects = (~torch.stack([part.sum().float() for part in parts]).isfinite()).int()
        for index in suspects.nonzero().flatten().tolist():
            suspects[index] = (~parts[index].isfinite()).any()
    found = [name for name, bad in zip(names, max_over_processes(suspects), strict=True) if bad]
    if found:
        raise Diverged(f"{told}, in {len(found)} tensors: {listed(found, NAMED)}")
