"""Folders like those that ``hub_upload build`` makes, and the repository that they come from."""

import hashlib
import json
import struct
from pathlib import Path

import glm4v_patched
from hub_upload.build import ARCHITECTURE, AUTO_MAPS, REMOTE, SPECIAL_IDS
from tests.helpers.local_hub import LocalHub, Repository, Sparse

SOURCE = "zai-org/glm-4v-9b"
INDEX = "model.safetensors.index.json"
CODE = {p.name: p.read_bytes() for p in REMOTE.glob("*.py") if p.name != "__init__.py"}
CARD = """---
license: other
license_name: glm-4
license_link: https://huggingface.co/zai-org/glm-4v-9b/blob/main/LICENSE
base_model: zai-org/glm-4v-9b
library_name: transformers
pipeline_tag: image-text-to-text
language: [en]
tags: [glm]
---
# card
"""


def _files() -> dict[str, bytes]:
    """The least that passes the checks of verify which run nothing."""
    ids = {token: number for number, token in enumerate(SPECIAL_IDS.values(), start=10)}
    config = {"architectures": [ARCHITECTURE], "eos_token_id": 1, "padded_vocab_size": 64}
    config |= {field: ids[token] for field, token in SPECIAL_IDS.items()}
    values = {
        "config.json": config | {"vision_config": {"image_size": 56}},
        "tokenizer_config.json": {"image_size": 56},
        "preprocessor_config.json": {"size": {"height": 56}},
        "processor_config.json": {},
    }
    values = {name: value | {"auto_map": AUTO_MAPS[name]} for name, value in values.items()}
    added = [{"content": token, "id": number} for token, number in ids.items()]
    values |= {"tokenizer.json": {"added_tokens": added}}
    values |= {"generation_config.json": {"eos_token_id": 1}}
    files = {name: json.dumps(value).encode() for name, value in values.items()}
    files |= {"README.md": CARD.encode(), "LICENSE": b"licence\n", "requirements.txt": b"torch\n"}
    return files | {"chat_template.jinja": b"{{ messages }}"}


def shard(number: int, size: int) -> bytes:
    """Safetensors with the tensor that the index of a build expects in its shard of this number."""
    values = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    header = json.dumps({f"layer.{number}": values}).encode()
    return struct.pack("<Q", len(header)) + header + bytes([number]) * size


FILES = _files()
# 28 GB in 15 shards, as the real ones are.
SHARDS = {
    f"model-{number:05d}-of-00015.safetensors": Sparse(
        1_860_000_000 + number, hashlib.sha256(b"shard %d" % number).hexdigest()
    )
    for number in range(1, 16)
}
SMALL_SHARDS = {f"model-{n + 1:05d}-of-00003.safetensors": shard(n, 39_900) for n in range(3)}


def sha256(content: bytes | Sparse) -> str:
    if isinstance(content, Sparse):
        return content.sha256
    return hashlib.sha256(content).hexdigest()


def size(content: bytes | Sparse) -> int:
    return content.size if isinstance(content, Sparse) else len(content)


def add_source(hub: LocalHub, shards: dict[str, bytes | Sparse], **settings) -> Repository:
    """The original's repository; what is on its main by now has other weights."""
    source = hub.add_repository(SOURCE, {**shards, INDEX: b"{}"}, **settings)
    source.pinned = source.head
    later = dict.fromkeys(shards, Sparse(5, sha256(b"later")))
    source.add_commit("refs/heads/main", later, "later weights")
    return source


def write_build(
    folder: Path,
    shards: dict[str, bytes | Sparse],
    revision: str | None = None,
    local: bool = False,
    version: str = glm4v_patched.__version__,
    code: dict[str, bytes] = CODE,
    card: bytes = FILES["README.md"],
) -> Path:
    """Write a build whose weights are at ``revision`` of the source, in the folder, or both."""
    folder.mkdir()
    weight_map = {f"layer.{i}": name for i, name in enumerate(shards)}
    files = FILES | {INDEX: json.dumps({"weight_map": weight_map}).encode(), "README.md": card}
    weights = {name: {"size": size(c), "sha256": sha256(c)} for name, c in shards.items()}
    manifest = {
        "version": version,
        "upstream_revision": revision,
        "code": {name: sha256(content) for name, content in code.items()},
        "weights": {
            "repository": SOURCE if revision else None,
            "revision": revision,
            "files": weights,
        },
        "files": {name: sha256(content) for name, content in files.items()},
    }
    contents = code | files | {"CODE_MANIFEST.json": json.dumps(manifest).encode()}
    for name, content in (contents | (shards if local else {})).items():
        (folder / name).write_bytes(content)
    return folder
