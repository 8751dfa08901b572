"""Merge LoRA adapters into the weights of their base model.

The base model's weight files are read, changed and written one after the other, so that only one
is in memory. peft computes the merged weights. Checks that need no torch run before torch is
imported.
"""

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..atomic import (
    create_folder_atomically,
    require_copyable,
    require_free_disk,
    require_new_folder,
    write_atomically,
)
from ..models.base import ADAPTER_CONFIG, PEFT_SETTING_TYPES, ModelSource, folders_of
from ..models.find import find_source
from ..models.weight_files import WEIGHTS_INDEX, keep_known_index_entries, shards_of
from ..patch.config_json import read_json_object
from ..paths import refuse_overlap
from ..terminal_text import listed, show_progress

if TYPE_CHECKING:
    from torch import Tensor

GENERATION_CONFIG = "generation_config.json"
# Copied from the base model; save_pretrained of our classes writes all other files.
COPIED_FILES = [GENERATION_CONFIG, "LICENSE*", "MODEL_LICENSE*"]
PEFT_PREFIX = "base_model.model."  # begins the names of a peft model's modules
# Settings of adapters that a merge handles, or that do not affect the weights.
MERGEABLE_FIELDS = PEFT_SETTING_TYPES.keys() - str.split(
    "bias corda_config ensure_weight_tying eva_config fan_in_fan_out init_lora_weights lora_bias "
    "modules_to_save use_qalora"
) | {"peft_type", "peft_version", "base_model_name_or_path", "megatron_core"}
# These values of other fields do not affect the weights. Nor does null, false or an empty value.
NEUTRAL_FIELD_VALUES = {"bias": ("none",), "init_lora_weights": (True, "gaussian", "default")}
# Largest RMS error of a merged layer's output, relative to the RMS of the output, by the dtype of
# the merged weight.
MERGE_TOLERANCES = {"float32": 1e-5, "bfloat16": 4e-3, "float16": 1e-3}


def merge(adapters: str, out: Path, revision: str | None = None) -> None:
    """Write the base model with merged adapters to a new folder, ready to load.

    If an error is raised, ``out`` does not exist.

    Args:
        adapters: Folder of LoRA adapters.
        revision: The base model's revision, if it is on the Hub.

    Raises:
        ValueError: There are no adapters, they cannot be merged, ``out`` exists, or the disk is
            too small.
        RuntimeError: A merged layer does not compute the same output as with its adapter.
    """
    require_new_folder(out)
    base = find_source(adapters, revision)
    if base.adapters is None:
        raise ValueError(
            f"{adapters} holds no adapters: {ADAPTER_CONFIG} is missing; a complete model needs no "
            "merge"
        )
    require_mergeable(base, out)
    folder = fetch_weights(base)
    require_free_disk(weight_bytes(folder), out)
    with create_folder_atomically(out) as temporary_folder:
        _write_merged(base, folder, temporary_folder)


def require_mergeable(base: ModelSource, out: Path) -> None:
    """Raise ``ValueError`` if ``out`` overlaps with the inputs, or the adapters cannot be merged.

    The message names the fields of the adapters' config that a merge would not honor.
    """
    refuse_overlap(out, folders_of(base), "--out")
    if base.adapters is None:
        return
    path = base.adapters / ADAPTER_CONFIG
    config = json.loads(path.read_text(encoding="utf-8"))
    unsupported = {
        name: value
        for name, value in config.items()
        if name not in MERGEABLE_FIELDS
        and value
        and value not in NEUTRAL_FIELD_VALUES.get(name, ())
    }
    if unsupported:
        fields = ", ".join(
            f"{name} is {json.dumps(value)}" for name, value in sorted(unsupported.items())
        )
        raise ValueError(
            f"{path}: {fields}: such adapters cannot be merged; expected only LoRA, rsLoRA or DoRA "
            "on linear layers, and no other trained weights"
        )


def fetch_weights(base: ModelSource) -> Path:
    """Return the folder of the base model's weights, downloaded if the model is on the Hub.

    Raises ``ValueError`` if a link leads out of the folder.
    """
    folder = Path(base.model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        patterns = ["*.safetensors", WEIGHTS_INDEX, *COPIED_FILES, "config.json"]
        with show_progress(f"downloading {base.model}"):
            folder = Path(
                snapshot_download(base.model, revision=base.revision, allow_patterns=patterns)
            )
    for path in [*files_to_copy(folder), folder / "config.json", folder / WEIGHTS_INDEX]:
        require_copyable(path, folder)
    return folder


def files_to_copy(folder: Path) -> list[Path]:
    """Return the files of a model's folder that match :data:`COPIED_FILES`."""
    # glob() would skip dangling links, which must raise an error.
    return sorted(
        path
        for path in folder.iterdir()
        if any(fnmatch(path.name, pattern) for pattern in COPIED_FILES)
    )


def copy_license_and_generation(folder: Path, out: Path) -> None:
    """Copy license files and generation_config.json to ``out``, unless it has them already.

    Generation options that transformers does not know are left out and logged.
    """
    from transformers import GenerationConfig

    from ..remote.configuration_chatglm import keep_known_settings

    for path in files_to_copy(folder):
        if (out / path.name).exists():
            continue
        if path.name != GENERATION_CONFIG:
            shutil.copyfile(path, out / path.name)
            continue
        settings = keep_known_settings(
            read_json_object(path), vars(GenerationConfig()), GENERATION_CONFIG
        )
        write_atomically(out / GENERATION_CONFIG, json.dumps(settings, indent=2) + "\n")


def weight_bytes(folder: Path) -> int:
    """Return the size of a model's weight files in bytes."""
    return sum((folder / name).stat().st_size for name in shards_of(folder))


# The functions below need torch.


def _write_merged(base: ModelSource, folder: Path, out: Path) -> None:
    """Write config, code, processor, license and, file by file, the merged weights."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file
    from transformers.dynamic_module_utils import custom_object_save

    from ..models.loading import load_processor
    from ..remote.configuration_chatglm import ChatGLMConfig
    from ..remote.modeling_chatglm import GLM4VForCausalLM

    config = ChatGLMConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = GLM4VForCausalLM(config)
    config.architectures = [GLM4VForCausalLM.__name__]
    custom_object_save(model, out)
    config.save_pretrained(out)
    load_processor(base).save_pretrained(out)
    copy_license_and_generation(folder, out)
    if (folder / WEIGHTS_INDEX).is_file():
        index = keep_known_index_entries(read_json_object(folder / WEIGHTS_INDEX))
        write_atomically(out / WEIGHTS_INDEX, json.dumps(index, indent=2) + "\n")
    layers = adapted_layers(base, model)
    unmerged = {*layers}
    shards = shards_of(folder)
    with show_progress("merging in fp32", total=len(shards), unit="file") as progress:
        for name in shards:
            with safe_open(folder / name, framework="pt") as file:
                keys = file.keys()
                tensors = {key: file.get_tensor(key) for key in keys}
            for key in layers.keys() & tensors.keys():
                tensors[key] = merged_weight(layers[key], tensors[key], key)
                unmerged.discard(key)
            save_file(tensors, out / name, metadata={"format": "pt"})
            progress.update()
    if unmerged:
        raise ValueError(
            f"{base.model} is missing {len(unmerged)} of the {len(layers)} weights that the "
            f"adapters change: {listed(sorted(unmerged))}"
        )


def adapted_layers(base: ModelSource, model: Any) -> dict[str, Any]:
    """Return peft's LoRA layers by the names of the weights that they adapt.

    The base weights in these layers are placeholders that take no memory.

    Args:
        model: The base model on the meta device.
    """
    import torch
    from peft.tuners.lora import LoraLayer

    from ..engine.trainable import load_adapters

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            # peft creates adapters with the weight's device and dtype: the CPU, and fp32. One
            # element, expanded to the weight's shape, takes no memory.
            placeholder = torch.zeros(()).expand(module.weight.shape)
            module.weight = torch.nn.Parameter(placeholder, requires_grad=False)
    assert base.adapters is not None
    peft_model = load_adapters(model, base.adapters).requires_grad_(False).eval()
    layers = {
        f"{name.removeprefix(PEFT_PREFIX)}.weight": module
        for name, module in peft_model.named_modules()
        if isinstance(module, LoraLayer)
    }
    not_linear = [
        name
        for name, layer in layers.items()
        if not isinstance(layer.get_base_layer(), torch.nn.Linear)
    ]
    if not_linear:
        raise ValueError(
            f"{base.adapters} adapts {len(not_linear)} layers that are not linear "
            f"({listed(not_linear)}): such adapters cannot be merged"
        )
    return layers


def merged_weight(layer: Any, weight: "Tensor", name: str) -> "Tensor":
    """Merge an adapter into ``weight`` in fp32, and return the result, rounded to weight's dtype.

    Args:
        layer: peft's LoRA layer.
        weight: The base weight, ``(out_features, in_features)``.
        name: The weight's name, for messages.

    Raises:
        ValueError: The merged weight is NaN or infinite.
        RuntimeError: The merged layer's output differs from the adapted layer's by more than
            :data:`MERGE_TOLERANCES`.
    """
    import torch
    from torch.nn.functional import linear

    base_layer = layer.get_base_layer()
    assert base_layer.weight.shape == weight.shape, (name, base_layer.weight.shape, weight.shape)
    placeholder, bias = base_layer.weight, base_layer.bias  # restored below
    base_layer.weight = torch.nn.Parameter(weight.to(torch.float32, copy=True), requires_grad=False)
    base_layer.bias = None  # LoRA does not change the bias
    x = torch.randn(8, weight.shape[1], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = layer(x)
        layer.merge()
        merged = base_layer.weight.data.to(weight.dtype)
        actual = linear(x, merged.float())
    base_layer.weight, base_layer.bias = placeholder, bias
    if not torch.isfinite(merged).all():
        raise ValueError(
            f"{name} is NaN or infinite after the merge: the adapters may be damaged, or their "
            "training diverged"
        )
    error = ((actual - expected).square().mean().sqrt() / expected.square().mean().sqrt()).item()
    allowed = MERGE_TOLERANCES[str(weight.dtype).removeprefix("torch.")]
    if not error <= allowed:
        raise RuntimeError(
            f"{name}: the merged layer's output differs from the adapted layer's by {error:.2g} of "
            f"its root mean square; expected at most {allowed:.2g}"
        )
    return merged
