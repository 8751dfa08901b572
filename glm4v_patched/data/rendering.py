"""Renders conversations and counts their ids and positions, in a process of :mod:`workers`.

``python -m glm4v_patched.data.rendering FOLDER``, with the processor that was saved there.
"""

import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from itertools import islice
from tempfile import TemporaryDirectory

from ..engine.environment import python_module
from ..remote.processing_chatglm import ChatGLMProcessor
from .collate import ConversationCollator, Size
from .workers import Ended, answer_until_input_ends, ask_all

ROWS_AT_ONCE = 64
PARTS_AT_ONCE = 256


def measure_all(
    conversations: Iterable[list[dict]], collator: ConversationCollator, processes: int
) -> Generator[Size | str, None, None]:
    """The size of each conversation, or why it cannot be rendered.

    Args:
        processes: How many to start; with 0, this one renders.
    """
    waiting = iter(conversations)
    parts = iter(lambda: [*islice(waiting, ROWS_AT_ONCE)], [])
    if not processes:
        for part in parts:
            yield from _measure(part, collator)
        return
    with TemporaryDirectory() as folder:
        collator.processor.save_pretrained(folder)
        command = python_module("glm4v_patched.data.rendering", folder)
        with closing(ask_all(command, parts, processes, at_once=PARTS_AT_ONCE)) as answers:
            for answer in answers:
                if isinstance(answer, Ended):
                    status = answer.status
                    raise RuntimeError(f"a process that renders rows ended with status {status}")
                for size in answer:
                    yield size if isinstance(size, str) else Size(*size)


def _measure(
    conversations: list[list[dict]], collator: ConversationCollator
) -> Sequence[Size | str]:
    try:
        return collator.measure(conversations)
    except Exception as error:  # a template and its filters raise what they like
        if len(conversations) == 1:
            return [f"cannot be rendered by the model's chat template: {error}"]
        return [_measure([conversation], collator)[0] for conversation in conversations]


if __name__ == "__main__":
    saved = ConversationCollator(ChatGLMProcessor.from_pretrained(sys.argv[1]))
    answer_until_input_ends(lambda conversations: _measure(conversations, saved))
