"""The numbers of fp8 that are used here."""

import torch

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""Of e4m3."""
# Below, a row's scale could not be inverted in fp32; what is so small counts as zero.
SMALLEST = 1e-30
