"""glm-4v: a GLM-4 language model that reads images through an EVA2-CLIP tower.

Computes what the published code of glm-4v-9b computes, under the same parameter names, for any
number of images a row, any padding and packing, alike in training and evaluation.
"""

from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    BaseModelOutputWithPooling,
    CausalLMOutputWithPast,
)
from transformers.utils import logging

from .attention import attend
from .cache_metadata import (
    cached_length,
    check_room,
    check_rows_of_cache,
    is_static,
    next_position,
    remember_rows,
    room_of,
)
from .checkpointing import CheckpointedLayer
from .class_lists import enter_class
from .classification_chatglm import OF_TOKENS, ScoresRows
from .configuration_chatglm import PIPELINE_TASK, ChatGLMConfig, check_adapters
from .generation_chatglm import ChatGLMGenerationMixin, known_options
from .image_checks import UnexpandedBatch, ImageFormat
from .image_layout import expand_image_placeholders
from .keywords import (
    CACHE_KEYWORD,
    OF_LOGITS,
    VERSION,
    WANTS_CACHE_POSITION,
    attention_keywords,
    cache_kwarg,
    names_of,
    one_cache,
    refuse_unknown,
    wants_dict,
)
from .loss import KeptColumns, chunked_next_token_loss, computes_loss, next_token_loss, with_loss
from .masks import causal_mask, is_ready, mask_of_drawn
from .sharding import must_run_on_every_process, refuse_split_model
from .visual import EVA2CLIPModel, PatchEmbedding, TowerRecord

logger = logging.get_logger(__name__)

# Shapes: B rows, R length of the grown rows, D width, H query heads, G key-value heads, C head
# channels, F rotated pairs of a head (C / 4), N images, S side of an image, V vocabulary.


class Embedding(nn.Module):
    def __init__(self, config: ChatGLMConfig):
        super().__init__()
        # Typed as what set_input_embeddings may put here.
        self.word_embeddings: nn.Module = nn.Embedding(config.padded_vocab_size, config.hidden_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.word_embeddings(input_ids)


class RotaryEmbedding(nn.Module):
    """Angles for the first half of each head's channels."""

    # Part of the checkpoint format and written as published (without rope_ratio); nothing is
    # computed from it, because a checkpoint may hold it rounded.
    inv_freq: Tensor

    def __init__(self, config: ChatGLMConfig):
        super().__init__()
        self.config = config
        self.register_buffer("inv_freq", self.published_inv_freq().to(torch.get_default_dtype()))

    def published_inv_freq(self) -> Tensor:
        return self._frequencies(base=10000.0)

    def _frequencies(self, base: float, device=None) -> Tensor:
        rotated = self.config.kv_channels // 2
        exponents = torch.arange(0, rotated, 2, dtype=torch.float32, device=device) / rotated
        return 1.0 / base**exponents

    def forward(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """For :func:`apply_rotary`, ``(B, R, 1, C)`` each, rounded to ``dtype`` unless
        ``rope_in_fp32``: cosines, and sines with the sign of what they are added to. For the half
        of the channels that is not rotated, cosines of 1 and sines of 0."""
        theta_F = self._frequencies(10000.0 * self.config.rope_ratio, position_ids.device)
        angles_BRF = (position_ids[..., None].float() * theta_F).float()
        dtype = torch.float32 if self.config.rope_in_fp32 else dtype
        cos, sin = angles_BRF.cos().to(dtype), angles_BRF.sin().to(dtype)
        passed = 0, self.config.kv_channels - 2 * len(theta_F)
        cos_BRC = F.pad(torch.stack((cos, cos), dim=-1).flatten(-2), passed, value=1.0)
        sin_BRC = F.pad(torch.stack((-sin, sin), dim=-1).flatten(-2), passed)
        return cos_BRC[:, :, None], sin_BRC[:, :, None]


def apply_rotary(x_BRHC: Tensor, cos_BR1C: Tensor, sin_BR1C: Tensor) -> Tensor:
    """Rotate neighboring channels ``(2i, 2i + 1)``."""
    neighbors_BRHC = x_BRHC.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return (x_BRHC * cos_BR1C + neighbors_BRHC * sin_BR1C).to(x_BRHC.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square norm that multiplies by its weight in fp32, before the cast back."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps).to(x.dtype)


class SelfAttention(nn.Module):
    """Causal attention, grouped key-value heads, one fused projection (q, then k, then v)."""

    is_causal = True

    def __init__(self, config: ChatGLMConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        heads, groups = config.num_attention_heads, config.multi_query_group_num
        self.head_dim = config.kv_channels
        self.num_key_value_groups = heads // groups
        self.split_sizes = heads, groups, groups
        has_qkv_bias = config.add_bias_linear or config.add_qkv_bias
        self.query_key_value = nn.Linear(
            config.hidden_size, sum(self.split_sizes) * config.kv_channels, bias=has_qkv_bias
        )
        self.dense = nn.Linear(
            heads * config.kv_channels, config.hidden_size, bias=config.add_bias_linear
        )

    def forward(
        self, x_BRD, cos, sin, attention_mask, past_key_values, cache_update, attention_kwargs
    ) -> Tensor:
        """``fills``: whether the cache was empty, and further arguments of its ``update``."""
        heads_BRHC = self.query_key_value(x_BRD).unflatten(-1, (-1, self.head_dim))
        query, key, value = (part.transpose(1, 2) for part in self.rotate(heads_BRHC, cos, sin))
        if past_key_values is not None:
            was_empty, where = cache_update
            new = key, value
            key, value = past_key_values.update(key, value, self.layer_idx, *where)
            if was_empty:
                key, value = new  # all there is to see, without the room that is left
        given = query, key, value, attention_mask, self.config._attn_implementation
        return self.dense(attend(self, *given, **attention_kwargs))

    def rotate(self, heads_BRHC: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Queries and keys, rotated, and values: ``(B, R, heads, C)`` each."""
        queries, groups, _ = self.split_sizes
        turned_BRHC, value_BRGC = heads_BRHC.split((queries + groups, groups), dim=2)
        return *apply_rotary(turned_BRHC, cos, sin).split((queries, groups), dim=2), value_BRGC


class MLP(nn.Module):
    def __init__(self, config: ChatGLMConfig):
        super().__init__()
        width, inner, bias = config.hidden_size, config.ffn_hidden_size, config.add_bias_linear
        self.dense_h_to_4h = nn.Linear(width, 2 * inner, bias=bias)
        self.dense_4h_to_h = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.dense_h_to_4h(x).chunk(2, dim=-1)
        return self.dense_4h_to_h(F.silu(gate) * up)


class GLMBlock(CheckpointedLayer):
    """One pre-norm decoder layer."""

    def __init__(self, config: ChatGLMConfig, layer_idx: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.layernorm_epsilon)
        self.self_attention = SelfAttention(config, layer_idx)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.layernorm_epsilon)
        self.mlp = MLP(config)

    def layer_forward(self, x_BRD: Tensor, *attention_inputs) -> Tensor:
        x_BRD = x_BRD + self.self_attention(self.input_layernorm(x_BRD), *attention_inputs)
        return x_BRD + self.mlp(self.post_attention_layernorm(x_BRD))


class GLMTransformer(nn.Module):
    def __init__(self, config: ChatGLMConfig):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(GLMBlock(config, i) for i in range(config.num_layers))
        self.final_layernorm = RMSNorm(config.hidden_size, config.layernorm_epsilon)

    def forward(
        self, x_BRD: Tensor, *attention_inputs, keep_states: bool = False
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """The normalized output; if asked, what went into each layer and came out of the last."""
        states = [x_BRD]
        # Which may be less than there are: generate leaves out the last layers so.
        for layer in islice(self.layers, self.config.num_layers):
            x_BRD = layer(x_BRD, *attention_inputs)
            if keep_states:
                states.append(x_BRD)
        return self.final_layernorm(x_BRD), tuple(states) if keep_states else None


class ChatGLMPreTrainedModel(PreTrainedModel):
    config: ChatGLMConfig
    transformer: Any  # the decoder, of models with a head
    forward_names: tuple[str, ...]  # the keywords of this class's forward, for its errors
    config_class = ChatGLMConfig
    base_model_prefix = "transformer"
    main_input_name = "input_ids"
    input_modalities = ("image", "text")  # type: ignore[assignment]  # as in transformers' own
    supports_gradient_checkpointing = True
    _no_split_modules = ["GLMBlock", "TransformerLayer", "PatchEmbedding", "GLU"]
    _skip_keys_device_placement = ["past_key_values", "cache"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    # Absent from some checkpoints; it follows from the config.
    _keys_to_ignore_on_load_missing = [r"rotary_pos_emb\.inv_freq"]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, config=None, **kwargs):
        """As usual, also with a ``config`` of somebody else's class for the same fields. Raises
        ``ImportError`` for adapters that this transformers cannot load."""
        check_adapters(pretrained_model_name_or_path, kwargs)
        if isinstance(config, PretrainedConfig):
            config = ChatGLMConfig.from_config(config)
        options = kwargs | {"config": config}
        return super().from_pretrained(pretrained_model_name_or_path, *model_args, **options)

    def load_adapter(self, peft_model_id=None, *args, **kwargs):
        """As usual. Raises ``ImportError`` where this transformers cannot load them."""
        check_adapters(peft_model_id, {}, are_adapters=True)
        return super().load_adapter(peft_model_id, *args, **kwargs)

    def _check_keywords(self, given: dict[str, Any], input_ids: Tensor | None) -> None:
        """Raise ``ValueError`` for a keyword that this class's ``forward`` does not take."""
        types, ids = given.get("token_type_ids"), input_ids
        # OpenRLHF's are 1 where ids fill an image; those of others mean something else.
        if (
            isinstance(types, Tensor)
            and isinstance(ids, Tensor)
            and types.shape == ids.shape
            and not bool(types.ne(ids == self.config.image_token_id).any())
        ):
            del given["token_type_ids"]
        refuse_unknown(given, type(self).__name__, self.forward_names)

    def get_image_features(self, pixel_values: Tensor, **options):
        """As :meth:`ChatGLMModel.get_image_features`."""
        return self.transformer.get_image_features(pixel_values, **options)

    @classmethod
    def _from_config(cls, config, **kwargs):
        return super()._from_config(ChatGLMConfig.from_config(config), **kwargs)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        # transformers guesses from this file's text, in which it misses the name of its registry
        # (attention.py has it). Both towers read the config at every call.
        return True

    def _weights_to_keep(
        self, layers: nn.ModuleList, output_attentions: bool | None
    ) -> list[Tensor] | None:
        """A list for the attention weights of ``layers``, if they are asked for and made."""
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if not output_attentions:
            return None
        implementation = self.config._attn_implementation
        if implementation != "eager":
            # transformers' own models warn, too, and return none.
            logger.warning_once(
                f"output_attentions=True: the attention implementation {implementation!r} makes "
                "no weights and none are returned; choose another one, e.g. by "
                'model.set_attn_implementation("eager")'
            )
            return None
        recomputed = sum(bool(layer.gradient_checkpointing) for layer in layers)
        if recomputed and self.training and torch.is_grad_enabled():
            raise ValueError(
                f"output_attentions=True in training, where {recomputed} of {len(layers)} layers "
                "recompute their activations: the weights of a recomputed layer have no "
                "gradients; disable activation checkpointing or leave output_attentions out"
            )
        return []

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Normal weights of ``initializer_range``, zero biases, norms that change nothing."""
        drawn: list[Tensor] = []
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.Embedding)):
            drawn = [module.weight]
        elif isinstance(module, (RMSNorm, nn.LayerNorm)):
            nn.init.ones_(module.weight)
        elif isinstance(module, PatchEmbedding):
            drawn = [module.cls_embedding]
        elif isinstance(module, EVA2CLIPModel):
            drawn = [module.boi, module.eoi]
        elif isinstance(module, RotaryEmbedding):
            module.inv_freq.copy_(module.published_inv_freq())
        for weight in drawn:
            nn.init.normal_(weight, std=self.config.initializer_range)
        if isinstance(bias := getattr(module, "bias", None), Tensor):
            nn.init.zeros_(bias)


@dataclass
class ChatGLMModelOutput(BaseModelOutputWithPast):
    """What the decoder gives, and what it was given in the form it used.

    Attributes:
        labels: ``(B, R)`` int64, grown with the rows.
        image_hidden_states: ``(N, num_image_tokens + 2, D)``, the images' features.
        attention_mask: ``(B, cached + R)``, grown with the rows.
    """

    labels: Tensor | None = None
    image_hidden_states: Tensor | None = None
    attention_mask: Tensor | None = None


@dataclass
class GLM4VCausalLMOutput(CausalLMOutputWithPast):
    """``image_hidden_states``: as in :class:`ChatGLMModelOutput`."""

    image_hidden_states: Tensor | None = None


class Wanted(NamedTuple):
    """What a caller wants to see of all layers, and in which form."""

    states: bool
    weights: list[Tensor] | None  # which the layers fill
    as_dict: bool

    def output(
        self, hidden_BRD: Tensor, states: tuple | None, cache: Cache | None, **more
    ) -> ChatGLMModelOutput | tuple:
        output = ChatGLMModelOutput(
            last_hidden_state=hidden_BRD,
            **cache_kwarg(cache),
            hidden_states=states,
            attentions=None if self.weights is None else _over_room(self.weights, cache),
            **more,
        )
        return output if self.as_dict else output.to_tuple()


class ChatGLMModel(ChatGLMPreTrainedModel):
    """The model without its loss. Owns the output projection, as the published checkpoint does."""

    _has_named_growth = False

    def __init__(self, config: ChatGLMConfig):
        super().__init__(config)
        self.embedding = Embedding(config)
        self.rotary_pos_emb = RotaryEmbedding(config)
        self.encoder = GLMTransformer(config)
        # Typed as what it may become: wrapped by peft, or quantized.
        self.output_layer: nn.Module = with_loss(
            nn.Linear(config.hidden_size, config.padded_vocab_size, bias=False)
        )
        self.vision = EVA2CLIPModel(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embedding.word_embeddings = value

    @property
    def image_format(self) -> ImageFormat:
        return ImageFormat(
            begin_id=self.config.boi_token_id,
            end_id=self.config.eoi_token_id,
            num_image_tokens=self.vision.vision_config.num_image_tokens,
            vocab_size=self.config.padded_vocab_size,
            max_positions=self.config.seq_length,
        )

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        pixel_values: Tensor | None = None,
        images: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        prompt_length: int | None = None,
        image_features: Tensor | BaseModelOutputWithPooling | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        cache: Cache | None = None,
        **attention_kwargs,
    ) -> ChatGLMModelOutput | tuple:
        """Run the decoder over rows of text and images, causal over image positions too.

        Args:
            input_ids: ``(B, L)`` int64, images in either form. Exactly one of this and
                ``inputs_embeds``.
            attention_mask: ``(B, cached + L)``, 0 at padding and 1 elsewhere, as long as the rows
                are given.
            position_ids: ``(B, L)``; made here when not given. Where they restart at 0, without a
                mask or under one of ones, another sample begins that sees nothing before it.
            past_key_values: A ``Cache``; rows that follow one may bring new images. For rows that
                this model did not put there, or after ``crop``, give ``position_ids``.
            inputs_embeds: ``(B, L, D)``. Images go where these are the embeddings of begin- and
                end-of-image ids, in rows of the grown form.
            pixel_values: ``(N, 3, S, S)``, the images of all rows in the order of their
                begin-of-image ids. ``None`` or empty: no images.
            images, cache: Other names for ``pixel_values``, of the published code, and for
                ``past_key_values``, of transformers 5.24.
            labels: ``(B, L)``; grown with the rows and handed back.
            output_hidden_states: The input of every layer, and the output of the last before the
                final norm, too.
            output_attentions: ``(B, H, R, cached + R)`` of each layer, too. Only eager attention
                makes them; any other warns and returns none.
            prompt_length: Ids from this column on were drawn by generation; begin- and
                end-of-image ids among them are ordinary tokens.
            image_features: ``(N, num_image_tokens + 2, D)``, in place of ``pixel_values``: what
                :meth:`get_image_features` gives (its output, too). The tower does not run.
                Processes that gather it together must all be given features or none; without
                images, ``N`` is 0, which also leaves out the blank image.
            shift_labels: ``(B, L)``, in place of ``labels``: at each id the label of the next one,
                as context parallelism cuts them. Handed back as labels ``(B, R + 1)``.
            num_items_in_batch: What the summed loss will be divided by; refused if it may count
                labels inside images, where nothing is learned.
            attention_kwargs: For the attention implementation: those of :mod:`keywords`. The
                keywords of logits that models with a head name (``logits_to_keep``) change nothing:
                hidden states are those of all positions.

        Raises:
            ValueError: inputs that contradict each other; names the numbers and the cure.
        """
        for name in OF_LOGITS:
            attention_kwargs.pop(name, None)
        self._check_keywords(attention_kwargs, input_ids)
        attention_mask, cache, images = self._by_place(
            attention_mask, past_key_values, cache, images
        )
        wanted = self._wanted(output_hidden_states, output_attentions, return_dict)
        others = (inputs_embeds, pixel_values, images, labels, image_features, shift_labels)
        is_drawn = prompt_length is not None and prompt_length <= 0
        is_step = is_drawn and position_ids is not None and all(other is None for other in others)
        if is_step and is_ready(cache, attention_mask, self.config._attn_implementation):
            assert input_ids is not None and position_ids is not None and cache is not None
            return self._decode(
                input_ids, attention_mask, position_ids, cache, wanted, attention_kwargs
            )
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        attention_kwargs = attention_keywords(attention_kwargs)
        pixel_values, features = self._given_images(pixel_values, images, image_features)
        given_images = pixel_values if features is None else features
        num_images = 0 if given_images is None else given_images.shape[0]
        cache = self._cache_to_use(cache, use_cache)
        past_length = cached_length(cache)

        ids = input_ids if inputs_embeds is None else self._ids_of(inputs_embeds, num_images)
        assert ids is not None
        check_rows_of_cache(cache, past_length, ids)
        labels, after = _labels_and_one_after(labels, shift_labels)
        follows = next_position(cache, past_length) if position_ids is None else None
        given = UnexpandedBatch(ids, attention_mask, position_ids, labels, after, past_length, follows)
        rows = expand_image_placeholders(given, self.image_format, num_images, prompt_length, num_items_in_batch)
        length = rows.input_ids.shape[1]
        self._check_growth(ids.shape[1], length, inputs_embeds, wanted.states)
        check_room(cache, past_length + length)

        embeds_BRD = self.embedding(rows.input_ids) if inputs_embeds is None else inputs_embeds
        embeds_BRD, features = self._merge_images(
            embeds_BRD, rows.image_mask, pixel_values, features, past_length
        )
        packed = rows.packed_position_ids
        mask = causal_mask(self.config, embeds_BRD, rows, cache, past_length)
        if packed is not None:
            attention_kwargs = {"position_ids": packed, **attention_kwargs}
        hidden_BRD, states = self._run_layers(
            embeds_BRD, rows.position_ids, mask, cache, past_length, wanted, attention_kwargs
        )
        if cache is not None:
            remember_rows(cache, rows, past_length)
        return wanted.output(
            hidden_BRD,
            states,
            cache,
            labels=rows.labels,
            image_hidden_states=features,
            attention_mask=rows.attention_mask,
        )

    forward_names = names_of(forward)

    def _wanted(self, states: bool | None, weights: bool | None, as_dict: bool | None) -> Wanted:
        return Wanted(
            bool(self.config.output_hidden_states if states is None else states),
            self._weights_to_keep(self.encoder.layers, weights),
            wants_dict(as_dict, self.config),
        )

    def _run_layers(
        self, embeds_BRD, position_ids, mask, cache, past_length, wanted: Wanted, kwargs
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """``past_length``: ``None`` if the cache holds something, but how much is not known."""
        cos, sin = self.rotary_pos_emb(position_ids, embeds_BRD.dtype)
        if wanted.weights is not None:
            kwargs = {"attention_collector": wanted.weights, **kwargs}
        cache_update = None
        if cache is not None:
            where: tuple = ()
            columns = kwargs.pop("cache_position", None)
            if WANTS_CACHE_POSITION and is_static(cache):
                if columns is None:
                    first = cached_length(cache) if past_length is None else past_length
                    columns = torch.arange(embeds_BRD.shape[1], device=embeds_BRD.device) + first
                where = ({"cache_position": columns},)
            cache_update = past_length == 0, where
        return self.encoder(
            embeds_BRD, cos, sin, mask, cache, cache_update, kwargs, keep_states=wanted.states
        )

    def _decode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        cache: Cache,
        wanted: Wanted,
        attention_kwargs: dict,
    ) -> ChatGLMModelOutput | tuple:
        """Run the decoder over ids that generation drew: nothing is checked or grown, and nothing
        waits for the device. With a static cache the mask is made before, so that this is one graph
        for all steps."""
        columns = attention_kwargs.get("cache_position")
        attention_kwargs = attention_keywords(attention_kwargs)
        if columns is not None:
            attention_kwargs["cache_position"] = columns
        embeds_BND = self.embedding(input_ids)
        past_length = None if is_static(cache) else cached_length(cache)
        mask = attention_mask
        if past_length is not None:
            mask = mask_of_drawn(self.config, embeds_BND, attention_mask, cache, past_length)
        hidden_BND, states = self._run_layers(
            embeds_BND, position_ids, mask, cache, past_length, wanted, attention_kwargs
        )
        return wanted.output(hidden_BND, states, cache)

    def _check_growth(
        self, given: int, length: int, inputs_embeds: Tensor | None, wants_states: bool
    ) -> None:
        """Warn of hidden states that are longer than the rows as given, once; refuse to train on
        them, and embeddings of such rows, which cannot grow."""
        if torch.compiler.is_exporting():
            torch._check(inputs_embeds is None or length == given)
            return
        if length == given:
            return
        grows = f"rows of {given} ids take {length} positions here"
        cure = "give grown rows, as this model's processor makes them"
        if inputs_embeds is not None:
            raise ValueError(f"{grows}, and inputs_embeds cannot be grown: {cure}, or input_ids")
        said = (
            f"{grows}, and so do their hidden states: read by the rows as given (as reward models "
            f"and value heads do) they are those inside images; {cure}"
        )
        if wants_states and self.training:
            raise ValueError(said)
        if wants_states and not self._has_named_growth:
            # Not warning_once, which would say it again for every other length.
            self._has_named_growth = True
            logger.warning(said)

    def get_image_features(  # type: ignore[override]  # other models of ours hand on all options
        self,
        pixel_values: Tensor,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutputWithPooling | tuple | Tensor:
        """Encode images ``(N, 3, S, S)``, as transformers' own models do.

        Returns:
            With transformers 5: ``pooler_output`` ``(N, num_image_tokens + 2, D)``, what takes an
            image's place in its row; ``last_hidden_state`` ``(N, T, V)`` of the tower; on request
            ``hidden_states`` and ``attentions`` of its layers. With transformers 4: what
            ``pooler_output`` would be, unless ``return_dict`` is given.
        """
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        layers = self.vision.transformer.layers
        record = TowerRecord(
            states=[] if output_hidden_states else None,
            weights=self._weights_to_keep(layers, output_attentions),
        )
        features_NKD = self._encode(pixel_values, record)
        if return_dict is None and Version(VERSION).major < 5:
            return features_NKD
        output = BaseModelOutputWithPooling(
            last_hidden_state=record.last_state,
            pooler_output=features_NKD,
            hidden_states=None if record.states is None else tuple(record.states),
            attentions=None if record.weights is None else tuple(record.weights),
        )
        return output if wants_dict(return_dict, self.config) else output.to_tuple()

    def _encode(self, pixel_values: Tensor, record: TowerRecord | None = None) -> Tensor:
        """Features ``(N, num_image_tokens + 2, D)`` of images of the configured size."""
        vision = self.vision.vision_config
        wanted = (vision.in_channels, vision.image_size, vision.image_size)
        if tuple(pixel_values.shape[1:]) != wanted:
            raise ValueError(
                f"images have shape {tuple(pixel_values.shape)} but this model takes "
                f"(number of images, {', '.join(map(str, wanted))}): resize them with this "
                "model's image processor; positions are not interpolated"
            )
        return self._run_tower(pixel_values, record)

    def _run_tower(self, pixels_N3SS: Tensor, record: TowerRecord | None = None) -> Tensor:
        # Frameworks make what goes into a layer require grad, for its checkpoint's sake: a frozen
        # tower would then keep all its activations for a backward pass that leads nowhere.
        leads_on = torch.is_grad_enabled() and (
            pixels_N3SS.requires_grad
            or any(parameter.requires_grad for parameter in self.vision.parameters())
        )
        with torch.set_grad_enabled(leads_on):
            return self.vision(pixels_N3SS, *(() if record is None else (record,)))

    def _given_images(self, pixel_values, images, features) -> tuple[Tensor | None, Tensor | None]:
        """The images, or their features; ``None`` for what there is not."""
        if isinstance(features, BaseModelOutputWithPooling):
            features = features.pooler_output
        if features is None:
            return self._one_image_tensor(pixel_values, images), None
        if pixel_values is not None or images is not None:
            number = len(images if pixel_values is None else pixel_values)
            raise ValueError(
                f"{number} images were given as pixel_values and {len(features)} as "
                "image_features: give those of a batch in one form"
            )
        # Begin and end of an image are features, too.
        wanted = (self.vision.vision_config.num_image_tokens + 2, self.config.hidden_size)
        if tuple(features.shape[1:]) != wanted:
            raise ValueError(
                f"image_features have shape {tuple(features.shape)} but this model takes "
                f"(number of images, {wanted[0]}, {wanted[1]}): give what get_image_features or "
                "the output's image_hidden_states gave"
            )
        return None, features

    def _merge_images(
        self, embeds_BRD, image_mask_BR, pixel_values, features_NKD, past_length
    ) -> tuple[Tensor, Tensor | None]:
        """The embeddings with the images in their places, and the images' features, if any."""
        if pixel_values is not None:
            features_NKD = self._encode(pixel_values.to(embeds_BRD.device, embeds_BRD.dtype))
        if features_NKD is not None:
            if features_NKD.shape[0] == 0:
                return embeds_BRD, None
            merged = features_NKD.to(embeds_BRD.device, embeds_BRD.dtype)
            return embeds_BRD.masked_scatter(image_mask_BR[..., None], merged), features_NKD
        if past_length == 0 and must_run_on_every_process(self.vision):
            # Another process may have an image; the smallest stand-in keeps this one in step and
            # changes no number.
            side, channels = self.vision.smallest_side, self.vision.vision_config.in_channels
            blank = embeds_BRD.new_zeros(1, channels, side, side)
            return embeds_BRD + (self._run_tower(blank) * 0).sum().to(embeds_BRD), None
        return embeds_BRD, None

    def _by_place(self, attention_mask, past_key_values, cache, images) -> tuple:
        """Mask, cache and images by these names, or by place in the published order: input_ids,
        images, position_ids, attention_mask. No mask is shaped like images."""
        if self._are_images(attention_mask):
            if images is not None:
                raise ValueError(
                    f"{len(attention_mask)} images were given in the second place and "
                    f"{len(images)} as images: give them once"
                )
            images, attention_mask = attention_mask, None
        if isinstance(past_key_values, Tensor) and attention_mask is None and cache is None:
            attention_mask, past_key_values = past_key_values, None
        return attention_mask, one_cache(past_key_values, cache), images

    def _are_images(self, given) -> bool:
        if isinstance(given, (list, tuple)):
            return all(image is None or self._are_images(image) for image in given)
        if not isinstance(given, Tensor) or not given.is_floating_point() or given.ndim < 3:
            return False
        # A mask of four dimensions has one channel.
        return given.shape[-3] == self.vision.vision_config.in_channels

    def _one_image_tensor(self, pixel_values, images) -> Tensor | None:
        if pixel_values is not None and images is not None:
            raise ValueError("pixel_values and images are two names of one input: give one")
        images = pixel_values if images is None else images
        if images is not None and not isinstance(images, Tensor):
            # The published code's rows without an image have None in their place.
            images = [image for image in images if image is not None]
            kinds = {str(tuple(of.shape)) if isinstance(of, Tensor) else type(of) for of in images}
            if len(kinds) > 1 or not all(isinstance(image, Tensor) for image in images):
                raise ValueError(
                    f"images hold {', '.join(sorted(map(str, kinds)))}: give tensors of one shape, "
                    "as this model's image processor makes them"
                )
            images = torch.stack(images) if images else None
        if images is None or images.shape[0] == 0:
            return None
        if images.ndim != 4:
            raise ValueError(
                f"images have shape {tuple(images.shape)}; give (number of images, channels, side, "
                "side), also for one image"
            )
        return images

    def _cache_to_use(self, past_key_values, use_cache) -> Cache | None:
        checkpointing = any(layer.gradient_checkpointing for layer in self.encoder.layers)
        if self.training and checkpointing:
            # A recomputed layer would enter its keys twice.
            if cached_length(past_key_values):
                raise ValueError(
                    f"past_key_values holds {cached_length(past_key_values)} positions, which "
                    "cannot be used in training with activation checkpointing: disable one of them"
                )
            return None
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if past_key_values is None and use_cache:
            return DynamicCache(config=self.config)
        return past_key_values

    def _ids_of(self, inputs_embeds: Tensor, num_images: int) -> Tensor:
        """Ids that say how long the rows are and, if there are images, where they begin and end."""
        markers = (self.config.boi_token_id, self.config.eoi_token_id)
        text_id = next(i for i in range(3) if i not in markers)
        ids = torch.full(inputs_embeds.shape[:2], text_id, device=inputs_embeds.device)
        if num_images:
            vectors = self.embedding(torch.tensor(markers, device=ids.device))
            for marker, vector in zip(markers, vectors.to(inputs_embeds), strict=True):
                ids = ids.masked_fill((inputs_embeds == vector).all(dim=-1), marker)
            # A graph counts them where it counts those of ids.
            if not torch.compiler.is_compiling() and not (ids == markers[0]).any():
                raise ValueError(
                    f"{num_images} images were given with inputs_embeds, in which 0 positions hold "
                    f"the embedding of the begin-of-image id {markers[0]}: embed the ids of grown "
                    "rows, or give input_ids"
                )
        return ids


class GLM4VForCausalLM(ChatGLMPreTrainedModel, ChatGLMGenerationMixin):  # type: ignore[override]
    """glm-4v with its loss and generation, under the name by which vLLM serves it."""

    _auto_class = "AutoModelForCausalLM"
    # A step of generation with a static cache, and a pass over rows of the grown form.
    _can_compile_fullgraph = True

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith("torch."):
            # FSDP2 derives a class, and save_pretrained would write torch's files, and its name.
            cls.__module__, cls.__name__ = GLM4VForCausalLM.__module__, GLM4VForCausalLM.__name__
        enter_class(cls, "CAUSAL_LM")

    def __init__(self, config: ChatGLMConfig, empty_init: bool = True):
        """``empty_init`` has no effect: only weights that no checkpoint gives are initialized."""
        super().__init__(config)
        # transformers takes it from the class name, which a derived class may lack.
        self.loss_type = "ForCausalLM"
        self.transformer = ChatGLMModel(config)
        self.post_init()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, config=None, **kwargs):
        """As usual; the decoder for the pipeline "feature-extraction", which takes logits else."""
        tasks = getattr(config, PIPELINE_TASK, None), kwargs.get(PIPELINE_TASK)
        options = kwargs | {"config": config}
        loaded = super().from_pretrained(pretrained_model_name_or_path, *model_args, **options)
        if "feature-extraction" not in tasks:
            return loaded
        # Loaded as a whole: adapters of the folder name the modules of the whole model.
        model, *info = loaded if isinstance(loaded, tuple) else (loaded,)
        decoder = model.transformer
        if (placed := getattr(model, "hf_device_map", None)) is not None:
            decoder.hf_device_map = placed  # a pipeline moves what has none
        return (decoder, *info) if info else decoder

    def save_pretrained(self, save_directory, *args, **kwargs):
        given = self.generation_config
        self.generation_config = known_options(given)
        try:
            super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            self.generation_config = given

    def get_output_embeddings(self) -> nn.Module:
        return self.transformer.output_layer

    def set_output_embeddings(self, value: nn.Module) -> None:
        # Resizing makes a plain Linear.
        if type(value) is nn.Linear:
            layer: Any = with_loss(value)
            layer._is_hf_initialized = True  # post_init would draw its weights anew
        self.transformer.output_layer = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        pixel_values: Tensor | None = None,
        images: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        skip_logits: bool | None = None,
        return_last_logit: bool = False,
        **options,
    ) -> GLM4VCausalLMOutput | tuple:
        """Predict the next token at every position. Inputs, and ``options``, as in
        :meth:`ChatGLMModel.forward`.

        Args:
            labels: ``(B, L)`` int64, aligned with ``input_ids`` (shifted here), -100 where nothing
                is learned; any device. ``(B, K)`` with ``logits_to_keep``: cut to the ``K`` kept
                positions, of which each learns the label of the next kept one.
            logits_to_keep: Positions of the logits that are returned: the number of last ones (0:
                all), indices ``(K,)``, or a boolean mask ``(L,)``. Labels ``(B, L)`` count at all
                positions all the same.
            num_items_in_batch: Divisor of the summed loss; default the supervised tokens here.
            skip_logits: With labels, compute the loss without keeping logits; ``logits`` is then
                ``None``. Default: the config's ``skip_logits`` in training, else ``False``.
            shift_labels: ``(B, L)``, in place of ``labels``: at each id the label of the next one.
                Not named above, because a Trainer would want it in every batch of an evaluation.
            return_last_logit: The published code's name for ``logits_to_keep=1``.

        Returns:
            ``loss`` fp32; ``logits`` ``(B, R, V)`` in the dtype of the weights, ``R`` the length
            of the grown rows; ``image_hidden_states`` ``(N, num_image_tokens + 2, D)``.
        """
        self._check_keywords(options, input_ids)
        if self.training:
            refuse_split_model(self)
        given = input_ids if inputs_embeds is None else inputs_embeds
        kept = KeptColumns.of(1 if return_last_logit else logits_to_keep)
        are_cut = kept.are_cut(labels, given)
        if are_cut:
            assert labels is not None and given is not None
            if options.get("shift_labels") is not None:
                raise ValueError(
                    f"labels were cut to {labels.shape[1]} positions, and there are shift_labels "
                    "beside them: give one of them"
                )
            options["shift_labels"] = kept.shifted_labels(labels, given.shape[1])
            labels = None
        output = self.transformer(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            pixel_values,
            images,
            labels,
            return_dict=True,
            num_items_in_batch=num_items_in_batch,
            **options,
        )
        if skip_logits is None:
            skip_logits = self.config.skip_logits and self.training
        length = output.last_hidden_state.shape[1]
        kept.check(given, length, self._image_token_ids() if are_cut else ())
        if output.labels is None and num_items_in_batch is not None:
            self._check_loss_outside(given, length)
        loss, logits = self._loss_and_logits(
            output.last_hidden_state, output.labels, num_items_in_batch, kept, are_cut, skip_logits
        )
        result = GLM4VCausalLMOutput(
            loss=loss,
            logits=logits,
            **cache_kwarg(getattr(output, CACHE_KEYWORD)),
            hidden_states=output.hidden_states,
            attentions=output.attentions,
            image_hidden_states=output.image_hidden_states,
        )
        return result if wants_dict(return_dict, self.config) else result.to_tuple()

    forward_names = names_of(forward, ChatGLMModel.forward)

    def _check_loss_outside(self, given: Tensor | None, length: int) -> None:
        """Raise ``ValueError`` if whoever keeps the labels gets logits at other positions, or
        ``RuntimeError`` if a Trainer finds a wrapper's name in place of ours."""
        if torch.compiler.is_compiling() and self._compiled_call_impl is None:
            torch._assert_async(
                torch.zeros((), dtype=torch.bool),
                "a Trainer that smooths labels (label_smoothing_factor) does not shift those of a "
                "model that torch.compile has wrapped, and the model cannot tell this from another "
                "loss outside of it (compute_loss_func): in place of torch_compile call "
                "model.compile() before (get_base_model().compile() inside peft)",
            )
        if given is not None and given.shape[1] != length:
            raise ValueError(
                f"rows of {given.shape[1]} ids take {length} positions here, and there is "
                "num_items_in_batch without labels, as of a Trainer that computes the loss itself "
                "(label_smoothing_factor, compute_loss_func): its labels are as long as the ids "
                "and do not fit the logits; give expanded prompts with their labels, as this "
                "model's processor makes them"
            )

    def _loss_and_logits(
        self, hidden_BRD, labels, num_items_in_batch, kept: KeptColumns, are_cut, skip_logits
    ) -> tuple[Tensor | None, Tensor | None]:
        output_layer = self.transformer.output_layer
        if labels is None:
            return None, output_layer(kept.take(hidden_BRD))
        if skip_logits:
            chunked = labels, num_items_in_batch, self.config.loss_chunk_size
            if computes_loss(output_layer):
                return output_layer(hidden_BRD, *chunked), None
            # wrapped by peft, or quantized
            return chunked_next_token_loss(output_layer, hidden_BRD, *chunked), None
        if are_cut:
            logits = output_layer(kept.take(hidden_BRD))
            following = F.pad(kept.take(labels[:, 1:]), (1, 0), value=-100)
            return next_token_loss(logits, following, num_items_in_batch), logits
        logits = output_layer(hidden_BRD)
        return next_token_loss(logits, labels, num_items_in_batch), kept.take(logits)


ChatGLMForConditionalGeneration = GLM4VForCausalLM  # as published
enter_class(GLM4VForCausalLM, "CAUSAL_LM")
# By its model type: TRL's OnlineDPO asks for it before it gives images to a model.
enter_class(GLM4VForCausalLM, "IMAGE_TEXT_TO_TEXT", key=ChatGLMConfig.model_type)


class ChatGLMForSequenceClassification(ScoresRows, ChatGLMPreTrainedModel):
    """glm-4v with a linear head, ``score``, on each row's last token, in place of the output
    projection: classifiers and reward models."""

    _auto_class = "AutoModelForSequenceClassification"
    _keys_to_ignore_on_load_unexpected = [r"transformer\.output_layer\.weight"]
    forward_names = tuple(
        name for name in names_of(ScoresRows.forward, ChatGLMModel.forward) if name not in OF_TOKENS
    )

    def __init__(self, config: ChatGLMConfig, empty_init: bool = True):
        """``empty_init``: as in :class:`GLM4VForCausalLM`."""
        super().__init__(config)
        self.loss_type = "ForSequenceClassification"
        assert config.num_labels is not None
        self.num_labels = config.num_labels
        self.transformer = ChatGLMModel(config)
        del self.transformer.output_layer
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)
        self.post_init()


enter_class(ChatGLMForSequenceClassification, "SEQUENCE_CLASSIFICATION")


def _labels_and_one_after(
    labels: Tensor | None, shift_labels: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    if shift_labels is None:
        return labels, None
    # As transformers does: they win over labels. Nothing predicts the first id.
    return F.pad(shift_labels[:, :-1], (1, 0), value=-100), shift_labels[:, -1:]


def _over_room(weights: list[Tensor], cache: Cache | None) -> tuple[Tensor, ...]:
    """With 0 for the positions of a static cache that are empty, which were not looked at."""
    room = room_of(cache) or 0
    # Padding by nothing would still be another tensor, whose gradients nobody sees.
    return tuple(F.pad(w, (0, room - w.shape[-1])) if room > w.shape[-1] else w for w in weights)
