"""Quantize a model for other programs, with llm-compressor, which calibrates on rows of data.

Packages, rows, disk and memory are checked before any weight is read.
"""

import gc
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement

from ..data.messages import images_of
from ..data.rows import DataSource
from ..data.source import folders_of_source
from ..engine.gpus import free_bytes_per_gpu
from ..engine.ram import free_ram
from ..models.base import ModelSource
from ..models.check_weights import quantized_by
from ..models.find import find_source
from ..models.placement import Device, place_processes
from ..paths import refuse_overlap
from ..terminal_text import format_bytes, pip_install, pluralize, write_line
from .evaluate import describe_scores, evaluate
from .merge import (
    copy_license_and_generation,
    create_folder_atomically,
    fetch_weights,
    merge,
    require_free_disk,
    require_mergeable,
    require_new_folder,
    weight_bytes,
)
from .questions import AnswerOptions, evenly_spaced, read_questions

# Only one minor version, because layer_by_layer uses private names of llm-compressor.
LLM_COMPRESSOR = Requirement("llmcompressor>=0.14,<0.15")
UNQUANTIZED_LAYERS = ["re:.*output_layer", r"re:.*vision\.linear_proj\..*"]


class ExportFormat(NamedTuple):
    """A quantization format.

    Args:
        scheme: Name of a preset scheme of compressed-tensors.
        bits: Bits per weight.
        quantizes_tower: Whether to quantize the vision tower as well as the language model.
    """

    scheme: str
    bits: int
    quantizes_tower: bool

    @property
    def ignore(self) -> list[str]:
        """Name patterns of layers that are not quantized."""
        if self.quantizes_tower:
            return UNQUANTIZED_LAYERS
        return [*UNQUANTIZED_LAYERS, r"re:.*vision\..*"]


EXPORT_FORMATS = {
    "fp8": ExportFormat("FP8_DYNAMIC", 8, True),
    "int8": ExportFormat("W8A8", 8, True),
    "int4": ExportFormat("W4A16", 4, False),
}


class ExportReport(NamedTuple):
    """The result of an export.

    Args:
        bytes_before, bytes_after: Size of the weights before and after.
        seconds: Time of the quantization.
        before, after: Reports of :func:`evaluate.evaluate` about both models; None if they were not
            evaluated.
    """

    format: str
    bytes_before: int
    bytes_after: int
    seconds: float
    before: dict[str, Any] | None
    after: dict[str, Any] | None

    def __str__(self) -> str:
        size_before, size_after = format_bytes(self.bytes_before), format_bytes(self.bytes_after)
        sizes = f"before {size_before}, {self.format} {size_after}"
        lines = [f"{sizes}, quantized in {self.seconds:.0f} s"]
        for name, scores in (("before", self.before), (self.format, self.after)):
            if scores is not None:
                lines += [name, describe_scores(scores)]
        return "\n".join(lines)


def export(
    model: str,
    format: str,
    calibration: DataSource,
    out: Path,
    *,
    rows: int = 256,
    evaluation: AnswerOptions | None = None,
    revision: str | None = None,
    device: Device = "cuda",
) -> ExportReport:
    """Quantize a model, or LoRA adapters merged into their model, and write it to a new folder.

    Args:
        model: Folder of a model or of adapters, or an id on the Hub.
        format: One of :data:`EXPORT_FORMATS`.
        calibration: Rows that end with an answer.
        rows: Maximum number of rows of ``calibration`` to use, evenly spaced.
        evaluation: Options for evaluating the model before and after; their ``model`` is ignored.
        device: "cuda" or "cpu".

    Raises:
        ValueError: Model, rows or ``out`` cannot be used, or disk or memory are too small.
        RuntimeError: A package is missing or has an unsupported version.
    """
    from ..data.check import check_sources, require_images
    from ..models.loading import load_model_config, load_processor

    require_new_folder(out)
    require_llm_compressor()
    place_processes(1, device)
    base = find_exportable(model, out, revision)
    refuse_overlap(out, folders_of_source(calibration, "--calibration"), "--out")
    if evaluation is not None:
        refuse_overlap(out, folders_of_source(evaluation.data, "--evaluate"), "--out")
        evaluation.placement()
        read_questions(evaluation.data, with_reference=True)
        require_images(evaluation.data)
    processor = load_processor(base)
    checked_rows = check_sources([calibration], processor, load_model_config(base).seq_length)
    conversations = evenly_spaced(checked_rows.conversations(), rows)
    if not any(map(images_of, conversations)):
        raise ValueError(
            f"none of the {len(conversations):,} rows of --calibration has an image; give rows "
            "like the questions that the model will get"
        )
    weights_folder = fetch_weights(base)
    unquantized_bytes = weight_bytes(weights_folder)
    export_format = EXPORT_FORMATS[format]
    disk_bytes, memory_bytes = estimate_disk_and_memory(
        base, unquantized_bytes, export_format, processor, conversations
    )
    write_line(
        f"calibrating with {pluralize(len(conversations), 'row')} on {device}, in the saved dtype; "
        f"weights {format_bytes(unquantized_bytes)}, quantized about {format_bytes(disk_bytes)}; "
        f"needs about {format_bytes(memory_bytes)} of memory"
    )
    merged_bytes = unquantized_bytes if base.adapters is not None else 0
    require_free_disk(disk_bytes + merged_bytes, out)
    free_bytes = free_ram() if device == "cpu" else free_bytes_per_gpu(1)[0]
    if free_bytes < memory_bytes:
        raise ValueError(
            f"--device {device} has {format_bytes(free_bytes)} of free memory, and the export "
            f"needs about {format_bytes(memory_bytes)}; calibrate with fewer rows (--rows; now "
            f"{len(conversations):,}), or use a larger machine, or --device cpu, which is slow"
        )
    with create_folder_atomically(out) as temporary_folder:
        if base.adapters is not None:
            merge(model, temporary_folder / "merged", revision)
            base = ModelSource(str(temporary_folder / "merged"))
        before = after = None
        if evaluation is not None:
            evaluation = replace(evaluation, model=base.model, revision=base.revision)
            before = evaluate(evaluation)
        from .layer_by_layer import quantize_with_gptq

        start = time.monotonic()
        scheme, ignore = export_format.scheme, export_format.ignore
        quantize_with_gptq(base, temporary_folder, scheme, ignore, conversations, device)
        gc.collect()  # frees the model before the quantized one is loaded
        seconds = time.monotonic() - start
        copy_license_and_generation(weights_folder, temporary_folder)
        shutil.rmtree(temporary_folder / "merged", ignore_errors=True)
    if evaluation is not None:
        after = evaluate(replace(evaluation, model=str(out), revision=None))
    return ExportReport(format, unquantized_bytes, weight_bytes(out), seconds, before, after)


def find_exportable(model: str, out: Path, revision: str | None) -> ModelSource:
    """Return the source of a model, or of adapters, that can be exported.

    Raises:
        ValueError: The model is quantized already, or the adapters cannot be merged.
    """
    base = find_source(model, revision)
    if method := quantized_by(base.model, base.revision):
        raise ValueError(
            f"{model} is quantized already, by {method}; export the model that it was made from"
        )
    require_mergeable(base, out)
    return base


def require_llm_compressor() -> None:
    """Raise ``RuntimeError`` unless supported llm-compressor and transformers are installed.

    llm-compressor's own requirements say which versions of transformers it supports.
    """
    command = pip_install("glm4v-patched[export]")
    try:
        compressor_version = version(LLM_COMPRESSOR.name)
        requirements = [Requirement(text) for text in requires(LLM_COMPRESSOR.name) or ()]
    except PackageNotFoundError:
        raise RuntimeError(
            f"export needs {LLM_COMPRESSOR.name}, which is not installed: {command}"
        ) from None
    for required in (LLM_COMPRESSOR, *(r for r in requirements if r.name == "transformers")):
        installed = version(required.name)
        if not required.specifier.contains(installed, prereleases=True):
            dependent = (
                "export"
                if required is LLM_COMPRESSOR
                else f"{LLM_COMPRESSOR.name} {compressor_version}"
            )
            raise RuntimeError(
                f"{dependent} needs {required.name} {required.specifier}, but {installed} is "
                f"installed: {command} (in a separate environment if other packages need "
                f"{installed})"
            )


def estimate_disk_and_memory(
    base: ModelSource,
    unquantized_bytes: int,
    export_format: ExportFormat,
    processor: Any,
    conversations: Sequence[list[dict]],
) -> tuple[float, float]:
    """Return the size of the quantized model on disk and the export's peak memory, both in bytes.

    Args:
        unquantized_bytes: Size of the unquantized weights.
        conversations: Messages to calibrate with; their lengths determine the activations.
    """
    import torch

    from ..data.collate import ConversationCollator
    from ..models.loading import load_model_config
    from ..remote.modeling_chatglm import GLM4VForCausalLM

    config = load_model_config(base)
    with torch.device("meta"):
        transformer = GLM4VForCausalLM(config).transformer
    stacks = [transformer.encoder.layers]  # the lists of layers to quantize
    if export_format.quantizes_tower:
        stacks.append(transformer.vision.transformer.layers)
    num_quantized, gptq_bytes = 0, 0
    for layers in stacks:
        # All layers of a stack are alike.
        linears = [module for module in layers[0].modules() if isinstance(module, torch.nn.Linear)]
        num_quantized += len(layers) * sum(linear.weight.numel() for linear in linears)
        # GPTQ keeps the fp32 Hessians of one layer; inverting the largest takes three copies of it.
        hessian_bytes = [4 * linear.in_features**2 for linear in linears]
        gptq_bytes = max(gptq_bytes, sum(hessian_bytes) + 3 * max(hessian_bytes))
    bytes_per_weight = unquantized_bytes / sum(p.numel() for p in transformer.parameters())
    # At most one 2-byte scale for each group of 128 weights.
    quantized_bytes_per_weight = export_format.bits / 8 + 2 / 128
    saved_bytes = num_quantized * (bytes_per_weight - quantized_bytes_per_weight)
    # Elements of one layer's inputs for all rows, in the language model and in the tower.
    sizes = ConversationCollator(processor).measure(list(conversations))
    input_elements = [sum(size.tokens for size in sizes) * config.hidden_size]
    if export_format.quantizes_tower:
        vision = config.vision
        num_images = sum(size.num_images for size in sizes)
        input_elements.append(num_images * vision.num_positions * vision.hidden_size)
    memory_bytes = unquantized_bytes + gptq_bytes + max(input_elements) * bytes_per_weight
    return unquantized_bytes - saved_bytes, memory_bytes
