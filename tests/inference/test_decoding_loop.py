"""decode_without_sync: its tokens equal those of transformers' loop, and it never synchronizes.

On a CPU the lag is 0; tests set it to what a GPU has.
"""

from contextlib import nullcontext
from functools import wraps
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)

from glm4v_patched.engine.implementations import CUDA_GRAPHS, ModelUsage, use_implementations
from glm4v_patched.engine.kernels.cuda_graphs import CudaGraphCallable
from glm4v_patched.inference.decoding import loop
from glm4v_patched.inference.decoding.loop import decode_without_sync
from glm4v_patched.inference.decoding.static_cache import StaticCaches
from glm4v_patched.remote.keywords import CACHE_KEYWORD
from tests.helpers.tiny import (
    PAD,
    expanded_image,
    padded,
    random_pixels,
    text,
    tiny_model,
    unexpanded_image,
)
from tests.helpers.waits import Calls, Operators

NEW = 12
GREEDY = {"max_new_tokens": NEW, "pad_token_id": PAD, "do_sample": False}
SAMPLED = GREEDY | {"do_sample": True, "top_k": 50}
# One token in nine is an end token, so that sequences end at different steps.
ENDS = {"eos_token_id": [*range(0, 500, 9)]}
NEVER = {"eos_token_id": None}
STATIC = {"cache_implementation": "static"}
MODES = {
    "greedy": GREEDY | NEVER,
    "greedy, ends": GREEDY | ENDS,
    "sampled, top_p": SAMPLED | ENDS | {"top_k": 0, "top_p": 0.8, "temperature": 0.7},
    "several answers": SAMPLED | ENDS | {"num_return_sequences": 3},
    "one token": GREEDY | ENDS | {"max_new_tokens": 1},
    "min_new_tokens": SAMPLED | ENDS | {"min_new_tokens": 9, "suppress_tokens": [*range(400)]},
    "max_time": GREEDY | NEVER | {"max_time": 1000.0, "repetition_penalty": 1.7},
}


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture
def lag_of_two(monkeypatch) -> None:
    monkeypatch.setitem(loop.MAX_LAG, "cpu", 2)


def batch_of(image: list[int], num_rows: int = 2) -> dict[str, torch.Tensor]:
    """Return a batch with different padding on the left, and one or two images per sequence."""
    rows = [
        [*image, *text(4, seed=3), *image, *text(2, seed=4)],
        [*text(6, seed=1), *image, *text(9, seed=2)],
        [*text(8, seed=5), *image],
    ][:num_rows]
    number = sum(row.count(image[0]) for row in rows) if image else 0
    return padded(rows, "left") | ({"pixel_values": random_pixels(number)} if number else {})


class Put:
    """A streamer that records its calls."""

    def __init__(self):
        self.given, self.ended = [], 0

    def put(self, value):
        self.given.append(value.tolist())

    def end(self):
        self.ended += 1


def both_loops(model, batch: dict, theirs=None, ours=None, **options) -> torch.Tensor:
    """Return the ids of our loop, after comparing them with transformers' loop."""
    torch.manual_seed(0)
    expected = model.generate(**batch, **options, **(theirs or {}))
    torch.manual_seed(0)
    own = {"custom_generate": decode_without_sync} | (ours or {})
    ids = model.generate(**batch, **options, **own)
    assert ids.dtype == expected.dtype and ids.is_contiguous() and torch.equal(ids, expected)
    return ids


@pytest.mark.parametrize("max_lag", [0, 3], ids="lag {}".format)
@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_transformers_loop(model, mode, max_lag, monkeypatch):
    monkeypatch.setitem(loop.MAX_LAG, "cpu", max_lag)
    theirs, ours = Put(), Put()
    streams = ({"streamer": theirs}, {"token_streamer": ours}) if mode.startswith("greedy") else ()
    batch = batch_of(expanded_image() if max_lag else unexpanded_image(), 3)
    ids = both_loops(model, batch, *streams, **MODES[mode], **STATIC)
    if streams:
        assert ours.given == theirs.given and ours.ended == theirs.ended == 1
        assert len(ours.given) == 1 + ids.shape[1] - batch["input_ids"].shape[1]


def test_a_cache_with_tokens_beyond_the_end_is_reused(model, lag_of_two):
    caches, batch = StaticCaches(model, 64), batch_of(unexpanded_image(), 3)
    wanted = [model.generate(**batch, **GREEDY, **ends) for ends in (ENDS, NEVER)]
    for _ in range(2):
        for ends, want in zip((ENDS, NEVER), wanted, strict=True):
            options = caches.generate_kwargs(3, 60)
            assert torch.equal(model.generate(**batch, **GREEDY, **ends, **options), want)


def test_a_callers_criterion_is_called_as_often_as_by_transformers_loop(model, lag_of_two):
    """It may count its calls, so no token is generated before it is known to be needed."""
    calls: list[list] = []

    class Third(StoppingCriteria):
        def __call__(self, input_ids, scores, **options):
            calls[-1].append(input_ids.tolist())
            return torch.full((len(input_ids),), len(calls[-1]) == 3)

    for more in ({}, {"custom_generate": decode_without_sync}):
        calls.append([])
        arguments = GREEDY | NEVER | STATIC | {"stopping_criteria": [Third()]} | more
        model.generate(**batch_of(unexpanded_image()), **arguments)
    assert calls[0] == calls[1] and len(calls[0]) == 3


def test_an_incompatible_transformers_is_reported(model):
    """``generate`` sets the attribute that is missing here."""
    ends = StoppingCriteriaList([EosTokenCriteria(7)])
    arguments = model, torch.tensor([[5]]), LogitsProcessorList(), ends
    with pytest.raises(RuntimeError, match="no _pad_token_tensor in GenerationConfig.* install tr"):
        decode_without_sync(*arguments, GenerationConfig(num_beams=1, max_length=9))


@pytest.mark.parametrize("mode", ["greedy, ends", "min_new_tokens", "max_time"])
def test_the_host_does_not_synchronize_between_two_tokens(model, mode, lag_of_two):
    """From the second step to the last; transformers' loop synchronizes in every step."""
    between, forward = {}, model.forward
    for name, more in {"theirs": {}, "ours": {"custom_generate": decode_without_sync}}.items():
        marks = []
        with Calls() as calls, Operators() as operators, pytest.MonkeyPatch.context() as patch:

            def step(*args, marks=marks, counts=(calls, operators), **kwargs):
                marks.append([len(counter.waits) for counter in counts])
                return forward(*args, **kwargs)

            patch.setattr(model, "forward", wraps(forward)(step))
            torch.manual_seed(0)
            model.generate(**batch_of(unexpanded_image(), 3), **MODES[mode], **STATIC, **more)
        assert len(marks) > 3
        between[name] = [last - first for first, last in zip(marks[1], marks[-1], strict=True)]
    assert between["ours"] == [0, 0]
    assert min(between["theirs"]) > 0


def test_a_cache_is_reused_as_long_as_it_is_large_enough():
    caches = StaticCaches(tiny_model(), 64)
    first = caches.make_empty_cache(1, 64)
    assert caches.make_empty_cache(1, 64) is first
    larger = caches.make_empty_cache(1, 65)
    assert (
        first
        is not larger
        is caches.make_empty_cache(1, 128)
        is not caches.make_empty_cache(1, 129)
    )
    assert caches.make_empty_cache(2, 64) is not caches.make_empty_cache(
        1, 64
    )  # one is kept at a time


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_on_a_gpu_the_same_tokens_without_synchronization(mode):
    """With CUDA graphs. In the second run torch raises if a step synchronizes."""
    model = tiny_model(torch.bfloat16).to("cuda")
    batch = {name: x.cuda() for name, x in batch_of(unexpanded_image(), 3).items()}
    batch["pixel_values"] = batch["pixel_values"].bfloat16()

    caches = StaticCaches(model, 64)

    def generate(**more) -> torch.Tensor:
        torch.manual_seed(0)
        return model.generate(**batch, **mode, **more)

    call = loop._CachedSuppressTokens.__call__

    def call_and_forbid(self, *arguments):
        torch.cuda.set_sync_debug_mode("error" if self.is_suppressed is not None else "default")
        return call(self, *arguments)

    require_all_finite = loop.require_all_finite

    def require_finite_and_wait(finite_B):  # once, after the last step
        torch.cuda.set_sync_debug_mode("default")
        require_all_finite(finite_B)

    # Few end ids: torch.isin sorts many, which synchronizes.
    length = batch["input_ids"].shape[1]
    rows = generate(**NEVER)[:, length:].tolist()
    for ends in ([row[7 - 2 * number] for number, row in enumerate(rows)], None):
        own_cache = {CACHE_KEYWORD: StaticCache(config=model.config, max_cache_len=64)}
        expected = generate(eos_token_id=ends, disable_compile=True, **own_cache)
        assert torch.equal(generate(eos_token_id=ends, **caches.generate_kwargs(3, 60)), expected)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop._CachedSuppressTokens, "__call__", call_and_forbid)
            patch.setattr(loop, "require_all_finite", require_finite_and_wait)
            try:
                actual = generate(eos_token_id=ends, **caches.generate_kwargs(3, 60))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(actual, expected)


def test_a_decode_step_computes_all_tokens_but_the_first(model, lag_of_two):
    batch, calls = batch_of(expanded_image()), []
    expected = model.generate(**batch, **GREEDY, **NEVER)

    def step(**kwargs):
        calls.append(kwargs["input_ids"].shape)
        return model(**kwargs)

    options = StaticCaches(model, 64).generate_kwargs(2, 60)  # no CUDA graph on a CPU
    assert "decode_step" not in options and options["custom_generate"] is decode_without_sync
    actual = model.generate(**batch, **GREEDY, **NEVER, **options, decode_step=step)
    assert torch.equal(actual, expected) and calls == [(2, 1)] * (NEW - 1)


def test_a_graph_runs_is_captured_and_replayed_until_its_arguments_change(monkeypatch):
    seen, replayed = [], []

    class Graph:
        def replay(self):
            replayed.append(self)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **_: nullcontext())
    step = CudaGraphCallable(lambda ids, cache: seen.append((ids, cache)) or ids)
    cache = object()
    for number in range(3):
        step(ids=torch.tensor([number]), cache=cache)
    (first, _), (recorded, _) = seen  # nothing of the third
    assert first.tolist() == [0] and recorded.tolist() == [2] and len(replayed) == 2
    step(ids=torch.tensor([3]), cache=object())
    step(ids=torch.tensor([3, 4]), cache=cache)
    step(ids=torch.tensor([3, 4], dtype=torch.int32), cache=cache)
    assert len(seen) == 5 and len(replayed) == 2


@torch.no_grad()
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_graphed_tower_sees_each_image_and_several_at_once(device, monkeypatch):
    """Without a GPU's graph, a call that captures also runs, and a replay computes nothing."""
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
        monkeypatch.setattr(torch.cuda, "graph", lambda graph, **_: nullcontext())
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = tiny_model(dtype).to(device)
    images = random_pixels(2 if device == "cpu" else 4).to(device, dtype)
    tower = model.transformer.vision
    wanted = [tower(image[None]) for image in images]
    together = tower(images)
    use_implementations(model, ModelUsage(purpose=CUDA_GRAPHS))
    for _ in range(1 if device == "cpu" else 2):  # runs, is captured, and is replayed
        for image, features in zip(images, wanted, strict=True):
            assert torch.equal(tower(image[None]), features)
        assert torch.equal(tower(images), together)


@pytest.mark.gpu
def test_on_a_gpu_a_cuda_graph_computes_the_same_tokens():
    model = tiny_model(torch.bfloat16).to("cuda")
    batch = {name: x.cuda() for name, x in batch_of(unexpanded_image(), 3).items()}
    batch["pixel_values"] = batch["pixel_values"].bfloat16()
    caches = StaticCaches(model, 64)
    for new in (NEW, 5, NEW):  # the second and third replay the first one's graph
        options = GREEDY | NEVER | {"max_new_tokens": new}
        own_cache = {CACHE_KEYWORD: StaticCache(config=model.config, max_cache_len=64)}
        unrecorded = {"custom_generate": decode_without_sync, "decode_step": model.__call__}
        expected = model.generate(**batch, **options, **own_cache, **unrecorded)
        assert torch.equal(
            model.generate(**batch, **options, **caches.generate_kwargs(3, 60)), expected
        )
