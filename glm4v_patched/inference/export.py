"""Writes a quantized model, which other programs load: by llm-compressor, calibrated with rows.

What can be known is checked before a weight is read: packages, rows, disk, memory.
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
from ..paths import require_apart
from ..terminal_text import format_bytes, pip_install
from .evaluate import describe_scores, evaluate
from .merge import (
    bytes_of,
    merge,
    new_folder,
    require_mergeable,
    require_new,
    require_space,
    copy_license_and_generation,
    weights_of,
)
from .questions import AnswerOptions, read_questions, spread

# Whose names, also such as it does not publish, layer_by_layer uses.
COMPRESSOR = Requirement("llmcompressor>=0.14,<0.15")
OUTSIDE_LAYERS = ["re:.*output_layer", r"re:.*vision\.linear_proj\..*"]


class Format(NamedTuple):
    """A preset scheme of compressed-tensors, its bits a weight, and whether the tower has it."""

    scheme: str
    bits: int
    tower: bool

    @property
    def ignore(self) -> list[str]:
        return OUTSIDE_LAYERS if self.tower else [*OUTSIDE_LAYERS, r"re:.*vision\..*"]


EXPORT_FORMATS = {
    "fp8": Format("FP8_DYNAMIC", 8, True),
    "int8": Format("W8A8", 8, True),
    "int4": Format("W4A16", 4, False),
}


class Report(NamedTuple):
    """Of an export; scores are what :func:`evaluate.evaluate` returns, None without its rows."""

    format: str
    bytes_before: int
    bytes_after: int
    seconds: float
    before: dict[str, Any] | None
    after: dict[str, Any] | None

    def __str__(self) -> str:
        sizes = f"before {format_bytes(self.bytes_before)}, {self.format} {format_bytes(self.bytes_after)}"
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
    device: str = "cuda",
) -> Report:
    """Write a model, or adapters merged into theirs, in fewer bits to a new folder.

    Args:
        model: Folder of a model or of adapters, or an id of the Hub.
        format: One of :data:`FORMATS`.
        calibration: Rows that end with an answer, of which ``rows`` are taken, evenly spread.
        evaluation: What is asked before and after; its ``model`` does not matter.
        device: Where it is computed.

    Raises:
        ValueError: model, rows or ``out`` cannot be used, or disk or memory do not suffice.
        RuntimeError: a package is missing, or is another version than is needed.
    """
    from ..data.check import check_sources, require_images
    from ..models.loading import load_model_config, load_processor

    require_new(out)
    require_compressor()
    base = find_source(model, revision)
    if method := quantized_by(base.model, base.revision):
        raise ValueError(
            f"{model} was saved quantized already, by {method}; expected the weights that it was "
            "made of"
        )
    require_mergeable(base, out)
    require_apart(out, folders_of_source(calibration, "--calibration"), "--out")
    if evaluation is not None:
        require_apart(out, folders_of_source(evaluation.data, "--evaluate"), "--out")
        evaluation.place()
        read_questions(evaluation.data, with_reference=True)
        require_images(evaluation.data)
    processor = load_processor(base)
    checked = check_sources([calibration], processor, load_model_config(base).seq_length)
    conversations = spread(checked.conversations(), rows)
    if not any(map(images_of, conversations)):
        raise ValueError(
            f"none of {len(conversations):,} rows of --calibration has an image; expected rows "
            "like those that the model will be asked"
        )
    held = weights_of(base)
    weights = bytes_of(held)
    saved, memory = needs_of(base, weights, EXPORT_FORMATS[format], processor, conversations)
    print(
        f"{len(conversations):,} rows to calibrate with; weights {format_bytes(weights)}, written "
        f"about {format_bytes(saved)}, memory about {format_bytes(memory)}",
        flush=True,
    )
    require_space(saved + weights * (base.adapters is not None), out)
    free = free_ram() if device == "cpu" else free_bytes_per_gpu(1)[0]
    if free < memory:
        raise ValueError(
            f"{format_bytes(free)} of memory are free on the {device}, and this takes about "
            f"{format_bytes(memory)}; expected fewer rows to calibrate with than "
            f"{len(conversations):,} (--rows), a larger machine, or --device cpu, which is slow"
        )
    with new_folder(out) as partial:
        if base.adapters is not None:
            merge(model, partial / "merged", revision)
            base = ModelSource(str(partial / "merged"))
        before = after = None
        if evaluation is not None:
            evaluation = replace(evaluation, model=base.model, revision=base.revision)
            before = evaluate(evaluation)
        from .layer_by_layer import quantize

        start = time.monotonic()
        of = EXPORT_FORMATS[format]
        quantize(base, partial, of.scheme, of.ignore, conversations, device)
        gc.collect()  # of the model, before it is loaded again
        seconds = time.monotonic() - start
        copy_license_and_generation(held, partial)
        shutil.rmtree(partial / "merged", ignore_errors=True)
    if evaluation is not None:
        after = evaluate(replace(evaluation, model=str(out), revision=None))
    return Report(format, weights, bytes_of(out), seconds, before, after)


def require_compressor() -> None:
    """Raise ``RuntimeError`` unless llm-compressor is there, in a version that is known here and
    beside the transformers that it takes."""
    cure = pip_install("glm4v-patched[export]")
    try:
        found = version(COMPRESSOR.name)
        needed = [Requirement(text) for text in requires(COMPRESSOR.name) or ()]
    except PackageNotFoundError:
        raise RuntimeError(f"export needs {COMPRESSOR.name}, which is not here: {cure}") from None
    wanted = [COMPRESSOR, *(one for one in needed if one.name == "transformers")]
    for one in wanted:
        there = version(one.name)
        if not one.specifier.contains(there, prereleases=True):
            by = "export" if one is COMPRESSOR else f"{COMPRESSOR.name} {found}"
            raise RuntimeError(
                f"{by} needs {one.name} {one.specifier}, and {there} is installed: {cure} (in an "
                "environment of its own, if others need that version)"
            )


def needs_of(
    base: ModelSource,
    weights: int,
    format: Format,
    processor: Any,
    conversations: Sequence[list[dict]],
) -> tuple[float, float]:
    """Bytes that an export writes, and takes of memory at the most, by the shapes of the model and
    the lengths of the rows; ``weights`` has those of the model."""
    import torch

    from ..data.collate import ConversationCollator
    from ..models.loading import load_model_config
    from ..remote.modeling_chatglm import GLM4VForCausalLM

    config = load_model_config(base)
    with torch.device("meta"):
        transformer = GLM4VForCausalLM(config).transformer
    stacks = [transformer.encoder.layers, *[transformer.vision.transformer.layers] * format.tower]
    of_layer = [[m for m in s[0].modules() if isinstance(m, torch.nn.Linear)] for s in stacks]
    width = weights / sum(p.numel() for p in transformer.parameters())
    quantized = sum(
        len(stack) * linear.weight.numel()
        for stack, linears in zip(stacks, of_layer, strict=True)
        for linear in linears
    )
    # Scales: one of 2 bytes for a group of 128 weights, or fewer.
    saved = weights - quantized * (width - format.bits / 8 - 2 / 128)
    # In fp32, for each linear layer the products of its inputs; GPTQ inverts the largest ones.
    products = [[4 * linear.in_features**2 for linear in linears] for linears in of_layer]
    statistics = max(sum(some) + 3 * max(some) for some in products)
    sizes = ConversationCollator(processor).measure(list(conversations))
    vision = config.vision
    kept = [sum(size.positions for size in sizes) * config.hidden_size]
    if format.tower:
        kept.append(
            sum(size.num_images for size in sizes) * vision.num_positions * vision.hidden_size
        )
    return saved, weights + statistics + max(kept) * width
