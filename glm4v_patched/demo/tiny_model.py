"""A glm-4v small enough for a laptop: random weights, and a vocabulary learned from the data."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import GenerationConfig

from ..remote.configuration_chatglm import ChatGLMConfig
from ..remote.image_processing_chatglm import ChatGLMImageProcessor
from ..remote.modeling_chatglm import GLM4VForCausalLM
from ..remote.processing_chatglm import ChatGLMProcessor
from ..remote.tokenization_chatglm import ChatGLM4Tokenizer, build_pre_tokenizer

IMAGE_SIDE = 56
PATCH_SIDE = 14

NO_OVERRIDES: Mapping[str, Any] = MappingProxyType({})


def build_from_scratch(
    folder: Path,
    conversations: list[list[dict]],
    seed: int,
    language: Mapping[str, Any] = NO_OVERRIDES,
    tower: Mapping[str, Any] = NO_OVERRIDES,
) -> None:
    """Save a tiny model with random weights, and its processor, for ``from_pretrained``.

    ``language`` and ``tower`` are passed to :func:`tiny_config`.
    """
    processor = build_processor([m["content"] for messages in conversations for m in messages])
    torch.manual_seed(seed)
    config = tiny_config(processor.tokenizer, language=language, tower=tower)
    save(GLM4VForCausalLM(config).bfloat16(), processor, folder)


def save(model: GLM4VForCausalLM, processor: ChatGLMProcessor, folder: Path) -> None:
    """Save a model and its processor for ``from_pretrained``, with greedy decoding as default."""
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def build_processor(
    texts: list[str], image_side: int = IMAGE_SIDE, max_length: int = 1024
) -> ChatGLMProcessor:
    """Build a processor whose vocabulary is a byte-level BPE trained on ``texts``.

    The tokenizer has the split pattern and the special tokens of glm-4v.

    Args:
        texts: Training texts of the BPE.
        image_side: Width and height of images, in pixels.
        max_length: The tokenizer's maximum length, in tokens.
    """
    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = build_pre_tokenizer()
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts, BpeTrainer(vocab_size=512, initial_alphabet=alphabet, show_progress=False)
    )
    return ChatGLMProcessor(
        image_processor=ChatGLMImageProcessor(size=image_side, patch_size=PATCH_SIDE),
        tokenizer=ChatGLM4Tokenizer(tokenizer_object=bpe, model_max_length=max_length),
    )


def special_token_ids(tokenizer: ChatGLM4Tokenizer) -> dict[str, Any]:
    """Return the config fields with the ids of a tokenizer's special tokens."""
    vocabulary = tokenizer.get_vocab()
    ends = ("<|endoftext|>", "<|user|>", "<|observation|>")
    return {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": [vocabulary[token] for token in ends],
        "boi_token_id": vocabulary["<|begin_of_image|>"],
        "eoi_token_id": vocabulary["<|end_of_image|>"],
        "image_token_id": vocabulary[ChatGLMProcessor.image_token],
    }


def tiny_config(
    tokenizer: ChatGLM4Tokenizer,
    image_side: int = IMAGE_SIDE,
    language: Mapping[str, Any] = NO_OVERRIDES,
    tower: Mapping[str, Any] = NO_OVERRIDES,
) -> ChatGLMConfig:
    """Build the config of a tiny model.

    Args:
        tokenizer: Determines the vocabulary size and the special tokens.
        image_side: Width and height of images, in pixels.
        language: Fields of the config that override the tiny model's.
        tower: Fields of its ``vision_config`` that override the tiny model's.
    """
    vision = {
        "hidden_size": 96,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "intermediate_size": 192,
        "patch_size": PATCH_SIDE,
        "image_size": image_side,
        "num_positions": (image_side // PATCH_SIDE) ** 2 + 1,
        # The published value, 8, is for a trained tower; the embeddings of an untrained one are
        # small.
        "scaling_factor": 1,
    }
    fields = {
        "num_layers": 2,
        "padded_vocab_size": len(tokenizer) + -len(tokenizer) % 64,
        "hidden_size": 128,
        "ffn_hidden_size": 256,
        "kv_channels": 32,
        "num_attention_heads": 4,
        "multi_query_group_num": 2,
        "seq_length": 1024,
        "initializer_range": 0.05,
        **special_token_ids(tokenizer),
    }
    return ChatGLMConfig(**fields | dict(language), vision_config=vision | dict(tower))
