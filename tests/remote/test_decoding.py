"""A drawn token costs nothing but its layers: no wait for the device, no row grown, one graph.

What is drawn is in test_generation.py and test_generation_modes.py.
"""

from contextlib import ExitStack, contextmanager
from functools import wraps

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig, StaticCache

from glm4v_patched.remote import generation_chatglm
from tests.helpers.tiny import grown_image, padded, pictures, text, three_id_image, tiny_model
from tests.helpers.waits import Calls, Operators

FIXED = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 500}
GREEDY = FIXED | {"do_sample": False}
IMAGES = {"text": [], "three ids": three_id_image(), "grown": grown_image()}


def batch_of(image: list[int], num_rows: int = 2) -> dict[str, torch.Tensor]:
    """Unlike numbers of images and, if there are two rows, unlike padding."""
    rows = [
        [*image, *text(4, seed=3), *image, *text(2, seed=4)],
        [*text(6, seed=1), *image, *text(9, seed=2)],
    ][:num_rows]
    number = sum(row.count(image[0]) for row in rows) if image else 0
    return padded(rows, "left") | ({"pixel_values": pictures(number)} if number else {})


class Counted:
    """What every step of ``generate`` does in the model's own code; the first one is the prompt."""

    def __init__(self):
        self.waits, self.outside = [], []

    @contextmanager
    def of(self, model):
        in_layers = []

        def counting(function, is_new_step):
            @wraps(function)  # generate reads their signatures
            def counted(*args, **kwargs):
                if is_new_step:
                    self.waits.append([])
                    self.outside.append([])
                with Calls() as calls, Operators() as operators:
                    in_layers.append(operators)
                    result = function(*args, **kwargs)
                self.waits[-1] += calls.waits + operators.waits
                self.outside[-1] += operators.names
                return result

            return counted

        def enter(_, given):
            in_layers[-1].before = len(in_layers[-1].names)

        def leave(_, given, made):
            del in_layers[-1].names[in_layers[-1].before :]

        with ExitStack() as stack:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            for name in ("prepare_inputs_for_generation", "forward"):
                is_new_step = name == "prepare_inputs_for_generation"
                patch.setattr(model, name, counting(getattr(model, name), is_new_step))
            for layer in model.transformer.encoder.layers:
                stack.callback(layer.register_forward_pre_hook(enter).remove)
                stack.callback(layer.register_forward_hook(leave).remove)
            yield self


# Measured with transformers 4.57.6 and 5.23.0: up to 38, of which 11 are the position's angles and
# 6 the norm at the end. Rows that were grown again took 203.
MOST_OPERATORS = 40


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(("image", "num_rows"), [("text", 1), ("three ids", 2), ("grown", 2)])
def test_a_drawn_token_waits_for_nothing_and_grows_nothing(model, image, num_rows, cache):
    options = GREEDY | ({"cache_implementation": "static"} if cache == "static" else {})
    with Counted().of(model) as counted:
        model.generate(**batch_of(IMAGES[image], num_rows), **options)
    assert counted.waits[0], "the prompt is checked, which the device has to say"
    assert counted.waits[1:] == [[]] * 5
    assert max(map(len, counted.outside[1:])) <= MOST_OPERATORS < len(counted.outside[0])


def compiling(backend="aot_eager") -> CompileConfig:
    config = CompileConfig(backend=backend, mode=None, fullgraph=True, dynamic=False)
    config._compile_all_devices = True
    return config


@pytest.fixture
def fresh_graphs():
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


def test_every_step_is_one_graph_whatever_the_rows(model, fresh_graphs, monkeypatch):
    """With left padding and without, pictures in either form, greedy and sampled; as on a GPU."""
    monkeypatch.setattr(generation_chatglm, "COMPILES_NO_STEPS", ())
    static = {"cache_implementation": "static", "compile_config": compiling()}
    for image in IMAGES.values():
        batch = batch_of(image)
        for mode in ({"do_sample": False}, {"do_sample": True, "top_k": 20}):
            options = FIXED | mode
            torch.manual_seed(0)
            want = model.generate(**batch, **options)
            torch.manual_seed(0)
            got = model.generate(**batch, **options, **static)
            assert torch.equal(got, want)
            torch.manual_seed(0)
            assert torch.equal(model.generate(**batch, **options, use_cache=False), want)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def copied(inputs: dict) -> dict:
    return {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("image", "num_rows"), [("text", 1), ("three ids", 2), ("grown", 2)])
def test_inputs_are_advanced_to_what_would_be_made_anew(image, num_rows, attention):
    model = tiny_model(attn_implementation=attention)
    steps, prepare = [], model.prepare_inputs_for_generation

    @wraps(prepare)
    def both(input_ids, **given):
        inputs, prompt = prepare(input_ids, **given), given["grown_prompt"]
        if (num_drawn := prompt.num_drawn(input_ids)) == 1:
            steps.append((inputs, copied(inputs)))
        elif num_drawn:
            after = copied(steps[-1][1])
            assert model.advance_drawn_inputs(after, input_ids[:, -1:], prompt, num_drawn)
            steps.append((inputs, after))
        return inputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "prepare_inputs_for_generation", both)
        model.generate(**batch_of(IMAGES[image], num_rows), **GREEDY, cache_implementation="static")
    assert len(steps) == 5
    for anew, after in steps:
        assert anew.keys() == after.keys()
        for name, value in anew.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, after[name]) and value.dtype == after[name].dtype, name
            else:
                assert value is after[name] or value == after[name], name


def test_a_static_cache_has_room_for_rows_that_grow_or_is_refused():
    model = tiny_model()  # generate makes no smaller cache than one before
    batch = batch_of(three_id_image())
    options = GREEDY | {"return_dict_in_generate": True}
    want = model.generate(**batch, **GREEDY)
    output = model.generate(**batch, **options, cache_implementation="static")
    assert torch.equal(output.sequences, want)
    needed = model(**batch).logits.shape[1] + 5
    assert output.past_key_values.layers[0].max_cache_len == needed
    for room in (needed, needed - 1, needed - 6):
        given = {"past_key_values": StaticCache(config=model.config, max_cache_len=room)}
        if room == needed:
            assert torch.equal(model.generate(**batch, **GREEDY, **given), want)
            continue
        with pytest.raises(ValueError, match=f"has room for {room} positions but the rows take"):
            model.generate(**batch, **GREEDY, **given)


def test_prompts_that_are_padded_on_the_right_are_refused(model):
    batch = padded([text(9), text(4), text(7)], "right")
    with pytest.raises(ValueError, match=r"rows \[1, 2\] of 3 end in padding.*padding_side=\"left"):
        model.generate(**batch, **GREEDY)
