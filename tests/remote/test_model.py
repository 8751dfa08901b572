"""The model as a module: one path for training and evaluation, tables, dtypes, initialization."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import DynamicCache

from glm4v_patched.remote.keywords import CACHE_KEYWORD
from glm4v_patched.remote.loss import has_fused_cross_entropy
from glm4v_patched.remote.modeling_chatglm import ChatGLMModel, GLM4VForCausalLM
from glm4v_patched.remote.sharding import must_run_on_every_process
from tests.helpers.refused import refused
from tests.helpers.tiny import (
    FILL,
    expanded_image,
    padded,
    random_pixels,
    text,
    tiny_config,
    tiny_model,
    unexpanded_image,
)
from tests.remote.inputs import two_sequences

# fp32, a matmul with fewer rows. Measured 0 on this CPU.
ATOL = 1e-5


def test_evaluation_fills_a_cache_and_training_one_that_is_asked_for(model):
    """Their outputs are tested in tests/parity."""
    inputs, cache = two_sequences(), DynamicCache(config=model.config)
    evaluated = model(**inputs, past_key_values=cache)
    assert evaluated.past_key_values is cache
    assert cache.get_seq_length() == evaluated.logits.shape[1]
    model = tiny_model().train()
    assert model(**inputs).past_key_values is None
    assert model(**inputs, use_cache=True).past_key_values is not None


@torch.no_grad()
def test_tuples_hold_what_the_named_output_holds():
    inputs, model = two_sequences(unexpanded_image()), tiny_model(output_hidden_states=True)
    named = model(**inputs)
    loss, logits, cache, states, images = model(**inputs, return_dict=False)
    assert torch.equal(loss, named.loss) and torch.equal(logits, named.logits)
    assert cache.get_seq_length() == logits.shape[1] == inputs["input_ids"].shape[1] + 3
    assert torch.equal(torch.stack(states), torch.stack(named.hidden_states))
    assert torch.equal(images, named.image_hidden_states)
    assert model(**inputs, output_hidden_states=False).hidden_states is None


IDS, EMBEDS = torch.tensor([[5, *unexpanded_image()]]), torch.zeros(1, 4, 64)
CONTRADICTIONS = {
    "exactly one of input_ids": {"input_ids": IDS, "inputs_embeds": EMBEDS},
    "two names": {"input_ids": IDS, "pixel_values": random_pixels(1), "images": random_pixels(1)},
    "0 columns": {"inputs_embeds": EMBEDS, "pixel_values": random_pixels(2)},
    "(3, 40, 56), (3, 56, 56)": {
        "input_ids": IDS,
        "images": [torch.zeros(3, 40, 56), torch.zeros(3, 56, 56)],
    },
}


@pytest.mark.parametrize("named", CONTRADICTIONS)
def test_inputs_that_contradict_each_other_are_refused(model, named):
    with refused(ValueError, named):
        model(**CONTRADICTIONS[named])


@torch.no_grad()
def test_images_may_be_passed_under_any_name_and_positionally_as_published(model):
    inputs = two_sequences(unexpanded_image())
    ids, mask, images = (inputs[name] for name in ("input_ids", "attention_mask", "pixel_values"))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for part in (model, model.transformer):
        one = part(ids[:1], pixel_values=images)[0]
        for images_list in (list(images), [images[0], None]):
            assert torch.equal(part(ids[:1], images_list)[0], one)
            assert torch.equal(part(ids[:1], images=images_list)[0], one)
        assert torch.equal(part(ids[:1], images, past_key_values=DynamicCache())[0], one)
        both = part(ids, mask, pixel_values=images)[0]
        assert torch.equal(part(ids, [images[0], None], positions, mask)[0], both)
        words, rest = ids[1:, :6], (None, mask[1:, :6])
        want = part(words, rest[1])[0]
        for nothing in (None, [], [None], torch.zeros(0, 3, 56, 56)):
            assert torch.equal(part(words, rest[1], pixel_values=nothing)[0], want)
            assert torch.equal(part(words, nothing, *rest)[0], want)
        with pytest.raises(ValueError, match="1 images .* second positional .* 1 as images"):
            part(ids[:1], images, images=images)


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
    assert has_fused_cross_entropy(model.get_output_embeddings())
    before = weight.detach().clone()
    model.post_init()
    assert torch.equal(weight, before) and weight.requires_grad  # and is not initialized again
    with torch.no_grad():
        actual = model(input_ids=ids).logits
    num_common = min(size, 512)
    # A matmul of another size sums in another order: measured 1.9e-6.
    assert (actual[..., :num_common] - want[..., :num_common]).abs().max() <= 1e-5
    if size > 515:
        assert model(input_ids=torch.tensor([[1, 515]])).logits.shape == (1, 2, size)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_model_computes_in_the_dtype_of_its_weights(dtype):
    model = tiny_model(dtype)
    output = model(**two_sequences(), output_hidden_states=True)
    assert {x.dtype for x in (output.logits, *output.hidden_states)} == {dtype}
    assert output.past_key_values.layers[0].keys.dtype == dtype
    assert output.loss.dtype == torch.float32
    output.loss.backward()
    assert all(p.grad.isfinite().all() and p.grad.dtype == dtype for p in model.parameters())


@pytest.mark.parametrize("cls", [GLM4VForCausalLM, ChatGLMModel])
def test_new_weights_are_normal_biases_zero_and_norms_one(cls):
    torch.manual_seed(0)
    model = cls._from_config(tiny_config(initializer_range=0.1))
    for name, value in model.named_parameters():
        if name.endswith("bias"):
            assert (value == 0).all(), name
        elif "norm" in name:
            assert (value == 1).all(), name
        else:
            # The smallest has 32 numbers, whose deviation is off by 1 / sqrt(64).
            assert value.std().item() == pytest.approx(0.1, rel=0.5), name
            assert value.mean().abs() < 0.1, name


@pytest.fixture
def processes():
    """``processes(number)`` makes this process one of a group; torch's fake group sends nothing."""

    def join(number: int) -> None:
        torch.distributed.init_process_group("fake", FakeStore(), rank=0, world_size=number)

    yield join
    torch.distributed.destroy_process_group()


def test_text_batches_do_not_run_the_tower_in_a_single_process(processes):
    model = tiny_model().train()
    processes(1)
    inputs = padded([text(4), text(6)], "left")
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    vision = model.transformer.vision
    assert all(p.grad is None for p in vision.parameters())
    assert not must_run_on_every_process(vision)
    next(vision.parameters()).ds_status = "AVAILABLE"  # as ZeRO-3 marks what it shards
    assert must_run_on_every_process(vision)


@pytest.fixture
def others_wait(monkeypatch):
    names = ChatGLMModel._merge_images.__globals__
    monkeypatch.setitem(names, "must_run_on_every_process", lambda module: True)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_blank_image_touches_every_vision_parameter_and_changes_nothing(
    checkpointed, others_wait
):
    """A process without images runs the tower if others would wait for it."""
    inputs = padded([text(4), text(6)], "left")
    model = tiny_model().train()
    want = model(**inputs, image_features=torch.zeros(0, 6, 64)).logits  # which leaves it out
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": True})
    output = model(**inputs, labels=inputs["input_ids"])
    assert torch.equal(output.logits, want)
    output.loss.backward()
    for name, parameter in model.transformer.vision.named_parameters():
        assert parameter.grad is not None and (parameter.grad == 0).all(), name
    runs, cache = [], model.eval()(**inputs, use_cache=True)[CACHE_KEYWORD]
    model.transformer.vision.register_forward_pre_hook(lambda *call: runs.append(call))
    model(torch.tensor([text(1)] * 2), past_key_values=cache)
    assert not runs  # a decode step
    model(torch.tensor([text(2)] * 2), past_key_values=cache)
    assert len(runs) == 1  # a second turn, in which another process may have an image


@torch.no_grad()
def test_keywords_that_frameworks_pass_are_accepted():
    """Packed rows of transformers' collator, generate of 4.57, OpenRLHF's token types."""
    model = tiny_model(image_token_id=FILL)
    ids = torch.tensor([[*text(2), *expanded_image(), *text(3)]])
    length = ids.shape[1]
    inputs = {"input_ids": ids, "pixel_values": random_pixels(1)}
    types = (ids == FILL).int()
    ends = torch.tensor([0, length], dtype=torch.int32)
    passed = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), ends)
    passed |= dict.fromkeys(("max_length_q", "max_length_k"), length)
    passed |= dict.fromkeys(("num_items_in_batch", "prompt_length"))
    passed |= {"cache_position": torch.arange(length), "token_type_ids": types}
    passed |= {"output_attentions": False}
    actual = model(**inputs, **passed)
    assert torch.equal(actual.logits, model(**inputs).logits)
    wrong = {"atention_mask": torch.ones(1, length)}
    for others in (wrong, {"token_type_ids": 1 - types}, {"token_type_ids": types[:, :-1]}):
        for called in (model, model.transformer):
            message = f"unexpected keyword {[*others][0]} .* {type(called).__name__} takes in"
            with pytest.raises(ValueError, match=message):
                called(**inputs, **others)


def test_hidden_states_of_unexpanded_prompts_are_refused_in_training_and_else_warn_once(caplog):
    """A reward model reads its score where the unexpanded mask ends: inside an image."""
    model = tiny_model().train()
    with pytest.raises(ValueError, match="prompts of 10 ids expand to 13 tokens.*give expanded"):
        model(**two_sequences(unexpanded_image()), output_hidden_states=True)
    model.eval()(**two_sequences(expanded_image()), output_hidden_states=True)
    assert not caplog.records
    for image in (unexpanded_image(), [7, *unexpanded_image()]):
        model(**two_sequences(image), output_hidden_states=True)
    (record,) = caplog.records
    assert "prompts of 10 ids expand to 13 tokens" in record.getMessage()


@torch.no_grad()
def test_set_attn_implementation_reaches_both_towers():
    model = tiny_model()
    want, valid = model(**two_sequences()).logits, two_sequences()["attention_mask"].bool()
    model.set_attn_implementation("eager")
    output = model(**two_sequences(), output_attentions=True)
    assert (output.logits[valid] - want[valid]).abs().max() <= ATOL
    images = {"output_attentions": True, "return_dict": True}
    assert output.attentions and model.get_image_features(random_pixels(1), **images).attentions


# A model that device_map split over devices is trained by one process, or refused

SPLIT = {"transformer.vision": 0, "transformer.encoder": 1, "transformer.embedding": 0}
ON_ONE = {"transformer.vision": torch.device("cuda:0"), "encoder": "cuda:0", "a": 0}


def split_model(device_map=SPLIT):
    """A model with the attribute that accelerate sets when it splits a model over devices."""
    model = tiny_model()
    model.hf_device_map = device_map
    return model


def train_a_step(model) -> None:
    ids = torch.tensor([text(6)])
    model(input_ids=ids, labels=ids).loss.backward()
    assert model.transformer.embedding.word_embeddings.weight.grad.norm() > 0


def test_a_model_split_over_gpus_is_not_trained_by_several_processes(processes):
    wrapped = get_peft_model(split_model(), LoraConfig(target_modules=["query_key_value"]))
    train_a_step(split_model().train())
    processes(2)
    message = (
        r"split over 2 devices \(0, 1\).*cannot be trained by 2 processes.*train it in 1 process"
    )
    for model in (split_model(), wrapped):
        with pytest.raises(ValueError, match=message):
            train_a_step(model.train())
    with torch.no_grad():  # several processes may answer with it
        split_model().eval()(input_ids=torch.tensor([text(6)]))
    train_a_step(split_model(ON_ONE).train())
