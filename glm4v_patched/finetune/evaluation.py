"""The loss of rows that are not learned, and answers to some of them, while training goes on."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from ..data.checked_data import CheckedData
from ..data.loading import BATCHES_AHEAD, workers_with_room
from ..data.stored_rows import Conversations
from ..inference.answer_worker import Answerer, batches
from ..inference.contact_sheet import draw_sheet
from ..inference.questions import Generation, question_of
from ..inference.scoring import exact_match
from ..models.loading import Loaded
from ..remote.loss import IGNORE_INDEX


@torch.no_grad()
def mean_loss(
    model: nn.Module,
    rows: Sequence,
    collator: Callable[[list], Mapping[str, torch.Tensor]],
    batch_size: int,
    device: torch.device,
    loss_of: Callable[[dict[str, Any]], torch.Tensor],
    workers: int = 0,
    start: str | None = None,
) -> tuple[float, int]:
    """The mean loss of all supervised tokens of ``rows``, and their number; the same on all
    processes, of which each computes its share.

    Logits are not built as a whole (the config's ``skip_logits``). The model is in eval mode
    meanwhile, and no random number is drawn.

    Args:
        model: As it is trained: DeepSpeed's engine, where there is one.
        loss_of: The sum of the losses of all supervised tokens of a batch.
        workers: The most processes that read pictures: those of training still hold batches in
            shared memory, and what is free there may be less than they took.
        start: How they start (:func:`worker_start`).
    """
    share, weights = _share(len(rows), batch_size)
    if workers and isinstance(rows, Conversations):
        here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        workers = workers_with_room(workers, here, rows.most_images * batch_size)
    loader: DataLoader = DataLoader(
        rows,  # type: ignore[arg-type]  # a sequence, which has what is asked of a Dataset
        batch_sampler=share,
        collate_fn=collator,
        num_workers=workers,
        prefetch_factor=BATCHES_AHEAD if workers else None,
        multiprocessing_context=start if workers else None,
        generator=torch.Generator(),  # else it draws a seed from everybody's
    )
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    with _in_eval_mode(model):
        for batch, weight in zip(loader, weights, strict=True):
            tokens = (batch["labels"][:, 1:] != IGNORE_INDEX).sum().to(device)
            loss = loss_of(dict(batch))
            totals += weight * torch.stack([loss.double(), tokens.double()])
    if dist.is_initialized():
        dist.all_reduce(totals)
    total, number = totals.tolist()
    return total / max(number, 1), int(number)


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        # Compiled layers would be compiled anew without gradients.
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.train(was_training)


class Sample:
    """Some of the rows for evaluation, spread evenly, which are answered at each evaluation."""

    def __init__(
        self,
        checked: CheckedData,
        processor: Any,
        number: int,
        max_new_tokens: int,
        batch_size: int,
        positions: int,
        sheet: Path,
    ):
        """
        Args:
            checked: The rows for evaluation.
            number: How many are answered. Rows that leave no room for an answer are passed over.
            positions: Entries of the model's position table.
            sheet: Where pictures and answers are drawn (:func:`draw_sheet`).
        """
        with_room = (checked.column("in_table") + max_new_tokens <= positions).nonzero()[0]
        step = max(len(with_room) / number, 1)
        chosen = [int(with_room[int(n * step)]) for n in range(min(number, len(with_room)))]
        conversations = checked.conversations()
        self.questions = [question_of(row, conversations[row]) for row in chosen]
        self.rows = [checked.row_lines[row] for row in chosen]
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
            with _in_eval_mode(model):
                answerer = Answerer(Loaded(model, self.processor), self.generation)
                answers = [
                    answer.text
                    for some in batches(self.questions, self.batch_size)
                    for answer in answerer.answer([question.prompt for question in some])
                ]
        finally:
            model.generation_config = usual
        if draws:
            draw_sheet(self.questions, answers, self.sheet, self.rows)
        pairs = zip(answers, self.questions, strict=True)
        right = [exact_match(answer, question.reference or "") for answer, question in pairs]
        return sum(right) / len(right)


def _share(rows: int, batch_size: int) -> tuple[list[list[int]], list[int]]:
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
