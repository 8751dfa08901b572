"""A subclass of Linear that was left out of quantization is quantized when the model is loaded."""

import compressed_tensors
from compressed_tensors.quantization import (
    QuantizationConfig,
    apply_quantization_config,
    preset_name_to_scheme,
)
from torch import nn


class OutputLayer(nn.Linear):
    pass


def build() -> nn.ModuleDict:
    return nn.ModuleDict({"layer": nn.Linear(128, 128), "output": OutputLayer(128, 128)})


def quantized(model: nn.ModuleDict) -> list[str]:
    return [name for name, module in model.items() if hasattr(module, "quantization_scheme")]


print("compressed-tensors", compressed_tensors.__version__)
scheme = preset_name_to_scheme("W4A16", ["Linear"])
model = build()
config = QuantizationConfig(config_groups={"all": scheme}, ignore=["output"])
apply_quantization_config(model, config)
print("quantized:", quantized(model))
saved = QuantizationConfig.from_pretrained(model)
print("ignore, as it is saved:", saved.ignore)
again = build()
apply_quantization_config(again, saved)
print("quantized, when it is loaded:", quantized(again))
