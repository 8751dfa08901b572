"""Which weights are trained: everything, the language model, or LoRA adapters."""

import torch
from torch import nn

from ..remote.modeling_chatglm import GLM4VForCausalLM
from .choices import check_trained

# LoRA goes to the fused projection of queries, keys and values, as published adapters have it.
LORA_TARGETS = {
    "lora_lm": r".*encoder\..*query_key_value",
    "lora_all": r".*query_key_value",
    "qlora": r".*encoder\..*query_key_value",
}


def select_weights(model: GLM4VForCausalLM, trained: str, lora_rank: int = 8) -> nn.Module:
    """Freeze what is not trained; for LoRA, wrap the model with peft.

    Args:
        trained: One of :data:`choices.TRAINED`; ``qlora`` takes a model that was loaded in 4 bits,
            or went through :func:`quantise`.

    Returns:
        The model, or peft's around it. Adapters have the dtype of the weights: ZeRO keeps their
        fp32 masters, and DeepSpeed before 0.19.3 cannot gather two dtypes at once.
    """
    check_trained(trained)
    if trained == "full":
        return model
    if trained == "lm":
        model.transformer.vision.requires_grad_(False)
        return model
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise RuntimeError(f"{trained} needs peft: pip install peft") from error
    config = LoraConfig(
        r=lora_rank, target_modules=LORA_TARGETS[trained], task_type="CAUSAL_LM", lora_dropout=0.0
    )
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def quantise(model: GLM4VForCausalLM, device: torch.device | str) -> None:
    """Hold the linear layers of both towers in 4 bits (NF4, doubly quantised), in place.

    Layers are moved to ``device`` one at a time, so that it never holds the model in full. What
    ``from_pretrained`` does with ``BitsAndBytesConfig(load_in_4bit=True)``, for a model that was
    not loaded.
    """
    try:
        import bitsandbytes
    except ImportError as error:
        raise RuntimeError("qlora needs bitsandbytes: pip install bitsandbytes") from error
    towers = model.transformer.encoder, model.transformer.vision.transformer
    for tower in towers:
        for parent in list(tower.modules()):
            for name, linear in list(parent.named_children()):
                if type(linear) is not nn.Linear:
                    continue
                quantised = bitsandbytes.nn.Linear4bit(
                    linear.in_features,
                    linear.out_features,
                    bias=linear.bias is not None,
                    compute_dtype=linear.weight.dtype,
                    quant_type="nf4",
                    device="meta",
                )
                quantised.weight = bitsandbytes.nn.Params4bit(
                    linear.weight.data, requires_grad=False, quant_type="nf4", module=quantised
                )
                quantised.bias = linear.bias
                setattr(parent, name, quantised.to(device))
    model.requires_grad_(False).to(device)
