"""Tokenizer of the stand-in for the published repository (see legacy_repository.py)."""

import base64

from transformers import PreTrainedTokenizer


class ChatGLM4Tokenizer(PreTrainedTokenizer):
    """Tokens of the vocabulary are bytes, special tokens strings. It joins no bytes."""

    vocab_files_names = {"vocab_file": "tokenizer.model"}
    model_input_names = ["input_ids", "attention_mask", "position_ids"]

    def __init__(self, vocab_file, padding_side="left", image_size=None, **kwargs):
        self.image_size = image_size
        with open(vocab_file, "rb") as lines:
            pairs = [line.split() for line in lines]
        self.ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
        super().__init__(padding_side=padding_side, **kwargs)

    @property
    def vocab_size(self):
        return len(self.ranks)

    def get_vocab(self):
        return {**self.ranks, **self.added_tokens_encoder}

    def _tokenize(self, text, **kwargs):
        return [bytes([byte]) for byte in text.encode()]

    def _convert_token_to_id(self, token):
        return self.ranks[token]
