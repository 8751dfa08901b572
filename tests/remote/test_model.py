"""The model as a module: one path for training and evaluation, tables, dtypes, initialisation."""

import inspect
import weakref

import pytest
import torch
from transformers import Cache, DynamicCache

from glm4v_patched.remote.loss import computes_loss
from glm4v_patched.remote.modeling_chatglm import (
    ChatGLMForConditionalGeneration,
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


@pytest.mark.parametrize("image", [three_id_image(), grown_image()], ids=["three ids", "grown"])
def test_training_and_evaluation_compute_the_same(model, image):
    with torch.no_grad():
        evaluated = model.eval()(**batch(image), use_cache=False)
        trained = model.train()(**batch(image))
    model.eval()
    assert torch.equal(trained.loss, evaluated.loss)
    assert torch.equal(trained.logits, evaluated.logits)


def test_training_keeps_no_cache_unless_asked():
    model = tiny_model().train()
    assert model(**batch()).past_key_values is None
    assert model(**batch(), use_cache=True).past_key_values is not None
    assert model.eval()(**batch()).past_key_values is not None


def test_the_published_class_name_is_an_alias():
    assert ChatGLMForConditionalGeneration is GLM4VForCausalLM


@torch.no_grad()
def test_outputs_have_the_length_of_the_grown_rows(model):
    inputs = batch(three_id_image())
    length = inputs["input_ids"].shape[1] + 3
    output = model(**inputs, output_hidden_states=True)
    assert output.logits.shape == (2, length, 512)
    assert len(output.hidden_states) == 3
    assert all(state.shape == (2, length, 64) for state in output.hidden_states)
    assert output.past_key_values.get_seq_length() == length
    base = model.transformer(**inputs)
    assert base.labels.shape == (2, length)
    assert base.last_hidden_state.shape == (2, length, 64)


@torch.no_grad()
def test_tuples_hold_what_the_named_output_holds(model):
    named = model(**batch(), output_hidden_states=True)
    positional = model(**batch(), output_hidden_states=True, return_dict=False)
    assert isinstance(positional, tuple) and len(positional) == 5
    assert torch.equal(positional[0], named.loss)
    assert torch.equal(positional[1], named.logits)
    assert isinstance(positional[2], Cache)
    assert torch.equal(torch.stack(positional[3]), torch.stack(named.hidden_states))
    assert torch.equal(positional[4], named.image_hidden_states)
    assert isinstance(model.transformer(**batch(), return_dict=False), tuple)
    assert model(**batch(), output_attentions=True).loss.item() == named.loss.item()


@torch.no_grad()
def test_logits_to_keep_are_the_last_ones(model):
    inputs = {name: value for name, value in batch().items() if name != "labels"}
    every = model(**inputs).logits
    assert torch.equal(model(**inputs, logits_to_keep=2).logits, every[:, -2:])
    kept = torch.tensor([1, 4])
    assert (model(**inputs, logits_to_keep=kept).logits - every[:, kept]).abs().max() <= ATOL


# Inputs that contradict each other


@pytest.mark.parametrize("both", [True, False])
def test_refuses_both_or_neither_of_ids_and_embeddings(model, both):
    ids = torch.tensor([text(4)])
    inputs = {"input_ids": ids, "inputs_embeds": torch.zeros(1, 4, 64)} if both else {}
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(**inputs)


def test_refuses_images_under_both_names(model):
    ids = torch.tensor([grown_image()])
    with pytest.raises(ValueError, match="pixel_values and images are two names"):
        model(input_ids=ids, pixel_values=pictures(1), images=pictures(1))


def test_refuses_images_with_embeddings(model):
    with pytest.raises(ValueError, match="2 images were given with inputs_embeds"):
        model(inputs_embeds=torch.zeros(1, 4, 64), pixel_values=pictures(2))


def test_refuses_a_cache_of_tuples(model):
    old = ((torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16)),) * 2
    with pytest.raises(ValueError, match="past_key_values is a tuple; give a Cache"):
        model(input_ids=torch.tensor([text(4)]), past_key_values=old)


@pytest.mark.parametrize("name", ["pixel_values", "images"])
@pytest.mark.parametrize("empty", [None, [], torch.zeros(0, 3, 56, 56)], ids=str)
@torch.no_grad()
def test_no_images_may_be_said_in_any_way(model, name, empty):
    ids = torch.tensor([text(6)])
    assert torch.equal(model(input_ids=ids, **{name: empty}).logits, model(input_ids=ids).logits)


@torch.no_grad()
def test_images_by_their_place_in_the_published_code(model):
    inputs = batch(three_id_image())
    ids, mask, images = (inputs[name] for name in ("input_ids", "attention_mask", "pixel_values"))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for part in (model, model.transformer):
        one = part(ids[:1], images)
        assert torch.equal(one[0], part(ids[:1], pixel_values=images)[0])
        both = part(ids, images, positions, mask)
        assert torch.equal(both[0], part(ids, mask, pixel_values=images)[0])
        given = part(ids[:1], images, past_key_values=DynamicCache())
        assert torch.equal(given[0], one[0])
        # Without pictures, too, and with pictures in a list.
        masked = part(ids, mask, position_ids=positions, pixel_values=images)
        assert torch.equal(part(ids[:1], list(images))[0], one[0])
        assert torch.equal(part(ids, [images[0], None], positions, mask)[0], masked[0])
        words, rest = ids[1:, :6], (None, None, mask[1:, :6])
        assert torch.equal(part(words, *rest)[0], part(words, mask[1:, :6])[0])
        assert torch.equal(part(words, [], *rest[1:])[0], part(words, mask[1:, :6])[0])
        with pytest.raises(ValueError, match="1 images .* second place and 1 as images: give them"):
            part(ids[:1], images, images=images)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(1, 3, 40, 40), r"shape \(1, 3, 40, 40\) but this model takes .*3, 56, 56"),
        (torch.zeros(3, 56, 56), r"shape \(3, 56, 56\); give \(number of images"),
        ([torch.zeros(3, 40, 56)], r"shape \(1, 3, 40, 56\) but this model takes"),
        (
            [torch.zeros(3, 40, 56), torch.zeros(3, 56, 56)],
            r"have 2 shapes, \(3, 40, 56\), \(3, 56, 56\): resize all",
        ),
        ([[torch.zeros(3, 56, 56)]], "images hold 1 of type list, not tensors"),
    ],
    ids=["another size", "one without its batch", "in a list", "two sizes", "a list of lists"],
)
def test_pictures_of_another_size_are_named_by_place_too(model, images, message):
    row = torch.tensor([[*text(3), *three_id_image() * (1 if len(images) != 2 else 2)]])
    with pytest.raises(ValueError, match=message):
        model(row, images)
    with pytest.raises(ValueError, match=message):
        model(row, images=images)


def test_refuses_a_mask_that_the_caller_grew(model):
    """As callers of the published code had to, in evaluation."""
    row = torch.tensor([[*text(3, seed=1), *three_id_image(), *text(4, seed=2)]])
    grown = torch.ones(1, row.shape[1] + 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"shape \(1, 13\) but input_ids \(1, 10\).*are grown in"):
        model(row, grown, pixel_values=pictures(1))


@pytest.mark.parametrize("empty_init", [True, False])
def test_empty_init_changes_nothing(empty_init, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    model = GLM4VForCausalLM.from_pretrained(tmp_path, empty_init=empty_init)
    wanted = tiny_model().state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
    made = GLM4VForCausalLM._from_config(tiny_config(), empty_init=empty_init)
    assert all(parameter.isfinite().all() for parameter in made.parameters())


def test_images_may_be_a_list(model):
    inputs = batch()
    want = model(**inputs).logits
    images = list(inputs.pop("pixel_values"))
    assert torch.equal(model(**inputs, images=images).logits, want)


# Embeddings


@pytest.mark.parametrize("side", ["left", "right"])
def test_embedded_text_equals_its_ids_with_gradients(side):
    model = tiny_model().train()
    inputs = padded([text(5, seed=1), text(8, seed=2)], side)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    want = model(**inputs, labels=labels)
    want.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    got = model(inputs_embeds=embeds, attention_mask=inputs["attention_mask"], labels=labels)
    got.loss.backward()
    assert torch.equal(got.logits, want.logits)
    for name, gradient in gradients.items():
        assert torch.equal(model.get_parameter(name).grad, gradient), name


def test_embeddings_are_the_two_tables(model):
    assert model.get_input_embeddings() is model.transformer.embedding.word_embeddings
    assert model.get_output_embeddings() is model.transformer.output_layer
    assert model.transformer.get_input_embeddings() is model.get_input_embeddings()


def test_embeddings_can_be_set():
    model = tiny_model()
    table, linear = torch.nn.Embedding(512, 64), torch.nn.Linear(64, 512, bias=False)
    model.set_input_embeddings(table)
    model.set_output_embeddings(linear)
    assert model.get_input_embeddings() is table
    assert model.get_output_embeddings() is linear and computes_loss(linear)


@pytest.mark.parametrize("size", [520, 512 + 64, 505])
def test_resizing_resizes_both_tables_and_keeps_old_logits(size):
    model = tiny_model()
    ids = torch.tensor([text(6)])
    with torch.no_grad():
        want = model(input_ids=ids).logits
    model.resize_token_embeddings(size)
    assert model.get_input_embeddings().weight.shape == (size, 64)
    assert model.get_output_embeddings().weight.shape == (size, 64)
    assert model.config.vocab_size == model.config.padded_vocab_size == size
    assert model.get_output_embeddings().weight.requires_grad
    with torch.no_grad():
        got = model(input_ids=ids).logits
    kept = min(size, 512)
    assert got.shape[-1] == size
    # torch sums a product of another width in another order: measured 1.9e-6.
    assert (got[..., :kept] - want[..., :kept]).abs().max() <= 1e-5
    plain, skipped = (model.train()(input_ids=ids, labels=ids, skip_logits=s) for s in (0, 1))
    assert skipped.logits is None
    assert skipped.loss.item() == pytest.approx(plain.loss.item(), abs=1e-5)


def test_a_new_token_can_be_used_after_resizing():
    model = tiny_model()
    with pytest.raises(ValueError, match="holds id 515, but the vocabulary has 512"):
        model(input_ids=torch.tensor([[1, 515]]))
    model.resize_token_embeddings(520)
    assert model(input_ids=torch.tensor([[1, 515]])).logits.shape == (1, 2, 520)


# Dtypes


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_model_computes_in_the_dtype_of_its_weights(dtype):
    model = tiny_model(dtype)
    output = model(**batch(), output_hidden_states=True)
    assert output.logits.dtype == dtype
    assert {state.dtype for state in output.hidden_states} == {dtype}
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rotary_tables_are_rounded_to_the_dtype_unless_kept_in_fp32(dtype):
    positions = torch.arange(100)[None]
    exact = RotaryEmbedding(tiny_config(rope_in_fp32=True))(positions, dtype)
    rounded = RotaryEmbedding(tiny_config())(positions, dtype)
    assert {table.dtype for table in exact} == {torch.float32}
    for table, kept in zip(rounded, exact, strict=True):
        assert torch.equal(table, kept.to(dtype))


def test_rotary_tables_do_not_read_the_buffer():
    model = tiny_model()
    ids = torch.tensor([text(6)])
    want = model(input_ids=ids).logits
    model.transformer.rotary_pos_emb.inv_freq.zero_()
    assert torch.equal(model(input_ids=ids).logits, want)


# Initialisation


def initialised(seed: int, cls=GLM4VForCausalLM, **changes):
    torch.manual_seed(seed)
    return cls._from_config(tiny_config(**changes))


@pytest.mark.parametrize("cls", [GLM4VForCausalLM, ChatGLMModel])
@pytest.mark.parametrize("std", [0.02, 0.1])
def test_new_weights_are_normal_biases_zero_and_norms_one(std, cls):
    for name, value in initialised(0, cls, initializer_range=std).named_parameters():
        if "norm" in name:
            assert (value == (1 if name.endswith("weight") else 0)).all(), name
        elif name.endswith("bias"):
            assert (value == 0).all(), name
        else:
            # The smallest has 32 numbers, whose deviation is off by 1 / sqrt(64).
            assert value.std().item() == pytest.approx(std, rel=0.5), name
            assert value.mean().abs() < std, name


def test_new_weights_follow_the_seed():
    first, again, other = (initialised(seed).state_dict() for seed in (0, 0, 1))
    for name, value in first.items():
        assert torch.equal(value, again[name]), name
        fixed = "norm" in name or name.endswith(("bias", "inv_freq"))
        assert torch.equal(value, other[name]) is fixed, name


def test_a_new_model_computes_finite_numbers():
    output = initialised(0)(**batch())
    assert output.logits.isfinite().all()
    assert output.loss.item() == pytest.approx(torch.tensor(512.0).log().item(), abs=0.1)


# Work that is not done


def test_text_batches_do_not_run_the_tower_in_a_single_process():
    model = tiny_model().train()
    runs = []
    model.transformer.vision.register_forward_pre_hook(lambda *call: runs.append(call))
    inputs = padded([text(4), text(6)], "left")
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert not runs
    assert not must_run_on_every_process(model.transformer.vision)
    assert all(p.grad is None for p in model.transformer.vision.parameters())


@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_a_blank_image_touches_every_vision_parameter_and_changes_nothing(
    use_reentrant, monkeypatch
):
    """What a process without images does when others would wait for it."""
    model = tiny_model().train()
    inputs = padded([text(4), text(6)], "left")
    want = model(**inputs).logits
    monkeypatch.setitem(
        ChatGLMModel._merge_images.__globals__, "must_run_on_every_process", lambda module: True
    )
    if use_reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    output = model(**inputs, labels=inputs["input_ids"])
    assert torch.equal(output.logits, want)
    output.loss.backward()
    for name, parameter in model.transformer.vision.named_parameters():
        assert parameter.grad is not None and (parameter.grad == 0).all(), name


def test_parameters_that_zero3_shards_make_the_tower_run(monkeypatch):
    vision = tiny_model().transformer.vision
    next(vision.parameters()).ds_status = "AVAILABLE"
    assert must_run_on_every_process(vision)


def test_a_given_cache_is_filled_and_returned(model):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        output = model(**batch(), past_key_values=cache)
    assert output.past_key_values is cache
    assert cache.get_seq_length() == output.logits.shape[1]


def test_a_resized_output_layer_is_not_initialised_again():
    model = tiny_model()
    model.resize_token_embeddings(520)
    weight = model.get_output_embeddings().weight
    want = weight.detach().clone()
    model.post_init()
    assert torch.equal(weight, want)


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


@pytest.mark.parametrize(
    "name", ["atention_mask", "pixel_value", "image", "positions", "token_type_ids", "foo"]
)
@pytest.mark.parametrize("of", ["model", "base"])
def test_refuses_a_keyword_that_it_does_not_know(model, of, name):
    called = model if of == "model" else model.transformer
    with pytest.raises(ValueError, match=f"forward was given {name}, which .* it takes input_ids,"):
        called(input_ids=torch.tensor([text(4)]), **{name: torch.ones(1, 4)})


@torch.no_grad()
def test_takes_token_types_that_say_where_images_are():
    """As OpenRLHF makes them."""
    model = tiny_model(image_token_id=FILL)
    ids = torch.tensor([[*text(2), *grown_image(), *text(3)]])
    want = model(input_ids=ids, pixel_values=pictures(1)).logits
    types = (ids == FILL).int()
    got = model(input_ids=ids, pixel_values=pictures(1), token_type_ids=types).logits
    assert torch.equal(got, want)
    with pytest.raises(ValueError, match="forward was given token_type_ids, which"):
        model(input_ids=ids, pixel_values=pictures(1), token_type_ids=1 - types)


@torch.no_grad()
def test_takes_what_frameworks_pass_on(model):
    """Packed rows of transformers' collator, generate of 4.57, and all its named arguments."""
    ids = torch.tensor([text(6)])
    want = model(input_ids=ids).logits
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
    assert torch.equal(got.logits, want)


def test_names_of_the_arguments_are_those_that_trainers_look_for(model):
    """A Trainer keeps the columns of a dataset that forward names, and asks for some of them."""
    names = set(inspect.signature(model.forward).parameters)
    assert {"labels", "pixel_values", "images", "position_ids", "num_items_in_batch"} <= names
    assert {"logits_to_keep", "skip_logits", "image_features"} <= names
    # Another one with this word in it would be wanted in every batch of an evaluation.
    assert [name for name in names if "label" in name] == ["labels"]


@torch.no_grad()
def test_the_published_name_for_the_last_logits(model):
    ids = torch.tensor([text(6)])
    last = model(input_ids=ids, return_last_logit=True).logits
    assert torch.equal(last, model(input_ids=ids, logits_to_keep=1).logits)
    assert last.shape == (1, 1, 512)


@pytest.mark.parametrize("name", ["pixel_values", "images"])
@torch.no_grad()
def test_rows_without_an_image_may_have_none_in_its_place(model, name):
    inputs = batch()
    images = inputs.pop("pixel_values")
    want = model(**inputs, pixel_values=images).logits
    assert torch.equal(model(**inputs, **{name: [images[0], None]}).logits, want)
    ids = torch.tensor([text(6)])
    got = model(input_ids=ids, **{name: [None]}).logits
    assert torch.equal(got, model(input_ids=ids).logits)
    with pytest.raises(ValueError, match="0 images were given for 1 begin-of-image ids"):
        model(**inputs, **{name: [None, None]})


# Losses that are computed outside


def test_hidden_states_of_rows_that_grow_are_refused_in_training():
    """A reward model reads its score where the mask of the rows as given ends: inside an image."""
    model = tiny_model().train()
    with pytest.raises(ValueError, match="rows of 10 ids take 13 positions.*give grown rows"):
        model(**batch(three_id_image()), output_hidden_states=True)
    assert len(model(**batch(grown_image()), output_hidden_states=True).hidden_states) == 3
    assert model(**batch(three_id_image())).loss.isfinite()


def test_hidden_states_of_rows_that_grow_are_named_once_in_evaluation(caplog):
    """They are right, but not where the rows as given say."""
    model = tiny_model()
    model(**batch(grown_image()), output_hidden_states=True)
    model(**batch(three_id_image()))
    assert not caplog.records
    for image in (three_id_image(), [7, *three_id_image()]):
        states = model(**batch(image), output_hidden_states=True).hidden_states
        assert states[0].shape[1] == 10 + len(image)
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
    assert model.config._attn_implementation == after
    used = []
    attention = inspect.getmodule(type(model.transformer.vision))
    for module in (attention, inspect.getmodule(type(model))):
        attend = module.attend

        def noted(module, query, key, value, mask, implementation, attend=attend, **kwargs):
            used.append((type(module).__name__, implementation))
            return attend(module, query, key, value, mask, implementation, **kwargs)

        monkeypatch.setattr(module, "attend", noted)
    got = model(**batch()).logits
    assert set(used) == {("Attention", after), ("SelfAttention", after)}
    valid = batch()["attention_mask"].bool()
    assert (got[valid] - want[valid]).abs().max() <= ATOL
