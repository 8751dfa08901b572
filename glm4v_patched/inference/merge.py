"""Makes one model of LoRA adapters and the model they are on.

A file of the model's weights after another is read, changed and written: no more than one of them
is in memory. The arithmetic is peft's. What can be known without torch is checked before it.
"""

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..atomic import apply_umask, require_inside, write_atomically
from ..engine.folders import nearest_existing
from ..models.base import ADAPTER_CONFIG, ModelSource, folders_of
from ..models.find import find_source
from ..models.weight_files import WEIGHTS_INDEX, standard_index, shards_of
from ..patch.config_json import read_json_object
from ..paths import require_apart
from ..terminal_text import format_bytes, listed

if TYPE_CHECKING:
    from torch import Tensor

# Beside weights and what our classes write.
GENERATION = "generation_config.json"
TAKEN_OVER = [GENERATION, "LICENSE*", "MODEL_LICENSE*"]
PREFIX = "base_model.model."  # peft's, before the names of the model's modules
# What merging understands, of peft's fields, and what does not change the weights.
UNDERSTOOD = {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"}
UNDERSTOOD |= {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"}
UNDERSTOOD |= {"peft_type", "peft_version", "base_model_name_or_path", "revision", "auto_mapping"}
UNDERSTOOD |= {"task_type", "inference_mode", "lora_dropout", "megatron_core", "runtime_config"}
UNDERSTOOD |= {"qalora_group_size"}  # of use_qalora
# Their values beside none, false and empty ones. Others change the model's weights, too.
HARMLESS = {"bias": ("none",), "init_lora_weights": (True, "gaussian", "default")}
# Of the root mean square: what rounding makes of the output of a merged layer, computed in fp32.
TOLERANCES = {"float32": 1e-5, "bfloat16": 4e-3, "float16": 1e-3}


def merge(adapters: str, out: Path, revision: str | None = None) -> None:
    """Write the model with the adapters in its weights to a new folder, ready to be loaded.

    Raises:
        ValueError: there are no adapters, they cannot be merged, ``out`` is there, or the disk is
            too small; RuntimeError: a weight that was merged does not compute the same. ``out`` is
            not there then.
    """
    require_new(out)
    base = find_source(adapters, revision)
    if base.adapters is None:
        raise ValueError(
            f"{adapters} holds no adapters: {ADAPTER_CONFIG} is missing; a model of its own needs "
            "no merging"
        )
    require_mergeable(base, out)
    folder = weights_of(base)
    require_space(bytes_of(folder), out)
    with new_folder(out) as partial:
        _write(base, folder, partial)


def require_new(out: Path) -> None:
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"--out {out} is there, and nothing is replaced; expected a new folder")


def require_mergeable(base: ModelSource, out: Path) -> None:
    """Raise ``ValueError`` if ``out`` is not apart from what is read, or adapters have fields that
    merging, which only adds to weights, would not honor; these are named."""
    require_apart(out, folders_of(base), "--out")
    if base.adapters is None:
        return
    path = base.adapters / ADAPTER_CONFIG
    config = json.loads(path.read_text(encoding="utf-8"))
    odd = {
        name: value
        for name, value in config.items()
        if name not in UNDERSTOOD and value and value not in HARMLESS.get(name, ())
    }
    if odd:
        told = ", ".join(f"{name} is {json.dumps(value)}" for name, value in sorted(odd.items()))
        raise ValueError(
            f"{path}: {told}: cannot be merged; expected LoRA (rsLoRA, DoRA) alone, on linear "
            "layers without other trained weights"
        )


def weights_of(base: ModelSource) -> Path:
    """The folder with the base model's weights, downloaded if it is on the Hub."""
    folder = Path(base.model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        wanted = ["*.safetensors", WEIGHTS_INDEX, *TAKEN_OVER, "config.json"]
        folder = Path(snapshot_download(base.model, revision=base.revision, allow_patterns=wanted))
    shards = shards_of(folder)
    for path in [*taken_over(folder), folder / "config.json", folder / WEIGHTS_INDEX]:
        require_inside(path, folder)
    if not shards:
        raise ValueError(
            f"{base.model} has no weights as safetensors; load it and save it once "
            "(save_pretrained), and merge into that"
        )
    return folder


def taken_over(folder: Path) -> list[Path]:
    # Not by glob(), which leaves out links to nothing.
    return sorted(p for p in folder.iterdir() if any(fnmatch(p.name, t) for t in TAKEN_OVER))


def copy_license_and_generation(folder: Path, out: Path) -> None:
    """Copy licenses and options of generation to ``out``, where it has none; but for options that
    transformers does not know, which are logged."""
    from transformers import GenerationConfig

    from ..remote.configuration_chatglm import keep_known_settings

    for path in taken_over(folder):
        if (out / path.name).exists():
            continue
        if path.name != GENERATION:
            shutil.copyfile(path, out / path.name)
            continue
        known = keep_known_settings(read_json_object(path), vars(GenerationConfig()), GENERATION)
        write_atomically(out / GENERATION, json.dumps(known, indent=2) + "\n")


def bytes_of(folder: Path) -> int:
    """Of a model's weights."""
    return sum((folder / name).stat().st_size for name in shards_of(folder))


def require_space(needed: float, out: Path) -> None:
    free = shutil.disk_usage(nearest_existing(str(out))).free
    if free < needed:
        raise ValueError(
            f"--out {out}: {format_bytes(free)} are free there, and the model takes "
            f"{format_bytes(needed)}; expected a folder on a larger disk"
        )


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder that becomes ``out`` when all in it is written, and else is removed."""
    partial = out.with_name(f".{out.name}.{uuid.uuid4().hex}.partial")
    partial.mkdir(parents=True)
    try:
        yield partial
        apply_umask(partial)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


# From here on with torch


def _write(base: ModelSource, folder: Path, out: Path) -> None:
    """Config, code and processor, as ``save_pretrained`` writes them, the base's license, and the
    merged weights, file by file."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file
    from tqdm import tqdm
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
        index = standard_index(read_json_object(folder / WEIGHTS_INDEX))
        write_atomically(out / WEIGHTS_INDEX, json.dumps(index, indent=2) + "\n")
    layers = adapted_layers(base, model)
    missing = {*layers}
    for name in tqdm(shards_of(folder), unit="file", desc="merging", disable=None):
        with safe_open(folder / name, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no dict)
        for key in layers.keys() & tensors.keys():
            tensors[key] = merged_weight(layers[key], tensors[key], key)
            missing.discard(key)
        save_file(tensors, out / name, metadata={"format": "pt"})
    if missing:
        raise ValueError(
            f"{base.model} lacks {len(missing)} of {len(layers)} weights that the adapters are on: "
            f"{listed(sorted(missing))}"
        )


def adapted_layers(base: ModelSource, model: Any) -> dict[str, Any]:
    """peft's layers, by the names of the weights that they adapt; these are not there yet."""
    import torch
    from peft.tuners.lora import LoraLayer

    from ..engine.trainable import load_trainable_adapters

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            # peft puts adapters where the weight is: on the CPU, in fp32, but without its memory.
            nothing = torch.zeros(()).expand(module.weight.shape)
            module.weight = torch.nn.Parameter(nothing, requires_grad=False)
    assert base.adapters is not None
    adapted = load_trainable_adapters(model, base.adapters).requires_grad_(False).eval()
    layers = {
        f"{name.removeprefix(PREFIX)}.weight": module
        for name, module in adapted.named_modules()
        if isinstance(module, LoraLayer)
    }
    linear = torch.nn.Linear
    others = [
        name for name, each in layers.items() if not isinstance(each.get_base_layer(), linear)
    ]
    if others:
        raise ValueError(
            f"{base.adapters} adapts {len(others)} weights that are not of linear layers "
            f"({listed(others)}) and cannot be merged"
        )
    return layers


def merged_weight(layer: Any, weight: "Tensor", name: str) -> "Tensor":
    """The weight with what the adapters add to it, computed in fp32 and rounded once."""
    import torch
    from torch.nn.functional import linear

    inner = layer.get_base_layer()
    assert inner.weight.shape == weight.shape, (name, inner.weight.shape, weight.shape)
    nothing, bias = inner.weight, inner.bias
    inner.weight = torch.nn.Parameter(weight.to(torch.float32, copy=True), requires_grad=False)
    inner.bias = None  # adapters do not change it
    x = torch.randn(8, weight.shape[1], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = layer(x)
        layer.merge()
        merged = inner.weight.data.to(weight.dtype)
        found = linear(x, merged.float())
    inner.weight, inner.bias = nothing, bias
    if not torch.isfinite(merged).all():
        raise ValueError(f"{name} is NaN or infinite with the adapters: are they whole?")
    error = ((found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()).item()
    allowed = TOLERANCES[str(weight.dtype).removeprefix("torch.")]
    if not error <= allowed:
        raise RuntimeError(
            f"{name}: the output of the merged weight differs by {error:.2g} of its root mean "
            f"square from that of the adapters; expected at most {allowed:.2g}"
        )
    return merged
