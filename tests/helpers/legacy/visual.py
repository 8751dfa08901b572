"""Image tower of the stand-in for the published repository (see legacy_repository.py)."""

from argparse import Namespace

import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu


class PatchEmbedding(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, patch = config.hidden_size, config.patch_size
        self.proj = nn.Conv2d(config.in_channels, width, kernel_size=patch, stride=patch)
        self.cls_embedding = nn.Parameter(torch.zeros(1, width))
        self.position_embedding = nn.Embedding(config.num_positions, width)

    def forward(self, images):
        x = self.proj(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_embedding.expand(len(x), 1, -1), x), dim=1)
        return x + self.position_embedding.weight


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_heads = config.num_heads
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.query_key_value(x).view(batch, length, 3, self.num_heads, -1)
        x = scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4))
        return self.dense(x.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x):
        return self.fc2(gelu(self.fc1(x)))


class TransformerLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = Attention(config)
        self.mlp = MLP(config)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x):
        x = x + self.input_layernorm(self.attention(x))
        return x + self.post_attention_layernorm(self.mlp(x))


class Transformer(nn.Module):
    """Never checkpointed, whatever is enabled."""

    def __init__(self, config):
        super().__init__()
        layers = [TransformerLayer(config) for _ in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class GLU(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.linear_proj = nn.Linear(width, width, bias=False)
        self.norm1 = nn.LayerNorm(width)
        self.dense_h_to_4h = nn.Linear(width, inner, bias=False)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.dense_4h_to_h = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        x = gelu(self.norm1(self.linear_proj(x)))
        return self.dense_4h_to_h(silu(self.gate_proj(x)) * self.dense_h_to_4h(x))


class EVA2CLIPModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        vision, width = Namespace(**config.vision_config), config.hidden_size
        self.patch_embedding = PatchEmbedding(vision)
        self.transformer = Transformer(vision)
        self.linear_proj = GLU(width, config.ffn_hidden_size)
        self.conv = nn.Conv2d(vision.hidden_size, width, kernel_size=2, stride=2)
        self.boi = nn.Parameter(torch.zeros(1, 1, width))
        self.eoi = nn.Parameter(torch.zeros(1, 1, width))
        self.scaling_factor = vision.scaling_factor

    def forward(self, images):
        x = self.transformer(self.patch_embedding(images))[:, 1:]
        side = int(x.shape[1] ** 0.5)
        x = self.conv(x.transpose(1, 2).unflatten(2, (side, side)))
        x = self.linear_proj(x.flatten(2).transpose(1, 2))
        boi, eoi = (vector.expand(len(x), 1, -1) for vector in (self.boi, self.eoi))
        return torch.cat((boi, x, eoi), dim=1) / self.scaling_factor
