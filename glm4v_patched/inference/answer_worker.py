"""Answer batches of questions with a loaded model.

``python -m glm4v_patched.inference.answer_worker`` is the worker process of :mod:`answer`. It uses
the single GPU that it sees. It reads pickled options and all of its batches from stdin, and writes
the pickled answers to each batch to stdout. It ends when its stdin is closed.
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
    """A streamer that calls ``on_text`` with new text, without white space at the beginning."""

    def __init__(self, tokenizer, on_text: Callable[[str], object]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text, self.has_begun = on_text, False

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        text = text if self.has_begun else text.lstrip()
        self.has_begun = self.has_begun or bool(text)
        self.on_text(text)


class Answerer:
    """A loaded model that answers questions.

    With a static KV cache, :func:`.decoding.loop.decode_without_sync` generates the tokens; on a
    GPU, it replays a CUDA graph in each step. Beam search always uses a dynamic cache.
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
            generation: Options of :meth:`answer`; calls of :meth:`generate` pass their own.
            cache: "static" or "dynamic".
            check_finite: Whether NaN or infinite logits raise an error with a dynamic cache. With a
                static cache, they always do. Use False if processes gather sharded weights,
                because a process that stops with an error would block the others.
        """
        self.model, self.processor = loaded
        self.generation, self.check_finite = generation, check_finite
        self.caches = None
        if cache != "dynamic" and generation.num_beams == 1:
            self.caches = StaticCaches(self.model, CACHE_LENGTH_STEP)
        is_cuda = self.model.device.type == "cuda"
        self.copy_stream = torch.cuda.Stream(self.model.device) if is_cuda else None
        eos = self.model.generation_config.eos_token_id
        if eos is None:
            eos = self.model.config.eos_token_id
        self.eos_token_ids = [eos] if isinstance(eos, int) else list(eos)

    def answer(
        self,
        prompts: Sequence[Any],
        seed_offset: int = 0,
        streamer: "AnswerStreamer | None" = None,
    ) -> list[Answer]:
        """Answer a batch of prompts.

        Args:
            prompts: Lists of messages, or texts to continue.
            seed_offset: A number that differs between batches, such as the first row's number. The
                samples depend on it and on the option ``seed``, but not on earlier batches.
            streamer: Receives tokens as they are generated; only for a single prompt.
        """
        return self.answer_encoded(self.encode(prompts), seed_offset, streamer)

    def answer_encoded(
        self, batch, seed_offset: int = 0, streamer: "AnswerStreamer | None" = None
    ) -> list[Answer]:
        """Answer a batch that :meth:`encode` has made; see :meth:`answer`."""
        new_tokens = self.generate(batch, self.generation, seed_offset, streamer)
        texts = self.processor.batch_decode(new_tokens, skip_special_tokens=True)
        eos_token_ids = torch.tensor(self.eos_token_ids, device=new_tokens.device)
        has_eos = torch.isin(new_tokens, eos_token_ids).any(-1).tolist()
        return [
            Answer(text.strip(), "stop" if is_complete else "length")
            for text, is_complete in zip(texts, has_eos, strict=True)
        ]

    def generate(
        self,
        batch,
        generation: Generation,
        seed_offset: int = 0,
        streamer: "AnswerStreamer | None" = None,
        **generate_kwargs: Any,
    ) -> torch.Tensor:
        """Return the generated tokens of each sequence, ``(B, new_tokens)`` int64.

        Args:
            seed_offset, streamer: See :meth:`answer`.
            generate_kwargs: More arguments of the model's ``generate``.

        Raises:
            NonFiniteLogits: The model computes NaN or infinite logits.
            RuntimeError: The GPU's memory is too small.
        """
        # Replaces the whole config, so that options in the model's folder have no effect.
        self.model.generation_config = GenerationConfig(
            **generation.to_kwargs(),
            eos_token_id=self.eos_token_ids,
            pad_token_id=self.model.config.pad_token_id,
        )
        if generation.do_sample:
            # Thanks to the factor, seed 0 with offset 1 differs from seed 1 with offset 0. The
            # modulo keeps the number in the range that torch accepts.
            torch.manual_seed((generation.seed * 1_000_003 + seed_offset) % 2**64)
        batch_size, length = batch["input_ids"].shape
        try:
            # Not inference_mode: weights that ZeRO-3 gathers in it cannot be trained afterwards.
            with torch.no_grad():
                if self.caches is not None:
                    max_length = length + generation.max_new_tokens
                    generate_kwargs |= self.caches.generate_kwargs(batch_size, max_length)
                elif self.check_finite:
                    logits_processors = generate_kwargs.get("logits_processor", [])
                    generate_kwargs["logits_processor"] = [
                        *logits_processors,
                        RequireFiniteLogits(),
                    ]
                if streamer is not None:
                    has_custom_loop = "custom_generate" in generate_kwargs  # decode_without_sync
                    name = "token_streamer" if has_custom_loop else "streamer"
                    generate_kwargs[name] = streamer
                ids = self.model.generate(**batch, **generate_kwargs)
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
        """Copy a batch to the model's device, and convert its images to the model's dtype.

        This blocks until the copy is complete, so call it in another thread than the one that
        answers. Keep a reference to the returned batch until it has been answered. Otherwise, a
        later copy may overwrite its memory.
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
        verbose: False in a worker, which prints nothing and gets its dtype from the main process.
    """
    dtype = decide_dtype(options, base) if verbose else options.dtype
    loaded = loading.load_with_processor(base, options.device, options.weights, verbose, dtype)
    cache = choose_cache(options.cache, options.device, base, options.weights)
    return Answerer(loaded, generation, cache)


def decide_dtype(options: ModelOptions, base: ModelSource, processes: int = 1) -> str:
    """Return the dtype to compute in. On a CPU, resolve "auto", and print the dtype and the reason.

    Args:
        processes: Number of processes that load the model.
    """
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
    """Return the number of position ids of each prompt.

    An image takes 3 position ids, whatever its size, so no image is opened.
    """
    if isinstance(prompts[0], str):
        return [len(ids) for ids in processor.tokenizer([*prompts])["input_ids"]]
    # The tokenizer, unlike the processor, puts only 3 tokens in place of an image.
    ids_of_prompts = processor.tokenizer.apply_chat_template(
        [*prompts],
        chat_template=processor.chat_template,
        add_generation_prompt=True,
        return_dict=False,
    )
    return [len(ids) for ids in ids_of_prompts]


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
    processor, remaining_batches = load_processor(base), iter(batches)
    num_readers = min(MAX_READERS, max(count_cores() - 1, 1))
    readers = ThreadPoolExecutor(num_readers)
    # Batches whose images are being read: row numbers, and the future of the inputs on the host.
    being_read: deque[tuple[list[int], Future]] = deque()

    def start_reading(next_batches: Iterable[Sequence[Question]]) -> None:
        for questions in next_batches:
            inputs = readers.submit(encode, processor, [question.prompt for question in questions])
            being_read.append(([question.row for question in questions], inputs))

    try:
        start_reading(islice(remaining_batches, num_readers + 1))
        answerer = load_answerer(options, base, options.generation, verbose)

        def start_copying() -> tuple[list[int], Future] | None:
            """Return the next batch's row numbers, and a future of its inputs on the device."""
            if not being_read:
                return None
            rows, inputs = being_read.popleft()
            start_reading(islice(remaining_batches, 1))
            return rows, readers.submit(lambda: answerer.to_device(inputs.result()))

        next_batch = start_copying()
        while next_batch is not None:
            rows, inputs = next_batch
            next_batch = start_copying()
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

    The message names the longest prompt. No image is opened.
    """
    processor, limit = load_processor(base), loading.load_model_config(base).seq_length
    too_long: list[tuple[int, int]] = []  # (number of positions, row number)
    for batch in split_into_batches(questions, 64):
        lengths = count_positions(processor, [question.prompt for question in batch])
        for question, length in zip(batch, lengths, strict=True):
            if length + max_new_tokens > limit:
                too_long.append((length, question.row))
    if too_long:
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
    """Answer the batches on standard input and write each batch's answers to standard output.

    An error is written as its message, in place of a batch's answers.
    """
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
