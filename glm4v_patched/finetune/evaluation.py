"""The loss of rows that are not learned, and answers to some of them, while training goes on."""

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


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        # Compiled layers would be compiled anew without gradients.
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.train(was_training)


class EvalGenerations:
    """Some of the rows for evaluation, spread evenly, which are answered at each evaluation."""

    def __init__(
        self,
        checked: CheckedData,
        processor: Any,
        sheet: Path,
        number: int,
        max_new_tokens: int,
        batch_size: int,
        positions: int,
    ):
        """
        Args:
            checked: The rows for evaluation. Those that leave no room for an answer are passed
                over.
            sheet: Where images with their answers are drawn.
            number: How many rows are answered, at most.
            positions: Entries of the model's position table.
        """
        with_room = (checked.column("position_ids") + max_new_tokens <= positions).nonzero()[0]
        step = max(len(with_room) / max(number, 1), 1)
        chosen = [int(with_room[int(n * step)]) for n in range(min(number, len(with_room)))]
        conversations = checked.conversations()
        self.questions = [make_question(row, conversations[row]) for row in chosen]
        self.rows = [checked.row_labels[row] for row in chosen]
        self.processor, self.batch_size, self.sheet = processor, batch_size, sheet
        self.generation = Generation(max_new_tokens=max_new_tokens)

    def answer(self, model: Any, draws: bool) -> float:
        """The share of answers that are the reference; NaN without a row.

        All processes answer all rows, because weights may be sharded between them.

        Args:
            model: With ``generate``: not DeepSpeed's engine around it.
            draws: Whether this process draws the sheet.
        """
        if not self.questions:
            return float("nan")
        usual = model.generation_config
        try:
            with in_eval_mode(model):
                loaded = LoadedModel(model, self.processor)
                answerer = Answerer(loaded, self.generation, check_finite=False)
                answers = [
                    answer.text
                    for some in split_into_batches(self.questions, self.batch_size)
                    for answer in answerer.answer([question.prompt for question in some])
                ]
        finally:
            model.generation_config = usual
        if draws:
            draw_sheet(self.questions, answers, self.sheet, self.rows)
        pairs = zip(answers, self.questions, strict=True)
        right = [exact_match(answer, question.reference or "") for answer, question in pairs]
        return sum(right) / len(right)


def shard_batches(rows: int, batch_size: int) -> tuple[list[list[int]], list[int]]:
    """This process's batches of row numbers, and 1 for each that counts.

    All have as many batches, because they gather weights together: where one has none left, it
    computes its first, or the very first, again.
    """
    rank, processes = 0, 1
    if dist.is_initialized():
        rank, processes = dist.get_rank(), dist.get_world_size()
    numbers = list(range(rows))
    batches = [numbers[start : start + batch_size] for start in range(0, rows, batch_size)]
    mine = batches[rank::processes]
    missing = -(-len(batches) // processes) - len(mine)
    return mine + batches[:1] * missing, [1] * len(mine) + [0] * missing
