"""Check the weights of a model's folder or Hub repository: their files, names and shapes.

Reading files needs no torch. :func:`require_complete_model` needs torch: it builds the model
without memory for the weights, on the meta device, to get their names and shapes.
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
from .base import explain_hub_errors
from .weight_files import (
    SINGLE_FILE,
    WEIGHTS_INDEX,
    TensorInfo,
    check_index,
    require_matching_index,
    shards_of,
    tensors_of,
)

# A buffer in the published weights. Our model does not load it, but computes it.
COMPUTED_BUFFER_SUFFIX = "rotary_pos_emb.inv_freq"
FLOAT_DTYPES = {"F64", "F32", "F16", "BF16"}
NO_WEIGHTS_PROBLEM = (
    f"a folder without weights; expected {SINGLE_FILE}, or {WEIGHTS_INDEX} and its shards. "
    "Pickled weights (*.bin) are not read: save the model again with save_pretrained of "
    "transformers"
)
# The names of all weights of GLM4VForCausalLM begin with it.
BASE_MODEL_PREFIX = "transformer."


def find_model_folder_problem(folder: Path) -> str | None:
    """Return why a model or adapters cannot be loaded from a folder; None if they can be."""
    try:
        _require_model_folder(folder)
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _require_model_folder(folder: Path) -> None:
    # Reading a pipe would block, so pipes are refused. Entries that this user has no permission to
    # look at count as missing: os.path.exists is false for them.
    for path in filter(os.path.exists, [folder / name for name in os.listdir(folder)]):
        if not (os.path.isfile(path) or os.path.isdir(path)):
            raise ValueError(
                f"{path.name} in it is a pipe, a socket or a device; expected only files"
            )
    if (folder / "adapter_config.json").is_file():
        return
    if not (folder / "config.json").exists():
        raise ValueError("a folder without config.json; expected the folder of a glm-4v")
    if reason := why_not_glm4v(read_json_object(folder / "config.json")):
        raise ValueError(f"its config.json does not belong to a glm-4v: {reason}")
    if not tensors_of(folder) and not shards_of(folder):
        raise ValueError(NO_WEIGHTS_PROBLEM)


def require_complete_model(
    model: str, revision: str | None = None, from_scratch: Sequence[str] = (), trained: str = "full"
) -> int:
    """Check that a model has exactly the weights of its config, by their names and shapes.

    ``from_pretrained`` only warns about missing weights, and initializes them randomly.

    Args:
        model: A folder or an id of the Hub. If the files are on the Hub, only their headers are
            read.
        revision: The commit, if ``model`` is an id of the Hub.
        from_scratch: Prefixes of the names of weights that may be missing, because they are trained
            from random values (the recipe's field ``from_scratch``).
        trained: The recipe's field ``trained``, which says what is trained.

    Returns:
        The number of weights that are present.

    Raises:
        ValueError: Weights are missing, unexpected, or of another shape.
    """
    # Not at the top, because it imports torch: other mistakes are reported before this slow import.
    from ..remote.configuration_chatglm import ChatGLMConfig

    require_loadable_settings(model, revision)
    config = ChatGLMConfig.from_pretrained(model, revision=revision or "main")
    return require_complete_weights(
        model, config, _read_tensors(model, revision), from_scratch, trained
    )


def require_complete_weights(
    model: str,
    config: Any,
    present: Mapping[str, TensorInfo | None],
    from_scratch: Sequence[str] = (),
    trained: str = "full",
) -> int:
    """Do what :func:`require_complete_model` does, for a config and a dictionary of tensors.

    Args:
        model: The model's folder or id, for messages.
        config: A ``ChatGLMConfig``.
        present: The tensors by name. If a value is None, only the name is compared.
    """
    import torch

    from ..remote.modeling_chatglm import GLM4VForCausalLM

    layers = max(config.num_layers, config.vision.num_hidden_layers)
    if layers > len(present) and not from_scratch:  # building so many layers would take long
        raise ValueError(
            f"{model}: its config.json has {layers:,} layers, and there are {len(present):,} "
            "weights; expected the config.json that was saved with the weights, and all weight "
            "files"
        )
    with torch.device("meta"):
        empty = GLM4VForCausalLM(config)
    expected = {name: tuple(weight.shape) for name, weight in empty.named_parameters()}
    quantized = getattr(config, "quantization_config", None) is not None
    missing, unexpected, mismatched = _compare_weights(expected, present, quantized)
    integers = [
        f"{name} {info.dtype}"
        for name, info in present.items()
        if info and name in expected and info.dtype not in FLOAT_DTYPES and not quantized
    ]
    for prefix in from_scratch:
        if not any(name.startswith(prefix) for name in missing):
            raise ValueError(
                f"from_scratch has {prefix!r}, but {model} is not missing weights whose names "
                f"begin with it; expected prefixes of missing weights ({listed(missing) or 'none'})"
            )
    initialized = [name for name in missing if name.startswith(tuple(from_scratch))]
    for name in initialized:
        if (part := part_of_parameter(name)) not in trained_parts(trained):
            raise ValueError(
                f"from_scratch has {name}, which is missing in {model}, but trained: {trained} "
                f"does not train it; expected full, or parts with {part}"
            )
    wrongly_missing = [f"{name} {[*expected[name]]}" for name in missing if name not in initialized]
    groups = (
        (
            wrongly_missing,
            f"of {len(expected)} weights are missing, which would be randomly initialized",
        ),
        (unexpected, "weights are not part of the model that its config.json describes"),
        (mismatched, "weights have other shapes than its config.json says"),
        (
            integers,
            f"weights are not {', '.join(sorted(FLOAT_DTYPES))}, and there is no "
            "quantization_config",
        ),
    )
    problems = [f"{len(names)} {problem} ({listed(names)})" for names, problem in groups if names]
    if problems:
        raise ValueError(
            f"{model}: {'; '.join(problems)}; expected the names and shapes of the published "
            "weights, with the config.json that was saved with them; merge adapters first (merge); "
            "a recipe's from_scratch lists weights that may be missing"
        )
    return len(expected) - len(initialized)


def require_loadable_settings(model: str, revision: str | None = None) -> None:
    """Check that transformers accepts the settings of a model, before any weight is loaded.

    Raises:
        ValueError: transformers raises an error, which may be of any class and rarely names the
            file. The ``ValueError`` names the file, and the key if possible.
    """
    from transformers.utils import cached_file

    causes = ("missing_entries", "connection_errors", "gated_repo")
    options: dict[str, Any] = {f"_raise_exceptions_for_{cause}": False for cause in causes}
    readers = {"config.json": _read_config, "generation_config.json": _read_generation_config}
    for name, read in readers.items():
        if file := cached_file(model, name, revision=revision, **options):
            values = read_json_object(Path(file))
            try:
                read(values)
            except Exception as error:  # transformers raises errors of any class
                kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                problem = f"cannot be read ({kind}{error})"
                if key := next((key for key in values if _reads_without(key, values, read)), None):
                    value = json.dumps(values[key])[:60]
                    problem = f"has {key} {value}, which {problem}: remove it"
                raise ValueError(f"{model}: {name} {problem}") from None


def _reads_without(key: str, values: dict, read: Callable[[dict], None]) -> bool:
    """Return whether settings can be read without ``key``, so that ``key`` is the problem."""
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
    if (quantization := values.get("quantization_config")) is not None:
        with suppress(ImportError):  # a missing package is reported when the model is loaded
            AutoQuantizationConfig.from_dict(quantization)


def _read_generation_config(values: dict) -> None:
    from transformers import GenerationConfig

    from ..remote.configuration_chatglm import refuse_nonfinite_generation

    refuse_nonfinite_generation(values, "generation_config.json")
    GenerationConfig.from_dict(values)


def quantized_by(model: str, revision: str | None = None) -> str | None:
    """Return the method by which a model was saved quantized, such as "awq", or None."""
    from ..remote.configuration_chatglm import ChatGLMConfig

    config = ChatGLMConfig.from_pretrained(model, revision=revision or "main")
    quantization = getattr(config, "quantization_config", None)
    return str(quantization.get("quant_method")) if isinstance(quantization, dict) else None


def _compare_weights(
    expected: Mapping[str, tuple[int, ...]],
    present: Mapping[str, TensorInfo | None],
    quantized: bool,
) -> tuple[list[str], list[str], list[str]]:
    """Return the names of weights that are missing, unexpected, and of another shape."""
    # If a ChatGLMModel was saved alone, the names have no prefix, and transformers adds it.
    if not expected.keys() & present and any(
        BASE_MODEL_PREFIX + name in expected for name in present
    ):
        present = {BASE_MODEL_PREFIX + name: info for name, info in present.items()}
    present = {n: info for n, info in present.items() if not n.endswith(COMPUTED_BUFFER_SUFFIX)}
    quantized_weights: set[str] = set()
    tensor_prefixes: tuple[str, ...] = ()
    if quantized:
        # A quantized weight is stored as several tensors, such as layer.weight.absmax,
        # layer.weight_packed or layer.qweight. All of them begin with "layer.".
        modules = {name.rpartition(".weight")[0] or name.rpartition(".")[0] for name in present}
        quantized_weights = {f"{module}.weight" for module in modules}
        tensor_prefixes = tuple(n.removesuffix("weight") for n in expected if n.endswith(".weight"))
    missing = [name for name in expected if name not in present and name not in quantized_weights]
    unexpected = [
        f"{name} {[*info.shape] if info else ''}".rstrip()
        for name, info in present.items()
        if name not in expected and not name.startswith(tensor_prefixes)
    ]
    mismatched = [
        f"{name}: {[*info.shape]}, not {[*shape]}"
        for name, shape in expected.items()
        if (info := present.get(name)) and info.shape != shape
        if not (quantized and info.dtype not in FLOAT_DTYPES)
    ]
    return missing, unexpected, mismatched


def _read_tensors(model: str, revision: str | None) -> dict[str, TensorInfo]:
    """Return the tensors of a folder or a Hub repository; only headers of files are read."""
    folder = Path(model)
    if folder.is_dir():
        return tensors_of(folder)
    from huggingface_hub import HfApi, snapshot_download

    # If all files are in the cache, no request is sent to the Hub.
    with suppress(OSError, ValueError):  # raised if files are not in the cache
        cached = Path(snapshot_download(model, revision=revision, local_files_only=True))
        if (shards := shards_of(cached)) and all((cached / name).is_file() for name in shards):
            return tensors_of(cached)
    with explain_hub_errors(f"the weights of {model}"):
        metadata = HfApi().get_safetensors_metadata(model, revision=revision)
    headers = {n: tensors_of_hub_file(file) for n, file in metadata.files_metadata.items()}
    if metadata.sharded:
        index = {"metadata": metadata.metadata, "weight_map": metadata.weight_map}
        require_matching_index(check_index(index), headers)
    return {name: info for tensors in headers.values() for name, info in tensors.items()}


def tensors_of_hub_file(file: Any) -> dict[str, TensorInfo]:
    """Return the tensors of a ``SafetensorsFileMetadata`` of the Hub's client."""
    return {n: TensorInfo(tuple(info.shape), info.dtype) for n, info in file.tensors.items()}
