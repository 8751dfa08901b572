"""What others expect of every model of transformers: attentions, image features, embeddings."""

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
    for asked in (None, True, True):
        assert model(**two_rows(), output_attentions=asked).attentions is None
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


@torch.no_grad()
def test_generate_continues_a_cache_with_embeddings(model, image):
    """transformers wants the embeddings of whole rows there; those in the cache are not read."""
    first = torch.tensor([[*text(3, seed=1), *image, *text(4, seed=2)]])
    more, cache = torch.tensor([text(3, seed=5)]), DynamicCache(config=model.config)
    whole = torch.cat((first, more), dim=1)
    want = model.generate(whole, pixel_values=pictures(1), **drawing(4))[0, -4:].tolist()
    model(first, pixel_values=pictures(1), past_key_values=cache)
    embeds, held = model.get_input_embeddings()(more), cache.get_seq_length()
    if not EMBEDS_ARE_CUT:
        with pytest.raises(ValueError, match=f"has 3 positions but the cache holds {held}"):
            prepare = model.prepare_inputs_for_generation
            prepare(first[:, :0], past_key_values=cache, inputs_embeds=embeds)
    unread = embeds.new_zeros(1, held, embeds.shape[-1])
    given = {"inputs_embeds": torch.cat((unread, embeds), dim=1), "past_key_values": cache}
    assert model.generate(**given, **drawing(4))[0].tolist() == want


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
