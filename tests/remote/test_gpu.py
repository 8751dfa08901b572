"""The attention implementations on a GPU, forward and backward; run with ``pytest -m gpu``."""

import pytest
import torch
from transformers.utils import is_flash_attn_2_available

from glm4v_patched.engine.activation_checkpointing import checkpoint_layers
from glm4v_patched.engine.deepspeed.zero3 import limit_layers_in_flight, norm_in_place
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.tiny import padded, random_pixels, text, tiny_config, unexpanded_image
from tests.remote.inputs import assert_close, gradients

pytestmark = pytest.mark.gpu

SIDE = 168

# Relative to the largest gradient. Measured on an H200: fp32 eager and flex 2e-5; bf16 flex 3e-2,
# eager 2e-2, which is how differently they round. In fp32 a label predicted from padding already
# differed by 9e-2.
RTOL = {torch.float32: 1e-4, torch.bfloat16: 8e-2}


def run(implementation: str, dtype: torch.dtype, side: str) -> dict[str, torch.Tensor]:
    """Return loss and gradients of sequences with two, one and no image, with checkpointing.

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
    image = unexpanded_image()
    two, one = [*image, *text(100, 1), *image, *text(200, 2)], [5, *image, *text(180, 3)]
    rows = [two, one, text(140, 4)]
    if side == "packed":
        positions = torch.cat([torch.arange(len(row)) for row in rows])
        inputs = {"input_ids": torch.tensor([sum(rows, [])]), "position_ids": positions[None]}
    else:
        inputs = padded(rows, side)
    inputs = {name: value.cuda() for name, value in inputs.items()}
    labels = inputs["input_ids"].masked_fill(inputs["input_ids"] >= 500, -100)
    by_name = gradients(
        model, **inputs, labels=labels, pixel_values=random_pixels(3, side=SIDE).cuda()
    )
    return {name: value.float() for name, value in by_name.items()}


@pytest.mark.parametrize("side", ["left", "right", "packed"])
@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        ("sdpa", torch.bfloat16),
        ("eager", torch.float32),
        ("flex_attention", torch.float32),
        ("flex_attention", torch.bfloat16),
        ("flash_attention_2", torch.bfloat16),
    ],
)
def test_implementations_agree_with_sdpa_on_a_padded_batch(implementation, dtype, side):
    if implementation == "flash_attention_2" and not is_flash_attn_2_available():
        pytest.skip("flash-attn is not installed: pip install flash-attn")
    actual, want = (
        run(implementation, dtype, side),
        run("sdpa", dtype, side.replace("packed", "left")),
    )
    assert actual.pop("loss").item() == pytest.approx(want.pop("loss").item(), rel=RTOL[dtype])
    assert_close(actual, want, RTOL[dtype] * max(value.abs().max() for value in want.values()))


def test_a_cpu_that_waits_for_the_gpu_changes_no_gradient():
    def trained(layers_ahead: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = GLM4VForCausalLM(tiny_config()).to("cuda", torch.bfloat16).train()
        checkpoint_layers(model, "attention", "attention")
        if layers_ahead:
            limit_layers_in_flight(model, layers_ahead)
        ids = torch.tensor([[5, *unexpanded_image(), *text(20, 1)]], device="cuda")
        pixels = random_pixels(1).to("cuda", torch.bfloat16)
        for _ in range(3):
            by_name = gradients(model, input_ids=ids, labels=ids, pixel_values=pixels)
        return by_name

    assert_close(trained(layers_ahead=1), trained(layers_ahead=0))


def test_norms_of_many_gradients_are_exact_without_a_copy():
    norm = norm_in_place(lambda gradients, _parameters, _norm_type: gradients[0])
    gradients = [torch.randn(2**27, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    computed = norm(gradients, [None, None]).item()
    assert torch.cuda.max_memory_allocated() - before < gradients[0].nbytes / 8
    exact = torch.stack([gradient.double().norm() for gradient in gradients]).norm()
    assert computed == pytest.approx(exact.item(), rel=1e-6)
