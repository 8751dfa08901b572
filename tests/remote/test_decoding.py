"""Decode steps add no host synchronization and no expansion, and are one compiled graph.

The generated tokens are tested in test_generation.py.
"""

from functools import wraps

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig, StaticCache

from glm4v_patched.remote import generation_chatglm
from tests.helpers.tiny import (
    expanded_image,
    random_pixels,
    shallow_model,
    text,
    tiny_model,
    unexpanded_image,
)
from tests.helpers.waits import Calls, Operators
from tests.remote.inputs import GREEDY, SAMPLE_OPTIONS, assert_close, prompts

# fp32, sums in another order.
ATOL = 1e-5
IMAGES = {"text": [], "unexpanded": unexpanded_image(), "expanded": expanded_image()}


def steps_of(model, **options) -> list[tuple[list[str], list[str]]]:
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
        model.generate(**options)
    return steps


BATCHES = pytest.mark.parametrize(
    ("image", "num_rows"), [("text", 1), ("unexpanded", 2), ("expanded", 2)]
)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@BATCHES
def test_a_decode_step_waits_for_nothing_and_expands_nothing(model, image, num_rows, cache):
    options = GREEDY | ({"cache_implementation": "static"} if cache == "static" else {})
    prompt, *steps = steps_of(model, **prompts(IMAGES[image], num_rows), **options)
    assert prompt[0], "the prompt is checked, which the device has to say"
    assert [waits for waits, _ in steps] == [[]] * 5
    # Measured with transformers 5.24: up to 187. Expanding again took 165 more.
    assert max(len(operators) for _, operators in steps) <= 200 < len(prompt[1])


@torch._dynamo.config.patch(error_on_recompile=True)
def test_all_decode_steps_are_one_graph_for_any_batch(model, monkeypatch):
    """With and without padding, images unexpanded and expanded, greedy and sampled, as on a GPU."""
    monkeypatch.setattr(generation_chatglm, "DEVICES_WITHOUT_COMPILATION", ())
    torch._dynamo.reset()
    counters.clear()
    config = CompileConfig(backend="aot_eager", mode=None, fullgraph=True, dynamic=False)
    config._compile_all_devices = True
    static = {"cache_implementation": "static", "compile_config": config}
    for image in IMAGES.values():
        for mode in ({"do_sample": False}, {"do_sample": True, "top_k": 20}):
            sequences = []
            for options in ({}, static, {"use_cache": False}):
                torch.manual_seed(0)
                sequences.append(
                    model.generate(**prompts(image), **SAMPLE_OPTIONS, **mode, **options)
                )
            assert torch.equal(sequences[1], sequences[0]) and torch.equal(
                sequences[2], sequences[0]
            )
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    torch._dynamo.reset()


def copied(inputs: dict) -> dict:
    return {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@BATCHES
def test_advanced_inputs_equal_newly_prepared_ones(image, num_rows, attention):
    model = tiny_model(attn_implementation=attention)
    steps, prepare = [], model.prepare_inputs_for_generation

    @wraps(prepare)
    def both(input_ids, **model_kwargs):
        inputs, prompt = prepare(input_ids, **model_kwargs), model_kwargs["expanded_prompt"]
        if (num_generated := prompt.num_generated(input_ids)) == 1:
            steps.append((inputs, copied(inputs)))
        elif num_generated:
            after = copied(steps[-1][1])
            assert model.advance_decode_inputs(after, input_ids[:, -1:], prompt, num_generated)
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


def test_a_static_cache_that_is_too_small_for_expanded_prompts_is_refused():
    model = tiny_model()  # generate makes no smaller cache than one before
    batch = prompts(unexpanded_image())
    options = GREEDY | {"return_dict_in_generate": True}
    want = model.generate(**batch, **GREEDY)
    output = model.generate(**batch, **options, cache_implementation="static")
    assert torch.equal(output.sequences, want)
    needed = model(**batch).logits.shape[1] + 5
    assert output.past_key_values.layers[0].max_cache_len == needed
    for capacity in (needed, needed - 1, needed - 6):
        cache_kwargs = {"past_key_values": StaticCache(config=model.config, max_cache_len=capacity)}
        if capacity == needed:
            assert torch.equal(model.generate(**batch, **GREEDY, **cache_kwargs), want)
            continue
        with pytest.raises(ValueError, match=f"static cache has {capacity} entries but"):
            model.generate(**batch, **GREEDY, **cache_kwargs)


@torch.no_grad()
def test_a_compiled_model_computes_losses_and_reports_a_batch_that_does_not_fit():
    """Losses of sizes that are symbols: test_export.py."""
    torch._dynamo.reset()
    model = shallow_model(use_cache=False)
    # With inductor's decompositions, which keep the assertions.
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager_decomp_partition")
    ids = torch.tensor([[*text(4), *expanded_image(), *text(2)]])
    batch = {"input_ids": ids, "labels": ids.clone(), "pixel_values": random_pixels(1)}
    assert_close(dict(compiled(**batch)), dict(model(**batch)), ATOL)
    for wrong in (512, -1):
        wrong_ids = ids.index_fill(1, torch.tensor([3]), wrong)
        with pytest.raises(RuntimeError, match="this batch does not fit a compiled graph"):
            compiled(**batch | {"input_ids": wrong_ids})
    # It is as long as an expanded prompt: the shape of a shorter one shows that it is not.
    row = torch.tensor([[*text(5), *unexpanded_image(), *text(4)]])
    with pytest.raises(RuntimeError, match="prompts are unexpanded .give expanded prompts"):
        compiled(**batch | {"input_ids": row})
