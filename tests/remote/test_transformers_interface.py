"""What others expect of every model of transformers: attentions, image features, early exit."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache
from transformers.utils import logging

from glm4v_patched.remote.attention import eager_attention
from glm4v_patched.remote.keywords import EMBEDS_ARE_CUT
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.tiny import grown_image, pictures, text, tiny_model
from tests.remote.rows import two_rows

# fp32, the same sums in another order. Measured 2e-7 on this CPU.
ATOL = 1e-5
SINCE_5 = Version(transformers.__version__).major >= 5


@pytest.fixture(scope="module")
def eager_model() -> GLM4VForCausalLM:
    return tiny_model(attn_implementation="eager")


def drawing(number: int) -> dict:
    return {"max_new_tokens": number, "do_sample": False, "eos_token_id": None}


# Attentions


@torch.no_grad()
def test_eager_attention_gives_its_weights_where_asked_for(image):
    model = tiny_model(attn_implementation="eager")
    assert model(**two_rows(image)).attentions is None
    asked = model(**two_rows(image), output_attentions=True)
    model.config.output_attentions = True
    for output in (asked, model(**two_rows(image)), model.transformer(**two_rows(image))):
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
    model(**two_rows())
    assert not heard
    for _ in range(2):
        assert model(**two_rows(), output_attentions=True).attentions is None
    assert len(heard) == 1 and "'sdpa' makes no weights" in heard[0]


def test_weights_have_gradients_and_recomputed_layers_give_none():
    model = tiny_model(attn_implementation="eager").train()
    output = model(**two_rows(), output_attentions=True)
    for weights in output.attentions:
        weights.retain_grad()
    output.logits.sum().backward()
    assert all(weights.grad.abs().sum() > 0 for weights in output.attentions)
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="output_attentions=True in training, where 2 of 2 layers"):
        model(**two_rows(), output_attentions=True)
    assert model.eval()(**two_rows(), output_attentions=True).attentions is not None


@torch.no_grad()
def test_attentions_cover_the_room_of_a_static_cache(eager_model):
    options = drawing(3) | {"output_attentions": True, "return_dict_in_generate": True}
    want = eager_model.generate(**two_rows(), **options).attentions
    got = eager_model.generate(**two_rows(), **options, cache_implementation="static").attentions
    assert [step[0].shape[-1] for step in want] == [13, 14, 15]
    for static, dynamic in zip(got, want, strict=True):
        held = dynamic[0].shape[-1]
        assert static[0].shape[-1] == 15  # 13 of the prompt, and two tokens: the last is not cached
        assert (static[0][..., :held] - dynamic[0]).abs().max() <= ATOL
        assert not static[0][..., held:].any()


# Features of images


@torch.no_grad()
def test_image_features_have_the_type_of_this_transformers_and_forward_takes_them(model):
    want = model.transformer.vision(pictures(2))
    for asked in (model, model.transformer):
        got = asked.get_image_features(pixel_values=pictures(2))
        assert torch.equal(got.pooler_output if SINCE_5 else got, want)
        assert torch.equal(asked.get_image_features(pictures(2), return_dict=False)[1], want)
    inputs = two_rows()
    features = model.get_image_features(inputs["pixel_values"])
    got = model(**inputs | {"pixel_values": None}, image_features=features)
    assert torch.equal(got.logits, model(**inputs).logits)
    row = torch.tensor([grown_image()])
    for wrong in (
        {"pixel_values": pictures(2), "image_features": want[:1]},
        {"image_features": want[:1, 1:]},
    ):
        with pytest.raises(ValueError, match="image_features"):
            model(row, **wrong)


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
    assert all(map(torch.equal, output.hidden_states[1:], states)) and len(states) == len(layers)
    assert torch.equal(output.last_hidden_state, states[-1])
    shape = 2, vision.num_heads, vision.num_positions, vision.num_positions
    assert [weights.shape for weights in output.attentions] == [shape] * len(layers)


# Early exit


def test_early_exit_assists():
    model, inputs = tiny_model(num_layers=4), two_rows()
    del inputs["labels"]
    inputs = {name: value[:1] for name, value in inputs.items()}
    want, passes = model.generate(**inputs, **drawing(8)), []
    for number, layer in enumerate(model.transformer.encoder.layers):
        layer.register_forward_hook(lambda *call, n=number: passes.append(n))
    got = model.generate(**inputs, **drawing(8), assistant_early_exit=2)
    assert torch.equal(got, want)
    assert passes.count(0) > passes.count(3) > 0  # some passes left the last layers out


# Embeddings in the place of ids


@torch.no_grad()
def test_generate_continues_a_cache_with_embeddings(model, image):
    """transformers wants the embeddings of whole rows there; those in the cache are not read."""
    first = torch.tensor([[*text(3, seed=1), *image, *text(4, seed=2)]])
    more, cache = torch.tensor([text(3, seed=5)]), DynamicCache(config=model.config)
    whole = torch.cat((first, more), dim=1)
    want = model.generate(whole, pixel_values=pictures(1), **drawing(4))[0, -4:].tolist()
    model(first, pixel_values=pictures(1), past_key_values=cache)
    embeds = model.get_input_embeddings()(more)
    unread = embeds.new_zeros(1, cache.get_seq_length(), embeds.shape[-1])
    given = {"inputs_embeds": torch.cat((unread, embeds), dim=1), "past_key_values": cache}
    assert model.generate(**given, **drawing(4))[0].tolist() == want


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
