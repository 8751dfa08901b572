"""Programmatic dependent launch (PDL): a kernel starts while the previous kernel is still running.

Importing this module needs Triton, which torch's GPU builds include.
"""

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore


def supports_pdl(device: torch.device) -> bool:
    """Return whether a GPU has PDL: compute capability 9.0 (Hopper) or newer."""
    return torch.cuda.get_device_capability(device)[0] >= 9


@triton.jit
def pdl_wait_and_launch(use_pdl: tl.constexpr):
    """Wait for the output of the previous kernel, then allow the next kernel to start."""
    if use_pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
