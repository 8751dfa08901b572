"""A loop for ``generate`` in which nothing waits for the device between two tokens.

    model.generate(**inputs, custom_generate=draw_ahead)

After every token transformers' own loop asks the device whether all rows have ended, and makes the
next step's inputs only then, while the device has nothing to do. Here the answer is copied to the
host behind the steps that are queued already, and looked at when it has come. What was drawn beyond
the end is cut off: from the ids, the cache, and torch's random numbers. Tokens are those of
transformers' loop, bit for bit: its logits processors and stopping criteria run, in its order, and
a step is its compiled call.

What cannot be done in this way is refused. Processors and criteria that are not transformers' own
may count how often they are called: with these, and wherever a step cannot be undone, the device is
asked after every token. Two of transformers' own wait by themselves: ``no_repeat_ngram_size`` reads
ids on the host, and ``torch.isin`` sorts ids that end a row if there are more than about ten.
"""

import inspect
import os
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    PrefixConstrainedLogitsProcessor,
    StaticCache,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
)
from transformers.generation import GenerateDecoderOnlyOutput

from ...remote.cached_rows import remember_drawn
from ...remote.configuration_chatglm import TESTED_TRANSFORMERS
from ...remote.keywords import CACHE, named_cache
from ...remote.sharding import must_run_on_every_process

# Tokens that may have been queued before what the device says of one must have come: so many steps
# are computed in vain after the end. With one, the host has a step's time to queue the next.
LATE = {"cuda": 2}  # by kind of device; 0 for others

MODES = ("greedy_search", "sample")
NOT_RETURNED = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
# Arguments of generate that do not reach a custom_generate (in every tested transformers).
NOT_HANDED_ON = ("streamer", "assistant_model", "synced_gpus")


def draw_ahead(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    tokens_to: Any = None,
    step: Any = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Draw tokens: for ``generate(custom_generate=draw_ahead)``, which gives the first ones.

    Args:
        tokens_to: A streamer, in the place of generate's ``streamer``. It is given each token up to
            :data:`LATE` tokens later.
        step: Called in the place of the model from the second token on
            (:class:`recorded_calls.RecordedCalls`); it is not compiled then.

    Returns:
        What ``generate`` returns without ``custom_generate``.

    Raises:
        ValueError: for what only transformers' own loop does: beams, assistants, scores and other
            outputs by step, embeddings in the place of ids, no cache, several processes that share
            weights.
    """
    faults = list(_faults(model, stopping_criteria, generation_config, model_kwargs))
    if faults:
        raise ValueError(
            f"draw_ahead was given {'; '.join(faults)}: leave out custom_generate, and "
            "transformers' own loop takes it"
        )
    drawing = _Drawing(
        model, input_ids, logits_processor, stopping_criteria, generation_config, tokens_to,
        step, model_kwargs,
    )  # fmt: skip
    if tokens_to is not None:
        tokens_to.put(input_ids.cpu())
    drawing.read_prompt()
    while not drawing.draw():
        drawing.step()
    drawing.cut()
    if tokens_to is not None:
        tokens_to.end()
    if not generation_config.return_dict_in_generate:
        return drawing.ids
    return GenerateDecoderOnlyOutput(
        sequences=drawing.ids,  # type: ignore[arg-type]  # typed as of the CPU
        **named_cache(drawing.cache),
    )


def _faults(model, criteria, config, model_kwargs: dict) -> Iterator[str]:
    """What this loop does not do, or cannot do with this model."""
    if not hasattr(model, "advance_drawn_inputs"):
        yield (
            f"a {type(model).__name__} without advance_drawn_inputs, which glm-4v models have as "
            "this version of glm4v-patched saves them"
        )
        return
    for name in _not_handed_on():
        yield "a streamer (give it as tokens_to)" if name == "streamer" else name
    mode = config.get_generation_mode().value
    if mode not in MODES:
        yield f"num_beams={config.num_beams} and options that make this {mode}"
    asked = [name for name in NOT_RETURNED if getattr(config, name)]
    if config.return_dict_in_generate and asked:
        yield ", ".join(asked)
    if config.prefill_chunk_size is not None:
        yield f"prefill_chunk_size={config.prefill_chunk_size}"
    if not config.use_cache:
        yield "use_cache=False"
    if model_kwargs.get("grown_prompt") is None:
        yield "inputs_embeds"
    if not any(type(each) is MaxLengthCriteria for each in criteria):
        yield "stopping criteria without a MaxLengthCriteria, which says how large the ids may grow"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        processes = torch.distributed.get_world_size()
        if processes > 1 and must_run_on_every_process(model):
            yield f"weights that are spread over {processes} processes, which step together"


def _not_handed_on() -> list[str]:
    """Arguments of the calling ``generate`` that would otherwise be dropped in silence."""
    generate = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not generate:
        frame = frame.f_back
    given = {} if frame is None else frame.f_locals
    return [name for name in NOT_HANDED_ON if given.get(name)]


def _private(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        raise RuntimeError(
            f"transformers {transformers.__version__} has no {name} in {type(owner).__name__}, "
            "which glm4v_patched.inference.decoding.loop needs: install transformers"
            f"{TESTED_TRANSFORMERS}, or leave out custom_generate"
        )
    return getattr(owner, name)


class _Drawing:
    """One call of :func:`draw_ahead`.

    Attributes:
        ids: ``(B, most)``, of which the first ``length`` columns are drawn or given; in the end
            these alone.
    """

    def __init__(
        self, model, input_ids, processors, criteria, config, streamer, step, model_kwargs
    ):
        self.recorded = step
        self.model, self.config, self.model_kwargs = model, config, model_kwargs
        self.prompt, self.input_ids = model_kwargs["grown_prompt"], input_ids
        self.cache: Any = None
        self.inputs: dict[str, Any] = {}
        self.device = input_ids.device
        self.length, self.drawn = input_ids.shape[1], 0
        limits = [each.max_length for each in criteria if type(each) is MaxLengthCriteria]
        self.most = max(self.length + 1, min(limits))
        rows = len(input_ids)
        self.ids = torch.zeros((rows, self.most), dtype=torch.long, device=self.device)
        self.ids[:, : self.length] = input_ids

        self.processors = LogitsProcessorList(map(_faster, processors))
        self.criteria = [each for each in criteria if type(each) is not MaxLengthCriteria]
        self.is_known = all(map(_is_known, [*processors, *self.criteria]))
        self.pad = None
        if any(hasattr(each, "eos_token_id") for each in self.criteria):
            self.pad = _private(config, "_pad_token_tensor").to(self.device)
        self.unfinished = torch.ones(rows, dtype=torch.bool, device=self.device)
        self.streamer = streamer

    def read_prompt(self) -> None:
        """The first step; transformers does not compile it, either."""
        model, given = self.model, self.model_kwargs
        self.forward: Any = self.recorded or model.__call__
        compiles = _private(model, "_valid_auto_compile_criteria")
        if self.recorded is None and compiles(given, self.config):
            os.environ["TOKENIZERS_PARALLELISM"] = "0"  # as transformers does: inductor forks
            self.forward = model.get_compiled_call(self.config.compile_config)
        inputs = model.prepare_inputs_for_generation(
            self.input_ids, is_first_iteration=True, **given
        )
        outputs = model(**inputs, return_dict=True)
        self.cache = given[CACHE] = getattr(outputs, CACHE)
        self._keep(outputs)
        late = LATE.get(self.device.type, 0) if self.is_known and _can_undo(self.cache) else 0
        self.reports = Reports(self.unfinished, late, self.streamer)
        self.random_states: deque[Tensor] = deque(maxlen=late + 1)

    def step(self) -> None:
        outputs = self.forward(**self.inputs, return_dict=True)
        self._keep(outputs)

    def _keep(self, outputs: Any) -> None:
        # A copy in fp32, as transformers makes it. The outputs must be gone before the next step,
        # for a CUDA graph writes into their memory again.
        last = outputs.logits[:, -1]
        self.logits_BV = last.to(copy=True, dtype=torch.float32, device=self.device)

    def draw(self) -> bool:
        """A token of each row; whether it is the last one. If not, the next inputs are ready."""
        ids: Any = self._ids_so_far()
        scores_BV = self.processors(ids, self.logits_BV)
        if self.config.do_sample:
            probabilities = torch.nn.functional.softmax(scores_BV, dim=-1)
            tokens_B = torch.multinomial(probabilities, num_samples=1).squeeze(1)
        else:
            tokens_B = scores_BV.argmax(dim=-1)
        if self.pad is not None:
            tokens_B = torch.where(self.unfinished, tokens_B, self.pad)
        self.ids[:, self.length] = tokens_B
        self.length += 1
        self.drawn += 1
        self._watch(tokens_B)
        if self.length == self.most or self.reports.look():
            return True
        try:
            self._advance(tokens_B[:, None])
        except ValueError:  # no room, or no position, which does not matter to rows that have ended
            if self.reports.look(late=0):
                return True
            raise
        return False

    def _watch(self, tokens_B: Tensor) -> None:
        for criterion in self.criteria:
            done = torch.as_tensor(criterion(self._ids_so_far(), None), device=self.device)
            self.unfinished.logical_and_(~done)
        if self.criteria or self.streamer is not None:
            self.reports.add(self.unfinished, tokens_B)
        if self.config.do_sample and self.reports.late:
            self.random_states.append(_random_state(self.device))

    def _ids_so_far(self) -> Tensor:
        ids = self.ids[:, : self.length]
        return ids if self.is_known else ids.contiguous()

    def _advance(self, new_ids_B1: Tensor) -> None:
        model, prompt = self.model, self.prompt
        if self.inputs and model.advance_drawn_inputs(self.inputs, new_ids_B1, prompt, self.drawn):
            return
        ids = self.ids[:, : self.length]
        if (new := prompt.num_new(ids, self.cache)) != 1:
            raise RuntimeError(
                f"the cache does not hold the rows that were given: {new} drawn ids are new to "
                "it, expected 1 (adapters that put virtual tokens before the rows, as prompt "
                "tuning does, are one reason); leave out custom_generate"
            )
        self.inputs = model.prepare_inputs_for_generation(ids, **self.model_kwargs)

    def cut(self) -> None:
        """Forget what was drawn after all rows had ended."""
        self.reports.look(late=0)
        end = self.drawn if self.reports.end is None else self.reports.end
        extra = self.drawn - end
        self.ids = self.ids[:, : self.length - extra].contiguous()
        if not extra:
            return
        if self.random_states:
            _set_random_state(self.device, self.random_states[-1 - extra])
        kept = self.prompt.length + end - 1  # the last token is in no cache
        _uncache(self.cache, kept, extra)
        remember_drawn(self.cache, kept)


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
        self._unfinished = torch.ones(shape, dtype=torch.bool, **on_host)
        self._tokens = torch.zeros(shape, dtype=torch.long, **on_host)
        self._copied = [torch.cuda.Event() if is_cuda else None for _ in range(late + 1)]
        self._on_host = self._unfinished.numpy()
        self._added = self._seen = 0

    def add(self, unfinished_B: Tensor, tokens_B: Tensor) -> None:
        slot = self._added % len(self._copied)
        self._unfinished[slot].copy_(unfinished_B, non_blocking=True)
        if self.streamer is not None:
            self._tokens[slot].copy_(tokens_B, non_blocking=True)
        if (copied := self._copied[slot]) is not None:
            copied.record(torch.cuda.current_stream(self._device))
        self._added += 1

    def look(self, late: int | None = None) -> bool:
        """Whether all rows are known to have ended. Waits for all but the last ``late`` tokens."""
        late = self.late if late is None else late
        while self.end is None and self._seen < self._added:
            slot = self._seen % len(self._copied)
            is_due = self._added - self._seen > late
            if not self._has_come(slot, is_due):
                break
            self._seen += 1
            if self.streamer is not None:
                self.streamer.put(self._tokens[slot].clone())
            if not self._on_host[slot].any():
                self.end = self._seen
        return self.end is not None

    def _has_come(self, slot: int, is_due: bool) -> bool:
        copied = self._copied[slot]
        if copied is None:
            return is_due
        if is_due:
            copied.synchronize()
        return is_due or copied.query()


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


def _is_known(processor_or_criterion: Any) -> bool:
    """Whether it is transformers' own, and calls nobody else's function."""
    kind = type(processor_or_criterion)
    is_own = kind.__module__.partition(".")[0] == "transformers"
    return is_own and kind is not PrefixConstrainedLogitsProcessor


def _can_undo(cache: Any) -> bool:
    return type(cache) in (DynamicCache, StaticCache) and not cache.offloading


def _uncache(cache: Any, kept: int, extra: int) -> None:
    """Make a cache what it was with ``kept`` positions, before ``extra`` more."""
    if type(cache) is DynamicCache:
        cache.crop(-extra)
    else:
        for layer in cache.layers:
            if not layer.is_initialized:
                continue
            for part in (layer.keys, layer.values):
                part[:, :, kept : kept + extra].zero_()
            # transformers 4.57 has no counter: it counts keys that are not zero.
            if (counter := getattr(layer, "cumulative_length", None)) is not None:
                counter.sub_(extra)
    if (holds := int(cache.get_seq_length())) != kept:
        raise RuntimeError(
            f"a {type(cache).__name__} of transformers {transformers.__version__} holds {holds} "
            f"positions after its last {extra} were taken out, instead of {kept}: install "
            f"transformers{TESTED_TRANSFORMERS}, or leave out custom_generate"
        )


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
