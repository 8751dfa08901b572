"""Where images stand in a message: ``<image>``, as ms-swift and LLaMA-Factory write it."""

import re

PLACE = "<image>"
BEGIN, END = "<|begin_of_image|>", "<|end_of_image|>"
# In the published form, which a model or vLLM grows itself.
UNGROWN = f"{BEGIN}<|endoftext|>{END}"
FIRST = re.compile(rf"(?:\s*{PLACE})*")


def images_first(content: str) -> tuple[int, str]:
    """How many places stand at the beginning and end of a message, and its words without them and
    the space around (LLaVA's "<image>\\n"): the model is used to images before the words. Places
    between words stay, and with them those at the end, so that images keep their order."""
    if PLACE not in content:
        return 0, content
    before = FIRST.match(content)[0]  # type: ignore[index]  # which may be empty
    words, place, behind = content[len(before) :].partition(PLACE)
    behind = place + behind
    if behind.replace(PLACE, "").strip():  # there are words behind a place
        words, behind = words + behind, ""
    return (before + behind).count(PLACE), words.strip()
