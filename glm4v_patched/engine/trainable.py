"""Which weights are trained: everything, parts of the model, or LoRA adapters."""

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

# LLM.int8 multiplies columns of activations in which a number is larger in 16 bits.
INT8_THRESHOLD = 6.0


def select_weights(
    model: GLM4VForCausalLM, trained: str, lora: LoraOptions = DEFAULT_LORA
) -> nn.Module:
    """Freeze what is not trained; for LoRA, return peft's model around this one. ``qlora`` takes a
    model that was loaded in 4 bits, or went through :func:`quantize`."""
    check_trained(trained)
    if not is_lora(trained):
        parts = trained_parts(trained)
        for name, parameter in model.named_parameters():
            if part_of_parameter(name) not in parts:
                parameter.requires_grad_(False)
        return model
    from peft import LoraConfig, get_peft_model

    towers = r"(encoder|vision\.transformer)" if trained == "lora_all" else "encoder"
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=2 * lora.rank if lora.alpha is None else lora.alpha,
        lora_dropout=lora.dropout or 0.0,
        use_rslora=bool(lora.use_rslora),
        use_dora=bool(lora.use_dora),
        target_modules=rf".*{towers}\..*\.({'|'.join(lora.target_names)})",
        task_type="CAUSAL_LM",
    )
    # In the dtype of the weights: ZeRO keeps fp32 masters, and DeepSpeed before 0.19.3 cannot
    # gather two dtypes at once.
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def load_trainable_adapters(model: nn.Module, folder: Path, name: str = "default") -> nn.Module:
    """Put peft's adapters from a folder on the model they are of, to be trained on.

    Args:
        model: glm-4v, or peft's around it, which then has these adapters beside its own.
        name: peft's, of the adapters; without a dot.
    """
    from peft import PeftConfig, PeftModel, __version__, get_peft_model_state_dict

    try:
        PeftConfig.from_pretrained(str(folder))
    except Exception as error:  # of any kind, for settings that another release wrote
        raise ValueError(
            f"{folder / 'adapter_config.json'} cannot be read by peft {__version__}: {error}; "
            "expected the settings that it writes"
        ) from error
    with warnings.catch_warnings():
        # peft's own use of transformers; no user can change it.
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated")
        options: dict[str, Any] = {"autocast_adapter_dtype": False, "low_cpu_mem_usage": False}
        if isinstance(model, PeftModel):
            model.load_adapter(folder, name, is_trainable=True, **options)
            continued = model
        else:
            continued = PeftModel.from_pretrained(model, folder, name, is_trainable=True, **options)
    # A class and its module, as a file of others names them, which peft would save again.
    continued.peft_config[name].auto_mapping = None
    # peft would only warn of adapters that it does not find, and leave them as new ones begin.
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        there = {*file.keys()}
    had = get_peft_model_state_dict(continued, adapter_name=name, save_embedding_layers=False)
    if wrong := sorted(there ^ {*had}):
        raise ValueError(
            f"{folder} holds {len(there)} tensors, of which {len(wrong)} do not fit its "
            f"adapter_config.json on this model, or lack there: {', '.join(wrong[:3])}"
        )
    return continued


def upcast_trained(model: nn.Module) -> None:
    """Convert what is trained to fp32, for training in bf16 under autocast: without ZeRO's fp32
    masters, most updates would be lost to bf16's rounding."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def quantization_options(dtype: torch.dtype, device: torch.device | str, bits: int = 4) -> dict:
    """Options with which ``from_pretrained`` holds on ``device`` what :func:`quantize` does: in 4
    bits, or in 8 (LLM.int8), which is for inference."""
    config = BitsAndBytesConfig(
        load_in_4bit=bits == 4,
        load_in_8bit=bits == 8,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_threshold=INT8_THRESHOLD,
        llm_int8_skip_modules=["transformer.output_layer", "transformer.vision.linear_proj"],
    )
    return {"quantization_config": config, "device_map": {"": device}}


def build_random_model(config: ChatGLMConfig, **given: Any) -> GLM4VForCausalLM:
    """A model with random weights, on torch's default device, given what ``from_pretrained`` takes:
    ``dtype`` and the like, and :func:`quantization_options`."""
    quantization = given.pop("quantization_config", None)
    placed = given.pop("device_map", None)
    model = GLM4VForCausalLM._from_config(config, **given)
    if quantization is not None:
        quantize(model, placed[""], 4 if quantization.load_in_4bit else 8)
    return model


def quantize(model: GLM4VForCausalLM, device: torch.device | str, bits: int = 4) -> None:
    """Replace the linear layers of both towers' layers by bitsandbytes's: 4 bits (NF4, doubly
    quantized) or 8 (LLM.int8). For a model that was not loaded.

    Layers are moved to ``device`` one at a time, so that it never holds the model in full; on it
    already, each makes room for its own successor.
    """
    for layers in (model.transformer.encoder, model.transformer.vision.transformer):
        # By name: a list of modules would keep all weights until its end.
        names = [name for name, each in layers.named_modules() if type(each) is nn.Linear]
        for name in names:
            layers.set_submodule(name, _quantized(layers.get_submodule(name), bits).to(device))
    model.requires_grad_(False)
    model.to(device)  # type: ignore[arg-type]  # transformers wraps it, and its types are lost


def _quantized(linear: Any, bits: int) -> nn.Module:
    """Quantized once it is moved, to any device."""
    from bitsandbytes.nn import Int8Params, Linear4bit, Linear8bitLt, Params4bit

    sides: Any = (linear.in_features, linear.out_features, linear.bias is not None)
    weight = linear.weight.data
    made: Any
    if bits == 4:
        made = Linear4bit(*sides, compute_dtype=weight.dtype, quant_type="nf4", device="meta")
        made.weight = Params4bit(weight, requires_grad=False, quant_type="nf4", module=made)
    else:
        made = Linear8bitLt(*sides, has_fp16_weights=False, threshold=INT8_THRESHOLD, device="meta")
        # Only what comes from the CPU is quantized when it is moved.
        made.weight = Int8Params(weight.cpu(), requires_grad=False)
    made.bias = linear.bias
    return made
