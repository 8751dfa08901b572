"""glm-4v: a GLM-4 language model with an EVA2-CLIP vision tower (the image encoder).

The "published code" is the one in the model repository of glm-4v-9b. This code has the same
parameter names and computes the same numbers. It also supports several images per sequence,
padding and packing.

A prompt has one placeholder id for each image (an unexpanded prompt), or one id for each token of
an image (an expanded prompt). ``forward`` takes both, and expands placeholders first
(:mod:`image_layout`).
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
    check_cache_batch_size,
    check_cache_capacity,
    compute_next_position,
    is_static,
    record_pass,
    static_capacity,
)
from .checkpointing import CheckpointedLayer
from .class_lists import add_to_mapping_names
from .classification_chatglm import PER_TOKEN_KWARGS, SequenceScoringMixin
from .configuration_chatglm import PIPELINE_TASK_KEYWORD, ChatGLMConfig, require_adapter_support
from .generation_chatglm import ChatGLMGenerationMixin, keep_known_options
from .image_checks import InputBatch, PromptFormat, is_exporting
from .image_layout import expand_image_placeholders
from .keywords import (
    CACHE_KEYWORD,
    LOGITS_KWARGS,
    NEEDS_CACHE_POSITION,
    TRANSFORMERS_VERSION,
    cache_kwarg,
    check_forward_kwargs,
    parameter_names,
    resolve_cache,
    resolve_return_dict,
    select_attention_kwargs,
)
from .loss import (
    LogitsToKeep,
    chunked_next_token_loss,
    fuse_cross_entropy,
    has_fused_cross_entropy,
    next_token_loss,
)
from .masks import cache_allows_decode_step, causal_mask, decode_mask
from .sharding import (
    gathers_weights,
    must_run_on_every_process,
    refuse_device_map_in_several_processes,
)
from .visual import EVA2CLIPModel, PatchEmbedding, VisionOutputCollector

logger = logging.get_logger(__name__)

# A name's suffix lists the tensor's dimensions, e.g. embeds_BRD is (B, R, D): B sequences, L length
# of input_ids, R length with image placeholders expanded, D hidden size, H query heads, G key-value
# heads, C channels of a head, F rotated pairs of a head (C / 4), Q new tokens of a decode step, N
# images, S side of an image in pixels, T tokens of an image (with begin and end), P cache entries
# before this pass, V vocabulary.


class Embedding(nn.Module):
    """The token embedding."""

    def __init__(self, config: ChatGLMConfig):
        super().__init__()
        # Typed as nn.Module, because set_input_embeddings may replace it by another class.
        self.word_embeddings: nn.Module = nn.Embedding(config.padded_vocab_size, config.hidden_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.word_embeddings(input_ids)


class RotaryEmbedding(nn.Module):
    """Rotary position embedding of the first half of each head's channels."""

    # Most checkpoints contain this buffer. Its values lack the factor rope_ratio and may be
    # rounded, so forward computes the frequencies itself.
    inv_freq: Tensor

    def __init__(self, config: ChatGLMConfig):
        super().__init__()
        self.config = config
        self.register_buffer("inv_freq", self.published_inv_freq().to(torch.get_default_dtype()))

    def published_inv_freq(self) -> Tensor:
        """Return the values ``(F,)`` that checkpoints contain."""
        return self._frequencies(base=10000.0)

    def _frequencies(self, base: float, device=None) -> Tensor:
        num_rotated = self.config.kv_channels // 2
        exponents = torch.arange(0, num_rotated, 2, dtype=torch.float32, device=device)
        return 1.0 / base ** (exponents / num_rotated)

    def forward(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Compute the cosines and sines for :func:`apply_rotary`.

        Args:
            position_ids: ``(B, R)``.
            dtype: The dtype of the results, unless ``config.rope_in_fp32`` keeps them in fp32.

        Returns:
            Cosines and signed sines, ``(B, R, 1, C)`` each. The sine is negative for the first
            channel of a pair. Channels that are not rotated have a cosine of 1 and a sine of 0.
        """
        frequencies_F = self._frequencies(10000.0 * self.config.rope_ratio, position_ids.device)
        angles_BRF = (position_ids[..., None].float() * frequencies_F).float()
        dtype = torch.float32 if self.config.rope_in_fp32 else dtype
        cos, sin = angles_BRF.cos().to(dtype), angles_BRF.sin().to(dtype)
        padding = 0, self.config.kv_channels - 2 * len(frequencies_F)  # for F.pad
        cos, sin = (x.unflatten(-1, (-1, self.config.rotary_distance)) for x in (cos, sin))
        cos_BRC = F.pad(torch.stack((cos, cos), dim=-2).flatten(-3), padding, value=1.0)
        sin_BRC = F.pad(torch.stack((-sin, sin), dim=-2).flatten(-3), padding)
        return cos_BRC[:, :, None], sin_BRC[:, :, None]


def apply_rotary(x_BRHC: Tensor, cos_BR1C: Tensor, sin_BR1C: Tensor, distance: int) -> Tensor:
    """Rotate pairs of channels that are ``distance`` apart (``ChatGLMConfig.rotary_distance``)."""
    partners_BRHC = x_BRHC.unflatten(-1, (-1, 2, distance)).flip(-2).flatten(-3)
    return (x_BRHC * cos_BR1C + partners_BRHC * sin_BR1C).to(x_BRHC.dtype)


class RMSNorm(nn.Module):
    """RMS norm, which multiplies by the weight in fp32 and then casts to the dtype of ``x``."""

    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps).to(x.dtype)


class SelfAttention(nn.Module):
    """Causal grouped-query attention with one fused projection (q, then k, then v)."""

    is_causal = True

    def __init__(self, config: ChatGLMConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        num_heads, num_kv_heads = config.num_attention_heads, config.multi_query_group_num
        self.head_dim = config.kv_channels
        self.num_key_value_groups = num_heads // num_kv_heads
        self.split_sizes = num_heads, num_kv_heads, num_kv_heads  # numbers of heads
        has_qkv_bias = config.add_bias_linear or config.add_qkv_bias
        self.query_key_value = nn.Linear(
            config.hidden_size, sum(self.split_sizes) * config.kv_channels, bias=has_qkv_bias
        )
        self.dense = nn.Linear(
            num_heads * config.kv_channels, config.hidden_size, bias=config.add_bias_linear
        )

    def forward(
        self, x_BRD, cos, sin, attention_mask, past_key_values, cache_update, attention_kwargs
    ) -> Tensor:
        """Compute the attention output, and append keys and values to the cache.

        Args:
            cache_update: With a cache, ``(cache_was_empty, update_args)``: whether the cache was
                empty before this pass, and a tuple of further arguments for ``Cache.update``.
            attention_kwargs: Keywords for :func:`attend`.
        """
        heads_BRHC = self.query_key_value(x_BRD).unflatten(-1, (-1, self.head_dim))
        query, key, value = (x.transpose(1, 2) for x in self.rotate(heads_BRHC, cos, sin))
        if past_key_values is not None:
            cache_was_empty, update_args = cache_update
            new_key_value = key, value
            key, value = past_key_values.update(key, value, self.layer_idx, *update_args)
            if cache_was_empty:
                key, value = new_key_value  # a static cache returns its unused entries, too
        inputs = query, key, value, attention_mask, self.config._attn_implementation
        return self.dense(attend(self, *inputs, **attention_kwargs))

    def rotate(self, heads_BRHC: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Split the projection's output into rotated queries, rotated keys, and values.

        Each has the shape ``(B, R, heads, C)``.
        """
        num_heads, num_kv_heads, _ = self.split_sizes
        sizes = num_heads + num_kv_heads, num_kv_heads
        query_key_BRHC, value_BRGC = heads_BRHC.split(sizes, dim=2)
        rotated_BRHC = apply_rotary(query_key_BRHC, cos, sin, self.config.rotary_distance)
        return *rotated_BRHC.split((num_heads, num_kv_heads), dim=2), value_BRGC


class MLP(nn.Module):
    """SwiGLU with one fused projection (gate, then up)."""

    def __init__(self, config: ChatGLMConfig):
        super().__init__()
        hidden_size, ffn_size = config.hidden_size, config.ffn_hidden_size
        bias = config.add_bias_linear
        self.dense_h_to_4h = nn.Linear(hidden_size, 2 * ffn_size, bias=bias)
        self.dense_4h_to_h = nn.Linear(ffn_size, hidden_size, bias=bias)

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
    """The decoder layers and the final norm."""

    def __init__(self, config: ChatGLMConfig):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(GLMBlock(config, i) for i in range(config.num_layers))
        self.final_layernorm = RMSNorm(config.hidden_size, config.layernorm_epsilon)

    def forward(
        self, x_BRD: Tensor, *attention_inputs, collect_hidden_states: bool = False
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Run all layers.

        Returns:
            The normalized output ``(B, R, D)``, and the hidden states: with
            ``collect_hidden_states`` the input of every layer and the output of the last layer,
            else ``None``.
        """
        hidden_states = [x_BRD]
        # With assistant_early_exit, generate sets config.num_layers to fewer than len(self.layers).
        for layer in islice(self.layers, self.config.num_layers):
            x_BRD = layer(x_BRD, *attention_inputs)
            if collect_hidden_states:
                hidden_states.append(x_BRD)
        normalized_BRD = self.final_layernorm(x_BRD)
        return normalized_BRD, tuple(hidden_states) if collect_hidden_states else None


class ChatGLMPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialization of all glm-4v models."""

    config: ChatGLMConfig
    transformer: Any  # the decoder (ChatGLMModel), in models with a head
    forward_names: tuple[str, ...]  # the keywords that this class's forward takes
    config_class = ChatGLMConfig
    base_model_prefix = "transformer"
    main_input_name = "input_ids"
    input_modalities = ("image", "text")  # type: ignore[assignment]  # as transformers' own models
    supports_gradient_checkpointing = True
    _no_split_modules = ["GLMBlock", "TransformerLayer", "PatchEmbedding", "GLU"]
    _skip_keys_device_placement = ["past_key_values", "cache"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    # Some checkpoints lack this buffer, which forward does not use.
    _keys_to_ignore_on_load_missing = [r"rotary_pos_emb\.inv_freq"]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, config=None, **kwargs):
        """Load a model as transformers does.

        Args:
            config: A config; the classes of the published code and of vLLM are accepted, too.

        Raises:
            ImportError: The folder has adapters that the installed transformers cannot load.
        """
        require_adapter_support(pretrained_model_name_or_path, kwargs)
        if isinstance(config, PretrainedConfig):
            config = ChatGLMConfig.from_config(config)
        options = kwargs | {"config": config}
        return super().from_pretrained(pretrained_model_name_or_path, *model_args, **options)

    def load_adapter(self, peft_model_id=None, *args, **kwargs):
        """Load an adapter as transformers does.

        Raises:
            ImportError: The installed transformers cannot load adapters of this model.
        """
        require_adapter_support(peft_model_id, {}, are_adapters=True)
        return super().load_adapter(peft_model_id, *args, **kwargs)

    def _check_keywords(self, kwargs: dict[str, Any], input_ids: Tensor | None) -> None:
        """Raise ``ValueError`` for a keyword that this class's ``forward`` does not take."""
        token_types, ids = kwargs.get("token_type_ids"), input_ids
        # OpenRLHF passes token_type_ids that are 1 at image tokens and 0 elsewhere: ignore these,
        # and refuse any other token_type_ids.
        if (
            isinstance(token_types, Tensor)
            and isinstance(ids, Tensor)
            and token_types.shape == ids.shape
            and not bool(token_types.ne(ids == self.config.image_token_id).any())
        ):
            del kwargs["token_type_ids"]
        check_forward_kwargs(kwargs, type(self).__name__, self.forward_names)

    def get_image_features(self, pixel_values: Tensor, **options):
        """Encode images, see :meth:`ChatGLMModel.get_image_features`."""
        return self.transformer.get_image_features(pixel_values, **options)

    @classmethod
    def _from_config(cls, config, **kwargs):
        return super()._from_config(ChatGLMConfig.from_config(config), **kwargs)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        # transformers would search this file for the name ALL_ATTENTION_FUNCTIONS, which is in
        # attention.py. Tower and decoder read the implementation from the config in every forward.
        return True

    def _make_attention_collector(
        self, layers: nn.ModuleList, output_attentions: bool | None
    ) -> list[Tensor] | None:
        """Return an empty list, to which ``layers`` will append their attention weights.

        Return ``None`` if the caller requested no attention weights, or if the attention
        implementation computes none.

        Raises:
            ValueError: The model trains, and some of ``layers`` recompute their activations.
        """
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if not output_attentions:
            return None
        implementation = self.config._attn_implementation
        if implementation != "eager":
            # transformers' own models warn and return none, too.
            logger.warning_once(
                f"output_attentions=True: the attention implementation {implementation!r} computes "
                "no attention weights, so none are returned; choose another one, e.g. by "
                'model.set_attn_implementation("eager")'
            )
            return None
        num_recomputed = sum(bool(layer.gradient_checkpointing) for layer in layers)
        if num_recomputed and self.training and torch.is_grad_enabled():
            raise ValueError(
                f"output_attentions=True in training, where {num_recomputed} of {len(layers)} "
                "layers recompute their activations: attention weights of a recomputed layer have "
                "no gradients; disable activation checkpointing or leave output_attentions out"
            )
        return []

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize weights: normal with ``initializer_range``, biases 0, norms 1."""
        normal_weights: list[Tensor] = []
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.Embedding)):
            normal_weights = [module.weight]
        elif isinstance(module, (RMSNorm, nn.LayerNorm)):
            nn.init.ones_(module.weight)
        elif isinstance(module, PatchEmbedding):
            normal_weights = [module.cls_embedding]
        elif isinstance(module, EVA2CLIPModel):
            normal_weights = [module.boi, module.eoi]
        elif isinstance(module, RotaryEmbedding):
            module.inv_freq.copy_(module.published_inv_freq())
        for weight in normal_weights:
            nn.init.normal_(weight, std=self.config.initializer_range)
        if isinstance(bias := getattr(module, "bias", None), Tensor):
            nn.init.zeros_(bias)


@dataclass
class ChatGLMModelOutput(BaseModelOutputWithPast):
    """Output of the decoder, with the expanded labels and mask.

    Attributes:
        labels: ``(B, R)`` int64. If ``shift_labels`` were passed, there is one more column: the
            label that the last token predicts.
        image_hidden_states: ``(N, T, D)``, ``T = num_image_tokens + 2``: the image features.
        attention_mask: ``(B, P + R)``; ``None`` if none is needed.
    """

    labels: Tensor | None = None
    image_hidden_states: Tensor | None = None
    attention_mask: Tensor | None = None


@dataclass
class GLM4VCausalLMOutput(CausalLMOutputWithPast):
    """Output with loss and logits; ``image_hidden_states`` as in :class:`ChatGLMModelOutput`."""

    image_hidden_states: Tensor | None = None


class OutputOptions(NamedTuple):
    """Outputs that the caller requested.

    Attributes:
        hidden_states: Whether to return hidden states.
        attentions: List to which layers append their attention weights; ``None`` if none are
            requested.
        return_dict: Whether to return an output object instead of a tuple.
    """

    hidden_states: bool
    attentions: list[Tensor] | None
    return_dict: bool

    def make_output(
        self, hidden_BRD: Tensor, hidden_states: tuple | None, cache: Cache | None, **fields
    ) -> ChatGLMModelOutput | tuple:
        """Build the decoder's output. Its other fields are passed as ``fields``."""
        attentions = None
        if self.attentions is not None:
            attentions = _pad_to_cache_length(self.attentions, cache)
        output = ChatGLMModelOutput(
            last_hidden_state=hidden_BRD,
            **cache_kwarg(cache),  # its name depends on the version of transformers
            hidden_states=hidden_states,
            attentions=attentions,
            **fields,
        )
        return output if self.return_dict else output.to_tuple()


class ChatGLMModel(ChatGLMPreTrainedModel):
    """The model without its loss: embedding, decoder layers, vision tower and output projection."""

    _has_warned_of_expansion = False

    def __init__(self, config: ChatGLMConfig):
        super().__init__(config)
        self.embedding = Embedding(config)
        self.rotary_pos_emb = RotaryEmbedding(config)
        self.encoder = GLMTransformer(config)
        # With labels, this layer returns a loss. The type is nn.Module, because peft wraps the
        # layer and quantizers replace it.
        self.output_layer: nn.Module = fuse_cross_entropy(
            nn.Linear(config.hidden_size, config.padded_vocab_size, bias=False)
        )
        self.vision = EVA2CLIPModel(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embedding.word_embeddings = value

    @property
    def prompt_format(self) -> PromptFormat:
        """The ids that mark images, and the config's limits on prompts."""
        return PromptFormat(
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
        """Run the decoder over sequences of text and images, with causal attention throughout.

        Image placeholders are expanded first, so outputs have the expanded length ``R``.

        Args:
            input_ids: ``(B, L)`` int64, unexpanded or expanded. Exclusive with ``inputs_embeds``.
            attention_mask: ``(B, P + L)``, 0 at padding and 1 elsewhere.
            position_ids: ``(B, L)``. By default they are computed from the mask. If you pass them
                without a mask or with a mask of ones, each 0 begins a new packed sample. Samples
                of one sequence do not attend to each other.
            past_key_values: A ``Cache``. ``input_ids`` that continue it may have new images. Pass
                ``position_ids`` if another model filled the cache, or if it was cropped.
            inputs_embeds: ``(B, L, D)`` of expanded prompts. Image features replace the embeddings
                between a begin-of-image id and its end-of-image id, both included.
            pixel_values: ``(N, 3, S, S)``, the images of all sequences in the order of their
                begin-of-image ids. ``None`` or empty: no images.
            images: The published code's name of ``pixel_values``.
            cache: The name of ``past_key_values`` since transformers 5.24.
            labels: ``(B, L)``. The output has the expanded labels; no loss is computed here.
            output_hidden_states: Also return the input of every layer and the output of the last
                layer, before the final norm.
            output_attentions: Also return the weights ``(B, H, R, P + R)`` of each layer. Only
                eager attention computes them; with any other implementation the model warns and
                returns none.
            prompt_length: Number of columns of ``input_ids`` that are prompt. All later columns are
                generated, and begin- and end-of-image ids among them are ordinary tokens.
            image_features: ``(N, T, D)``, in place of ``pixel_values``: the output of
                :meth:`get_image_features`, or its ``pooler_output``. The vision tower does not run.
                Under ZeRO-3, pass features in every process (without images, ``N = 0``) or in none.
            shift_labels: ``(B, L)``, in place of ``labels``: for each token the label of the next
                token, as context parallelism passes them.
            num_items_in_batch: The number of labels by which the caller divides the summed loss. It
                is only checked here: an error if it may count labels inside images, which the loss
                ignores.
            attention_kwargs: Keywords of packed attention (see :mod:`keywords`). Keywords about
                logits, such as ``logits_to_keep``, are ignored.

        Raises:
            ValueError: The inputs contradict each other; the message has the numbers and the cure.
        """
        for name in LOGITS_KWARGS:
            attention_kwargs.pop(name, None)
        self._check_keywords(attention_kwargs, input_ids)
        attention_mask, cache, images = self._resolve_positional_args(
            attention_mask, past_key_values, cache, images
        )
        options = self._output_options(output_hidden_states, output_attentions, return_dict)
        other_inputs = (inputs_embeds, pixel_values, images, labels, image_features, shift_labels)
        # generate passes prompt_length 0 if all of input_ids are generated tokens.
        is_decode_step = prompt_length is not None and prompt_length <= 0
        is_decode_step = is_decode_step and position_ids is not None
        is_decode_step = is_decode_step and all(value is None for value in other_inputs)
        if is_decode_step and cache_allows_decode_step(
            cache, attention_mask, self.config._attn_implementation
        ):
            assert input_ids is not None and position_ids is not None and cache is not None
            return self._decode_step(
                input_ids, attention_mask, position_ids, cache, options, attention_kwargs
            )
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        attention_kwargs = select_attention_kwargs(attention_kwargs)
        pixel_values, features = self._resolve_images(pixel_values, images, image_features)
        pixels_or_features = pixel_values if features is None else features
        num_images = 0 if pixels_or_features is None else pixels_or_features.shape[0]
        cache = self._choose_cache(cache, use_cache)
        past_length = cached_length(cache)

        ids = input_ids if inputs_embeds is None else self._ids_of_embeds(inputs_embeds, num_images)
        assert ids is not None
        check_cache_batch_size(cache, past_length, ids)
        labels, last_shift_label = _unshift_labels(labels, shift_labels)
        next_position = None
        if position_ids is None:
            next_position = compute_next_position(cache, past_length)
        inputs = InputBatch(
            ids, attention_mask, position_ids, labels, last_shift_label, past_length, next_position
        )
        if inputs_embeds is not None:
            prompt_length = None  # the caller's does not count peft's virtual tokens before it
        batch = expand_image_placeholders(
            inputs, self.prompt_format, num_images, prompt_length, num_items_in_batch
        )
        length = batch.input_ids.shape[1]
        self._check_expanded_length(ids.shape[1], length, inputs_embeds, options.hidden_states)
        check_cache_capacity(cache, past_length + length)

        embeds_BRD = self.embedding(batch.input_ids) if inputs_embeds is None else inputs_embeds
        # Without a prompt_length from generate, a pass over one token is taken for a decode step.
        num_prompt = length - 1 if prompt_length is None else prompt_length
        is_prefill = past_length == 0 or num_prompt > 0
        embeds_BRD, features = self._merge_images(
            embeds_BRD, batch.image_mask, pixel_values, features, is_prefill
        )
        mask = causal_mask(self.config, embeds_BRD, batch, cache, past_length)
        if batch.packed_position_ids is not None:
            # Attention implementations find the borders of packed samples by these ids.
            attention_kwargs = {"position_ids": batch.packed_position_ids, **attention_kwargs}
        hidden_BRD, hidden_states = self._run_layers(
            embeds_BRD, batch.position_ids, mask, cache, past_length, options, attention_kwargs
        )
        if cache is not None:
            record_pass(cache, batch, past_length)  # later passes need its positions and padding
        return options.make_output(
            hidden_BRD,
            hidden_states,
            cache,
            labels=batch.labels,
            image_hidden_states=features,
            attention_mask=batch.attention_mask,
        )

    forward_names = parameter_names(forward)

    def _output_options(
        self,
        output_hidden_states: bool | None,
        output_attentions: bool | None,
        return_dict: bool | None,
    ) -> OutputOptions:
        """Replace arguments of ``forward`` that are ``None`` by the config's defaults."""
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        return OutputOptions(
            bool(output_hidden_states),
            self._make_attention_collector(self.encoder.layers, output_attentions),
            resolve_return_dict(return_dict, self.config),
        )

    def _run_layers(
        self,
        embeds_BRD,
        position_ids,
        mask,
        cache,
        past_length,
        options: OutputOptions,
        attention_kwargs,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Run the decoder layers.

        Args:
            past_length: Number of cache entries; ``None`` for a filled static cache, which stores
                its length on the device.
        """
        cos, sin = self.rotary_pos_emb(position_ids, embeds_BRD.dtype)
        if options.attentions is not None:
            attention_kwargs = {"attention_collector": options.attentions, **attention_kwargs}
        cache_update = None
        if cache is not None:
            update_args: tuple = ()
            cache_position = attention_kwargs.pop("cache_position", None)
            if NEEDS_CACHE_POSITION and is_static(cache):
                if cache_position is None:
                    first = cached_length(cache) if past_length is None else past_length
                    columns = torch.arange(embeds_BRD.shape[1], device=embeds_BRD.device)
                    cache_position = columns + first
                update_args = ({"cache_position": cache_position},)
            cache_was_empty = past_length == 0
            cache_update = cache_was_empty, update_args
        attention_inputs = cos, sin, mask, cache, cache_update, attention_kwargs
        return self.encoder(
            embeds_BRD, *attention_inputs, collect_hidden_states=options.hidden_states
        )

    def _decode_step(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        cache: Cache,
        options: OutputOptions,
        attention_kwargs: dict,
    ) -> ChatGLMModelOutput | tuple:
        """Run the decoder over generated tokens.

        This method neither checks nor expands its inputs, and has no device sync. With a static
        cache, ``attention_mask`` is the 4D mask from ``prepare_inputs_for_generation``
        (:func:`decode_mask`), so all steps share one compiled graph.
        """
        cache_position = attention_kwargs.get("cache_position")
        attention_kwargs = select_attention_kwargs(attention_kwargs)
        if cache_position is not None:  # select_attention_kwargs drops it; _run_layers needs it
            attention_kwargs["cache_position"] = cache_position
        embeds_BQD = self.embedding(input_ids)
        past_length = None if is_static(cache) else cached_length(cache)
        mask = attention_mask
        if past_length is not None:
            mask = decode_mask(self.config, embeds_BQD, attention_mask, cache, past_length)
        hidden_BQD, hidden_states = self._run_layers(
            embeds_BQD, position_ids, mask, cache, past_length, options, attention_kwargs
        )
        return options.make_output(hidden_BQD, hidden_states, cache)

    def _check_expanded_length(
        self,
        unexpanded_length: int,
        length: int,
        inputs_embeds: Tensor | None,
        output_hidden_states: bool,
    ) -> None:
        """Warn or raise ``ValueError`` if prompts were expanded and the caller may not expect it.

        ``inputs_embeds`` cannot be expanded, so this raises. With ``output_hidden_states``, this
        raises in training, and otherwise logs a warning, once for each model.
        """
        if is_exporting():
            torch._check(inputs_embeds is None or length == unexpanded_length)
            return
        if length == unexpanded_length:
            return
        problem = f"prompts of {unexpanded_length} ids expand to {length} tokens"
        cure = "give expanded prompts, as this model's processor makes them"
        if inputs_embeds is not None:
            raise ValueError(
                f"{problem}, and inputs_embeds cannot be expanded: {cure}, or input_ids"
            )
        message = (
            f"{problem}, so hidden states have {length} columns: code that indexes them by columns "
            f"of the unexpanded prompt (reward models, value heads) reads the wrong ones; {cure}"
        )
        if output_hidden_states and self.training:
            raise ValueError(message)
        if output_hidden_states and not self._has_warned_of_expansion:
            # warning_once would warn once for every length.
            self._has_warned_of_expansion = True
            logger.warning(message)

    def get_image_features(  # type: ignore[override]  # models with a head pass on all options
        self,
        pixel_values: Tensor,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutputWithPooling | tuple | Tensor:
        """Encode images ``(N, 3, S, S)``, as transformers' own models do.

        Returns:
            With transformers 5: ``pooler_output`` ``(N, T, D)``, the embeddings of the images'
            tokens; ``last_hidden_state`` of the vision tower, ``(N, tower tokens, tower hidden
            size)``; on request ``hidden_states`` and ``attentions`` of its layers. With
            transformers 4: only the tensor of ``pooler_output``, unless ``return_dict`` is passed.
        """
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        layers = self.vision.transformer.layers
        collector = VisionOutputCollector(
            hidden_states=[] if output_hidden_states else None,
            attentions=self._make_attention_collector(layers, output_attentions),
        )
        features_NTD = self._encode(pixel_values, collector)
        if return_dict is None and Version(TRANSFORMERS_VERSION).major < 5:
            return features_NTD
        hidden_states, attentions = collector.hidden_states, collector.attentions
        output = BaseModelOutputWithPooling(
            last_hidden_state=collector.last_hidden_state,
            pooler_output=features_NTD,
            hidden_states=None if hidden_states is None else tuple(hidden_states),
            attentions=None if attentions is None else tuple(attentions),
        )
        return output if resolve_return_dict(return_dict, self.config) else output.to_tuple()

    def _encode(
        self, pixel_values: Tensor, collector: VisionOutputCollector | None = None
    ) -> Tensor:
        """Encode images as features ``(N, T, D)``, ``T = num_image_tokens + 2``.

        Raises:
            ValueError: The images do not have the configured size.
        """
        vision = self.vision.vision_config
        expected = (vision.in_channels, vision.image_size, vision.image_size)
        if tuple(pixel_values.shape[1:]) != expected:
            raise ValueError(
                f"images have shape {tuple(pixel_values.shape)} but this model takes "
                f"(number of images, {', '.join(map(str, expected))}): resize them with this "
                "model's image processor; position embeddings are not interpolated"
            )
        return self._run_tower(pixel_values, collector)

    def _run_tower(
        self, pixels_N3SS: Tensor, collector: VisionOutputCollector | None = None
    ) -> Tensor:
        """Run the vision tower, without gradients if nothing needs them."""
        # A frozen tower must not save activations for backward. It would, because CheckpointedLayer
        # and some frameworks make a layer's input require grad.
        needs_grad = torch.is_grad_enabled() and (
            pixels_N3SS.requires_grad
            or any(parameter.requires_grad for parameter in self.vision.parameters())
        )
        collector_args = () if collector is None else (collector,)
        with torch.set_grad_enabled(needs_grad):
            return self.vision(pixels_N3SS, *collector_args)

    def _resolve_images(
        self, pixel_values, images, features
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return ``(images, features)``, of which at least one is ``None``."""
        if isinstance(features, BaseModelOutputWithPooling):
            features = features.pooler_output
        if features is None:
            return self._stack_images(pixel_values, images), None
        if pixel_values is not None or images is not None:
            num_images = len(images if pixel_values is None else pixel_values)
            raise ValueError(
                f"{num_images} images were given as pixel_values and {len(features)} as "
                "image_features: give all images of a batch in one form"
            )
        # An image has features for its inner tokens, its begin and its end.
        expected = (self.vision.vision_config.num_image_tokens + 2, self.config.hidden_size)
        if tuple(features.shape[1:]) != expected:
            raise ValueError(
                f"image_features have shape {tuple(features.shape)} but this model takes "
                f"(number of images, {expected[0]}, {expected[1]}): give the output of "
                "get_image_features, or image_hidden_states of the model's output"
            )
        return None, features

    def _merge_images(
        self, embeds_BRD, image_mask_BR, pixel_values, features_NTD, is_prefill
    ) -> tuple[Tensor, Tensor | None]:
        """Replace the embeddings of image tokens by image features.

        Returns:
            The embeddings ``(B, R, D)``, and the image features (``None`` without images).
        """
        if pixel_values is not None:
            features_NTD = self._encode(pixel_values.to(embeds_BRD.device, embeds_BRD.dtype))
        if features_NTD is not None:
            if features_NTD.shape[0] == 0:
                return embeds_BRD, None
            source = features_NTD.to(embeds_BRD.device, embeds_BRD.dtype)
            return embeds_BRD.masked_scatter(image_mask_BR[..., None], source), features_NTD
        if is_prefill and must_run_on_every_process(self.vision):
            # Another process may have an image, so the tower has to run here, too. It runs on a
            # dummy image, whose features are multiplied by 0.
            side, channels = self.vision.dummy_image_size, self.vision.vision_config.in_channels
            dummy_image = embeds_BRD.new_zeros(1, channels, side, side)
            return embeds_BRD + (self._run_tower(dummy_image) * 0).sum().to(embeds_BRD), None
        return embeds_BRD, None

    def _resolve_positional_args(self, attention_mask, past_key_values, cache, images) -> tuple:
        """Return ``(attention_mask, cache, images)``, also for callers of the published code.

        The positional arguments of the published code are input_ids, images, position_ids and
        attention_mask. So images may arrive as ``attention_mask``, and the mask as
        ``past_key_values``.
        """
        if self._are_images(attention_mask):
            if images is not None:
                raise ValueError(
                    f"{len(attention_mask)} images were given as the second positional argument "
                    f"and {len(images)} as images: give them once"
                )
            images, attention_mask = attention_mask, None
        if isinstance(past_key_values, Tensor) and attention_mask is None and cache is None:
            attention_mask, past_key_values = past_key_values, None
        return attention_mask, resolve_cache(past_key_values, cache), images

    def _are_images(self, value) -> bool:
        """Return whether the second positional argument is images instead of a mask."""
        if isinstance(value, (list, tuple)):
            return all(image is None or self._are_images(image) for image in value)
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim < 3:
            return False
        # Dimension -3 of images is their channels. That of a 4D mask has size 1.
        return value.shape[-3] == self.vision.vision_config.in_channels

    def _stack_images(self, pixel_values, images) -> Tensor | None:
        """Return ``pixel_values`` or ``images`` as a 4D tensor, ``None`` if there are none."""
        if pixel_values is not None and images is not None:
            raise ValueError("pixel_values and images are two names of the same input: give one")
        images = pixel_values if images is None else images
        if images is not None and not isinstance(images, Tensor):
            # Callers of the published code pass None in the list for a sequence without an image.
            images = [image for image in images if image is not None]
            shapes_and_types = {
                str(tuple(image.shape) if isinstance(image, Tensor) else type(image))
                for image in images
            }
            if len(shapes_and_types) > 1 or not all(isinstance(x, Tensor) for x in images):
                raise ValueError(
                    f"images contain {', '.join(sorted(shapes_and_types))}: give tensors of one "
                    "shape, as this model's image processor makes them"
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

    def _choose_cache(self, past_key_values, use_cache) -> Cache | None:
        """Return the cache that was passed; without one, a new cache if ``use_cache`` is set.

        In training with activation checkpointing, return ``None``.

        Raises:
            ValueError: The model trains with activation checkpointing, and the cache is not empty.
        """
        recomputes_layers = any(layer.gradient_checkpointing for layer in self.encoder.layers)
        if self.training and recomputes_layers:
            # The recomputed forward would append a layer's keys to the cache again.
            if cached_length(past_key_values):
                raise ValueError(
                    f"past_key_values holds {cached_length(past_key_values)} entries, which "
                    "cannot be used in training with activation checkpointing: pass no cache, or "
                    "disable activation checkpointing"
                )
            return None
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if past_key_values is None and use_cache:
            return DynamicCache(config=self.config)
        return past_key_values

    def _ids_of_embeds(self, inputs_embeds: Tensor, num_images: int) -> Tensor:
        """Return ids ``(B, L)`` that stand for embeddings and show where images begin and end.

        A column has the begin- or end-of-image id if its vector is the embedding of that id. All
        other columns have the id of an arbitrary text token.
        """
        markers = (self.config.boi_token_id, self.config.eoi_token_id)
        text_id = next(i for i in range(3) if i not in markers)
        ids = torch.full(inputs_embeds.shape[:2], text_id, device=inputs_embeds.device)
        # Without images nothing is compared, but another process may have images, and sharded
        # embeddings are gathered in all processes together.
        if num_images or gathers_weights(self.embedding):
            # Reading the attribute "weight" would make DeepSpeed gather it.
            weight: Any = next(self.embedding.parameters())
            if hasattr(weight, "full_tensor"):  # FSDP2 gathers it only in the model's forward
                vectors = weight.full_tensor()[list(markers)]
            else:
                vectors = self.embedding(torch.tensor(markers, device=ids.device))
        if num_images:
            for marker, vector in zip(markers, vectors.to(inputs_embeds), strict=True):
                ids = ids.masked_fill((inputs_embeds == vector).all(dim=-1), marker)
            # In a compiled graph, image_checks.assert_in_graph checks the number of begin ids.
            if not torch.compiler.is_compiling() and not (ids == markers[0]).any():
                raise ValueError(
                    f"{num_images} images were given with inputs_embeds, in which 0 columns have "
                    f"the embedding of the begin-of-image id {markers[0]}: embed the ids of "
                    "expanded prompts, or give input_ids"
                )
        return ids


class GLM4VForCausalLM(ChatGLMPreTrainedModel, ChatGLMGenerationMixin):  # type: ignore[override]
    """glm-4v with its loss and generation. vLLM finds it by this class name."""

    _auto_class = "AutoModelForCausalLM"
    # Decode steps with a static cache and passes over expanded prompts have no graph breaks.
    _can_compile_fullgraph = True

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith("torch."):
            # FSDP2 makes a subclass that belongs to a module of torch. save_pretrained would save
            # that module and class name, so the subclass gets those of this class.
            cls.__module__, cls.__name__ = GLM4VForCausalLM.__module__, GLM4VForCausalLM.__name__
        add_to_mapping_names(cls, "CAUSAL_LM")  # so that a Trainer shifts labels

    def __init__(self, config: ChatGLMConfig, empty_init: bool = True):
        """Build the model.

        Args:
            empty_init: This argument has no effect. Callers of the published code pass it.
        """
        super().__init__(config)
        # transformers derives loss_type from the class name, which a subclass may change.
        self.loss_type = "ForCausalLM"
        self.transformer = ChatGLMModel(config)
        self.post_init()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, config=None, **kwargs):
        """Load a model as transformers does.

        For a feature-extraction pipeline, return only the decoder: the pipeline would otherwise
        return logits as features.
        """
        tasks = getattr(config, PIPELINE_TASK_KEYWORD, None), kwargs.get(PIPELINE_TASK_KEYWORD)
        options = kwargs | {"config": config}
        loaded = super().from_pretrained(pretrained_model_name_or_path, *model_args, **options)
        if "feature-extraction" not in tasks:
            return loaded
        # The complete model was loaded, because names of adapter weights begin with "transformer.".
        model, *info = loaded if isinstance(loaded, tuple) else (loaded,)
        decoder = model.transformer
        if (device_map := getattr(model, "hf_device_map", None)) is not None:
            decoder.hf_device_map = device_map  # else a pipeline would move the decoder
        return (decoder, *info) if info else decoder

    def save_pretrained(self, save_directory, *args, **kwargs):
        """Save as transformers does, but without generation options that it does not define."""
        generation_config = self.generation_config
        self.generation_config = keep_known_options(generation_config)
        try:
            super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            self.generation_config = generation_config

    def get_output_embeddings(self) -> nn.Module:
        return self.transformer.output_layer

    def set_output_embeddings(self, value: nn.Module) -> None:
        # resize_token_embeddings passes a new nn.Linear, whose forward takes no labels.
        if type(value) is nn.Linear:
            layer: Any = fuse_cross_entropy(value)
            layer._is_hf_initialized = True  # post_init would initialize its weights again
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
        """Predict the next token at every position.

        :meth:`ChatGLMModel.forward` describes the arguments that are not listed here, and
        ``options``.

        Args:
            labels: ``(B, L)`` int64 on any device, unshifted, -100 at unsupervised tokens. With
                ``logits_to_keep``, ``(B, K)`` is accepted, too: the labels of the ``K`` selected
                columns.
            logits_to_keep: Columns whose logits are returned: the number of last columns (0: all),
                indices ``(K,)``, or a boolean mask ``(L,)``. With labels ``(B, L)`` the loss still
                covers all columns.
            num_items_in_batch: The divisor of the summed loss; default: the number of supervised
                tokens in the batch.
            skip_logits: With labels, compute the loss without storing logits; ``logits`` is then
                ``None``. Default: the config's ``skip_logits`` in training, else ``False``.
            shift_labels: ``(B, L)``, in place of ``labels``: the label of the next token. It is
                not a parameter but part of ``options``, because in an evaluation the Trainer
                expects a value for every parameter whose name contains "label".
            return_last_logit: The published code's name for ``logits_to_keep=1``.

        Returns:
            ``loss`` fp32; ``logits`` ``(B, R, V)`` in the dtype of the weights, where ``R`` is the
            expanded length; ``image_hidden_states`` ``(N, T, D)``.
        """
        self._check_keywords(options, input_ids)
        if self.training:
            refuse_device_map_in_several_processes(self)
        inputs = input_ids if inputs_embeds is None else inputs_embeds
        selection = LogitsToKeep.from_argument(1 if return_last_logit else logits_to_keep)
        labels_are_selected = selection.labels_are_selected(labels, inputs)
        if labels_are_selected:
            assert labels is not None and inputs is not None
            if options.get("shift_labels") is not None:
                raise ValueError(
                    f"labels of {labels.shape[1]} selected columns were given together with "
                    "shift_labels: give one of them"
                )
            options["shift_labels"] = selection.shifted_labels(labels, inputs.shape[1])
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
        # In an unexpanded prompt an image has fewer columns than tokens, so no selected column that
        # has a label may be part of an image.
        forbidden_ids = self._image_token_ids() if labels_are_selected else ()
        selection.check_fits_expansion(inputs, length, forbidden_ids)
        if output.labels is None and num_items_in_batch is not None:
            self._check_external_loss(inputs, length)
        hidden_BRD, labels = output.last_hidden_state, output.labels
        loss, logits = self._loss_and_logits(
            hidden_BRD, labels, num_items_in_batch, selection, labels_are_selected, skip_logits
        )
        result = GLM4VCausalLMOutput(
            loss=loss,
            logits=logits,
            **cache_kwarg(getattr(output, CACHE_KEYWORD)),
            hidden_states=output.hidden_states,
            attentions=output.attentions,
            image_hidden_states=output.image_hidden_states,
        )
        return result if resolve_return_dict(return_dict, self.config) else result.to_tuple()

    forward_names = parameter_names(forward, ChatGLMModel.forward)

    def _check_external_loss(self, inputs: Tensor | None, length: int) -> None:
        """Check that the logits fit the labels of a Trainer that computes the loss itself.

        Raises:
            ValueError: The logits are longer than the Trainer's labels.
            RuntimeError: torch.compile wraps the model. The Trainer shifts labels only for known
                class names, and torch.compile's wrapper has another name.
        """
        # model.compile() sets _compiled_call_impl; torch.compile(model) does not.
        if torch.compiler.is_compiling() and self._compiled_call_impl is None:
            torch._assert_async(
                torch.zeros((), dtype=torch.bool),
                "call model.compile() before training (inside peft: get_base_model().compile()), "
                "instead of torch_compile. With label_smoothing_factor, the Trainer does not shift "
                "the labels of a model that torch.compile has wrapped. With compute_loss_func this "
                "may be right, but the model cannot tell which of the two options is set",
            )
        if inputs is not None and inputs.shape[1] != length:
            raise ValueError(
                f"prompts of {inputs.shape[1]} ids expand to {length} tokens, but a Trainer "
                "that computes the loss itself (label_smoothing_factor, compute_loss_func) has "
                f"labels for {inputs.shape[1]}: give expanded prompts with their labels, as this "
                "model's processor makes them"
            )

    def _loss_and_logits(
        self,
        hidden_BRD,
        labels,
        num_items_in_batch,
        selection: LogitsToKeep,
        labels_are_selected,
        skip_logits,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the loss (``None`` without labels) and the selected logits.

        With labels and ``skip_logits``, the logits are ``None``.

        Args:
            labels_are_selected: Whether the caller's labels have only the selected columns.
        """
        output_layer = self.transformer.output_layer
        if labels is None:
            return None, output_layer(selection.select(hidden_BRD))
        if skip_logits:
            loss_inputs = labels, num_items_in_batch, self.config.loss_chunk_size
            if has_fused_cross_entropy(output_layer):
                return output_layer(hidden_BRD, *loss_inputs), None
            # peft wrapped the layer, or a quantizer replaced it.
            loss = chunked_next_token_loss(
                output_layer, hidden_BRD, *loss_inputs, is_sharded=gathers_weights(output_layer)
            )
            return loss, None
        if labels_are_selected:
            logits = output_layer(selection.select(hidden_BRD))
            # Column c + 1 of labels is the label that column c predicts. next_token_loss shifts its
            # labels in the same way, so it takes the selected labels after a column of -100.
            unshifted_labels = F.pad(selection.select(labels[:, 1:]), (1, 0), value=-100)
            return next_token_loss(logits, unshifted_labels, num_items_in_batch), logits
        logits = output_layer(hidden_BRD)
        return next_token_loss(logits, labels, num_items_in_batch), selection.select(logits)


ChatGLMForConditionalGeneration = GLM4VForCausalLM  # the published code's name
add_to_mapping_names(GLM4VForCausalLM, "CAUSAL_LM")  # __init_subclass__ adds only subclasses
# TRL's OnlineDPO passes images only to models whose type is a key of this mapping.
add_to_mapping_names(GLM4VForCausalLM, "IMAGE_TEXT_TO_TEXT", key=ChatGLMConfig.model_type)


class ChatGLMForSequenceClassification(SequenceScoringMixin, ChatGLMPreTrainedModel):
    """glm-4v for classification and reward modeling.

    A linear head, ``score``, replaces the output projection. It reads each sequence's last token.
    """

    _auto_class = "AutoModelForSequenceClassification"
    _keys_to_ignore_on_load_unexpected = [r"transformer\.output_layer\.weight"]
    forward_names = tuple(
        name
        for name in parameter_names(SequenceScoringMixin.forward, ChatGLMModel.forward)
        if name not in PER_TOKEN_KWARGS
    )

    def __init__(self, config: ChatGLMConfig, empty_init: bool = True):
        """Build the model; ``empty_init`` has no effect, as in :class:`GLM4VForCausalLM`."""
        super().__init__(config)
        self.loss_type = "ForSequenceClassification"
        assert config.num_labels is not None
        self.num_labels = config.num_labels
        self.transformer = ChatGLMModel(config)
        del self.transformer.output_layer
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)
        self.post_init()


add_to_mapping_names(ChatGLMForSequenceClassification, "SEQUENCE_CLASSIFICATION")


def _unshift_labels(
    labels: Tensor | None, shift_labels: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return labels ``(B, L)`` aligned with the tokens, and the last shift label ``(B, 1)``.

    The latter is ``None`` without ``shift_labels``.
    """
    if shift_labels is None:
        return labels, None
    # As in transformers, labels are ignored if there are shift_labels. The first label is -100,
    # because no token predicts it.
    return F.pad(shift_labels[:, :-1], (1, 0), value=-100), shift_labels[:, -1:]


def _pad_to_cache_length(weights: list[Tensor], cache: Cache | None) -> tuple[Tensor, ...]:
    """Pad the last dimension of attention weights with 0 to the capacity of a static cache."""
    length = static_capacity(cache) or 0
    # A tensor that needs no padding is returned as it is: a copy by F.pad would not be part of the
    # loss's graph, so it would get no gradient.
    return tuple(
        F.pad(w, (0, length - w.shape[-1])) if length > w.shape[-1] else w for w in weights
    )
