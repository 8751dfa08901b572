"""The loop that waits for the device between no two tokens: it gives what transformers' loop gives.

On a CPU it would look at each token at once; ``late`` makes it do as on a GPU.
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
    unexpanded_image,
    tiny_model,
)
from tests.helpers.waits import Calls, Operators

NEW = 12
GREEDY = {"max_new_tokens": NEW, "pad_token_id": PAD, "do_sample": False}
SAMPLED = GREEDY | {"do_sample": True, "top_k": 50}
# A token in nine ends a row, so that rows end at unlike steps.
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
def two_late(monkeypatch) -> None:
    monkeypatch.setitem(loop.LATE, "cpu", 2)


def batch_of(image: list[int], num_rows: int = 2) -> dict[str, torch.Tensor]:
    """Unlike padding on the left, and one or two images a row."""
    rows = [
        [*image, *text(4, seed=3), *image, *text(2, seed=4)],
        [*text(6, seed=1), *image, *text(9, seed=2)],
        [*text(8, seed=5), *image],
    ][:num_rows]
    number = sum(row.count(image[0]) for row in rows) if image else 0
    return padded(rows, "left") | ({"pixel_values": random_pixels(number)} if number else {})


class Put:
    """A streamer that keeps what it is given."""

    def __init__(self):
        self.given, self.ended = [], 0

    def put(self, value):
        self.given.append(value.tolist())

    def end(self):
        self.ended += 1


def both_loops(
    model, batch: dict, theirs: dict | None = None, ours=None, **options
) -> torch.Tensor:
    """The ids of our loop, which are those of transformers'."""
    want, got = (
        model.generate(**batch, **options, **seeded)
        for seeded in map(seed, (theirs or {}, {"custom_generate": decode_without_sync} | (ours or {})))
    )
    assert got.dtype == want.dtype and got.is_contiguous() and torch.equal(got, want)
    return got


def seed(options: dict) -> dict:
    torch.manual_seed(0)
    return options


@pytest.mark.parametrize("late", [0, 3], ids="{} late".format)
@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_transformers_loop(model, mode, late, monkeypatch):
    monkeypatch.setitem(loop.LATE, "cpu", late)
    theirs, ours = Put(), Put()
    streams = ({"streamer": theirs}, {"tokens_to": ours}) if mode.startswith("greedy") else ()
    batch = batch_of(expanded_image() if late else unexpanded_image(), 3)
    got = both_loops(model, batch, *streams, **MODES[mode], **STATIC)
    if streams:
        assert ours.given == theirs.given and ours.ended == theirs.ended == 1
        assert len(ours.given) == 1 + got.shape[1] - batch["input_ids"].shape[1]


def test_a_cache_that_was_drawn_into_beyond_the_end_is_used_again(model, two_late):
    caches, batch = StaticCaches(model, 64), batch_of(unexpanded_image(), 3)
    wanted = [model.generate(**batch, **GREEDY, **ends) for ends in (ENDS, NEVER)]
    for _ in range(2):
        for ends, want in zip((ENDS, NEVER), wanted, strict=True):
            options = caches.generate_kwargs(3, 60)
            assert torch.equal(model.generate(**batch, **GREEDY, **ends, **options), want)


def test_a_callers_criterion_is_called_as_often_as_by_transformers_loop(model, two_late):
    """It may count, and so no token is drawn before it is known that one is wanted."""
    calls: list[list] = []

    class Third(StoppingCriteria):
        def __call__(self, input_ids, scores, **options):
            calls[-1].append(input_ids.tolist())
            return torch.full((len(input_ids),), len(calls[-1]) == 3)

    for more in ({}, {"custom_generate": decode_without_sync}):
        calls.append([])
        given = GREEDY | NEVER | STATIC | {"stopping_criteria": [Third()]} | more
        model.generate(**batch_of(unexpanded_image()), **given)
    assert calls[0] == calls[1] and len(calls[0]) == 3


def test_a_transformers_that_differs_is_told(model):
    """``generate`` gives the config what is missing here."""
    ends = StoppingCriteriaList([EosTokenCriteria(7)])
    given = model, torch.tensor([[5]]), LogitsProcessorList(), ends
    with pytest.raises(RuntimeError, match="no _pad_token_tensor in GenerationConfig.* install tr"):
        decode_without_sync(*given, GenerationConfig(num_beams=1, max_length=9))


@pytest.mark.parametrize("mode", ["greedy, ends", "min_new_tokens", "max_time"])
def test_nothing_waits_for_the_device_between_two_tokens(model, mode, two_late):
    """From the first token to the end; with transformers' loop every step does."""
    between, forward = {}, model.forward
    for name, more in {"theirs": {}, "ours": {"custom_generate": decode_without_sync}}.items():
        marks = []
        with Calls() as calls, Operators() as operators, pytest.MonkeyPatch.context() as patch:

            def step(*args, marks=marks, counts=(calls, operators), **given):
                marks.append([len(each.waits) for each in counts])
                return forward(*args, **given)

            patch.setattr(model, "forward", wraps(forward)(step))
            torch.manual_seed(0)
            model.generate(**batch_of(unexpanded_image(), 3), **MODES[mode], **STATIC, **more)
        assert len(marks) > 3
        # From the second step to the last one.
        between[name] = [last - first for first, last in zip(marks[1], marks[-1], strict=True)]
    assert between["ours"] == [0, 0]
    assert min(between["theirs"]) > 0


def test_a_cache_is_used_again_as_long_as_it_has_room():
    caches = StaticCaches(tiny_model(), 64)
    first = caches.of(1, 64)
    assert caches.of(1, 64) is first
    larger = caches.of(1, 65)
    assert first is not larger is caches.of(1, 128) is not caches.of(1, 129)
    assert caches.of(2, 64) is not caches.of(1, 64)  # one is kept at a time


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_on_a_gpu_the_same_tokens_without_a_wait(mode):
    """By recorded steps. The second time torch raises where anything waits in one."""
    model = tiny_model(torch.bfloat16).to("cuda")
    batch = {name: x.cuda() for name, x in batch_of(unexpanded_image(), 3).items()}
    batch["pixel_values"] = batch["pixel_values"].bfloat16()

    caches = StaticCaches(model, 64)

    def drawn(**more) -> torch.Tensor:
        torch.manual_seed(0)
        return model.generate(**batch, **mode, **more)

    call = loop._Suppressed.__call__

    def call_and_forbid(self, *given):
        torch.cuda.set_sync_debug_mode("error" if self.is_suppressed is not None else "default")
        return call(self, *given)

    require_finite = loop.require_finite

    def require_finite_and_wait(finite_B):  # once, after the last step
        torch.cuda.set_sync_debug_mode("default")
        require_finite(finite_B)

    # Few ids end a row: torch.isin sorts many, and waits.
    length = batch["input_ids"].shape[1]
    rows = drawn(**NEVER)[:, length:].tolist()
    for ends in ([row[7 - 2 * number] for number, row in enumerate(rows)], None):
        kept = {CACHE_KEYWORD: StaticCache(config=model.config, max_cache_len=64)}
        wanted = drawn(eos_token_id=ends, disable_compile=True, **kept)
        assert torch.equal(drawn(eos_token_id=ends, **caches.generate_kwargs(3, 60)), wanted)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop._Suppressed, "__call__", call_and_forbid)
            patch.setattr(loop, "require_finite", require_finite_and_wait)
            try:
                got = drawn(eos_token_id=ends, **caches.generate_kwargs(3, 60))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(got, wanted)


def test_a_given_step_draws_all_tokens_but_the_first(model, two_late):
    batch, calls = batch_of(expanded_image()), []
    wanted = model.generate(**batch, **GREEDY, **NEVER)

    def step(**given):
        calls.append(given["input_ids"].shape)
        return model(**given)

    options = StaticCaches(model, 64).generate_kwargs(2, 60)  # on a CPU it records nothing
    assert "step" not in options and options["custom_generate"] is decode_without_sync
    got = model.generate(**batch, **GREEDY, **NEVER, **options, step=step)
    assert torch.equal(got, wanted) and calls == [(2, 1)] * (NEW - 1)


def test_a_step_runs_is_recorded_and_replayed_until_its_arguments_change(monkeypatch):
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
def test_a_recorded_tower_is_called_and_recorded_with_the_towers_own_arguments(monkeypatch):
    """The GPU's graph is left out: a call that records also runs."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **_: nullcontext())
    model, images = tiny_model(), random_pixels(2)
    tower = model.transformer.vision
    wanted = [tower(image[None]) for image in images]
    together = tower(images)
    use_implementations(model, ModelUsage(purpose=CUDA_GRAPHS))
    for image, features in zip(images, wanted, strict=True):  # the first runs, the second records
        assert torch.equal(tower(image[None]), features)
    assert torch.equal(tower(images), together)


@pytest.mark.gpu
def test_on_a_gpu_a_recorded_step_draws_what_it_draws_unrecorded():
    model = tiny_model(torch.bfloat16).to("cuda")
    batch = {name: x.cuda() for name, x in batch_of(unexpanded_image(), 3).items()}
    batch["pixel_values"] = batch["pixel_values"].bfloat16()
    caches = StaticCaches(model, 64)
    for new in (NEW, 5, NEW):  # the second and third replay what the first recorded
        options = GREEDY | NEVER | {"max_new_tokens": new}
        kept = {CACHE_KEYWORD: StaticCache(config=model.config, max_cache_len=64)}
        unrecorded = {"custom_generate": decode_without_sync, "step": model.__call__}
        wanted = model.generate(**batch, **options, **kept, **unrecorded)
        assert torch.equal(model.generate(**batch, **options, **caches.generate_kwargs(3, 60)), wanted)


@pytest.mark.gpu
def test_on_a_gpu_a_recorded_tower_sees_each_image_and_several_at_once():
    model = tiny_model(torch.bfloat16).to("cuda")
    images = torch.randn(4, 3, 56, 56, device="cuda").bfloat16()
    tower = model.transformer.vision
    with torch.no_grad():
        wanted = [tower(image[None]) for image in images]
        together = tower(images)
        use_implementations(model, ModelUsage(purpose=CUDA_GRAPHS))
        for _ in range(2):  # it runs, is recorded, and is replayed
            for image, features in zip(images, wanted, strict=True):
                assert torch.equal(tower(image[None]), features)
            assert torch.equal(tower(images), together)
