"""The progress of a training: a line for each log step, and ``loss.png``."""

import importlib.util
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from ..engine.memory_plan import GIB
from ..terminal_text import Activity, show_progress, write_line
from .checkpoints import checkpoint_step, list_checkpoints
from .plots import plot_loss
from .run_folder import LOSS_PLOT

SECONDS_BETWEEN_PLOTS = 30


def quiet_transformers() -> None:
    """Hide the warning that the Trainer has replaced the model's special tokens by the tokenizer's.

    :class:`trainer.RecipeTrainer` restores the model's tokens when it saves the model.
    """
    for name in ("transformers.trainer", "transformers.trainer_utils"):
        logging.getLogger(name).addFilter(_is_not_token_warning)


def _is_not_token_warning(record: logging.LogRecord) -> bool:
    return "has new PAD/BOS/EOS tokens" not in record.getMessage()


class Progress(TrainerCallback):
    """Prints a line for each log entry, draws ``loss.png``, and measures speed and memory.

    ``loss.png`` is redrawn at most twice a minute, and at the end.

    Args:
        samples_per_step: Samples in an optimizer step of all processes; the mean if they are
            packed.
        activity: Counts the steps.
        compiles: Whether the first step compiles the layers, which may take a minute.
        has_epochs: Whether the data has an end, unlike a stream.
    """

    # The first steps are not timed: layers are compiled, workers start, and kernels are chosen.
    NUM_UNTIMED_STEPS = 4

    def __init__(
        self,
        samples_per_step: float,
        activity: Activity,
        compiles: bool = False,
        has_epochs: bool = True,
    ):
        self.samples_per_step, self.has_epochs = samples_per_step, has_epochs
        self.activity = activity
        self.first_step = "the first step"
        if compiles:
            self.first_step += ", which compiles the layers"
        self._first_step_message = ExitStack()
        self._last_time: float | None = None
        self._step_seconds: list[float] = []  # without the time of evaluations and checkpoints
        self._num_logged = 0  # steps up to the last line
        self._memory_peaks: dict[str, float] = {}
        self._last_plot_time = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self._last_time = time.monotonic()
        self._first_step_message.enter_context(
            show_progress(self.first_step, enabled=state.is_world_process_zero)
        )

    def on_step_end(self, args, state, control, **kwargs):
        now = time.monotonic()
        assert self._last_time is not None
        self._step_seconds.append(now - self._last_time)
        self._last_time = now
        self._first_step_message.close()
        self.activity.update()

    def on_evaluate(self, args, state, control, **kwargs):
        # The next step is timed from here on.
        self._last_time = time.monotonic()

    on_save = on_evaluate

    def on_log(self, args, state, control, logs: Any = None, **kwargs):
        if not state.is_world_process_zero or not logs:
            return
        step = f"step {state.global_step}/{state.max_steps}"
        if self.has_epochs:
            step += f" epoch {state.epoch or 0:.2f}"
        if "eval_loss" in logs:
            names = ("eval_loss", "eval_exact_match")
            scores = [f"{name} {logs[name]:.4g}" for name in names if name in logs]
            write_line(f"{step} {' '.join(scores)}, in {logs['eval_runtime']:.1f} s")
        elif "loss" in logs:
            write_line(f"{step} {self._describe_steps(state, logs)}")
        if time.monotonic() - self._last_plot_time > SECONDS_BETWEEN_PLOTS:
            self._plot(args, state)

    def _describe_steps(self, state, logs: dict[str, float]) -> str:
        """Return loss, learning rate, speed, peak memory and remaining time.

        Speed and remaining time are computed from the steps since the last line.
        """
        fields = [f"loss {logs['loss']:.4g}", f"lr {_format_rate(logs.get('learning_rate', 0))}"]
        step_seconds = self._step_seconds[self._num_logged :]
        self._num_logged = len(self._step_seconds)
        if step_seconds:
            seconds = sum(step_seconds) / len(step_seconds)
            remaining = timedelta(seconds=round(seconds * (state.max_steps - state.global_step)))
            fields.append(f"{self.samples_per_step / max(seconds, 1e-9):.3g} samples/s")
            if torch.cuda.is_available():
                fields.append(f"{torch.cuda.max_memory_allocated() / GIB:.1f} GiB")
            fields.append(f"left {remaining}")
        return " ".join(fields)

    def on_train_end(self, args, state, control, **kwargs):
        self._first_step_message.close()
        # Read the peaks before the weights are gathered for saving.
        if torch.cuda.is_available():
            self._memory_peaks["peak_allocated_gib"] = torch.cuda.max_memory_allocated() / GIB
            self._memory_peaks["peak_reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
        if state.is_world_process_zero:
            self._plot(args, state)

    def measurements(self) -> dict[str, float | None]:
        """Return ``samples_per_s`` of all processes, and on a GPU the peaks of memory in GiB.

        The speed excludes evaluations and checkpoints, and is None after too few steps. The peaks
        are those of this process.
        """
        timed = self._step_seconds[self.NUM_UNTIMED_STEPS :]
        speed = len(timed) * self.samples_per_step / sum(timed) if timed else None
        return {"samples_per_s": speed, **self._memory_peaks}

    def _plot(self, args, state) -> None:
        """Draw ``loss.png``, if matplotlib is installed."""
        if importlib.util.find_spec("matplotlib") is None:
            return
        folder = Path(args.output_dir)
        saved = sorted(map(checkpoint_step, list_checkpoints(folder)))
        arguments = state.log_history, folder / LOSS_PLOT, saved, state.best_global_step
        # matplotlib's font parser stores the exceptions that it catches. Their tracebacks keep the
        # frames of all callers alive, which in this thread would be those that have the model and
        # the dataloader's workers.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(plot_loss, *arguments).result()
        self._last_plot_time = time.monotonic()


def _format_rate(rate: float) -> str:
    """Return a learning rate such as "1.0e-4", without the zero of "1.0e-04"."""
    mantissa, _, exponent = f"{rate:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if rate else "0"
