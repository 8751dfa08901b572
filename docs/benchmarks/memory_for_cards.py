"""Prints what the planner says fits: the largest micro-batch for each number and size of cards.

``python docs/benchmarks/memory_for_cards.py`` needs no GPU: it asks ``engine/memory_plan.py``, as
``train`` does, for rows of one image and 512 ids of text. The table of docs/questions.md is its
output. Estimates err by up to 15 % (tests/engine/test_memory_plan.py has measured peaks).
"""

import argparse
from itertools import product

from glm4v_patched.engine.memory_plan import (
    ALLOCATOR_OVERHEAD,
    GIB,
    NON_TORCH_BYTES,
    Batch,
    decide_options,
    estimate_peak_bytes,
    offloaded_bytes,
)
from glm4v_patched.engine.options import TRAINED, EngineOptions
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig

# GiB that are free on a card that is sold as so many GB.
FREE = {24: 23.5, 48: 47.4, 80: 79.1}


def largest_batch(
    config: ChatGLMConfig, trained: str, cards: int, free: float, length: int
) -> tuple[int, float]:
    """Rows of a card's batch, 0 if not even one fits, and bytes of the optimizer in the machine's
    memory."""
    # Several cards with 4-bit weights each hold all of them; one card needs no ZeRO but to offload.
    stages = [0] if trained == "qlora" else [0, 3] if cards == 1 else [3]
    room = (free - NON_TORCH_BYTES) * (1 - ALLOCATOR_OVERHEAD)
    for rows, stage in product((16, 8, 4, 2, 1), stages):
        batch = Batch(num_sequences=rows, sequence_length=length, processes=cards)
        asked = EngineOptions(trained=trained, zero_stage=stage)
        decided = decide_options(config, asked, batch, free)
        if estimate_peak_bytes(config, decided, batch) <= room:
            return rows, offloaded_bytes(config, decided)
    return 0, 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cards", type=int, nargs="+", default=[1, 2, 4, 8], help="how many")
    parser.add_argument("--gigabytes", type=int, nargs="+", default=[*FREE], choices=[*FREE])
    parser.add_argument("--text-tokens", type=int, default=512, help="ids beside the image")
    options = parser.parse_args()
    config = ChatGLMConfig()
    length = config.vision.num_image_tokens + 2 + options.text_tokens
    print(f"| cards | {' | '.join(TRAINED)} |\n|---|{'---|' * len(TRAINED)}")
    for gigabytes in options.gigabytes:
        for cards in options.cards:
            cells = []
            for trained in TRAINED:
                free = FREE[gigabytes] * GIB
                rows, in_ram = largest_batch(config, trained, cards, free, length)
                told = f"{rows}, {in_ram / 1e9:.0f} GB" if in_ram else str(rows)
                cells.append(told if rows else "-")
            print(f"| {cards} x {gigabytes} GB | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
