"""Which model, and which adapters on it: where they lie, at which commit, and what is in them.

Needs no torch. Models are known by their contents, so that folders may move.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ..patch.config_json import MAX_FLOAT32, find_nonfinite_number, read_json_object, why_not_glm4v
from .weight_files import read_header

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TRAINING_REPORT = "training.json"  # what a training leaves beside what it saves
# All of a model's folder that changes what is computed.
MODEL_FILES = ["config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer*.json"]
MODEL_FILES += ["tokenizer.model", "processor_config.json", "preprocessor_config.json"]
MODEL_FILES += ["chat_template.jinja"]
# What peft's settings may be beside null; it raises errors of any kind for others.
NAMES, FLAG, NUMBER = (str, list), (bool,), (int, float)
KINDS: dict[str, tuple[type, ...]] = {"r": (int,), "lora_alpha": NUMBER, "lora_dropout": NUMBER}
KINDS |= dict.fromkeys(("use_rslora", "use_dora", "fan_in_fan_out", "inference_mode"), FLAG)
KINDS |= dict.fromkeys(("lora_bias", "use_qalora", "ensure_weight_tying"), FLAG)
KINDS |= dict.fromkeys(("target_modules", "exclude_modules", "layers_pattern"), NAMES)
KINDS |= {"modules_to_save": (list,), "layers_to_transform": (int, list), "bias": (str,)}
KINDS |= dict.fromkeys(("rank_pattern", "alpha_pattern", "auto_mapping", "eva_config"), (dict,))
KINDS |= {"task_type": (str,), "revision": (str,), "init_lora_weights": (bool, str)}
KINDS |= {"corda_config": (dict,), "runtime_config": (dict,), "qalora_group_size": (int,)}
# By which peft does more than add LoRA to linear layers, in ways that were not tried here.
NOT_LOADED: tuple[str, ...] = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "loftq_config",
    "monteclora_config",
)
NOT_LOADED += ("target_parameters", "trainable_token_indices", "use_bdlora", "velora_config")
REQUIRED = {"r", "lora_alpha", "lora_dropout", "bias", "rank_pattern", "alpha_pattern"}
WHOLE_UP_TO = 64 * 2**20  # bytes
BLOCK, BLOCKS = 64 * 2**10, 64


@dataclass(frozen=True)
class ModelSource:
    """A model, and the adapters on it."""

    model: str  # folder or id of the Hub of the weights that are no adapters
    revision: str | None = None  # of an id of the Hub; its commit, once it is known
    adapters: Path | None = None  # folder of the LoRA adapters on it


def folders_of(base: ModelSource) -> list[tuple[str, str | Path]]:
    """Return the folders that are read, for :func:`paths.require_apart`."""
    folders: list[tuple[str, str | Path]] = [("the model's folder", base.model)]
    if base.adapters is not None:
        folders.append(("the adapters' folder", base.adapters))
    return folders


def base_of_adapters(folder: Path, revision: str | None = None) -> ModelSource:
    """The model under the LoRA adapters in a folder; ``ValueError`` if there are no adapters, or a
    model beside them, or theirs is no glm-4v. ``revision``: of a model that is an id of the Hub."""
    if any(folder.glob("model*.safetensors")):
        raise ValueError(
            f"{folder} holds both a model and adapters ({ADAPTER_CONFIG}), and cannot be both; "
            "move one of them away"
        )
    config = read_json_object(folder / ADAPTER_CONFIG)
    kind, model = config.get("peft_type"), config.get("base_model_name_or_path")
    if kind != "LORA" or not isinstance(model, str) or not model:
        raise ValueError(
            f"{folder / ADAPTER_CONFIG}: peft_type is {kind!r} and base_model_name_or_path is "
            f"{model!r}; expected LORA, and where the model under the adapters lies"
        )
    if megatron := config.get("megatron_config"):
        raise ValueError(
            f"{folder / ADAPTER_CONFIG}: megatron_config is {megatron!r}, by which peft imports "
            f"the module {config.get('megatron_core')!r}; expected null"
        )
    if found := find_nonfinite_number(config):
        raise ValueError(
            f"{folder / ADAPTER_CONFIG}: {found}; expected a finite number, at most "
            f"{MAX_FLOAT32:.2g}, which is float32's largest"
        )
    _require_kinds(folder, config)
    read_header(folder / ADAPTER_WEIGHTS)  # it is there, and can be read
    if Path(model).is_dir():
        if revision is not None:
            raise ValueError(
                f"revision is {revision!r}, and the adapters in {folder} are of {model}, a "
                "folder, which has no revisions; leave it out"
            )
        _require_glm4v(Path(model), folder)
    return ModelSource(model, revision or config.get("revision"), folder)


def _require_kinds(folder: Path, config: dict) -> None:
    """Raise ``ValueError`` for a setting of peft that has another type than it may have."""
    for name, value in config.items():
        kinds = KINDS.get(name, ())
        expected = " or ".join(kind.__name__ for kind in kinds)
        fits = not kinds or (value is None and name not in REQUIRED)
        if kinds and value is not None:
            fits = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        if name in NOT_LOADED:
            # Of loftq_config, an empty one is none; of others it is one with defaults.
            fits = not value and (name == "loftq_config" or value != {})
            expected = "null: adapters with it are not supported"
        elif isinstance(value, list) and fits and kinds:
            inner = int if int in kinds else str
            fits, expected = all(type(one) is inner for one in value), f"{inner.__name__} in it"
        elif name in ("rank_pattern", "alpha_pattern") and isinstance(value, dict):
            fits = all(isinstance(one, NUMBER) and one > 0 for one in value.values())
            expected = "numbers above 0 in it"
        elif name == "r" and fits:
            fits, expected = 0 < value < 2**31, "1 or more"
        if not fits:
            raise ValueError(
                f"{folder / ADAPTER_CONFIG}: {name} is {value!r:.60}; expected {expected}"
            )


def _require_glm4v(model: Path, adapters: Path) -> None:
    if (model / ADAPTER_CONFIG).is_file():
        raise ValueError(
            f"{adapters} are adapters of {model}, which holds adapters itself; expected a model"
        )
    if reason := why_not_glm4v(read_json_object(model / "config.json")):
        raise ValueError(
            f"{adapters} are adapters of {model}, whose config.json is not a glm-4v's: {reason}"
        )


def read_report(folder: Path) -> dict:
    """``training.json``, or nothing if there is none that can be read."""
    try:
        return read_json_object(folder / TRAINING_REPORT)
    except ValueError:
        return {}


def require_recorded_base(base: ModelSource) -> None:
    """Raise ``ValueError`` if adapters were trained on a model that has changed since."""
    if base.adapters is None:
        return
    recorded = read_report(base.adapters).get("base")
    found = identify(replace(base, adapters=None))
    if isinstance(recorded, dict) and recorded != found:
        names = sorted(n for n in recorded.keys() | found if recorded.get(n) != found.get(n))
        told = [f"{n}: {recorded.get(n)} there, {found.get(n)} now" for n in names]
        raise ValueError(
            f"the adapters in {base.adapters} were trained on another model than {base.model} is "
            f"now; put that one back, or begin new adapters on this one\n  " + "\n  ".join(told)
        )


@contextmanager
def asking_hub(what: str) -> Iterator[None]:
    """Raise ``ValueError`` for whatever keeps ``what`` from being had from the Hub: its client does
    not foresee what a file of others holds."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{what} cannot be had from the Hub: {error}") from None


def pin_revision(base: ModelSource) -> ModelSource:
    """The same with the commit of an id of the Hub, so that all processes load one and the same,
    now and when the run is continued; ``ValueError`` if there is no such model, or no answer."""
    if Path(base.model).is_dir():
        return base
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    with asking_hub(f"{base.model} is no folder here, and"):
        config = Path(hf_hub_download(base.model, "config.json", revision=base.revision))
        commit, has_adapters = config.parent.name, False
        with suppress(EntryNotFoundError, LocalEntryNotFoundError):  # offline: never asked for
            hf_hub_download(base.model, ADAPTER_CONFIG, revision=commit)
            has_adapters = True  # which transformers would put around the model without a word
    if has_adapters:
        raise ValueError(
            f"{base.model} of the Hub holds adapters; expected their folder, as `hf download "
            f"{base.model} --local-dir FOLDER` makes it"
        )
    if base.adapters is not None:
        _require_glm4v(config.parent, base.adapters)
    return replace(base, revision=commit)


def identify(base: ModelSource) -> dict[str, str]:
    """Digests of the files of a model, and of adapters; of the Hub's, the commit."""
    found = {}
    folder = Path(base.model)
    if folder.is_dir():
        for path in sorted({p for pattern in MODEL_FILES for p in folder.glob(pattern)}):
            found[path.name] = digest_file(path)
    else:
        found["model on the Hub"] = f"{base.model} at {base.revision}"
    if base.adapters is not None:
        for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            found[f"adapters: {name}"] = digest_file(base.adapters / name)
    return found


def digest_file(path: Path) -> str:
    """sha256 of a file; of one above 64 MiB, of its size and 64 blocks of 64 KiB spread over it,
    the first and the last among them, so that a changed byte between them is not noticed."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= WHOLE_UP_TO:
            return hashlib.file_digest(file, "sha256").hexdigest()
        found = hashlib.sha256(str(size).encode())
        for number in range(BLOCKS):
            file.seek(number * (size - BLOCK) // (BLOCKS - 1))
            found.update(file.read(BLOCK))
    return f"{found.hexdigest()} (of samples)"
