"""A drawn token costs nothing but its layers: no wait for the device, no row grown, one graph.

What is drawn: test_generation.py.
"""

from functools import wraps

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig, StaticCache

from glm4v_patched.remote import generation_chatglm
from tests.helpers.tiny import expanded_image, random_pixels, text, unexpanded_image, tiny_model
from tests.helpers.waits import Calls, Operators
from tests.remote.inputs import DRAWN, GREEDY, prompts

IMAGES = {"text": [], "three ids": unexpanded_image(), "grown": expanded_image()}


def steps_of(model, **given) -> list[tuple[list[str], list[str]]]:
    """What waits for the device in every step of ``generate``, and all operators of the model's own
    code; the first step is the prompt."""
    steps = []

    def counting(function, is_new_step):
        @wraps(function)  # generate reads their signatures
        def counted(*args, **kwargs):
            if is_new_step:
                steps.append(([], []))
            with Calls() as calls, Operators() as operators:
                result = function(*args, **kwargs)
            steps[-1][0].extend(calls.waits + operators.waits)
            steps[-1][1].extend(operators.names)
            return result

        return counted

    with pytest.MonkeyPatch.context() as patch:
        for name in ("prepare_inputs_for_generation", "forward"):
            patch.setattr(model, name, counting(getattr(model, name), name[0] == "p"))
        model.generate(**given)
    return steps


ROWS = pytest.mark.parametrize(("image", "num_rows"), [("text", 1), ("three ids", 2), ("grown", 2)])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@ROWS
def test_a_drawn_token_waits_for_nothing_and_grows_nothing(model, image, num_rows, cache):
    options = GREEDY | ({"cache_implementation": "static"} if cache == "static" else {})
    prompt, *steps = steps_of(model, **prompts(IMAGES[image], num_rows), **options)
    assert prompt[0], "the prompt is checked, which the device has to say"
    assert [waits for waits, _ in steps] == [[]] * 5
    # Measured with transformers 5.24: up to 187. Rows that were grown again took 165 more.
    assert max(len(operators) for _, operators in steps) <= 200 < len(prompt[1])


@torch._dynamo.config.patch(error_on_recompile=True)
def test_every_step_is_one_graph_whatever_the_rows(model, monkeypatch):
    """With left padding and without, images in either form, greedy and sampled; as on a GPU."""
    monkeypatch.setattr(generation_chatglm, "COMPILES_NO_STEPS", ())
    torch._dynamo.reset()
    counters.clear()
    config = CompileConfig(backend="aot_eager", mode=None, fullgraph=True, dynamic=False)
    config._compile_all_devices = True
    static = {"cache_implementation": "static", "compile_config": config}
    for image in IMAGES.values():
        for mode in ({"do_sample": False}, {"do_sample": True, "top_k": 20}):
            drawn = []
            for options in ({}, static, {"use_cache": False}):
                torch.manual_seed(0)
                drawn.append(model.generate(**prompts(image), **DRAWN, **mode, **options))
            assert torch.equal(drawn[1], drawn[0]) and torch.equal(drawn[2], drawn[0])
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    torch._dynamo.reset()


def copied(inputs: dict) -> dict:
    return {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@ROWS
def test_inputs_are_advanced_to_what_would_be_made_anew(image, num_rows, attention):
    model = tiny_model(attn_implementation=attention)
    steps, prepare = [], model.prepare_inputs_for_generation

    @wraps(prepare)
    def both(input_ids, **given):
        inputs, prompt = prepare(input_ids, **given), given["expanded_prompt"]
        if (num_drawn := prompt.num_drawn(input_ids)) == 1:
            steps.append((inputs, copied(inputs)))
        elif num_drawn:
            after = copied(steps[-1][1])
            assert model.advance_decode_inputs(after, input_ids[:, -1:], prompt, num_drawn)
            steps.append((inputs, after))
        return inputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "prepare_inputs_for_generation", both)
        model.generate(**prompts(IMAGES[image], num_rows), **GREEDY, cache_implementation="static")
    assert len(steps) == 5
    for anew, after in steps:
        assert anew.keys() == after.keys()
        for name, value in anew.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(after[name], value, rtol=0, atol=0)
            else:
                assert value is after[name] or value == after[name], name


def test_a_static_cache_has_room_for_rows_that_grow_or_is_refused():
    model = tiny_model()  # generate makes no smaller cache than one before
    batch = prompts(unexpanded_image())
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


@torch.no_grad()
def test_a_compiled_graph_says_when_rows_do_not_fit_it():
    torch._dynamo.reset()
    model = tiny_model(num_layers=1)
    # With inductor's decompositions, which lose nothing of the checks.
    backend = "aot_eager_decomp_partition"
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=False)
    ids = torch.tensor([text(12)])
    compiled(input_ids=ids, use_cache=False)
    for wrong in (512, -1):
        fault = ids.index_fill(1, torch.tensor([3]), wrong)
        with pytest.raises(RuntimeError, match="these rows do not fit a compiled graph"):
            compiled(input_ids=fault, use_cache=False)
    # As long as grown ones, for the shapes of short rows tell that they are not.
    grown = {"input_ids": torch.tensor([[*text(4), *expanded_image(), *text(2)]])}
    grown |= {"pixel_values": random_pixels(1), "use_cache": False}
    assert (compiled(**grown).logits - model(**grown).logits).abs().max() <= 1e-5
    row = torch.tensor([[*text(5), *unexpanded_image(), *text(4)]])
    with pytest.raises(RuntimeError, match="in the three-id form .give grown rows"):
        compiled(input_ids=row, pixel_values=random_pixels(1), use_cache=False)


@torch.no_grad()
def test_a_compiled_graph_learns_from_rows_of_other_sizes():
    torch._dynamo.reset()
    model = tiny_model(num_layers=1)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    one, two = torch.tensor([text(9)]), torch.tensor([text(12), text(12, seed=1)])
    # First one tensor of one size, then two, whose sizes are symbols.
    for ids, labels in ((one, one), (two, two.clone())):
        want = model(input_ids=ids, labels=labels).loss
        assert (compiled(input_ids=ids, labels=labels).loss - want).abs() <= 1e-5
