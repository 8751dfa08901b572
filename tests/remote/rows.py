"""Rows of all sorts, their labels and gradients, and tokens drawn after them."""

import torch

from tests.helpers.tiny import grown_image, padded, pictures, text

GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 500}


def rows_with(image: list[int]) -> list[list[int]]:
    """Rows of unlike lengths: no image, one inside, two adjacent, at the start, at the end, all."""
    return [
        text(9, seed=1),
        [*text(4, seed=2), *image, *text(6, seed=3)],
        [*text(2, seed=4), *image, *image, *text(3, seed=5)],
        [*image, *text(5, seed=6)],
        [*text(7, seed=7), *image],
        [*image, *text(1, seed=8), *image, *text(4, seed=9), *image, *text(2, seed=10)],
    ]


def two_rows(image: list[int] | None = None, side: str = "left") -> dict[str, torch.Tensor]:
    """One with an image, grown unless it is given, and a shorter one of text; all is learned."""
    image = grown_image() if image is None else image
    inputs = padded([[*text(3, seed=1), *image, *text(4, seed=2)], text(5, seed=3)], side)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    return inputs | {"pixel_values": pictures(1) if image else None, "labels": labels}


def labels_for(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A label at every real position but the first, which is predicted from nothing of its row."""
    mask = batch["attention_mask"]
    return batch["input_ids"].masked_fill((mask == 0) | (mask.cumsum(dim=1) == 1), -100)


def gradients(model, **inputs) -> dict[str, torch.Tensor]:
    """Gradients of the loss, by parameter, and the loss itself."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found | {"loss": loss.detach()}


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def new_tokens(model, batch: dict, **options) -> torch.Tensor:
    length = batch["input_ids"].shape[1] if "input_ids" in batch else 0
    return model.generate(**batch, **(GREEDY | options))[:, length:]
