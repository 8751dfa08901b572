"""generate draws no image ids unless told: who trains on its rows would look for an image there."""

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    SuppressTokensLogitsProcessor,
)

from tests.helpers.tiny import BOI, EOI, FILL, grown_image, pictures, text, tiny_model

MODES = {
    "greedy": {"do_sample": False},
    "greedy, without a cache": {"do_sample": False, "use_cache": False},
    "greedy, static cache": {"do_sample": False, "cache_implementation": "static"},
    "sampled": {"do_sample": True},
    "sampled from the best": {"do_sample": True, "top_k": 1},
    "sampled, static cache": {"do_sample": True, "cache_implementation": "static"},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampled beams": {"do_sample": True, "num_beams": 3},
    "several of a prompt": {"do_sample": True, "num_return_sequences": 4},
    "prompt lookup": {"do_sample": False, "prompt_lookup_num_tokens": 2},
    "a framework's own config": {
        "generation_config": GenerationConfig(do_sample=True, max_new_tokens=6, eos_token_id=None)
    },
}


@pytest.fixture(scope="module")
def drawing_image_ids():
    """A model that wants nothing but image ids."""
    model = tiny_model(image_token_id=FILL)

    def favour(module, inputs, logits):
        logits = logits.clone()
        logits[..., [BOI, EOI, FILL]] += 100
        return logits

    model.transformer.output_layer.register_forward_hook(favour)
    return model


def drawn(model, **options) -> set[int]:
    prompt = torch.tensor([[*text(2, seed=1), *grown_image(), *text(3, seed=2)]])
    limits = {} if "generation_config" in options else {"max_new_tokens": 6, "eos_token_id": None}
    torch.manual_seed(0)
    rows = model.generate(
        input_ids=prompt, pixel_values=pictures(1), pad_token_id=500, **limits, **options
    )
    new = rows[:, prompt.shape[1] :]
    assert new.shape[1] == 6
    return set(new.flatten().tolist())


@pytest.mark.parametrize("mode", MODES)
def test_no_image_ids_are_drawn(mode, drawing_image_ids):
    assert not drawn(drawing_image_ids, **MODES[mode]) & {BOI, EOI, FILL}


# Prompt lookup of transformers 4.57 wants an eos_token_id that is none of these.
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "prompt lookup"])
def test_an_empty_list_allows_them(mode, drawing_image_ids):
    assert drawn(drawing_image_ids, **MODES[mode], suppress_tokens=[]) <= {BOI, EOI, FILL}


def test_what_a_trainer_suppresses_is_suppressed_besides(drawing_image_ids):
    best = drawn(drawing_image_ids, do_sample=False)
    others = drawn(drawing_image_ids, do_sample=False, suppress_tokens=[FILL, *best])
    assert not others & {BOI, EOI, FILL, *best}


def test_a_processor_of_the_same_class_that_is_given_takes_nothing_away(drawing_image_ids):
    own = LogitsProcessorList([SuppressTokensLogitsProcessor([3])])
    for more in ({}, {"suppress_tokens": [4]}):
        options = {"do_sample": False, "logits_processor": own, **more}
        assert not drawn(drawing_image_ids, **options) & {BOI, EOI, FILL}


def test_the_config_that_is_given_stays_as_it_is(drawing_image_ids):
    config = GenerationConfig(max_new_tokens=6, eos_token_id=None)
    drawn(drawing_image_ids, generation_config=config)
    assert config.suppress_tokens is None
    assert drawing_image_ids.generation_config.suppress_tokens is None


def test_a_vocabulary_without_a_fill_has_two_such_ids():
    assert tiny_model()._image_ids() == [BOI, EOI]
