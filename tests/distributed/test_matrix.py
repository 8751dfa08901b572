"""A small part of the matrix, on the installed versions; tests/noxfile.py runs all of it.

It also tests the matrix itself: its limits must refuse wrong numbers.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.distributed import matrix
from tests.distributed.cells import (
    PERSISTENCE,
    PRECISIONS,
    REENTRANT,
    WEIGHTS,
    WITHOUT_DEEPSPEED,
    ZERO_STAGES,
    Cell,
)
from tests.distributed.matrix import GRADIENT_LIMIT, LOSS_LIMIT, differences, run_cells
from tests.remote.inputs import assert_close


def every_value_of_each_axis() -> list[list[Cell]]:
    """Return for each strategy cells with half of the choices of weights, for ZeRO-3 with all; the
    values of the other axes take turns."""
    strategies = (*ZERO_STAGES, *WITHOUT_DEEPSPEED)
    return [
        [
            Cell(
                strategy,
                weights,
                REENTRANT[(s + w) % 3],
                PRECISIONS[(s + w // 3 + w) % 3],
                PERSISTENCE[(s + w) % 2] if ZERO_STAGES.get(strategy) == 3 else None,
            )
            for w, weights in enumerate(WEIGHTS)
            if strategy == "zero3" or (s + w) % 2
        ]
        for s, strategy in enumerate(strategies)
    ]


def with_checkpoints(plain: list[Cell]) -> list[Cell]:
    """Return the cells, and each again with both kinds of activation checkpoints."""
    return plain + [replace(cell, use_reentrant=mode) for cell in plain for mode in (True, False)]


# Compared bit for bit: the same training without checkpoints, and with both kinds of them.
PLAIN = [
    Cell("ddp", "all", "off"),
    Cell("fsdp2", "lora_both", "off"),
    Cell("zero3", "lora_both", "off", "bf16", "0"),
    Cell("zero3", "all", "off", persistence="0"),
]
SLOW_PLAIN = [
    Cell("zero1", "all", "off"),
    *(
        Cell("zero3", weights, "off", persistence="0")
        for weights in ("lora_both", "frozen_vision", "frozen_language")
    ),
]
# Steps in which none, one or both ranks have an image: all four in eight steps, in every order in
# twenty.
MIXED = Cell("zero3", "all", False, persistence="0", steps=8, images="changing", skip_logits=True)
BY_STRATEGY = every_value_of_each_axis()
# By default, ZeRO-3 with each choice of weights, and the others with one of them.
DEFAULT = with_checkpoints(PLAIN) + [MIXED, replace(MIXED, strategy="fsdp2", persistence=None)]
for number, cells in enumerate(BY_STRATEGY):
    DEFAULT += cells[1:] if cells[0].strategy == "zero3" else [cells[number % 3]]
SLOW = with_checkpoints(SLOW_PLAIN) + [cell for cells in BY_STRATEGY for cell in cells]
SLOW += [
    replace(MIXED, steps=20, skip_logits=False),
    replace(MIXED, weights="lora_both", use_reentrant=True, steps=20, skip_logits=False),
]
SLOW = [cell for cell in SLOW if cell not in DEFAULT]


def slow_after(default: list, slow: list) -> list:
    return [*default, *(pytest.param(cell, marks=pytest.mark.slow) for cell in slow)]


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Return a function that trains all default cells, or all slow ones, of which a cell is one.

    It returns the cell's row, and the folder with losses and gradients of them all.
    """

    @cache
    def train_all(is_slow: bool) -> tuple[dict[Cell, dict], Path]:
        gradients = tmp_path_factory.mktemp("matrix") / "gradients"
        gradients.mkdir()
        # In this order: DeepSpeed replaces torch's linear function for good.
        cells = sorted(SLOW if is_slow else DEFAULT, key=lambda cell: cell.strategy in ZERO_STAGES)
        return dict(zip(cells, run_cells(cells, gradients.parent), strict=True)), gradients

    def train(cell: Cell) -> tuple[dict, Path]:
        rows, gradients = train_all(cell in SLOW)
        return rows[cell], gradients

    return train


@pytest.mark.parametrize("cell", slow_after(DEFAULT, SLOW), ids=lambda cell: cell.name)
def test_two_processes_equal_one_without_sharding(cell, train):
    row, _ = train(cell)
    if row["outcome"] == "cannot work":
        pytest.skip(row["reason"])
    assert row["outcome"] == "passed", row["reason"]


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("plain", slow_after(PLAIN, SLOW_PLAIN), ids=lambda cell: cell.name)
def test_checkpointed_gradients_equal_plain_ones_bitwise(plain, mode, train):
    _, folder = train(plain)
    expected = torch.load(folder / f"{plain.name}.pt")
    actual = torch.load(folder / f"{replace(plain, use_reentrant=mode).name}.pt")
    assert actual["losses"] == expected["losses"]
    for step, expected_step in zip(actual["gradients"], expected["gradients"], strict=True):
        assert_close(step, expected_step)


@cache
def unbroken(precision: str) -> dict:
    return matrix.unsharded_run(Cell("zero3", "all", precision=precision))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("breakage", ["another image", "one rank only", "gradients summed"])
def test_the_limits_refuse_wrong_numbers(breakage, precision, monkeypatch):
    expected, batch = unbroken(precision), matrix.rank_batch

    def with_another_image(cell, rank, step):
        other = batch(cell, rank, step)
        return {n: v.flip(-1) if n == "pixel_values" else v for n, v in other.items()}

    broken = {
        "another image": with_another_image,
        "one rank only": lambda cell, rank, step: batch(cell, 0, step),
    }
    if breakage == "gradients summed":
        doubled = [{n: 2 * g for n, g in step.items()} for step in expected["gradients"]]
        actual = expected | {"gradients": doubled}
    else:
        monkeypatch.setattr(matrix, "rank_batch", broken[breakage])
        actual = matrix.unsharded_run(Cell("zero3", "all", precision=precision))
    errors = differences(actual, expected)
    assert (
        errors["gradient_difference"] > 2 * GRADIENT_LIMIT[precision]
        or errors["loss_difference"] > 2 * LOSS_LIMIT[precision]
    ), errors
