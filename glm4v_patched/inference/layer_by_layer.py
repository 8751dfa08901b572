"""llm-compressor's GPTQ, a layer of the model after another. Only :mod:`export` imports this.

llm-compressor's own sequential pipeline traces the whole model by torch.fx, which cannot follow
rows whose lengths depend on their images; its basic one holds the statistics of all layers at
once (100 GB at the real size). Here each layer is called by itself, on what went into it.
"""

import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from llmcompressor import oneshot
from llmcompressor.core import LifecycleCallbacks, reset_session
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.utils.hooks import HooksMixin
from llmcompressor.pipelines.registry import CalibrationPipeline
from llmcompressor.utils.helpers import DisableQuantization
from loguru import logger
from torch import nn
from tqdm import tqdm

from .. import applied
from ..data.collate import ConversationCollator
from ..models.base import ModelSource
from ..models.loading import load_with_processor
from .nonfinite import require_finite_logits

NAME = "glm4v_layer_by_layer"
SHARD = "5GB"


class _Reached(Exception):
    """The layer whose inputs are wanted."""


@CalibrationPipeline.register(NAME)
class LayerByLayer(CalibrationPipeline):
    """Calibrates and quantizes each layer on what the quantized layers before it give."""

    @staticmethod
    def __call__(model: Any, dataloader: Any, dataset_args: Any) -> None:
        transformer = model.transformer
        stacks = [
            layers
            for layers in (transformer.vision.transformer.layers, transformer.encoder.layers)
            if any(hasattr(module, "quantization_scheme") for module in layers.modules())
        ]
        LifecycleCallbacks.calibration_start()
        progress = tqdm(total=sum(map(len, stacks)), unit="layer", desc="quantizing", disable=None)
        with torch.no_grad(), DisableQuantization(model), progress:
            for layers in stacks:
                inputs = _inputs_of(layers[0], model, dataloader)
                for layer in layers:
                    for given in inputs:
                        layer(*given)
                    LifecycleCallbacks.sequential_epoch_end(list(layer.modules()))
                    with HooksMixin.disable_hooks():
                        for at, given in enumerate(inputs):  # one by one: no second copy of all
                            inputs[at] = (layer(*given), *given[1:])
                    progress.update()
        LifecycleCallbacks.calibration_end()


def _inputs_of(layer: nn.Module, model: Any, batches: Iterable[dict]) -> list[tuple]:
    """What a layer is called with, for each batch in which it is; nothing after it is computed."""
    inputs: list[tuple] = []

    def keep(_: nn.Module, given: tuple) -> None:
        inputs.append(given)
        raise _Reached

    with layer.register_forward_pre_hook(keep), HooksMixin.disable_hooks():
        for batch in batches:
            with suppress(_Reached):
                model(**batch, use_cache=False)
    return inputs


def quantize(
    base: ModelSource,
    out: Path,
    scheme: str,
    ignore: list[str],
    conversations: Sequence[list[dict]],
    device: str,
) -> None:
    """Quantize the linear layers of a model by GPTQ, and save it.

    Args:
        scheme: A preset of compressed-tensors.
        ignore: Patterns of the names of layers that stay as they are.
    """
    model: Any
    model, processor = load_with_processor(base, device)
    collate: Any = ConversationCollator(processor)

    def encode(row: list[list[dict]]) -> dict:
        batch = collate(row)  # one row: nothing is padded, and no loss is wanted
        wanted = ("input_ids", "pixel_values")
        return {name: batch[name].to(model.device) for name in wanted if name in batch}

    require_finite_logits(model, encode([conversations[0]]))
    rows: Any = conversations
    logger.remove()
    logger.add(sys.stderr, format="{message}", filter=_is_doubt)
    with ExitStack() as ending:
        ending.callback(reset_session)  # it keeps the model
        with applied():  # it asks AutoConfig about the model's folder, whose own code is not run
            oneshot(
                model=model,
                processor=processor,
                dataset=torch.utils.data.DataLoader(rows, batch_size=1, collate_fn=encode),
                recipe=GPTQModifier(targets="Linear", scheme=scheme, ignore=ignore),
                pipeline=NAME,
            )
        model.save_pretrained(out, max_shard_size=SHARD)
        processor.save_pretrained(out)


def _is_doubt(record: Any) -> bool:
    """Of all that llm-compressor logs: such as layers that GPTQ could not quantize."""
    return record["level"].name == "WARNING" and record["name"].startswith(
        "llmcompressor.modifiers"
    )
