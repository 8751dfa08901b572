"""The EVA2-CLIP vision tower of glm-4v and the projector to the language model's hidden size.

The vision tower is a ViT with these differences: a layer normalizes the *output* of its attention
and of its MLP before the residual addition, there is no final norm, and the embeddings of the begin
and the end of an image are parameters of the tower. A convolution after the tower merges 2 x 2
patches and outputs the language model's hidden size. The projector, an MLP, follows it.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from .attention import attend
from .checkpointing import CheckpointedLayer
from .configuration_chatglm import ChatGLMConfig

# A name's suffix lists the tensor's dimensions: x_NTV is (N, T, V).
# Shapes: N images, S side of an image in pixels, P patches of one image, T = P + 1 tower tokens
# (class token first), V hidden size of the tower, G side of the patch grid in patches, I tokens
# of an image between its begin and its end (num_image_tokens), D hidden size of the language model.


@dataclass
class VisionOutputCollector:
    """Collector of the tower's hidden states and attentions. A list that is None is not filled.

    Attributes:
        hidden_states: The input of every layer and the output of the last, ``(N, T, V)`` each.
        attentions: Attention weights ``(N, heads, T, T)`` of each layer; only eager attention
            computes them.
        last_hidden_state: Output of the last layer, ``(N, T, V)``.
    """

    hidden_states: list[Tensor] | None = None
    attentions: list[Tensor] | None = None
    last_hidden_state: Tensor | None = None


class PatchEmbedding(nn.Module):
    """Embedding of an image: a class token, then its patches row by row, plus their positions."""

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
        # Call position_embedding instead of indexing its weight: ZeRO-3 gathers it only in a call.
        positions = torch.arange(tokens_NTV.shape[1], device=tokens_NTV.device)
        return tokens_NTV + self.position_embedding(positions)

    def project(self, pixels_N3SS: Tensor) -> Tensor:
        """Return the patch embeddings ``(N, P, V)``."""
        return self.proj(pixels_N3SS).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Bidirectional self-attention with one fused projection (q, then k, then v)."""

    is_causal = False
    num_key_value_groups = 1

    def __init__(self, config: ChatGLMConfig):
        super().__init__()
        self.config = config
        hidden_size = config.vision.hidden_size
        self.num_heads = config.vision.num_heads
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, x_NTV: Tensor, attention_collector: list[Tensor] | None = None) -> Tensor:
        # (N, T, 3, heads, channels) -> three of (N, heads, T, channels)
        fused = self.query_key_value(x_NTV).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = fused.permute(2, 0, 3, 1, 4)
        out_NTV = attend(
            self,
            query,
            key,
            value,
            None,
            self.config._attn_implementation,
            attention_collector=attention_collector,
        )
        return self.dense(out_NTV)


class VisionMLP(nn.Module):
    """The MLP of a tower layer."""

    def __init__(self, config: ChatGLMConfig):
        super().__init__()
        vision = config.vision
        self.activation_fn = ACT2FN[vision.hidden_act]
        self.fc1 = nn.Linear(vision.hidden_size, vision.intermediate_size)
        self.fc2 = nn.Linear(vision.intermediate_size, vision.hidden_size)

    def forward(self, x_NTV: Tensor) -> Tensor:
        return self.fc2(self.activation_fn(self.fc1(x_NTV)))


class TransformerLayer(CheckpointedLayer):
    """One tower layer, with norms on the outputs of attention and MLP."""

    def __init__(self, config: ChatGLMConfig):
        super().__init__()
        vision = config.vision
        self.input_layernorm = nn.LayerNorm(vision.hidden_size, eps=vision.layer_norm_eps)
        self.attention = Attention(config)
        self.mlp = VisionMLP(config)
        self.post_attention_layernorm = nn.LayerNorm(vision.hidden_size, eps=vision.layer_norm_eps)

    def layer_forward(self, x_NTV: Tensor, *attention_collector: list[Tensor]) -> Tensor:
        # A layer takes no keyword arguments, so attention_collector is a tuple: empty, or of one
        # list.
        x_NTV = x_NTV + self.input_layernorm(self.attention(x_NTV, *attention_collector))
        return x_NTV + self.post_attention_layernorm(self.mlp(x_NTV))


class Transformer(nn.Module):
    """The layers of the tower, without a final norm."""

    def __init__(self, config: ChatGLMConfig):
        super().__init__()
        self.layers = nn.ModuleList(
            TransformerLayer(config) for _ in range(config.vision.num_hidden_layers)
        )

    def forward(self, x_NTV: Tensor, collector: VisionOutputCollector | None = None) -> Tensor:
        collector = VisionOutputCollector() if collector is None else collector
        attention_collector = () if collector.attentions is None else (collector.attentions,)
        for layer in self.layers:
            if collector.hidden_states is not None:
                collector.hidden_states.append(x_NTV)
            x_NTV = layer(x_NTV, *attention_collector)
        if collector.hidden_states is not None:
            collector.hidden_states.append(x_NTV)
        collector.last_hidden_state = x_NTV
        return x_NTV


class GLU(nn.Module):
    """The projector: an MLP that follows the convolution."""

    def __init__(self, config: ChatGLMConfig):
        super().__init__()
        hidden_size, ffn_size = config.hidden_size, config.ffn_hidden_size
        self.linear_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.norm1 = nn.LayerNorm(hidden_size)
        self.dense_h_to_4h = nn.Linear(hidden_size, ffn_size, bias=False)
        self.gate_proj = nn.Linear(hidden_size, ffn_size, bias=False)
        self.dense_4h_to_h = nn.Linear(ffn_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm1(self.linear_proj(x)))
        return self.dense_4h_to_h(F.silu(self.gate_proj(x)) * self.dense_h_to_4h(x))


class EVA2CLIPModel(nn.Module):
    """Encoder that turns pixels into image embeddings for the language model."""

    def __init__(self, config: ChatGLMConfig):
        super().__init__()
        # torch.compile cannot trace the property config.vision, so it is read here.
        self.vision_config = vision = config.vision
        self.patch_embedding = PatchEmbedding(config)
        self.transformer = Transformer(config)
        self.linear_proj = GLU(config)
        self.conv = nn.Conv2d(vision.hidden_size, config.hidden_size, kernel_size=2, stride=2)
        # The embeddings of the begin and of the end of an image.
        self.boi = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        self.eoi = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        self.scaling_factor = vision.scaling_factor
        # A process whose batch has no images may have to run the tower on an image of this size, so
        # that every process uses all parameters. 2 x 2 patches are the smallest input.
        self.dummy_image_size = 2 * vision.patch_size

    def forward(self, images: Tensor, collector: VisionOutputCollector | None = None) -> Tensor:
        """Encode images.

        Args:
            images: ``(N, 3, S, S)``, in the dtype of the weights. ``S`` is the configured
                ``image_size``, or ``dummy_image_size``.
            collector: Collects hidden states and attentions.

        Returns:
            ``(N, num_image_tokens + 2, D)``: the embeddings of begin, inner tokens and end, divided
            by ``scaling_factor``.
        """
        patches_NPV = self.transformer(self.patch_embedding(images), collector)[:, 1:]
        side = int(patches_NPV.shape[1] ** 0.5)
        grid_NVGG = patches_NPV.transpose(1, 2).unflatten(-1, (side, side))
        # contiguous(), because bitsandbytes' matmuls on a CPU ignore strides.
        image_NID = self.linear_proj(self.conv(grid_NVGG).flatten(2).transpose(1, 2).contiguous())
        boi, eoi = (
            vector.to(image_NID.device).expand(image_NID.shape[0], -1, -1)
            for vector in (self.boi, self.eoi)
        )
        return torch.cat((boi, image_NID, eoi), dim=1) / self.scaling_factor
