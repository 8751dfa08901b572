"""Print the largest micro-batch that fits, by the memory plan, for numbers and sizes of GPUs.

``python docs/benchmarks/memory_for_cards.py`` needs no GPU: it uses ``engine/memory_plan.py``, as
``train`` does, for samples of one image and 512 text tokens. The table of docs/questions.md is its
output. Estimates are off by up to 15 % (tests/engine/test_memory_plan.py has measured peaks).
"""

import argparse
from itertools import product

from glm4v_patched.engine.memory_plan import (
    ALLOCATOR_OVERHEAD,
    GIB,
    NON_TORCH_BYTES,
    BatchShape,
    decide_options,
    estimate_peak_bytes,
    offloaded_bytes,
)
from glm4v_patched.engine.options import TRAINED_CHOICES, EngineOptions
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig

# Free GiB of a GPU by its nominal size in GB.
FREE = {24: 23.5, 48: 47.4, 80: 79.1}


def largest_batch(
    config: ChatGLMConfig, trained: str, cards: int, free: float, length: int
) -> tuple[int, float]:
    """Return the largest micro-batch (0 if none fits) and the bytes of offloaded state."""
    # 4-bit weights are replicated on every GPU; a single GPU needs ZeRO only to offload.
    stages = [0] if trained == "qlora" else [0, 3] if cards == 1 else [3]
    usable = (free - NON_TORCH_BYTES) * (1 - ALLOCATOR_OVERHEAD)
    for rows, stage in product((16, 8, 4, 2, 1), stages):
        batch = BatchShape(num_sequences=rows, sequence_length=length, processes=cards)
        requested = EngineOptions(trained=trained, zero_stage=stage)
        decided = decide_options(config, requested, batch, free)
        if estimate_peak_bytes(config, decided, batch) <= usable:
            return rows, offloaded_bytes(config, decided)
    return 0, 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--cards", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of GPUs"
    )
    parser.add_argument("--gigabytes", type=int, nargs="+", default=[*FREE], choices=[*FREE])
    parser.add_argument("--text-tokens", type=int, default=512, help="text tokens of a sample")
    options = parser.parse_args()
    config = ChatGLMConfig()
    length = config.vision.num_image_tokens + 2 + options.text_tokens
    print(f"| cards | {' | '.join(TRAINED_CHOICES)} |\n|---|{'---|' * len(TRAINED_CHOICES)}")
    for gigabytes in options.gigabytes:
        for cards in options.cards:
            cells = []
            for trained in TRAINED_CHOICES:
                free = FREE[gigabytes] * GIB
                rows, in_ram = largest_batch(config, trained, cards, free, length)
                cell = f"{rows}, {in_ram / 1e9:.0f} GB" if in_ram else str(rows)
                cells.append(cell if rows else "-")
            print(f"| {cards} x {gigabytes} GB | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
