"""Liger-Kernel's fused kernels in the place of our modules' own ``forward``, on request."""

import torch
from torch import Tensor

from ..remote.modeling_chatglm import MLP, RMSNorm
from ..terminal_text import pip_install
from .patch_set import Swap

MODELING = "glm4v_patched.remote.modeling_chatglm"


def kernel_swaps(options: dict) -> list[Swap]:
    """The replacements for the kernels that are asked for."""
    asked = [name for name in ("rms_norm", "swiglu") if options.get(name)]
    if not asked:
        return []
    if not torch.cuda.is_available():
        raise ValueError(
            f"{', '.join(asked)}: these kernels run on GPUs and torch finds 0; leave them off"
        )
    try:
        from liger_kernel.transformers.functional import liger_rms_norm, liger_swiglu
    except ImportError as error:
        raise ImportError(
            f"{', '.join(asked)}: Liger-Kernel cannot be imported ({error}): "
            f"{pip_install('liger-kernel')}"
        ) from error

    def rms_norm_forward(module: RMSNorm, x: Tensor) -> Tensor:
        # "gemma": the weight is multiplied in fp32, before the cast back, as this model does.
        return liger_rms_norm(
            x, module.weight, module.eps, offset=0.0, casting_mode="gemma", in_place=False
        )

    def mlp_forward(module: MLP, x: Tensor) -> Tensor:
        gate, up = module.dense_h_to_4h(x).chunk(2, dim=-1)
        return module.dense_4h_to_h(liger_swiglu(gate, up))

    made = {
        "rms_norm": Swap(f"{MODELING}:RMSNorm", "forward", lambda original: rms_norm_forward),
        "swiglu": Swap(f"{MODELING}:MLP", "forward", lambda original: mlp_forward),
    }
    return [made[name] for name in asked]
