"""Inputs of remote's tests, gradients, and generated tokens."""

import torch
from PIL import Image

from tests.helpers.tiny import BOI, expanded_image, padded, random_pixels, text

IMAGE = "<|begin_of_image|><|endoftext|><|end_of_image|>"
SAMPLE_OPTIONS = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 500}
GREEDY = SAMPLE_OPTIONS | {"do_sample": False}


def user(content, **rest) -> list[dict]:
    return [{"role": "user", "content": content, **rest}]


def pil_image(color="red") -> Image.Image:
    return Image.new("RGB", (30, 20), color)


def prompts(image: list[int], num_rows: int = 2) -> dict[str, torch.Tensor]:
    """Sequences with different numbers of images and, if there are two, different padding."""
    rows = [
        [*image, *text(4, seed=3), *image, *text(2, seed=4)],
        [*text(6, seed=1), *image, *text(9, seed=2)],
    ][:num_rows]
    number = sum(row.count(BOI) for row in rows)
    return padded(rows, "left") | ({"pixel_values": random_pixels(number)} if number else {})


def two_sequences(image: list[int] | None = None) -> dict[str, torch.Tensor]:
    """A sequence with an image (expanded by default) and a shorter text; labels for all tokens."""
    image = expanded_image() if image is None else image
    inputs = padded([[*text(3, seed=1), *image, *text(4, seed=2)], text(5, seed=3)], "left")
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    return inputs | {"pixel_values": random_pixels(1) if image else None, "labels": labels}


def gradients(model, **inputs) -> dict[str, torch.Tensor]:
    """Gradients of the loss, by parameter, and the loss itself."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    by_name = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return by_name | {"loss": loss.detach()}


def assert_close(actual: dict[str, torch.Tensor], want: dict[str, torch.Tensor], atol=0.0) -> None:
    assert actual.keys() == want.keys()
    for name, value in want.items():
        assert (actual[name] - value).abs().max() <= atol, name


def new_tokens(model, batch: dict, **options) -> torch.Tensor:
    length = batch["input_ids"].shape[1] if "input_ids" in batch else 0
    return model.generate(**batch, **(GREEDY | options))[:, length:]
