"""The image tag ``<image>`` in messages, as ms-swift and LLaMA-Factory write it."""

import re

IMAGE_TAG = "<image>"
BEGIN_OF_IMAGE, END_OF_IMAGE = "<|begin_of_image|>", "<|end_of_image|>"
# The published placeholder of three tokens, which the model or vLLM expands itself.
UNEXPANDED_IMAGE = f"{BEGIN_OF_IMAGE}<|endoftext|>{END_OF_IMAGE}"
LEADING_TAGS = re.compile(rf"(?:\s*{IMAGE_TAG})*")


def move_images_first(content: str) -> tuple[int, str]:
    r"""Split a message into its images and its text: the model is used to images before text.

    Image tags at the beginning and the end are taken out, with the space around them (LLaVA writes
    ``<image>\n``). If there are tags between words, those and all tags after them stay in the text,
    so that the images keep their order.

    Returns:
        The number of tags taken out, and the remaining text.
    """
    if IMAGE_TAG not in content:
        return 0, content
    leading = LEADING_TAGS.match(content)[0]  # type: ignore[index]  # it may be empty
    text, tag, trailing = content[len(leading) :].partition(IMAGE_TAG)
    trailing = tag + trailing
    if trailing.replace(IMAGE_TAG, "").strip():  # there are words behind a tag
        text, trailing = text + trailing, ""
    return (leading + trailing).count(IMAGE_TAG), text.strip()
