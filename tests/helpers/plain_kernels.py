"""Replace the kernels by ``engine/kernels/reference.py``, to test their callers on a CPU."""

import sys
from types import ModuleType
from typing import Any

from torch import Tensor

from glm4v_patched.engine.kernels import inference_layers, reference, skinny_gemm

KERNELS = {
    "inference_triton": (
        "layer_norm_add",
        "add_rms_norm",
        "rope_in_place",
        "rope_and_update_cache",
        "flash_decode",
    ),
    "fp8_triton": ("activate", "activate_and_quantize_rows"),
    "skinny_gemm_triton": ("reduce_partials", "split_k_matmul"),
}


def put_in_the_place_of_kernels(monkeypatch, model, has_products: bool) -> list[str]:
    """Returns a list that gets the name of each one called."""
    calls: list[str] = []

    def noted(function):
        def call(*args):
            calls.append(function.__name__)
            return function(*args)

        return call

    for name, functions in KERNELS.items():
        module: Any = ModuleType(name)
        vars(module).update({kernel: noted(getattr(reference, kernel)) for kernel in functions})
        monkeypatch.setitem(sys.modules, f"glm4v_patched.engine.kernels.{name}", module)
    monkeypatch.setattr(inference_layers, "_can_use_kernels", lambda x: isinstance(x, Tensor))
    monkeypatch.setattr(inference_layers, "SUPPORTED_HEAD_DIMS", (model.config.kv_channels,))
    for module in (inference_layers, skinny_gemm):
        monkeypatch.setattr(module, "num_sms", lambda device: 1)
    monkeypatch.setattr(
        skinny_gemm, "is_supported", lambda rows, weight: has_products and rows <= 32
    )
    return calls
