"""Answers batches of questions with a loaded model.

``python -m glm4v_patched.inference.answer_worker`` does so in a process of its own, on the GPU that
it sees: it takes a pickled request with all of its batches from its standard input, and writes
the answers to each batch to its standard output. It ends when its input does.
"""

import os
import pickle
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, TextStreamer

from ..engine.environment import exit_when_stdin_closes
from ..models import loading
from ..models.base import ModelSource
from ..models.loading import LoadedModel, load_processor
from .decoding.static_cache import StaticCaches, chosen
from .nonfinite import NonFiniteLogits, RequireFinite, describe_cause
from .questions import Generation, ModelOptions, Question, AnswerOptions

# Of a static cache's sizes: turns of a conversation and batches of unlike lengths share one.
STEP = 1024
MOST_READERS = 4
"""Threads that read images: Pillow and torch let others run meanwhile."""


class Answer(NamedTuple):
    """``finish_reason`` is "stop", or "length" where the text was cut at ``max_new_tokens``."""

    text: str
    finish_reason: str


class Words(TextStreamer):
    """Hands on the text of an answer as it comes, without white space before it."""

    def __init__(self, tokenizer, say: Callable[[str], object]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.say, self.has_begun = say, False

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        text = text if self.has_begun else text.lstrip()
        self.has_begun = self.has_begun or bool(text)
        self.say(text)


class Answerer:
    """Answers questions with one model.

    With a ``static`` cache steps are recorded on a GPU, for each number of rows, and nothing waits
    between them (:func:`loop.decode_without_sync`). Beams have a ``dynamic`` one.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        generation: Generation,
        cache: str = "dynamic",
        refuses: bool = True,
    ):
        """
        Args:
            refuses: Whether logits that are NaN or infinite end a dynamic cache's answers, too. Of
                processes that gather weights together, none may end alone.
        """
        self.model, self.processor = loaded
        self.generation, self.refuses = generation, refuses
        self.caches = None
        if cache != "dynamic" and generation.num_beams == 1:
            self.caches = StaticCaches(self.model, STEP)
        is_cuda = self.model.device.type == "cuda"
        self.copies = torch.cuda.Stream(self.model.device) if is_cuda else None
        own, config = self.model.generation_config, self.model.config
        ends = own.eos_token_id if own.eos_token_id is not None else config.eos_token_id
        self.end_ids = [ends] if isinstance(ends, int) else list(ends)

    def answer(
        self, prompts: Sequence[Any], number: int = 0, streamer: "Words | None" = None
    ) -> list[Answer]:
        """Answer a batch.

        Args:
            prompts: Of messages; each ends with what is to be answered.
            number: Of the batch's first row: what is drawn depends on it and on the seed, and not
                on the batches before.
            streamer: Takes the words of a single prompt's answer as they come.
        """
        return self.answer_encoded(self.encode(prompts), number, streamer)

    def answer_encoded(
        self, batch, number: int = 0, streamer: "Words | None" = None
    ) -> list[Answer]:
        """:meth:`answer` of a batch of :meth:`encode`."""
        new = self.generate(batch, self.generation, number, streamer)
        texts = self.processor.batch_decode(new, skip_special_tokens=True)
        ended = torch.isin(new, torch.tensor(self.end_ids, device=new.device)).any(-1).tolist()
        return [
            Answer(text.strip(), "stop" if end else "length")
            for text, end in zip(texts, ended, strict=True)
        ]

    def generate(
        self,
        batch,
        generation: Generation,
        number: int = 0,
        streamer: "Words | None" = None,
        **options: Any,
    ) -> torch.Tensor:
        """The new ids of each row, ``[B, R]``; arguments and errors are those of :meth:`answer`,
        and others those of the model's ``generate``. Raises :class:`NonFiniteLogits`."""
        # All of it anew: what the folder says of sampling and lengths is for other uses.
        self.model.generation_config = GenerationConfig(
            **generation.given(),
            eos_token_id=self.end_ids,
            pad_token_id=self.model.config.pad_token_id,
        )
        if generation.do_sample:
            # As torch takes it, whatever the seed.
            torch.manual_seed((generation.seed * 1_000_003 + number) % 2**64)
        rows, length = batch["input_ids"].shape
        try:
            # Not inference_mode: weights that ZeRO-3 gathers in it could not be trained again.
            with torch.no_grad():
                if self.caches is not None:
                    options |= self.caches.generate_kwargs(rows, length + generation.max_new_tokens)
                elif self.refuses:
                    others = options.get("logits_processor", [])
                    options["logits_processor"] = [*others, RequireFinite()]
                if streamer is not None:
                    options["tokens_to" if "custom_generate" in options else "streamer"] = streamer
                ids = self.model.generate(**batch, **options)
        except NonFiniteLogits:
            raise NonFiniteLogits(describe_cause(self.model, batch)) from None
        except torch.OutOfMemoryError as error:
            raise RuntimeError(
                f"the GPU's memory does not suffice for {rows} rows at once: lower "
                f"--batch-size, or --max-new-tokens ({error})"
            ) from None
        return ids[:, length:]

    def encode(self, prompts: Sequence[Any]):
        """As :func:`encode`, on the model's device."""
        return self.place(encode(self.processor, prompts))

    def place(self, batch):
        """A batch of :func:`encode` on the model's device, images in its dtype. In a thread of
        its own: a GPU goes on computing meanwhile. What was placed before must have been answered
        before it is freed."""
        if self.copies is None:
            return batch.to(self.model.device)
        # Of this stream the copies wait for nothing that is computed.
        with torch.cuda.stream(self.copies):
            if (pixels := batch.get("pixel_values")) is not None:
                batch["pixel_values"] = pixels.to(self.model.device, self.model.dtype)
            batch = batch.to(self.model.device)
        self.copies.synchronize()
        return batch


def load_answerer(
    options: ModelOptions, base: ModelSource, generation: Generation, tells: bool = True
) -> Answerer:
    """Load what ``options`` have found."""
    loaded = loading.load_with_processor(base, options.device, options.weights, tells)
    cache = chosen(options.cache, options.device, base, options.weights)
    return Answerer(loaded, generation, cache)


def encode(processor, prompts: Sequence[Any]) -> Any:
    """Model inputs, padded on the left, of messages, or of texts that are to be continued."""
    options = {"return_tensors": "pt", "padding": True, "padding_side": "left"}
    if isinstance(prompts[0], str):
        return processor.tokenizer([*prompts], **options)
    return processor.apply_chat_template(
        [*prompts], add_generation_prompt=True, tokenize=True, return_dict=True, **options
    )


def positions_of(processor, prompts: Sequence[Any]) -> list[int]:
    """Position ids that each prompt takes; opens no image, which takes three."""
    if isinstance(prompts[0], str):
        return [len(ids) for ids in processor.tokenizer([*prompts])["input_ids"]]
    rows = processor.tokenizer.apply_chat_template(
        [*prompts],
        chat_template=processor.chat_template,
        add_generation_prompt=True,
        return_dict=False,
    )
    return [len(ids) for ids in rows]


def answer_parts(
    request: AnswerOptions, base: ModelSource, parts: Iterable[Sequence[Question]], tells: bool = True
) -> Generator[list[Answer], None, None]:
    """Load a model and answer batch after batch. Images of the next ones are read meanwhile, in
    threads, and those of the first ones while the model is loaded; the next batch is copied to the
    GPU while it answers.
    """
    processor, left = load_processor(base), iter(parts)
    number = min(MOST_READERS, max((os.cpu_count() or 1) - 1, 1))
    waiting: deque = deque()
    readers = ThreadPoolExecutor(number)

    def read(some: Iterable[Sequence[Question]]) -> None:
        for part in some:
            batch = readers.submit(encode, processor, [question.prompt for question in part])
            waiting.append(([question.row for question in part], batch))

    try:
        read(islice(left, number + 1))
        answerer = load_answerer(request, base, request.generation, tells)

        def take() -> tuple[list[int], Future] | None:
            """The rows of the next batch, which is being placed."""
            if not waiting:
                return None
            rows, batch = waiting.popleft()
            read(islice(left, 1))
            return rows, readers.submit(lambda: answerer.place(batch.result()))

        following = take()
        while following is not None:
            (rows, batch), following = following, take()
            try:
                answers = answerer.answer_encoded(batch.result(), rows[0])
            except (ValueError, RuntimeError, OSError) as error:
                raise RuntimeError(f"rows {rows}: {error}") from error
            yield answers
    finally:
        readers.shutdown(cancel_futures=True)


def require_room(base: ModelSource, questions: Sequence[Question], new: int) -> None:
    """Raise ``ValueError`` naming the rows that leave no room for an answer of so many tokens; no
    image is opened."""
    processor, limit = load_processor(base), loading.load_model_config(base).seq_length
    found: list[tuple[int, int]] = []
    for some in batches(questions, 64):
        lengths = positions_of(processor, [question.prompt for question in some])
        found += [(length, q.row) for q, length in zip(some, lengths, strict=True)]
    if long := [(length, row) for length, row in found if length + new > limit]:
        length, row = max(long)
        raise ValueError(
            f"{len(long):,} of {len(questions):,} rows leave too little room for {new:,} new "
            f"tokens: line {row} takes {length:,} of the model's {limit:,} positions; lower "
            "--max-new-tokens, or shorten the row"
        )


def batches(questions: Sequence[Question], size: int) -> Iterator[Sequence[Question]]:
    """So many at a time, in order."""
    for start in range(0, len(questions), size):
        yield questions[start : start + size]


def serve() -> None:
    """Answer what comes on standard input, and write each batch's answers as they come."""
    # What libraries print is for people, and not for the process that reads the answers.
    replies, sys.stdout = sys.stdout.buffer, sys.stderr
    request, base, parts = pickle.load(sys.stdin.buffer)
    exit_when_stdin_closes()
    try:
        for answers in answer_parts(request, base, parts, tells=False):
            pickle.dump([*map(tuple, answers)], replies)
            replies.flush()
    except (ValueError, RuntimeError, OSError) as error:
        pickle.dump(str(error), replies)


if __name__ == "__main__":
    serve()
