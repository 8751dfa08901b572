"""Where pictures stand in a message: ``<image>``, as ms-swift and LLaMA-Factory write it."""

from collections.abc import Callable

PLACE = "<image>"
BEGIN, END = "<|begin_of_image|>", "<|end_of_image|>"
# In the published form, which a model or vLLM grows itself.
UNGROWN = f"{BEGIN}<|endoftext|>{END}"


def images_first(content: str) -> tuple[int, str]:
    """How many places stand at the beginning and end of a message, and its words without them and
    the space around (LLaVA's "<image>\\n"): the model is used to pictures before the words. Places
    between words stay, and with them those at the end, so that pictures keep their order."""
    if PLACE not in content:
        return 0, content
    words, before = _without(content.strip(), str.startswith, str.removeprefix)
    others, behind = _without(words, str.endswith, str.removesuffix)
    return (before, words) if PLACE in others else (before + behind, others)


def _without(words: str, has: Callable, remove: Callable) -> tuple[str, int]:
    number = 0
    while has(words, PLACE):
        words, number = remove(words, PLACE).strip(), number + 1
    return words, number
