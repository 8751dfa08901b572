"""why_not_glm4v decides whether a config is a glm-4v's, and every refusal repeats its reason."""

import json
from types import SimpleNamespace

import pytest
from safetensors.torch import save_file
from transformers import PretrainedConfig

from glm4v_patched.bench.roofline import benchmark_config
from glm4v_patched.inference.vllm_plugin import SharedPositions
from glm4v_patched.models.adopt import require_glm4v_config
from glm4v_patched.models.base import _require_glm4v
from glm4v_patched.models.check_weights import find_model_folder_problem
from glm4v_patched.patch.config_json import is_glm4v, why_not_glm4v
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from tests.helpers.tiny import golden_json, tiny_config

OTHERS = {
    "another model": ({"model_type": "llama"}, "model_type is 'llama', expected 'chatglm'"),
    "no model type": ({"model_type": None}, "model_type is None"),
    "a text model": ({"vision_config": None}, "vision_config is None, expected an object"),
    "a list": ({"vision_config": [1]}, "vision_config is [1], expected an object"),
}


@pytest.mark.parametrize("rope", [{"original_rope": True}, {"original_rope": False}, {}])
def test_original_rope_may_have_either_value_and_is_true_by_default(rope):
    config = {k: v for k, v in golden_json("config.json").items() if k != "original_rope"} | rope
    assert why_not_glm4v(config) is None and is_glm4v(config)
    assert ChatGLMConfig(**config).original_rope is rope.get("original_rope", True)


@pytest.mark.parametrize("value", ["false", None, "true", 0, 1.0])
def test_an_original_rope_that_is_no_boolean_is_refused(value):
    with pytest.raises(ValueError, match="original_rope.* true or false"):
        tiny_config(original_rope=value)


@pytest.mark.parametrize(("change", "part"), OTHERS.values(), ids=OTHERS)
def test_another_model_is_refused_with_the_same_reason_everywhere(change, part, tmp_path):
    values = golden_json("config.json") | change
    reason = why_not_glm4v(values)
    assert reason is not None and part in reason and not is_glm4v(values)
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file({}, tmp_path / "model.safetensors")
    assert reason in str(find_model_folder_problem(tmp_path))

    class Foreign(PretrainedConfig):
        model_type = values["model_type"] or ""

        def to_dict(self) -> dict:
            return values

    refusals = [
        lambda: _require_glm4v(tmp_path, tmp_path / "adapters"),
        lambda: require_glm4v_config("source", {"config.json": json.dumps(values).encode()}),
        lambda: SharedPositions.verify_and_update_model_config(
            SimpleNamespace(hf_config=Foreign())
        ),
    ]
    if values["model_type"] is not None:
        refusals.append(lambda: benchmark_config(str(tmp_path / "config.json")))
    for refusal in refusals:
        with pytest.raises(ValueError) as error:
            refusal()
        assert reason in str(error.value)
