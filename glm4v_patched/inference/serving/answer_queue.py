"""Answers requests with a loaded model, several in a batch, on a thread of its own.

docs/serving.md says why transformers' own server does not stand here.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessor, StoppingCriteria

from ..answer_worker import Answerer, Words, positions_of
from .limits import ApiError, log
from .requests import Wanted

MOST_ROWS = 16
"""Of a batch."""
MOST_IMAGES = 16
"""Of a batch, if its first request has not more: what the vision tower computes at once."""


class AnswerEnd(NamedTuple):
    """The answer is complete: ``reason`` is "stop" or "length", ``tokens`` are those of the
    answer."""

    reason: str
    tokens: int
    prompt_tokens: int


Event = str | AnswerEnd | ApiError
"""More of an answer, its end, or why there is none."""


@dataclass(eq=False)
class Ask:
    """A request on its way.

    Args:
        tell: Takes what happens, on the queue's thread: texts, then the end; or an error at any
            time. Of an ask that was cancelled, nothing may come.
    """

    wanted: Wanted
    tell: Callable[[Event], object]
    cancelled: threading.Event = field(default_factory=threading.Event)


class AnswerQueue:
    """A queue before a model.

    Requests that wait and draw alike are answered in one batch; of those that come meanwhile, the
    next one. An answer that is complete is told at once.

    Args:
        answerers: By the names that clients have for models; several may have one.
        using: A context in which the model of that name answers: its adapters are on.
    """

    def __init__(
        self,
        answerers: Mapping[str, Answerer],
        using: Callable[[str], AbstractContextManager] = lambda name: nullcontext(),
    ):
        self.answerers, self.using = answerers, using
        self._waiting: list[Ask] = []
        self._changed = threading.Condition()
        self._is_closed = False
        self._number = 0
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, ask: Ask) -> None:
        with self._changed:
            if self._is_closed:
                ask.tell(stopped())
            else:
                self._waiting.append(ask)
                self._changed.notify()

    def stop(self) -> None:
        """End what is being answered at its next token, and refuse all else."""
        with self._changed:
            self._is_closed = True
            for ask in self._waiting:
                ask.tell(stopped())
            self._changed.notify()

    def join(self) -> None:
        """Wait until it has stopped."""
        self._thread.join(30)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                group = self._taken()
            rows = [row for ask in group if (row := self._row(ask)) is not None]
            # All rows of a batch are as long as its longest answer, also one that ended before.
            longest = max((row.most for row in rows), default=0)
            self._answer_or_fail([row for row in rows if row.room >= longest])
            for row in rows:
                if row.room < longest:
                    self._answer_or_fail([row])

    def _taken(self) -> list[Ask]:
        """The first that waits, and others that go with it."""
        group: list[Ask] = []
        images = 0
        self._waiting = [ask for ask in self._waiting if not ask.cancelled.is_set()]
        for ask in self._waiting:
            more = images + ask.wanted.images
            if not group or (
                ask.wanted.goes_with(group[0].wanted)
                and len(group) < MOST_ROWS
                and more <= MOST_IMAGES
            ):
                group.append(ask)
                images = more
        self._waiting = [ask for ask in self._waiting if ask not in group]
        return group

    def _row(self, ask: Ask) -> "Row | None":
        """A row of a batch, with as many tokens as are asked for and there is room; None of a
        request that is refused."""
        wanted = ask.wanted
        answerer = self.answerers[wanted.model]
        limit = answerer.model.config.seq_length
        try:
            [taken] = positions_of(answerer.processor, [wanted.prompt])
            if taken >= limit:
                raise ApiError(
                    400,
                    f"the messages take {taken:,} of the model's {limit:,} positions (an image "
                    "takes 3), which leaves no room for an answer: send fewer messages",
                    wanted.key,
                    "context_length_exceeded",
                )
        except Exception as error:
            ask.tell(as_api_error(error))
            return None
        room = limit - taken
        new = min(wanted.max_tokens or wanted.generation.max_new_tokens, room)
        tokenizer = answerer.processor.tokenizer
        return Row(ask, tokenizer, new, answerer.end_ids, lambda: self._is_closed, room)

    def _answer_or_fail(self, rows: Sequence["Row"]) -> None:
        try:
            if rows:
                self._answer(rows)
        except Exception as error:  # whatever it was, the next request may be answered
            if len(rows) > 1 and not any(row.tokens for row in rows):
                for row in rows:  # it may be the fault of one, or of their number
                    self._answer_or_fail([row])
                return
            for row in rows:
                row.ask.tell(as_api_error(error))

    def _answer(self, rows: Sequence["Row"]) -> None:
        wanted = rows[0].ask.wanted
        answerer = self.answerers[wanted.model]
        start = time.monotonic()
        try:
            batch = answerer.encode([row.ask.wanted.prompt for row in rows])
        except ValueError as error:  # an image that cannot be decoded
            raise ApiError(400, str(error), wanted.key) from None
        for row, length in zip(rows, batch["attention_mask"].sum(-1).tolist(), strict=True):
            row.prompt_tokens = length
        most = max(row.most for row in rows)
        generation, number = replace(wanted.generation, max_new_tokens=most), self._number
        if wanted.seed is not None:
            generation, number = replace(generation, seed=wanted.seed), 0
        self._number += 1
        options: dict[str, Any] = {"stopping_criteria": [Rows(rows)]}
        if any(wanted.penalties):
            length = batch["input_ids"].shape[1]
            options["logits_processor"] = [Penalties(length, *wanted.penalties)]
        with self.using(wanted.model):
            answerer.generate(batch, generation, number, **options)
        if left := [row for row in rows if not row.reason]:
            raise RuntimeError(
                f"{len(left)} of {len(rows)} answers were not generated to their end"
            )
        beside = f", {len(rows)} at once" if len(rows) > 1 else ""
        took = f"in {time.monotonic() - start:.1f} s{beside}"
        for row in rows:
            line = f"{row.prompt_tokens} tokens asked, {row.tokens} answered {took}: {row.reason}"
            log(wanted.model or "model", line)


def as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    return ApiError(500, f"{type(error).__name__}: {error}")


def stopped() -> ApiError:
    return ApiError(503, "the server is being stopped")


class Row(Words):
    """Hands on the answer to a request as it comes, up to the first of the texts that end it.

    As much as may be the beginning of such a text, and white space at the end, is held back.

    Args:
        most: Tokens that the answer may have.
        end_ids: Tokens that end it.
        is_closed: Whether the server is being stopped.
        room: Position ids that are left for it.
    """

    def __init__(
        self,
        ask: Ask,
        tokenizer,
        most: int,
        end_ids: Sequence[int],
        is_closed: Callable[[], bool] = lambda: False,
        room: int = 0,
    ):
        super().__init__(tokenizer, ask.tell)
        self.next_tokens_are_prompt = False  # only new ones are handed to it
        self.ask, self.most, self.end_ids, self.is_closed = ask, most, end_ids, is_closed
        self.stop, self.held, self.is_stopped = ask.wanted.stop, "", False
        self.room, self.tokens, self.prompt_tokens, self.reason = room, 0, 0, ""

    def take(self, token: int) -> bool:
        """Take the answer's next token, and tell whether it is the last."""
        if self.reason:
            return True
        self.tokens += 1
        self.put(torch.tensor([token]))
        if token in self.end_ids or self.is_stopped or self.tokens >= self.most:
            self.end()  # which may find a text that stops it
            is_whole = token in self.end_ids or self.is_stopped
            self.reason = "stop" if is_whole else "length"
            self.ask.tell(AnswerEnd(self.reason, self.tokens, self.prompt_tokens))
        elif self.ask.cancelled.is_set():
            self.reason = "the client went away"
        elif self.is_closed():
            self.reason = "the server is being stopped"
            self.ask.tell(stopped())
        return bool(self.reason)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self.is_stopped:
            return
        text = self.held + (text if self.has_begun or self.held else text.lstrip())
        found = [at for each in self.stop if (at := text.find(each)) >= 0]
        if found:
            text, self.is_stopped = text[: min(found)], True
        ready = text.rstrip()
        if not (stream_end or self.is_stopped):
            longest = max(map(len, self.stop), default=1)
            ready = ready[: max(len(text) - longest + 1, 0)].rstrip()
        self.held = text[len(ready) :]
        if ready:
            self.has_begun = True
            self.say(ready)


class Rows(StoppingCriteria):
    """Hands each row its tokens, and ends it by itself."""

    def __init__(self, rows: Sequence[Row]):
        self.rows = rows

    def __call__(self, input_ids, scores, **options) -> torch.Tensor:
        new = input_ids[:, -1].tolist()
        ended = [row.take(token) for row, token in zip(self.rows, new, strict=True)]
        return torch.tensor(ended, device=input_ids.device)


class Penalties(LogitsProcessor):
    """OpenAI's: lower the logits of tokens that an answer has, once and for each time."""

    def __init__(self, prompt: int, presence: float, frequency: float):
        self.prompt, self.presence, self.frequency = prompt, presence, frequency

    def __call__(self, input_ids, scores) -> torch.Tensor:
        said = input_ids[:, self.prompt :]
        ones = torch.ones_like(said, dtype=scores.dtype)
        counts = torch.zeros_like(scores).scatter_add_(1, said, ones)
        return scores - self.presence * (counts > 0) - self.frequency * counts
