"""What others expect of every model of transformers: attentions, image features, early exit."""

import copy
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
from tests.helpers.tiny import grown_image, padded, pictures, text, three_id_image, tiny_model

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


# Attentions


@torch.no_grad()
@pytest.mark.parametrize("image", [three_id_image(), grown_image()], ids=["three ids", "grown"])
def test_eager_attention_gives_its_weights(eager_model, image):
    output = eager_model(**rows(image), output_attentions=True)
    length = output.logits.shape[1]
    heads = eager_model.config.num_attention_heads
    assert len(output.attentions) == eager_model.config.num_layers
    for weights in output.attentions:
        assert weights.shape == (2, heads, length, length)
        assert not weights[0].triu(1).any()  # causal
        assert (weights[0].sum(-1) - 1).abs().max() <= ATOL
    assert eager_model(**rows(image)).attentions is None


@torch.no_grad()
def test_weights_are_those_the_output_was_made_with(eager_model):
    """From a layer's weights and values follows what its attention adds."""
    ids = torch.tensor([text(6)])
    attention = eager_model.transformer.encoder.layers[0].self_attention
    seen = {}
    handles = [
        attention.query_key_value.register_forward_hook(lambda m, i, o: seen.update(fused=o)),
        attention.dense.register_forward_hook(lambda m, i, o: seen.update(dense=i[0])),
    ]
    weights = eager_model(input_ids=ids, output_attentions=True).attentions[0]
    for handle in handles:
        handle.remove()
    value = seen["fused"].split(attention.split_sizes, dim=-1)[2]
    value = value.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
    value = value.repeat_interleave(attention.num_key_value_groups, dim=1)
    assert ((weights @ value).transpose(1, 2).flatten(2) - seen["dense"]).abs().max() <= ATOL


@torch.no_grad()
def test_attentions_are_asked_for_in_the_config_too():
    model = tiny_model(attn_implementation="eager")
    model.config.output_attentions = True
    assert len(model(**rows()).attentions) == len(model.transformer(**rows()).attentions) == 2


@torch.no_grad()
def test_attentions_cover_the_cache(eager_model):
    cache = DynamicCache(config=eager_model.config)
    eager_model(input_ids=torch.tensor([text(5)]), past_key_values=cache)
    ids = torch.tensor([text(2, seed=4)])
    output = eager_model(input_ids=ids, past_key_values=cache, output_attentions=True)
    assert output.attentions[0].shape[-2:] == (2, 7)


def test_weights_have_gradients(eager_model):
    output = eager_model(**rows(), output_attentions=True)
    for weights in output.attentions:
        weights.retain_grad()
    output.logits.sum().backward()
    assert all(weights.grad.abs().sum() > 0 for weights in output.attentions)


def warnings_of(call) -> list[str]:
    heard = []
    logger = logging.get_logger(GLM4VForCausalLM.__module__)
    logger.warning_once.cache_clear()
    original = logger.warning
    logger.warning = heard.append
    try:
        call()
    finally:
        logger.warning = original
    return heard


@torch.no_grad()
def test_other_implementations_warn_and_give_none(model):
    outputs = []
    heard = warnings_of(lambda: outputs.append(model(**rows(), output_attentions=True)))
    assert outputs[0].attentions is None
    assert len(heard) == 1 and "'sdpa' makes no weights" in heard[0]
    assert not warnings_of(lambda: model(**rows()))


def test_recomputed_layers_give_no_weights():
    model = tiny_model(attn_implementation="eager").train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="output_attentions=True in training, where 2 of 2 layers"):
        model(**rows(), output_attentions=True)
    assert model.eval()(**rows(), output_attentions=True).attentions is not None


@torch.no_grad()
def test_generate_gives_attentions_of_every_step(eager_model):
    output = eager_model.generate(
        **rows(),
        max_new_tokens=3,
        do_sample=False,
        output_attentions=True,
        return_dict_in_generate=True,
        eos_token_id=None,
    )
    lengths = [step[0].shape[-1] for step in output.attentions]
    assert lengths == [13, 14, 15]


@torch.no_grad()
def test_attentions_cover_the_room_of_a_static_cache(eager_model):
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    options |= {"output_attentions": True, "return_dict_in_generate": True}
    want = eager_model.generate(**rows(), **options).attentions
    got = eager_model.generate(**rows(), **options, cache_implementation="static").attentions
    for static, dynamic in zip(got, want, strict=True):
        held = dynamic[0].shape[-1]
        assert static[0].shape[-1] == 15  # 13 of the prompt, and two tokens: the last is not cached
        assert (static[0][..., :held] - dynamic[0]).abs().max() <= ATOL
        assert not static[0][..., held:].any()


@torch.no_grad()
def test_assisted_decoding_gives_attentions(eager_model):
    ids = torch.tensor([text(6)])
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    output = eager_model.generate(
        input_ids=ids,
        assistant_model=copy.deepcopy(eager_model),
        output_attentions=True,
        return_dict_in_generate=True,
        **options,
    )
    assert output.sequences.tolist() == eager_model.generate(input_ids=ids, **options).tolist()
    assert [step[0].shape[-1] for step in output.attentions] == [6, 7, 8, 9, 10]


# Features of images


@torch.no_grad()
def test_image_features_have_the_type_of_this_transformers(model):
    pixels = pictures(2)
    want = model.transformer.vision(pixels)
    for asked in (model, model.transformer):
        got = asked.get_image_features(pixel_values=pixels)
        if SINCE_5:
            assert isinstance(got, BaseModelOutputWithPooling)
            assert torch.equal(got.pooler_output, want)
            vision = model.config.vision
            assert got.last_hidden_state.shape == (2, vision.num_positions, vision.hidden_size)
            assert got.hidden_states is None and got.attentions is None
        else:
            assert torch.equal(got, want)
        assert torch.equal(asked.get_image_features(pixels, return_dict=True).pooler_output, want)
        assert torch.equal(asked.get_image_features(pixels, return_dict=False)[1], want)


@torch.no_grad()
def test_image_features_with_the_towers_states_and_weights(eager_model):
    vision = eager_model.config.vision
    states = []
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


@torch.no_grad()
def test_forward_takes_image_features_as_they_are_given(model):
    inputs = rows()
    want = model(**inputs).logits
    features = model.get_image_features(inputs.pop("pixel_values"))
    assert torch.equal(model(**inputs, image_features=features).logits, want)


# Early exit


@pytest.mark.skipif(
    Version("5.0") <= Version(transformers.__version__) < Version("5.3"),
    reason="early exit of transformers 5.0 to 5.2 calls its own get_candidates wrongly",
)
@torch.no_grad()
@pytest.mark.parametrize("with_image", [False, True], ids=["text", "image"])
def test_early_exit_assists(with_image):
    model = tiny_model(num_layers=4)
    inputs = {"input_ids": torch.tensor([text(6)])}
    if with_image:
        ids = torch.tensor([[*text(3, seed=1), *grown_image(), *text(4, seed=2)]])
        inputs = {"input_ids": ids, "pixel_values": pictures(1)}
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    want = model.generate(**inputs, **options)
    lengths = []
    layer = model.transformer.encoder.layers[0]
    handle = layer.register_forward_hook(lambda m, i, o: lengths.append(o.shape[1]))
    last = []
    other = model.transformer.encoder.layers[-1].register_forward_hook(
        lambda m, i, o: last.append(o.shape[1])
    )
    got = model.generate(**inputs, **options, assistant_early_exit=2)
    handle.remove(), other.remove()
    assert got.tolist() == want.tolist()
    assert len(lengths) > len(last) > 0  # some passes left the last layers out
    assert model.config.num_layers == 4


# Embeddings in the place of ids


@torch.no_grad()
@pytest.mark.parametrize("image", [None, three_id_image(), grown_image()])
def test_generate_continues_a_cache_with_embeddings(model, image):
    """transformers wants the embeddings of whole rows there; those in the cache are not read."""
    first = {"input_ids": torch.tensor([text(6, seed=1)])}
    if image is not None:
        ids = torch.tensor([[*text(3, seed=1), *image, *text(4, seed=2)]])
        first = {"input_ids": ids, "pixel_values": pictures(1)}
    more = torch.tensor([text(3, seed=5)])
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}

    def filled() -> DynamicCache:
        cache = DynamicCache(config=model.config)
        model(**first, past_key_values=cache)
        return cache

    whole = first | {"input_ids": torch.cat((first["input_ids"], more), dim=1)}
    want = model.generate(**whole, **options)[0, -4:].tolist()
    cache = filled()
    embeds = model.get_input_embeddings()(more)
    unread = embeds.new_zeros(1, cache.get_seq_length(), embeds.shape[-1])
    got = model.generate(
        inputs_embeds=torch.cat((unread, embeds), dim=1), past_key_values=cache, **options
    )
    assert got[0].tolist() == want
    # By hand, where forward takes what is new only.
    logits = model(inputs_embeds=embeds, past_key_values=filled()).logits
    assert logits[0, -1].argmax().item() == want[0]


@pytest.mark.skipif(EMBEDS_ARE_CUT, reason="this generate hands over those that are not cached")
def test_embeddings_that_are_in_the_cache_already_are_refused(model):
    cache = DynamicCache(config=model.config)
    model(input_ids=torch.tensor([text(6)]), past_key_values=cache)
    embeds = torch.zeros(1, 3, model.config.hidden_size)
    with pytest.raises(ValueError, match="inputs_embeds has 3 positions but the cache holds 6"):
        inputs = torch.zeros(1, 0, dtype=torch.long)
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
