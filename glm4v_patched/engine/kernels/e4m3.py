"""Constants of fp8 in the e4m3 format."""

import torch

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
"""Largest finite e4m3 number."""
# Lower bound ("floor") of amax, a row's largest magnitude. With a smaller amax, the inverse of the
# scale could overflow in fp32. Rows whose amax is far below this bound are quantized to zero.
AMAX_FLOOR = 1e-30
