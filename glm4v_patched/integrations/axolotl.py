"""Register glm-4v as a multimodal model of axolotl, which has no model type ``chatglm``.

``python -m glm4v_patched.run axolotl train ...`` registers it by itself; other scripts call
:func:`register`. axolotl then treats every model of type ``chatglm`` as a glm-4v.
"""

import torch
from axolotl import model_support, processing_strategies
from transformers import AutoModelForCausalLM

from .api_check import TESTED_AXOLOTL, require_members

ASSISTANT_ROLE, USER_ROLE = "<|assistant|>", "<|user|>"


class EndOfTextProcessor:
    """A processor that appends ``<|endoftext|>`` to conversations, so the model learns to stop.

    The chat template itself writes no token after the last turn.
    """

    def __init__(self, processor):
        self._processor = processor

    def __getattr__(self, name: str):
        if name == "_processor":  # unpickling looks attributes up before _processor is set
            raise AttributeError(name)
        return getattr(self._processor, name)

    def apply_chat_template(self, conversations, *, processor_kwargs, **options):
        # With left padding, all conversations end in the last column.
        kwargs = processor_kwargs | {"padding_side": "left"}
        batch = self._processor.apply_chat_template(
            conversations, processor_kwargs=kwargs, **options
        )
        for name, value in (("input_ids", self.tokenizer.eos_token_id), ("attention_mask", 1)):
            batch[name] = torch.nn.functional.pad(batch[name], (0, 1), value=value)
        return batch


class GLM4VProcessingStrategy(processing_strategies.ProcessingStrategy):
    """Supervises, in axolotl, only the assistant's answers and the tokens that end them."""

    def __init__(self, processor, *args, **kwargs):
        super().__init__(processor, *args, **kwargs)
        self.processor = EndOfTextProcessor(processor)

    def _build_role_boundaries(self) -> list:
        encode = self.processor.tokenizer.encode
        start, end = (
            encode(text, add_special_tokens=False) for text in (ASSISTANT_ROLE, USER_ROLE)
        )
        boundary = processing_strategies.RoleBoundary
        return [boundary(role="assistant", start_tokens=start, end_tokens=end)]

    def process_labels(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the labels of ``input_ids`` (``(batch, length)``, int64), -100 where ignored."""
        # The pad token is also the end token, which is supervised after an answer. Padding comes
        # before the first answer, on the left, so the mask by roles ignores it.
        return input_ids.masked_fill(~self._mask_non_assistant_keep(input_ids), -100)


def register() -> None:
    """Register glm-4v with axolotl; calling it again changes nothing."""
    names = ("_build_role_boundaries", "_mask_non_assistant_keep", "process_labels")
    require_members(processing_strategies.ProcessingStrategy, names, "axolotl", TESTED_AXOLOTL)
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
