"""Count the tokens of conversations without encoding them; encoding takes 30 times as long."""

import pickle
import re
from collections.abc import Sequence
from itertools import chain

from tokenizers import Tokenizer

from ..remote.tokenization_chatglm import CHAT_TEMPLATE, PROMPT_PREFIX, build_pre_tokenizer
from .messages import images_of, text_of

WORD_START_RE = re.compile(r"(?<=\S)(?= )")
"""Matches the position before a space that follows a character other than white space. The
tokenizer's pattern always splits a text there, so no token contains both characters."""
MAX_CACHED_WORDS = 2**16


class TokenCounter:
    """Counts the tokens that the chat template of this package writes.

    A text is counted word by word. The number of tokens of each word is cached, because the words
    of a data set repeat.
    """

    def __init__(self, processor):
        """Create a counter for a ``ChatGLMProcessor``.

        It counts nothing if the processor has another chat template than this package's, if its
        tokenizer splits texts in another way, or if texts may contain added tokens that are not
        special.
        """
        backend = processor.tokenizer.backend_tokenizer
        added_tokens = processor.tokenizer.added_tokens_decoder.values()
        self.is_supported = (
            processor.chat_template == CHAT_TEMPLATE
            and pickle.dumps(backend.pre_tokenizer) == pickle.dumps(build_pre_tokenizer())
            and backend.normalizer is None
            and all(token.special for token in added_tokens)
        )
        # This tokenizer has no added tokens, because special tokens in a message are plain text.
        self.tokenizer = Tokenizer(backend.model)
        self.tokenizer.pre_tokenizer = build_pre_tokenizer()
        self.tokens_per_word: dict[str, int] = {}

    def count(self, conversations: Sequence[Sequence[dict]]) -> list[list[int]]:
        """Return a list of numbers of unexpanded tokens for each conversation.

        The first number is that of tokens outside of messages: the prefix and the end token. The
        others are those of each message with its role token. The list is empty for a conversation
        that must be encoded instead, because it has tools or an empty message, which the template
        drops.
        """
        words_of_all = [  # the words of each message of each conversation
            [_words_of(message) for message in messages]
            if self.is_supported and all(map(_is_countable, messages))
            else []
            for messages in conversations
        ]
        self._count_words({*chain(*chain(*words_of_all))})
        lengths_of_all: list[list[int]] = []
        for messages, words_of_messages in zip(conversations, words_of_all, strict=True):
            if not words_of_messages:
                lengths_of_all.append([])
                continue
            lengths = [len(PROMPT_PREFIX) + 1]
            for message, words in zip(messages, words_of_messages, strict=True):
                num_text_tokens = sum(map(self.tokens_per_word.__getitem__, words))
                # The role is one token, and an image is three.
                lengths.append(1 + 3 * len(images_of([message])) + num_text_tokens)
            lengths_of_all.append(lengths)
        return lengths_of_all

    def _count_words(self, words: set[str]) -> None:
        """Add the number of tokens of each new word to ``tokens_per_word``."""
        if len(self.tokens_per_word) > MAX_CACHED_WORDS:
            self.tokens_per_word.clear()
        new_words = [*words.difference(self.tokens_per_word)]
        encodings = self.tokenizer.encode_batch_fast(new_words, add_special_tokens=False)
        self.tokens_per_word |= zip(new_words, map(len, encodings), strict=True)


def _is_countable(message: dict) -> bool:
    return "tools" not in message and bool(message["content"] or "image" in message)


def _words_of(message: dict) -> list[str]:
    """Return the text that the template writes after the role of a message, split at the positions
    that :data:`WORD_START_RE` matches."""
    head = f"{message.get('metadata') or ''}\n"
    return WORD_START_RE.split(head) + WORD_START_RE.split(text_of(message))
