"""One way into transformers' attention registry, shared by both towers."""

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# Shapes: B batch, Q query length, K key length, H query heads, G key-value heads, C head channels.


def attend(
    module: nn.Module,
    query_BHQC: Tensor,
    key_BGKC: Tensor,
    value_BGKC: Tensor,
    attention_mask,
    implementation: str,
    **kwargs,
) -> Tensor:
    """Scaled dot-product attention by the named implementation (eager, sdpa, flex, flash, ...).

    Args:
        module: Carries ``is_causal`` and ``num_key_value_groups`` (query heads per key-value
            head), which the implementations read.
        attention_mask: What transformers' mask functions make for that implementation, or ``None``.

    Returns:
        ``(B, Q, H * C)`` in the dtype of the inputs.
    """
    function = (
        eager_attention if implementation == "eager" else ALL_ATTENTION_FUNCTIONS[implementation]
    )
    scaling = query_BHQC.shape[-1] ** -0.5
    out_BQHC, _ = function(
        module,
        query_BHQC,
        key_BGKC,
        value_BGKC,
        attention_mask,
        scaling=scaling,
        dropout=0.0,
        **kwargs,
    )
    return out_BQHC.flatten(2)


def eager_attention(
    module: nn.Module,
    query_BHQC: Tensor,
    key_BGKC: Tensor,
    value_BGKC: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **kwargs,
) -> tuple[Tensor, Tensor]:
    """Attention spelled out, with the softmax in fp32. Returns the output and the weights."""
    key_BHKC = key_BGKC.repeat_interleave(module.num_key_value_groups, dim=1)
    value_BHKC = value_BGKC.repeat_interleave(module.num_key_value_groups, dim=1)
    scores_BHQK = query_BHQC @ key_BHKC.transpose(-1, -2) * scaling
    if attention_mask is not None:
        scores_BHQK = scores_BHQK + attention_mask
    weights_BHQK = torch.softmax(scores_BHQK, dim=-1, dtype=torch.float32).to(query_BHQC.dtype)
    return (weights_BHQK @ value_BHKC).transpose(1, 2), weights_BHQK
