"""What becomes of measured rows: their file, the table, the pictures."""

import copy
import json
import re
import resource
import shlex
from itertools import product
from pathlib import Path

import pytest
from PIL import Image

from glm4v_patched.bench import charts
from glm4v_patched.bench.charts import PARTS, UNKNOWN, draw_pictures, memory_figure, speed_figure
from glm4v_patched.bench.table import (
    BEGIN,
    END,
    add_rows,
    cells_of,
    insert,
    markdown_table,
    read_rows,
    sort_rows,
)
from glm4v_patched.bench.training import command_of, settings_asked
from glm4v_patched.cli import _parser, main

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "docs" / "benchmarks"
FILES = sorted(BENCHMARKS.glob("bench_*.json"))
MEASURED = [row for file in FILES for row in read_rows(file)]
TRIED = read_rows(BENCHMARKS / "tried_h200_x2.json")
POLICIES, STEP = "policies of tower, language model", "step, s (fastest-slowest)"
SPEED = "samples/s/GPU"
OUT_OF_MEMORY = "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.0 GiB."


def make_row(trained="lora_lm", micro_batch=1, settings=None, **changes):
    asked = {"trained": trained, "tower": "none", "language": "full", "compile": True}
    row = {"workload": trained, "gpus": 2, "micro_batch": micro_batch, "text_tokens": 512}
    row |= {"samples_per_s_per_gpu": 1.25, "tokens_per_s_per_gpu": 1512.0, "roofline_share": 0.5}
    row |= {"peak_allocated_gib": 10.0 * micro_batch, "peak_reserved_gib": 12.0 * micro_batch}
    row |= {"device": "NVIDIA H200", "command": f"glm4v-patched bench --trained {trained}"}
    return row | {"settings": asked | (settings or {})} | changes


def fail(row, error=OUT_OF_MEMORY):
    """The row of processes that failed: no figures."""
    figures = ("samples", "tokens", "roofline", "peak", "device")
    return {name: row[name] for name in row if not name.startswith(figures)} | {"error": error}


def test_added_rows_are_one_valid_array_and_stay_when_the_disk_is_full(tmp_path):
    path, link = tmp_path / "rows.json", tmp_path / "link.json"
    link.symlink_to(path)
    rows = [make_row(micro_batch=1), make_row(micro_batch=2, losses=[float("nan"), 1.5])]
    for row in rows:
        add_rows(link, [row])
    before = path.read_text()
    assert json.loads(before) == [rows[0], rows[1] | {"losses": [None, 1.5]}]
    assert link.is_symlink() and "NaN" not in before
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            add_rows(path, rows)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == before and sorted(tmp_path.iterdir()) == [link, path]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (make_row("lora_lm"), {POLICIES: "-, full", SPEED: "1.25", STEP: "-", "roofline": "50%"}),
        # What was chosen, not what was asked for.
        (make_row("full", policies={"language": "every 2"}), {POLICIES: "none, every 2"}),
        (make_row(settings={"against": "original"}), {"method": "ZeRO-3, the original's code"}),
        (fail(make_row(gpus=1)), {"hardware": "1 GPU", SPEED: "out of memory"}),
        (fail(make_row(), "a|b\nis <none>"), {SPEED: "a|b is <none>"}),
    ],
    ids=["a frozen tower", "chosen policies", "the original's code", "no memory", "an error"],
)
def test_a_row_is_shown_with_what_it_has_and_no_more(row, told):
    assert told.items() <= cells_of(row).items()


def test_the_documented_table_has_every_row_beside_its_command():
    command = "glm4v-patched bench --rows docs/benchmarks/bench_*.json --into "
    command += "docs/benchmarks/README.md"
    page = (BENCHMARKS / "README.md").read_text()
    table = page[page.index(BEGIN) + len(BEGIN) : page.index(END)]
    assert table.strip() == markdown_table(MEASURED).strip(), f"run: {command}"
    assert command in page
    rows = re.findall(r"^\d+\. `([^`]+)` \(python", table, re.MULTILINE)
    assert sorted(rows) == sorted(row["command"] for row in MEASURED)
    assert r"| a\|b is &lt;none> |" in markdown_table([fail(make_row(), "a|b is <none>")])


def test_what_to_choose_is_measured():
    """Each row of the table by cards is a row of the results."""
    page = (ROOT / "docs" / "performance.md").read_text()
    pattern = r"^\| (\d) x (\d+) GB \| `(\w+)` \| (\d) \|.*\| ([\d.]+) \| ([\d.]+) \|$"
    chosen = re.findall(pattern, page, re.MULTILINE)
    assert len(chosen) >= 11
    results = [*MEASURED, *read_rows(BENCHMARKS / "fp8_h200_x2.json")]
    for gpus, gigabytes, trained, batch, speed, reserved in chosen:
        assert float(reserved) + 1.5 < int(gigabytes)  # of the cards' names, which count in GiB
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
        add_rows(file, [row])
    assert main(["bench", "--rows", *map(str, files)]) == 0
    assert capsys.readouterr().out == markdown_table(rows)
    assert main(["bench", "--rows", *map(str, files), "--pictures", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith(f"memory.png\n{tmp_path / 'speed.png'}\n")
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):
        assert main(["bench", "--rows", *map(str, files), "--into", str(path)]) == 0
        assert path.read_text() == f"before\n{BEGIN}\n\n{markdown_table(rows)}\n{END}\nafter\n"
    others = {"workload": "answers", "batch": 8, "picture": "9x9", "rows": 64, "new_tokens": 4}
    with pytest.raises(ValueError, match="rows of several kinds"):
        markdown_table([*rows, others])
    for text in (f"{END}\n{BEGIN}\n", f"{BEGIN}{BEGIN}{END}"):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"{text.count(BEGIN)} lines .* {text.count(END)}"):
            insert("table\n", path)
        assert path.read_text() == text


def test_a_rows_command_asks_for_its_settings():
    for row in MEASURED + TRIED:
        arguments = shlex.split(row["command"].removeprefix("TORCH_NCCL_HIGH_PRIORITY=1 "))[1:]
        (asked,) = settings_asked(_parser().parse_args(arguments))
        assert row["settings"].items() <= vars(asked).items(), row["command"]
        again = shlex.split(command_of(asked, row["gpus"], on_cpu=False))[1:]
        assert settings_asked(_parser().parse_args(again)) == [asked]
    # Of each, the original's code is measured after ours.
    both = _parser().parse_args(["bench", "--trained", "lm", "full", "--against", "original"])
    order = [(each.trained, each.against) for each in settings_asked(both)]
    assert order == [*product(("lm", "full"), (None, "original"))]


def test_a_bar_is_parted_as_far_as_the_parts_of_the_peak_are_known():
    known = dict(zip(PARTS, (4.0, 3.0, 2.0, 1.5, 1.0, 0.5), strict=False))
    rows = [
        make_row("lm", memory_gib=known, peak_allocated_gib=12.0, peak_reserved_gib=14.0),
        make_row("lm", memory_gib=dict.fromkeys(PARTS) | {"weights": 4.0, "rest": 1.0}),
        fail(make_row("full")),
        make_row("full", peak_allocated_gib=None, peak_reserved_gib=None),
    ]
    figure = memory_figure(rows)
    [axes] = figure.axes
    parts = {each.get_label(): [bar.get_width() for bar in each] for each in axes.containers}
    assert {name: sizes[0] for name, sizes in parts.items() if name in known} == known
    assert [parts[name][1] for name in ("weights", "rest", UNKNOWN)] == [4, 1, 5]
    assert [each[0].get_x() for each in axes.containers] == [0, 4, 7, 9, 10.5, 11.5, 12]
    assert list(axes.lines[0].get_xdata())[:2] == [14.0, 12.0]
    # A row without figures says why, where its bar would be.
    notes = [text.get_text().strip() for text in axes.texts]
    assert notes == ["", "", "out of memory", "not measured"]
    # A bar is named by what sets its row apart; the rest is the title.
    names = [label.get_text() for label in speed_figure(rows).axes[0].get_yticklabels()]
    assert names[0] == "1; lm; 2 x NVIDIA H200; -, full" and names[2].startswith("3; full; 2 GPUs;")
    assert figure.get_suptitle().startswith("micro-batch, ids of text: 1, 512; method: ZeRO-3\n")


def test_pictures_are_drawn_of_what_was_measured(tmp_path, monkeypatch):
    folder = tmp_path / "new" / "folder"
    assert draw_pictures([fail(make_row())], folder) == []
    of_cpu = make_row(peak_allocated_gib=None, device="cpu")
    assert [path.name for path in draw_pictures([of_cpu], folder)] == ["speed.png"]
    rows = [*TRIED, *(read_rows(file)[0] for file in FILES)]  # of any age
    before, numbered, draw = copy.deepcopy(rows), [], charts.speed_figure
    monkeypatch.setattr(charts, "speed_figure", lambda rows: numbered.append(rows) or draw(rows))
    drawn = draw_pictures(rows, folder)
    assert numbered == [sort_rows(rows)] != [rows]  # as in the table
    assert [path.name for path in drawn] == ["memory.png", "speed.png"] and rows == before
    for path in drawn:
        with Image.open(path) as picture:
            assert picture.format == "PNG" and picture.convert("L").getextrema() == (0, 255)
