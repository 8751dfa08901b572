"""The EVA2-CLIP vision tower of glm-4v and the adapter into the language model's width.

What differs from a usual ViT: a layer normalizes the *output* of its attention and of its MLP
before adding it, there is no final norm, and the begin- and end-of-image vectors are learned here.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from .attention import attend
from .checkpointing import CheckpointedLayer
from .configuration_chatglm import ChatGLMConfig

# Shapes: N images, S side of an image in pixels, P patches of one image, T = P + 1 tower tokens
# (class token first), V tower width, G side of the patch grid, D language model width.


@dataclass
class TowerRecord:
    """What a caller wants to see of the tower besides the features: lists are filled by it."""

    states: list[Tensor] | None = None  # (N, T, V): into each layer, and out of the last
    weights: list[Tensor] | None = None  # (N, heads, T, T) of each layer, of eager attention only
    last_state: Tensor | None = None  # (N, T, V)


class PatchEmbedding(nn.Module):
    """Pixels to tower tokens: class token, then the patches row by row, plus learned positions."""

    def __init__(self, config: ChatGLMConfig):
        super().__init__()
        vision = config.vision
        self.proj = nn.Conv2d(
            vision.in_channels, vision.hidden_size, vision.patch_size, stride=vision.patch_size
        )
        self.cls_embedding = nn.Parameter(torch.zeros(1, vision.hidden_size))
        self.position_embedding = nn.Embedding(vision.num_positions, vision.hidden_size)

    def forward(self, images: Tensor) -> Tensor:
        patches_NPV = self.project(images)
        class_N1V = self.cls_embedding.expand(images.shape[0], 1, -1)
        tokens_NTV = torch.cat((class_N1V, patches_NPV), dim=1)
        # Through the module and not its weight: a sharded table is gathered only for its forward.
        positions = torch.arange(tokens_NTV.shape[1], device=tokens_NTV.device)
        return tokens_NTV + self.position_embedding(positions)

    def project(self, pixels_N3SS: Tensor) -> Tensor:
        """``(N, P, V)``."""
        return self.proj(pixels_N3SS).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Bidirectional self-attention, one fused projection (all queries, all keys, all values)."""

    is_causal = False
    num_key_value_groups = 1

    def __init__(self, config: ChatGLMConfig):
        super().__init__()
        self.config = config
        width = config.vision.hidden_size
        self.num_heads = config.vision.num_heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.dense = nn.Linear(width, width)

    def forward(self, x_NTV: Tensor, attention_collector: list[Tensor] | None = None) -> Tensor:
        # (N, T, 3, heads, channels) -> three of (N, heads, T, channels)
        fused = self.query_key_value(x_NTV).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = fused.permute(2, 0, 3, 1, 4)
        rest = None, self.config._attn_implementation
        return self.dense(attend(self, query, key, value, *rest, attention_collector=attention_collector))


class MLP(nn.Module):
    def __init__(self, config: ChatGLMConfig):
        super().__init__()
        vision = config.vision
        self.activation_fn = ACT2FN[vision.hidden_act]
        self.fc1 = nn.Linear(vision.hidden_size, vision.intermediate_size)
        self.fc2 = nn.Linear(vision.intermediate_size, vision.hidden_size)

    def forward(self, x_NTV: Tensor) -> Tensor:
        return self.fc2(self.activation_fn(self.fc1(x_NTV)))


class TransformerLayer(CheckpointedLayer):
    """One tower layer; the norms act on what is added, not on what goes in."""

    def __init__(self, config: ChatGLMConfig):
        super().__init__()
        vision = config.vision
        self.input_layernorm = nn.LayerNorm(vision.hidden_size, eps=vision.layer_norm_eps)
        self.attention = Attention(config)
        self.mlp = MLP(config)
        self.post_attention_layernorm = nn.LayerNorm(vision.hidden_size, eps=vision.layer_norm_eps)

    def layer_forward(self, x_NTV: Tensor, *attention_collector: list[Tensor]) -> Tensor:
        x_NTV = x_NTV + self.input_layernorm(self.attention(x_NTV, *attention_collector))
        return x_NTV + self.post_attention_layernorm(self.mlp(x_NTV))


class Transformer(nn.Module):
    def __init__(self, config: ChatGLMConfig):
        super().__init__()
        self.layers = nn.ModuleList(
            TransformerLayer(config) for _ in range(config.vision.num_hidden_layers)
        )

    def forward(self, x_NTV: Tensor, record: TowerRecord | None = None) -> Tensor:
        record = TowerRecord() if record is None else record
        attention_collector = () if record.weights is None else (record.weights,)
        for layer in self.layers:
            if record.states is not None:
                record.states.append(x_NTV)
            x_NTV = layer(x_NTV, *attention_collector)
        if record.states is not None:
            record.states.append(x_NTV)
        record.last_state = x_NTV
        return x_NTV


class GLU(nn.Module):
    """The adapter after the tower, at the language model's width."""

    def __init__(self, config: ChatGLMConfig):
        super().__init__()
        width, inner = config.hidden_size, config.ffn_hidden_size
        self.linear_proj = nn.Linear(width, width, bias=False)
        self.norm1 = nn.LayerNorm(width)
        self.dense_h_to_4h = nn.Linear(width, inner, bias=False)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.dense_4h_to_h = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm1(self.linear_proj(x)))
        return self.dense_4h_to_h(F.silu(self.gate_proj(x)) * self.dense_h_to_4h(x))


class EVA2CLIPModel(nn.Module):
    """Pixels to the vectors that take an image's place in the language model's input."""

    def __init__(self, config: ChatGLMConfig):
        super().__init__()
        # Read once: compilation cannot follow how the config makes it.
        self.vision_config = vision = config.vision
        self.patch_embedding = PatchEmbedding(config)
        self.transformer = Transformer(config)
        self.linear_proj = GLU(config)
        self.conv = nn.Conv2d(vision.hidden_size, config.hidden_size, kernel_size=2, stride=2)
        self.boi = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        self.eoi = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        self.scaling_factor = vision.scaling_factor
        self.smallest_side = 2 * vision.patch_size

    def forward(self, images: Tensor, record: TowerRecord | None = None) -> Tensor:
        """``(N, num_image_tokens + 2, D)``: begin vector, image, end vector, divided by
        ``scaling_factor``.

        Args:
            images: ``(N, 3, S, S)``, in the dtype of the weights. ``S`` is the configured
                ``image_size``, or ``smallest_side`` for a stand-in that only has to touch every
                parameter.
        """
        patches_NPV = self.transformer(self.patch_embedding(images), record)[:, 1:]
        side = int(patches_NPV.shape[1] ** 0.5)
        grid_NVGG = patches_NPV.transpose(1, 2).unflatten(-1, (side, side))
        # Contiguous: products of bitsandbytes on a CPU do not look at strides.
        image_NKD = self.linear_proj(self.conv(grid_NVGG).flatten(2).transpose(1, 2).contiguous())
        boi, eoi = (
            vector.to(image_NKD.device).expand(image_NKD.shape[0], -1, -1)
            for vector in (self.boi, self.eoi)
        )
        return torch.cat((boi, image_NKD, eoi), dim=1) / self.scaling_factor
