"""Sources to build from, tiny and of the real size; and the files of a build that is made up.

What is made up passes all checks of verify that run nothing, and has weights as one likes.
"""

import hashlib
import json
import re
import struct
from base64 import b64encode
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

import glm4v_patched
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from glm4v_patched.remote.tokenization_chatglm import SPECIAL_TOKENS
from hub_upload.files import Contents, File
from hub_upload.layout import ARCHITECTURE, AUTO_MAPS, INDEX, MANIFEST, SPECIAL_IDS, our_code
from hub_upload.layout import UPSTREAM as UPSTREAM
from hub_upload.verify import FAILED, Target, check_files
from tests.helpers.legacy_repository import write_legacy_repository
from tests.helpers.local_hub import LocalHub, Repository, Sparse

ROOT = Path(__file__).resolve().parents[2]
NAME = "our-org/glm-4v-9b-trainable"
TAG = f"v{glm4v_patched.__version__}"
LICENSE_TEXT = "The licence of the weights, as the original has it.\n"
GENERATION = {"eos_token_id": [500], "pad_token_id": 500, "do_sample": True, "temperature": 0.8}
CODE = our_code()
CARD = f"""---
license: other
license_name: glm-4
license_link: https://huggingface.co/{UPSTREAM}/blob/main/LICENSE
base_model: {UPSTREAM}
library_name: transformers
pipeline_tag: image-text-to-text
language: [en]
tags: [glm]
---
# card
"""


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
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def python_of_card(folder: Path) -> list[str]:
    """The blocks of code of its card."""
    return re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)


def edit(path: Path, change: Callable[[dict], object]) -> None:
    """Change the JSON in a file, and not in the file that it may be linked to."""
    values = json.loads(path.read_text())
    change(values)
    path.unlink()
    path.write_text(json.dumps(values))


def amended(name: str, **values):
    """What changes these fields of a JSON file of a build."""
    return lambda folder: edit(folder / name, lambda config: config.update(values))


def signed(plant: Callable[[Path], object]):
    """What plants, and lets the manifest agree with it."""
    return lambda folder: [plant(folder), sign(folder)]


def failures(files: dict[str, File], check_weights: bool = True) -> list[str]:
    """What fails of all that runs nothing."""
    manifest = Contents("a build", files).read_manifest()
    checks = check_files(Target("a build", files, manifest, check_weights=check_weights))
    return [check.name for check in checks if check.status == FAILED]


def flip(path: Path) -> None:
    """Change the last byte, and not in the file that it may be a link to."""
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def plant_link(path: Path, outside: Path, is_folder: bool = False) -> Path:
    """Put a link to what somebody would not publish; it has what the file had, if there is one."""
    outside.mkdir(exist_ok=True)
    secret = outside / "id_rsa"
    if is_folder:
        secret.mkdir()
        (secret / "key").write_text("BEGIN PRIVATE KEY")
    else:
        secret.write_bytes(path.read_bytes() if path.exists() else b"BEGIN PRIVATE KEY")
    path.unlink(missing_ok=True)
    path.symlink_to(secret)
    return secret


@contextmanager
def waited_for(seconds: float):
    """The client of this process waits so long for an answer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", str(seconds))
        for name in ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"):
            patch.setattr(constants, name, seconds)
        yield


def sign(folder: Path, *more: str, version: str = "9.9.9") -> None:
    """Let the manifest agree with the files that are there, and list ``more``.

    It names another version, as somebody would write it who wants to be let in.
    """

    def digest(name: str) -> str:
        return hashlib.sha256((folder / name).read_bytes()).hexdigest()

    def agree(manifest: dict) -> None:
        names = {*manifest["files"], *more} | {path.name for path in folder.glob("*.safetensors")}
        sizes = {n: (folder / n).stat().st_size for n in sorted(names) if (folder / n).exists()}
        manifest["files"] = {n: {"size": s, "sha256": digest(n)} for n, s in sizes.items()}
        manifest["version"] = version

    edit(folder / MANIFEST, agree)


@cache
def real_files(num_shards: int = 15) -> tuple[dict[str, bytes], dict[str, Sparse]]:
    """Small files of a repository of the real size, and its shards without their content."""
    with torch.device("meta"):
        state = GLM4VForCausalLM(ChatGLMConfig()).state_dict()
    names, shards, where, total = list(state), {}, {}, 0
    each = -(-len(names) // num_shards)
    for number in range(num_shards):
        shard = f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"
        header, at = {"__metadata__": {"format": "pt"}}, 0
        for name in names[number * each : (number + 1) * each]:
            shape = list(state[name].shape)
            end = at + 2 * torch.Size(shape).numel()
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
            where[name], at = shard, end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        head = struct.pack("<Q", len(text)) + text
        shards[shard] = Sparse(len(head) + at, f"{number:064x}", head + bytes(100_001))
        total += at
    config = ChatGLMConfig().to_dict() | {"architectures": ["ChatGLMModel"]}
    config = {k: v for k, v in config.items() if k not in ("auto_map", "dtype", "torch_dtype")}
    added = {str(151329 + i): {"content": t, "special": True} for i, t in enumerate(SPECIAL_TOKENS)}
    tokenizer = {"added_tokens_decoder": added, "image_size": 1120}
    files = {
        "config.json": config | {"torch_dtype": "bfloat16"},
        "tokenizer_config.json": tokenizer | {"tokenizer_class": "ChatGLM4Tokenizer"},
        INDEX: {"metadata": {"total_size": total}, "weight_map": where},
    }
    # As many ranks as the real vocabulary has, of tokens of one to three bytes.
    tokens = [bytes([a]) for a in range(256)]
    tokens += [bytes([a, b]) for a in range(256) for b in range(256)]
    tokens += [bytes([a, b, c]) for a in range(97, 123) for b in range(256) for c in range(256)]
    rows = (b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens[:151329]))
    small = {name: json.dumps(values).encode() for name, values in files.items()}
    return small | {"tokenizer.model": b"".join(rows)}, shards


def _files() -> dict[str, bytes]:
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
    f"model-{n:05d}-of-00015.safetensors": Sparse(
        1_860_000_000 + n, hashlib.sha256(b"shard %d" % n).hexdigest()
    )
    for n in range(1, 16)
}
SMALL_SHARDS = {f"model-{n + 1:05d}-of-00003.safetensors": shard(n, 39_900) for n in range(3)}


def add_source(hub: LocalHub, shards: dict[str, bytes | Sparse], **settings) -> Repository:
    """The original's repository; what is on its main by now has other weights."""
    source = hub.add_repository(UPSTREAM, {**shards, INDEX: b"{}"}, **settings)
    source.pinned = source.head
    later = dict.fromkeys(shards, Sparse(5, "0" * 64))
    source.add_commit(later)
    return source


def write_build(
    folder: Path,
    shards: dict[str, bytes | Sparse],
    revision: str | None = None,
    local: bool = False,
    version: str = glm4v_patched.__version__,
    code: dict[str, bytes] = CODE,
) -> Path:
    """Write a build whose weights are at ``revision`` of the source, in the folder, or both."""
    folder.mkdir()

    def sha256(content: bytes | Sparse) -> str:
        sparse = isinstance(content, Sparse)
        return content.sha256 if sparse else hashlib.sha256(content).hexdigest()

    def size(content: bytes | Sparse) -> int:
        return content.size if isinstance(content, Sparse) else len(content)

    weight_map = {f"layer.{i}": name for i, name in enumerate(shards)}
    files = FILES | {INDEX: json.dumps({"weight_map": weight_map}).encode()}
    manifest = {"version": version, "fine_tune": None, "weights_from": None}
    if revision:
        manifest["weights_from"] = {"repository": UPSTREAM, "revision": revision}
    listed = code | files | shards
    manifest["files"] = {n: {"size": size(c), "sha256": sha256(c)} for n, c in listed.items()}
    contents = code | files | {MANIFEST: json.dumps(manifest).encode()}
    for name, content in (contents | (shards if local else {})).items():
        (folder / name).write_bytes(content)
    return folder


def is_whole(repository: Repository, commit: str, shards=SMALL_SHARDS, code=CODE) -> bool:
    """Whether all of a build, and nothing else, is in a commit."""
    files, wanted = repository.commits[commit], code | FILES | shards
    assert set(files) == {*wanted, INDEX, MANIFEST, ".gitattributes"}
    return all(files[name].content == content for name, content in wanted.items())


def is_published(hub: LocalHub, name: str, shards=SMALL_SHARDS) -> bool:
    """Whether all is there, in one commit, and the tag on it."""
    there = hub.repositories[name]
    whole = len(there.commits) == 2 and is_whole(there, there.head, shards)
    return whole and there.tags == {TAG: there.head}
