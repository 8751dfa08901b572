"""glm-4v's images for axolotl, whose list of models that see has no ``chatglm``.

``python -m glm4v_patched.run axolotl train ...`` registers it by itself. A script of its own calls
:func:`register`. Everything of type ``chatglm`` is a glm-4v for axolotl from then on.
"""

import torch
from axolotl import model_support, processing_strategies
from transformers import AutoModelForCausalLM

from .api_check import require_members

TESTED = "0.19.0"
ASSISTANT_ROLE, USER_ROLE = "<|assistant|>", "<|user|>"


class EndOfTextProcessor:
    """A processor whose conversations end with ``<|endoftext|>``: the chat format has no end of the
    last turn, and from this one the model learns to stop."""

    def __init__(self, processor):
        self._processor = processor

    def __getattr__(self, name: str):
        if name == "_processor":  # of a copy that is being made, for another process
            raise AttributeError(name)
        return getattr(self._processor, name)

    def apply_chat_template(self, conversations, *, processor_kwargs, **options):
        # On the left, so that the ends stand in one column.
        kwargs = processor_kwargs | {"padding_side": "left"}
        batch = self._processor.apply_chat_template(
            conversations, processor_kwargs=kwargs, **options
        )
        for name, end in (("input_ids", self.tokenizer.eos_token_id), ("attention_mask", 1)):
            batch[name] = torch.nn.functional.pad(batch[name], (0, 1), value=end)
        return batch


class GLM4VProcessingStrategy(processing_strategies.ProcessingStrategy):
    """Learned are the answers of the assistant and their ends: nothing else of a row."""

    def __init__(self, processor, *args, **kwargs):
        super().__init__(processor, *args, **kwargs)
        self.processor = EndOfTextProcessor(processor)

    def _build_role_boundaries(self) -> list:
        encode = self.processor.tokenizer.encode
        start, end = (encode(text, add_special_tokens=False) for text in (ASSISTANT_ROLE, USER_ROLE))
        boundary = processing_strategies.RoleBoundary
        return [boundary(role="assistant", start_tokens=start, end_tokens=end)]

    def process_labels(self, input_ids: torch.Tensor) -> torch.Tensor:
        # The id that pads is that of the end, which is learned: so padding is told by its place, on
        # the left of the first answer.
        return input_ids.masked_fill(~self._mask_non_assistant_keep(input_ids), -100)


def register() -> None:
    """Tell axolotl of glm-4v. Again changes nothing."""
    names = ("_build_role_boundaries", "_mask_non_assistant_keep", "process_labels")
    require_members(processing_strategies.ProcessingStrategy, names, "axolotl", TESTED)
    if model_support.get_model_support("chatglm") is not None:
        return
    family = model_support.ModelFamilyTemplate(
        name="glm4v",
        is_multimodal=True,
        strategies=model_support.ModelStrategies(auto_model_cls=lambda: AutoModelForCausalLM),
    )
    profile = model_support.ModelProfile(
        family=family,
        strategies=model_support.ModelStrategyOverrides(
            processing_strategy_cls=lambda: GLM4VProcessingStrategy
        ),
    )
    members = {"model_types": ("chatglm",), "profile": profile}
    model_support.register_model_support(
        type("GLM4VSupport", (model_support.ModelSupport,), members)
    )
