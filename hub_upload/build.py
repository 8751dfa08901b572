"""Makes the folder that is published: our code beside the original's weights and vocabulary.

Pure: the same source and the same code give the same bytes, whichever supported transformers runs
this. Nothing that transformers writes with its own version's stamp is taken over; what it loads is
tested on both ends of the range. Needs Python 3.11.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
import tomllib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path

import jinja2
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils.sha import git_hash

import glm4v_patched
from glm4v_patched.patch.repository import is_glm4v
from glm4v_patched.remote.configuration_chatglm import AUTO_MAP, ChatGLMConfig
from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor

from .faults import NoAnswer, NotOfAHub, commit_of, during
from .files import (
    ID,
    INDEX,
    MANIFEST,
    SINGLE_FILE,
    files_in,
    files_of,
    read_manifest,
    read_object,
    shards_of_index,
)

ROOT = Path(__file__).resolve().parents[1]
REMOTE = Path(glm4v_patched.__file__).parent / "remote"
CARD = Path(__file__).with_name("MODEL_CARD.md")
UPSTREAM = "zai-org/glm-4v-9b"

WEIGHTS_LICENSE = "MODEL_LICENSE"
ARCHITECTURE = "GLM4VForCausalLM"
TOKENIZER_AUTO_MAP = {
    "AutoProcessor": "processing_chatglm.ChatGLMProcessor",
    "AutoTokenizer": ["tokenization_chatglm.ChatGLM4Tokenizer", None],
}
IMAGE_PROCESSOR_AUTO_MAP = {
    "AutoImageProcessor": "image_processing_chatglm.ChatGLMImageProcessor",
    "AutoProcessor": "processing_chatglm.ChatGLMProcessor",
}
# By file, in the order in which the loader looks.
AUTO_MAPS = {
    "config.json": AUTO_MAP | IMAGE_PROCESSOR_AUTO_MAP | TOKENIZER_AUTO_MAP,
    "tokenizer_config.json": TOKENIZER_AUTO_MAP,
    "preprocessor_config.json": IMAGE_PROCESSOR_AUTO_MAP,
    "processor_config.json": {"AutoProcessor": "processing_chatglm.ChatGLMProcessor"},
}
SPECIAL_IDS = {
    "boi_token_id": "<|begin_of_image|>",
    "eoi_token_id": "<|end_of_image|>",
    "pad_token_id": "<|endoftext|>",
}
# All that a build writes beside code, weights and its manifest.
FILES = {*AUTO_MAPS, INDEX, WEIGHTS_LICENSE, "LICENSE", "README.md", "chat_template.jinja"}
FILES |= {"generation_config.json", "requirements.txt", "tokenizer.json"}
# What is read of a source; never its code, nor anything pickled.
SMALL_FILES = ["*.json", "*.jinja", "tokenizer.model", "LICENSE*", WEIGHTS_LICENSE]
# The published config names this class; whoever loads and saves the model, another one.
PUBLISHED_ARCHITECTURE = "ChatGLMModel"
LEFT_BY_TRAINING = ("training.json", "trainer_state.json", "training_args.bin")
OF_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
READ_AGAIN = "run the same command again"
# transformers leaves these in a tokenizer's config; they say where it was loaded from.
TRACES = ("chat_template", "is_local", "local_files_only", "name_or_path", "_commit_hash")


@dataclass(frozen=True)
class Source:
    """What a build starts from.

    Attributes:
        name: As it was given.
        contents: Config, vocabulary, index and licence: the small files that are there.
        present: Names of all files that are there.
        weights: ``{"size", "sha256"}`` of each file of weights.
        folder: Holds the weights; None if they are on the Hub.
        repository, revision: Where on the Hub the weights are; None for a local folder.
    """

    name: str
    contents: dict[str, bytes]
    present: Collection[str]
    weights: dict[str, dict]
    folder: Path | None = None
    repository: str | None = None
    revision: str | None = None

    @property
    def is_local(self) -> bool:
        return self.folder is not None

    def read_json(self, name: str) -> dict:
        if name not in self.contents:
            raise ValueError(f"{self} has no {name}: give the original's folder or repository")
        return read_object(self.contents[name], f"{self}: {name}")

    def license_of_weights(self) -> tuple[str | None, bytes | None]:
        """Name and text of it; not that of our code, which lies in a source that is our build."""
        code = (ROOT / "LICENSE").read_bytes()
        for name in (WEIGHTS_LICENSE, "LICENSE", "LICENSE.md"):
            text = self.contents.get(name)
            if text is not None and text != code:
                return name, text
        return None, None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class FineTune:
    """What somebody says of weights that are not the published ones.

    Attributes:
        base: Id on the Hub of what was trained.
        trained: What of it was trained, and on what; a sentence for the card.
    """

    base: str
    trained: str

    @classmethod
    def of(cls, base: str | None, trained: str | None) -> "FineTune | None":
        """Raise ``ValueError`` unless both are given, or neither."""
        if base is None and trained is None:
            return None
        if not base or not re.fullmatch(ID, base, re.ASCII):
            raise ValueError(f"--fine-tune-of {base}: give the id of the base as org/name")
        if not trained or not trained.strip() or not trained.isprintable():
            raise ValueError(
                f"--fine-tune-of {base} takes --trained too: a sentence for the card that says "
                "what was trained and on what, such as 'the language model, on 2,000 receipts'"
            )
        return cls(base, trained.strip())


def read_source(text: str) -> Source:
    """Find what ``--weights`` names.

    Raises:
        ValueError: neither a folder nor a pinned repository, one without safetensors, or one with
            links that lead out of it.
        Failure: the Hub does not give its files.
    """
    folder = Path(text)
    if folder.is_dir():
        paths = {name: path for name, path in files_of(folder).items() if "/" not in name}
        contents = {name: path.read_bytes() for name, path in paths.items() if _is_small(name)}
        names = _names_of_weights(contents, paths, text)
        weights = {name: fingerprint(paths[name]) for name in names}
        return Source(text, contents, set(paths), weights, folder)
    repository, _, revision = text.partition("@")
    if not re.fullmatch(ID, repository) or text.startswith("."):
        raise ValueError(
            f"{text} is neither a folder nor a repository of the Hub: give an existing folder, or "
            f"{UPSTREAM}@<commit of 40 hex digits>"
        )
    if not re.fullmatch("[0-9a-f]{40}", revision):
        raise ValueError(_ask_for_a_commit(repository, revision))
    return _read_repository(repository, revision)


def _is_small(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in SMALL_FILES)


def _ask_for_a_commit(repository: str, revision: str) -> str:
    try:
        commit = commit_of(HfApi().model_info(repository, revision=revision or None))
    except Exception as error:  # whatever the client raises, the cure below is what matters
        reason = error if isinstance(error, NoAnswer) else type(error).__name__
        now = f"its commit could not be asked for: {reason}"
        commit = "<commit of 40 hex digits>"
    else:
        now = f"{revision or 'its main branch'} is at that commit now"
    given = f"{revision} is no full commit" if revision else "no revision is given"
    return (
        f"{repository}: {given}, and what it points to may change between two builds; give "
        f"{repository}@{commit} ({now})"
    )


def _read_repository(repository: str, revision: str) -> Source:
    _, files = list_files(repository, revision)
    small = {name: file for name, file in files.items() if _is_small(name)}
    source = f"{repository}@{revision}"
    if "config.json" not in small:
        raise ValueError(f"{source} has no config.json: give the original's")
    contents = download(repository, revision, small)
    weights = {}
    for name in _names_of_weights(contents, files, source):
        if files[name].lfs is None:
            raise ValueError(
                f"{source}: the Hub gives no sha256 of {name}, which is not stored "
                "as a large file: download the repository and give the folder"
            )
        weights[name] = {"size": files[name].size, "sha256": files[name].lfs.sha256}
    return Source(source, contents, set(files), weights, None, repository, revision)


def list_files(repository: str, revision: str | None) -> tuple[str, dict[str, RepoSibling]]:
    """The commit that ``revision`` (main if ``None``) is at; its files with sizes and hashes.

    Raises:
        Failure: the server does not tell.
    """
    at = f"{repository}@{revision}" if revision else repository
    with during(f"looking at {at}", READ_AGAIN):
        info = HfApi().model_info(repository, revision=revision, files_metadata=True)
        files = {file.rfilename: file for file in info.siblings or ()}
        commit = commit_of(info)
        if info.siblings is None:
            raise NotOfAHub("no list of files")
        for name, file in files.items():
            if not isinstance(file.size, int) or not (file.lfs or file.blob_id):
                raise NotOfAHub(f"no size and hash of {name}")
    return commit, files


def download(
    repository: str, commit: str, files: dict[str, RepoSibling], cache: Path | None = None
) -> dict[str, bytes]:
    """These files of a commit, whole: what was compared with the server's hashes is returned.

    Not by ``snapshot_download``: where the server fails, 0.36 gives what an earlier run left.

    Raises:
        Failure: they do not all arrive, or cannot be written.
    """
    with during(f"downloading from {repository}@{commit}", READ_AGAIN):
        return {name: _download(repository, commit, name, files[name], cache) for name in files}


def _download(
    repository: str, commit: str, name: str, file: RepoSibling, cache: Path | None
) -> bytes:
    options = {"revision": commit, "cache_dir": cache}
    path = Path(hf_hub_download(repository, name, **options))
    content = path.read_bytes()
    if not _is_whole(content, file):
        # 0.36 goes on behind whatever a fault has left of a file.
        path.unlink()
        content = Path(
            hf_hub_download(repository, name, **options, force_download=True)
        ).read_bytes()
    if not _is_whole(content, file):
        raise NotOfAHub(f"{name} has another hash than its list of files tells")
    return content


def _is_whole(content: bytes, file: RepoSibling) -> bool:
    if file.lfs:
        return _sha256(content) == file.lfs.sha256
    return git_hash(content) == file.blob_id


def _names_of_weights(
    contents: dict[str, bytes], available: Collection[str], source: str
) -> list[str]:
    names = [SINGLE_FILE]
    if INDEX in contents:
        where = f"{source}: {INDEX}"
        names = shards_of_index(read_object(contents[INDEX], where), where)
    if missing := [name for name in names if name not in available]:
        raise ValueError(
            f"{source} lacks {len(missing)} of {len(names)} files of weights: {', '.join(missing)}"
        )
    return names


def fingerprint(path: Path) -> dict:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size": path.stat().st_size, "sha256": digest}


def build(
    source_text: str,
    out: Path,
    name: str,
    copy: bool = False,
    fine_tune: FineTune | None = None,
) -> dict:
    """Write the folder; return its manifest.

    Args:
        source_text: As for :func:`read_source`.
        out: Missing, empty, or an earlier build, which is replaced at once and only at the end.
        name: The repository's id on the Hub, for the card.
        copy: Copy local weights where they cannot be hard-linked.
        fine_tune: What the weights are, if they are not the published ones.

    Raises:
        ValueError: the source cannot be published, or ``out`` holds what is not ours to replace.
        Failure: the Hub does not give the source's files.
    """
    out = Path(os.path.realpath(out))
    _require_replaceable(out)
    source = read_source(source_text)
    if source.is_local and out == Path(os.path.realpath(source.folder)):
        raise ValueError(f"--out is the source itself, {out}: give another folder")
    files = contents(source, name, fine_tune)
    with _replacement_of(out) as folder:
        for file_name, content in files.items():
            (folder / file_name).write_bytes(content)
        if source.is_local:
            _place_weights(source, folder, copy)
    return json.loads(files[MANIFEST])


def differences(
    source_text: str, out: Path, name: str, fine_tune: FineTune | None = None
) -> list[str]:
    """What in ``out`` is not what :func:`build` would write; weights may be left out or local."""
    source = read_source(source_text)
    want = contents(source, name, fine_tune)
    if not out.is_dir():
        return [f"{out}: does not exist"]
    here = {str(path.relative_to(out)): path for path in out.rglob("*") if path.is_file()}
    found = [f"{n}: missing" for n in want if n not in here]
    foreign = here.keys() - want.keys() - source.weights.keys()
    found += [f"{n}: not part of a build" for n in foreign]
    found += [f"{n}: differs" for n in want if n in here and here[n].read_bytes() != want[n]]
    for file_name, expected in source.weights.items():
        path = here.get(file_name)
        if path is None:
            found += [f"{file_name}: missing"] if source.is_local else []
        elif source.is_local and path.samefile(source.folder / file_name):
            continue
        elif fingerprint(path) != expected:
            found.append(f"{file_name}: differs")
    return sorted(found)


def describe(manifest: dict) -> str:
    """What was built, for a person."""
    weights = manifest["weights"]
    size = sum(file["size"] for file in weights["files"].values())
    where = (
        f"left for a server-side copy from {weights['repository']}@{weights['revision']}"
        if weights["repository"]
        else "placed in the folder"
    )
    lines = [
        f"version {manifest['version']}: {len(manifest['code'])} files of code and "
        f"{len(manifest['files'])} others",
        f"weights: {len(weights['files'])} files, {size:,} bytes, {where}",
    ]
    if WEIGHTS_LICENSE not in manifest["files"]:
        lines.append(
            f"the source has no licence file: there is no {WEIGHTS_LICENSE}, and the card links to "
            f"that of {UPSTREAM}; read it before you publish"
        )
    return "\n".join(lines)


def contents(source: Source, name: str, fine_tune: FineTune | None = None) -> dict[str, bytes]:
    """Every file but the weights, by its name."""
    fine_tune = _fine_tune_of(source, fine_tune)
    code = {path.name: path.read_bytes() for path in sorted(REMOTE.glob("*.py"))}
    del code["__init__.py"]
    files = _processor_files(source)
    config = _config(source, files)
    files["config.json"] = _json(config)
    files["generation_config.json"] = source.contents.get("generation_config.json") or _json(
        {key: config[key] for key in ("eos_token_id", "pad_token_id")}
    )
    if INDEX in source.contents:
        files[INDEX] = source.contents[INDEX]
    files["LICENSE"] = (ROOT / "LICENSE").read_bytes()
    license_name, license_text = source.license_of_weights()
    if license_text is not None:
        files[WEIGHTS_LICENSE] = license_text
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = project["dependencies"]
    files["requirements.txt"] = "".join(f"{line}\n" for line in requirements).encode()
    files["README.md"] = _card(source, name, fine_tune, license_name, requirements)
    assert files.keys() <= FILES, files.keys() - FILES
    manifest = {
        "version": glm4v_patched.__version__,
        "upstream_revision": source.revision,
        "fine_tune": fine_tune and asdict(fine_tune),
        "code": {file: _sha256(content) for file, content in code.items()},
        "weights": {
            "repository": source.repository,
            "revision": source.revision,
            "files": source.weights,
        },
        "files": {file: _sha256(files[file]) for file in sorted(files)},
    }
    return {**code, **files, MANIFEST: _json(manifest)}


def _config(source: Source, processor_files: dict[str, bytes]) -> dict:
    """The original's fields as they are; ours for the loader; ids of the tokenizer if it has none.

    Raises:
        ValueError: no glm-4v, one this code does not compute, or ids that are not the tokenizer's.
    """
    config = source.read_json("config.json")
    if not is_glm4v(config):
        raise ValueError(
            f"{source}: its config.json is no glm-4v's (model_type {config.get('model_type')!r}, "
            f"vision_config {'there' if config.get('vision_config') else 'missing'})"
        )
    tokens = json.loads(processor_files["tokenizer.json"])["added_tokens"]
    ids = {token["content"]: token["id"] for token in tokens}
    for field, token in SPECIAL_IDS.items():
        if config.get(field) is None:
            config[field] = ids[token]
        if config[field] != ids[token]:
            raise ValueError(
                f"{source}: config.json has {field} {config[field]}, but {token} is {ids[token]} "
                "to its tokenizer: they are not of the same model"
            )
    checked = ChatGLMConfig(**config)
    config.setdefault("eos_token_id", checked.eos_token_id)
    config["vision_config"].setdefault("image_size", checked.vision.image_size)
    side = json.loads(processor_files["tokenizer_config.json"])["image_size"]
    if side != checked.vision.image_size:
        raise ValueError(
            f"{source}: the tokenizer has image_size {side}, config.json has "
            f"{checked.vision.image_size} in vision_config: they are not of the same model"
        )
    return config | {"architectures": [ARCHITECTURE], "auto_map": AUTO_MAPS["config.json"]}


def _processor_files(source: Source) -> dict[str, bytes]:
    """Files of tokenizer and processor that every supported transformers reads.

    The tokenizer, the template and the image processor's values are what save_pretrained writes,
    the same in all versions. The configs around them are not, so their fields are written here:
    the original's for the tokenizer, and for the processor only where its code is, because
    transformers 4 finds the image processor in its own file alone and 5 looks there too.
    """
    tokenizer = source.read_json("tokenizer_config.json")
    with tempfile.TemporaryDirectory() as given, tempfile.TemporaryDirectory() as saved:
        for name, content in source.contents.items():
            Path(given, name).write_bytes(content)
        processor = ChatGLMProcessor.from_pretrained(given)
        processor.save_pretrained(saved)
        files = {
            name: Path(saved, name).read_bytes()
            for name in ("tokenizer.json", "chat_template.jinja", "preprocessor_config.json")
        }
    image_processor = json.loads(files["preprocessor_config.json"])
    for trace in TRACES:
        tokenizer.pop(trace, None)
    tokenizer.setdefault("image_size", processor.tokenizer.image_size)
    common = {"processor_class": "ChatGLMProcessor"}
    for name, values in (
        ("preprocessor_config.json", image_processor),
        ("processor_config.json", {}),
        ("tokenizer_config.json", tokenizer),
    ):
        values = values | common | {"auto_map": AUTO_MAPS[name]}
        files[name] = _json(dict(sorted(values.items())))
    return files


def _fine_tune_of(source: Source, given: FineTune | None) -> FineTune | None:
    """What the card says of the weights: what is given, or what an earlier build has of the same.

    Raises:
        ValueError: an adapter lies beside them, or they were trained and nobody says how.
    """
    if adapters := sorted(set(OF_ADAPTERS) & set(source.present)):
        raise ValueError(
            f"{source} holds an adapter ({', '.join(adapters)}), which a build leaves out: merge "
            "it into the weights first (peft's merge_and_unload), and give that folder"
        )
    if given or source.repository == UPSTREAM:
        return given
    if MANIFEST in source.contents:
        earlier = read_manifest(source.contents[MANIFEST], f"{source}: {MANIFEST}")
        if earlier["weights"]["files"] == source.weights:
            told = earlier.get("fine_tune")
            return told and FineTune(**told)
    signs = sorted(set(LEFT_BY_TRAINING) & set(source.present))
    architectures = source.read_json("config.json").get("architectures")
    if architectures != [PUBLISHED_ARCHITECTURE]:
        signs.append(f"config.json names {architectures}, not {[PUBLISHED_ARCHITECTURE]}")
    if signs:
        raise ValueError(
            f"{source} is not as {UPSTREAM} was published ({'; '.join(signs)}): for a card that "
            f"says what it is, give --fine-tune-of {UPSTREAM} (or what else it was trained from) "
            "and --trained 'what was trained, and on what'"
        )
    return None


def _card(
    source: Source,
    name: str,
    fine_tune: FineTune | None,
    license_name: str | None,
    requirements: list[str],
) -> bytes:
    pinned = source.repository is not None and license_name is not None
    address = f"{UPSTREAM}/blob/main/LICENSE"
    if pinned:
        address = f"{source.repository}/blob/{source.revision}/{license_name}"
    template = jinja2.Environment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False
    ).from_string(CARD.read_text(encoding="utf-8"))
    card = template.render(
        name=name,
        version=glm4v_patched.__version__,
        requirements=" ".join(f'"{line}"' for line in requirements),
        base_model=fine_tune.base if fine_tune else source.repository or UPSTREAM,
        trained=fine_tune and fine_tune.trained,
        is_published=source.repository == UPSTREAM and not fine_tune,
        revision=source.revision,
        license_link=f"https://huggingface.co/{address}",
        license_file=license_name and WEIGHTS_LICENSE,
    )
    return card.encode()


def _json(values: dict) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _require_replaceable(out: Path) -> None:
    """Raise ``ValueError`` unless nothing but an earlier build is at ``out``."""
    if not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"{out} is no folder: give a new one, or an earlier build")
    here = {str(path.relative_to(out)) for path in out.rglob("*") if not path.is_dir()}
    if not here:
        return
    try:
        known = files_in(read_manifest((out / MANIFEST).read_bytes()))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{out} is not empty and holds no {MANIFEST} of an earlier build "
            f"({error}): give a new folder, or empty this one"
        ) from error
    if foreign := sorted(here - known):
        raise ValueError(
            f"{out} holds {len(foreign)} files that no build wrote, which would be lost: "
            f"{', '.join(foreign[:5])}; move them away, or give a new folder"
        )


@contextmanager
def _replacement_of(out: Path) -> Iterator[Path]:
    """A new folder beside ``out`` that takes its place at the end, or vanishes with an error."""
    out.parent.mkdir(parents=True, exist_ok=True)
    new, old = (out.with_name(f".{out.name}.{kind}-{os.getpid()}") for kind in ("new", "old"))
    new.mkdir()
    try:
        yield new
        if out.exists():
            out.rename(old)
        try:
            new.rename(out)
        except BaseException:
            if old.exists():
                old.rename(out)
            raise
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    if old.exists():
        shutil.rmtree(old)


def _place_weights(source: Source, folder: Path, copy: bool) -> None:
    for name in source.weights:
        original = (source.folder / name).resolve()  # in a cache of the Hub it is a symbolic link
        try:
            os.link(original, folder / name)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK):
                raise
            if not copy:
                raise ValueError(
                    f"{name} cannot be hard-linked ({os.strerror(error.errno)}): the weights lie "
                    f"on the file system at {_mount_point(original)}, the output on that at "
                    f"{_mount_point(folder)}; give --out on the former, or --copy"
                ) from error
            shutil.copyfile(original, folder / name)


def _mount_point(path: Path) -> Path:
    return next(p for p in (path.resolve(), *path.resolve().parents) if p.is_mount())
