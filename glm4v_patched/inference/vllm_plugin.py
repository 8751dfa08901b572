"""vLLM computes with the image positions that glm-4v has: a plug-in, found by its entry point.

vLLM's own class counts the ids of an image one by one. In the published model, and so in whatever
was trained from it, all ids between an image's begin and end share one position: without this,
text after an image stands ``number of its inner ids - 1`` positions too far.

vLLM calls :func:`register` in each of its processes, whatever model it serves. So nothing here
imports vLLM's models before a glm-4v is served, and what does not fit this vLLM is an error for
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
# vLLM imports it when it is asked for a glm-4v. It has the architecture's name, by which vLLM
# finds the settings of a model.
MODEL = f"glm4v_patched.inference.vllm_model:{ARCHITECTURE}"
# The last vLLM for torch 2.11 (0.26.0), for 2.13 (0.32.0) and for 2.14 (0.33.0): tests ran there.
OLDEST, NEWEST = "0.26.0", "0.33.0"
# A child of vLLM's logger: its lines appear among vLLM's.
logger = logging.getLogger("vllm.glm4v_patched")


# Names of vLLM's that are used here, by module, with the parameters that they must have.
_NAMES: dict[str, dict[str, str | None]] = {
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
        "GLM4VMultiModalProcessor._apply_hf_processor_tokens_only": "self prompt_tokens",
        "GLM4VDummyInputsBuilder": None,
    },
}


def register() -> None:
    """Make vLLM load our class for a glm-4v; every other model is served as before."""
    try:
        importlib.import_module("vllm").ModelRegistry.register_model(ARCHITECTURE, MODEL)
        hooks = importlib.import_module("vllm.model_executor.models.config").MODELS_CONFIG_MAP
        hooks.setdefault(ARCHITECTURE, SharedPositions)
    except (ImportError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "vllm":
            cure = pip_install("glm4v-patched[vllm]")
            raise RuntimeError(f"vllm is not installed: {cure}") from error
        # No error: it would stop this vLLM for all models. `check_vllm` finds what is missing, too.
        logger.error("glm-4v would be served with other positions than it has: %s", _moved([error]))


class SharedPositions:
    """What vLLM asks about the settings of a glm-4v, before it starts any process."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Have vLLM ask the model for positions, which it does for models with M-RoPE."""
        config = model_config.hf_config
        # vLLM serves cogagent-9b by the same architecture.
        if reason := why_not_glm4v(config.to_dict()):
            raise ValueError(
                f"this config is not a glm-4v's: {reason}; to serve it without the plug-in of "
                "glm4v_patched, set VLLM_PLUGINS="
            )
        check_vllm()
        # The class computes RoPE from its own settings; this only says that it has positions of
        # its own. All rotary pairs (half of a head's) belong to the first of the three rows.
        section = [config.kv_channels // 4, 0, 0]
        given = getattr(config, "rope_parameters", None) or {}
        config.rope_parameters = {"rope_type": "default", **given, "mrope_section": section}
        if not model_config.uses_mrope:
            raise RuntimeError(_moved(["vllm.config.ModelConfig.uses_mrope stays False"]))
        logger.info("glm-4v with shared image positions, by glm4v_patched")

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Raise ``ValueError`` for adapters on the vision tower."""
        lora = vllm_config.lora_config
        if lora is not None and lora.enable_tower_connector_lora:
            raise ValueError(f"--enable-tower-connector-lora: {TOWER_ADAPTERS}")


TOWER_ADAPTERS = (
    "vLLM does not compute adapters on glm-4v's vision tower. Merge them into the model, and serve "
    f"that: {own_command('merge', 'ADAPTERS', '--out', 'MERGED')}"
)


def check_vllm() -> None:
    """Raise ``RuntimeError`` if this vLLM lacks what the plug-in builds on, naming all that has
    moved or takes other parameters, vLLM's version and the cure."""
    import vllm

    if Version(vllm.__version__) < Version(OLDEST):
        raise RuntimeError(_moved([f"tests run with {OLDEST} to {NEWEST}"]))
    every = [(module, *of) for module, names in _NAMES.items() for of in names.items()]
    faults = [fault for each in every if (fault := _fault_of(*each)) is not None]
    if not faults:
        hooks = importlib.import_module("vllm.model_executor.models.config").MODELS_CONFIG_MAP
        if hooks.get(ARCHITECTURE) is not SharedPositions:
            faults = [f"MODELS_CONFIG_MAP has {hooks.get(ARCHITECTURE)} for {ARCHITECTURE}"]
    if faults:
        raise RuntimeError(_moved(faults))
    if Version(vllm.__version__).release > Version(NEWEST).release:
        logger.warning("glm4v_patched was tested with vLLM up to %s", NEWEST)


def _fault_of(module: str, name: str, wanted: str | None) -> str | None:
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        return f"{module}.{name} is not there ({error})"
    parameters = wanted if wanted is None else " ".join(inspect.signature(found).parameters)
    if parameters == wanted:
        return None
    return f"{module}.{name} takes ({parameters}), not ({wanted})"


def _moved(faults: Iterable[object]) -> str:
    vllm = importlib.import_module("vllm")
    cure = pip_install(f"vllm>={OLDEST},<={NEWEST}")
    return (
        f"glm4v_patched cannot give glm-4v its positions in vLLM {vllm.__version__}: "
        f"{'; '.join(map(str, faults))}. {cure} (or VLLM_PLUGINS= to serve without the plug-in: "
        "answers about images are then others than trained)"
    )


def shared_positions(length: int, images: Iterable[tuple[int, int]]) -> Tensor:
    """Positions of a row of ids: begin of an image, one for all its inner ids, end.

    Args:
        length: Ids in the row.
        images: First id (its begin) and number of ids (begin and end included) of each image.

    Returns:
        ``(length,)`` int64, as :func:`..remote.image_layout.expand_image_placeholders` counts them.
    """
    steps = torch.ones(length, dtype=torch.long)
    steps[:1] = 0
    for begin, count in images:
        # Neither begin, nor the first inner id, nor the end.
        steps[begin + 2 : begin + count - 1] = 0
    return steps.cumsum(0)


def never_generated_ids(config: Any) -> list[int]:
    """Ids that :class:`..remote.modeling_chatglm.GLM4VForCausalLM` does not generate either: a
    trainer that gets one among the drawn ids takes it for an image that was lost."""
    fill = getattr(config, "image_token_id", None)  # not in a published config
    return [i for i in (config.boi_token_id, config.eoi_token_id, fill) if i is not None]


def without_fill(ids: list[int], config: Any, inner: int) -> list[int]:
    """A row of ids in which every image has one inner id, as vLLM wants it.

    Args:
        ids: An image's inner ids are ``inner`` times ``config.image_token_id``, as this package's
            processor fills them and online trainers hand them on; or one id already.
    """
    # Not in a published config: such a row is of another processor.
    fill = getattr(config, "image_token_id", None)
    filled = [config.boi_token_id, *[fill] * inner, config.eoi_token_id]
    short = [config.boi_token_id, config.pad_token_id, config.eoi_token_id]
    row: list[int] = []
    at = 0
    while at < len(ids):
        is_image = ids[at] == config.boi_token_id and ids[at : at + len(filled)] == filled
        row += short if is_image else [ids[at]]
        at += len(filled) if is_image else 1
    return row
