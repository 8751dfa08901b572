"""Measure the backends of attention by shape, on one GPU.

``python docs/benchmarks/attention_speed.py --out FILE``. Shapes are the real model's with 1120 x
1120 images, bf16. There is a row for each shape, backend, padded head size and way of sharing keys,
with ``forward_ms``, ``both_ms`` (forward and backward) and ``tflops_both``, counting the FLOP of
the unpadded head size.
"""

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

# Batch, query heads, key heads, channels of a head, positions, whether causal.
SHAPES = {
    "tower 2": (2, 16, 16, 112, 6401, False),
    "tower 4": (4, 16, 16, 112, 6401, False),
    "language 4 x 2,114": (4, 32, 2, 128, 2114, True),
    "language 1 x 6,000": (1, 32, 2, 128, 7602, True),
}
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "chosen": None,
}
TILE = 128  # head size to which channels are padded for comparison
SECONDS = 0.25  # approximate duration of each measurement


def timed(function: Callable[[], object]) -> float:
    """Return the mean milliseconds of 3 to 20 calls."""
    for _ in range(2):
        function()
    torch.cuda.synchronize()
    began = time.perf_counter()
    function()
    torch.cuda.synchronize()
    calls = max(3, min(20, int(SECONDS / max(time.perf_counter() - began, 1e-4))))
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / calls


def attend(shape: str, width: int, repeated: bool, *heads: Tensor) -> Tensor:
    """Compute attention ``(B, H, L, C)``, with heads padded to ``width``."""
    _, queries, keys, channels, _, causal = SHAPES[shape]
    query, key, value = (pad(x, (0, width - channels)) for x in heads)
    if repeated:
        key, value = (x.repeat_interleave(queries // keys, 1) for x in (key, value))
    out = scaled_dot_product_attention(
        *(query, key, value),
        is_causal=causal,
        scale=channels**-0.5,
        enable_gqa=queries != keys and not repeated,
    )
    return out[..., :channels]


def rows_of(shape: str) -> list[dict]:
    batch, queries, keys, channels, length, causal = SHAPES[shape]

    def random_heads(heads: int) -> Tensor:  # in memory, (B, L, H, C), as in the model
        x = torch.randn(batch, length, heads, channels, device="cuda", dtype=torch.bfloat16)
        return x.transpose(1, 2)

    heads = [random_heads(count).requires_grad_() for count in (queries, keys, keys)]
    output_gradient = random_heads(queries)
    flop = 4 * batch * queries * length**2 * channels / (2 if causal else 1)
    rows = []
    for width in dict.fromkeys((channels, TILE)):
        for repeated in (True, False) if queries != keys else (False,):
            for name, backend in BACKENDS.items():
                row: dict = {"shape": shape, "backend": name, "width": width}
                row["keys"] = "repeated" if repeated else "as they are"

                def forward(width=width, repeated=repeated) -> Tensor:
                    return attend(shape, width, repeated, *heads)

                def both(forward=forward) -> None:
                    torch.autograd.grad(forward(), heads, output_gradient)

                with sdpa_kernel(backend) if backend else nullcontext():
                    try:
                        with torch.no_grad():
                            row["forward_ms"] = timed(forward)
                        row["both_ms"] = timed(both)
                        row["tflops_both"] = 3.5 * flop / row["both_ms"] / 1e9
                    except RuntimeError as error:  # no kernel for this shape
                        row["error"] = str(error).splitlines()[0]
                rows.append(row)
                print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the rows")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures GPU kernels, and there is no GPU")
    rows = [row for shape in SHAPES for row in rows_of(shape)]
    options.out.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


if __name__ == "__main__":
    main()
