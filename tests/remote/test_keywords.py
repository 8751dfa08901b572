"""A keyword that transformers passes under another name is an error, or changes nothing."""

import functools
from itertools import product

import pytest
import torch
from transformers import DynamicCache, GenerationMixin

from glm4v_patched.remote.keywords import (
    ATTENTION_KWARGS,
    CACHE_KEYWORD,
    LOGITS_KWARGS,
    OTHER_CACHE_KEYWORD,
    select_attention_kwargs,
)
from glm4v_patched.remote.modeling_chatglm import ChatGLMForSequenceClassification
from tests.helpers.tiny import expanded_image, text, tiny_config, unexpanded_image
from tests.remote.inputs import GREEDY, two_sequences

# Names that a release might use: a new one, and every known one with another meaning.
OTHER_NAMES = ["of_a_future_release", *ATTENTION_KWARGS, "cache_position", "seq_idx"]
OTHER_NAMES += ["next_sequence_length", "is_first_iteration", "token_type_ids", OTHER_CACHE_KEYWORD]


def rows(image: list[int]) -> dict:
    """A batch with padding, so that a lost mask changes tokens."""
    return {name: value for name, value in two_sequences(image).items() if name != "labels"}


def answer(model, inputs, method: str, old: str = "", new: str = ""):
    """Tokens, runs of the tower, and names of what ``generate`` handed to ``method``; what it hands
    over as ``old`` arrives as ``new``."""
    runs, names = [], set()
    handle = model.transformer.vision.register_forward_hook(lambda *_: runs.append(1))
    original = getattr(model, method)

    @functools.wraps(original)
    def handed(*args, **kwargs):
        names.update(name for name, value in kwargs.items() if value is not None)
        if old in kwargs:
            kwargs[new] = kwargs.pop(old)
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, method, handed)
        try:
            tokens = model.generate(**inputs, **GREEDY)
        finally:
            handle.remove()
    return tokens, len(runs), names


@pytest.mark.parametrize("method", ["prepare_inputs_for_generation", "forward"])
def test_a_keyword_of_generate_under_another_name_is_an_error_or_harmless(model, method):
    inputs = rows(unexpanded_image())
    want, runs, names = answer(model, inputs, method)
    assert {CACHE_KEYWORD, "attention_mask"} <= names and runs == 1
    refused, same = set(), set()
    for old, new in product(sorted(names), OTHER_NAMES):
        if new in names:
            continue
        try:
            tokens, runs, _ = answer(model, inputs, method, old, new)
        except (ValueError, TypeError) as error:
            assert new in str(error) or old in str(error), (old, new, error)
            refused.add((old, new))
        else:
            assert torch.equal(tokens, want) and runs == 1, f"{old} under {new}"
            same.add((old, new))
    assert (CACHE_KEYWORD, "of_a_future_release") in refused
    assert ("attention_mask", "of_a_future_release") in refused
    # Either name of the cache works, and generate's own state is not needed.
    not_needed = {"use_cache", "next_sequence_length", "is_first_iteration", "prompt_length"}
    not_needed |= {"cache_position"}
    assert {old for old, _ in same} <= {CACHE_KEYWORD, "return_dict"} | not_needed
    assert (CACHE_KEYWORD, OTHER_CACHE_KEYWORD) in same


@torch.no_grad()
def test_the_model_without_a_head_takes_what_the_heads_signature_names(model):
    """Callers read one signature and call the other; keywords about logits change nothing."""
    inner, of_logits = model.base_model, {name: 3 for name in LOGITS_KWARGS}
    assert {*of_logits} == {*model.forward_names} - {*inner.forward_names}
    with pytest.raises(TypeError, match="positional"):  # not taken for what comes next here
        model(*[None] * 8, False)
    inputs = rows(expanded_image())
    want = inner(**inputs).last_hidden_state
    for keywords in (of_logits, {"logits_to_keep": torch.tensor([0, 2])}):
        assert torch.equal(inner(**inputs, **keywords).last_hidden_state, want)


def test_each_class_refuses_with_its_own_keywords(model):
    classifier = ChatGLMForSequenceClassification(tiny_config(num_labels=2))
    inputs = rows(expanded_image())
    # Keywords that only some of the classes take.
    own = {
        model: {"logits_to_keep", "skip_logits", "shift_labels", "prompt_length"},
        model.base_model: {"shift_labels", "prompt_length"},
        classifier: set(),
    }
    everything = set().union(*own.values())
    for one, takes in own.items():
        with pytest.raises(ValueError, match="unexpected keyword logit_to_keep") as refused:
            one(**inputs, logit_to_keep=1)
        _, listed = str(refused.value).split(f"{type(one).__name__} takes ")
        words = set(listed.split(", and for attention")[0].split(", "))
        assert words & everything == takes and {"pixel_values", "labels", "use_cache"} <= words
        for name in everything - takes - {"logits_to_keep", "skip_logits"}:
            with pytest.raises(ValueError, match=f"unexpected keyword {name} "):
                one(**inputs, **{name: 1})
    for name in ("logits_to_keep", "skip_logits"):
        with pytest.raises(ValueError, match=f"keyword {name} .*: ChatGLMForSequenceClassif"):
            classifier(**inputs, **{name: 1})
    options = {"use_cache": False, "output_hidden_states": True, "num_items_in_batch": 2}
    assert len(classifier.eval()(**inputs, **options).hidden_states) == 3


def test_false_and_0_are_passed_on_to_attention():
    lengths = torch.tensor([0, 4], dtype=torch.int32)
    values = {"is_causal": False, "cu_seq_lens_q": lengths, "max_length_q": 0}
    assert select_attention_kwargs(values) == values


def test_two_caches_are_refused(model):
    caches = {
        name: DynamicCache(config=model.config) for name in (CACHE_KEYWORD, OTHER_CACHE_KEYWORD)
    }
    ids = torch.tensor([text(4)])
    with pytest.raises(ValueError, match=f"names of the same argument: give {CACHE_KEYWORD}"):
        model(input_ids=ids, **caches)
    twice = dict.fromkeys(caches, caches[CACHE_KEYWORD])
    assert model(input_ids=ids, **twice)[CACHE_KEYWORD] is caches[CACHE_KEYWORD]
    if CACHE_KEYWORD != "cache":  # else generate takes both
        with pytest.raises(
            ValueError, match=f"given {OTHER_CACHE_KEYWORD}: pass the cache as {CACHE_KEYWORD}"
        ):
            model.generate(ids, **{OTHER_CACHE_KEYWORD: caches[OTHER_CACHE_KEYWORD]}, **GREEDY)


def test_a_cache_that_is_lost_between_two_tokens_is_an_error(model, monkeypatch):
    prepare = model.prepare_inputs_for_generation

    @functools.wraps(prepare)
    def without_cache(*args, **kwargs):
        return prepare(*args, **{n: v for n, v in kwargs.items() if n != CACHE_KEYWORD})

    monkeypatch.setattr(model, "prepare_inputs_for_generation", without_cache)
    with pytest.raises(ValueError, match="passed no cache after 1 generated tokens although use_c"):
        model.generate(**rows(expanded_image()), **GREEDY)
    model.generate(**rows(expanded_image()), **GREEDY, use_cache=False)


def test_a_generate_without_what_is_overridden_is_an_error(model, monkeypatch):
    name = "_expand_inputs_for_generation"
    monkeypatch.setattr(GenerationMixin, "renamed", getattr(GenerationMixin, name), raising=False)
    monkeypatch.delattr(GenerationMixin, name)
    with pytest.raises((RuntimeError, AttributeError), match=name):
        model.generate(torch.tensor([text(4)]), **GREEDY)
