"""Build the folder that is published: our code beside the original's weights and vocabulary.

The build is deterministic: the same source and code give the same bytes with every supported
transformers. So no file names the version of the running transformers.
"""

import json
import os
import re
import shutil
import tempfile
import tomllib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jinja2
import torch
from huggingface_hub import HfApi
from transformers import GenerationConfig

import glm4v_patched
from glm4v_patched.models.base import ModelSource
from glm4v_patched.models.loading import load_processor
from glm4v_patched.models.weight_files import standard_index
from glm4v_patched.patch.config_json import why_not_glm4v
from glm4v_patched.paths import require_apart
from glm4v_patched.remote import tokenization_chatglm
from glm4v_patched.remote.configuration_chatglm import (
    ChatGLMConfig,
    keep_known_settings,
    refuse_fetched_code,
    refuse_nonfinite_generation,
)

from .checks import check_adapter_settings, check_weight_files, refuse_failed, require_that
from .files import BuiltFiles, File, SourceFiles, read_folder, sha256_of_file
from .hub import read_repository
from .layout import (
    ARCHITECTURE,
    AUTO_MAPS,
    COMMIT_PATTERN,
    CONFIG_KEYS,
    GENERATION_KEYS,
    ID_PATTERN,
    INDEX,
    MANIFEST,
    SPECIAL_IDS,
    TOKENIZER_KEYS,
    UPSTREAM,
    VISION_KEYS,
    read_our_code,
)
from .load_check import make_inputs
from .loading import check_loading
from .manifest import FineTune, ListedFile, Manifest, WeightsOrigin, parse_manifest, to_json_bytes

REPOSITORY_ROOT = Path(__file__).resolve().parents[1]
WEIGHTS_LICENSE, GENERATION_CONFIG = "MODEL_LICENSE", "generation_config.json"
TOKENIZER_CONFIG, IMAGE_CONFIG = "tokenizer_config.json", "preprocessor_config.json"
# The architectures in the original's config.json; saving a loaded model writes another class.
PUBLISHED_ARCHITECTURES = ["ChatGLMModel"]
# Files beside trained weights; none of them is published.
TRAINING_FILES = {"training.json", "trainer_state.json", "training_args.bin"}
ADAPTER_FILES = {"adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"}


def read_source(text: str, base: str | None = None, trained: str | None = None) -> SourceFiles:
    """Read the source that ``--weights`` names, a folder or a repository at a commit.

    Args:
        base: Model that the weights were trained from; None for original weights.
        trained: What was trained and on which data; None for original weights.

    Raises:
        ValueError: The source cannot be built from.
    """
    if Path(text).is_dir():
        source = SourceFiles(text, read_folder(Path(text)))
    else:
        source = _read_repository(text)
    source.files = {name: file for name, file in source.files.items() if "/" not in name}
    source.weights = _list_weights(source)
    source.fine_tune = _fine_tune_of(source, base, trained)
    return source


def _list_weights(source: SourceFiles) -> dict[str, ListedFile]:
    names = source.weight_names()
    if missing := [name for name in names if name not in source.files]:
        raise ValueError(
            f"{source.name} is missing {len(missing)} of {len(names)} files of weights: "
            f"{', '.join(missing)}"
        )
    weights = {}
    for name in names:
        file = source.files[name]
        digest = sha256_of_file(file.path) if file.path else file.sha256
        assert digest, f"{name} has no sha256: the Hub stores weights as LFS files"
        weights[name] = ListedFile(size=file.size, sha256=digest)
    return weights


def _read_repository(text: str) -> SourceFiles:
    repository, _, revision = text.partition("@")
    if not re.fullmatch(ID_PATTERN, repository) or text.startswith("."):
        raise ValueError(
            f"{text} is neither a folder nor a repository on the Hub: give a folder, or "
            f"{UPSTREAM}@<commit of 40 hex digits>"
        )
    if not re.fullmatch(COMMIT_PATTERN, revision):
        problem = f"{revision} is not a full commit" if revision else "no commit is given"
        commit = HfApi().model_info(repository, revision=revision or None).sha
        raise ValueError(
            f"{repository}: {problem}, and branches and tags may change between two builds: give "
            f"{repository}@{commit}, the current commit"
        )
    with tempfile.TemporaryDirectory() as folder:
        _, files = read_repository(repository, revision, Path(folder, "source"))
    return SourceFiles(text, files, WeightsOrigin(repository=repository, revision=revision))


def _fine_tune_of(source: SourceFiles, base: str | None, trained: str | None) -> FineTune | None:
    """Return how the weights were trained, or None for original weights.

    The description comes from the options, or from the manifest of an earlier build. Raises
    ``ValueError`` if there are adapters beside the weights, or signs of training that neither
    describes.
    """
    if adapters := ", ".join(sorted(ADAPTER_FILES & source.files.keys())):
        raise ValueError(
            f"{source.name} has an adapter ({adapters}), which would not be published: merge it "
            "first (glm4v-patched merge ADAPTER --out FOLDER), and give that folder"
        )
    if base is not None or trained is not None:
        if not base or not re.fullmatch(ID_PATTERN, base):
            raise ValueError(
                f"--fine-tune-of {base}: expected the id of the base model, as org/name"
            )
        if not trained or not trained.strip() or not trained.isprintable():
            raise ValueError(
                f"--fine-tune-of {base} needs --trained, too: one line for the card, such as 'the "
                "language model, on 2,000 receipts'"
            )
        return FineTune(base=base, trained=trained.strip())
    if source.origin and source.origin.repository == UPSTREAM:
        return None
    if MANIFEST in source.files:
        earlier = source.read_manifest()
        if earlier.weights == source.weights:
            return earlier.fine_tune
    signs = sorted(TRAINING_FILES & source.files.keys())  # signs of training, for the error
    classes = source.read_json("config.json").get("architectures")
    if classes != PUBLISHED_ARCHITECTURES:
        signs.append(f"config.json names {classes}, not {PUBLISHED_ARCHITECTURES}")
    if signs:
        raise ValueError(
            f"{source.name} is not {UPSTREAM} as it was published ({'; '.join(signs)}): give "
            f"--fine-tune-of {UPSTREAM} (or the model that it was trained from) and --trained "
            "'what was trained, and on which data'"
        )
    return None


def build_model_repository(source: SourceFiles, out: Path, name: str) -> Manifest:
    """Write the folder and return its manifest.

    An earlier build in ``out`` is replaced atomically, after all checks.

    Args:
        name: Id of the repository, for the model card.

    Raises:
        ValueError: ``out`` has files that no build wrote, or the build would not pass verify.
    """
    out = require_replaceable(out, source.name)
    contents = build_contents(source, name)
    weights = {n: source.files[n] for n in source.weights if source.files[n].path}
    return write_build(contents, weights, out, source.name)


def require_replaceable(out: Path, source: str) -> Path:
    """Return ``out`` with links resolved.

    Raises ``ValueError`` if ``out`` overlaps with the source or has files that no build wrote.
    """
    out = Path(os.path.realpath(out))
    require_apart(out, [("the source itself", source)], "--out")
    existing = {str(path.relative_to(out)) for path in out.rglob("*") if not path.is_dir()}
    path = out / MANIFEST
    known = parse_manifest(path.read_bytes(), str(path)).names if MANIFEST in existing else set()
    if foreign := [out.name] * out.is_file() or sorted(existing - known):
        raise ValueError(
            f"{out} has {len(foreign)} files that no build wrote ({', '.join(foreign[:5])}); move "
            "them away, or give a new folder"
        )
    return out


def write_build(
    contents: dict[str, bytes], weights: dict[str, File], out: Path, source: str
) -> Manifest:
    """Check a build and write it to ``out``; return its manifest.

    Args:
        contents: Files except the weights, by name.
        weights: Files of weights to link or copy, by name.
        source: Name of the source, for messages.

    Raises:
        ValueError: Weights are missing, or the published code does not load the build.
    """
    files = {name: File.of(content) for name, content in contents.items()}
    target = BuiltFiles(f"the build of {source}", files | weights)
    if target.manifest.is_adapter:
        check_adapter_settings(target)
    check_weight_files(target)
    if not target.manifest.is_adapter:
        refuse_failed(target.name, check_loading(target))
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as temporary:
        new, old = Path(temporary, "new"), Path(temporary, "old")
        new.mkdir()
        for file_name, content in contents.items():
            (new / file_name).write_bytes(content)
        for file_name, file in weights.items():
            original = os.path.realpath(str(file.path))
            try:
                os.link(original, new / file_name)
            except OSError:  # on another file system
                shutil.copyfile(original, new / file_name)
        with ExitStack() as undo:  # moves the earlier build back if the last rename fails
            if out.exists():
                out.rename(old)
                undo.callback(old.rename, out)
            new.rename(out)
            undo.pop_all()
    return target.manifest


def build_contents(
    source: SourceFiles, name: str, licensed_at: str | None = None
) -> dict[str, bytes]:
    """Return all files except the weights, by name.

    Args:
        name: Id of the repository, for the model card.
        licensed_at: Name of the license file at the origin of the weights, if ``source`` has this
            file under another name.

    Raises:
        ValueError: The published code would refuse a setting; the error names its file and key.
    """
    our_license = (REPOSITORY_ROOT / "LICENSE").read_bytes()
    pyproject = (REPOSITORY_ROOT / "pyproject.toml").read_text(encoding="utf-8")
    dependencies = tomllib.loads(pyproject)["project"]["dependencies"]
    files = _processor_files(source)
    config = _make_config(source, files)
    files |= read_our_code() | {
        "config.json": to_json_bytes(config),
        GENERATION_CONFIG: _generation_config(source, config),
        "LICENSE": our_license,
        "requirements.txt": "".join(f"{line}\n" for line in dependencies).encode(),
    }
    # Find the license of the weights. A source that we built also has a LICENSE, of our code.
    names = (WEIGHTS_LICENSE, "LICENSE", "LICENSE.md")
    license_name = next((n for n in names if source.content(n) not in (None, our_license)), None)
    for target, original in ((WEIGHTS_LICENSE, license_name), (INDEX, INDEX)):
        if original and (content := source.content(original)) is not None:
            files[target] = content
    if INDEX in files and (normalized := standard_index(index := source.read_json(INDEX))) != index:
        files[INDEX] = to_json_bytes(normalized)
    files["README.md"] = _card(source, name, license_name, licensed_at, dependencies)
    return add_manifest(files, source.weights, source.fine_tune, source.origin)


def add_manifest(
    files: dict[str, bytes],
    weights: dict[str, ListedFile],
    fine_tune: FineTune | None,
    origin: WeightsOrigin | None = None,
) -> dict[str, bytes]:
    """Return the files with a manifest added, which lists these files and the weights."""
    hashed = {name: File.of(content) for name, content in files.items()}
    listed = {n: ListedFile(size=f.size, sha256=str(f.sha256)) for n, f in hashed.items()} | weights
    manifest = Manifest(
        version=glm4v_patched.__version__,
        weights_from=origin,
        fine_tune=fine_tune,
        files=dict(sorted(listed.items())),
    )
    return {**files, MANIFEST: to_json_bytes(manifest.model_dump())}


def _generation_config(source: SourceFiles, config: dict[str, Any]) -> bytes:
    """Return the source's generation_config.json without options that transformers does not know.

    Raises ``ValueError`` for options that transformers knows but :data:`GENERATION_KEYS` does not
    have, and for invalid values.
    """
    content = source.content(GENERATION_CONFIG)
    default = {key: config[key] for key in ("eos_token_id", "pad_token_id")}
    values = default if content is None else source.read_json(GENERATION_CONFIG)
    file = f"{source.name}: {GENERATION_CONFIG}"
    refuse_fetched_code(values, file)
    refuse_nonfinite_generation(values, file)
    known = keep_known_settings(values, GENERATION_KEYS | vars(GenerationConfig()).keys(), file)
    if refused := [key for key in known if key not in GENERATION_KEYS]:
        raise ValueError(
            f"{file} has {refused[0]} {json.dumps(known[refused[0]]):.80}, which changes how "
            "answers are computed: remove it, and pass it to generate instead"
        )
    _check_eos_ids(values, config["padded_vocab_size"], GENERATION_CONFIG)
    return content if content is not None and known == values else to_json_bytes(known)


def _check_eos_ids(values: dict[str, Any], vocab_size: int, file: str) -> None:
    eos = values.get("eos_token_id")
    for number in eos if isinstance(eos, list) else [eos]:
        is_valid = isinstance(number, int) and 0 <= number < vocab_size
        message = (
            f"{file}: eos_token_id has {number}, which is not one of the {vocab_size} token ids"
        )
        require_that(is_valid, message)


def _make_config(source: SourceFiles, processor_files: dict[str, bytes]) -> dict[str, Any]:
    """Return the source's config.json with missing token ids added and our classes in auto_map.

    Raises ``ValueError`` if the config is not a glm-4v's, or does not fit the processor.
    """
    config = source.read_json("config.json")
    if quantized := config.get("quantization_config"):
        raise ValueError(
            f"{source.name}: config.json has quantization_config {json.dumps(quantized):.80}; "
            "expected none: publish the weights from before the quantization, and quantize them "
            "when you load them"
        )
    if reason := why_not_glm4v(config):
        raise ValueError(f"{source.name}: config.json is not a glm-4v's: {reason}")
    tokens = json.loads(processor_files["tokenizer.json"])["added_tokens"]
    ids = {token["content"]: token["id"] for token in tokens}
    for key, token in SPECIAL_IDS.items():
        if config.get(key) is None:
            config[key] = ids[token]
        problem = f"{key} is {config[key]}, but the tokenizer has {ids.get(token)} for {token}"
        require_that(config[key] == ids.get(token), f"{source.name}: config.json: {problem}")
    checked = ChatGLMConfig.from_dict(config)
    config.setdefault("eos_token_id", checked.eos_token_id)
    file = f"{source.name}: config.json"
    _check_eos_ids(config, checked.padded_vocab_size, file)
    vision = keep_known_settings(config["vision_config"], VISION_KEYS, f"{file}: vision_config")
    vision.setdefault("image_size", checked.vision.image_size)
    size = json.loads(processor_files[IMAGE_CONFIG])["size"]["height"]
    problem = f"vision_config has image_size {vision['image_size']}, but {IMAGE_CONFIG} has {size}"
    require_that(
        vision["image_size"] == size, f"{file}: {problem}: the files are not of the same model"
    )
    config |= {"vision_config": vision}
    config.pop("_name_or_path", None)
    config = keep_known_settings(config, CONFIG_KEYS, file)
    return config | {"architectures": [ARCHITECTURE], "auto_map": AUTO_MAPS["config.json"]}


def _processor_files(source: SourceFiles) -> dict[str, bytes]:
    """Return the files of tokenizer and processor, the same with every supported transformers.

    In all versions, save_pretrained writes the same tokenizer.json, chat template and image
    processor values. The other two config files differ between versions, so they are made here:
    tokenizer_config.json from the source's fields, processor_config.json with only processor_class
    and auto_map. The image processor has a file of its own, because transformers 4 reads no other;
    transformers 5 reads this file, too.
    """
    tokenizer = source.read_json(TOKENIZER_CONFIG)
    # ``unchanged`` gets the source's own files, ``saved`` what save_pretrained writes.
    with tempfile.TemporaryDirectory() as unchanged, tempfile.TemporaryDirectory() as saved:
        for name, file in source.files.items():
            if file.content is not None and not name.endswith(".py"):
                Path(unchanged, name).write_bytes(file.content)
        processor = load_processor(ModelSource(unchanged))
        make_inputs(processor, 0, torch.float32)  # raises if template or images are invalid
        processor.save_pretrained(saved)
        names = ("tokenizer.json", "chat_template.jinja", IMAGE_CONFIG)
        files = {name: Path(saved, name).read_bytes() for name in names}
    left_out = tokenization_chatglm.LOADING_KWARGS | {"backend", "chat_template"}
    tokenizer = {key: value for key, value in tokenizer.items() if key not in left_out}
    tokenizer = keep_known_settings(tokenizer, TOKENIZER_KEYS, f"{source.name}: {TOKENIZER_CONFIG}")
    tokenizer["tokenizer_class"] = type(processor.tokenizer).__name__
    tokenizer.setdefault("image_size", processor.tokenizer.image_size)
    configs = {"processor_config.json": {}, TOKENIZER_CONFIG: tokenizer}
    configs[IMAGE_CONFIG] = json.loads(files[IMAGE_CONFIG])
    for name, values in configs.items():
        values |= {"processor_class": "ChatGLMProcessor", "auto_map": AUTO_MAPS[name]}
        files[name] = to_json_bytes(dict(sorted(values.items())))
    return files


def _card(
    source: SourceFiles,
    name: str,
    license_name: str | None,
    licensed_at: str | None,
    dependencies: list[str],
) -> bytes:
    """Render the model card, README.md."""
    fine_tune, origin = source.fine_tune, source.origin
    from_hub = origin and origin.repository
    address = f"{UPSTREAM}/blob/main/LICENSE"  # of the weights' license on the Hub
    if origin and license_name:
        address = f"{origin.repository}/blob/{origin.revision}/{licensed_at or license_name}"
    template = Path(__file__).with_name("MODEL_CARD.md").read_text(encoding="utf-8")
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    card = environment.from_string(template).render(
        name=name,
        version=glm4v_patched.__version__,
        requirements=" ".join(f'"{line}"' for line in dependencies),
        base_model=fine_tune.base if fine_tune else from_hub or UPSTREAM,
        trained=fine_tune and fine_tune.trained,
        is_published=from_hub == UPSTREAM and not fine_tune,
        revision=origin and origin.revision,
        license_link=f"https://huggingface.co/{address}",
        license_file=license_name and WEIGHTS_LICENSE,
    )
    return card.encode()
