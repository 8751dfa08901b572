"""The parts of glm-4v, for LLaMA-Factory's ``freeze_*`` and ``lora_target: all``."""

from llamafactory.model.model_utils import visual

from .api_check import require_members

TESTED = "0.9.5"
VISION_TOWER = "transformer.vision"


def register() -> None:
    """Tell what the tower, its projector and the language model are. Again does nothing.

    Text models that share the model type "chatglm" have only the last of these.
    """
    names = ["_register_composite_model", "COMPOSITE_MODELS"]
    require_members(visual, names, "llamafactory", TESTED)
    visual._register_composite_model(
        model_type="chatglm",
        projector_keys=[f"{VISION_TOWER}.linear_proj", f"{VISION_TOWER}.conv"],
        vision_model_keys=[
            f"{VISION_TOWER}.{part}" for part in ("patch_embedding", "transformer", "boi", "eoi")
        ],
        language_model_keys=[
            f"transformer.{part}" for part in ("encoder", "embedding", "output_layer")
        ],
    )
