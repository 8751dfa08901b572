"""vLLM's model class for glm-4v, with shared image positions and several images per prompt.

:mod:`.vllm_plugin` registers it; only vLLM imports this module.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .vllm_plugin import (
    TOWER_ADAPTERS_MESSAGE,
    check_vllm,
    collapse_image_tokens,
    never_generated_ids,
    require_rotation,
    shared_positions,
)

check_vllm()

from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding  # noqa: E402
from vllm.model_executor.models import glm4v  # noqa: E402 (checked first)
from vllm.model_executor.models.utils import WeightsMapper  # noqa: E402
from vllm.multimodal import MULTIMODAL_REGISTRY  # noqa: E402


class MultiImageInfo(glm4v.GLM4VProcessingInfo):
    """Processing info that allows any number of images per prompt; vLLM's class allows one."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}


class ExpandedPromptProcessor(glm4v.GLM4VMultiModalProcessor):
    """A multimodal processor that also accepts prompts whose image tokens are expanded already.

    This package's processor puts all tokens of an image into the prompt, and TRL passes these token
    ids on to vLLM.
    """

    def _postprocess_prompt(self, prompt: list[int]) -> list[int]:
        num_inner_tokens = self.info.get_num_image_tokens()
        return collapse_image_tokens(prompt, self.info.get_hf_config(), num_inner_tokens)

    _apply_hf_processor_tokens_only = _postprocess_prompt  # the name in other releases of vLLM


class RefuseTowerAdapters(WeightsMapper):
    """A weight mapper that refuses adapters on the vision tower.

    vLLM itself would load them without an error, but not apply them.
    """

    def _map_name(self, key: str) -> str | None:
        if key.startswith("transformer.vision.") and ".lora_" in key:
            raise ValueError(f"{key}: {TOWER_ADAPTERS_MESSAGE}")
        return super()._map_name(key)

    def get_rename_mapper(self) -> "RefuseTowerAdapters":
        return _refuse_tower_adapters(super().get_rename_mapper())


def _refuse_tower_adapters(mapper: WeightsMapper) -> RefuseTowerAdapters:
    return RefuseTowerAdapters(**vars(mapper))


@MULTIMODAL_REGISTRY.register_processor(
    ExpandedPromptProcessor,
    info=MultiImageInfo,
    dummy_inputs=glm4v.GLM4VDummyInputsBuilder,
)
class GLM4VForCausalLM(glm4v.GLM4VForCausalLM):
    """glm-4v, with one position for the tokens between an image's begin and end.

    It does not generate image tokens.
    """

    hf_to_vllm_mapper = _refuse_tower_adapters(glm4v.GLM4VForCausalLM.hf_to_vllm_mapper)

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        # SharedPositions has set uses_mrope, in this process or in the one that sent the config.
        assert vllm_config.model_config.uses_mrope, "vLLM would not ask the model for positions"
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        rotary = [module for module in self.modules() if isinstance(module, RotaryEmbedding)]
        require_rotation(self.config.original_rope, [module.is_neox_style for module in rotary])

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[Any]
    ) -> tuple[Tensor, int]:
        """Return positions ``(3, L)`` int64, and the next position minus ``L``.

        The three rows are equal.
        """
        images = [(f.mm_position.offset, f.mm_position.length) for f in mm_features]
        positions = shared_positions(len(input_tokens), images)
        next_position = int(positions[-1]) + 1
        return positions.repeat(3, 1), next_position - len(input_tokens)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: object,
    ) -> Any:
        assert positions.ndim == 2, f"positions have shape {tuple(positions.shape)}, not (3, L)"
        return super().forward(
            input_ids, positions[0], intermediate_tensors, inputs_embeds, **kwargs
        )

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Return logits ``(N, V)``, with -inf for :func:`.vllm_plugin.never_generated_ids`.

        Returns None in a process that gathers no logits.
        """
        logits = super().compute_logits(hidden_states)
        if logits is not None:
            for token_id in never_generated_ids(self.config):
                logits[:, token_id] = -float("inf")
        return logits
