"""The image tag ``<image>`` in messages, as ms-swift and LLaMA-Factory write it."""

import re

IMAGE_TAG = "<image>"
BEGIN_OF_IMAGE, END_OF_IMAGE = "<|begin_of_image|>", "<|end_of_image|>"
# An image placeholder of three tokens, as published, which the model or vLLM expands.
UNEXPANDED_IMAGE = f"{BEGIN_OF_IMAGE}<|endoftext|>{END_OF_IMAGE}"
LEADING_TAGS = re.compile(rf"(?:\s*{IMAGE_TAG})*")


def move_images_first(content: str) -> tuple[int, str]:
    r"""Split a message into a number of images and its text, so that images can precede the text.

    The model expects images before text. Image tags at the beginning and the end of the
    message are taken out, with the white space around them (LLaVA writes ``<image>\n``). If a tag
    stands between words, this tag and all tags after it stay in the text, so that the images keep
    their order.

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
