"""A calibration pipeline for llm-compressor's GPTQ that runs one layer at a time.

llm-compressor's sequential pipeline traces the complete model with torch.fx, which fails on
sequences whose lengths depend on their images. Its basic pipeline keeps the statistics of all
layers at once (100 GB for glm-4v-9b). This pipeline calls each layer alone, on its recorded inputs.
Only :mod:`export` imports this module.
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

from .. import applied
from ..data.collate import ConversationCollator
from ..models.base import ModelSource
from ..models.loading import load_with_processor
from ..terminal_text import show_progress
from .nonfinite import require_finite_logits

PIPELINE_NAME = "glm4v_layer_by_layer"
MAX_SHARD_SIZE = "5GB"


class _LayerReached(Exception):
    """Raised to end a forward pass at the layer whose inputs are captured."""


@CalibrationPipeline.register(PIPELINE_NAME)
class LayerByLayer(CalibrationPipeline):
    """A pipeline that calibrates each layer on the outputs of the quantized layers before it."""

    @staticmethod
    def __call__(model: Any, dataloader: Any, dataset_args: Any) -> None:
        transformer = model.transformer
        stacks = [  # of layers: those of the vision tower, and those of the language model
            layers
            for layers in (transformer.vision.transformer.layers, transformer.encoder.layers)
            if any(hasattr(module, "quantization_scheme") for module in layers.modules())
        ]
        LifecycleCallbacks.calibration_start()
        num_layers = sum(map(len, stacks))
        progress_bar = show_progress("quantizing", total=num_layers, unit="layer")
        with torch.no_grad(), DisableQuantization(model), progress_bar as progress:
            for layers in stacks:
                inputs = _capture_inputs(layers[0], model, dataloader)
                for layer in layers:
                    for arguments in inputs:
                        layer(*arguments)  # hooks of GPTQ collect statistics
                    # GPTQ quantizes the layer.
                    LifecycleCallbacks.sequential_epoch_end(list(layer.modules()))
                    with HooksMixin.disable_hooks():
                        # The outputs replace the inputs one by one, to save memory.
                        for index, arguments in enumerate(inputs):
                            inputs[index] = (layer(*arguments), *arguments[1:])
                    progress.update()
        LifecycleCallbacks.calibration_end()


def _capture_inputs(layer: nn.Module, model: Any, batches: Iterable[dict]) -> list[tuple]:
    """Return the layer's positional arguments for each batch.

    Each forward pass stops at the layer. A batch that does not reach the layer is left out: one
    without images does not reach the vision tower.
    """
    inputs: list[tuple] = []

    def capture(_: nn.Module, arguments: tuple) -> None:
        inputs.append(arguments)
        raise _LayerReached

    with layer.register_forward_pre_hook(capture), HooksMixin.disable_hooks():
        for batch in batches:
            with suppress(_LayerReached):
                model(**batch, use_cache=False)
    return inputs


def quantize_with_gptq(
    base: ModelSource,
    out: Path,
    scheme: str,
    ignore: list[str],
    conversations: Sequence[list[dict]],
    device: str,
) -> None:
    """Quantize the linear layers of a model with GPTQ and save the model and its processor.

    Args:
        scheme: A preset scheme of compressed-tensors.
        ignore: Name patterns of layers that are not quantized.
        conversations: Conversations to calibrate with, each a list of messages.
    """
    model: Any
    model, processor = load_with_processor(base, device)
    collate: Any = ConversationCollator(processor)

    def encode(conversation: list[list[dict]]) -> dict:
        batch = collate(conversation)  # batch size 1, so there is no padding to mask
        names = ("input_ids", "pixel_values")
        return {name: batch[name].to(model.device) for name in names if name in batch}

    require_finite_logits(model, encode([conversations[0]]))
    dataset: Any = conversations
    logger.remove()
    logger.add(sys.stderr, format="{message}", filter=_is_gptq_warning)
    with ExitStack() as cleanup:
        cleanup.callback(reset_session)  # the session holds a reference to the model
        # oneshot calls AutoConfig with the model's folder; code in that folder must not run.
        with applied():
            oneshot(
                model=model,
                processor=processor,
                dataset=torch.utils.data.DataLoader(dataset, batch_size=1, collate_fn=encode),
                recipe=GPTQModifier(targets="Linear", scheme=scheme, ignore=ignore),
                pipeline=PIPELINE_NAME,
            )
        with show_progress("saving the quantized model"):
            model.save_pretrained(out, max_shard_size=MAX_SHARD_SIZE)
        processor.save_pretrained(out)


def _is_gptq_warning(record: Any) -> bool:
    """Return whether a log record is a warning of GPTQ, such as a layer it could not quantize."""
    return record["level"].name == "WARNING" and record["name"].startswith(
        "llmcompressor.modifiers"
    )
