"""Two processes with different inputs, whose weights are sharded: each has the results of one
process, although its answer is shorter, it has no image, or it has fewer supervised tokens."""

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from glm4v_patched.remote.keywords import CACHE_KEYWORD
from tests.distributed.strategies import (
    Training,
    gather_from_both_ranks,
    save_on_rank_0,
    select_weights,
    zero_config,
)
from tests.helpers.processes import run_two_processes
from tests.helpers.tiny import (
    BOI,
    EOI,
    PAD,
    expanded_image,
    golden_weights,
    random_pixels,
    small_model,
    text,
    tiny_model,
)

STATIC = {"cache_implementation": "static"}
OPTIONS = {
    "dynamic cache": {},
    "static cache": STATIC,
    "no cache": {"use_cache": False},
    "beams": {"num_beams": 2},
}
NEW_TOKENS = (2, 7)  # of the process with an image, and of the other one
SEQ_LENGTH = 24  # of the model whose answers reach it in the process with an image


def generate(model, synced: bool, rank: int, inputs: dict, **options) -> list[int]:
    limits = {"max_new_tokens": NEW_TOKENS[rank], "do_sample": False, "eos_token_id": None}
    return model.generate(**inputs, **limits | options, synced_gpus=synced)[0].tolist()


def pixels(rank: int) -> dict:
    return {"pixel_values": random_pixels(1)} if rank == 0 else {}


def answer(model, rank: int, synced: bool, has_image: bool = True, **options) -> list[int]:
    if rank or not has_image:
        return generate(model, synced, rank, {"input_ids": torch.tensor([text(4)])}, **options)
    ids = torch.tensor([[*text(3), BOI, PAD, EOI, *text(2)]])
    return generate(model, synced, rank, {"input_ids": ids} | pixels(0), **options)


def answer_at_the_limit(model, rank: int, synced: bool, **options) -> list[int]:
    return answer(model, rank, synced, max_new_tokens=(200, 30)[rank], **options)


def embeddings(rank: int) -> torch.Tensor:
    ids = torch.tensor([text(3) + (expanded_image() if rank == 0 else []) + text(4)])
    return golden_weights()["transformer.embedding.word_embeddings.weight"][ids]


def answer_embeddings(model, rank: int, synced: bool, **options) -> list[int]:
    return generate(
        model, synced, rank, {"inputs_embeds": embeddings(rank)} | pixels(rank), **options
    )


def second_turn(rank: int) -> list[int]:
    return [*([BOI, PAD, EOI] if rank == 0 else []), *text(3, seed=9)]


def answer_twice(model, rank: int, synced: bool) -> list[int]:
    options = {CACHE_KEYWORD: DynamicCache(config=model.config)}
    first = {"input_ids": torch.tensor([text(4)])}
    ids = generate(model, synced, rank, first, **options) + second_turn(rank)
    return generate(
        model, synced, 1 - rank, {"input_ids": torch.tensor([ids])} | pixels(rank), **options
    )


@torch.no_grad()
def continue_by_hand(model, rank: int, synced: bool) -> list[int]:
    cache = DynamicCache(config=model.config)
    model(input_ids=torch.tensor([text(4)]), past_key_values=cache)
    ids = torch.tensor([second_turn(rank)])
    return model(input_ids=ids, past_key_values=cache, **pixels(rank)).logits[0].argmax(-1).tolist()


ANSWERS = {name: partial(answer, **options) for name, options in OPTIONS.items()}
ANSWERS |= {
    f"{name}, no image": partial(answer, has_image=False, **options)
    for name, options in OPTIONS.items()
}
ANSWERS |= {
    "embeddings": answer_embeddings,
    "embeddings, static cache": partial(answer_embeddings, **STATIC),
    "embeddings, beams": partial(answer_embeddings, num_beams=2),
    "second turn": answer_twice,
    "second turn by hand": continue_by_hand,
}
AT_THE_LIMIT = {
    f"{name} at the limit": partial(answer_at_the_limit, **options)
    for name, options in (OPTIONS | {"prompt lookup": {"prompt_lookup_num_tokens": 2}}).items()
}
STRATEGIES = ("zero3", "fsdp2")


def model_at_limit():
    return tiny_model(seq_length=SEQ_LENGTH).eval()


def losses_in_chunks(train, model, rank: int) -> float:
    """Return the loss of 3 or 17 supervised tokens, in chunks of 4, after a backward pass."""
    ids = torch.tensor([text((4, 18)[rank], seed=rank)])
    loss = (train or model)(input_ids=ids, labels=ids).loss
    loss.backward() if train is None else train.backward(loss)
    return loss.item()


def model_with_saved_head():
    model = select_weights(small_model(), "lora_modules_to_save")
    model.config.loss_chunk_size, model.config.skip_logits = 4, True
    return model


def on_each_rank(folder: Path) -> None:
    rank = torch.distributed.get_rank()
    results: dict = {}
    for strategy in STRATEGIES:
        for make_model, answers in ((tiny_model, ANSWERS), (model_at_limit, AT_THE_LIMIT)):
            model = make_model().eval()
            training = Training(model, strategy, zero_config())
            for name, compute in answers.items():
                results[strategy, name] = compute(model, rank, True)
            training.close()
        model = model_with_saved_head()
        training = Training(model, strategy, zero_config())
        results[strategy, "loss"] = losses_in_chunks(training, model, rank)
        training.close()
    save_on_rank_0(gather_from_both_ranks(results), folder / "results.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("synced")
    run_two_processes(on_each_rank, folder, seconds=300)
    return torch.load(folder / "results.pt")


@pytest.mark.parametrize("name", [*ANSWERS, *AT_THE_LIMIT])
def test_both_processes_answer_as_one_does(name, results):
    model = tiny_model().eval() if name in ANSWERS else model_at_limit()
    for rank in (0, 1):
        expected = (ANSWERS | AT_THE_LIMIT)[name](model, rank, False)
        for strategy in STRATEGIES:
            assert results[rank][strategy, name] == expected, (strategy, rank)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_losses_of_different_numbers_of_chunks_are_those_of_one_process(strategy, results):
    for rank in (0, 1):
        expected = losses_in_chunks(None, model_with_saved_head(), rank)
        assert results[rank][strategy, "loss"] == pytest.approx(expected, rel=1e-4)
