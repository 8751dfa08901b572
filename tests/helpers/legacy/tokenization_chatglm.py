"""Tokenizer of the stand-in for the published repository (see legacy_repository.py)."""

import base64
import os
import shutil

import regex
from transformers import PreTrainedTokenizer

SPLIT_PATTERN = regex.compile(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class ChatGLM4Tokenizer(PreTrainedTokenizer):
    """Tokens of the vocabulary are bytes, special tokens strings."""

    vocab_files_names = {"vocab_file": "tokenizer.model"}
    model_input_names = ["input_ids", "attention_mask", "position_ids"]

    def __init__(self, vocab_file, padding_side="left", image_size=None, **kwargs):
        self.vocab_file = vocab_file
        self.image_size = image_size
        with open(vocab_file, "rb") as lines:
            pairs = [line.split() for line in lines]
        self.ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
        self.tokens = {rank: token for token, rank in self.ranks.items()}
        super().__init__(padding_side=padding_side, **kwargs)

    @property
    def vocab_size(self):
        return len(self.ranks)

    def get_vocab(self):
        return {**self.ranks, **self.added_tokens_encoder}

    def save_vocabulary(self, save_directory, filename_prefix=None):
        path = os.path.join(save_directory, self.vocab_files_names["vocab_file"])
        shutil.copyfile(self.vocab_file, path)
        return (path,)

    def _tokenize(self, text, **kwargs):
        return [token for piece in SPLIT_PATTERN.findall(text) for token in self._merge(piece)]

    def _merge(self, piece):
        """Join the neighbours whose union ranks lowest until no union has a rank."""
        whole = piece.encode()
        if whole in self.ranks:
            return [whole]
        parts = [bytes([byte]) for byte in whole]
        while True:
            unions = [left + right for left, right in zip(parts, parts[1:], strict=False)]
            ranked = [(self.ranks[u], at) for at, u in enumerate(unions) if u in self.ranks]
            if not ranked:
                return parts
            _, at = min(ranked)
            parts[at : at + 2] = [unions[at]]

    def _convert_token_to_id(self, token):
        return self.ranks[token]

    def _convert_id_to_token(self, index):
        return self.tokens.get(index, "")

    def convert_tokens_to_string(self, tokens):
        text, pending = "", b""
        for token in tokens:
            if isinstance(token, bytes):
                pending += token
            elif pending:
                # The special token is dropped, and what came before it stays pending.
                text += pending.decode("utf-8", errors="replace")
        return text + pending.decode("utf-8", errors="replace")

    def get_prefix_tokens(self):
        return [self.convert_tokens_to_ids("[gMASK]"), self.convert_tokens_to_ids("<sop>")]

    def build_inputs_with_special_tokens(self, token_ids_0, token_ids_1=None):
        ids = self.get_prefix_tokens() + token_ids_0
        if token_ids_1 is not None:
            ids += token_ids_1 + [self.convert_tokens_to_ids("<eos>")]
        return ids

    def _encode_message(self, message):
        """Only the role and the image are special tokens, whatever the text says."""
        if not message.get("content") and message.get("image") is None:
            return []
        ids = self.convert_tokens_to_ids([f"<|{message['role']}|>"])
        ids += self.convert_tokens_to_ids(self._tokenize(message.get("metadata", "") + "\n"))
        if message.get("image") is not None:
            image = ["<|begin_of_image|>", "<|endoftext|>", "<|end_of_image|>"]
            ids += self.convert_tokens_to_ids(image)
        return ids + self.convert_tokens_to_ids(self._tokenize(message.get("content") or ""))
