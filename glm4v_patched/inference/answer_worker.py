"""Answer batches of questions with a loaded model.

``python -m glm4v_patched.inference.answer_worker`` is the worker process of :mod:`answer`. It uses
the single GPU that it sees, reads pickled options and all of its batches from stdin, writes the
pickled answers to each batch to stdout, and ends when its stdin is closed.
"""

import pickle
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, TextStreamer

from ..cpu import count_cores
from ..engine.environment import exit_when_stdin_closes
from ..models import loading
from ..models.base import ModelSource
from ..models.loading import LoadedModel, load_processor
from ..terminal_text import write_line
from .decoding.static_cache import StaticCaches, choose_cache
from .nonfinite import NonFiniteLogits, RequireFiniteLogits, describe_cause
from .questions import AnswerOptions, Generation, ModelOptions, Question

# Lengths of static caches, in tokens, are multiples of this number, so that turns of a conversation
# and batches of different lengths share one cache.
CACHE_LENGTH_STEP = 1024
MAX_READERS = 4
"""Maximum number of threads that read images; Pillow and torch release the GIL meanwhile."""


class Answer(NamedTuple):
    """An answer's text; ``finish_reason`` is "stop", or "length" if max_new_tokens cut it."""

    text: str
    finish_reason: str


class AnswerStreamer(TextStreamer):
    """Calls ``on_text`` with an answer's text as it is generated, without leading white space."""

    def __init__(self, tokenizer, on_text: Callable[[str], object]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text, self.has_begun = on_text, False

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        text = text if self.has_begun else text.lstrip()
        self.has_begun = self.has_begun or bool(text)
        self.on_text(text)


class Answerer:
    """A loaded model that answers questions.

    With a static KV cache, :func:`.decoding.loop.decode_without_sync` decodes, on a GPU as a CUDA
    graph. Beam search always uses a dynamic cache.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        generation: Generation,
        cache: str = "dynamic",
        check_finite: bool = True,
    ):
        """
        Args:
            cache: "static" or "dynamic".
            check_finite: Whether NaN or infinite logits raise an error with a dynamic cache, as
                they always do with a static one. Must be False if processes gather sharded weights:
                a process that stops with an error would block the others.
        """
        self.model, self.processor = loaded
        self.generation, self.check_finite = generation, check_finite
        self.caches = None
        if cache != "dynamic" and generation.num_beams == 1:
            self.caches = StaticCaches(self.model, CACHE_LENGTH_STEP)
        is_cuda = self.model.device.type == "cuda"
        self.copy_stream = torch.cuda.Stream(self.model.device) if is_cuda else None
        own, config = self.model.generation_config, self.model.config
        eos = own.eos_token_id if own.eos_token_id is not None else config.eos_token_id
        self.end_ids = [eos] if isinstance(eos, int) else list(eos)

    def answer(
        self,
        prompts: Sequence[Any],
        first_row: int = 0,
        streamer: "AnswerStreamer | None" = None,
    ) -> list[Answer]:
        """Answer a batch of prompts.

        Args:
            prompts: Lists of messages, or texts to continue.
            first_row: Number of the batch's first row. It and the seed initialize the random
                generator, so sampling does not depend on the batches before.
            streamer: Receives tokens as they are generated; only for a single prompt.
        """
        return self.answer_encoded(self.encode(prompts), first_row, streamer)

    def answer_encoded(
        self, batch, first_row: int = 0, streamer: "AnswerStreamer | None" = None
    ) -> list[Answer]:
        """Answer a batch that :meth:`encode` has made; see :meth:`answer`."""
        new_tokens = self.generate(batch, self.generation, first_row, streamer)
        texts = self.processor.batch_decode(new_tokens, skip_special_tokens=True)
        end_ids = torch.tensor(self.end_ids, device=new_tokens.device)
        has_end = torch.isin(new_tokens, end_ids).any(-1).tolist()
        return [
            Answer(text.strip(), "stop" if is_complete else "length")
            for text, is_complete in zip(texts, has_end, strict=True)
        ]

    def generate(
        self,
        batch,
        generation: Generation,
        first_row: int = 0,
        streamer: "AnswerStreamer | None" = None,
        **options: Any,
    ) -> torch.Tensor:
        """Return the generated tokens of each sequence, ``(B, new_tokens)`` int64.

        Args:
            first_row, streamer: See :meth:`answer`.
            options: More arguments of the model's ``generate``.

        Raises:
            NonFiniteLogits: The model computes NaN or infinite logits.
            RuntimeError: The GPU's memory is too small.
        """
        # Replaces the whole config, so that options in the model's folder have no effect.
        self.model.generation_config = GenerationConfig(
            **generation.to_kwargs(),
            eos_token_id=self.end_ids,
            pad_token_id=self.model.config.pad_token_id,
        )
        if generation.do_sample:
            # The factor separates the rows of different seeds; the modulo keeps torch's range.
            torch.manual_seed((generation.seed * 1_000_003 + first_row) % 2**64)
        batch_size, length = batch["input_ids"].shape
        try:
            # no_grad: weights that ZeRO-3 gathers in inference_mode cannot be trained again.
            with torch.no_grad():
                if self.caches is not None:
                    max_length = length + generation.max_new_tokens
                    options |= self.caches.generate_kwargs(batch_size, max_length)
                elif self.check_finite:
                    processors = options.get("logits_processor", [])
                    options["logits_processor"] = [*processors, RequireFiniteLogits()]
                if streamer is not None:
                    name = "token_streamer" if "custom_generate" in options else "streamer"
                    options[name] = streamer
                ids = self.model.generate(**batch, **options)
        except NonFiniteLogits:
            raise NonFiniteLogits(describe_cause(self.model, batch)) from None
        except torch.OutOfMemoryError as error:
            raise RuntimeError(
                f"out of GPU memory with {batch_size} rows in a batch: lower --batch-size or "
                f"--max-new-tokens ({error})"
            ) from None
        return ids[:, length:]

    def encode(self, prompts: Sequence[Any]):
        """Return :func:`encode`'s model inputs on the model's device."""
        return self.to_device(encode(self.processor, prompts))

    def to_device(self, batch):
        """Copy a batch to the model's device, and images to the model's dtype.

        Waits for the copy, so call this in another thread than the one that answers. Keep the
        returned batch until it has been answered: a later copy may reuse its memory once it is
        freed.
        """
        if self.copy_stream is None:
            return batch.to(self.model.device)
        # A copy in the current stream would wait for the kernels in it.
        with torch.cuda.stream(self.copy_stream):
            if (pixels := batch.get("pixel_values")) is not None:
                batch["pixel_values"] = pixels.to(self.model.device, self.model.dtype)
            batch = batch.to(self.model.device)
        self.copy_stream.synchronize()
        return batch


def load_answerer(
    options: ModelOptions, base: ModelSource, generation: Generation, verbose: bool = True
) -> Answerer:
    """Load a model.

    Args:
        base: The model's files, from ``options.find()``.
    """
    dtype = decide_dtype(options, base) if verbose else options.dtype
    loaded = loading.load_with_processor(base, options.device, options.weights, verbose, dtype)
    cache = choose_cache(options.cache, options.device, base, options.weights)
    return Answerer(loaded, generation, cache)


def decide_dtype(options: ModelOptions, base: ModelSource, processes: int = 1) -> str:
    """Return the dtype to compute in; on a CPU, print it and the reason if it was chosen here."""
    if options.device != "cpu":
        return options.dtype
    dtype, reason = loading.choose_dtype(base, options.dtype, processes)
    if reason:
        write_line(f"computes in {dtype}: {reason} (--dtype)", file=sys.stderr)
    return dtype


def encode(processor, prompts: Sequence[Any]) -> Any:
    """Return model inputs for lists of messages, or for texts to continue, padded on the left."""
    options = {"return_tensors": "pt", "padding": True, "padding_side": "left"}
    if isinstance(prompts[0], str):
        return processor.tokenizer([*prompts], **options)
    return processor.apply_chat_template(
        [*prompts], add_generation_prompt=True, tokenize=True, return_dict=True, **options
    )


def count_positions(processor, prompts: Sequence[Any]) -> list[int]:
    """Return the number of position ids of each prompt, with 3 for each image; opens no image."""
    if isinstance(prompts[0], str):
        return [len(ids) for ids in processor.tokenizer([*prompts])["input_ids"]]
    unexpanded = processor.tokenizer.apply_chat_template(
        [*prompts],
        chat_template=processor.chat_template,
        add_generation_prompt=True,
        return_dict=False,
    )
    return [len(ids) for ids in unexpanded]


def answer_batches(
    options: AnswerOptions,
    base: ModelSource,
    batches: Iterable[Sequence[Question]],
    verbose: bool = True,
) -> Generator[list[Answer], None, None]:
    """Load a model and yield the answers to each batch.

    Threads read the images of the first batches while the model loads. While a batch is answered,
    they read the images of later batches and copy the next batch to the GPU.
    """
    processor, unread = load_processor(base), iter(batches)  # unread: batches not yet submitted
    num_readers = min(MAX_READERS, max(count_cores() - 1, 1))
    being_read: deque = deque()  # row numbers of a batch, and the future of its inputs on the host
    readers = ThreadPoolExecutor(num_readers)

    def start_reading(next_batches: Iterable[Sequence[Question]]) -> None:
        for questions in next_batches:
            inputs = readers.submit(encode, processor, [question.prompt for question in questions])
            being_read.append(([question.row for question in questions], inputs))

    try:
        start_reading(islice(unread, num_readers + 1))
        answerer = load_answerer(options, base, options.generation, verbose)

        def start_copying() -> tuple[list[int], Future] | None:
            """Return the next batch's row numbers, and a future of its inputs on the device."""
            if not being_read:
                return None
            rows, inputs = being_read.popleft()
            start_reading(islice(unread, 1))
            return rows, readers.submit(lambda: answerer.to_device(inputs.result()))

        following = start_copying()
        while following is not None:
            (rows, inputs), following = following, start_copying()
            try:
                answers = answerer.answer_encoded(inputs.result(), rows[0])
            except (ValueError, RuntimeError, OSError) as error:
                raise RuntimeError(f"rows {rows}: {error}") from error
            yield answers
    finally:
        readers.shutdown(cancel_futures=True)


def require_context_length(
    base: ModelSource, questions: Sequence[Question], max_new_tokens: int
) -> None:
    """Raise ``ValueError`` if a prompt and its longest answer exceed the model's context length.

    The message names the longest prompt. Opens no image.
    """
    processor, limit = load_processor(base), loading.load_model_config(base).seq_length
    lengths: list[tuple[int, int]] = []
    for batch in split_into_batches(questions, 64):
        positions = count_positions(processor, [question.prompt for question in batch])
        lengths += [(length, q.row) for q, length in zip(batch, positions, strict=True)]
    if too_long := [(length, row) for length, row in lengths if length + max_new_tokens > limit]:
        length, row = max(too_long)
        raise ValueError(
            f"{len(too_long):,} of {len(questions):,} rows are too long for {max_new_tokens:,} new "
            f"tokens: line {row} takes {length:,} of the model's {limit:,} positions; lower "
            "--max-new-tokens, or shorten the row"
        )


def split_into_batches(questions: Sequence[Question], size: int) -> Iterator[Sequence[Question]]:
    """Yield slices of ``size`` questions, in order; the last may be shorter."""
    for start in range(0, len(questions), size):
        yield questions[start : start + size]


def run_worker() -> None:
    """Answer the batches on standard input and write each batch's answers to standard output."""
    # sys.stdout is the pipe to the parent process; send what libraries print to stderr instead.
    replies, sys.stdout = sys.stdout.buffer, sys.stderr
    options, base, batches = pickle.load(sys.stdin.buffer)
    exit_when_stdin_closes()
    try:
        for answers in answer_batches(options, base, batches, verbose=False):
            pickle.dump([*map(tuple, answers)], replies)
            replies.flush()
    except (ValueError, RuntimeError, OSError) as error:
        pickle.dump(str(error), replies)


if __name__ == "__main__":
    run_worker()
