"""Every way to generate that transformers has: its outputs, caches and beginnings.

What is drawn from rows with images, padding and begin ids is in test_generation.py.
"""

import pytest
import torch
from transformers import StaticCache

from tests.helpers.tiny import (
    grown_image,
    padded,
    pictures,
    text,
    three_id_image,
    tiny_model,
)

# fp32, one position against a whole row. Measured 3.4e-6 on this CPU.
ATOL = 2e-5
STEPS = 6
FIXED = {"max_new_tokens": STEPS, "eos_token_id": None, "pad_token_id": 500}
GREEDY = FIXED | {"do_sample": False}
MODES = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 20, "num_return_sequences": 2},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "sampled beams": {"do_sample": True, "num_beams": 3, "top_k": 20},
}
FORMS = pytest.mark.parametrize(
    "image", [None, three_id_image(), grown_image()], ids=["text", "three ids", "grown"]
)


@pytest.fixture(scope="module")
def model():
    return tiny_model(attn_implementation="eager")


def batch_of(image: list[int] | None) -> dict[str, torch.Tensor]:
    """Two rows with unlike padding, of which the second has two images."""
    image = [] if image is None else image
    rows = [
        [*text(6, seed=1), *image, *text(3, seed=2)],
        [*image, *text(4, seed=3), *image, *text(2, seed=4)],
    ]
    batch = padded(rows, "left")
    return batch | {"pixel_values": pictures(3)} if image else batch


def generated(model, batch: dict, mode: str, **options):
    torch.manual_seed(0)
    return model.generate(**batch, **FIXED, **MODES[mode], return_dict_in_generate=True, **options)


@FORMS
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_draws_the_same_with_another_cache_and_without(model, image, mode):
    batch = batch_of(image)
    want = generated(model, batch, mode, output_logits=True)
    cache = StaticCache(model.config, 40)
    for options in ({"past_key_values": cache}, {"use_cache": False}):
        got = generated(model, batch, mode, output_logits=True, **options)
        assert torch.equal(got.sequences, want.sequences)
        for one, other in zip(got.logits, want.logits, strict=True):
            assert (one - other).abs().max() <= ATOL
    assert got.past_key_values is None
    assert int(cache.get_seq_length()) == model(**batch).logits.shape[1] + STEPS - 1


@FORMS
@pytest.mark.parametrize("mode", MODES)
def test_outputs_of_every_step(model, image, mode):
    batch, config = batch_of(image), model.config
    names = ("scores", "logits", "attentions", "hidden_states")
    lengths, layer = [], model.transformer.output_layer
    hook = layer.register_forward_hook(lambda _, given, made: lengths.append(made.shape[1]))
    output = generated(model, batch, mode, **{f"output_{name}": True for name in names})
    hook.remove()
    assert lengths == [1] * STEPS  # the last logits alone
    options = MODES[mode]
    rows = 2 * options.get("num_beams", options.get("num_return_sequences", 1))
    before = model(**batch).logits.shape[1]
    for step, new in enumerate([before] + [1] * (STEPS - 1)):
        weights = rows, config.num_attention_heads, new, before + step
        states = rows, new, config.hidden_size
        assert output.scores[step].shape == output.logits[step].shape == (rows, 512)
        assert [s.shape for s in output.hidden_states[step]] == [states] * (config.num_layers + 1)
        assert [w.shape for w in output.attentions[step]] == [weights] * config.num_layers
    wanted = rows, config.num_key_value_heads, before + STEPS - 1, config.kv_channels
    for layer in output.past_key_values.layers:
        assert tuple(layer.keys.shape) == tuple(layer.values.shape) == wanted


@FORMS
def test_an_answer_goes_on_from_its_cache(model, image):
    batch = batch_of(image)
    want = model.generate(**batch, **GREEDY)
    options = GREEDY | {"max_new_tokens": 2, "return_dict_in_generate": True}
    first = model.generate(**batch, **options)
    more = batch | {"input_ids": first.sequences, "past_key_values": first.past_key_values}
    more["attention_mask"] = torch.nn.functional.pad(batch["attention_mask"], (0, 2), value=1)
    assert torch.equal(model.generate(**more, **(GREEDY | {"max_new_tokens": STEPS - 2})), want)


# What a row begins with


@pytest.mark.parametrize("image", [None, grown_image()], ids=["text", "grown"])
@pytest.mark.parametrize(
    "options", [{"cache_implementation": "static"}, {"num_beams": 2, "num_return_sequences": 2}]
)
def test_embeddings_generate_as_their_ids(model, image, options):
    batch, options = batch_of(image), GREEDY | options
    want = model.generate(**batch, **options)[:, -STEPS:]
    ids = batch.pop("input_ids")
    embedded = batch | {"inputs_embeds": model.get_input_embeddings()(ids).detach()}
    got = model.generate(**embedded, **options)
    assert torch.equal(got, want), "without ids only what is new is given back"
    if "num_return_sequences" not in options:
        got = model.generate(input_ids=ids, **embedded, **options)
        assert torch.equal(got[:, : ids.shape[1]], ids) and torch.equal(got[:, -STEPS:], want)
