"""Module names of other models in peft configs for this model."""

import pytest
from peft import LoraConfig, get_peft_model, inject_adapter_in_model

import glm4v_patched
from glm4v_patched.remote.modeling_chatglm import ChatGLMForSequenceClassification
from tests.helpers.refused import refused
from tests.helpers.tiny import tiny_config, tiny_model


@pytest.fixture(autouse=True)
def applied():
    with glm4v_patched.applied():
        yield


def trained(model) -> set[str]:
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


def test_embeddings_and_head_are_found_by_their_names_in_other_models():
    config = LoraConfig(
        r=2, target_modules=["query_key_value"], modules_to_save=["embed_tokens", "lm_head"]
    )
    model = get_peft_model(tiny_model(), config)
    for module in ("embedding.word_embeddings", "output_layer"):
        name = f"base_model.model.transformer.{module}.modules_to_save.default.weight"
        assert name in trained(model)
    assert model.peft_config["default"].modules_to_save == ["word_embeddings", "output_layer"]


REFUSED = {
    "projections": ({"target_modules": ["q_proj", "v_proj", "gate_proj"]}, "'q_proj', 'v_proj'"),
    "in a pattern": (
        {"target_modules": r".*language_model.*(q_proj|dense)"},
        "query_key_value (for q_proj, k_proj, v_proj)",
    ),
    "part of a name": ({"target_modules": "query_key"}, "target_modules has 'query_key'"),
    "the end of a name": ({"target_modules": ["h_to_4h"]}, "target_modules has 'h_to_4h'"),
    "no head": ({"target_modules": ["dense"], "modules_to_save": ["score"]}, "'score'"),
    "two in one another": (
        {"target_modules": ["dense"], "modules_to_save": ["linear_proj"]},
        "use 'vision.linear_proj'",
    ),
}


@pytest.mark.parametrize("options, part", REFUSED.values(), ids=REFUSED)
def test_unknown_names_are_refused_with_the_known_ones(options, part):
    with refused(ValueError, part):
        get_peft_model(tiny_model(), LoraConfig(r=2, **options))
    with pytest.raises(ValueError, match="no module|matches"):
        inject_adapter_in_model(LoraConfig(r=2, **options), tiny_model())


def test_a_reward_model_trains_its_head_beside_adapters():
    """peft adds head names of other models to modules_to_save, which are accepted."""
    names = {"target_modules": ["dense"], "modules_to_save": ["embed_tokens"]}
    config = LoraConfig(r=2, task_type="SEQ_CLS", **names)
    model = get_peft_model(ChatGLMForSequenceClassification(tiny_config(num_labels=1)), config)
    assert "base_model.model.score.modules_to_save.default.weight" in trained(model)
    config = LoraConfig(r=2, task_type="SEQ_CLS", target_modules=["dense", "classifier"])
    with pytest.raises(ValueError, match="target_modules has 'classifier'"):
        get_peft_model(ChatGLMForSequenceClassification(tiny_config(num_labels=1)), config)


@pytest.mark.parametrize("targets", ["All-Linear", {"dense"}, None])
def test_known_names_are_accepted(targets):
    assert trained(get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=targets)))


def test_an_adapter_saved_with_unknown_names_still_loads():
    with_stray = LoraConfig(r=2, target_modules=["query_key_value", "q_proj"])
    with_stray.inference_mode = True
    assert get_peft_model(tiny_model(), with_stray)
