"""Measured rows: their files and their tables."""

import json
import re
import shlex
from pathlib import Path

import pytest

from glm4v_patched.bench.table import (
    BEGIN_MARKER,
    END_MARKER,
    append_measurements,
    cells_of,
    insert_table,
    markdown_table,
    read_measurements,
)
from glm4v_patched.bench.training import command_of, requested_settings
from glm4v_patched.cli import _build_parser, main
from tests.helpers.full_disk import files_of_at_most

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "docs" / "benchmarks"
FILES = sorted(BENCHMARKS.glob("bench_*.json"))
MEASURED = [row for file in FILES for row in read_measurements(file)]
POLICIES, STEP = "policies of tower, language model", "step, s (fastest-slowest)"
SPEED = "samples/s/GPU"
OUT_OF_MEMORY = "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.0 GiB."


def make_row(trained="lora_lm", micro_batch=1, settings=None, **changes):
    changed = {"trained": trained, "tower": "none", "language": "full"}
    row = {"workload": trained, "gpus": 2, "micro_batch": micro_batch, "text_tokens": 512}
    row |= {"samples_per_s_per_gpu": 1.25, "tokens_per_s_per_gpu": 1512.0, "roofline_share": 0.5}
    row |= {"peak_allocated_gib": 10.0 * micro_batch, "peak_reserved_gib": 12.0 * micro_batch}
    row |= {"device": "NVIDIA H200", "command": f"glm4v-patched bench --trained {trained}"}
    return row | {"settings": changed | (settings or {})} | changes


def fail(row, error=OUT_OF_MEMORY):
    """Return the row without figures, as of processes that failed."""
    figures = ("samples", "tokens", "roofline", "peak", "device")
    return {name: row[name] for name in row if not name.startswith(figures)} | {"error": error}


def test_rows_are_added_to_the_file_of_a_link_as_one_array_and_stay_when_the_disk_is_full(tmp_path):
    path, link = tmp_path / "rows.json", tmp_path / "link.json"
    link.symlink_to(path)
    rows = [make_row(micro_batch=1), make_row(micro_batch=2, losses=[float("nan"), 1.5])]
    for row in rows:
        append_measurements(link, [row])
    before = path.read_text()
    assert json.loads(before) == [rows[0], rows[1] | {"losses": [None, 1.5]}]
    assert link.is_symlink() and "NaN" not in before
    with files_of_at_most(len(before) + 10), pytest.raises(OSError, match="File too large"):
        append_measurements(path, rows)
    assert path.read_text() == before and sorted(tmp_path.iterdir()) == [link, path]


@pytest.mark.parametrize(
    ("row", "cells"),
    [
        (make_row("lora_lm"), {POLICIES: "-, full", SPEED: "1.25", STEP: "-", "roofline": "50%"}),
        # The chosen policy replaces the requested one.
        (make_row("full", policies={"language": "every 2"}), {POLICIES: "none, every 2"}),
        (make_row(settings={"compile": False, "fp8": True}), {"method": "ZeRO-3, no compile, fp8"}),
        (make_row(settings={"stage3_max_live_parameters": 0}), {"live parameters": "0"}),
        (fail(make_row(gpus=1)), {"hardware": "1 GPU", SPEED: "out of memory"}),
        (fail(make_row(), "a|b\nis <none>"), {SPEED: "a|b is <none>"}),
    ],
    ids=[
        "a frozen tower",
        "chosen policies",
        "other settings",
        "0 live parameters",
        "no memory",
        "an error",
    ],
)
def test_cells_describe_a_row_and_its_error(row, cells):
    assert cells.items() <= cells_of(row).items()


def test_the_documented_table_has_every_row_and_its_command():
    command = "glm4v-patched bench --rows docs/benchmarks/bench_*.json --into "
    command += "docs/benchmarks/README.md"
    page = (BENCHMARKS / "README.md").read_text()
    table = page[page.index(BEGIN_MARKER) + len(BEGIN_MARKER) : page.index(END_MARKER)]
    assert table.strip() == markdown_table(MEASURED).strip(), f"run: {command}"
    assert command in page
    rows = re.findall(r"^\d+\. `([^`]+)` \(python", table, re.MULTILINE)
    assert sorted(rows) == sorted(row["command"] for row in MEASURED)
    assert r"| a\|b is &lt;none> |" in markdown_table([fail(make_row(), "a|b is <none>")])


def test_the_recommendations_by_gpu_memory_are_measured():
    """Each row of the table in performance.md is a measured row."""
    page = (ROOT / "docs" / "performance.md").read_text()
    pattern = r"^\| (\d) x (\d+) GB \| `(\w+)` \| (\d) \|.*\| ([\d.]+) \| ([\d.]+) \|$"
    chosen = re.findall(pattern, page, re.MULTILINE)
    assert len(chosen) >= 11
    results = [*MEASURED, *read_measurements(BENCHMARKS / "fp8_h200_x2.json")]
    for gpus, gigabytes, trained, batch, speed, reserved in chosen:
        assert float(reserved) + 1.5 < int(gigabytes)  # cards are named by their GiB
        assert [
            row
            for row in results
            if (row["gpus"], row["workload"], row["micro_batch"])
            == (int(gpus), trained, int(batch))
            and float(f"{row['samples_per_s_per_gpu']:.3g}") == float(speed)
            and round(row["peak_reserved_gib"], 1) == float(reserved)
        ]


def test_a_table_goes_between_the_markers_and_nowhere_else(tmp_path, capsys):
    path, files = tmp_path / "page.md", [tmp_path / "a.json", tmp_path / "b.json"]
    rows = [make_row("lm"), fail(make_row("full"))]
    for file, row in zip(files, rows, strict=True):
        append_measurements(file, [row])
    assert main(["bench", "--rows", *map(str, files)]) == 0
    assert capsys.readouterr().out == markdown_table(rows)
    path.write_text(f"before\n{BEGIN_MARKER}\nold\n{END_MARKER}\nafter\n")
    for _ in range(2):
        assert main(["bench", "--rows", *map(str, files), "--into", str(path)]) == 0
        page = f"before\n{BEGIN_MARKER}\n\n{markdown_table(rows)}\n{END_MARKER}\nafter\n"
        assert path.read_text() == page
    others = {"workload": "answers", "batch": 8, "image": "9x9", "rows": 64, "new_tokens": 4}
    with pytest.raises(ValueError, match="rows of several workloads"):
        markdown_table([*rows, others])
    for text in (f"{END_MARKER}\n{BEGIN_MARKER}\n", f"{BEGIN_MARKER}{BEGIN_MARKER}{END_MARKER}"):
        path.write_text(text)
        numbers = f"{text.count(BEGIN_MARKER)} lines .* {text.count(END_MARKER)}"
        with pytest.raises(ValueError, match=numbers):
            insert_table("table\n", path)
        assert path.read_text() == text


def test_a_table_goes_into_the_page_that_a_link_leads_to(tmp_path):
    page, link = tmp_path / "page.md", tmp_path / "link.md"
    page.write_text(f"{BEGIN_MARKER}{END_MARKER}")
    link.symlink_to(page)
    insert_table("table\n", link)
    assert link.is_symlink() and "table" in page.read_text()


def test_a_row_s_command_repeats_its_settings():
    options = "bench --trained lm full --gpus 1 --micro-batch 3 --compile true --packed"
    arguments = _build_parser().parse_args([*options.split(), "--tower", "every 2"])
    for settings in requested_settings(arguments):
        command = shlex.split(command_of(settings, 1, on_cpu=False))
        assert requested_settings(_build_parser().parse_args(command[1:])) == [settings]
    assert (settings.trained, settings.engine.tower, settings.micro_batch) == ("full", "every 2", 3)
