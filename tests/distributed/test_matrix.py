"""A small part of the matrix, on the installed versions; tests/noxfile.py runs all of it.

Also what the matrix itself relies on: that its limits tell right numbers from wrong ones, and that
a cell which raises, dies or hangs is a failed cell.
"""

import json
from dataclasses import replace

import pytest
import torch

from tests.distributed.cell_worker import differences
from tests.distributed.matrix import GRADIENT_LIMIT, LOSS_LIMIT, _outcomes, run_cells
from tests.helpers import unsharded
from tests.helpers.cells import (
    PERSISTENCE,
    PRECISIONS,
    REENTRANT,
    WEIGHTS,
    WITHOUT_DEEPSPEED,
    ZERO_STAGES,
    Cell,
)
from tests.helpers.processes import Ended


def every_value_of_each_axis() -> list[Cell]:
    """Each strategy with each kind of weights; the other axes take turns."""
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
    ]


# To be compared bit for bit: the same training without checkpoints, and with both kinds.
PLAIN = [
    Cell(strategy, weights, "off", persistence="0" if strategy == "zero3" else None)
    for strategy, weights in [
        ("zero1", "all"),
        ("zero2", "lora_both"),
        ("zero3", "all"),
        ("zero3", "lora_both"),
        ("zero3", "frozen_vision"),
        ("zero3", "frozen_language"),
        ("fsdp2", "lora_both"),
        ("ddp", "all"),
    ]
]
CHECKPOINTED = [replace(cell, use_reentrant=mode) for cell in PLAIN for mode in (True, False)]
SKIPPING_LOGITS = [replace(PLAIN[3], use_reentrant=False, skip_logits=True)]
# 20 steps in which no, one or both ranks have an image.
MIXED = [
    Cell(
        strategy,
        weights,
        use_reentrant,
        persistence="0" if strategy == "zero3" else None,
        steps=20,
        images="changing",
    )
    for strategy, weights, use_reentrant in [
        ("zero3", "all", False),
        ("zero3", "lora_both", True),
        ("fsdp2", "lora_both", False),
    ]
]
WITHOUT_CURE = [
    replace(cell, cure=False)
    for cell in CHECKPOINTED
    if cell.is_zero3 and (cell.weights == "all" or cell.use_reentrant)
]
SMALL = list(
    dict.fromkeys(
        every_value_of_each_axis() + PLAIN + CHECKPOINTED + SKIPPING_LOGITS + MIXED + WITHOUT_CURE
    )
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Rows by cell, and the folder with each cell's losses and gradients."""
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
    want = torch.load(folder / f"{plain.name}.pt")
    got = torch.load(folder / f"{replace(plain, use_reentrant=mode).name}.pt")
    assert got["losses"] == want["losses"]
    for got_step, want_step in zip(got["gradients"], want["gradients"], strict=True):
        assert got_step.keys() == want_step.keys()
        for name, gradient in want_step.items():
            assert torch.equal(got_step[name], gradient), name


@pytest.mark.parametrize("without", WITHOUT_CURE, ids=lambda cell: cell.name)
def test_the_cure_gathers_no_more_often(without, trained):
    rows, _ = trained
    assert 0 < rows[replace(without, cure=True)]["gathers"] <= rows[without]["gathers"]


BREAKAGES = [
    (breakage, weights, precision)
    for breakage in ("another image", "one rank only", "gradients summed")
    for weights, precision in [*((w, "fp32") for w in WEIGHTS), *(("all", p) for p in PRECISIONS)]
    # Three small steps move the gradients by less than bf16 tells apart.
] + [("no optimizer step", weights, "fp32") for weights in WEIGHTS]


@pytest.mark.parametrize("breakage, weights, precision", dict.fromkeys(BREAKAGES))
def test_the_limits_refuse_wrong_numbers(breakage, weights, precision, monkeypatch):
    cell = Cell("zero3", weights, precision=precision)
    want = unsharded.unsharded_run(cell)
    batch = unsharded.rank_batch

    def with_another_image(cell, rank, step):
        other = batch(cell, rank, step)
        return {n: v.flip(-1) if n == "pixel_values" else v for n, v in other.items()}

    if breakage == "another image":
        monkeypatch.setattr(unsharded, "rank_batch", with_another_image)
    elif breakage == "one rank only":
        monkeypatch.setattr(unsharded, "rank_batch", lambda cell, rank, step: batch(cell, 0, step))
    elif breakage == "no optimizer step":
        monkeypatch.setattr(unsharded, "LEARNING_RATE", 0.0)
    got = unsharded.unsharded_run(cell)
    if breakage == "gradients summed":
        got["gradients"] = [{n: 2 * g for n, g in step.items()} for step in got["gradients"]]
    found = differences(got, want)
    assert (
        found["gradient_difference"] > 2 * GRADIENT_LIMIT[precision]
        or found["loss_difference"] > 2 * LOSS_LIMIT[precision]
    ), found


CUT_SHORT = [
    ('{"failed": "b", "reason": "CheckpointError: x"}', Ended(1, ""), "CheckpointError: x"),
    ("", Ended(1, "Timeout (0:01:00)!\n  the stack"), "hung: Timeout"),
    ("", Ended(None, ""), "hung: "),
    ("", Ended(-9, "killed"), "died: killed"),
]


@pytest.mark.parametrize("row_of_rank_1, ended, reason", CUT_SHORT)
def test_a_cell_that_does_not_end_well_has_failed(row_of_rank_1, ended, reason, tmp_path):
    rows = [{"started": "a"}, {"done": "a", "loss_difference": 0.0}, {"started": "b"}]
    (tmp_path / "rows.0.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "rows.1.jsonl").write_text(row_of_rank_1)
    found = _outcomes(tmp_path, ended)
    assert found["a"] == {"loss_difference": 0.0}
    assert found["b"]["reason"].startswith(reason)
