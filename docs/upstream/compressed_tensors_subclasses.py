"""Leave a subclass of Linear out of quantization, save the settings, and load a model with them.

Expected is that the same modules are quantized when the model is loaded.
"""

import sys

import compressed_tensors
import torch
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


print("compressed-tensors", compressed_tensors.__version__, "torch", torch.__version__)
scheme = preset_name_to_scheme("W4A16", ["Linear"])
model = build()
config = QuantizationConfig(config_groups={"all": scheme}, ignore=["output"])
apply_quantization_config(model, config)
saved = QuantizationConfig.from_pretrained(model)
again = build()
apply_quantization_config(again, saved)
print("quantized:", quantized(model))
print("the ignore list that is saved:", saved.ignore)
print("quantized when it is loaded:", quantized(again))
sys.exit(quantized(again) != quantized(model))
