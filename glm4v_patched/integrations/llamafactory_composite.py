"""Register glm-4v's submodules with LLaMA-Factory, for ``freeze_*`` and ``lora_target: all``."""

from llamafactory.model.model_utils import visual

from .api_check import TESTED_LLAMAFACTORY, require_members

VISION_TOWER = "transformer.vision"


def register() -> None:
    """Register vision tower, projector and language model; calling it again changes nothing.

    Text models that share the model type "chatglm" have only the language model.
    """
    names = ["_register_composite_model", "COMPOSITE_MODELS"]
    require_members(visual, names, "llamafactory", TESTED_LLAMAFACTORY)
    visual._register_composite_model(
        model_type="chatglm",
        projector_keys=[f"{VISION_TOWER}.linear_proj", f"{VISION_TOWER}.conv"],
        vision_model_keys=[
            f"{VISION_TOWER}.{module}"
            for module in ("patch_embedding", "transformer", "boi", "eoi")
        ],
        language_model_keys=[
            f"transformer.{module}" for module in ("encoder", "embedding", "output_layer")
        ],
    )
