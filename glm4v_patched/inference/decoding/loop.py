"""A decode loop for ``generate`` that never synchronizes the host with the device between tokens.

    model.generate(
        **inputs, past_key_values=StaticCache(...), custom_generate=decode_without_sync
    )

After every token, transformers' own loop reads from the device whether all sequences have ended.
It prepares the next step only after that, while the device is idle. This loop keeps an "unfinished"
flag for each sequence on the device, copies the flags to the host asynchronously, and reads a copy
up to :data:`MAX_LAG` steps later. So up to :data:`MAX_LAG` steps may run after the last sequence
has ended; their tokens are removed. These extra steps also change the KV cache and torch's random
state, so callers have to reset both afterwards: :class:`.static_cache.StaticCaches` resets the
cache, and :class:`..answer_worker.Answerer` resets the random state.

The tokens equal those of transformers' uncompiled loop bit for bit, because the same logits
processors and stopping criteria run in the same order. The loop supports greedy decoding and
sampling of one answer per sequence.

A logits processor or stopping criterion from outside transformers may count its calls. With one,
the loop reads the flags after every token. Two parts of transformers synchronize by themselves:
``no_repeat_ngram_size`` reads ids on the host, and ``torch.isin`` sorts the end-of-sequence ids if
there are more than about ten.

NaN or infinite logits raise an error. The loop checks only the logits of the first and of the last
token: NaN stays in the KV cache, so NaN at a token between them reaches the last one.
"""

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
)

from ...remote.configuration_chatglm import TESTED_TRANSFORMERS
from ...remote.keywords import CACHE_KEYWORD
from ..nonfinite import NonFiniteLogits, has_finite_logits, require_all_finite

# How many more decode steps the loop may queue before it reads the unfinished flags of a step, by
# device type; 0 for other types. With 1, the host has the time of one step on the device to queue
# the next one. With 2, it has the time of two steps.
MAX_LAG = {"cuda": 2}
NONFINITE = 2  # value of a sequence's unfinished flag (else 0 or 1) if its logits are not finite
# Suffixes name a tensor's dimensions, as in logits_BV: B sequences, V vocabulary entries.


def decode_without_sync(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    token_streamer: Any = None,
    decode_step: Any = None,
    **model_kwargs: Any,
) -> Tensor:
    """Generate tokens, as ``custom_generate`` of ``generate``.

    ``generate`` passes all arguments except the following two, which its caller may add.

    Args:
        token_streamer: Replaces generate's ``streamer``; receives each token up to
            :data:`MAX_LAG` steps late.
        decode_step: Called in place of the model from the second token on, such as a
            :class:`CudaGraphCallable`.

    Returns:
        ``(B, L)`` int64, the ids that ``generate`` returns without ``custom_generate``.

    Raises:
        NonFiniteLogits: The logits of the first or the last token are NaN or infinite.
    """
    assert generation_config.num_beams == 1, "beam search needs transformers' own loop"
    device, (batch_size, prompt_length) = input_ids.device, input_ids.shape
    max_length = generation_config.max_length
    ids = torch.zeros((batch_size, max_length), dtype=torch.long, device=device)
    ids[:, :prompt_length] = input_ids
    processors = LogitsProcessorList(map(_cache_mask, logits_processor))
    # The loop itself stops at the maximum length.
    criteria = [c for c in stopping_criteria if type(c) is not MaxLengthCriteria]
    pad_id = None
    if any(hasattr(criterion, "eos_token_id") for criterion in criteria):
        pad_id = _private_attribute(generation_config, "_pad_token_tensor").to(device)
    # Code from outside transformers may count its calls, so extra steps could change its results.
    is_async = all(map(_is_from_transformers, [*logits_processor, *criteria]))
    unfinished = torch.ones(batch_size, dtype=torch.bool, device=device)
    max_lag = MAX_LAG.get(device.type, 0) if is_async else 0
    tracker = FinishedTracker(unfinished, max_lag, token_streamer)
    if token_streamer is not None:
        token_streamer.put(input_ids.cpu())

    forward: Any = decode_step or model
    inputs = model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **model_kwargs)
    outputs = model(**inputs, return_dict=True)
    model_kwargs[CACHE_KEYWORD] = outputs[CACHE_KEYWORD]
    inputs, length = None, prompt_length
    while True:
        # An fp32 copy, as in transformers' loop. The outputs must not be used after the next step,
        # because a CUDA graph overwrites their memory.
        logits_BV = outputs.logits[:, -1].to(copy=True, dtype=torch.float32, device=device)
        del outputs
        finite_B = None
        if length == prompt_length:
            finite_B = has_finite_logits(logits_BV)
            # A criterion from outside transformers may send the token to a client, so check first.
            if not is_async:
                require_all_finite(finite_B)
        ids_so_far: Any = ids[:, :length]
        scores_BV = processors(ids_so_far, logits_BV)
        tokens_B = _next_tokens(scores_BV, generation_config.do_sample)
        if pad_id is not None:
            tokens_B = torch.where(unfinished, tokens_B, pad_id)
        ids[:, length] = tokens_B
        length += 1
        ids_so_far = ids[:, :length]
        for criterion in criteria:
            is_done = torch.as_tensor(criterion(ids_so_far, None), device=device)
            unfinished.logical_and_(~is_done)
        if criteria or token_streamer is not None or finite_B is not None:
            tracker.add(unfinished, tokens_B, finite_B)
        tracker.read_flags(max_lag)
        if length == max_length or tracker.num_tokens is not None:
            break
        # The prompt's positions and lengths, which _expand_inputs_for_generation has added.
        prompt = model_kwargs["expanded_prompt"]
        # With a static cache, the inputs are updated in place; otherwise the result is False.
        if inputs is None or not model.advance_decode_inputs(
            inputs, tokens_B[:, None], prompt, length - prompt_length
        ):
            inputs = model.prepare_inputs_for_generation(ids_so_far, **model_kwargs)
        outputs = forward(**inputs, return_dict=True)
    tracker.read_flags(max_lag=0)
    require_all_finite(has_finite_logits(logits_BV))
    if token_streamer is not None:
        token_streamer.end()
    end = length if tracker.num_tokens is None else prompt_length + tracker.num_tokens
    return ids[:, :end].contiguous()


def _next_tokens(scores_BV: Tensor, do_sample: bool) -> Tensor:
    if not do_sample:
        return scores_BV.argmax(dim=-1)
    probabilities = torch.nn.functional.softmax(scores_BV, dim=-1)
    # On a GPU, NaN would make multinomial abort the process. The loop raises NonFiniteLogits later.
    probabilities.nan_to_num_(nan=1.0)
    return torch.multinomial(probabilities, num_samples=1).squeeze(1)


def _private_attribute(owner: Any, name: str) -> Any:
    """Return a private attribute of an object of transformers; raise an error if it is missing."""
    if not hasattr(owner, name):
        raise RuntimeError(
            f"transformers {transformers.__version__} has no {name} in {type(owner).__name__}, "
            "which glm4v_patched.inference.decoding.loop needs: install transformers"
            f"{TESTED_TRANSFORMERS}, or use --cache dynamic"
        )
    return getattr(owner, name)


def _is_from_transformers(processor_or_criterion: Any) -> bool:
    return type(processor_or_criterion).__module__.partition(".")[0] == "transformers"


class FinishedTracker:
    """A tracker that copies flags, and tokens for a streamer, to the host asynchronously.

    Args:
        unfinished_B: Unfinished flags; only their device and number are used.
        max_lag: Maximum number of steps whose flags are being copied to the host.
        streamer: Receives the tokens of each step; may be None.

    Attributes:
        num_tokens: Number of steps after which all sequences had finished. None until the host has
            read the flags of that step.
    """

    def __init__(self, unfinished_B: Tensor, max_lag: int, streamer: Any):
        is_cuda = unfinished_B.device.type == "cuda"
        shape = max_lag + 1, len(unfinished_B)
        on_host: dict[str, Any] = {"device": "cpu", "pin_memory": is_cuda}
        self.streamer, self._device = streamer, unfinished_B.device
        self.num_tokens: int | None = None
        # Ring buffers in host memory, with one slot for each step whose flags are not yet read.
        self._unfinished = torch.ones(shape, dtype=torch.uint8, **on_host)
        self._tokens = torch.zeros(shape, dtype=torch.long, **on_host)
        self._copy_done = [torch.cuda.Event() if is_cuda else None for _ in range(max_lag + 1)]
        self._unfinished_numpy = self._unfinished.numpy()  # shares the memory
        self._num_added = self._num_read = 0

    def add(self, unfinished_B: Tensor, tokens_B: Tensor, finite_B: Tensor | None = None) -> None:
        """Queue the copy of a step's flags and tokens to the host.

        Args:
            finite_B: Whether each sequence's logits are finite; None skips this check.
        """
        flags_B = unfinished_B.view(torch.uint8)  # a copy with a dtype conversion would synchronize
        if finite_B is not None:
            flags_B = torch.where(finite_B, flags_B, NONFINITE)
        slot = self._num_added % len(self._copy_done)
        self._unfinished[slot].copy_(flags_B, non_blocking=True)
        if self.streamer is not None:
            self._tokens[slot].copy_(tokens_B, non_blocking=True)
        if (event := self._copy_done[slot]) is not None:
            event.record(torch.cuda.current_stream(self._device))
        self._num_added += 1

    def read_flags(self, max_lag: int) -> None:
        """Wait for the flags of all steps except the last ``max_lag``, and read them."""
        while self.num_tokens is None and self._num_added - self._num_read > max_lag:
            slot = self._num_read % len(self._copy_done)
            if (event := self._copy_done[slot]) is not None:
                event.synchronize()
            self._num_read += 1
            if (self._unfinished_numpy[slot] == NONFINITE).any():
                raise NonFiniteLogits
            if self.streamer is not None:
                self.streamer.put(self._tokens[slot].clone())
            if not self._unfinished_numpy[slot].any():
                self.num_tokens = self._num_read


class _CachedSuppressTokens(LogitsProcessor):
    """A ``SuppressTokensLogitsProcessor`` that computes its mask only once."""

    def __init__(self, processor: SuppressTokensLogitsProcessor):
        self.processor, self.is_suppressed = processor, None

    is_suppressed: Tensor | None

    # Any in place of Tensor, because transformers declares torch.LongTensor and torch.FloatTensor.
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if self.is_suppressed is None:
            self.is_suppressed = self.processor(input_ids, torch.zeros_like(scores[:1])).isinf()
        return scores.masked_fill(self.is_suppressed, -float("inf"))


def _cache_mask(processor: Any) -> Any:
    """Return the processor, or a :class:`_CachedSuppressTokens` in its place."""
    if type(processor) is SuppressTokensLogitsProcessor:
        return _CachedSuppressTokens(processor)
    return processor
