"""Folders like those that ``hub_upload build`` makes, and the repository that they come from."""

import hashlib
import json
from pathlib import Path

from local_hub import LocalHub, Repository, Sparse

SOURCE = "zai-org/glm-4v-9b"
CODE = {"modeling_chatglm.py": b"# model\n", "configuration_chatglm.py": b"# config\n"}
FILES = {
    "config.json": b"{}\n",
    "tokenizer.json": b'{"vocab": {}}\n',
    "README.md": b"---\nlicense: other\n---\n# card\n",
    "LICENSE": b"licence\n",
    "requirements.txt": b"torch\n",
}
INDEX = "model.safetensors.index.json"
# 28 GB in 15 shards, as the real ones are.
SHARDS = {
    f"model-{number:05d}-of-00015.safetensors": Sparse(
        1_860_000_000 + number, hashlib.sha256(b"shard %d" % number).hexdigest()
    )
    for number in range(1, 16)
}
SMALL_SHARDS = {f"model-{n:05d}-of-00003.safetensors": b"weights %d " % n * 4000 for n in (1, 2, 3)}


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
    version: str = "0.1.0",
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
