"""A stand-in for the repository of glm-4v-9b as it was published in 2024, with tiny weights.

It computes the same as that repository on sequences with one image each, by the forward pass of
tests/parity/reference.py, and has these of its defects:

- In training, a padded batch loses its images: plain tokens take their place. In evaluation, it
  is an error.
- Labels on a sequence without an image are an error.
- The loss is rounded to the model's dtype.

It has no cache and no generation, and its tokenizer formats no chats.
"""

import base64
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save_file
from transformers import dynamic_module_utils

from glm4v_patched.remote.tokenization_chatglm import SPECIAL_TOKENS
from tests.helpers.tiny import (
    BOI,
    EOI,
    PAD,
    golden_bytes,
    golden_json,
    golden_weights,
    random_pixels,
    text,
)

LEGACY_CODE = Path(__file__).parent / "legacy"
REFERENCE = Path(__file__).parents[1] / "parity" / "reference.py"
LEGACY_MODEL = "modeling_chatglm.ChatGLMForConditionalGeneration"
LEGACY_AUTO_MAP = {
    "AutoConfig": "configuration_chatglm.ChatGLMConfig",
    "AutoModel": LEGACY_MODEL,
    "AutoModelForCausalLM": LEGACY_MODEL,
    "AutoModelForSeq2SeqLM": LEGACY_MODEL,
}
# Other than in the published vocabulary, video tokens come first: the golden model has 512 ids, and
# its config uses 500 for padding and 510 and 511 for images; our processor uses a video token.
VIDEO_TOKENS = SPECIAL_TOKENS[-2:]
LEGACY_SPECIAL_TOKENS = (*VIDEO_TOKENS, *SPECIAL_TOKENS[:-2])
NUM_RANKS = 512 - len(SPECIAL_TOKENS)
LETTERS = " etaoinshrdlucmw"


def write_legacy_repository(folder: Path) -> None:
    """Write code, config and the golden weights to ``folder``, which is created."""
    folder.mkdir(parents=True)
    for name in ("configuration_chatglm.py", "modeling_chatglm.py"):
        shutil.copyfile(LEGACY_CODE / name, folder / name)
    shutil.copyfile(REFERENCE, folder / "visual.py")
    config = {"architectures": ["ChatGLMModel"], "auto_map": LEGACY_AUTO_MAP}
    (folder / "config.json").write_text(json.dumps(golden_json("config.json") | config))
    buffer = load(golden_bytes("buffer_inv_freq.safetensors"))
    weights = golden_weights() | buffer
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_legacy_tokenizer(folder)


def write_legacy_tokenizer(folder: Path) -> None:
    """Write the tokenizer's code, its ranks and its config."""
    shutil.copyfile(LEGACY_CODE / "tokenization_chatglm.py", folder / "tokenization_chatglm.py")
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks())]
    (folder / "tokenizer.model").write_text("".join(lines))
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    config = {
        "auto_map": {"AutoTokenizer": ["tokenization_chatglm.ChatGLM4Tokenizer", None]},
        "added_tokens_decoder": {
            str(NUM_RANKS + i): {"content": token, **flags, "special": True}
            for i, token in enumerate(LEGACY_SPECIAL_TOKENS)
        },
        "additional_special_tokens": list(SPECIAL_TOKENS),
        "clean_up_tokenization_spaces": False,
        "do_lower_case": False,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": golden_json("config.json")["seq_length"],
        "padding_side": "left",
        "remove_space": False,
        "tokenizer_class": "ChatGLM4Tokenizer",
        "image_size": golden_json("config.json")["vision_config"]["image_size"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def ranks() -> list[bytes]:
    """Return all single bytes, then pairs of frequent letters."""
    pairs = ["".join(pair).encode() for pair in product(LETTERS, repeat=2)]
    return [*(bytes([byte]) for byte in range(256)), *pairs][:NUM_RANKS]


@contextmanager
def remote_code_under(folder: Path) -> Iterator[None]:
    """Make transformers copy remote code to ``folder`` instead of its cache, and unload it."""

    def is_remote(name: str) -> bool:
        return name.partition(".")[0] == "transformers_modules"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder))
        # transformers appends the folder: what it appended for another test would be found first.
        path = [at for at in sys.path if not (Path(at) / "transformers_modules").is_dir()]
        patch.setattr(sys, "path", path)
        modules = {name: sys.modules.pop(name) for name in [*sys.modules] if is_remote(name)}
        try:
            yield
        finally:
            for name in [*filter(is_remote, sys.modules)]:
                del sys.modules[name]
            sys.modules.update(modules)


def image_row(seed: int) -> dict[str, torch.Tensor]:
    """A labeled, unexpanded sequence with one image, as the published code trains on."""
    row = [*text(5, seed=seed), BOI, PAD, EOI, *text(9, seed=seed + 1)]
    labels = [-100] * (len(row) - 6) + row[-6:]
    return {
        "input_ids": torch.tensor([row]),
        "labels": torch.tensor([labels]),
        "images": random_pixels(1, seed=seed),
    }
