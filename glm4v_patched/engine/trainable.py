"""Select the trained weights (all, parts of the model, or LoRA adapters); quantize frozen ones."""

import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import BitsAndBytesConfig

from ..remote.configuration_chatglm import ChatGLMConfig
from ..remote.modeling_chatglm import GLM4VForCausalLM
from .options import LoraOptions, check_trained, is_lora, part_of_parameter, trained_parts

DEFAULT_LORA = LoraOptions()

# LLM.int8 computes the columns of activations that have an element above this threshold in 16 bits.
INT8_OUTLIER_THRESHOLD = 6.0


def select_weights(
    model: GLM4VForCausalLM, trained: str, lora: LoraOptions = DEFAULT_LORA
) -> nn.Module:
    """Freeze all weights that are not trained; for LoRA, wrap the model by peft.

    Args:
        trained: One of :data:`options.TRAINED_CHOICES`, or names of :data:`options.MODEL_PARTS`
            joined by "+". "qlora" needs a model that was loaded in 4 bits, or quantized by
            :func:`quantize_linear_layers`.

    Returns:
        The model, or peft's model around it.
    """
    check_trained(trained)
    if not is_lora(trained):
        parts = trained_parts(trained)
        for name, parameter in model.named_parameters():
            if part_of_parameter(name) not in parts:
                parameter.requires_grad_(False)
        return model
    from peft import LoraConfig, get_peft_model

    layers_pattern = r"(encoder|vision\.transformer)" if trained == "lora_all" else "encoder"
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=2 * lora.rank if lora.alpha is None else lora.alpha,
        lora_dropout=lora.dropout or 0.0,
        use_rslora=bool(lora.use_rslora),
        use_dora=bool(lora.use_dora),
        target_modules=rf".*{layers_pattern}\..*\.({'|'.join(lora.target_names)})",
        task_type="CAUSAL_LM",
    )
    # Adapters have the dtype of the weights: ZeRO keeps fp32 copies anyway, and DeepSpeed before
    # 0.19.3 cannot gather two dtypes at once.
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def load_adapters(model: nn.Module, folder: Path, name: str = "default") -> nn.Module:
    """Load peft's adapters from a folder into their base model.

    The adapters' weights are trainable: the caller freezes them if they are not trained further.

    Args:
        model: glm-4v, or peft's model around it, which keeps its earlier adapters.
        name: peft's name for the adapters; it must not contain a dot.

    Raises:
        ValueError: peft cannot read the settings, or the tensors do not fit the model.
    """
    from peft import PeftConfig, PeftModel, __version__, get_peft_model_state_dict

    try:
        PeftConfig.from_pretrained(str(folder))
    except Exception as error:  # peft may raise any class for the settings of another release
        raise ValueError(
            f"{folder / 'adapter_config.json'} cannot be read by peft {__version__}: {error}; "
            "expected the settings that it writes"
        ) from error
    with warnings.catch_warnings():
        # Raised by peft's own use of transformers.
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated")
        options: dict[str, Any] = {"autocast_adapter_dtype": False, "low_cpu_mem_usage": False}
        if isinstance(model, PeftModel):
            model.load_adapter(folder, name, is_trainable=True, **options)
            adapted = model
        else:
            adapted = PeftModel.from_pretrained(model, folder, name, is_trainable=True, **options)
    # Settings from elsewhere may name a class and its module, which peft would save again.
    adapted.peft_config[name].auto_mapping = None
    # peft only warns of missing tensors, and leaves them at their initial values.
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        saved_names = {*file.keys()}
    expected_names = {
        *get_peft_model_state_dict(adapted, adapter_name=name, save_embedding_layers=False)
    }
    if mismatches := sorted(saved_names ^ expected_names):
        raise ValueError(
            f"{folder} has {len(saved_names)} tensors; {len(mismatches)} are missing or do not fit "
            f"its adapter_config.json on this model: {', '.join(mismatches[:3])}"
        )
    return adapted


def upcast_trained(model: nn.Module) -> None:
    """Convert trained weights to fp32, for training in bf16 under autocast without ZeRO.

    ZeRO keeps fp32 copies of its own. Without fp32, bf16's rounding would lose most updates.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def quantization_options(dtype: torch.dtype, device: torch.device | str, bits: int = 4) -> dict:
    """Return the keywords for ``from_pretrained`` that match :func:`quantize_linear_layers`.

    Args:
        dtype: Dtype of the computation.
        device: Device of the model.
        bits: 4 (NF4), or 8 (LLM.int8), which is for inference.
    """
    config = BitsAndBytesConfig(
        load_in_4bit=bits == 4,
        load_in_8bit=bits == 8,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_threshold=INT8_OUTLIER_THRESHOLD,
        llm_int8_skip_modules=["transformer.output_layer", "transformer.vision.linear_proj"],
    )
    return {"quantization_config": config, "device_map": {"": device}}


def build_random_model(config: ChatGLMConfig, **kwargs: Any) -> GLM4VForCausalLM:
    """Build a randomly initialized model on torch's default device.

    Args:
        kwargs: Keywords of ``from_pretrained``, such as ``dtype`` and those that
            :func:`quantization_options` returns.
    """
    quantization = kwargs.pop("quantization_config", None)
    device_map = kwargs.pop("device_map", None)
    model = GLM4VForCausalLM._from_config(config, **kwargs)
    if quantization is not None:
        quantize_linear_layers(model, device_map[""], 4 if quantization.load_in_4bit else 8)
    return model


def quantize_linear_layers(
    model: GLM4VForCausalLM, device: torch.device | str, bits: int = 4
) -> None:
    """Replace the linear layers of all transformer layers by bitsandbytes's, in a built model.

    Layers are moved to ``device`` one at a time, so the device never holds the complete model in
    16 bits.

    Args:
        bits: 4 (NF4, doubly quantized) or 8 (LLM.int8).
    """
    for layers in (model.transformer.encoder, model.transformer.vision.transformer):
        # A list of names: a list of modules would keep the old weights alive until the loop ends.
        names = [name for name, module in layers.named_modules() if type(module) is nn.Linear]
        for name in names:
            quantized = _make_quantized(layers.get_submodule(name), bits)
            layers.set_submodule(name, quantized.to(device))
    model.requires_grad_(False)
    model.to(device)  # type: ignore[arg-type]  # transformers wraps it, and its types are lost


def _make_quantized(linear: Any, bits: int) -> nn.Module:
    """Return bitsandbytes's version of a linear layer; moving it to a device quantizes it."""
    from bitsandbytes.nn import Int8Params, Linear4bit, Linear8bitLt, Params4bit

    shape_args: Any = (linear.in_features, linear.out_features, linear.bias is not None)
    weight = linear.weight.data
    quantized: Any
    if bits == 4:
        quantized = Linear4bit(
            *shape_args, compute_dtype=weight.dtype, quant_type="nf4", device="meta"
        )
        quantized.weight = Params4bit(
            weight, requires_grad=False, quant_type="nf4", module=quantized
        )
    else:
        quantized = Linear8bitLt(
            *shape_args, has_fp16_weights=False, threshold=INT8_OUTLIER_THRESHOLD, device="meta"
        )
        # bitsandbytes quantizes these weights only when they are moved from the CPU.
        quantized.weight = Int8Params(weight.cpu(), requires_grad=False)
    quantized.bias = linear.bias
    return quantized
