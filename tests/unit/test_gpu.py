"""The attention implementations on a GPU, forward and backward; run with ``pytest -m gpu``."""

import pytest
import torch
from tiny import padded, pictures, three_id_image, tiny_config
from transformers.utils import is_flash_attn_2_available

from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM

pytestmark = pytest.mark.gpu

# bf16, two layers, |gradient| up to 0.2: the implementations round differently. A mask that is off
# by one position changes gradients by more than 5e-2.
ATOL = 1e-2


def run(implementation: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of rows with two, one and no image, with checkpointing."""
    # Heads of 16 channels in both towers: flex on a GPU takes no smaller ones.
    vision = tiny_config().vision_config | {"hidden_size": 64, "intermediate_size": 128}
    torch.manual_seed(0)
    config = tiny_config(vision_config=vision)
    model = GLM4VForCausalLM._from_config(config, attn_implementation=implementation)
    model = model.to("cuda", torch.bfloat16).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    image = three_id_image()
    rows = padded([[*image, 1, 2, *image, 3, 4], [5, *image, 6, 7], [8, 9, 10]], "left")
    rows["labels"] = rows["input_ids"].masked_fill(rows["input_ids"] >= 500, -100)
    inputs = {name: value.cuda() for name, value in rows.items()}
    loss = model(**inputs, pixel_values=pictures(3).cuda()).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("implementation", ["eager", "flex_attention", "flash_attention_2"])
def test_implementations_agree_with_sdpa(implementation):
    if implementation == "flash_attention_2" and not is_flash_attn_2_available():
        pytest.skip("flash-attn is not installed: pip install flash-attn")
    want_loss, want = run("sdpa")
    loss, gradients = run(implementation)
    assert loss == pytest.approx(want_loss, abs=ATOL)
    for name, gradient in want.items():
        torch.testing.assert_close(gradients[name], gradient, atol=ATOL, rtol=0.05, msg=name)
