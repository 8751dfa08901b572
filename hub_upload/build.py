"""Build the folder that is published: our code beside the original's weights and vocabulary.

The build is deterministic: the same source and code give the same bytes with every supported
version of transformers, so no file contains that version.
"""

import json
import re
import tempfile
import tomllib
from pathlib import Path
from typing import NamedTuple

import jinja2
from huggingface_hub import HfApi
from transformers import GenerationConfig

import glm4v_patched
from glm4v_patched.atomic import create_folder_atomically
from glm4v_patched.models.adopt import (
    CONFIG,
    GENERATION_CONFIG,
    GENERATION_KEYS,
    link_or_copy,
    make_model_files,
    to_json_bytes,
)
from glm4v_patched.remote.configuration_chatglm import refuse_remote_code
from glm4v_patched.terminal_text import format_bytes, show_progress

from .checks import check_loading, check_weight_files
from .evaluation import add_evaluation
from .files import BuiltFiles, File, SourceFiles, read_folder, sha256_of_file
from .hub import read_repository
from .manifest import (
    COMMIT_PATTERN,
    ID_PATTERN,
    MANIFEST,
    FineTune,
    ListedFile,
    Manifest,
    WeightsOrigin,
)

REPOSITORY_ROOT = Path(__file__).resolve().parents[1]
UPSTREAM, WEIGHTS_LICENSE = "zai-org/glm-4v-9b", "MODEL_LICENSE"
# Files beside trained weights; none of them is published.
TRAINING_FILES = {"training.json", "trainer_state.json", "training_args.bin"}
ADAPTER_FILES = {"adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"}


class PublishedModel(NamedTuple):
    """A model of the original authors, whose weights can be published with our code."""

    id: str
    architectures: list[str]  # of its config.json; a model that transformers saved has others
    name: str  # for the model card and the default of --name


# By original_rope of the config: whether channels are rotated as in glm-4v-9b.
PUBLISHED_MODELS = {
    True: PublishedModel(UPSTREAM, ["ChatGLMModel"], "glm-4v-9b"),
    False: PublishedModel(
        "zai-org/cogagent-9b-20241220", ["ChatGLMForConditionalGeneration"], "cogagent-9b"
    ),
}


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
    if MANIFEST in source.files and (earlier := source.read_manifest()).weights == source.weights:
        source.evaluation = earlier.evaluation
    return source


def _list_weights(source: SourceFiles) -> dict[str, ListedFile]:
    names = source.weight_names()
    if missing := [name for name in names if name not in source.files]:
        raise ValueError(
            f"{source.name} is missing {len(missing)} of {len(names)} files of weights: "
            f"{', '.join(missing)}"
        )
    weights, total = {}, format_bytes(sum(source.files[name].size for name in names))
    with show_progress(f"hashing {total} of weights", total=len(names), unit="file") as progress:
        for name in names:
            file = source.files[name]
            digest = sha256_of_file(file.path) if file.path else file.sha256
            assert digest, f"{name} has no sha256: the Hub stores weights as LFS files"
            weights[name] = ListedFile(size=file.size, sha256=digest)
            progress.update()
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


def published_model(source: SourceFiles) -> PublishedModel:
    """Return the published model that a source's config belongs to."""
    return PUBLISHED_MODELS[source.read_json(CONFIG).get("original_rope") is not False]


def _fine_tune_of(source: SourceFiles, base: str | None, trained: str | None) -> FineTune | None:
    """Return how the weights were trained, or None for original weights.

    The description comes from the options, or from the manifest of an earlier build. Raises
    ``ValueError`` if there are adapters beside the weights, or signs of training without a
    description.
    """
    if adapters := ", ".join(sorted(ADAPTER_FILES & source.files.keys())):
        raise ValueError(
            f"{source.name} has an adapter ({adapters}), which would not be published: merge it "
            "first (glm4v-patched merge ADAPTER --out FOLDER), and give that folder"
        )
    if base is not None or trained is not None:
        base, trained = base or "", (trained or "").strip()
        if not re.fullmatch(ID_PATTERN, base) or not trained or not trained.isprintable():
            raise ValueError(
                f"--fine-tune-of {base!r} --trained {trained!r}: expected the id of the base "
                "model, as org/name, and a line for the card, such as 'the language model, on "
                "2,000 receipts'"
            )
        return FineTune(base=base, trained=trained)
    published = published_model(source)
    if source.origin and source.origin.repository == published.id:
        return None
    if MANIFEST in source.files:
        earlier = source.read_manifest()
        if earlier.weights == source.weights:
            return earlier.fine_tune
    signs = sorted(TRAINING_FILES & source.files.keys())  # signs of training, for the error
    classes = source.read_json("config.json").get("architectures")
    if classes != published.architectures:
        signs.append(f"config.json names {classes}, not {published.architectures}")
    if signs:
        raise ValueError(
            f"{source.name} is not {published.id} as it was published ({'; '.join(signs)}): give "
            f"--fine-tune-of {published.id} (or the model that it was trained from) and --trained "
            "'what was trained, and on which data'"
        )
    return None


def build_model_repository(source: SourceFiles, out: Path, name: str) -> Manifest:
    """Write the new folder ``out`` and return its manifest.

    Args:
        name: Id of the repository, for the model card.

    Raises:
        ValueError: The build would not pass verify.
    """
    contents = build_contents(source, name)
    # Weights that are on the Hub only have no path; the Hub copies them when a build is published.
    weights = {n: file for n in source.weights if (file := source.files[n]).path}
    files = {name: File.of(content) for name, content in contents.items()} | weights
    target = BuiltFiles(f"the build of {source.name}", files)
    check_weight_files(target)
    check_loading(target)
    with create_folder_atomically(out) as new:
        for file_name, content in contents.items():
            (new / file_name).write_bytes(content)
        link_or_copy({n: file.path for n, file in weights.items() if file.path}, new)
    return target.manifest


def build_contents(
    source: SourceFiles, name: str, origin_license_name: str | None = None
) -> dict[str, bytes]:
    """Return all files except the weights, by name.

    Args:
        name: Id of the repository, for the model card.
        origin_license_name: Name of the license file in the repository of the weights. verify
            passes it, because a build has this file as MODEL_LICENSE. Default: as in ``source``.

    Raises:
        ValueError: A setting cannot be published; the error names its file and key.
    """
    our_license = (REPOSITORY_ROOT / "LICENSE").read_bytes()
    pyproject = (REPOSITORY_ROOT / "pyproject.toml").read_text(encoding="utf-8")
    dependencies = tomllib.loads(pyproject)["project"]["dependencies"]
    _refuse_settings(source)
    texts = {n: file.content for n, file in source.files.items() if file.content is not None}
    files = make_model_files(source.name, texts) | {
        "LICENSE": our_license,
        "requirements.txt": "".join(f"{line}\n" for line in dependencies).encode(),
    }
    # Find the license of the weights. In a source that we built, LICENSE is that of our code.
    names = (WEIGHTS_LICENSE, "LICENSE", "LICENSE.md")
    license_name = next((n for n in names if texts.get(n) not in (None, our_license)), None)
    if license_name:
        files[WEIGHTS_LICENSE] = texts[license_name]
    files["README.md"] = _card(source, name, license_name, origin_license_name, dependencies)
    return add_manifest(files, source)


def _refuse_settings(source: SourceFiles) -> None:
    """Raise ``ValueError`` for settings that run code, or change answers and are not published."""
    if quantized := source.read_json(CONFIG).get("quantization_config"):
        raise ValueError(
            f"{source.name}: {CONFIG} has quantization_config {json.dumps(quantized):.80}; "
            "expected none: publish the weights from before the quantization, and quantize when "
            "you load them"
        )
    for file in {CONFIG, GENERATION_CONFIG} & source.files.keys():
        refuse_remote_code(source.read_json(file), f"{source.name}: {file}")
        if file == CONFIG:
            continue
        values = source.read_json(file)
        not_taken_over = vars(GenerationConfig()).keys() & values.keys() - GENERATION_KEYS
        for key in sorted(not_taken_over):
            raise ValueError(
                f"{source.name}: {file} has {key} {json.dumps(values[key]):.80}, which changes how "
                "answers are computed: remove it, and pass it to generate instead"
            )


def add_manifest(files: dict[str, bytes], source: SourceFiles) -> dict[str, bytes]:
    """Return the files with a manifest added, which lists these files and the source's weights."""
    hashed = {name: File.of(content) for name, content in files.items()}
    listed = {n: ListedFile(size=f.size, sha256=str(f.sha256)) for n, f in hashed.items()}
    manifest = Manifest(
        version=glm4v_patched.__version__,
        weights_from=source.origin,
        fine_tune=source.fine_tune,
        evaluation=source.evaluation,
        files=dict(sorted((listed | source.weights).items())),
    )
    return {**files, MANIFEST: to_json_bytes(manifest.model_dump())}


def _card(
    source: SourceFiles,
    name: str,
    license_name: str | None,
    origin_license_name: str | None,
    dependencies: list[str],
) -> bytes:
    """Render the model card, README.md."""
    fine_tune, origin, published = source.fine_tune, source.origin, published_model(source)
    origin_repository = origin and origin.repository
    license_address = f"{published.id}/blob/main/LICENSE"  # of the weights, on the Hub
    if origin and license_name:
        license_address = (
            f"{origin.repository}/blob/{origin.revision}/{origin_license_name or license_name}"
        )
    template = Path(__file__).with_name("MODEL_CARD.md").read_text(encoding="utf-8")
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    card = environment.from_string(template).render(
        name=name,
        version=glm4v_patched.__version__,
        requirements=" ".join(f'"{line}"' for line in dependencies),
        model=published.name,
        is_cogagent=published.name == "cogagent-9b",
        base_model=fine_tune.base if fine_tune else origin_repository or published.id,
        trained=fine_tune and fine_tune.trained,
        is_published=origin_repository == published.id and not fine_tune,
        revision=origin and origin.revision,
        license_link=f"https://huggingface.co/{license_address}",
        license_file=license_name and WEIGHTS_LICENSE,
    )
    return add_evaluation(card, name, source.evaluation).encode()
