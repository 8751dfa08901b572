"""Liger-Kernel's kernels compute what our modules compute, on a GPU."""

import importlib.util

import pytest
import torch

import glm4v_patched
from glm4v_patched.remote.modeling_chatglm import MLP, RMSNorm
from tests.helpers.fp8 import passes
from tests.helpers.tiny import tiny_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("liger_kernel") is None,
        reason="Liger-Kernel is not installed: pip install liger-kernel",
    ),
]

# At the real width, relative to the largest value, of output and gradients against fp64. Measured
# on an H200 with Liger-Kernel 0.8.5, Liger's and ours: fp32 1.7e-7, 1.4e-7 (norm) and 2.3e-6 twice
# (MLP); bf16 4.5e-3, 7.1e-3 and 5.2e-3 twice.
LIMIT = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


def modules() -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    norm = RMSNorm(4096, 1.5625e-07)
    torch.nn.init.normal_(norm.weight, mean=1, std=0.1)
    mlp = MLP(tiny_config(hidden_size=4096, ffn_hidden_size=13696))
    return {"rms_norm": norm, "swiglu": mlp}


def run(module: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Output, gradient of the input, gradients of the weights; fp64 on the CPU."""
    towards = torch.linspace(-1, 1, x.numel(), device=x.device).view_as(x).to(x)
    return [part.double().cpu() for part in passes(module, x, towards)]


def difference(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    return max(((g - w).abs().max() / w.abs().max()).item() for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("kernel", ["rms_norm", "swiglu"])
def test_outputs_and_gradients_are_those_of_our_modules(kernel, dtype):
    module = modules()[kernel].to("cuda", dtype)
    x = torch.randn(2, 300, 4096, generator=torch.Generator().manual_seed(1)).to("cuda", dtype)
    plain = run(module, x)
    with glm4v_patched.applied(**{kernel: True}):
        got = run(module, x)
    exact = run(module.double(), x.double())
    differences = {"liger": difference(got, exact), "ours": difference(plain, exact)}
    print(kernel, dtype, differences)
    assert not all(torch.equal(g, p) for g, p in zip(got, plain, strict=True))  # another kernel
    assert differences["liger"] <= max(1.5 * differences["ours"], LIMIT[dtype])
    # And back to ours.
    assert all(torch.equal(a, b) for a, b in zip(run(module.to(dtype), x), plain, strict=True))
