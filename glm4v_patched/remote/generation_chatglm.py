"""The model's side of transformers' ``generate``.

In an unexpanded prompt an image has three ids, which the model expands to all tokens of the image.
``generate`` counts the tokens before this expansion, but the cache counts expanded tokens. So this
module expands the prompt before the prefill, the pass that adds the prompt to the cache. Decode
steps need no device sync, because their inputs depend only on the :class:`ExpandedPrompt` and the
number of generated tokens.
"""

from copy import copy
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, SuppressTokensLogitsProcessor
from transformers.cache_utils import Cache

from .cache_metadata import (
    ExpandedPrompt,
    cached_length,
    check_cache_capacity,
    find_metadata,
    is_static,
    record_decode_step,
    static_capacity,
)
from .configuration_chatglm import ChatGLMConfig, refuse_nonfinite_generation, warn_unsaved
from .image_checks import InputBatch, check_position
from .image_layout import ExpandedBatch, expand_image_placeholders
from .keywords import (
    CACHE_KEYWORD,
    NEEDS_CACHE_POSITION,
    OTHER_CACHE_KEYWORD,
    SLICES_INPUTS_EMBEDS,
    cache_kwarg,
    check_overridden_methods,
    drop_generate_kwargs,
    overrides_generation,
    raise_with_versions,
    resolve_cache,
)
from .masks import decode_mask
from .sharding import has_process_group

# On devices where generate compiles decode steps, the capacity of a static cache is rounded up to a
# multiple of this number, because each capacity needs its own compilation.
STATIC_CACHE_MULTIPLE = 64
DEVICES_WITHOUT_COMPILATION = ("cpu",)  # where generate does not compile by default

# A name's suffix lists the tensor's dimensions: new_ids_BQ is (B, Q).
# Shapes: B sequences, L length of input_ids, R expanded length, Q new tokens, K keys of the cache.


def keep_known_options(generation_config: GenerationConfig) -> GenerationConfig:
    """Return a copy for saving, with only the options that transformers defines; log the others."""
    known = copy(generation_config)
    unknown = sorted(generation_config.to_dict().keys() - vars(GenerationConfig()))
    warn_unsaved(unknown, "generation_config.json")
    for name in unknown:
        delattr(known, name)
    return known


class ChatGLMGenerationMixin(GenerationMixin):
    """Mixin that adds generation to a model whose decoder is its ``transformer``.

    The name ends in "GenerationMixin", for which transformers searches the names of base classes.
    """

    config: ChatGLMConfig
    transformer: Any
    device: torch.device
    dtype: torch.dtype

    def load_custom_generate(
        self, pretrained_model_name_or_path=None, trust_remote_code=None, **kwargs
    ):
        """Load a ``custom_generate`` as transformers does, but only with ``trust_remote_code``."""
        source = pretrained_model_name_or_path
        if not trust_remote_code:  # transformers 4.57 would run the code without asking
            raise OSError(  # from_pretrained catches an OSError and continues without the code
                f"custom_generate of {source} is code: pass trust_remote_code=True to run it"
            )
        return super().load_custom_generate(source, trust_remote_code=True, **kwargs)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        images: Tensor | None = None,
        prompt_length: int | None = None,
        expanded_prompt: ExpandedPrompt | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> dict:
        """Prepare the inputs of ``forward`` for the tokens that are not in the cache yet.

        For a prefill, this method expands image placeholders and slices off the cached part. If
        the cache already contains ``expanded_prompt``, it prepares a decode step, without a device
        sync. With a static cache, all decode steps have the same shapes.

        Args:
            prompt_length: Number of columns of ``input_ids`` that are (unexpanded) prompt.
            expanded_prompt: From :meth:`_expand_inputs_for_generation`.
            cache: The name of ``past_key_values`` since transformers 5.24.
        """
        check_overridden_methods()
        cache = resolve_cache(past_key_values, cache)
        forwarded = drop_generate_kwargs(kwargs)
        if expanded_prompt is not None:
            expanded_prompt.num_prepare_calls += 1
            if (
                expanded_prompt.num_prepare_calls > 1
                and cache is None
                and forwarded.get("use_cache")
            ):
                raise_with_versions(
                    f"generate passed no cache after {expanded_prompt.num_generated(input_ids)} "
                    "generated tokens although use_cache=True, so every token would recompute the "
                    "whole sequence: pass use_cache=False if that is intended, or the cache as "
                    f"{CACHE_KEYWORD}"
                )
            is_repeated = expanded_prompt.is_repeated(input_ids, cache)
            if has_process_group() and expanded_prompt.num_prepare_calls > 1:
                # Under synced_gpus, generate calls forward until the answers of all processes are
                # complete. A process that has finished passes its last token, which may have no
                # position id, and after that the same ids again.
                if cache is None:
                    input_ids = input_ids[:, : self._num_columns_with_positions(expanded_prompt)]
                    if attention_mask is not None:
                        attention_mask = attention_mask[:, : input_ids.shape[1]]
                elif is_repeated:
                    return forwarded | self._idle_inputs(input_ids)
            num_uncached = expanded_prompt.num_uncached(input_ids, cache)
            if num_uncached and cache is not None:
                inputs = self._decode_inputs(expanded_prompt, input_ids, cache, num_uncached)
                return forwarded | inputs
        batch = InputBatch(input_ids, attention_mask, position_ids)
        if inputs_embeds is not None:
            if (
                has_process_group()
                and not SLICES_INPUTS_EMBEDS
                and (num_generated := input_ids.shape[1] - (prompt_length or 0))
                and cached_length(cache) >= inputs_embeds.shape[1] + num_generated
            ):
                return forwarded | self._idle_inputs(input_ids)
            images_by_name = {"pixel_values": pixel_values, "images": images}
            is_first = kwargs.get("is_first_iteration")  # passed by some releases only
            inputs = self._inputs_from_embeds(batch, inputs_embeds, images_by_name, cache, is_first)
        else:
            images = self.transformer._stack_images(pixel_values, images)
            inputs = self._inputs_from_ids(batch, images, cache, prompt_length, expanded_prompt)
        return cache_kwarg(cache) | inputs | forwarded

    def _inputs_from_embeds(
        self, batch: InputBatch, inputs_embeds, images_by_name: dict, cache, is_first
    ) -> dict[str, Any]:
        """Return the inputs of a prefill over embeddings, or of a pass over the last new id."""
        past_length = cached_length(cache)
        inputs = {"attention_mask": batch.attention_mask}
        num_new = 1
        # Until the first token is generated, input_ids is empty or has the ids that the caller
        # passed beside the embeddings. In both cases the embeddings are the input.
        if is_first or past_length == 0 or batch.input_ids.shape[1] == 0:
            # The caller's inputs_embeds includes the cached part; some releases cut it off.
            num_new = inputs_embeds.shape[1] - (0 if SLICES_INPUTS_EMBEDS else past_length)
            if num_new < 1:
                raise ValueError(
                    f"inputs_embeds has {inputs_embeds.shape[1]} columns but the cache holds "
                    f"{past_length} already: give generate the embeddings of the whole sequences"
                )
            inputs |= images_by_name | {"inputs_embeds": inputs_embeds[:, -num_new:]}
        else:
            inputs["input_ids"] = batch.input_ids[:, -num_new:]
        # Unlike this model, generate counts one position id for each image token. If the cache's
        # metadata gives the right next position, leave position_ids out: forward computes them.
        if batch.position_ids is not None and find_metadata(cache, past_length) is None:
            inputs["position_ids"] = batch.position_ids[:, -num_new:]
        return inputs

    def _inputs_from_ids(
        self, batch: InputBatch, images, cache, prompt_length, expanded_prompt
    ) -> dict[str, Any]:
        """Return the inputs of a prefill: the expanded ids after the cache, and their images."""
        past_length = cached_length(cache)
        if expanded_prompt is not None and expanded_prompt.input_ids is batch.input_ids:
            expanded = expanded_prompt.batch
        else:
            if expanded_prompt is not None:
                batch = batch._replace(position_ids=expanded_prompt.position_ids)
            expanded = self._expand_batch(batch, images, past_length, prompt_length)
        length = expanded.input_ids.shape[1]
        # peft's virtual tokens have cache entries but no ids, so past_length may exceed length.
        first = min(past_length, length - 1)
        inputs = {
            "input_ids": expanded.input_ids[:, first:],
            "position_ids": expanded.position_ids[:, first:],
            "attention_mask": expanded.attention_mask,
            "pixel_values": _uncached_images(
                images, expanded, past_length, self.config.boi_token_id
            ),
        }
        if prompt_length is not None:
            num_generated = batch.input_ids.shape[1] - prompt_length
            # The number of uncached prompt tokens, which is 0 in a decode step.
            inputs["prompt_length"] = length - num_generated - past_length
        return inputs

    def _expand_batch(
        self, batch: InputBatch, images: Tensor | None, past_length: int, prompt_length: int | None
    ) -> ExpandedBatch:
        """Expand sequences whose first ``past_length`` expanded tokens are cached."""
        if batch.attention_mask is None:
            # transformers 5 drops a mask of ones. Here, position ids without a mask would mean
            # packed sequences.
            batch = batch._replace(attention_mask=torch.ones_like(batch.input_ids))
        position_ids = _extend_position_ids(batch.position_ids, batch.input_ids.shape[1])
        batch = batch._replace(position_ids=position_ids, num_cached_tokens=past_length)
        num_images = 0 if images is None else len(images)
        prompt_format = self.transformer.prompt_format
        return expand_image_placeholders(batch, prompt_format, num_images, prompt_length)

    def _decode_inputs(
        self, prompt: ExpandedPrompt, input_ids: Tensor, cache: Cache, num_uncached: int
    ) -> dict[str, Any]:
        """Return the inputs of a decode step over the last ``num_uncached`` generated tokens."""
        num_generated = prompt.num_generated(input_ids)
        length = self._checked_length(prompt, cache, num_generated)
        past_length = length - num_uncached
        # A slice has the strides of input_ids, whose change in each step would cause recompilation.
        new_ids_BQ = input_ids[:, -num_uncached:].clone(memory_format=torch.contiguous_format)
        num_positions = num_generated
        if has_process_group():  # only the last token of a finished process may have no position id
            max_columns = self._num_columns_with_positions(prompt)
            num_positions = min(num_generated, max_columns - prompt.input_ids.shape[1])
        inputs: dict[str, Any] = {
            "input_ids": new_ids_BQ,
            "position_ids": prompt.decode_position_ids(num_positions, num_uncached),
            "attention_mask": prompt.padding_mask(length),
            CACHE_KEYWORD: cache,
            "prompt_length": 0,  # all of these tokens are generated
        }
        if is_static(cache):
            # decode_mask reads only the first two sizes, the dtype and the device of embeddings.
            embeds_BQ0 = torch.empty(
                (*new_ids_BQ.shape, 0), dtype=self.dtype, device=input_ids.device
            )
            padding_mask = prompt.padding_mask(static_capacity(cache) or length)
            mask = decode_mask(self.config, embeds_BQ0, padding_mask, cache, past_length)
            inputs["attention_mask"] = mask
            if NEEDS_CACHE_POSITION:
                columns = torch.arange(past_length, length, device=input_ids.device)
                inputs["cache_position"] = columns
        record_decode_step(cache, length)
        return inputs

    def _idle_inputs(self, input_ids: Tensor) -> dict[str, Any]:
        """Return the inputs of a pass whose output is discarded.

        It uses the same modules as a decode step, because sharded weights are gathered in all
        processes together. It neither runs the tower nor changes the cache.
        """
        vision = self.config.vision
        features_0TD = torch.empty(
            (0, vision.num_image_tokens + 2, self.config.hidden_size),
            dtype=self.dtype,
            device=input_ids.device,
        )
        ids_B1 = torch.zeros_like(input_ids[:, :1])
        return {"input_ids": ids_B1, "image_features": features_0TD, "use_cache": False}

    def _num_columns_with_positions(self, prompt: ExpandedPrompt) -> int:
        """Return up to which length ``input_ids``, prompt and answer, have position ids."""
        max_generated = self.config.seq_length - 1 - prompt.batch.last_position
        return prompt.input_ids.shape[1] + max_generated

    def _checked_length(self, prompt: ExpandedPrompt, cache: Cache, num_generated: int) -> int:
        """Return the length of prompt and generated tokens.

        Raises:
            ValueError: The length exceeds the capacity of a static cache, or a position id reaches
                the limit ``seq_length``.
        """
        length = prompt.length + num_generated
        # generate does not read the last token, except in a process that has finished.
        num_read = num_generated - 1 if has_process_group() else num_generated
        check_position(prompt.batch.last_position + num_read, self.config.seq_length)
        check_cache_capacity(cache, length)
        return length

    def advance_decode_inputs(
        self, inputs: dict[str, Any], new_ids_B1: Tensor, prompt: ExpandedPrompt, num_generated: int
    ) -> bool:
        """Turn the inputs of one decode step into those of the next, in place.

        Args:
            inputs: From :meth:`prepare_inputs_for_generation`, and advanced by earlier calls.
            new_ids_B1: ``(B, 1)``, the newest generated tokens.
            num_generated: Number of tokens generated so far, including the newest.

        Returns:
            Whether ``inputs`` were advanced, which needs a static cache and a 4D mask.
        """
        cache, mask = inputs[CACHE_KEYWORD], inputs["attention_mask"]
        if not is_static(cache) or not isinstance(mask, Tensor) or mask.ndim != 4:
            return False
        length = self._checked_length(prompt, cache, num_generated)
        inputs["input_ids"] = new_ids_B1
        inputs["position_ids"].add_(1)
        # Make the new key visible: True in a boolean mask, 0 in a mask that is added to the scores.
        mask[..., length - 1].fill_(mask.dtype == torch.bool)
        if "cache_position" in inputs:
            inputs["cache_position"].add_(1)
        record_decode_step(cache, length)
        return True

    def _image_token_ids(self) -> list[int]:
        """Return the ids of begin-of-image, end-of-image and, if configured, of image tokens."""
        config = self.config
        ids = (config.boi_token_id, config.eoi_token_id, config.image_token_id)
        return [i for i in ids if i is not None]

    @overrides_generation(since="4.57")
    def _get_logits_processor(self, generation_config, *arguments, **options):
        refuse_nonfinite_generation(vars(generation_config), "generation_config")
        processors = super()._get_logits_processor(  # type: ignore[misc]
            generation_config, *arguments, **options
        )
        # Suppress image ids, because a training on generated text would have no images for them. A
        # caller allows them with an empty suppress_tokens. This processor runs before top-k and
        # others. It is not transformers' own one for suppress_tokens, because a caller's
        # SuppressTokensLogitsProcessor replaces that one.
        suppressed = generation_config.suppress_tokens
        if suppressed is None or len(suppressed):
            # generate passes the device of its ids. self.device may be "meta" (offloaded weights).
            device = str(options.get("device", self.device))
            image_ids = self._image_token_ids()
            processors.insert(0, SuppressTokensLogitsProcessor(image_ids, device=device))
        return processors

    @overrides_generation(since="4.57")
    def _expand_inputs_for_generation(
        self, expand_size=1, is_encoder_decoder=False, input_ids=None, **model_kwargs
    ):
        """Repeat each sequence and its images ``expand_size`` times, for beams or several answers.

        Also expand the prompt's image placeholders, and pass on the :class:`ExpandedPrompt`.
        """
        if model_kwargs.get(OTHER_CACHE_KEYWORD) is not None:
            raise_with_versions(
                f"generate was given {OTHER_CACHE_KEYWORD}: pass the cache as {CACHE_KEYWORD}"
            )
        images = self.transformer._stack_images(
            model_kwargs.pop("pixel_values", None), model_kwargs.pop("images", None)
        )
        embeds = model_kwargs.get("inputs_embeds")
        if input_ids is not None and model_kwargs.get("prompt_length") is None:
            # All ids are prompt, unless an assistant model was called with a prompt_length.
            model_kwargs["prompt_length"] = input_ids.shape[1]
        prompt = None
        if embeds is None and input_ids is not None:
            prompt = self._expand_prompt(input_ids, images, model_kwargs)
        elif embeds is not None and expand_size > 1:
            # Without images, too: sharded embeddings are gathered in all processes together.
            ids = self.transformer._ids_of_embeds(embeds, 0 if images is None else len(images))
            if images is not None:
                prompt = self._expand_prompt(ids, images, model_kwargs | {"prompt_length": None})
        if images is not None and prompt is not None and expand_size > 1:
            past_length = cached_length(model_kwargs.get(CACHE_KEYWORD))
            counts = prompt.count_images(self.config.boi_token_id, past_length, len(images))
            if sum(counts) == len(images):  # otherwise all images are cached and not read again
                per_sequence = images.split(counts)
                images = torch.cat([group.repeat(expand_size, 1, 1, 1) for group in per_sequence])
        input_ids, model_kwargs = super()._expand_inputs_for_generation(  # type: ignore[misc]
            expand_size=expand_size,
            is_encoder_decoder=is_encoder_decoder,
            input_ids=input_ids,
            **model_kwargs,
        )
        if images is not None:
            model_kwargs["pixel_values"] = images
        if prompt is not None and embeds is None:
            model_kwargs["expanded_prompt"] = prompt.repeated(expand_size, input_ids)
        return input_ids, model_kwargs

    def _expand_prompt(
        self, input_ids: Tensor, images: Tensor | None, model_kwargs: dict
    ) -> ExpandedPrompt:
        """Expand the prompt of a ``generate`` call; raise ``ValueError`` if it ends in padding."""
        position_ids = model_kwargs.get("position_ids")
        past_length = cached_length(model_kwargs.get(CACHE_KEYWORD))
        prompt_length = model_kwargs["prompt_length"]
        batch = InputBatch(input_ids, model_kwargs.get("attention_mask"), position_ids)
        expanded = self._expand_batch(batch, images, past_length, prompt_length)
        if expanded.has_padding:
            assert expanded.attention_mask is not None
            is_padded_right = expanded.attention_mask[:, -1] == 0
            if right_padded := is_padded_right.nonzero().flatten().tolist():
                raise ValueError(
                    f"prompts {right_padded} of {len(input_ids)} end in padding, where generate "
                    'would continue: pad prompts on the left (padding_side="left")'
                )
        return ExpandedPrompt(input_ids, expanded, position_ids)

    def generate_batch(self, *args, **kwargs):
        """Refuse transformers' continuous batching.

        Continuous batching passes token ids without images, counts position ids by column, and
        treats prompts with equal ids as equal.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "continuous batching of transformers passes no images to the model: use generate() "
            "with prompts padded on the left"
        )

    @overrides_generation(since="4.57")
    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ):
        # transformers computes the capacity of a static cache from the unexpanded prompt.
        prompt = model_kwargs.get("expanded_prompt")
        if prompt is not None:
            max_cache_length += prompt.length - prompt.input_ids.shape[1]
            # The last generated token needs no position id, because no forward pass reads it.
            greatest_length = self._num_columns_with_positions(prompt) + 1
            if generation_config.max_length > greatest_length:
                max_cache_length -= generation_config.max_length - greatest_length
                generation_config.max_length = greatest_length
        # generate does not cache the last token, except under synced_gpus, in a process that has
        # finished while another has not.
        if has_process_group():
            max_cache_length += 1
        if self.device.type not in DEVICES_WITHOUT_COMPILATION:
            num_multiples = -(-max_cache_length // STATIC_CACHE_MULTIPLE)
            max_cache_length = num_multiples * STATIC_CACHE_MULTIPLE
        return super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )

    @overrides_generation(since="4.57")
    def _get_candidate_generator(self, generation_config, **options):
        # Prompt lookup may propose candidates beyond max_length, whose position ids may exceed the
        # model's limit.
        generator = super()._get_candidate_generator(  # type: ignore[misc]
            generation_config, **options
        )
        get_candidates = generator.get_candidates

        def get_candidates_within_length(input_ids, *arguments, **options):
            candidates, logits = get_candidates(input_ids, *arguments, **options)
            # Verifying the candidates generates one more token.
            max_candidates_length = max(generation_config.max_length - 1, input_ids.shape[1])
            if logits is not None:
                logits = logits[:, : max_candidates_length - input_ids.shape[1]]
            return candidates[:, :max_candidates_length], logits

        generator.get_candidates = get_candidates_within_length  # type: ignore[method-assign]
        return generator


def _extend_position_ids(position_ids: Tensor | None, length: int) -> Tensor | None:
    """Extend position ids to ``length``: transformers 4 passes only those of the prompt."""
    if position_ids is None or position_ids.shape[1] >= length:
        return position_ids
    steps = torch.arange(1, length - position_ids.shape[1] + 1, device=position_ids.device)
    return torch.cat((position_ids, position_ids[:, -1:] + steps), dim=1)


def _uncached_images(
    images: Tensor | None, batch: ExpandedBatch, past_length: int, begin_id: int
) -> Tensor | None:
    """Return the images that begin after the cached part.

    Args:
        images: All images of the sequences, or already only the uncached ones.

    Raises:
        ValueError: The cache ends inside an image.
    """
    if images is None:
        return None
    image_mask = batch.image_mask.cpu()
    is_begin = (batch.input_ids.cpu() == begin_id) & image_mask
    columns = torch.arange(is_begin.shape[1])
    is_cut = image_mask & ~is_begin & (columns == past_length) & (past_length > 0)
    if is_cut.any():
        raise ValueError(
            f"the cache ends at entry {past_length}, inside an image, which must be cached "
            "completely or not at all: crop the cache before the image. Assistant models and "
            "prompt lookup crop it to a number of unexpanded tokens, so give them expanded "
            "prompts, as this model's processor makes them"
        )
    is_uncached = is_begin.nonzero()[:, 1] >= past_length
    if not is_uncached.any():
        return None
    return images if is_uncached.all() or len(images) != len(is_uncached) else images[is_uncached]
