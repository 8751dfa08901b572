"""Sources to build from, tiny and of the real size, and the command line in its own process."""

import json
import os
import struct
import subprocess
import sys
from base64 import b64encode
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from glm4v_patched.remote.tokenization_chatglm import SPECIAL_TOKENS
from tests.helpers.legacy_repository import write_legacy_repository

ROOT = Path(__file__).resolve().parents[2]
NAME = "our-org/glm-4v-9b-trainable"
INDEX = "model.safetensors.index.json"
LICENSE_TEXT = "The licence of the weights, as the original has it.\n"
GENERATION = {"eos_token_id": [500], "pad_token_id": 500, "do_sample": True, "temperature": 0.8}


def write_original(folder: Path) -> Path:
    """The stand-in of the original, in two shards, with its licence and generation config."""
    write_legacy_repository(folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    where = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), start=1):
        shard = f"model-{number:05d}-of-00002.safetensors"
        save_file({n: weights[n] for n in part}, folder / shard, metadata={"format": "pt"})
        where |= dict.fromkeys(part, shard)
    size = sum(weight.nbytes for weight in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=2))
    (folder / "LICENSE").write_text(LICENSE_TEXT)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    return folder


def shards_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


def as_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def run_cli(*arguments: object, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "hub_upload", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


@cache
def real_shapes() -> dict[str, list[int]]:
    """Names and shapes of the parameters of glm-4v-9b."""
    with torch.device("meta"):
        model = GLM4VForCausalLM(ChatGLMConfig())
    return {name: list(value.shape) for name, value in model.state_dict().items()}


def real_files(num_shards: int = 15) -> tuple[dict[str, bytes], dict[str, tuple[bytes, int]]]:
    """Small files of a repository of the real size, and of each shard its head and its size."""
    shapes, shards, where, total = real_shapes(), {}, {}, 0
    names = list(shapes)
    each = -(-len(names) // num_shards)
    for number in range(num_shards):
        shard = f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"
        header, at = {"__metadata__": {"format": "pt"}}, 0
        for name in names[number * each : (number + 1) * each]:
            end = at + 2 * torch.Size(shapes[name]).numel()
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [at, end]}
            where[name], at = shard, end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        shards[shard] = (struct.pack("<Q", len(text)) + text, 8 + len(text) + at)
        total += at
    config = ChatGLMConfig().to_dict() | {"architectures": ["ChatGLMModel"]}
    config = {k: v for k, v in config.items() if k not in ("auto_map", "dtype", "torch_dtype")}
    tokenizer = {
        "added_tokens_decoder": {
            str(151329 + number): {"content": token, "special": True}
            for number, token in enumerate(SPECIAL_TOKENS)
        },
        "image_size": 1120,
        "tokenizer_class": "ChatGLM4Tokenizer",
    }
    files = {
        "config.json": config | {"torch_dtype": "bfloat16"},
        "tokenizer_config.json": tokenizer,
        INDEX: {"metadata": {"total_size": total}, "weight_map": where},
    }
    small = {name: json.dumps(values).encode() for name, values in files.items()}
    return small | {"tokenizer.model": ranks_of_the_real_size()}, shards


def ranks_of_the_real_size() -> bytes:
    """As many ranks as the real vocabulary has, of tokens of one to three bytes."""
    tokens = [bytes([a]) for a in range(256)]
    tokens += [bytes([a, b]) for a in range(256) for b in range(256)]
    tokens += [bytes([a, b, c]) for a in range(97, 123) for b in range(256) for c in range(256)]
    rows = (b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens[:151329]))
    return b"".join(rows)
