"""A 4-bit layer of bitsandbytes on a CPU: the same numbers in other strides give other results."""

import bitsandbytes
import torch
from bitsandbytes.nn import Linear4bit

torch.manual_seed(0)
print("bitsandbytes", bitsandbytes.__version__, "torch", torch.__version__)
for dtype in (torch.float32, torch.bfloat16):
    layer = Linear4bit(128, 64, bias=False, compute_dtype=dtype).to("cpu").eval()
    x = torch.randn(1, 128, 4, dtype=dtype).transpose(1, 2)  # (1, 4, 128), strides (512, 1, 4)
    with torch.no_grad():
        strided, contiguous = layer(x), layer(x.contiguous())
    difference = (strided - contiguous).abs().max().item()
    print(f"{dtype}: differ by {difference:.3g}, of {contiguous.abs().max().item():.3g} at most")
