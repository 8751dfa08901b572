"""Give a 4-bit layer on a CPU the same numbers, contiguous and in other strides.

Expected is the same output. The product that is tested needs a CPU with AVX-512 bf16.
"""

import sys

import bitsandbytes
import torch
from bitsandbytes.functional import has_avx512bf16
from bitsandbytes.nn import Linear4bit

print("bitsandbytes", bitsandbytes.__version__, "torch", torch.__version__)
if not has_avx512bf16():
    print("this CPU has no AVX-512 bf16, without which bitsandbytes takes another product")
    sys.exit(2)
torch.manual_seed(0)
wrong = 0
for quant_type in ("fp4", "nf4"):
    for dtype in (torch.float32, torch.bfloat16):
        layer = Linear4bit(128, 64, bias=False, compute_dtype=dtype, quant_type=quant_type)
        layer = layer.to("cpu").eval()
        x = torch.randn(1, 128, 4, dtype=dtype).transpose(1, 2)  # (1, 4, 128), strides (512, 1, 4)
        with torch.no_grad():
            strided, contiguous = layer(x), layer(x.contiguous())
        difference = (strided - contiguous).abs().max().item()
        wrong += difference > 1e-3
        largest = contiguous.abs().max().item()
        print(f"{quant_type}, {dtype}: differ by {difference:.3g}; the largest is {largest:.3g}")
print(f"{wrong} of 4 products read other numbers than they were given")
sys.exit(wrong > 0)
