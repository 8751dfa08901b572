"""Language model of the stand-in for the published repository (see legacy_repository.py)."""

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import CrossEntropyLoss
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.nn.utils import skip_init
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .configuration_chatglm import ChatGLMConfig
from .visual import EVA2CLIPModel

# Of the tiny model's images. The published code has 1600, whatever the size of its images.
LABELS_OF_AN_IMAGE = 4


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x):
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        return (x * torch.rsqrt(variance + self.eps) * self.weight).to(x.dtype)


class RotaryEmbedding(nn.Module):
    def __init__(self, dim, rope_ratio):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, dim, 2) / dim))
        self.dim = dim
        self.rope_ratio = rope_ratio

    def forward(self, length):
        exponents = torch.arange(0, self.dim, 2, device=self.inv_freq.device) / self.dim
        theta = 1.0 / (10000 * self.rope_ratio) ** exponents
        angles = torch.outer(torch.arange(length, device=theta.device), theta).float()
        return torch.stack((angles.cos(), angles.sin()), dim=-1).to(self.inv_freq.dtype)


def apply_rotary_pos_emb(x, rope):
    """``x``: (batch, heads, length, channels); ``rope``: (batch, length, pairs, 2)."""
    pairs = rope.shape[-2]
    rotated, passed = x[..., : 2 * pairs], x[..., 2 * pairs :]
    a, b = rotated.unflatten(-1, (pairs, 2)).unbind(-1)
    cos, sin = rope.unsqueeze(1).unbind(-1)
    rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(3)
    return torch.cat((rotated, passed), dim=-1)


class SelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.channels = config.kv_channels
        self.heads, self.groups = config.num_attention_heads, config.multi_query_group_num
        width, rows = config.hidden_size, (self.heads + 2 * self.groups) * self.channels
        self.query_key_value = skip_init(nn.Linear, width, rows, bias=config.add_qkv_bias)
        self.dense = skip_init(nn.Linear, self.heads * self.channels, width, bias=False)

    def forward(self, x, full_attention_mask, rope):
        qkv = self.query_key_value(x).unflatten(-1, (-1, self.channels)).transpose(1, 2)
        query, key, value = qkv.split([self.heads, self.groups, self.groups], dim=1)
        query, key = apply_rotary_pos_emb(query, rope), apply_rotary_pos_emb(key, rope)
        key, value = (part.repeat_interleave(self.heads // self.groups, 1) for part in (key, value))
        if full_attention_mask is None:
            context = scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            context = scaled_dot_product_attention(query, key, value, ~full_attention_mask)
        return self.dense(context.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, inner = config.hidden_size, config.ffn_hidden_size
        self.dense_h_to_4h = skip_init(nn.Linear, width, 2 * inner, bias=False)
        self.dense_4h_to_h = skip_init(nn.Linear, inner, width, bias=False)

    def forward(self, x):
        gate, up = self.dense_h_to_4h(x).chunk(2, dim=-1)
        return self.dense_4h_to_h(silu(gate) * up)


class GLMBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.layernorm_epsilon)
        self.self_attention = SelfAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.layernorm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x, full_attention_mask, rope):
        x = x + self.self_attention(self.input_layernorm(x), full_attention_mask, rope)
        return x + self.mlp(self.post_attention_layernorm(x))


class GLMTransformer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList([GLMBlock(config) for _ in range(config.num_layers)])
        self.final_layernorm = RMSNorm(config.hidden_size, config.layernorm_epsilon)
        self.gradient_checkpointing = False

    def forward(self, x, full_attention_mask, rope):
        for layer in self.layers:
            if self.gradient_checkpointing and self.training:
                x = torch.utils.checkpoint.checkpoint(
                    layer, x, full_attention_mask, rope, use_reentrant=False
                )
            else:
                x = layer(x, full_attention_mask, rope)
        return self.final_layernorm(x)


class ChatGLMPreTrainedModel(PreTrainedModel):
    config_class = ChatGLMConfig
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    _no_split_modules = ["GLMBlock"]

    def _init_weights(self, module):
        pass

    def _set_gradient_checkpointing(self, module, value=False):
        if isinstance(module, GLMTransformer):
            module.gradient_checkpointing = value

    def image_span(self, row):
        """Where the (first) image of a row of ids begins and ends."""
        row = row.tolist()
        begin, end = row.index(self.config.boi_token_id), row.index(self.config.eoi_token_id)
        assert end - begin == 2
        return begin, end


class Embedding(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.padded_vocab_size, config.hidden_size)

    def forward(self, input_ids):
        return self.word_embeddings(input_ids)


class ChatGLMModel(ChatGLMPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embedding = Embedding(config)
        self.rotary_pos_emb = RotaryEmbedding(config.kv_channels // 2, config.rope_ratio)
        self.encoder = GLMTransformer(config)
        self.output_layer = skip_init(
            nn.Linear, config.hidden_size, config.padded_vocab_size, bias=False
        )
        self.vision = EVA2CLIPModel(config)

    def get_input_embeddings(self):
        return self.embedding.word_embeddings

    def set_input_embeddings(self, value):
        self.embedding.word_embeddings = value

    def get_masks(self, inputs_embeds, padding_mask):
        length = inputs_embeds.shape[1]
        seen = torch.ones(length, length, device=inputs_embeds.device).tril()
        seen = seen * padding_mask.unsqueeze(1)
        seen = seen - (padding_mask.unsqueeze(-1) - 1)
        return (seen < 0.5).unsqueeze(1)

    def merge_images(self, input_ids, position_ids, images):
        embeds = self.embedding(input_ids)
        features = self.vision(images.to(embeds.dtype))
        assert len(input_ids) == len(images)
        rows, positions = [], []
        for ids, row, image, position in zip(
            input_ids, embeds, features, position_ids, strict=True
        ):
            begin, end = self.image_span(ids)
            rows.append(torch.cat((row[:begin], image.to(row.device), row[end + 1 :])))
            # All of an image stands at one position.
            repeated = position[begin + 1].repeat(len(image) - 2)
            positions.append(torch.cat((position[: begin + 1], repeated, position[end:])))
        return torch.stack(rows), torch.stack(positions)

    def rebuild_padded(self, input_ids, attention_mask):
        """Defect: plain tokens take the place of the images that were merged just before."""
        vision = self.config.vision_config
        num_patches = (vision["image_size"] // vision["patch_size"] // 2) ** 2
        rows, masks = [], []
        for ids, mask in zip(input_ids, attention_mask, strict=True):
            begin, end = self.image_span(ids)
            rows.append(torch.cat((ids[: begin + 1], ids[-1].repeat(num_patches), ids[end:])))
            masks.append(torch.cat((mask[: begin + 1], mask.new_ones(num_patches), mask[end:])))
        return self.embedding(torch.stack(rows)), torch.stack(masks)

    def forward(self, input_ids, images=None, position_ids=None, attention_mask=None):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
            position_ids = position_ids.expand(len(input_ids), -1)
        if images is not None and len(images):
            inputs_embeds, position_ids = self.merge_images(input_ids, position_ids, images)
        else:
            inputs_embeds = self.embedding(input_ids)
        full_attention_mask = None
        if attention_mask is not None and not attention_mask.all():
            if self.training:
                inputs_embeds, attention_mask = self.rebuild_padded(input_ids, attention_mask)
            full_attention_mask = self.get_masks(inputs_embeds, attention_mask)
        rope = self.rotary_pos_emb(self.config.seq_length)[position_ids]
        hidden_states = self.encoder(inputs_embeds, full_attention_mask, rope)
        return BaseModelOutputWithPast(last_hidden_state=hidden_states)


class ChatGLMForConditionalGeneration(ChatGLMPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.transformer = ChatGLMModel(config)
        # The published code does not: transformers 5 could not load it otherwise.
        self.post_init()

    def forward(self, input_ids, images=None, position_ids=None, attention_mask=None, labels=None):
        hidden_states = self.transformer(
            input_ids, images, position_ids, attention_mask
        ).last_hidden_state
        logits = self.transformer.output_layer(hidden_states)
        loss = None
        if labels is not None:
            expanded = []
            for ids, label in zip(input_ids, labels, strict=True):
                begin, end = self.image_span(ids)
                image = label.new_full((LABELS_OF_AN_IMAGE,), -100)
                expanded.append(torch.cat((label[: begin + 1], image, label[end:])))
            labels = torch.stack(expanded)
            logits = logits.to(torch.float32)
            shifted = logits[:, :-1].contiguous().view(-1, logits.shape[-1])
            loss = CrossEntropyLoss(ignore_index=-100)(shifted, labels[:, 1:].reshape(-1))
            logits, loss = logits.to(hidden_states.dtype), loss.to(hidden_states.dtype)
        return CausalLMOutputWithPast(loss=loss, logits=logits)
