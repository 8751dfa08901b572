"""What others expect of every model of transformers: attentions, image features, early exit."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import logging

from glm4v_patched.remote.attention import eager_attention
from glm4v_patched.remote.keywords import EMBEDS_ARE_CUT
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.tiny import grown_image, padded, pictures, text, tiny_model

# fp32, the same sums in another order. Measured 2e-7 on this CPU.
ATOL = 1e-5
SINCE_5 = Version(transformers.__version__).major >= 5


@pytest.fixture(scope="module")
def eager_model() -> GLM4VForCausalLM:
    return tiny_model(attn_implementation="eager")


def rows(image=None) -> dict[str, torch.Tensor]:
    image = grown_image() if image is None else image
    inputs = padded([[*text(3, seed=1), *image, *text(4, seed=2)], text(5, seed=3)], "left")
    return inputs | {"pixel_values": pictures(1)}


def drawing(number: int) -> dict:
    return {"max_new_tokens": number, "do_sample": False, "eos_token_id": None}


# Attentions


@torch.no_grad()
def test_eager_attention_gives_its_weights_where_asked_for(image):
    model = tiny_model(attn_implementation="eager")
    assert model(**rows(image)).attentions is None
    asked = model(**rows(image), output_attentions=True)
    model.config.output_attentions = True
    for output in (asked, model(**rows(image)), model.transformer(**rows(image))):
        length = output[0].shape[1]
        assert len(output.attentions) == model.config.num_layers
        for weights in output.attentions:
            assert weights.shape == (2, model.config.num_attention_heads, length, length)
            assert not weights[0].triu(1).any()  # causal
            assert (weights[0].sum(-1) - 1).abs().max() <= ATOL


@torch.no_grad()
def test_other_implementations_warn_once_and_give_none(model, monkeypatch):
    heard, logger = [], logging.get_logger(GLM4VForCausalLM.__module__)
    logger.warning_once.cache_clear()
    monkeypatch.setattr(logger, "warning", heard.append)
    model(**rows())
    assert not heard
    for _ in range(2):
        assert model(**rows(), output_attentions=True).attentions is None
    assert len(heard) == 1 and "'sdpa' makes no weights" in heard[0]


def test_weights_have_gradients_and_recomputed_layers_give_none():
    model = tiny_model(attn_implementation="eager").train()
    output = model(**rows(), output_attentions=True)
    for weights in output.attentions:
        weights.retain_grad()
    output.logits.sum().backward()
    assert all(weights.grad.abs().sum() > 0 for weights in output.attentions)
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="output_attentions=True in training, where 2 of 2 layers"):
        model(**rows(), output_attentions=True)
    assert model.eval()(**rows(), output_attentions=True).attentions is not None


@torch.no_grad()
def test_attentions_cover_the_room_of_a_static_cache(eager_model):
    options = drawing(3) | {"output_attentions": True, "return_dict_in_generate": True}
    want = eager_model.generate(**rows(), **options).attentions
    got = eager_model.generate(**rows(), **options, cache_implementation="static").attentions
    assert [step[0].shape[-1] for step in want] == [13, 14, 15]
    for static, dynamic in zip(got, want, strict=True):
        held = dynamic[0].shape[-1]
        assert static[0].shape[-1] == 15  # 13 of the prompt, and two tokens: the last is not cached
        assert (static[0][..., :held] - dynamic[0]).abs().max() <= ATOL
        assert not static[0][..., held:].any()


# Features of images


@torch.no_grad()
def test_image_features_have_the_type_of_this_transformers(model):
    pixels, vision = pictures(2), model.config.vision
    want = model.transformer.vision(pixels)
    for asked in (model, model.transformer):
        got = asked.get_image_features(pixel_values=pixels)
        if SINCE_5:
            assert isinstance(got, BaseModelOutputWithPooling)
            assert got.last_hidden_state.shape == (2, vision.num_positions, vision.hidden_size)
            assert got.hidden_states is None and got.attentions is None
        assert torch.equal(got.pooler_output if SINCE_5 else got, want)
        assert torch.equal(asked.get_image_features(pixels, return_dict=True).pooler_output, want)
        assert torch.equal(asked.get_image_features(pixels, return_dict=False)[1], want)
    # forward takes them as they are given.
    inputs = rows()
    features = model.get_image_features(inputs["pixel_values"])
    want = model(**inputs).logits
    got = model(**inputs | {"pixel_values": None}, image_features=features)
    assert torch.equal(got.logits, want)


@torch.no_grad()
def test_image_features_with_the_towers_states_and_weights(eager_model):
    vision, states = eager_model.config.vision, []
    layers = eager_model.transformer.vision.transformer.layers
    handles = [layer.register_forward_hook(lambda m, i, o: states.append(o)) for layer in layers]
    output = eager_model.get_image_features(
        pictures(2), output_hidden_states=True, output_attentions=True, return_dict=True
    )
    for handle in handles:
        handle.remove()
    assert len(output.hidden_states) == len(layers) + 1
    for got, want in zip(output.hidden_states[1:], states, strict=True):
        assert torch.equal(got, want)
    assert torch.equal(output.last_hidden_state, states[-1])
    assert len(output.attentions) == len(layers)
    for weights in output.attentions:
        places = vision.num_positions
        assert weights.shape == (2, vision.num_heads, places, places)
        assert (weights.sum(-1) - 1).abs().max() <= ATOL


WRONG_FEATURES = {
    "in two forms": {"image_features": torch.zeros(1, 6, 64), "pixel_values": pictures(2)},
    "of another size": {"image_features": torch.zeros(1, 5, 64)},
}


@pytest.mark.parametrize("case", WRONG_FEATURES)
def test_features_that_do_not_fit_are_refused(model, case, words):
    with words.refused(ValueError, "image_features"):
        model(torch.tensor([grown_image()]), **WRONG_FEATURES[case])


# Early exit


@pytest.mark.skipif(
    Version("5.0") <= Version(transformers.__version__) < Version("5.3"),
    reason="early exit of transformers 5.0 to 5.2 calls its own get_candidates wrongly",
)
@torch.no_grad()
def test_early_exit_assists():
    model = tiny_model(num_layers=4)
    ids = torch.tensor([[*text(3, seed=1), *grown_image(), *text(4, seed=2)]])
    inputs = {"input_ids": ids, "pixel_values": pictures(1)}
    want = model.generate(**inputs, **drawing(8))
    passes = {0: 0, 3: 0}
    for number in passes:
        layer = model.transformer.encoder.layers[number]
        layer.register_forward_hook(lambda *call, n=number: passes.__setitem__(n, passes[n] + 1))
    got = model.generate(**inputs, **drawing(8), assistant_early_exit=2)
    assert torch.equal(got, want)
    assert passes[0] > passes[3] > 0  # some passes left the last layers out
    assert model.config.num_layers == 4


# Embeddings in the place of ids


@torch.no_grad()
def test_generate_continues_a_cache_with_embeddings(model, image):
    first = torch.tensor([[*text(3, seed=1), *image, *text(4, seed=2)]])
    images = pictures(1)
    more = torch.tensor([text(3, seed=5)])

    def filled() -> DynamicCache:
        cache = DynamicCache(config=model.config)
        model(first, pixel_values=images, past_key_values=cache)
        return cache

    whole = torch.cat((first, more), dim=1)
    want = model.generate(whole, pixel_values=images, **drawing(4))[0, -4:].tolist()
    cache, embeds = filled(), model.get_input_embeddings()(more)
    unread = embeds.new_zeros(1, cache.get_seq_length(), embeds.shape[-1])
    given = {"inputs_embeds": torch.cat((unread, embeds), dim=1), "past_key_values": cache}
    assert model.generate(**given, **drawing(4))[0].tolist() == want
    # By hand, where forward takes what is new only.
    logits = model(inputs_embeds=embeds, past_key_values=filled()).logits
    assert logits[0, -1].argmax().item() == want[0]


@pytest.mark.skipif(EMBEDS_ARE_CUT, reason="this generate hands over those that are not cached")
def test_embeddings_that_are_in_the_cache_already_are_refused(model):
    cache = DynamicCache(config=model.config)
    model(input_ids=torch.tensor([text(6)]), past_key_values=cache)
    embeds = torch.zeros(1, 3, model.config.hidden_size)
    inputs = torch.zeros(1, 0, dtype=torch.long)
    with pytest.raises(ValueError, match="inputs_embeds has 3 positions but the cache holds 6"):
        model.prepare_inputs_for_generation(inputs, past_key_values=cache, inputs_embeds=embeds)


def test_the_softmax_of_eager_attention_is_in_fp32_forward_and_backward():
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, n, 8).bfloat16() for n in (4, 64, 64))
    queries = [query.clone().requires_grad_() for _ in range(2)]
    layer = SimpleNamespace(num_key_value_groups=1)
    out, weights = eager_attention(layer, queries[0], key, value, None, scaling=1.0)
    want = (queries[1] @ key.transpose(-1, -2)).float().softmax(dim=-1).bfloat16()
    assert torch.equal(weights, want)
    for made in (out, (want @ value).transpose(1, 2)):
        made.square().sum().backward()
    assert torch.equal(queries[0].grad, queries[1].grad)
