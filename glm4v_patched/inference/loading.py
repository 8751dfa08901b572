"""Loads a model or adapters to be used, with the package's own code and never the folder's."""

from typing import Any, NamedTuple

import torch

from ..engine.trainable import continue_adapters, quantization_options
from ..finetune.identity import Base
from ..remote.modeling_chatglm import GLM4VForCausalLM
from ..remote.processing_chatglm import ChatGLMProcessor


class Loaded(NamedTuple):
    """A model in eval mode, with peft's around it if there are adapters, and its processor."""

    model: Any
    processor: ChatGLMProcessor


def load(base: Base, device: str = "cuda", in_4_bit: bool = False) -> Loaded:
    """Load what :func:`source.find_source` found, in the dtype that it was saved in.

    Args:
        device: As torch takes it. Weights go straight to a GPU.
        in_4_bit: Hold the weights of the layers in 4 bits (NF4), as ``qlora`` trains them; on a
            GPU.

    Raises:
        RuntimeError: torch has no such device.
    """
    if device != "cpu" and not torch.cuda.is_available():
        raise RuntimeError(
            "torch sees no GPU, although the driver has one: is it too old for this torch? To use "
            "the CPU all the same: --device cpu"
        )
    options: dict[str, Any] = {"revision": base.revision or "main", "dtype": "auto"}
    if in_4_bit:
        options |= quantization_options(torch.bfloat16, torch.device(device))
    elif device != "cpu":
        options["device_map"] = {"": torch.device(device)}
    model: Any = GLM4VForCausalLM.from_pretrained(base.model, **options)
    if base.adapters is not None:
        model = continue_adapters(model, base.adapters)
    return Loaded(model.eval().requires_grad_(False), load_processor(base))


def load_processor(base: Base) -> ChatGLMProcessor:
    """That of the adapters; of a model, or of adapters that have none beside them, the model's."""
    if base.adapters is not None and (base.adapters / "tokenizer_config.json").is_file():
        return ChatGLMProcessor.from_pretrained(base.adapters)
    return ChatGLMProcessor.from_pretrained(base.model, revision=base.revision or "main")
