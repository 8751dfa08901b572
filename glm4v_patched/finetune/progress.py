"""What is seen of a training while it goes on: the progress bar, and ``loss.png``."""

import importlib.util
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import ProgressCallback, TrainerCallback

from ..terminal_text import doing, pip_install
from .plots import plot_loss
from .run_folder import PLOT

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_PLOTS = 30
GIB = 2**30


class FirstStep(TrainerCallback):
    """Says that the first step goes on, which may take a minute."""

    def __init__(self, compiles: bool):
        self.what = "the first step, which compiles the layers" if compiles else "the first step"
        self.words = ExitStack()

    def on_train_begin(self, args, state, control, **kwargs):
        self.words.enter_context(doing(self.what, tells=state.is_world_process_zero))

    def on_step_end(self, args, state, control, **kwargs):
        self.words.close()

    def on_train_end(self, args, state, control, **kwargs):
        self.words.close()


class ProgressBar(ProgressCallback):
    """transformers' bar, with loss, learning rate, samples a second and memory beside the time
    that is left.

    Args:
        batch: Samples of an update of the weights, of all processes; the mean, if they are packed.
    """

    def __init__(self, batch: float):
        super().__init__()
        self.batch = batch
        self._last = (0, time.monotonic())

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        self._last = (state.global_step, time.monotonic())

    def on_log(self, args, state, control, logs: Any = None, **kwargs):
        super().on_log(args, state, control, logs=logs, **kwargs)
        bar: Any = self.training_bar  # of the first process alone
        if bar is None or logs is None or "loss" not in logs:
            return
        (step, then), now = self._last, time.monotonic()
        self._last = (state.global_step, now)
        speed = (state.global_step - step) * self.batch / max(now - then, 1e-9)
        shown = {"loss": f"{logs['loss']:.4g}", "lr": f"{logs.get('learning_rate', 0):.2g}"}
        shown["samples/s"] = f"{speed:.3g}"
        if torch.cuda.is_available():
            shown["GiB"] = f"{torch.cuda.max_memory_allocated() / GIB:.1f}"
        bar.set_postfix(shown)


class Measurements(TrainerCallback):
    """How fast training is, and how much memory it takes.

    Args:
        batch: Samples of an update of the weights, of all processes; the mean, if they are packed.
    """

    # In the first steps layers are compiled, workers start and kernels are chosen.
    WARM_UP = 3

    def __init__(self, batch: float):
        self.batch = batch
        self._steps, self._seconds = 0, 0.0
        self._seen = 0
        self._last: float | None = None
        self._peaks: dict[str, float] = {}

    def on_train_begin(self, args, state, control, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def on_step_end(self, args, state, control, **kwargs):
        last, self._last = self._last, time.monotonic()
        self._seen += 1
        if last is not None and self._seen > self.WARM_UP + 1:
            self._steps += 1
            self._seconds += self._last - last

    def on_evaluate(self, args, state, control, **kwargs):
        self._last = None

    def on_save(self, args, state, control, **kwargs):
        self._last = None

    def on_train_end(self, args, state, control, **kwargs):
        # Before the weights are gathered to be saved.
        if torch.cuda.is_available():
            self._peaks["peak_allocated_gib"] = torch.cuda.max_memory_allocated() / GIB
            self._peaks["peak_reserved_gib"] = torch.cuda.max_memory_reserved() / GIB

    def found(self) -> dict[str, float | None]:
        """``samples_per_s`` of all processes, without what comes between steps (None of too few
        steps), and on a GPU the peaks of this process's memory."""
        speed = self._steps * self.batch / self._seconds if self._steps else None
        return {"samples_per_s": speed, **self._peaks}


class LossPlot(TrainerCallback):
    """Redraws ``loss.png`` in the run's folder, at most twice a minute and at the end."""

    def __init__(self) -> None:
        self._drawn = 0.0
        self._draws = importlib.util.find_spec("matplotlib") is not None
        if not self._draws:
            logger.warning("no %s is drawn: %s", PLOT, pip_install("matplotlib"))

    def on_log(self, args, state, control, **kwargs):
        if time.monotonic() - self._drawn > SECONDS_BETWEEN_PLOTS:
            self._draw(args, state)

    def on_train_end(self, args, state, control, **kwargs):
        self._draw(args, state)

    def _draw(self, args, state) -> None:
        if self._draws and state.is_world_process_zero:
            # In a thread: matplotlib's parser of fonts keeps errors that it caught, and with them
            # all that called it: here the training's frames, with its model and its workers.
            with ThreadPoolExecutor(1) as thread:
                thread.submit(plot_loss, state.log_history, Path(args.output_dir, PLOT)).result()
            self._drawn = time.monotonic()
