"""Every way to generate that transformers has: its outputs, caches and beginnings.

What is drawn from rows with images, padding and begin ids is in test_generation.py.
"""

import pytest
import torch
from transformers import CompileConfig, DynamicCache, GenerationMixin, StaticCache
from transformers.cache_utils import Cache, QuantizedLayer

from tests.helpers.tiny import (
    grown_image,
    padded,
    pictures,
    text,
    three_id_image,
    tiny_model,
)
from tests.remote.test_sequence_classification import tiny_classifier

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
IN_EVERY_MODE = pytest.mark.parametrize("mode", MODES)
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
@IN_EVERY_MODE
def test_every_mode_draws_the_same_without_a_cache(model, image, mode):
    batch = batch_of(image)
    want = generated(model, batch, mode, output_logits=True)
    got = generated(model, batch, mode, output_logits=True, use_cache=False)
    assert torch.equal(got.sequences, want.sequences)
    assert got.past_key_values is None
    for one, other in zip(got.logits, want.logits, strict=True):
        assert (one - other).abs().max() <= ATOL


@FORMS
@IN_EVERY_MODE
def test_outputs_of_every_step(model, image, mode):
    batch = batch_of(image)
    names = ("scores", "logits", "attentions", "hidden_states")
    output = generated(model, batch, mode, **{f"output_{name}": True for name in names})
    options, config = MODES[mode], model.config
    answers = 2 * options.get("num_return_sequences", 1)
    rows = 2 * options.get("num_beams", options.get("num_return_sequences", 1))
    length = batch["input_ids"].shape[1]
    assert output.sequences.shape == (answers, length + STEPS)
    assert all(len(output[name]) == STEPS for name in names)
    before = model(**batch).logits.shape[1]
    for step in range(STEPS):
        new = before if step == 0 else 1
        assert output.scores[step].shape == output.logits[step].shape == (rows, 512)
        assert len(output.hidden_states[step]) == config.num_hidden_layers + 1
        assert {s.shape for s in output.hidden_states[step]} == {(rows, new, config.hidden_size)}
        assert len(output.attentions[step]) == config.num_hidden_layers
        wanted = rows, config.num_attention_heads, new, before + step
        assert {tuple(weights.shape) for weights in output.attentions[step]} == {wanted}
    cache = output.past_key_values
    assert isinstance(cache, DynamicCache) and cache.get_seq_length() == before + STEPS - 1
    wanted = rows, config.num_key_value_heads, before + STEPS - 1, config.kv_channels
    for layer in cache.layers:
        assert tuple(layer.keys.shape) == tuple(layer.values.shape) == wanted


@FORMS
def test_scores_are_the_log_probabilities_of_the_answers(model, image):
    """Of a whole pass over prompt and answer, whose ids generation drew."""
    batch = batch_of(image)
    kept = {"output_scores": True, "output_logits": True, "suppress_tokens": []}
    output = generated(model, batch, "greedy", **kept)
    got = model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
    whole = batch | {"input_ids": output.sequences}
    whole["attention_mask"] = torch.nn.functional.pad(batch["attention_mask"], (0, STEPS), value=1)
    prompt_length = batch["input_ids"].shape[1]
    with torch.no_grad():
        rows = model.prepare_inputs_for_generation(**whole, prompt_length=prompt_length)
        logits = model(**rows, use_cache=False).logits[:, -STEPS - 1 : -1]
    answers = output.sequences[:, -STEPS:, None]
    want = logits.log_softmax(dim=-1).gather(-1, answers)[..., 0]
    assert (got - want).abs().max() <= ATOL


@pytest.mark.parametrize("image", [None, grown_image()], ids=["text", "grown"])
@pytest.mark.parametrize("by", ["model", "lookup"])
def test_assisted_sampling_of_the_best_is_greedy(model, by, image):
    batch = batch_of(image)
    row = {"input_ids": batch["input_ids"][1:]}
    if image is not None:
        row["pixel_values"] = batch["pixel_values"][1:]
    options = FIXED | {"do_sample": True, "top_k": 1, "eos_token_id": 498}
    options |= {"assistant_model": model} if by == "model" else {"prompt_lookup_num_tokens": 2}
    got = model.generate(**row, **options)
    assert torch.equal(got, model.generate(**row, **(GREEDY | {"eos_token_id": 498})))


@pytest.mark.parametrize("image", [None, grown_image()], ids=["text", "grown"])
def test_prompt_lookup_stops_at_an_ending_id(model, image):
    batch = batch_of(image)
    row = {"input_ids": batch["input_ids"][1:]}
    if image is not None:
        row["pixel_values"] = batch["pixel_values"][1:]
    answer = model.generate(**row, **GREEDY)[0, -STEPS:].tolist()
    # The prompt says the answer already, so that several ids are accepted at once.
    row["input_ids"] = torch.cat((torch.tensor([answer]), row["input_ids"]), dim=1)
    answer = model.generate(**row, **GREEDY)[0, -STEPS:].tolist()
    ends = GREEDY | {"eos_token_id": answer[2]}
    got = model.generate(**row, **ends, prompt_lookup_num_tokens=4)
    stop = answer.index(answer[2]) + 1
    assert got[0, row["input_ids"].shape[1] :].tolist() == answer[:stop]


@FORMS
@pytest.mark.parametrize("with_images", [True, False], ids=["images again", "no images"])
def test_an_answer_goes_on_from_its_cache(model, image, with_images):
    batch = batch_of(image)
    want = model.generate(**batch, **GREEDY)
    first = model.generate(
        **batch, **(GREEDY | {"max_new_tokens": 2}), return_dict_in_generate=True
    )
    more = batch | {"input_ids": first.sequences, "past_key_values": first.past_key_values}
    more["attention_mask"] = torch.nn.functional.pad(batch["attention_mask"], (0, 2), value=1)
    if not with_images:
        more.pop("pixel_values", None)
    assert torch.equal(model.generate(**more, **(GREEDY | {"max_new_tokens": STEPS - 2})), want)


# Caches


class Unrounded(QuantizedLayer):
    """A layer of a quantized cache, but for the rounding: that is of optional packages."""

    def _quantize(self, tensor, axis):
        return tensor.clone()

    def _dequantize(self, quantized):
        return quantized


@FORMS
@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_a_quantized_cache_keeps_only_its_last_keys(model, image, mode):
    """Its rows cannot be known again by their keys; generate says the positions."""
    batch = batch_of(image)
    layers = [Unrounded(residual_length=3) for _ in range(model.config.num_hidden_layers)]
    got = generated(model, batch, mode, past_key_values=Cache(layers=layers))
    assert torch.equal(got.sequences, generated(model, batch, mode).sequences)
    length = got.past_key_values.get_seq_length()
    assert all(layer.keys.numel() == 0 or layer.keys.shape[2] < length for layer in layers)


@FORMS
@IN_EVERY_MODE
def test_a_static_cache_in_every_mode(model, image, mode):
    batch = batch_of(image)
    cache = StaticCache(config=model.config, max_cache_len=40)
    got = generated(model, batch, mode, past_key_values=cache)
    assert torch.equal(got.sequences, generated(model, batch, mode).sequences)
    assert int(cache.get_seq_length()) == model(**batch).logits.shape[1] + STEPS - 1


def test_a_compiled_step_with_a_static_cache():
    """generate compiles it by itself on a GPU."""
    torch._dynamo.reset()
    model, batch = tiny_model(num_layers=1), batch_of(grown_image())
    options = GREEDY | {"max_new_tokens": 4}
    want = model.generate(**batch, **options)
    compiling = CompileConfig(backend="eager", mode=None)
    compiling._compile_all_devices = True
    options |= {"cache_implementation": "static", "compile_config": compiling}
    assert torch.equal(model.generate(**batch, **options), want)
    assert model._compiled_call is not None
    torch._dynamo.reset()


@FORMS
def test_only_the_last_logits_are_made(model, image):
    lengths, layer = [], model.transformer.output_layer
    hook = layer.register_forward_hook(lambda _, given, made: lengths.append(made.shape[1]))
    try:
        model.generate(**batch_of(image), **GREEDY)
    finally:
        hook.remove()
    assert lengths == [1] * STEPS


# What a row begins with


@pytest.mark.parametrize("image", [None, grown_image()], ids=["text", "grown"])
@pytest.mark.parametrize(
    "options",
    [{}, {"use_cache": False}, {"cache_implementation": "static"}, {"num_beams": 2}],
    ids=["a cache", "none", "static", "beams"],
)
def test_embeddings_generate_as_their_ids(model, image, options):
    batch = batch_of(image)
    want = model.generate(**batch, **(GREEDY | options))[:, -STEPS:]
    ids = batch.pop("input_ids")
    embedded = batch | {"inputs_embeds": model.get_input_embeddings()(ids).detach()}
    got = model.generate(**embedded, **(GREEDY | options))
    assert torch.equal(got, want), "without ids only what is new is given back"
    got = model.generate(input_ids=ids, **embedded, **(GREEDY | options))
    assert torch.equal(got[:, : ids.shape[1]], ids) and torch.equal(got[:, -STEPS:], want)
    changed = embedded | {"inputs_embeds": embedded["inputs_embeds"].roll(1, dims=0)}
    if image is None:
        assert not torch.equal(model.generate(**changed, **(GREEDY | options)), want)


def test_without_ids_an_answer_begins_with_the_beginning_id(model):
    got = model.generate(bos_token_id=3, **GREEDY)
    assert torch.equal(got, model.generate(torch.tensor([[3]]), **GREEDY))
    with pytest.raises(ValueError, match="bos_token_id"):
        model.generate(**GREEDY)


def test_a_keyword_that_nothing_takes_is_refused(model):
    with pytest.raises(ValueError, match="no_such_option"):
        model.generate(**batch_of(None), **GREEDY, no_such_option=1)


def test_only_the_language_model_generates(model):
    assert isinstance(model, GenerationMixin) and model.can_generate()
    for other in (model.transformer, tiny_classifier()):
        assert not isinstance(other, GenerationMixin) and not other.can_generate()
