"""Evaluation during a training: generated answers to some rows, and the batches of a process."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..data.checked_data import CheckedData
from ..inference.answer_worker import Answerer, split_into_batches
from ..inference.contact_sheet import draw_sheet
from ..inference.questions import Generation, make_question
from ..inference.scoring import exact_match
from ..models.loading import LoadedModel
from ..terminal_text import show_progress


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode during the block, without recompiling its layers."""
    was_training = model.training
    model.eval()
    try:
        # For a call without gradients, compiled layers would be recompiled.
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.train(was_training)


class EvalGenerations:
    """Generates answers to evenly spaced rows of the evaluation data."""

    def __init__(
        self,
        checked: CheckedData,
        processor: Any,
        sheet: Path,
        max_rows: int,
        max_new_tokens: int,
        batch_size: int,
        max_positions: int,
    ):
        """
        Args:
            checked: The rows for evaluation. Rows whose answer could exceed ``max_positions`` are
                skipped.
            sheet: File for the contact sheet: one picture of the images with their answers.
            max_rows: Maximum number of rows to answer.
            max_new_tokens: Maximum number of tokens of an answer.
            batch_size: Number of rows that are answered at once.
            max_positions: Number of position ids that the model has.
        """
        fitting = (checked.column("position_ids") + max_new_tokens <= max_positions).nonzero()[0]
        num_rows = min(max_rows, len(fitting))
        stride = max(len(fitting) / max(max_rows, 1), 1)
        rows = [int(fitting[int(number * stride)]) for number in range(num_rows)]
        conversations = checked.conversations()
        self.questions = [make_question(row, conversations[row]) for row in rows]
        self.row_labels = [checked.sample_labels[row] for row in rows]
        self.processor, self.batch_size, self.sheet = processor, batch_size, sheet
        self.generation = Generation(max_new_tokens=max_new_tokens)

    def answer(self, model: Any, is_main_process: bool) -> float:
        """Return the share of answers that match the reference exactly; NaN if there is no row.

        Every process answers all rows, because the weights may be sharded over the processes.

        Args:
            model: A model with ``generate``, without DeepSpeed's engine around it.
            is_main_process: The main process draws the contact sheet and prints the progress.
        """
        if not self.questions:
            return float("nan")
        own_config = model.generation_config  # the answerer replaces it
        try:
            with in_eval_mode(model):
                loaded = LoadedModel(model, self.processor)
                answerer = Answerer(loaded, self.generation, check_finite=False)
                answers: list[str] = []
                total = len(self.questions)
                with show_progress("generating answers", is_main_process, total) as progress:
                    for batch in split_into_batches(self.questions, self.batch_size):
                        prompts = [question.prompt for question in batch]
                        answers += [answer.text for answer in answerer.answer(prompts)]
                        progress.update(len(batch))
        finally:
            model.generation_config = own_config
        if is_main_process:
            draw_sheet(self.questions, answers, self.sheet, self.row_labels)
        pairs = zip(answers, self.questions, strict=True)
        matches = [exact_match(answer, question.reference or "") for answer, question in pairs]
        return sum(matches) / len(matches)


def shard_batches(rows: int, batch_size: int) -> tuple[list[list[int]], list[int]]:
    """Return this process's batches of row indices, and for each a weight: 1, or 0 for a filler.

    All processes get the same number of batches, because they gather the model's weights together.
    A process with fewer batches also gets the first batch of the data set, as a filler, whose
    result must not count.
    """
    rank, processes = 0, 1
    if dist.is_initialized():
        rank, processes = dist.get_rank(), dist.get_world_size()
    indices = list(range(rows))
    batches = [indices[start : start + batch_size] for start in range(0, rows, batch_size)]
    own_batches = batches[rank::processes]
    num_fillers = -(-len(batches) // processes) - len(own_batches)
    return own_batches + batches[:1] * num_fillers, [1] * len(own_batches) + [0] * num_fillers
