"""The model as a module: one path for training and evaluation, tables, dtypes, initialisation."""

import inspect
import weakref

import pytest
import torch
from transformers import DynamicCache

from glm4v_patched.remote.loss import computes_loss
from glm4v_patched.remote.modeling_chatglm import (
    ChatGLMModel,
    GLM4VForCausalLM,
    RotaryEmbedding,
)
from glm4v_patched.remote.sharding import must_run_on_every_process
from tests.helpers.tiny import (
    FILL,
    grown_image,
    padded,
    pictures,
    text,
    three_id_image,
    tiny_config,
    tiny_model,
)

# fp32, a product with fewer rows. Measured 0 on this CPU.
ATOL = 1e-5


def batch(image=None) -> dict[str, torch.Tensor]:
    image = grown_image() if image is None else image
    inputs = padded([[*text(3, seed=1), *image, *text(4, seed=2)], text(5, seed=3)], "left")
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    return inputs | {"pixel_values": pictures(1), "labels": labels}


def test_training_and_evaluation_compute_the_same(image):
    model = tiny_model()
    with torch.no_grad():
        evaluated = model(**batch(image), use_cache=False)
        trained = model.train()(**batch(image))
    assert torch.equal(trained.loss, evaluated.loss)
    assert torch.equal(trained.logits, evaluated.logits)


def test_training_keeps_no_cache_unless_asked():
    model = tiny_model().train()
    assert model(**batch()).past_key_values is None
    assert model(**batch(), use_cache=True).past_key_values is not None
    cache = DynamicCache(config=model.config)
    output = model.eval()(**batch(), past_key_values=cache)
    assert output.past_key_values is cache
    assert cache.get_seq_length() == output.logits.shape[1]


@torch.no_grad()
def test_outputs_have_the_length_of_the_grown_rows_by_name_and_as_tuples(model):
    inputs = batch(three_id_image())
    length = inputs["input_ids"].shape[1] + 3
    named = model(**inputs, output_hidden_states=True)
    assert named.logits.shape == (2, length, 512)
    assert [state.shape for state in named.hidden_states] == [(2, length, 64)] * 3
    loss, logits, cache, states, images = model(
        **inputs, output_hidden_states=True, return_dict=False
    )
    assert torch.equal(loss, named.loss) and torch.equal(logits, named.logits)
    assert cache.get_seq_length() == length
    assert torch.equal(torch.stack(states), torch.stack(named.hidden_states))
    assert torch.equal(images, named.image_hidden_states)
    base = model.transformer(**inputs)
    assert base.labels.shape == (2, length) and base.last_hidden_state.shape == (2, length, 64)
    assert isinstance(model.transformer(**inputs, return_dict=False), tuple)


# Inputs that contradict each other

IDS = torch.tensor([text(4)])
PLACE = torch.tensor([[*text(3), *three_id_image()]])
CONTRADICTIONS = {
    "ids and embeddings": {"input_ids": IDS, "inputs_embeds": torch.zeros(1, 4, 64)},
    "both names": {"input_ids": PLACE, "pixel_values": pictures(1), "images": pictures(1)},
    "embeddings without a place": {
        "inputs_embeds": torch.zeros(1, 4, 64),
        "pixel_values": pictures(2),
    },
    "two sizes": {
        "input_ids": torch.tensor([[*text(3), *three_id_image() * 2]]),
        "images": [torch.zeros(3, 40, 56), torch.zeros(3, 56, 56)],
    },
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_inputs_that_contradict_each_other_are_refused(model, case, words):
    with words.refused(ValueError):
        model(**CONTRADICTIONS[case])


@pytest.mark.parametrize("name", ["pixel_values", "images"])
@torch.no_grad()
def test_no_images_may_be_said_in_any_way(model, name):
    ids = torch.tensor([text(6)])
    want = model(input_ids=ids).logits
    for empty in (None, [], [None], torch.zeros(0, 3, 56, 56)):
        assert torch.equal(model(input_ids=ids, **{name: empty}).logits, want)
    inputs = batch()
    image = inputs["pixel_values"][0]
    want = model(**inputs).logits
    for listed in ([image], [image, None]):
        assert torch.equal(model(**inputs | {"pixel_values": None, name: listed}).logits, want)


@torch.no_grad()
def test_images_by_their_place_in_the_published_code(model):
    inputs = batch(three_id_image())
    ids, mask, images = (inputs[name] for name in ("input_ids", "attention_mask", "pixel_values"))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for part in (model, model.transformer):
        one = part(ids[:1], pixel_values=images)[0]
        assert torch.equal(part(ids[:1], list(images))[0], one)
        assert torch.equal(part(ids[:1], images, past_key_values=DynamicCache())[0], one)
        both = part(ids, mask, pixel_values=images)[0]
        assert torch.equal(part(ids, [images[0], None], positions, mask)[0], both)
        words, rest = ids[1:, :6], (None, mask[1:, :6])
        for nothing in (None, []):
            assert torch.equal(part(words, nothing, *rest)[0], part(words, rest[1])[0])
        with pytest.raises(ValueError, match="1 images .* second place and 1 as images: give them"):
            part(ids[:1], images, images=images)


# Embeddings


@pytest.mark.parametrize("size", [520, 505])
def test_resizing_resizes_both_tables_and_keeps_old_logits(size):
    model = tiny_model()
    ids = torch.tensor([text(6)])
    with torch.no_grad():
        want = model(input_ids=ids).logits
    model.resize_token_embeddings(size)
    weight = model.get_output_embeddings().weight
    assert model.get_input_embeddings().weight.shape == weight.shape == (size, 64)
    assert model.config.vocab_size == model.config.padded_vocab_size == size
    assert computes_loss(model.get_output_embeddings())
    before = weight.detach().clone()
    model.post_init()
    assert torch.equal(weight, before) and weight.requires_grad  # and is not drawn anew
    with torch.no_grad():
        got = model(input_ids=ids).logits
    kept = min(size, 512)
    # torch sums a product of another width in another order: measured 1.9e-6.
    assert (got[..., :kept] - want[..., :kept]).abs().max() <= 1e-5
    plain, skipped = (model.train()(input_ids=ids, labels=ids, skip_logits=s) for s in (0, 1))
    assert skipped.loss.item() == pytest.approx(plain.loss.item(), abs=1e-5)
    if size > 515:
        assert model(input_ids=torch.tensor([[1, 515]])).logits.shape == (1, 2, size)


# Dtypes


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_model_computes_in_the_dtype_of_its_weights(dtype):
    model = tiny_model(dtype)
    output = model(**batch(), output_hidden_states=True)
    assert {x.dtype for x in (output.logits, *output.hidden_states)} == {dtype}
    assert output.past_key_values.layers[0].keys.dtype == dtype
    assert output.loss.dtype == torch.float32
    output.loss.backward()
    assert all(p.grad.isfinite().all() and p.grad.dtype == dtype for p in model.parameters())


def test_autocast_trains_fp32_weights_in_bf16():
    model = tiny_model().train()
    want = model(**batch()).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**batch()).loss
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(want.item(), abs=0.1)
    assert all(p.grad.dtype == torch.float32 and p.grad.norm() > 0 for p in model.parameters())


def test_rotary_tables_are_rounded_to_the_dtype_unless_kept_in_fp32():
    positions = torch.arange(100)[None]
    exact = RotaryEmbedding(tiny_config(rope_in_fp32=True))(positions, torch.bfloat16)
    rotary = RotaryEmbedding(tiny_config())
    rotary.inv_freq.zero_()  # which a checkpoint may hold rounded: it is not read
    for table, kept in zip(rotary(positions, torch.bfloat16), exact, strict=True):
        assert kept.dtype == torch.float32 and torch.equal(table, kept.bfloat16())


# Initialisation


def initialised(seed: int, cls=GLM4VForCausalLM, **changes):
    torch.manual_seed(seed)
    return cls._from_config(tiny_config(**changes))


@pytest.mark.parametrize("cls", [GLM4VForCausalLM, ChatGLMModel])
def test_new_weights_are_normal_biases_zero_and_norms_one(cls):
    model, again = (initialised(0, cls, initializer_range=0.1) for _ in range(2))
    repeated = dict(again.named_parameters())
    for name, value in model.named_parameters():
        assert torch.equal(value, repeated[name]), name
        if "norm" in name:
            assert (value == (1 if name.endswith("weight") else 0)).all(), name
        elif name.endswith("bias"):
            assert (value == 0).all(), name
        else:
            # The smallest has 32 numbers, whose deviation is off by 1 / sqrt(64).
            assert value.std().item() == pytest.approx(0.1, rel=0.5), name
            assert value.mean().abs() < 0.1, name


# Work that is not done


def test_text_batches_do_not_run_the_tower_in_a_single_process():
    model = tiny_model().train()
    inputs = padded([text(4), text(6)], "left")
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert not must_run_on_every_process(model.transformer.vision)
    assert all(p.grad is None for p in model.transformer.vision.parameters())


@pytest.fixture
def others_wait(monkeypatch):
    names = ChatGLMModel._merge_images.__globals__
    monkeypatch.setitem(names, "must_run_on_every_process", lambda module: True)


@pytest.mark.parametrize("use_reentrant", [None, True])
def test_a_blank_image_touches_every_vision_parameter_and_changes_nothing(
    use_reentrant, others_wait
):
    inputs = padded([text(4), text(6)], "left")
    model = tiny_model().train()
    want = model(**inputs, image_features=torch.zeros(0, 6, 64)).logits  # which leaves it out
    if use_reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    output = model(**inputs, labels=inputs["input_ids"])
    assert torch.equal(output.logits, want)
    output.loss.backward()
    for name, parameter in model.transformer.vision.named_parameters():
        assert parameter.grad is not None and (parameter.grad == 0).all(), name


@torch.no_grad()
def test_no_blank_image_follows_a_cache(others_wait):
    model, runs = tiny_model(), []
    model.transformer.vision.register_forward_pre_hook(lambda *call: runs.append(call))
    cache = model(input_ids=torch.tensor([text(4)]), use_cache=True).past_key_values
    model(input_ids=torch.tensor([text(2)]), past_key_values=cache)
    assert len(runs) == 1


@torch.no_grad()
@pytest.mark.parametrize("asked", [False, True], ids=["not asked for", "asked for"])
def test_layers_inputs_are_kept_only_when_asked_for(asked):
    # Kept, they are as many times the hidden states of all rows as there are layers.
    model = tiny_model(num_layers=5)
    states, alive = [], []

    def count(layer, inputs, output) -> None:
        alive[:] = [state() is not None for state in states]
        states.append(weakref.ref(output))

    for layer in model.transformer.encoder.layers:
        layer.register_forward_hook(count)
    output = model(**batch(), output_hidden_states=asked or None)
    assert (output.hidden_states is not None) is asked
    # The last layer's own input is in use.
    assert alive == [asked, asked, asked, True]


# Keywords


def test_a_keyword_that_it_does_not_know_is_refused(model):
    for called in (model, model.transformer):
        for name in ("atention_mask", "token_type_ids"):
            with pytest.raises(ValueError, match=f"forward was given {name}, which .* it takes in"):
                called(input_ids=torch.tensor([text(4)]), **{name: torch.ones(1, 4)})


@torch.no_grad()
def test_token_types_that_say_where_images_are_are_taken():
    model = tiny_model(image_token_id=FILL)
    ids = torch.tensor([[*text(2), *grown_image(), *text(3)]])
    given = {"input_ids": ids, "pixel_values": pictures(1)}
    types = (ids == FILL).int()
    assert torch.equal(model(**given, token_type_ids=types).logits, model(**given).logits)
    for others in (1 - types, types[:, :-1]):
        with pytest.raises(ValueError, match="forward was given token_type_ids, which"):
            model(**given, token_type_ids=others)


@torch.no_grad()
def test_what_frameworks_pass_on_is_taken(model):
    ids = torch.tensor([text(6)])
    ends = torch.tensor([0, 6], dtype=torch.int32)
    packed = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 6, "max_length_k": 6}
    got = model(
        input_ids=ids,
        **packed,
        seq_idx=torch.zeros(1, 6, dtype=torch.int32),
        cache_position=torch.arange(6),
        output_attentions=False,
        return_dict=True,
        use_cache=False,
        num_items_in_batch=None,
        prompt_length=None,
    )
    assert torch.equal(got.logits, model(input_ids=ids).logits)


# Losses that are computed outside


def test_hidden_states_of_rows_that_grow_are_refused_in_training_and_named_once_else(caplog):
    """A reward model reads its score where the mask of the rows as given ends: inside an image."""
    model = tiny_model().train()
    with pytest.raises(ValueError, match="rows of 10 ids take 13 positions.*give grown rows"):
        model(**batch(three_id_image()), output_hidden_states=True)
    assert model(**batch(three_id_image())).loss.isfinite()
    model.eval()(**batch(grown_image()), output_hidden_states=True)
    assert not caplog.records
    for image in (three_id_image(), [7, *three_id_image()]):
        model(**batch(image), output_hidden_states=True)
    (record,) = caplog.records
    assert "rows of 10 ids take 13 positions" in record.getMessage()


# Attention implementations


@pytest.mark.parametrize("before, after", [("sdpa", "eager"), ("eager", "sdpa")])
@torch.no_grad()
def test_set_attn_implementation_reaches_both_towers(before, after, monkeypatch):
    model = tiny_model(attn_implementation=before)
    want = model(**batch()).logits
    assert model._can_set_attn_implementation() and model.transformer._can_set_attn_implementation()
    model.set_attn_implementation(after)
    used = []
    for part in (model, model.transformer.vision):
        module = inspect.getmodule(type(part))
        attend = module.attend

        def noted(module, query, key, value, mask, implementation, attend=attend, **kwargs):
            used.append((type(module).__name__, implementation))
            return attend(module, query, key, value, mask, implementation, **kwargs)

        monkeypatch.setattr(module, "attend", noted)
    got = model(**batch()).logits
    assert set(used) == {("Attention", after), ("SelfAttention", after)}
    valid = batch()["attention_mask"].bool()
    assert (got[valid] - want[valid]).abs().max() <= ATOL
