"""A vLLM plug-in that gives glm-4v its image positions; vLLM finds it by its entry point.

vLLM's own class gives each token of an image a position of its own. In the published model, and in
models trained from it, all tokens between an image's begin and end token (its inner tokens) share
one position. Without this plug-in, an image with ``n`` inner tokens makes the positions of the text
after it too large by ``n - 1``.

vLLM calls :func:`register` in each of its processes, whatever model it serves. So this module
imports vLLM's models only when vLLM serves a glm-4v, and an incompatible vLLM is an error for
glm-4v only.
"""

import importlib
import inspect
import logging
from collections.abc import Iterable
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from ..patch.config_json import why_not_glm4v
from ..terminal_text import own_command, pip_install

ARCHITECTURE = "GLM4VForCausalLM"
# vLLM imports this class when it serves a glm-4v. The class is named like the architecture, because
# vLLM finds a model's settings by that name.
MODEL_CLASS = f"glm4v_patched.inference.vllm_model:{ARCHITECTURE}"
# Tested with the last vLLM for torch 2.11 (0.26.0), for torch 2.13 (0.32.0) and for 2.14 (0.33.0).
OLDEST_VLLM, NEWEST_VLLM = "0.26.0", "0.33.0"
# A child of vLLM's logger, so that this plug-in's lines appear among vLLM's.
logger = logging.getLogger("vllm.glm4v_patched")


# vLLM's names that the plug-in uses, by module. The value of a name is the parameters that it must
# have, or None if these are not compared.
_USED_NAMES: dict[str, dict[str, str | None]] = {
    "vllm.model_executor.models.config": {"MODELS_CONFIG_MAP": None},
    "vllm.transformers_utils.config": {"uses_mrope": "config"},
    "vllm.model_executor.models.utils": {"WeightsMapper._map_name": "self key"},
    "vllm.multimodal": {"MULTIMODAL_REGISTRY.register_processor": "processor info dummy_inputs"},
    "vllm.model_executor.models.glm4v": {
        "GLM4VForCausalLM.forward": "self input_ids positions intermediate_tensors inputs_embeds "
        "kwargs",
        "GLM4VForCausalLM.get_mrope_input_positions": "self input_tokens mm_features",
        "GLM4VForCausalLM.compute_logits": "self hidden_states",
        "GLM4VForCausalLM.hf_to_vllm_mapper": None,
        "GLM4VProcessingInfo.get_supported_mm_limits": "self",
        "GLM4VProcessingInfo.get_num_image_tokens": "self",
        "GLM4VDummyInputsBuilder": None,
    },
    "vllm.model_executor.layers.rotary_embedding": {"RotaryEmbedding": None},
}
# Methods in vllm.model_executor.models.glm4v that process a prompt's token ids. A release of vLLM
# must have one of them.
_PROMPT_HOOKS = {
    "GLM4VMultiModalProcessor._apply_hf_processor_tokens_only": "self prompt_tokens",
    "GLM4VMultiModalProcessor._postprocess_prompt": "self prompt",
}


def register() -> None:
    """Register our class for glm-4v with vLLM; other models are not affected."""
    try:
        importlib.import_module("vllm").ModelRegistry.register_model(ARCHITECTURE, MODEL_CLASS)
        hooks = importlib.import_module("vllm.model_executor.models.config").MODELS_CONFIG_MAP
        hooks.setdefault(ARCHITECTURE, SharedPositions)
    except (ImportError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "vllm":
            command = pip_install("glm4v-patched[vllm]")
            raise RuntimeError(f"vllm is not installed: {command}") from error
        # Logged, not raised: an error would stop this vLLM for all models. For a glm-4v,
        # `check_vllm` raises it.
        logger.error("glm-4v would get wrong positions: %s", _incompatible([error]))


class SharedPositions:
    """Hooks that vLLM calls with the config of a glm-4v before it starts any process."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Declare M-RoPE, so that vLLM asks the model for its positions."""
        config = model_config.hf_config
        if reason := why_not_glm4v(config.to_dict()):
            raise ValueError(
                f"this config is not a glm-4v's: {reason}; to serve it without glm4v_patched's "
                "plug-in, set VLLM_PLUGINS="
            )
        check_vllm()
        # vLLM has no default for original_rope. Its layers would take any value as true or false.
        config.original_rope = getattr(config, "original_rope", True)
        if not isinstance(config.original_rope, bool):
            raise ValueError(
                f"config.json: original_rope is {config.original_rope!r:.60}; expected true, as in "
                "glm-4v-9b, or false, as in cogagent-9b"
            )
        # This only declares custom positions; the model class computes RoPE from its own settings.
        # M-RoPE has three rows of positions, and mrope_section is how many rotary pairs use each
        # row. Here, all use the first: kv_channels / 4 pairs, because RoPE rotates half of a head.
        section = [config.kv_channels // 4, 0, 0]
        parameters = getattr(config, "rope_parameters", None) or {}
        config.rope_parameters = {"rope_type": "default", **parameters, "mrope_section": section}
        if not model_config.uses_mrope:
            raise RuntimeError(_incompatible(["vllm.config.ModelConfig.uses_mrope stays False"]))
        rotation = "" if config.original_rope else " and rotate_half (original_rope: false)"
        logger.info("glm-4v with shared image positions%s, by glm4v_patched", rotation)

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Raise ``ValueError`` for adapters on the vision tower."""
        lora = vllm_config.lora_config
        if lora is not None and lora.enable_tower_connector_lora:
            raise ValueError(f"--enable-tower-connector-lora: {TOWER_ADAPTERS_MESSAGE}")


TOWER_ADAPTERS_MESSAGE = (
    "vLLM does not apply adapters on glm-4v's vision tower. Merge them into the model and serve "
    f"the result: {own_command('merge', 'ADAPTERS', '--out', 'MERGED')}"
)


def check_vllm() -> None:
    """Raise ``RuntimeError`` if this vLLM is incompatible.

    The message has vLLM's version, all names that are missing or take other parameters, and a
    command that installs a compatible version.
    """
    import vllm

    if Version(vllm.__version__) < Version(OLDEST_VLLM):
        reason = f"this package was tested with {OLDEST_VLLM} to {NEWEST_VLLM}"
        raise RuntimeError(_incompatible([reason]))
    mismatches = [
        mismatch
        for module, names in _USED_NAMES.items()
        for name, parameters in names.items()
        if (mismatch := _find_mismatch(module, name, parameters)) is not None
    ]
    hook_mismatches = [
        _find_mismatch("vllm.model_executor.models.glm4v", name, parameters)
        for name, parameters in _PROMPT_HOOKS.items()
    ]
    if None not in hook_mismatches:  # no hook matches
        mismatches += filter(None, hook_mismatches)
    if not mismatches:
        hooks = importlib.import_module("vllm.model_executor.models.config").MODELS_CONFIG_MAP
        if hooks.get(ARCHITECTURE) is not SharedPositions:
            mismatches = [f"MODELS_CONFIG_MAP has {hooks.get(ARCHITECTURE)} for {ARCHITECTURE}"]
    if mismatches:
        raise RuntimeError(_incompatible(mismatches))
    if Version(vllm.__version__).release > Version(NEWEST_VLLM).release:
        logger.warning("glm4v_patched was tested with vLLM up to %s only", NEWEST_VLLM)


def require_rotation(original_rope: bool, neox_styles: Iterable[bool]) -> None:
    """Raise ``RuntimeError`` unless the rotary embeddings of vLLM's layers are as the config says.

    Args:
        original_rope: The config's setting. False means rotate_half, which vLLM calls neox style.
        neox_styles: ``is_neox_style`` of each rotary embedding of vLLM's model.
    """
    if any(style is original_rope for style in neox_styles):
        name = "vllm.model_executor.models.chatglm.GLMAttention"
        mismatch = f"{name} sets is_neox_style to {original_rope} for {original_rope=}"
        raise RuntimeError(_incompatible([mismatch]))


def _find_mismatch(module: str, name: str, expected: str | None) -> str | None:
    """Return how one of vLLM's names differs from what the plug-in uses, or None."""
    try:
        value: Any = importlib.import_module(module)
        for attribute in name.split("."):
            value = getattr(value, attribute)
    except (ImportError, AttributeError) as error:
        return f"{module}.{name} is missing ({error})"
    parameters = None if expected is None else " ".join(inspect.signature(value).parameters)
    if parameters == expected:
        return None
    return f"{module}.{name} takes ({parameters}), not ({expected})"


def _incompatible(reasons: Iterable[object]) -> str:
    """Return the message about an incompatible vLLM."""
    vllm = importlib.import_module("vllm")
    command = pip_install(f"vllm>={OLDEST_VLLM},<={NEWEST_VLLM}")
    return (
        f"glm4v_patched cannot give glm-4v its positions in vLLM {vllm.__version__}: "
        f"{'; '.join(map(str, reasons))}. {command} (or set VLLM_PLUGINS= to serve without the "
        "plug-in; answers about images then differ from the trained model's)"
    )


def shared_positions(length: int, images: Iterable[tuple[int, int]]) -> Tensor:
    """Return the positions of a token sequence; an image's inner tokens share one position.

    Args:
        length: Tokens in the sequence.
        images: For each image, the index of its begin token, and its number of tokens, including
            begin and end.

    Returns:
        ``(length,)`` int64, as :func:`..remote.image_layout.expand_image_placeholders` computes
        them.
    """
    increments = torch.ones(length, dtype=torch.long)
    increments[:1] = 0
    for begin, count in images:
        # Begin, first inner token and end advance the position; the other inner tokens do not.
        increments[begin + 2 : begin + count - 1] = 0
    return increments.cumsum(0)


def never_generated_ids(config: Any) -> list[int]:
    """Return the ids of image tokens, which an answer must not contain.

    A trainer would take them for an image whose pixels are missing.
    :class:`..remote.modeling_chatglm.GLM4VForCausalLM` does not generate them either.
    """
    image_token_id = getattr(config, "image_token_id", None)  # not in a published config
    token_ids = (config.boi_token_id, config.eoi_token_id, image_token_id)
    return [token_id for token_id in token_ids if token_id is not None]


def collapse_image_tokens(ids: list[int], config: Any, num_inner_tokens: int) -> list[int]:
    """Return token ids with a single inner token per image, as vLLM expects them.

    Args:
        ids: Token ids. An image has either ``num_inner_tokens`` image tokens between its begin and
            end (this package's processor returns it so), or a single token.
        num_inner_tokens: Number of inner tokens that the model makes of an image.
    """
    # A published config has no image token, because its processor does not expand images.
    image_token_id = getattr(config, "image_token_id", None)
    expanded = [config.boi_token_id, *[image_token_id] * num_inner_tokens, config.eoi_token_id]
    collapsed = [config.boi_token_id, config.pad_token_id, config.eoi_token_id]
    result: list[int] = []
    index = 0
    while index < len(ids):
        if ids[index] == config.boi_token_id and ids[index : index + len(expanded)] == expanded:
            result += collapsed
            index += len(expanded)
        else:
            result.append(ids[index])
            index += 1
    return result
