"""What is seen of a training while it goes on: a line each log step, a bar, and ``loss.png``."""

import importlib.util
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import TrainerCallback

from ..terminal_text import show_progress
from .checkpoints import list_checkpoints, checkpoint_step
from .plots import plot_loss
from .run_folder import PLOT

SECONDS_BETWEEN_PLOTS = 30
GIB = 2**30


def quiet_transformers() -> None:
    """Leave out what it prints while it trains, in each process, and that asks nothing of anybody:
    that the Trainer has put the tokenizer's end token in place of the model's, which
    :class:`trainer.RecipeTrainer` undoes."""
    for name in ("transformers.trainer", "transformers.trainer_utils"):
        logging.getLogger(name).addFilter(_is_no_alignment)


def _is_no_alignment(record: logging.LogRecord) -> bool:
    return "has new PAD/BOS/EOS tokens" not in record.getMessage()


class Progress(TrainerCallback):
    """Prints what is logged, a line each time, above a bar where there is a terminal; redraws
    ``loss.png``, at most twice a minute and at the end; and knows how fast training is, and how
    much memory it takes.

    Args:
        batch: Samples of an update of the weights, of all processes; the mean, if they are packed.
        compiles: Whether the first step compiles the layers, which may take a minute.
        shows_bar: Whether there is to be a bar.
        has_epochs: Whether the rows come to an end.
    """

    # In the first steps layers are compiled, workers start and kernels are chosen.
    WARM_UP = 3

    def __init__(
        self,
        batch: float,
        compiles: bool = False,
        shows_bar: bool = True,
        has_epochs: bool = True,
    ):
        self.batch, self.shows_bar, self.has_epochs = batch, shows_bar, has_epochs
        self.first_step = "the first step" + ", which compiles the layers" * compiles
        self._words = ExitStack()
        self._bar: tqdm | None = None
        self._last: float | None = None
        # Of each step how long it took, without evaluations and checkpoints.
        self._seconds: list[float] = []
        self._told = 0
        self._peaks: dict[str, float] = {}
        self._drawn = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self._last = time.monotonic()
        self._words.enter_context(show_progress(self.first_step, enabled=state.is_world_process_zero))

    def on_step_end(self, args, state, control, **kwargs):
        now = time.monotonic()
        assert self._last is not None
        self._seconds.append(now - self._last)
        self._last = now
        self._words.close()
        if self._bar is None and self.shows_bar and state.is_world_process_zero:
            done = {"total": state.max_steps, "initial": state.global_step - 1}
            shape = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}"  # the lines say how fast
            self._bar = tqdm(**done, bar_format=shape, leave=False, disable=None)
        if self._bar is not None:
            self._bar.update()

    def on_evaluate(self, args, state, control, **kwargs):
        self._last = time.monotonic()

    on_save = on_evaluate

    def on_log(self, args, state, control, logs: Any = None, **kwargs):
        if not state.is_world_process_zero or not logs:
            return
        place = f"step {state.global_step}/{state.max_steps}"
        if self.has_epochs:
            place += f" epoch {state.epoch or 0:.2f}"
        if "eval_loss" in logs:
            names = ("eval_loss", "eval_exact_match")
            told = [f"{name} {logs[name]:.4g}" for name in names if name in logs]
            tqdm.write(f"{place} {' '.join(told)}, in {logs['eval_runtime']:.1f} s")
        elif "loss" in logs:
            tqdm.write(f"{place} {self._describe_steps(state, logs)}")
        if time.monotonic() - self._drawn > SECONDS_BETWEEN_PLOTS:
            self._draw(args, state)

    def _describe_steps(self, state, logs: dict[str, float]) -> str:
        told = [f"loss {logs['loss']:.4g}", f"lr {_short(logs.get('learning_rate', 0))}"]
        steps, self._told = self._seconds[self._told :], len(self._seconds)
        if steps:
            a_step = sum(steps) / len(steps)
            left = timedelta(seconds=round(a_step * (state.max_steps - state.global_step)))
            told.append(f"{self.batch / max(a_step, 1e-9):.3g} samples/s")
            if torch.cuda.is_available():
                told.append(f"{torch.cuda.max_memory_allocated() / GIB:.1f} GiB")
            told.append(f"left {left}")
        return " ".join(told)

    def on_train_end(self, args, state, control, **kwargs):
        self._words.close()
        if self._bar is not None:
            self._bar.close()
        # Before the weights are gathered to be saved.
        if torch.cuda.is_available():
            self._peaks["peak_allocated_gib"] = torch.cuda.max_memory_allocated() / GIB
            self._peaks["peak_reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
        if state.is_world_process_zero:
            self._draw(args, state)

    def found(self) -> dict[str, float | None]:
        """``samples_per_s`` of all processes, without what comes between steps (None of too few
        steps), and on a GPU the peaks of this process's memory."""
        timed = self._seconds[self.WARM_UP + 1 :]
        speed = len(timed) * self.batch / sum(timed) if timed else None
        return {"samples_per_s": speed, **self._peaks}

    def _draw(self, args, state) -> None:
        if importlib.util.find_spec("matplotlib") is None:
            return
        folder = Path(args.output_dir)
        saved = sorted(map(checkpoint_step, list_checkpoints(folder)))
        asked = state.log_history, folder / PLOT, saved, state.best_global_step
        # In a thread: matplotlib's parser of fonts keeps errors that it caught, and with them
        # all that called it: here the training's frames, with its model and its workers.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(plot_loss, *asked).result()
        self._drawn = time.monotonic()


def _short(rate: float) -> str:
    """As 1.0e-4."""
    digits, _, exponent = f"{rate:.1e}".partition("e")
    return f"{digits}e{int(exponent)}" if rate else "0"
