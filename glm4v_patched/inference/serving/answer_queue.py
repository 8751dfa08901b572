"""Answers requests with a loaded model, one after the other, on a thread of its own."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import NamedTuple

import torch
from transformers import StoppingCriteria

from ..answer_worker import Answerer, Words, positions_of
from .errors import ApiError
from .requests import Wanted


class Started(NamedTuple):
    """The request is understood and being answered; ``tokens`` are those of the prompt."""

    tokens: int


class Text(NamedTuple):
    """More of the answer."""

    text: str


class Ended(NamedTuple):
    """The answer is complete: ``reason`` is "stop" or "length", ``tokens`` are those of the
    answer."""

    reason: str
    tokens: int


class Failed(NamedTuple):
    error: ApiError


Event = Started | Text | Ended | Failed


@dataclass
class Ask:
    """A request on its way.

    Args:
        tell: Takes what happens; called on the engine's thread. Started, texts, and Ended; or
            Failed at any time. Of an ask that was cancelled, nothing may come.
    """

    wanted: Wanted
    tell: Callable[[Event], object]
    cancelled: threading.Event = field(default_factory=threading.Event)


class AnswerQueue:
    """A queue before a model.

    Args:
        limit: Position ids that the model has; a picture takes three.
        log: Takes a line about each request that was answered or left.
    """

    def __init__(self, answerer: Answerer, limit: int, log: Callable[[str], object] = print):
        self.answerer, self.limit, self.log = answerer, limit, log
        self._waiting: SimpleQueue[Ask | None] = SimpleQueue()
        self._now: Ask | None = None
        self._is_closed = False
        self._number = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, ask: Ask) -> None:
        self._waiting.put(ask)

    def stop(self) -> None:
        """End the answer that is being generated at its next token, and begin no other."""
        self._is_closed = True
        self._waiting.put(None)

    def join(self) -> None:
        """Wait until it has stopped."""
        self._thread.join(30)

    def _run(self) -> None:
        while (ask := self._waiting.get()) is not None and not self._is_closed:
            if ask.cancelled.is_set():
                continue
            try:
                self._answer(ask)
            except ApiError as error:
                ask.tell(Failed(error))
            except Exception as error:  # whatever it was, the next request may be answered
                ask.tell(Failed(ApiError(500, f"{type(error).__name__}: {error}")))

    def _answer(self, ask: Ask) -> None:
        wanted, answerer = ask.wanted, self.answerer
        start = time.monotonic()
        try:
            new = self._room(wanted)
            batch = answerer.encode([wanted.messages])
        except ValueError as error:  # of the processor: a picture that cannot be decoded
            raise ApiError(400, str(error), "messages") from None
        length = batch["input_ids"].shape[1]
        ask.tell(Started(length))
        words = Answer(answerer.processor.tokenizer, wanted.stop, lambda t: ask.tell(Text(t)))
        number = self._number
        generation = replace(wanted.generation, max_new_tokens=new)
        if wanted.seed is not None:
            generation, number = replace(generation, seed=wanted.seed), 0
        self._number += 1
        ends = Ends(lambda: self._is_closed or ask.cancelled.is_set() or words.is_stopped)
        ids = answerer.generate(batch, generation, number, streamer=words, stopping_criteria=[ends])
        has_ended = words.is_stopped or answerer.have_ended(ids)[0]
        reason = "stop" if has_ended else "length"
        told = "the server is being stopped" if self._is_closed else reason
        told = "the client went away" if ask.cancelled.is_set() else told
        seconds = time.monotonic() - start
        self.log(f"{length} tokens asked, {ids.shape[1]} answered in {seconds:.1f} s: {told}")
        if self._is_closed:
            raise ApiError(503, "the server is being stopped")
        ask.tell(Ended(reason, ids.shape[1]))

    def _room(self, wanted: Wanted) -> int:
        """How long the answer may be."""
        [taken] = positions_of(self.answerer.processor, [wanted.messages])
        room = self.limit - taken
        new = wanted.max_tokens or min(wanted.generation.max_new_tokens, max(room, 1))
        if new > room:
            raise ApiError(
                400,
                f"the messages take {taken} of the model's {self.limit} positions (a picture takes "
                f"3), which leaves too little room for an answer of {new} tokens: send fewer "
                "messages, or lower max_tokens",
                "messages",
                "context_length_exceeded",
            )
        return new


class Answer(Words):
    """Hands on an answer as it comes, up to the first of the texts that end it.

    What may be the beginning of such a text, and white space at the end, is held back.
    """

    def __init__(self, tokenizer, stop: tuple[str, ...], say: Callable[[str], object]):
        super().__init__(tokenizer, say)
        self.stop, self.held, self.is_stopped = stop, "", False

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self.is_stopped:
            return
        text = self.held + (text if self.has_begun or self.held else text.lstrip())
        found = [at for each in self.stop if (at := text.find(each)) >= 0]
        if found:
            text, self.is_stopped = text[: min(found)], True
        ready = text.rstrip()
        if not (stream_end or self.is_stopped):
            ready = ready[: len(ready) - self._may_begin(text, len(text) - len(ready))].rstrip()
        self.held = text[len(ready) :]
        if ready:
            self.has_begun = True
            self.say(ready)

    def _may_begin(self, text: str, spaces: int) -> int:
        """How much of ``text``, but for the spaces at its end, has to be held back."""
        longest = max(
            (
                size
                for each in self.stop
                for size in range(1, min(len(each), len(text) + 1))
                if text.endswith(each[:size])
            ),
            default=0,
        )
        return max(longest - spaces, 0)


class Ends(StoppingCriteria):
    """Ends generation when ``is_over`` says so."""

    def __init__(self, is_over: Callable[[], bool]):
        self.is_over = is_over

    def __call__(self, input_ids, scores, **options) -> torch.Tensor:
        return torch.full((len(input_ids),), self.is_over(), device=input_ids.device)
