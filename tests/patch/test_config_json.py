"""why_not_glm4v decides whether a config is a glm-4v's, and every refusal repeats its reason."""

import json
from types import SimpleNamespace

import pytest
from safetensors.torch import save_file
from transformers import PretrainedConfig

from glm4v_patched.bench.roofline import benchmark_config
from glm4v_patched.inference.vllm_plugin import SharedPositions
from glm4v_patched.models.base import _require_glm4v
from glm4v_patched.models.check_weights import find_model_folder_problem
from glm4v_patched.patch.config_json import is_glm4v, why_not_glm4v
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from hub_upload.build import _make_config
from tests.helpers.tiny import golden_json

OTHERS = {
    "another model": ({"model_type": "llama"}, "model_type is 'llama', expected 'chatglm'"),
    "no model type": ({"model_type": None}, "model_type is None"),
    "a text model": ({"vision_config": None}, "vision_config is None, expected an object"),
    "a list": ({"vision_config": [1]}, "vision_config is [1], expected an object"),
}
for value in (False, "false", None, "true", 0):
    reason = f"original_rope is {value!r}, expected true or no such field"
    OTHERS[f"original_rope {value!r}"] = ({"original_rope": value}, reason)


@pytest.mark.parametrize("rope", [{"original_rope": True}, {}])
def test_original_rope_is_true_or_missing_in_a_glm4v(rope):
    config = {k: v for k, v in golden_json("config.json").items() if k != "original_rope"} | rope
    assert why_not_glm4v(config) is None and is_glm4v(config)
    assert ChatGLMConfig(**config).original_rope is True


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

    source = SimpleNamespace(name="source", read_json=lambda name: values)
    refusals = [
        lambda: _require_glm4v(tmp_path, tmp_path / "adapters"),
        lambda: _make_config(source, {}),
        lambda: SharedPositions.verify_and_update_model_config(
            SimpleNamespace(hf_config=Foreign())
        ),
    ]
    if "original_rope" in change:  # the model's own config has another message
        for build in (
            lambda: ChatGLMConfig(**values),
            lambda: ChatGLMConfig.from_config(Foreign()),
        ):
            with pytest.raises(ValueError, match="original_rope=.* every glm-4v .* has True"):
                build()
    if values["model_type"] is not None:
        settings = SimpleNamespace(config=tmp_path / "config.json", model=None)
        refusals.append(lambda: benchmark_config(settings))
    for refusal in refusals:
        with pytest.raises(ValueError) as error:
            refusal()
        assert reason in str(error.value)
