"""vLLM's class for glm-4v with shared image positions and several images. Only vLLM imports this.

See :mod:`.vllm_plugin`, which registers it.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .vllm_plugin import TOWER_ADAPTERS, check_vllm, never_generated_ids, shared_positions, without_fill

check_vllm()

from vllm.model_executor.models import glm4v  # noqa: E402 (checked first)
from vllm.model_executor.models.utils import WeightsMapper  # noqa: E402
from vllm.multimodal import MULTIMODAL_REGISTRY  # noqa: E402


class SeveralImages(glm4v.GLM4VProcessingInfo):
    """As many images in a prompt as fit (vLLM's class: one)."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}


class FilledImages(glm4v.GLM4VMultiModalProcessor):
    """Prompts of ids may be rows of this package's processor, as TRL's trainers hand them on."""

    def _apply_hf_processor_tokens_only(self, prompt_tokens: list[int]) -> list[int]:
        inner = self.info.get_num_image_tokens()
        return without_fill(prompt_tokens, self.info.get_hf_config(), inner)


class NoTowerAdapters(WeightsMapper):
    """Renames weights as vLLM's does, and refuses adapters that vLLM would load and not compute."""

    def _map_name(self, key: str) -> str | None:
        if key.startswith("transformer.vision.") and ".lora_" in key:
            raise ValueError(f"{key}: {TOWER_ADAPTERS}")
        return super()._map_name(key)

    def get_rename_mapper(self) -> "NoTowerAdapters":
        return _refusing(super().get_rename_mapper())


def _refusing(mapper: WeightsMapper) -> NoTowerAdapters:
    return NoTowerAdapters(**vars(mapper))


@MULTIMODAL_REGISTRY.register_processor(
    FilledImages,
    info=SeveralImages,
    dummy_inputs=glm4v.GLM4VDummyInputsBuilder,
)
class GLM4VForCausalLM(glm4v.GLM4VForCausalLM):
    """Inner ids of an image share one position, and no id of an image is ever drawn."""

    hf_to_vllm_mapper = _refusing(glm4v.GLM4VForCausalLM.hf_to_vllm_mapper)

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        # Set by SharedPositions, of this process or of the one that has sent the settings here.
        assert vllm_config.model_config.uses_mrope, "vLLM would not ask for positions"
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[Any]
    ) -> tuple[Tensor, int]:
        """Positions ``(3, ids)`` in equal rows, and last position + 1 - ids."""
        places = [feature.mm_position for feature in mm_features]
        positions = shared_positions(
            len(input_tokens), [(place.offset, place.length) for place in places]
        )
        following = int(positions[-1]) + 1
        return positions.repeat(3, 1), following - len(input_tokens)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: object,
    ) -> Any:
        assert positions.ndim == 2, f"positions have shape {tuple(positions.shape)}, not (3, ids)"
        return super().forward(
            input_ids, positions[0], intermediate_tensors, inputs_embeds, **kwargs
        )

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Logits ``(rows, vocabulary)``, -inf for the ids that this package's ``generate`` does not
        draw either; None in a process that gathers none."""
        logits = super().compute_logits(hidden_states)
        if logits is not None:
            for each in never_generated_ids(self.config):
                logits[:, each] = -float("inf")
        return logits
