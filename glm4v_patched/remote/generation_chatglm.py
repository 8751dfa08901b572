"""What transformers' ``generate`` asks of the model.

``generate`` counts ids as given and the cache counts positions, so rows are grown here. A drawn
token needs nothing from the rows before it (cache_metadata.py).
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
    check_room,
    is_static,
    known_rows,
    remember_drawn,
    room_of,
)
from .configuration_chatglm import ChatGLMConfig, log_unknown, refuse_nonfinite_generation
from .image_checks import UnexpandedBatch, check_position
from .image_layout import ExpandedBatch, expand_image_placeholders
from .keywords import (
    CACHE_KEYWORD,
    EMBEDS_ARE_CUT,
    OLD_CACHE,
    WANTS_CACHE_POSITION,
    check_generate,
    cache_kwarg,
    one_cache,
    overrides_generation,
    refuse,
    without_account,
)
from .masks import mask_of_drawn

# The sizes of static caches that generate makes are multiples of this where it compiles steps.
CACHE_STEP = 64
COMPILES_NO_STEPS = ("cpu",)  # by itself

# Shapes: B rows, R length of the grown rows, N new ids, K keys of the cache.


def known_options(generation_config: GenerationConfig) -> GenerationConfig:
    """Return a copy with only those options of generation that transformers has, to be saved."""
    own = copy(generation_config)
    unknown = sorted(generation_config.to_dict().keys() - vars(GenerationConfig()))
    log_unknown(unknown, "generation_config.json")
    for name in unknown:
        delattr(own, name)
    return own


class ChatGLMGenerationMixin(GenerationMixin):
    """For a model whose decoder is its ``transformer``."""

    # transformers looks for its own mixin's name in the names of a class's bases.

    config: ChatGLMConfig
    transformer: Any
    device: torch.device
    dtype: torch.dtype

    def load_custom_generate(
        self, pretrained_model_name_or_path=None, trust_remote_code=None, **kwargs
    ):
        """As usual, for a caller who says that the code is trusted."""
        where = pretrained_model_name_or_path
        if not trust_remote_code:  # transformers 4.57 runs it, unasked
            raise OSError(  # which is for from_pretrained a folder without
                f"custom_generate of {where} is code: pass trust_remote_code=True to run it"
            )
        return super().load_custom_generate(where, trust_remote_code=True, **kwargs)

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
        """What ``forward`` needs for the part of the rows that is not in the cache yet.

        Rows are grown here, and cut after what the cache holds; ``prompt_length`` counts ids as
        given. Once a ``expanded_prompt`` is in the cache, for a drawn token nothing is grown, nothing
        waits for the device, and with a static cache every step has the same shapes.
        """
        check_generate()
        cache = one_cache(past_key_values, cache)
        more = without_account(kwargs)
        if expanded_prompt is not None:
            expanded_prompt.passes += 1
            if expanded_prompt.passes > 1 and cache is None and more.get("use_cache"):
                refuse(
                    f"generate has drawn {expanded_prompt.num_drawn(input_ids)} tokens with "
                    "use_cache=True and handed over no cache, without which every token takes a "
                    "pass over the whole rows: give use_cache=False if that is wanted, or the "
                    f"cache as {CACHE_KEYWORD}"
                )
            num_new = 0 if inputs_embeds is not None else expanded_prompt.num_new(input_ids, cache)
            if num_new and cache is not None:
                return more | self._inputs_of_drawn(expanded_prompt, input_ids, cache, num_new)
        given = UnexpandedBatch(input_ids, attention_mask, position_ids)
        if inputs_embeds is not None:
            named = {"pixel_values": pixel_values, "images": images}
            is_first = kwargs.get("is_first_iteration")
            inputs = self._inputs_of_embeds(given, inputs_embeds, named, cache, is_first)
        else:
            images = self.transformer._one_image_tensor(pixel_values, images)
            inputs = self._inputs_of_ids(given, images, cache, prompt_length, expanded_prompt)
        return cache_kwarg(cache) | inputs | more

    def _inputs_of_embeds(
        self, given: UnexpandedBatch, inputs_embeds, images: dict, cache, is_first
    ) -> dict[str, Any]:
        past_length = cached_length(cache)
        inputs = {"attention_mask": given.attention_mask}
        new = 1
        # Until a token is drawn there are no ids, unless they are given beside embeddings.
        if is_first or past_length == 0 or given.input_ids.shape[1] == 0:
            # As everywhere in transformers, they are whole rows.
            new = inputs_embeds.shape[1] - (0 if EMBEDS_ARE_CUT else past_length)
            if new < 1:
                raise ValueError(
                    f"inputs_embeds has {inputs_embeds.shape[1]} positions but the cache holds "
                    f"{past_length} already: give generate the embeddings of whole rows"
                )
            inputs |= images | {"inputs_embeds": inputs_embeds[:, -new:]}
        else:
            inputs["input_ids"] = given.input_ids[:, -new:]
        # generate counts the positions of images that are cached one by one.
        if given.position_ids is not None and known_rows(cache, past_length) is None:
            inputs["position_ids"] = given.position_ids[:, -new:]
        return inputs

    def _inputs_of_ids(
        self, given: UnexpandedBatch, images, cache, prompt_length, expanded_prompt
    ) -> dict[str, Any]:
        past_length = cached_length(cache)
        if expanded_prompt is not None and expanded_prompt.input_ids is given.input_ids:
            rows = expanded_prompt.rows
        else:
            if expanded_prompt is not None:
                given = given._replace(position_ids=expanded_prompt.position_ids)
            rows = self._grow_whole_rows(given, images, past_length, prompt_length)
        length = rows.input_ids.shape[1]
        # A cache may hold more than the rows: peft's virtual tokens have no ids.
        first = min(past_length, length - 1)
        inputs = {
            "input_ids": rows.input_ids[:, first:],
            "position_ids": rows.position_ids[:, first:],
            "attention_mask": rows.attention_mask,
            "pixel_values": _images_after(images, rows, past_length, self.config.boi_token_id),
        }
        if prompt_length is not None:
            drawn = given.input_ids.shape[1] - prompt_length
            # Above 0: forward takes no more than drawn ids for such.
            inputs["prompt_length"] = length - drawn - past_length
        return inputs

    def _grow_whole_rows(
        self, given: UnexpandedBatch, images: Tensor | None, past_length: int, prompt_length: int | None
    ) -> ExpandedBatch:
        if given.attention_mask is None:
            # transformers 5 drops a mask of ones, but rows may grow to different lengths; and
            # positions without a mask would say that rows are packed.
            given = given._replace(attention_mask=torch.ones_like(given.input_ids))
        positions = _continued(given.position_ids, given.input_ids.shape[1])
        given = given._replace(position_ids=positions, num_cached=past_length)
        num_images = 0 if images is None else len(images)
        return expand_image_placeholders(given, self.transformer.image_format, num_images, prompt_length)

    def _inputs_of_drawn(
        self, prompt: ExpandedPrompt, input_ids: Tensor, cache: Cache, num_new: int
    ) -> dict[str, Any]:
        num_drawn = prompt.num_drawn(input_ids)
        length = self._length_with_drawn(prompt, cache, num_drawn)
        past_length = length - num_new
        # Without the strides of rows that grow, for which a compiled step would be another one.
        new_ids_BN = input_ids[:, -num_new:].clone(memory_format=torch.contiguous_format)
        inputs: dict[str, Any] = {
            "input_ids": new_ids_BN,
            "position_ids": prompt.positions(num_drawn, num_new),
            "attention_mask": prompt.padding_mask(length),
            CACHE_KEYWORD: cache,
            "prompt_length": 0,  # drawn, all of them
        }
        if is_static(cache):
            embeds_BN0 = torch.empty(
                (*new_ids_BN.shape, 0), dtype=self.dtype, device=input_ids.device
            )
            padding_mask = prompt.padding_mask(room_of(cache) or length)
            mask = mask_of_drawn(self.config, embeds_BN0, padding_mask, cache, past_length)
            inputs["attention_mask"] = mask
            if WANTS_CACHE_POSITION:
                columns = torch.arange(past_length, length, device=input_ids.device)
                inputs["cache_position"] = columns
        remember_drawn(cache, length)
        return inputs

    def _length_with_drawn(self, prompt: ExpandedPrompt, cache: Cache, num_drawn: int) -> int:
        length = prompt.length + num_drawn
        check_position(prompt.rows.last_position + num_drawn, self.config.seq_length)
        check_room(cache, length)
        return length

    def advance_decode_inputs(
        self, inputs: dict[str, Any], new_ids_B1: Tensor, prompt: ExpandedPrompt, num_drawn: int
    ) -> bool:
        """Make the inputs of the drawn id before it, of :meth:`prepare_inputs_for_generation`,
        those of this one, in place; if that is not possible, nothing changes and it is False.

        Args:
            num_drawn: Ids drawn so far, this one included.
        """
        cache, mask = inputs[CACHE_KEYWORD], inputs["attention_mask"]
        if not is_static(cache) or not isinstance(mask, Tensor) or mask.ndim != 4:
            return False
        length = self._length_with_drawn(prompt, cache, num_drawn)
        inputs["input_ids"] = new_ids_B1
        inputs["position_ids"].add_(1)
        mask[..., length - 1].fill_(mask.dtype == torch.bool)  # added to scores, 0 is visible
        if "cache_position" in inputs:
            inputs["cache_position"].add_(1)
        remember_drawn(cache, length)
        return True

    def _image_token_ids(self) -> list[int]:
        """Begin- and end-of-image, and what fills an image's positions if the config says it."""
        config = self.config
        ids = (config.boi_token_id, config.eoi_token_id, config.image_token_id)
        return [i for i in ids if i is not None]

    @overrides_generation(since="4.57")
    def _get_logits_processor(self, generation_config, *arguments, **options):
        refuse_nonfinite_generation(vars(generation_config), "generation_config")
        processors = super()._get_logits_processor(  # type: ignore[misc]
            generation_config, *arguments, **options
        )
        # An image id among drawn ids is taken for a lost image by whoever trains on them. Trainers
        # name some ids of their own; only an empty list says that all may be drawn. First, so that
        # what chooses among the best sees it; a processor of its own, for generate would drop that
        # of the config for one of the same class that it is given.
        given = generation_config.suppress_tokens
        if given is None or len(given):
            # generate names that of its ids: that of weights that are offloaded holds no numbers.
            device = str(options.get("device", self.device))
            processors.insert(0, SuppressTokensLogitsProcessor(self._image_token_ids(), device=device))
        return processors

    @overrides_generation(since="4.57")
    def _expand_inputs_for_generation(
        self, expand_size=1, is_encoder_decoder=False, input_ids=None, **model_kwargs
    ):
        """Repeat rows for beams or several answers, with each row's images kept together."""
        if model_kwargs.get(OLD_CACHE) is not None:
            refuse(
                f"generate was given {OLD_CACHE}, and its name for a cache is {CACHE_KEYWORD}: give it so"
            )
        images = self.transformer._one_image_tensor(
            model_kwargs.pop("pixel_values", None), model_kwargs.pop("images", None)
        )
        embeds = model_kwargs.get("inputs_embeds")
        if input_ids is not None and model_kwargs.get("prompt_length") is None:
            # Called once, before the first token is drawn; given to who assists another model.
            model_kwargs["prompt_length"] = input_ids.shape[1]
        prompt = None
        if embeds is None and input_ids is not None:
            prompt = self._expand_prompt(input_ids, images, model_kwargs)
        elif images is not None and expand_size > 1:
            ids = self.transformer._ids_of(embeds, len(images))
            prompt = self._expand_prompt(ids, images, model_kwargs | {"prompt_length": None})
        if images is not None and prompt is not None and expand_size > 1:
            past_length = cached_length(model_kwargs.get(CACHE_KEYWORD))
            counts = prompt.count_images(self.config.boi_token_id, past_length, len(images))
            if sum(counts) == len(images):  # else none is needed: all are in the cache
                of_rows = images.split(counts)
                images = torch.cat([of_row.repeat(expand_size, 1, 1, 1) for of_row in of_rows])
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
        mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
        past_length, prompt_length = (
            cached_length(model_kwargs.get(CACHE_KEYWORD)),
            model_kwargs["prompt_length"],
        )
        given = UnexpandedBatch(input_ids, mask, positions)
        rows = self._grow_whole_rows(given, images, past_length, prompt_length)
        if rows.has_padding:
            assert rows.attention_mask is not None
            if ends := (rows.attention_mask[:, -1] == 0).nonzero().flatten().tolist():
                raise ValueError(
                    f"rows {ends} of {len(input_ids)} end in padding, where generate would go on: "
                    'pad prompts on the left (padding_side="left")'
                )
        return ExpandedPrompt(input_ids, rows, positions)

    def generate_batch(self, *args, **kwargs):
        """Raises ``ValueError``: transformers' continuous batching hands on ids alone, without
        images, counts positions by place, and takes rows with equal ids for equal."""
        raise ValueError(
            "continuous batching of transformers hands on no images: answer with generate(), "
            "rows padded on the left"
        )

    @overrides_generation(since="4.57")
    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ):
        # transformers sizes a static cache by the ids as given.
        prompt = model_kwargs.get("expanded_prompt")
        if prompt is not None:
            max_cache_length += prompt.length - prompt.input_ids.shape[1]
            # The last token needs no position: nothing is computed after it.
            most_drawn = self.config.seq_length - prompt.rows.last_position
            last_length = prompt.input_ids.shape[1] + most_drawn
            if generation_config.max_length > last_length:
                max_cache_length -= generation_config.max_length - last_length
                generation_config.max_length = last_length
        if self.device.type not in COMPILES_NO_STEPS:
            # A step is compiled for every size.
            max_cache_length = -(-max_cache_length // CACHE_STEP) * CACHE_STEP
        return super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )

    @overrides_generation(since="4.57")
    def _get_candidate_generator(self, generation_config, **given):
        # Those of prompt lookup go on behind the longest answer, and verifying needs positions.
        generator = super()._get_candidate_generator(  # type: ignore[misc]
            generation_config, **given
        )
        get_candidates = generator.get_candidates

        def within_length(input_ids, *arguments, **options):
            candidates, logits = get_candidates(input_ids, *arguments, **options)
            # The pass that verifies them draws one more.
            most = max(generation_config.max_length - 1, input_ids.shape[1])
            if logits is not None:
                logits = logits[:, : most - input_ids.shape[1]]
            return candidates[:, :most], logits

        generator.get_candidates = within_length  # type: ignore[method-assign]
        return generator


def _continued(position_ids: Tensor | None, length: int) -> Tensor | None:
    """``position_ids`` counted on to ``length``: generate in transformers 4 keeps the prompt's."""
    if position_ids is None or position_ids.shape[1] >= length:
        return position_ids
    more = torch.arange(1, length - position_ids.shape[1] + 1, device=position_ids.device)
    return torch.cat((position_ids, position_ids[:, -1:] + more), dim=1)


def _images_after(images, rows: ExpandedBatch, past_length: int, begin_id: int) -> Tensor | None:
    """The images whose begin is not in the cache yet; all given ones, if they are just those."""
    if images is None:
        return None
    image_mask = rows.image_mask.cpu()
    is_begin = (rows.input_ids.cpu() == begin_id) & image_mask
    columns = torch.arange(is_begin.shape[1])
    is_cut = image_mask & ~is_begin & (columns == past_length) & (past_length > 0)
    places = (is_begin | is_cut).nonzero()
    columns_cut = torch.cat((places[:, 1:], is_cut[places.unbind(1)][:, None]), dim=1).tolist()
    if any(is_cut for _, is_cut in columns_cut):
        raise ValueError(
            f"the cache ends at position {past_length}, inside of an image, which is there as a "
            "whole or not at all: crop before it (assistant models and prompt lookup crop by ids: "
            "give them grown rows, as this model's processor makes them)"
        )
    new = [number for number, (column, _) in enumerate(columns_cut) if column >= past_length]
    if not new:
        return None
    return images[new] if len(images) == len(places) and len(new) < len(places) else images
