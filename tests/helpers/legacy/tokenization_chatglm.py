"""Tokenizer of the stand-in for the published repository (see legacy_repository.py)."""

from transformers import PreTrainedTokenizer


class ChatGLM4Tokenizer(PreTrainedTokenizer):
    """A vocabulary without the merges: it is loaded, and reads nothing."""

    vocab_files_names = {"vocab_file": "tokenizer.model"}

    def __init__(self, vocab_file, **kwargs):
        with open(vocab_file) as lines:
            self.ranks = {token: int(rank) for token, rank in map(str.split, lines)}
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return len(self.ranks)

    def get_vocab(self):
        return {**self.ranks, **self.added_tokens_encoder}

    def _convert_token_to_id(self, token):
        return self.ranks.get(token)
