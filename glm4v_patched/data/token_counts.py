"""Count the tokens of conversations without encoding them; encoding takes 30 times as long."""

import pickle
import re
from collections.abc import Sequence
from itertools import chain

from tokenizers import Tokenizer

from ..remote.tokenization_chatglm import CHAT_TEMPLATE, PROMPT_PREFIX, build_pre_tokenizer
from .messages import images_of, text_of

WORD_START_RE = re.compile(r"(?<=\S)(?= )")
"""Matches before a space that follows a character other than white space. There, the tokenizer's
pattern always splits a text, so no token contains both characters."""
MAX_CACHED_WORDS = 2**16


class TokenCounter:
    """Counts the tokens that the chat template of this package writes.

    The number of tokens of each word is cached, because the words of a data set repeat.
    """

    def __init__(self, processor):
        """Create a counter for a ``ChatGLMProcessor``.

        It counts nothing if the processor has another chat template, if its tokenizer splits texts
        in another way, or if texts of messages may contain tokens that were added.
        """
        backend = processor.tokenizer.backend_tokenizer
        added_tokens = processor.tokenizer.added_tokens_decoder.values()
        self.is_supported = (
            processor.chat_template == CHAT_TEMPLATE
            and pickle.dumps(backend.pre_tokenizer) == pickle.dumps(build_pre_tokenizer())
            and backend.normalizer is None
            and all(token.special for token in added_tokens)
        )
        # This tokenizer has no added tokens, because in texts of messages they are plain text.
        self.tokenizer = Tokenizer(backend.model)
        self.tokenizer.pre_tokenizer = build_pre_tokenizer()
        self.counts: dict[str, int] = {}

    def count(self, conversations: Sequence[Sequence[dict]]) -> list[list[int]]:
        """Return numbers of unexpanded tokens for each conversation: first the number outside of
        messages (the prefix and the end token), then that of each message with its role token.

        The list is empty for a conversation that must be encoded instead, because it has tools or
        an empty message, which the template drops.
        """
        words = [
            [_words_of(message) for message in messages]
            if self.is_supported and all(map(_is_countable, messages))
            else []
            for messages in conversations
        ]
        if len(self.counts) > MAX_CACHED_WORDS:
            self.counts.clear()
        new_words = [*{*chain(*chain(*words))}.difference(self.counts)]
        encodings = self.tokenizer.encode_batch_fast(new_words, add_special_tokens=False)
        self.counts |= zip(new_words, map(len, encodings), strict=True)
        return [
            [len(PROMPT_PREFIX) + 1]
            + [
                # The role is one token, and an image is three.
                1 + 3 * len(images_of([message])) + sum(map(self.counts.__getitem__, message_words))
                for message, message_words in zip(messages, conversation_words, strict=True)
            ]
            if conversation_words
            else []
            for messages, conversation_words in zip(conversations, words, strict=True)
        ]


def _is_countable(message: dict) -> bool:
    return "tools" not in message and bool(message["content"] or "image" in message)


def _words_of(message: dict) -> list[str]:
    """Return the text that the template writes after the role of a message, split into words."""
    head = f"{message.get('metadata') or ''}\n"
    return WORD_START_RE.split(head) + WORD_START_RE.split(text_of(message))
