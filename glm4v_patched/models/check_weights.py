"""The weights of a model's folder, or of a repository of the Hub: their files, names and shapes.

What only reads files needs no torch; :func:`require_complete_model` does, for the model says itself which
weights it has.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

from ..engine.options import part_of_parameter, trained_parts
from ..patch.config_json import read_json_object, why_not_glm4v
from ..terminal_text import listed
from .base import asking_hub
from .weight_files import (
    WEIGHTS_INDEX,
    WHOLE,
    TensorInfo,
    check_header,
    check_index,
    require_agreement,
    shards_of,
    tensors_of,
)

COMPUTED = "rotary_pos_emb.inv_freq"  # in published weights; no weight, and not read
FLOATS = {"F64", "F32", "F16", "BF16"}
NO_WEIGHTS = (
    f"a folder without weights; expected {WHOLE}, or {WEIGHTS_INDEX} and its parts. Pickled weights "
    "(*.bin) are not read: save the model once more with transformers, by save_pretrained"
)
PREFIX = "transformer."


def find_model_folder_problem(folder: Path) -> str | None:
    """Why a model, or adapters, cannot be loaded from a folder."""
    try:
        _require_model_folder(folder)
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _require_model_folder(folder: Path) -> None:
    # The end of a pipe would be waited for, by whichever library reads it. By os.path, to which
    # what may not be looked at is not there.
    for path in filter(os.path.exists, [folder / name for name in os.listdir(folder)]):
        if not (os.path.isfile(path) or os.path.isdir(path)):
            told = f"{path.name} in it is a pipe, a socket or a device; expected files alone"
            raise ValueError(told)
    if (folder / "adapter_config.json").is_file():
        return
    if not (folder / "config.json").exists():
        raise ValueError("a folder without config.json; expected one of a glm-4v")
    if reason := why_not_glm4v(read_json_object(folder / "config.json")):
        raise ValueError(f"its config.json is not a glm-4v's: {reason}")
    if not tensors_of(folder) and not shards_of(folder):
        raise ValueError(NO_WEIGHTS)


def require_complete_model(
    model: str, revision: str | None = None, from_scratch: Sequence[str] = (), trained: str = "full"
) -> int:
    """See by names and shapes alone that a model has every weight of its config, and no other;
    ``ValueError`` if it does not. ``from_pretrained`` only warns, and lets it begin at random.

    Args:
        model: A folder, or an id of the Hub, of which the beginnings of the files are read.
        revision: Of an id of the Hub: its commit.
        from_scratch: Beginnings of names of weights that are missing on purpose, and are trained.
        trained: As a recipe says it.

    Returns:
        How many weights it has.
    """
    # Late: mistakes that need no torch are answered without it.
    from ..remote.configuration_chatglm import ChatGLMConfig

    require_readable(model, revision)
    config = ChatGLMConfig.from_pretrained(model, revision=revision or "main")
    return require_complete_weights(model, config, _tensors(model, revision), from_scratch, trained)


def require_complete_weights(
    model: str,
    config: Any,
    there: Mapping[str, TensorInfo | None],
    from_scratch: Sequence[str] = (),
    trained: str = "full",
) -> int:
    """As :func:`require_complete_model`, of a config and what is ``there``: of ``None`` the name counts."""
    from ..remote.modeling_chatglm import GLM4VForCausalLM, torch

    layers = max(config.num_layers, config.vision.num_hidden_layers)
    if layers > len(there) and not from_scratch:  # a model of so many is not even begun
        raise ValueError(
            f"{model}: its config.json has {layers:,} layers, and there are {len(there):,} "
            "weights; expected the config.json that was saved with them, and all of their files"
        )
    with torch.device("meta"):
        built = GLM4VForCausalLM(config)
    wanted = {name: tuple(weight.shape) for name, weight in built.named_parameters()}
    quantized = getattr(config, "quantization_config", None) is not None
    missing, left_over, unlike = _compare(wanted, there, quantized)
    unused = [start for start in from_scratch if not any(n.startswith(start) for n in missing)]
    if unused:
        raise ValueError(
            f"from_scratch has {unused[0]!r}, and {model} lacks no weight whose name begins so; "
            f"expected beginnings of names that it lacks ({listed(missing) or 'none'})"
        )
    allowed = [name for name in missing if name.startswith(tuple(from_scratch))]
    if idle := [name for name in allowed if part_of_parameter(name) not in trained_parts(trained)]:
        raise ValueError(
            f"from_scratch has {idle[0]}, which {model} lacks and trained: {trained} does not "
            f"train; expected trained to be full, or to have {part_of_parameter(idle[0])} among its parts"
        )
    lacking = [f"{name} {[*wanted[name]]}" for name in missing if name not in allowed]
    faults = (
        (lacking, f"of {len(wanted)} weights are missing, which would be randomly initialized"),
        (left_over, "weights have no place in the model of its config.json"),
        (unlike, "weights have other shapes than its config.json says"),
    )
    told = [f"{len(names)} {fault} ({listed(names)})" for names, fault in faults if names]
    if told:
        raise ValueError(
            f"{model}: {'; '.join(told)}; expected the names and shapes of the published weights, "
            "with the config.json that was saved with them; adapters are merged first (merge), and "
            "weights that may begin at random are named in a recipe's from_scratch"
        )
    return len(wanted) - len(allowed)


def require_readable(model: str, revision: str | None = None) -> None:
    """See that transformers takes the settings of a model, before it loads any weight.

    Its own errors are of every kind, and few name the file, as this ``ValueError`` does.
    """
    from transformers.utils import cached_file

    kinds = ("missing_entries", "connection_errors", "gated_repo")
    silent: dict[str, Any] = {f"_raise_exceptions_for_{kind}": False for kind in kinds}
    readers = {"config.json": _read_config, "generation_config.json": _read_generation_config}
    for name, read in readers.items():
        if file := cached_file(model, name, revision=revision, **silent):
            values = read_json_object(Path(file))
            try:
                read(values)
            except Exception as error:  # values that nobody foresaw raise any kind
                kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                told = f"cannot be read ({kind}{error})"
                if key := next((key for key in values if _reads_without(key, values, read)), None):
                    told = f"has {key} {json.dumps(values[key])[:60]}, which {told}: take it out"
                raise ValueError(f"{model}: {name} {told}") from None


def _reads_without(key: str, values: dict, read: Callable[[dict], None]) -> bool:
    with suppress(Exception):
        read({name: value for name, value in values.items() if name != key})
        return True
    return False


def _read_config(values: dict) -> None:
    from transformers.quantizers.auto import AutoQuantizationConfig

    from ..remote.configuration_chatglm import ChatGLMConfig

    for key in ("transformers_weights", "configuration_files"):
        if values.get(key):
            raise ValueError(f"{key} names files that are not checked")
    ChatGLMConfig.from_dict(deepcopy(values))
    if (quantized := values.get("quantization_config")) is not None:
        with suppress(ImportError):  # a package that is missing is told by whoever loads
            AutoQuantizationConfig.from_dict(quantized)


def _read_generation_config(values: dict) -> None:
    from transformers import GenerationConfig

    from ..remote.configuration_chatglm import refuse_nonfinite_generation

    refuse_nonfinite_generation(values, "generation_config.json")
    GenerationConfig.from_dict(values)


def quantized_by(model: str, revision: str | None = None) -> str | None:
    """The method that a model's weights were saved quantized by, as its config names it."""
    from ..remote.configuration_chatglm import ChatGLMConfig

    config = ChatGLMConfig.from_pretrained(model, revision=revision or "main")
    found = getattr(config, "quantization_config", None)
    return str(found.get("quant_method")) if isinstance(found, dict) else None


def _compare(
    wanted: Mapping[str, tuple[int, ...]], there: Mapping[str, TensorInfo | None], quantized: bool
) -> tuple[list[str], list[str], list[str]]:
    """Names of the model's weights that are not there, and of those there that are not the model's;
    and those of another size, with their sides."""
    # transformers adds what the decoder's own class leaves out, if no name has it.
    if not wanted.keys() & there and any(PREFIX + name in wanted for name in there):
        there = {PREFIX + name: shape for name, shape in there.items()}
    there = {name: shape for name, shape in there.items() if not name.endswith(COMPUTED)}
    # A quantized layer's weight is kept in pieces, as .weight.absmax, .weight_packed or .qweight.
    pieces = {name.rpartition(".weight")[0] or name.rpartition(".")[0] for name in there}
    layers = tuple(name.removesuffix("weight") for name in wanted if name.endswith(".weight"))
    if not quantized:
        pieces, layers = set(), ()
    missing = [
        name
        for name in wanted
        if name not in there
        and not (name.endswith(".weight") and name.removesuffix(".weight") in pieces)
    ]
    left_over = [
        f"{name} {[*shape.sides] if shape else ''}".rstrip()
        for name, shape in there.items()
        if name not in wanted and not name.startswith(layers)
    ]
    unlike = [
        f"{name}: {[*found.sides]}, not {[*sides]}"
        for name, sides in wanted.items()
        if (found := there.get(name)) and found.sides != sides
        if not (quantized and found.dtype not in FLOATS)
    ]
    return missing, left_over, unlike


def _tensors(model: str, revision: str | None) -> dict[str, TensorInfo]:
    """Of a folder, or a repository of the Hub, of which the beginnings of the files are read."""
    folder = Path(model)
    if folder.is_dir():
        return tensors_of(folder)
    from huggingface_hub import HfApi, snapshot_download

    with suppress(OSError, ValueError):  # none of it is in the cache
        # Where all of them are, the Hub need not answer.
        cached = Path(snapshot_download(model, revision=revision, local_files_only=True))
        if (shards := shards_of(cached)) and all((cached / name).is_file() for name in shards):
            return tensors_of(cached)
    with asking_hub(f"the weights of {model}"):
        metadata = HfApi().get_safetensors_metadata(model, revision=revision)
    files = metadata.files_metadata.items()
    headers = {shard: tensors_of_hub_file(file, f"{model}: {shard}") for shard, file in files}
    if metadata.sharded:
        index = {"metadata": metadata.metadata, "weight_map": metadata.weight_map}
        require_agreement(check_index(index), headers)
    return {name: shape for tensors in headers.values() for name, shape in tensors.items()}


def tensors_of_hub_file(file: Any, place: str) -> dict[str, TensorInfo]:
    """Return what a file on the Hub holds, by its ``SafetensorsFileMetadata``."""
    header = {
        name: {"dtype": of.dtype, "shape": of.shape, "data_offsets": [*of.data_offsets]}
        for name, of in file.tensors.items()
    }
    return check_header(header, place)
