"""Interfaces of every transformers model: attentions, image features, generation modes."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModel, DynamicCache, StaticCache, pipeline
from transformers.utils import logging

from glm4v_patched.remote.attention import eager_attention
from glm4v_patched.remote.keywords import SLICES_INPUTS_EMBEDS
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.legacy_repository import remote_code_under
from tests.helpers.tiny import expanded_image, random_pixels, text, tiny_model, unexpanded_image
from tests.remote.inputs import GREEDY, SAMPLE_OPTIONS, new_tokens, prompts, two_sequences

# fp32, the same sums in another order. Measured 3.4e-6 on this CPU.
ATOL = 2e-5
SINCE_5 = Version(transformers.__version__).major >= 5


@pytest.fixture(scope="module")
def eager_model() -> GLM4VForCausalLM:
    return tiny_model(attn_implementation="eager")


@torch.no_grad()
def test_eager_attention_gives_its_weights_where_asked_for(image):
    model = tiny_model(attn_implementation="eager")
    assert model(**two_sequences(image)).attentions is None
    requested = model(**two_sequences(image), output_attentions=True)
    model.config.output_attentions = True
    for output in (
        requested,
        model(**two_sequences(image)),
        model.transformer(**two_sequences(image)),
    ):
        assert len(output.attentions) == model.config.num_layers
        for weights in output.attentions:
            assert weights.shape == (2, model.config.num_attention_heads, 13, 13)
            assert not weights[0].triu(1).any()  # causal
            assert (weights[0].sum(-1) - 1).abs().max() <= ATOL


@torch.no_grad()
def test_other_implementations_warn_once_and_give_none(model, monkeypatch):
    heard, logger = [], logging.get_logger(GLM4VForCausalLM.__module__)
    logger.warning_once.cache_clear()
    monkeypatch.setattr(logger, "warning", heard.append)
    for output_attentions in (None, True, True):
        assert model(**two_sequences(), output_attentions=output_attentions).attentions is None
    assert len(heard) == 1 and "'sdpa' computes no attention weights" in heard[0]


def test_weights_have_gradients_and_recomputed_layers_give_none():
    model = tiny_model(attn_implementation="eager").train()
    output = model(**two_sequences(), output_attentions=True)
    for weights in output.attentions:
        weights.retain_grad()
    output.logits.sum().backward()
    assert all(weights.grad.abs().sum() > 0 for weights in output.attentions)
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="output_attentions=True in training, where 2 of 2 layers"):
        model(**two_sequences(), output_attentions=True)
    assert model.eval()(**two_sequences(), output_attentions=True).attentions is not None


@torch.no_grad()
def test_image_features_have_the_type_of_this_transformers_and_forward_takes_them(model):
    want = model.transformer.vision(random_pixels(2))
    for encoder in (model, model.transformer):
        actual = encoder.get_image_features(pixel_values=random_pixels(2))
        assert torch.equal(actual.pooler_output if SINCE_5 else actual, want)
        assert torch.equal(encoder.get_image_features(random_pixels(2), return_dict=False)[1], want)
        detailed = encoder.get_image_features(
            random_pixels(2), output_hidden_states=True, return_dict=True
        )
        assert len(detailed.hidden_states) == 1 + model.config.vision.num_hidden_layers
        assert torch.equal(detailed.hidden_states[-1], detailed.last_hidden_state)
    inputs = two_sequences()
    features = model.get_image_features(inputs["pixel_values"])
    actual = model(**inputs | {"pixel_values": None}, image_features=features)
    assert torch.equal(actual.logits, model(**inputs).logits)
    both = {"pixel_values": random_pixels(2), "image_features": want[:1]}
    for wrong in (both, {"image_features": want[:1, 1:]}):
        with pytest.raises(ValueError, match="image_features"):
            model(torch.tensor([expanded_image()]), **wrong)


@torch.no_grad()
def test_generate_continues_a_cache_with_embeddings(model, image):
    """transformers requires embeddings of the whole sequences; those in the cache are ignored."""
    first = torch.tensor([[*text(3, seed=1), *image, *text(4, seed=2)]])
    more, cache = torch.tensor([text(3, seed=5)]), DynamicCache(config=model.config)
    whole = torch.cat((first, more), dim=1)
    want = new_tokens(model, {"input_ids": whole, "pixel_values": random_pixels(1)})
    model(first, pixel_values=random_pixels(1), past_key_values=cache)
    embeds, num_cached = model.get_input_embeddings()(more), cache.get_seq_length()
    if not SLICES_INPUTS_EMBEDS:
        with pytest.raises(ValueError, match=f"has 3 columns but the cache holds {num_cached}"):
            prepare = model.prepare_inputs_for_generation
            prepare(first[:, :0], past_key_values=cache, inputs_embeds=embeds)
    unread = embeds.new_zeros(1, num_cached, embeds.shape[-1])
    inputs = {"inputs_embeds": torch.cat((unread, embeds), dim=1), "past_key_values": cache}
    assert torch.equal(model.generate(**inputs, **GREEDY), want)


def test_the_softmax_of_eager_attention_is_in_fp32_forward_and_backward():
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, n, 8).bfloat16() for n in (4, 64, 64))
    queries = [query.clone().requires_grad_() for _ in range(2)]
    layer = SimpleNamespace(num_key_value_groups=1)
    out, weights = eager_attention(layer, queries[0], key, value, None, scaling=1.0)
    want = (queries[1] @ key.transpose(-1, -2)).float().softmax(dim=-1).bfloat16()
    assert torch.equal(weights, want)
    for output in (out, (want @ value).transpose(1, 2)):
        output.square().sum().backward()
    assert torch.equal(queries[0].grad, queries[1].grad)


STEPS = SAMPLE_OPTIONS["max_new_tokens"]
MODES = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 20, "num_return_sequences": 2},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "sampled beams": {"do_sample": True, "num_beams": 3, "top_k": 20},
}


def generated(model, batch: dict, mode: str, **options):
    torch.manual_seed(0)
    return model.generate(
        **batch, **SAMPLE_OPTIONS, **MODES[mode], return_dict_in_generate=True, **options
    )


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_has_its_outputs_and_the_same_tokens_with_any_cache(eager_model, mode):
    """Of text and of expanded prompts, too: test_decoding.py."""
    batch, config = prompts(unexpanded_image()), eager_model.config
    names = ("scores", "logits", "attentions", "hidden_states")
    lengths, layer = [], eager_model.transformer.output_layer
    hook = layer.register_forward_hook(lambda _, inputs, output: lengths.append(output.shape[1]))
    output = generated(eager_model, batch, mode, **{f"output_{name}": True for name in names})
    hook.remove()
    assert lengths == [1] * STEPS  # the last logits alone
    before, cache = eager_model(**batch).logits.shape[1], StaticCache(config, 40)
    static = {"past_key_values": cache, "output_attentions": True}
    for variant in (static, {"use_cache": False}):
        actual = generated(eager_model, batch, mode, output_logits=True, **variant)
        assert torch.equal(actual.sequences, output.sequences)
        for one, other in zip(actual.logits, output.logits, strict=True):
            assert (one - other).abs().max() <= ATOL
        if variant is static:  # weights of empty cache entries are 0
            assert {w.shape[-1] for of_step in actual.attentions for w in of_step} == {40}
    assert actual.past_key_values is None and int(cache.get_seq_length()) == before + STEPS - 1
    options = MODES[mode]
    rows = 2 * options.get("num_beams", options.get("num_return_sequences", 1))
    for step, new in enumerate([before] + [1] * (STEPS - 1)):
        weights = rows, config.num_attention_heads, new, before + step
        states = rows, new, config.hidden_size
        assert output.scores[step].shape == output.logits[step].shape == (rows, 512)
        assert [s.shape for s in output.hidden_states[step]] == [states] * (config.num_layers + 1)
        assert [w.shape for w in output.attentions[step]] == [weights] * config.num_layers
    wanted = rows, config.num_key_value_heads, before + STEPS - 1, config.kv_channels
    for layer in output.past_key_values.layers:
        assert tuple(layer.keys.shape) == tuple(layer.values.shape) == wanted


@pytest.mark.parametrize("image", [[], expanded_image()], ids=["text", "expanded"])
@pytest.mark.parametrize(
    "options", [{"cache_implementation": "static"}, {"num_beams": 2, "num_return_sequences": 2}]
)
def test_embeddings_generate_as_their_ids(eager_model, image, options):
    batch, options = prompts(image), GREEDY | options
    want = new_tokens(eager_model, batch, **options)
    ids = batch.pop("input_ids")
    embedded = batch | {"inputs_embeds": eager_model.get_input_embeddings()(ids).detach()}
    actual = eager_model.generate(**embedded, **options)
    assert torch.equal(actual, want), "without ids only what is new is given back"
    if "num_return_sequences" not in options:
        actual = eager_model.generate(input_ids=ids, **embedded, **options)
        assert torch.equal(actual[:, : ids.shape[1]], ids) and torch.equal(actual[:, -STEPS:], want)


@torch.no_grad()
def test_the_pipeline_of_features_gives_hidden_states(model, tokenizer, tmp_path):
    """The pipeline returns the first output of the model that AutoModel loads."""
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path / "saved")
    want = model.transformer(**tokenizer("a b", return_tensors="pt")).last_hidden_state
    trusted = {"trust_remote_code": True}
    with remote_code_under(tmp_path / "modules"):
        loaded = pipeline("feature-extraction", str(tmp_path / "saved"), **trusted)
        whole = AutoModel.from_pretrained(tmp_path / "saved", **trusted)
        own = pipeline("feature-extraction", model.transformer, tokenizer=tokenizer)
        for features in (loaded, own):
            assert (torch.tensor(features("a b")) - want).abs().max() <= ATOL
        loaded.save_pretrained(tmp_path / "again")
    assert "_from_pipeline" not in (tmp_path / "again" / "config.json").read_text()
    assert type(whole).__name__ == "GLM4VForCausalLM"
