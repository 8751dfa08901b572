"""Where images stand in a message: ``<image>``, as ms-swift and LLaMA-Factory write it."""

import re

IMAGE_TAG = "<image>"
BEGIN_OF_IMAGE, END_OF_IMAGE = "<|begin_of_image|>", "<|end_of_image|>"
# In the published form, which a model or vLLM grows itself.
UNEXPANDED_IMAGE = f"{BEGIN_OF_IMAGE}<|endoftext|>{END_OF_IMAGE}"
LEADING_TAGS = re.compile(rf"(?:\s*{IMAGE_TAG})*")


def move_images_first(content: str) -> tuple[int, str]:
    """How many places stand at the beginning and end of a message, and its words without them and
    the space around (LLaVA's "<image>\\n"): the model is used to images before the words. Places
    between words stay, and with them those at the end, so that images keep their order."""
    if IMAGE_TAG not in content:
        return 0, content
    before = LEADING_TAGS.match(content)[0]  # type: ignore[index]  # which may be empty
    words, place, behind = content[len(before) :].partition(IMAGE_TAG)
    behind = place + behind
    if behind.replace(IMAGE_TAG, "").strip():  # there are words behind a place
        words, behind = words + behind, ""
    return (before + behind).count(IMAGE_TAG), words.strip()
