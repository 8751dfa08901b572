"""A queue that answers requests with loaded models, several per batch, in its own thread.

docs/serving.md says why transformers' own server is not used.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessor, StoppingCriteria

from ..answer_worker import Answerer, AnswerStreamer, count_positions
from .limits import ApiError, log
from .requests import ParsedRequest

MAX_BATCH_SIZE = 16
"""Requests answered at once."""
MAX_BATCH_IMAGES = 16
"""Images in a batch of several requests. The vision tower encodes all of them at once, so their
number determines the memory that it needs."""


class AnswerEnd(NamedTuple):
    """The end of a complete answer.

    Args:
        reason: OpenAI's finish_reason, "stop" or "length".
        num_tokens: Number of tokens of the answer.
        num_prompt_tokens: Number of tokens of the prompt, image tokens included.
    """

    reason: str
    num_tokens: int
    num_prompt_tokens: int


AnswerEvent = str | AnswerEnd | ApiError
"""The next text of an answer, the end of the answer, or an error that ends it."""


@dataclass(eq=False)
class QueuedRequest:
    """A request in the queue.

    Args:
        on_event: Called with each text and then with the end, or at any time with an error. It may
            be called in any thread.
        cancelled: Set by the application to stop the answer. The queue may then leave out all
            further events.
    """

    request: ParsedRequest
    on_event: Callable[[AnswerEvent], object]
    cancelled: threading.Event = field(default_factory=threading.Event)


class AnswerQueue:
    """A queue whose thread answers requests in the order of their arrival.

    Each batch takes the oldest waiting request and others with the same model and generation
    options. Requests that arrive during a batch wait for the next one. A client gets the end of its
    answer as soon as this answer is complete, even if others in the batch are not.

    Args:
        answerers: Answerers by the model names that clients use; several names may share one.
        activate: Takes a model's name and returns a context in which its adapters are active.
    """

    def __init__(
        self,
        answerers: Mapping[str, Answerer],
        activate: Callable[[str], AbstractContextManager] = lambda name: nullcontext(),
    ):
        self.answerers, self.activate = answerers, activate
        self._waiting: list[QueuedRequest] = []
        self._changed = threading.Condition()
        self._is_closed = False
        self._num_batches = 0
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread that answers is running."""
        return self._thread.is_alive()

    def submit(self, queued: QueuedRequest) -> None:
        """Add a request."""
        with self._changed:
            if self._is_closed:
                queued.on_event(shutdown_error())
            else:
                self._waiting.append(queued)
                self._changed.notify()

    def stop(self) -> None:
        """Stop the current answers at their next token and refuse all other requests."""
        with self._changed:
            self._is_closed = True
            for queued in self._waiting:
                queued.on_event(shutdown_error())
            self._changed.notify()

    def join(self) -> None:
        """Wait up to 30 s until the thread has ended."""
        self._thread.join(30)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                batch = self._next_batch()
            sequences = [seq for queued in batch if (seq := self._make_sequence(queued))]
            # Each answer of a batch is padded to the longest one. A sequence that has too few
            # positions left for the padding is answered alone.
            max_tokens = max((seq.max_tokens for seq in sequences), default=0)
            self._answer_or_fail([seq for seq in sequences if seq.positions_left >= max_tokens])
            for seq in sequences:
                if seq.positions_left < max_tokens:
                    self._answer_or_fail([seq])

    def _next_batch(self) -> list[QueuedRequest]:
        """Remove and return the first waiting request and others that can share its batch."""
        batch: list[QueuedRequest] = []
        num_images = 0
        self._waiting = [queued for queued in self._waiting if not queued.cancelled.is_set()]
        for queued in self._waiting:
            num_images_with_it = num_images + queued.request.num_images
            if not batch or (
                queued.request.can_batch_with(batch[0].request)
                and len(batch) < MAX_BATCH_SIZE
                and num_images_with_it <= MAX_BATCH_IMAGES
            ):
                batch.append(queued)
                num_images = num_images_with_it
        self._waiting = [queued for queued in self._waiting if queued not in batch]
        return batch

    def _make_sequence(self, queued: QueuedRequest) -> "AnswerSequence | None":
        """Return a request's sequence, or None after sending its client an error."""
        request = queued.request
        answerer = self.answerers[request.model]
        context_length = answerer.model.config.seq_length
        try:
            [length] = count_positions(answerer.processor, [request.prompt])
            if length >= context_length:
                raise ApiError(
                    400,
                    f"the messages take {length:,} of the model's {context_length:,} positions (3 "
                    "per image), which leaves none for an answer: send fewer or shorter messages",
                    param=request.prompt_key,
                    code="context_length_exceeded",
                )
        except Exception as error:
            queued.on_event(as_api_error(error))
            return None
        positions_left = context_length - length
        max_tokens = min(request.max_tokens or request.generation.max_new_tokens, positions_left)
        tokenizer, eos_token_ids = answerer.processor.tokenizer, answerer.eos_token_ids
        return AnswerSequence(
            queued, tokenizer, max_tokens, eos_token_ids, lambda: self._is_closed, positions_left
        )

    def _answer_or_fail(self, sequences: Sequence["AnswerSequence"]) -> None:
        try:
            if sequences:
                self._answer(sequences)
        except Exception as error:  # any type, because the thread must go on to later requests
            if len(sequences) > 1 and not any(seq.num_tokens for seq in sequences):
                for seq in sequences:  # the cause may be a single one, or the size of the batch
                    self._answer_or_fail([seq])
                return
            for seq in sequences:
                seq.queued.on_event(as_api_error(error))

    def _answer(self, sequences: Sequence["AnswerSequence"]) -> None:
        request = sequences[0].queued.request
        answerer = self.answerers[request.model]
        start = time.monotonic()
        try:
            batch = answerer.encode([seq.queued.request.prompt for seq in sequences])
        except ValueError as error:  # an image that cannot be decoded
            raise ApiError(400, str(error), request.prompt_key) from None
        prompt_lengths = batch["attention_mask"].sum(-1).tolist()
        for seq, length in zip(sequences, prompt_lengths, strict=True):
            seq.num_prompt_tokens = length
        max_tokens = max(seq.max_tokens for seq in sequences)
        generation = replace(request.generation, max_new_tokens=max_tokens)
        seed_offset = self._num_batches  # so that each batch samples differently
        if request.seed is not None:
            generation, seed_offset = replace(generation, seed=request.seed), 0
        self._num_batches += 1
        kwargs: dict[str, Any] = {"stopping_criteria": [SequenceStopping(sequences)]}
        if any(request.penalties):
            padded_length = batch["input_ids"].shape[1]
            kwargs["logits_processor"] = [OpenAIPenalties(padded_length, *request.penalties)]
        with self.activate(request.model):
            answerer.generate(batch, generation, seed_offset, **kwargs)
        if unfinished := [seq for seq in sequences if not seq.reason]:
            raise RuntimeError(
                f"{len(unfinished)} of {len(sequences)} answers were not generated to their end"
            )
        duration = f"in {time.monotonic() - start:.1f} s"
        batch_note = f", batch of {len(sequences)}" if len(sequences) > 1 else ""
        for seq in sequences:
            counts = f"{seq.num_prompt_tokens} prompt tokens, {seq.num_tokens} generated"
            log(request.model or "model", f"{counts} {duration}{batch_note}: {seq.reason}")


def as_api_error(error: Exception) -> ApiError:
    """Return the error to send to the client: an ``ApiError`` itself, or one with status 500."""
    if isinstance(error, ApiError):
        return error
    return ApiError(500, f"{type(error).__name__}: {error}")


def shutdown_error() -> ApiError:
    """Return the error for requests during shutdown."""
    return ApiError(503, "the server is shutting down")


class AnswerSequence(AnswerStreamer):
    """One sequence of a batch. It sends its text to the client, up to a stop text.

    White space at the end, and text that may be the beginning of a stop text, are withheld until
    the next text shows whether they belong to the answer.

    Args:
        max_tokens: Maximum number of tokens of the answer.
        eos_token_ids: Ids of the tokens that end the answer.
        is_closed: Returns whether the server is shutting down.
        positions_left: Number of position ids that the prompt leaves for the answer.

    Attributes:
        withheld: Text that is not sent yet.
        is_stopped: Whether a stop text has ended the answer.
        reason: Why the answer has ended; empty until then.
    """

    def __init__(
        self,
        queued: QueuedRequest,
        tokenizer,
        max_tokens: int,
        eos_token_ids: Sequence[int],
        is_closed: Callable[[], bool] = lambda: False,
        positions_left: int = 0,
    ):
        super().__init__(tokenizer, queued.on_event)
        self.next_tokens_are_prompt = False  # put() gets generated tokens only, never the prompt
        self.queued, self.max_tokens, self.eos_token_ids = queued, max_tokens, eos_token_ids
        self.is_closed, self.positions_left = is_closed, positions_left
        self.stop_texts, self.withheld, self.is_stopped = queued.request.stop, "", False
        self.num_tokens, self.num_prompt_tokens, self.reason = 0, 0, ""

    def append_token(self, token: int) -> bool:
        """Add the next token; return whether the answer ends with it."""
        if self.reason:
            return True
        self.num_tokens += 1
        self.put(torch.tensor([token]))
        if token in self.eos_token_ids or self.is_stopped or self.num_tokens >= self.max_tokens:
            # Sends the withheld text, up to a stop text. A stop text in it sets is_stopped.
            self.end()
            is_complete = token in self.eos_token_ids or self.is_stopped
            self.reason = "stop" if is_complete else "length"
            self.queued.on_event(AnswerEnd(self.reason, self.num_tokens, self.num_prompt_tokens))
        elif self.queued.cancelled.is_set():
            self.reason = "the client disconnected"
        elif self.is_closed():
            self.reason = "the server is shutting down"
            self.queued.on_event(shutdown_error())
        return bool(self.reason)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self.is_stopped:
            return
        text = self.withheld + (text if self.has_begun or self.withheld else text.lstrip())
        stop_starts = [index for stop in self.stop_texts if (index := text.find(stop)) >= 0]
        if stop_starts:
            text, self.is_stopped = text[: min(stop_starts)], True
        ready = text.rstrip()
        if not (stream_end or self.is_stopped):
            # All but the last character of a stop text may already be at the end.
            max_stop_length = max(map(len, self.stop_texts), default=1)
            ready = ready[: max(len(text) - max_stop_length + 1, 0)].rstrip()
        self.withheld = text[len(ready) :]
        if ready:
            self.has_begun = True
            self.on_text(ready)


class SequenceStopping(StoppingCriteria):
    """A criterion that asks each :class:`AnswerSequence` whether its answer ends with its token."""

    def __init__(self, sequences: Sequence[AnswerSequence]):
        self.sequences = sequences

    def __call__(self, input_ids, scores, **options) -> torch.Tensor:
        tokens = input_ids[:, -1].tolist()
        done = [
            sequence.append_token(token)
            for sequence, token in zip(self.sequences, tokens, strict=True)
        ]
        return torch.tensor(done, device=input_ids.device)


class OpenAIPenalties(LogitsProcessor):
    """OpenAI's presence and frequency penalties on tokens that the answer already contains."""

    def __init__(self, prompt_length: int, presence: float, frequency: float):
        self.prompt_length, self.presence, self.frequency = prompt_length, presence, frequency

    def __call__(self, input_ids, scores) -> torch.Tensor:
        answer = input_ids[:, self.prompt_length :]
        ones = torch.ones_like(answer, dtype=scores.dtype)
        counts = torch.zeros_like(scores).scatter_add_(1, answer, ones)
        return scores - self.presence * (counts > 0) - self.frequency * counts
