"""The weights of a model's folder, or of a repository of the Hub: their files, names and shapes.

What only reads files needs no torch; :func:`require_whole` does, for the model says itself which
weights it has.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

from ..engine.options import part_of, parts_trained
from ..patch.config_json import read_object, why_not_glm4v
from ..terminal_text import listed
from .sizes import require_sizes
from .weight_files import (
    INDEX,
    WHOLE,
    Shape,
    check_header,
    check_index,
    require_agreement,
    shards_of,
    tensors_of,
)

COMPUTED = "rotary_pos_emb.inv_freq"  # in published weights; no weight, and not read
PICKLES = ["pytorch_model*.bin", "pytorch_model.bin.index.json"]
FLOATS = {"F64", "F32", "F16", "BF16"}
PREFIX = "transformer."
TOWER = "transformer.vision."


def fault_of_model_folder(folder: Path) -> str | None:
    try:
        there = [folder / name for name in os.listdir(folder)]
    except OSError as error:
        return f"a folder that cannot be read: {error.strerror}"
    # The end of a pipe would be waited for, by whichever library reads it. By os.path, to which
    # what may not be looked at is not there.
    for path in filter(os.path.exists, there):
        if not (os.path.isfile(path) or os.path.isdir(path)):
            return f"{path.name} in it is a pipe, a socket or a device; expected files alone"
    if (folder / "adapter_config.json").is_file():
        return None
    if not (folder / "config.json").exists():
        return "a folder without config.json; expected one of a glm-4v"
    try:
        if reason := why_not_glm4v(read_object(folder / "config.json")):
            return f"its config.json is not a glm-4v's: {reason}"
        tensors_of(folder)
        shards = shards_of(folder)
    except ValueError as error:
        return str(error)
    if not shards and not [*folder.glob("*.bin")]:
        return "a folder without weights; expected model.safetensors, or an index of its parts"
    return None


def require_whole(
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
    return require_weights(model, config, _tensors(model, revision), from_scratch, trained)


def require_weights(
    model: str,
    config: Any,
    there: Mapping[str, Shape | None],
    from_scratch: Sequence[str] = (),
    trained: str = "full",
) -> int:
    """As :func:`require_whole`, of a config and what is ``there``: of ``None`` the name counts."""
    from ..remote.modeling_chatglm import GLM4VForCausalLM, torch

    if not from_scratch:
        require_sizes(model, config, there)
    with torch.device("meta"):
        built = GLM4VForCausalLM(config)
    wanted = {name: tuple(weight.shape) for name, weight in built.named_parameters()}
    quantised = getattr(config, "quantization_config", None) is not None
    missing, left_over, unlike = _compare(wanted, there, quantised)
    unused = [start for start in from_scratch if not any(n.startswith(start) for n in missing)]
    if unused:
        raise ValueError(
            f"from_scratch has {unused[0]!r}, and {model} lacks no weight whose name begins so; "
            f"expected beginnings of names that it lacks ({listed(missing) or 'none'})"
        )
    allowed = [name for name in missing if name.startswith(tuple(from_scratch))]
    if idle := [name for name in allowed if part_of(name) not in parts_trained(trained)]:
        raise ValueError(
            f"from_scratch has {idle[0]}, which {model} lacks and trained: {trained} does not "
            f"train; expected trained to be full, or to have {part_of(idle[0])} among its parts"
        )
    missing = [name for name in missing if name not in allowed]
    faults = (
        (missing, f"of {len(wanted)} weights are missing, which would begin at random"),
        (left_over, "weights have no place in the model of its config.json"),
        (unlike, "weights have other shapes than its config.json says"),
    )
    told = [f"{len(names)} {fault} ({listed(names)})" for names, fault in faults if names]
    if told:
        cause = _guess(missing, left_over, unlike, wanted)
        raise ValueError(f"{model}: {'; '.join(told)}; {cause}")
    return len(wanted) - len(allowed)


def require_readable(model: str, revision: str | None = None) -> None:
    """See that transformers takes the settings of a model, before it loads any weight.

    Its own errors are of every kind, and few name the file or the key, as this ``ValueError`` does.
    """
    from transformers import GenerationConfig
    from transformers.quantizers.auto import AutoQuantizationConfig
    from transformers.utils import cached_file

    from ..remote.configuration_chatglm import ChatGLMConfig, refuse_nonfinite_generation

    def read_config(values: dict) -> None:
        ChatGLMConfig.from_dict(values)
        if values.get("transformers_weights"):
            raise ValueError(f"the weights are in {WHOLE}, or in the files of {INDEX}")
        if values.get("configuration_files"):
            raise ValueError("no other file of settings is checked")
        if (quantised := values.get("quantization_config")) is not None:
            with suppress(ImportError):  # a package that is missing is told by whoever loads
                AutoQuantizationConfig.from_dict(quantised)

    def read_generation_config(values: dict) -> None:
        refuse_nonfinite_generation(values, "generation_config.json")
        GenerationConfig.from_dict(values)

    kinds = ("missing_entries", "connection_errors", "gated_repo")
    silent: dict[str, Any] = {f"_raise_exceptions_for_{kind}": False for kind in kinds}
    readers: dict[str, Any] = {
        "config.json": read_config,
        "generation_config.json": read_generation_config,
    }
    for name, read in readers.items():
        if file := cached_file(model, name, revision=revision, **silent):
            _require_readable(read, read_object(Path(file)), f"{model}: {name}")


def _require_readable(read: Callable[[dict], Any], values: dict, place: str) -> None:
    try:
        read(deepcopy(values))
    except Exception as error:  # values that nobody foresaw make transformers raise any kind
        for key in values:
            with suppress(Exception):
                read({name: deepcopy(value) for name, value in values.items() if name != key})
                place += f" has {key} {json.dumps(values[key])[:60]}"
                break
        raise ValueError(f"{place}, which cannot be read ({error}): take it out") from None


def quantised_by(model: str, revision: str | None = None) -> str | None:
    """The method that a model's weights were saved quantised by, as its config names it."""
    from ..remote.configuration_chatglm import ChatGLMConfig

    config = ChatGLMConfig.from_pretrained(model, revision=revision or "main")
    found = getattr(config, "quantization_config", None)
    return str(found.get("quant_method")) if isinstance(found, dict) else None


def _compare(
    wanted: Mapping[str, tuple[int, ...]], there: Mapping[str, Shape | None], quantised: bool
) -> tuple[list[str], list[str], list[str]]:
    """Names of the model's weights that are not there, and of those there that are not the model's;
    and those of another size, with their sides."""
    # transformers adds what the decoder's own class leaves out, if no name has it.
    if not wanted.keys() & there and any(PREFIX + name in wanted for name in there):
        there = {PREFIX + name: shape for name, shape in there.items()}
    there = {name: shape for name, shape in there.items() if not name.endswith(COMPUTED)}
    # A quantised layer's weight is kept in pieces, as .weight.absmax, .weight_packed or .qweight.
    pieces = {name.rpartition(".weight")[0] or name.rpartition(".")[0] for name in there}
    layers = tuple(name.removesuffix("weight") for name in wanted if name.endswith(".weight"))
    if not quantised:
        pieces, layers = set(), ()
    missing = [
        name
        for name in wanted
        if name not in there
        and not (name.endswith(".weight") and name.removesuffix(".weight") in pieces)
    ]
    left_over = [name for name in there if name not in wanted and not name.startswith(layers)]
    unlike = [
        f"{name}: {[*found.sides]}, not {[*sides]}"
        for name, sides in wanted.items()
        if (found := there.get(name)) and found.sides != sides
        if not (quantised and found.dtype not in FLOATS)
    ]
    return missing, left_over, unlike


def _guess(
    missing: list[str], left_over: list[str], unlike: list[str], wanted: Mapping[str, Any]
) -> str:
    """The likeliest cause, and its cure."""
    if any(".base_layer." in name or ".lora_" in name for name in left_over):
        return (
            "adapters were saved around the model and not merged into it; save it again after "
            "merge_and_unload(), or merge the adapters' folder with glm4v-patched merge"
        )
    if added := _common_prefix(left_over, wanted):
        return f"another tool put {added!r} before the names; expected them without it"
    if missing and all(name.startswith(TOWER) for name in missing):
        return (
            "the vision tower was left out, as by tools that save a language model; put the "
            "published model's weights of these names beside the others"
        )
    if unlike:
        return "the config.json is another model's; expected the one that was saved with them"
    if missing and not left_over:
        return "a shard was left out, or the index is another save's; expected all of the folder"
    return "expected the names of the published weights"


def _common_prefix(longer: Sequence[str], names: Iterable[str]) -> str | None:
    """What stands before every one of ``longer`` that is one of ``names`` without it."""
    known = {*names}
    for start in range(1, len(longer[0])) if longer else ():
        before = longer[0][:start]
        if longer[0][start:] in known and all(
            name.startswith(before) and name[start:] in known for name in longer
        ):
            return before
    return None


def _tensors(model: str, revision: str | None) -> dict[str, Shape]:
    """Of a folder or a repository. Of pickled files, sizes are read and no weights."""
    folder = Path(model)
    if folder.is_dir():
        return tensors_of(folder) if shards_of(folder) else _tensors_of_pickles(folder)
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import NotASafetensorsRepoError

    with suppress(OSError, ValueError):  # none of it is in the cache
        # Where all of them are, the Hub need not answer.
        cached = Path(snapshot_download(model, revision=revision, local_files_only=True))
        if (shards := shards_of(cached)) and all((cached / name).is_file() for name in shards):
            return tensors_of(cached)
    try:
        metadata = HfApi().get_safetensors_metadata(model, revision=revision)
    except NotASafetensorsRepoError:
        return _tensors_of_pickles(
            Path(snapshot_download(model, revision=revision, allow_patterns=PICKLES))
        )
    except Exception as error:  # huggingface_hub does not foresee what a file of others holds
        raise ValueError(f"the weights of {model} cannot be had from the Hub: {error}") from None
    files = metadata.files_metadata.items()
    headers = {shard: shapes_of(file, f"{model}: {shard}") for shard, file in files}
    if metadata.sharded:
        index = {"metadata": metadata.metadata, "weight_map": metadata.weight_map}
        require_agreement(check_index(index), headers)
    return {name: shape for tensors in headers.values() for name, shape in tensors.items()}


def shapes_of(file: Any, place: str) -> dict[str, Shape]:
    """Return what a file on the Hub holds, by its ``SafetensorsFileMetadata``."""
    header = {
        name: {"dtype": of.dtype, "shape": of.shape, "data_offsets": [*of.data_offsets]}
        for name, of in file.tensors.items()
    }
    return check_header(header, place)


def _tensors_of_pickles(folder: Path) -> dict[str, Shape]:
    from ..remote.modeling_chatglm import torch

    tensors: dict[str, Shape] = {}
    for file in sorted(folder.glob(PICKLES[0])):
        try:
            held = torch.load(file, map_location="meta", weights_only=True)
            for name, tensor in held.items():
                dtype = "F32" if tensor.is_floating_point() else ""
                tensors[name] = Shape(tuple(tensor.shape), dtype)
        except Exception as error:  # a damaged pickle makes torch raise any kind
            raise ValueError(f"{file} cannot be read as a dict of tensors: {error}") from None
    return tensors
