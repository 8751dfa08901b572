"""Kernels that ask to be started while the one before them ends."""

import torch


def overlaps(device: torch.device) -> bool:
    """Whether a GPU does so: from Hopper on."""
    return torch.cuda.get_device_capability(device)[0] >= 9
