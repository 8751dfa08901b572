"""A small part of the matrix, on the installed versions; tests/noxfile.py runs all of it.

It also tests the matrix itself: its limits must refuse wrong numbers.
"""

from dataclasses import replace

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


def every_value_of_each_axis() -> list[Cell]:
    """Return ZeRO-3 cells with each choice of weights, and cells of the other strategies with half
    of them; the values of the other axes take turns."""
    strategies = (*ZERO_STAGES, *WITHOUT_DEEPSPEED)
    return [
        Cell(
            strategy,
            weights,
            REENTRANT[(s + w) % 3],
            PRECISIONS[(s + w // 3 + w) % 3],
            PERSISTENCE[(s + w) % 2] if ZERO_STAGES.get(strategy) == 3 else None,
        )
        for s, strategy in enumerate(strategies)
        for w, weights in enumerate(WEIGHTS)
        if strategy == "zero3" or (s + w) % 2
    ]


# Compared bit for bit: the same training without checkpoints, and with both kinds of them.
PLAIN = [
    Cell("zero1", "all", "off"),
    Cell("fsdp2", "lora_both", "off"),
    Cell("ddp", "all", "off"),
    Cell("zero3", "lora_both", "off", "bf16", "0"),
    *(
        Cell("zero3", weights, "off", persistence="0")
        for weights in ("all", "lora_both", "frozen_vision", "frozen_language")
    ),
]
CHECKPOINTED = [replace(cell, use_reentrant=mode) for cell in PLAIN for mode in (True, False)]
SKIPPING_LOGITS = [Cell("zero3", "lora_both", False, persistence="0", skip_logits=True)]
# 20 steps in which none, one or both ranks have an image.
MIXED = [
    Cell("zero3", "all", False, persistence="0", steps=20, images="changing"),
    Cell("zero3", "lora_both", True, persistence="0", steps=20, images="changing"),
    Cell("fsdp2", "lora_both", False, steps=20, images="changing"),
]
SMALL = every_value_of_each_axis() + PLAIN + CHECKPOINTED + SKIPPING_LOGITS + MIXED
SMALL = list(dict.fromkeys(SMALL))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train all cells; return rows by cell, and the folder with their losses and gradients."""
    gradients = tmp_path_factory.mktemp("matrix") / "gradients"
    gradients.mkdir()
    # In this order: DeepSpeed replaces torch's linear function for good.
    cells = sorted(SMALL, key=lambda cell: cell.strategy in ZERO_STAGES)
    return dict(zip(cells, run_cells(cells, gradients.parent), strict=True)), gradients


@pytest.mark.parametrize("cell", SMALL, ids=lambda cell: cell.name)
def test_two_processes_equal_one_without_sharding(cell, trained):
    row = trained[0][cell]
    if row["outcome"] == "cannot work":
        pytest.skip(row["reason"])
    assert row["outcome"] == "passed", row["reason"]


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("plain", PLAIN, ids=lambda cell: cell.name)
def test_checkpointed_gradients_equal_plain_ones_bitwise(plain, mode, trained):
    folder = trained[1]
    expected = torch.load(folder / f"{plain.name}.pt")
    actual = torch.load(folder / f"{replace(plain, use_reentrant=mode).name}.pt")
    assert actual["losses"] == expected["losses"]
    for step, expected_step in zip(actual["gradients"], expected["gradients"], strict=True):
        assert_close(step, expected_step)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("breakage", ["another image", "one rank only", "gradients summed"])
def test_the_limits_refuse_wrong_numbers(breakage, precision, monkeypatch):
    cell = Cell("zero3", "all", precision=precision)
    expected = matrix.unsharded_run(cell)
    batch = matrix.rank_batch

    def with_another_image(cell, rank, step):
        other = batch(cell, rank, step)
        return {n: v.flip(-1) if n == "pixel_values" else v for n, v in other.items()}

    if breakage == "another image":
        monkeypatch.setattr(matrix, "rank_batch", with_another_image)
    elif breakage == "one rank only":
        monkeypatch.setattr(matrix, "rank_batch", lambda cell, rank, step: batch(cell, 0, step))
    actual = matrix.unsharded_run(cell)
    if breakage == "gradients summed":
        actual["gradients"] = [{n: 2 * g for n, g in step.items()} for step in actual["gradients"]]
    errors = differences(actual, expected)
    assert (
        errors["gradient_difference"] > 2 * GRADIENT_LIMIT[precision]
        or errors["loss_difference"] > 2 * LOSS_LIMIT[precision]
    ), errors
