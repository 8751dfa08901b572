"""Where pictures stand in a message: ``<image>``, as ms-swift and LLaMA-Factory write it."""

PLACE = "<image>"
BEGIN, END = "<|begin_of_image|>", "<|end_of_image|>"
# In the published form, which a model or vLLM grows itself.
UNGROWN = f"{BEGIN}<|endoftext|>{END}"


def images_first(content: str) -> tuple[int, str]:
    """How many places stand at the beginning and end of a message, and its words without them.

    The model is used to pictures before the words, and to words without space around them, which
    LLaVA's data sets have ("<image>\\n"). Places between words stay in them.
    """
    words = content.strip() if PLACE in content else content
    number = 0
    while words.startswith(PLACE) or words.endswith(PLACE):
        words = words.removeprefix(PLACE) if words.startswith(PLACE) else words.removesuffix(PLACE)
        words, number = words.strip(), number + 1
    return number, words
