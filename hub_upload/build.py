"""Makes the folder that is published: our code beside the original's weights and vocabulary.

Pure: the same source and the same code give the same bytes, whichever supported transformers runs
this. Nothing that transformers writes with its own version's stamp is taken over.
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

from .checks import check_adapters, check_weights, refuse_failed, require
from .files import Build, File, Source, read_folder, sha256_of_file
from .hub import read_repository
from .layout import (
    ARCHITECTURE,
    AUTO_MAPS,
    COMMIT,
    CONFIG_KEYS,
    GENERATION_KEYS,
    ID,
    INDEX,
    MANIFEST,
    SPECIAL_IDS,
    TOKENIZER_KEYS,
    UPSTREAM,
    VISION_KEYS,
    our_code,
)
from .load_check import inputs_of
from .loading import load
from .manifest import FineTune, Listed, Manifest, Origin, to_json_bytes, read_manifest

ROOT = Path(__file__).resolve().parents[1]
WEIGHTS_LICENSE, GENERATION = "MODEL_LICENSE", "generation_config.json"
TOKENIZER, IMAGES = "tokenizer_config.json", "preprocessor_config.json"
# The published config names this class; whoever loads and saves the model, another one.
PUBLISHED_ARCHITECTURES = ["ChatGLMModel"]
LEFT_BY_TRAINING = {"training.json", "trainer_state.json", "training_args.bin"}
OF_ADAPTERS = {"adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"}


def read_source(text: str, base: str | None = None, trained: str | None = None) -> Source:
    """Find what ``--weights`` names, and what is said of them if they were trained.

    ``ValueError`` if it cannot be built from.
    """
    if Path(text).is_dir():
        source = Source(text, read_folder(Path(text)))
    else:
        source = _read_repository(text)
    source.files = {name: file for name, file in source.files.items() if "/" not in name}
    source.weights = _list_weights(source)
    source.fine_tune = _fine_tune_of(source, base, trained)
    return source


def _list_weights(source: Source) -> dict[str, Listed]:
    names = source.weight_names()
    if missing := [name for name in names if name not in source.files]:
        told = f"{len(missing)} of {len(names)} files of weights: {', '.join(missing)}"
        raise ValueError(f"{source.name} lacks {told}")
    found = {}
    for name in names:
        file = source.files[name]
        digest = sha256_of_file(file.path) if file.path else file.sha256
        assert digest, f"{name} has no sha256: the Hub holds weights as large files"
        found[name] = Listed(size=file.size, sha256=digest)
    return found


def _read_repository(text: str) -> Source:
    repository, _, revision = text.partition("@")
    if not re.fullmatch(ID, repository) or text.startswith("."):
        told = f"{text} is neither a folder nor a repository of the Hub"
        raise ValueError(f"{told}: give a folder, or {UPSTREAM}@<commit of 40 hex digits>")
    if not re.fullmatch(COMMIT, revision):
        given = f"{revision} is no full commit" if revision else "no revision is given"
        commit = HfApi().model_info(repository, revision=revision or None).sha
        told = f"{repository}: {given}, and what it points to may change between two builds"
        raise ValueError(f"{told}: give {repository}@{commit}, where it is at now")
    with tempfile.TemporaryDirectory() as folder:
        _, files = read_repository(repository, revision, Path(folder, "source"))
    return Source(text, files, Origin(repository=repository, revision=revision))


def _fine_tune_of(source: Source, base: str | None, trained: str | None) -> FineTune | None:
    """What is given, or what an earlier build has of the same weights; ``ValueError`` for an
    adapter beside them, and if they were trained and nobody says how."""
    if adapters := ", ".join(sorted(OF_ADAPTERS & source.files.keys())):
        told = f"{source.name} holds an adapter ({adapters}), which a build leaves out"
        cure = "merge it first (glm4v-patched merge ADAPTER --out FOLDER), and give that folder"
        raise ValueError(f"{told}: {cure}")
    if base is not None or trained is not None:
        if not base or not re.fullmatch(ID, base):
            raise ValueError(f"--fine-tune-of {base}: give the id of the base as org/name")
        if not trained or not trained.strip() or not trained.isprintable():
            told = "a line for the card, such as 'the language model, on 2,000 receipts'"
            raise ValueError(f"--fine-tune-of {base} takes --trained too: {told}")
        return FineTune(base=base, trained=trained.strip())
    if source.origin and source.origin.repository == UPSTREAM:
        return None
    if MANIFEST in source.files:
        earlier = source.read_manifest()
        if earlier.weights == source.weights:
            return earlier.fine_tune
    signs = sorted(LEFT_BY_TRAINING & source.files.keys())
    if (named := source.read_json("config.json").get("architectures")) != PUBLISHED_ARCHITECTURES:
        signs.append(f"config.json names {named}, not {PUBLISHED_ARCHITECTURES}")
    if signs:
        told = f"{source.name} is not as {UPSTREAM} was published ({'; '.join(signs)})"
        cure = f"give --fine-tune-of {UPSTREAM} (or what else it was trained from) and --trained"
        raise ValueError(f"{told}: {cure} 'what was trained, and on what'")
    return None


def build(source: Source, out: Path, name: str) -> Manifest:
    """Write the folder; return its manifest.

    An earlier build is replaced at once and only at the end; ``ValueError`` if ``out`` holds what
    is not ours to replace, or if the build would not pass verify. ``name`` is for the card.
    """
    out = require_ours(out, source.name)
    built = contents(source, name)
    weights = {n: source.files[n] for n in source.weights if source.files[n].path}
    return write(built, weights, out, source.name)


def require_ours(out: Path, source: str) -> Path:
    """The folder to write, its links followed; ``ValueError`` if it is the source, or holds files
    that no build wrote."""
    out = Path(os.path.realpath(out))
    require_apart(out, [("the source itself", source)], "--out")
    here = {str(path.relative_to(out)) for path in out.rglob("*") if not path.is_dir()}
    path = out / MANIFEST
    known = read_manifest(path.read_bytes(), str(path)).names if MANIFEST in here else set()
    if foreign := [out.name] * out.is_file() or sorted(here - known):
        told = f"{out} holds {len(foreign)} files that no build wrote ({', '.join(foreign[:5])})"
        raise ValueError(f"{told}; move them away, or give a new folder")
    return out


def write(built: dict[str, bytes], weights: dict[str, File], out: Path, source: str) -> Manifest:
    """Put a build in its place, if its weights are whole and the published code loads it."""
    files = {name: File.of(content) for name, content in built.items()}
    target = Build(f"the build of {source}", files | weights)
    if target.manifest.is_of_adapters:
        check_adapters(target)
    check_weights(target)
    if not target.manifest.is_of_adapters:
        refuse_failed(target.name, load(target))
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as beside:
        new, old = Path(beside, "new"), Path(beside, "old")
        new.mkdir()
        for file_name, content in built.items():
            (new / file_name).write_bytes(content)
        for file_name, file in weights.items():
            original = os.path.realpath(str(file.path))
            try:
                os.link(original, new / file_name)
            except OSError:  # such as to another file system
                shutil.copyfile(original, new / file_name)
        with ExitStack() as undo:
            if out.exists():
                out.rename(old)
                undo.callback(old.rename, out)
            new.rename(out)
            undo.pop_all()
    return target.manifest


def contents(source: Source, name: str, licensed_at: str | None = None) -> dict[str, bytes]:
    """Return every file but the weights, by its name; ``licensed_at`` names the file of the license
    where the weights are from, if it has another name in ``source``.

    ``ValueError``, with file and key, for settings that the published code would not take.
    """
    our_license = (ROOT / "LICENSE").read_bytes()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    files = _processor_files(source)
    config = _config(source, files)
    files |= our_code() | {
        "config.json": to_json_bytes(config),
        GENERATION: _generation_config(source, config),
        "LICENSE": our_license,
        "requirements.txt": "".join(f"{line}\n" for line in project["dependencies"]).encode(),
    }
    # Not that of our code, which lies in a source that is our build.
    names = (WEIGHTS_LICENSE, "LICENSE", "LICENSE.md")
    license_name = next((n for n in names if source.content(n) not in (None, our_license)), None)
    for target, given in ((WEIGHTS_LICENSE, license_name), (INDEX, INDEX)):
        if given and (content := source.content(given)) is not None:
            files[target] = content
    if INDEX in files and (own := standard_index(index := source.read_json(INDEX))) != index:
        files[INDEX] = to_json_bytes(own)
    files["README.md"] = _card(source, name, license_name, licensed_at, project["dependencies"])
    return with_manifest(files, source.weights, source.fine_tune, source.origin)


def with_manifest(
    files: dict[str, bytes],
    weights: dict[str, Listed],
    fine_tune: FineTune | None,
    origin: Origin | None = None,
) -> dict[str, bytes]:
    made = {name: File.of(content) for name, content in files.items()}
    listed = {n: Listed(size=f.size, sha256=str(f.sha256)) for n, f in made.items()} | weights
    manifest = Manifest(
        version=glm4v_patched.__version__,
        weights_from=origin,
        fine_tune=fine_tune,
        files=dict(sorted(listed.items())),
    )
    return {**files, MANIFEST: to_json_bytes(manifest.model_dump())}


def _generation_config(source: Source, config: dict[str, Any]) -> bytes:
    """The original's, without options that transformers does not know; of those that it knows, what
    would change how answers are computed is refused."""
    given = {key: config[key] for key in ("eos_token_id", "pad_token_id")}
    values = given if source.content(GENERATION) is None else source.read_json(GENERATION)
    place = f"{source.name}: {GENERATION}"
    refuse_fetched_code(values, place)
    refuse_nonfinite_generation(values, place)
    known = keep_known_settings(values, GENERATION_KEYS | vars(GenerationConfig()).keys(), place)
    if odd := [key for key in known if key not in GENERATION_KEYS]:
        raise ValueError(
            f"{place} has {odd[0]} {json.dumps(known[odd[0]]):.80}; expected no such key, for it "
            "changes how answers are computed: take it out, and give it to generate"
        )
    _require_ids(values, config["padded_vocab_size"], GENERATION)
    content = source.content(GENERATION)
    return content if content is not None and known == values else to_json_bytes(known)


def _require_ids(values: dict[str, Any], size: int, file: str) -> None:
    eos = values.get("eos_token_id")
    for number in eos if isinstance(eos, list) else [eos]:
        inside = isinstance(number, int) and 0 <= number < size
        require(inside, f"{file}: eos_token_id has {number}, outside of {size} ids")


def _config(source: Source, processor_files: dict[str, bytes]) -> dict[str, Any]:
    """The original's fields as they are, and ours for the loader; ids that it lacks are added."""
    config = source.read_json("config.json")
    if quantized := config.get("quantization_config"):
        raise ValueError(
            f"{source.name}: config.json has quantization_config {json.dumps(quantized):.80}; "
            "expected none: publish the weights as they were before, and quantize when you load"
        )
    if reason := why_not_glm4v(config):
        raise ValueError(f"{source.name}: its config.json is not a glm-4v's: {reason}")
    tokens = json.loads(processor_files["tokenizer.json"])["added_tokens"]
    ids = {token["content"]: token["id"] for token in tokens}
    for key, token in SPECIAL_IDS.items():
        if config.get(key) is None:
            config[key] = ids[token]
        told = f"{key} is {config[key]}, but {token} is {ids.get(token)} to the tokenizer"
        require(config[key] == ids.get(token), f"{source.name}: config.json: {told}")
    checked = ChatGLMConfig.from_dict(config)
    config.setdefault("eos_token_id", checked.eos_token_id)
    place = f"{source.name}: config.json"
    _require_ids(config, checked.padded_vocab_size, place)
    vision = keep_known_settings(config["vision_config"], VISION_KEYS, f"{place}: vision_config")
    vision.setdefault("image_size", checked.vision.image_size)
    side = json.loads(processor_files[IMAGES])["size"]["height"]
    told = f"vision_config has image_size {vision['image_size']}, and {IMAGES} {side}"
    require(vision["image_size"] == side, f"{place}: {told}: they are not of the same model")
    config |= {"vision_config": vision}
    config.pop("_name_or_path", None)
    config = keep_known_settings(config, CONFIG_KEYS, place)
    return config | {"architectures": [ARCHITECTURE], "auto_map": AUTO_MAPS["config.json"]}


def _processor_files(source: Source) -> dict[str, bytes]:
    """Files of tokenizer and processor that every supported transformers reads.

    The tokenizer, the template and the image processor's values are what save_pretrained writes,
    the same in all versions. The configs around them are not, so their fields are written here:
    the original's for the tokenizer, and for the processor only where its code is, because
    transformers 4 finds the image processor in its own file alone and 5 looks there too.
    """
    tokenizer = source.read_json(TOKENIZER)
    with tempfile.TemporaryDirectory() as given, tempfile.TemporaryDirectory() as saved:
        for name, file in source.files.items():
            if file.content is not None and not name.endswith(".py"):
                Path(given, name).write_bytes(file.content)
        processor = load_processor(ModelSource(given))
        inputs_of(processor, 0, torch.float32)  # its template and its images, within limits
        processor.save_pretrained(saved)
        names = ("tokenizer.json", "chat_template.jinja", IMAGES)
        files = {name: Path(saved, name).read_bytes() for name in names}
    left_out = tokenization_chatglm.LOADING_KWARGS | {"backend", "chat_template"}
    tokenizer = {key: value for key, value in tokenizer.items() if key not in left_out}
    tokenizer = keep_known_settings(tokenizer, TOKENIZER_KEYS, f"{source.name}: {TOKENIZER}")
    tokenizer["tokenizer_class"] = type(processor.tokenizer).__name__
    tokenizer.setdefault("image_size", processor.tokenizer.image_size)
    configs = {"processor_config.json": {}, TOKENIZER: tokenizer}
    configs[IMAGES] = json.loads(files[IMAGES])
    for name, values in configs.items():
        values |= {"processor_class": "ChatGLMProcessor", "auto_map": AUTO_MAPS[name]}
        files[name] = to_json_bytes(dict(sorted(values.items())))
    return files


def _card(
    source: Source,
    name: str,
    license_name: str | None,
    licensed_at: str | None,
    needs: list[str],
) -> bytes:
    fine_tune, origin = source.fine_tune, source.origin
    from_hub = origin and origin.repository
    address = f"{UPSTREAM}/blob/main/LICENSE"
    if origin and license_name:
        address = f"{origin.repository}/blob/{origin.revision}/{licensed_at or license_name}"
    template = Path(__file__).with_name("MODEL_CARD.md").read_text(encoding="utf-8")
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    card = environment.from_string(template).render(
        name=name,
        version=glm4v_patched.__version__,
        requirements=" ".join(f'"{line}"' for line in needs),
        base_model=fine_tune.base if fine_tune else from_hub or UPSTREAM,
        trained=fine_tune and fine_tune.trained,
        is_published=from_hub == UPSTREAM and not fine_tune,
        revision=origin and origin.revision,
        license_link=f"https://huggingface.co/{address}",
        license_file=license_name and WEIGHTS_LICENSE,
    )
    return card.encode()
