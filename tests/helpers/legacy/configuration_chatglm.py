"""Configuration of the stand-in for the published repository (see legacy_repository.py)."""

from transformers import PretrainedConfig


class ChatGLMConfig(PretrainedConfig):
    model_type = "chatglm"

    def __init__(self, padded_vocab_size=65024, vision_config=None, **fields):
        """``fields`` become attributes; the ``config.json`` of the golden model has all."""
        self.padded_vocab_size = self.vocab_size = padded_vocab_size
        self.vision_config = vision_config
        super().__init__(**fields)
