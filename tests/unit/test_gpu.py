"""The attention implementations on a GPU, forward and backward; run with ``pytest -m gpu``."""

import pytest
import torch
from tiny import padded, pictures, text, three_id_image, tiny_config
from transformers.utils import is_flash_attn_2_available

from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM

pytestmark = pytest.mark.gpu

SIDE = 168

# Relative to the largest gradient. Measured on an H200: fp32 eager and flex 2e-5; bf16 flex 3e-2,
# eager 2e-2, which is how differently they round. In fp32 a label predicted from padding already
# differed by 9e-2.
RTOL = {torch.float32: 1e-4, torch.bfloat16: 8e-2}


def run(implementation: str, dtype: torch.dtype, side: str) -> tuple[float, dict]:
    """Loss and gradients of rows with two, one and no image, with checkpointing.

    The rows are padded on one side or, for "packed", joined.
    """
    # Heads of 16 channels in both towers: flex on a GPU takes no smaller ones.
    vision = {"hidden_size": 64, "intermediate_size": 128, "image_size": SIDE, "num_positions": 145}
    torch.manual_seed(0)
    config = tiny_config(
        vision_config=tiny_config().vision_config | vision, seq_length=1024, initializer_range=0.1
    )
    model = GLM4VForCausalLM._from_config(config, attn_implementation=implementation)
    model = model.to("cuda", dtype).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    image = three_id_image()
    two, one = [*image, *text(100, 1), *image, *text(200, 2)], [5, *image, *text(180, 3)]
    rows = [two, one, text(140, 4)]
    if side == "packed":
        positions = torch.cat([torch.arange(len(row)) for row in rows])
        inputs = {"input_ids": torch.tensor([sum(rows, [])]), "position_ids": positions[None]}
    else:
        inputs = padded(rows, side)
    inputs = {name: value.cuda() for name, value in inputs.items()}
    labels = inputs["input_ids"].masked_fill(inputs["input_ids"] >= 500, -100)
    loss = model(**inputs, labels=labels, pixel_values=pictures(3, side=SIDE).cuda()).loss
    loss.backward()
    return loss.item(), {name: p.grad.float() for name, p in model.named_parameters()}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        ("eager", torch.float32),
        ("flex_attention", torch.float32),
        ("flex_attention", torch.bfloat16),
        ("flash_attention_2", torch.bfloat16),
    ],
)
def test_implementations_agree_with_sdpa(implementation, dtype, side):
    if implementation == "flash_attention_2" and not is_flash_attn_2_available():
        pytest.skip("flash-attn is not installed: pip install flash-attn")
    assert_equal(run(implementation, dtype, side), run("sdpa", dtype, side), dtype)


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        ("sdpa", torch.float32),
        ("sdpa", torch.bfloat16),
        ("flex_attention", torch.float32),
        ("flash_attention_2", torch.bfloat16),
    ],
)
def test_packed_rows_agree_with_padded_ones(implementation, dtype):
    if implementation == "flash_attention_2" and not is_flash_attn_2_available():
        pytest.skip("flash-attn is not installed: pip install flash-attn")
    assert_equal(run(implementation, dtype, "packed"), run("sdpa", dtype, "left"), dtype)


def assert_equal(got: tuple[float, dict], wanted: tuple[float, dict], dtype: torch.dtype) -> None:
    (loss, gradients), (want_loss, want) = got, wanted
    assert loss == pytest.approx(want_loss, rel=RTOL[dtype])
    largest = max(gradient.abs().max() for gradient in want.values())
    for name, gradient in want.items():
        assert (gradients[name] - gradient).abs().max() <= RTOL[dtype] * largest, name
