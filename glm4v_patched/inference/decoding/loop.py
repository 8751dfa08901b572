"""A loop for ``generate`` in which nothing waits for the device between two tokens.

    model.generate(**inputs, past_key_values=StaticCache(...), custom_generate=decode_without_sync)

After every token transformers' own loop asks the device whether all rows have ended, and makes the
next step's inputs only then, while the device has nothing to do. Here the answer is copied to the
host behind the steps that are queued already, and looked at when it has come. What was drawn beyond
the end is cut off the ids; the cache and torch's random numbers have to be made anew after it, as
:class:`static_cache.StaticCaches` and :class:`..answer_worker.Answerer` do. Tokens are those of
transformers' loop without compilation, bit for bit: its logits processors and stopping criteria
run, in its order.

Only what these two ask for is done: one answer a row, drawn or greedy. Processors and criteria that
are not transformers' own may count how often they are called: with these, the device is asked after
every token. Two of transformers' own wait by themselves: ``no_repeat_ngram_size`` reads ids on the
host, and ``torch.isin`` sorts ids that end a row if there are more than about ten.

Logits that are NaN or infinite are no answer. Those of the prompt are reported with the first
token, and those of the last token are looked at when all rows have ended: NaN stays in a cache.
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
from ..nonfinite import NonFiniteLogits, finite_rows, require_finite

# Tokens that may have been queued before what the device says of one must have come: so many steps
# are computed in vain after the end. With one, the host has a step's time to queue the next.
LATE = {"cuda": 2}  # by kind of device; 0 for others
NONFINITE = 2  # in a report, in place of whether a row is unfinished


def decode_without_sync(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    tokens_to: Any = None,
    step: Any = None,
    **model_kwargs: Any,
) -> Tensor:
    """Draw tokens: for ``generate(custom_generate=decode_without_sync)``, which gives the first ones.

    Args:
        tokens_to: A streamer, in the place of generate's ``streamer``. It is given each token up to
            :data:`LATE` tokens later.
        step: Called in the place of the model from the second token on
            (:class:`CudaGraphCallable`).

    Returns:
        The ids that ``generate`` returns without ``custom_generate``, ``(B, L)``.

    Raises:
        NonFiniteLogits: The logits after the prompt or the last ones are NaN or infinite.
    """
    assert generation_config.num_beams == 1, "beams are for transformers' own loop"
    device, (rows, given) = input_ids.device, input_ids.shape
    most = generation_config.max_length
    ids = torch.zeros((rows, most), dtype=torch.long, device=device)
    ids[:, :given] = input_ids
    processors = LogitsProcessorList(map(_faster, logits_processor))
    criteria = [each for each in stopping_criteria if type(each) is not MaxLengthCriteria]
    pad = None
    if any(hasattr(each, "eos_token_id") for each in criteria):
        pad = _private(generation_config, "_pad_token_tensor").to(device)
    is_known = all(map(_is_of_transformers, [*logits_processor, *criteria]))
    unfinished = torch.ones(rows, dtype=torch.bool, device=device)
    reports = Reports(unfinished, LATE.get(device.type, 0) if is_known else 0, tokens_to)
    if tokens_to is not None:
        tokens_to.put(input_ids.cpu())

    forward: Any = step or model
    inputs = model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **model_kwargs)
    outputs = model(**inputs, return_dict=True)
    model_kwargs[CACHE_KEYWORD] = outputs[CACHE_KEYWORD]
    inputs, length = None, given
    while True:
        # A copy in fp32, as transformers makes it. The outputs must be gone before the next step,
        # for a CUDA graph writes into their memory again.
        logits_BV = outputs.logits[:, -1].to(copy=True, dtype=torch.float32, device=device)
        del outputs
        finite_B = None
        if length == given:
            finite_B = finite_rows(logits_BV)
            if not is_known:  # these wait anyway, and may hand on the token
                require_finite(finite_B)
        sofar: Any = ids[:, :length]
        scores_BV = processors(sofar, logits_BV)
        tokens_B = _tokens_of(scores_BV, generation_config.do_sample)
        if pad is not None:
            tokens_B = torch.where(unfinished, tokens_B, pad)
        ids[:, length] = tokens_B
        length += 1
        sofar = ids[:, :length]
        for criterion in criteria:
            done = torch.as_tensor(criterion(sofar, None), device=device)
            unfinished.logical_and_(~done)
        if criteria or tokens_to is not None or finite_B is not None:
            reports.add(unfinished, tokens_B, finite_B)
        if length == most or reports.look():
            break
        prompt = model_kwargs["expanded_prompt"]
        if inputs is None or not model.advance_decode_inputs(
            inputs, tokens_B[:, None], prompt, length - given
        ):
            inputs = model.prepare_inputs_for_generation(sofar, **model_kwargs)
        outputs = forward(**inputs, return_dict=True)
    reports.look(late=0)
    require_finite(finite_rows(logits_BV))
    if tokens_to is not None:
        tokens_to.end()
    return ids[:, : length if reports.end is None else given + reports.end].contiguous()


def _tokens_of(scores_BV: Tensor, do_sample: bool) -> Tensor:
    if not do_sample:
        return scores_BV.argmax(dim=-1)
    probabilities = torch.nn.functional.softmax(scores_BV, dim=-1)
    # Of NaN, which is reported otherwise, multinomial would end the process on a GPU.
    probabilities.nan_to_num_(nan=1.0)
    return torch.multinomial(probabilities, num_samples=1).squeeze(1)


def _private(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        raise RuntimeError(
            f"transformers {transformers.__version__} has no {name} in {type(owner).__name__}, "
            "which glm4v_patched.inference.decoding.loop needs: install transformers"
            f"{TESTED_TRANSFORMERS}, or take --cache dynamic"
        )
    return getattr(owner, name)


def _is_of_transformers(processor_or_criterion: Any) -> bool:
    return type(processor_or_criterion).__module__.partition(".")[0] == "transformers"


class Reports:
    """What the device says of every drawn token, copied to the host while it goes on.

    Attributes:
        late: Tokens of which it need not have come yet.
        end: Tokens up to the one at which all rows had ended, once that is known.
    """

    def __init__(self, unfinished_B: Tensor, late: int, streamer: Any):
        is_cuda = unfinished_B.device.type == "cuda"
        shape = late + 1, len(unfinished_B)
        on_host: dict[str, Any] = {"device": "cpu", "pin_memory": is_cuda}
        self.late, self.streamer, self._device = late, streamer, unfinished_B.device
        self.end: int | None = None
        self._unfinished = torch.ones(shape, dtype=torch.uint8, **on_host)
        self._tokens = torch.zeros(shape, dtype=torch.long, **on_host)
        self._copied = [torch.cuda.Event() if is_cuda else None for _ in range(late + 1)]
        self._on_host = self._unfinished.numpy()
        self._added = self._seen = 0

    def add(self, unfinished_B: Tensor, tokens_B: Tensor, finite_B: Tensor | None = None) -> None:
        """``finite_B``: Whether the logits of each row are, if that is to be reported."""
        report_B = unfinished_B.view(torch.uint8)  # of another type, the copy would wait
        if finite_B is not None:
            report_B = torch.where(finite_B, report_B, NONFINITE)
        slot = self._added % len(self._copied)
        self._unfinished[slot].copy_(report_B, non_blocking=True)
        if self.streamer is not None:
            self._tokens[slot].copy_(tokens_B, non_blocking=True)
        if (copied := self._copied[slot]) is not None:
            copied.record(torch.cuda.current_stream(self._device))
        self._added += 1

    def look(self, late: int | None = None) -> bool:
        """Whether all rows are known to have ended. Waits for all but the last ``late`` tokens."""
        late = self.late if late is None else late
        while self.end is None and self._added - self._seen > late:
            slot = self._seen % len(self._copied)
            if (copied := self._copied[slot]) is not None:
                copied.synchronize()
            self._seen += 1
            if (self._on_host[slot] == NONFINITE).any():
                raise NonFiniteLogits
            if self.streamer is not None:
                self.streamer.put(self._tokens[slot].clone())
            if not self._on_host[slot].any():
                self.end = self._seen
        return self.end is not None


class _Suppressed(LogitsProcessor):
    """Looks for its ids among all once, instead of in every step."""

    def __init__(self, processor: SuppressTokensLogitsProcessor):
        self.processor, self.is_suppressed = processor, None

    is_suppressed: Tensor | None

    def __call__(self, input_ids: Any, scores: Any) -> Any:  # typed as of the CPU
        if self.is_suppressed is None:
            self.is_suppressed = self.processor(input_ids, torch.zeros_like(scores[:1])).isinf()
        return scores.masked_fill(self.is_suppressed, -float("inf"))


def _faster(processor: Any) -> Any:
    if type(processor) is SuppressTokensLogitsProcessor:
        return _Suppressed(processor)
    return processor
