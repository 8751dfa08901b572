"""A source to build from; helpers that change and compare builds."""

import json
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file

import glm4v_patched
from glm4v_patched.models.adopt import read_our_code, to_json_bytes
from glm4v_patched.models.weight_files import WEIGHTS_INDEX as INDEX
from hub_upload.build import UPSTREAM as UPSTREAM
from hub_upload.manifest import MANIFEST
from tests.helpers.legacy_repository import write_legacy_repository
from tests.helpers.local_hub import File, LocalHub

ROOT = Path(__file__).resolve().parents[2]
NAME = "our-org/glm-4v-9b-trainable"
TAG = f"v{glm4v_patched.__version__}"
LICENSE_TEXT = "The license of the weights, as the original has it.\n"
GENERATION = {"eos_token_id": [500], "pad_token_id": 500, "do_sample": True, "temperature": 0.8}
CODE = read_our_code()


def write_original(folder: Path) -> Path:
    """Write a stand-in of the original, in two shards, with license and generation config."""
    write_legacy_repository(folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    weight_map = {}
    for number, half in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), start=1):
        shard = f"model-{number:05d}-of-00002.safetensors"
        save_file({n: weights[n] for n in half}, folder / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(half, shard)
    size = sum(weight.nbytes for weight in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2))
    (folder / "LICENSE").write_text(LICENSE_TEXT)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    return folder


def shards_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


def as_files(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def edit(path: Path, change: Callable[[dict], object]) -> None:
    """Change the JSON in a file of a build; a file that it is linked to stays the same."""
    values = json.loads(path.read_text())
    change(values)
    path.unlink()
    path.write_bytes(to_json_bytes(values))


def flip(path: Path) -> None:
    """Change the last byte of a file; a file that it is linked to stays the same."""
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def is_complete(files: dict[str, File], folder: Path) -> bool:
    """Return whether a commit has exactly the files of a build, including copied weights."""
    stored = {name: file.content for name, file in files.items() if name != ".gitattributes"}
    listed = json.loads((folder / MANIFEST).read_text())["files"]
    hashes = {n: {"size": len(f.content), "sha256": f.sha256} for n, f in files.items()}
    same = all(stored.get(name) == content for name, content in as_files(folder).items())
    return same and {*stored} == {*listed, MANIFEST} and listed.items() <= hashes.items()


def is_published(hub: LocalHub, folder: Path) -> bool:
    """Return whether the build was published in one commit, which has the tag."""
    repository = hub.repositories[NAME]
    complete = len(repository.commits) == 2 and is_complete(repository.files, folder)
    return complete and repository.tags == {TAG: repository.head}
