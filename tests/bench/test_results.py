"""What becomes of measured rows: their file, the table, the pictures."""

import copy
import json
import re
import resource
import shlex
import sys
from pathlib import Path

import pytest
from PIL import Image

from glm4v_patched.bench import charts
from glm4v_patched.bench.charts import PARTS, UNKNOWN, draw_pictures, memory_figure, speed_figure
from glm4v_patched.bench.command import command_of, settings_asked
from glm4v_patched.bench.table import (
    BEGIN,
    COLUMNS,
    END,
    add_rows,
    insert,
    markdown_table,
    read_rows,
)
from glm4v_patched.cli import _parser, main
from glm4v_patched.engine.options import PACKAGES
from glm4v_patched.result_files import format_rows

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "docs" / "benchmarks"
FILES = sorted(BENCHMARKS.glob("bench_*.json"))
MEASURED = [row for file in FILES for row in read_rows(file)]
TRIED = read_rows(BENCHMARKS / "tried_h200_x2.json")
POLICIES, STEP = "policies of tower, language model", "step, s (fastest-slowest)"
# These contradict each other, and that is found last: should another check be gone, nothing runs.
NOTHING_RUNS = ["bench", "--zero-stage", "0", "--gpus", "2"]
UNUSUAL = {"compile": False, "offload": True, "layers_ahead": 1}
OUT_OF_MEMORY = "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.0 GiB."


def make_row(trained="lora_lm", micro_batch=1, settings=None, **changes):
    asked = {"trained": trained, "tower": "none", "language": "full", "compile": True}
    return {
        "workload": trained,
        "gpus": 2,
        "micro_batch": micro_batch,
        "text_tokens": 512,
        "settings": asked | (settings or {}),
        "samples_per_s_per_gpu": 1.25,
        "tokens_per_s_per_gpu": 1512.0,
        "roofline_share": 0.5,
        "peak_allocated_gib": 10.0 * micro_batch,
        "peak_reserved_gib": 12.0 * micro_batch,
        "device": "NVIDIA H200",
        "command": f"glm4v-patched bench --trained {trained}",
    } | changes


def fail(row, error=OUT_OF_MEMORY):
    """The row of processes that failed: no figures."""
    figures = ("samples", "tokens", "roofline", "peak", "device")
    return {name: row[name] for name in row if not name.startswith(figures)} | {"error": error}


# The file.


def test_added_rows_are_lines_of_one_valid_array(tmp_path):
    path, link = tmp_path / "rows.json", tmp_path / "link.json"
    link.symlink_to(path)
    rows = [make_row(micro_batch=1), make_row(micro_batch=2, losses=[float("nan"), 1.5])]
    for row in rows:
        add_rows(link, [row])
    assert link.is_symlink() and "NaN" not in path.read_text()
    found = json.loads(path.read_text())
    assert found == [rows[0], rows[1] | {"losses": [None, 1.5]}]
    first, *lines, last = path.read_text().splitlines()
    assert (first, last) == ("[", "]")
    assert [json.loads(line.rstrip(",")) for line in lines] == found


def test_a_file_keeps_its_rows_when_the_disk_is_full(tmp_path):
    path = tmp_path / "rows.json"
    add_rows(path, [make_row()])
    before = path.read_text()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            add_rows(path, [make_row(micro_batch=2)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == before and list(tmp_path.iterdir()) == [path]
    (tmp_path / "same").hardlink_to(path)
    add_rows(path, [make_row(micro_batch=2)])
    assert (tmp_path / "same").read_text() == before  # replaced as a whole, not written over


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b"[1]", b'[{"workload": "lm", "gpus": 2, "settings": {}}]', b"\xff\xfe"],
    ids=["empty", "an object", "a number", "a short row", "no text"],
)
def test_a_file_that_holds_no_rows_is_refused_before_anything_runs(tmp_path, refused, text):
    path = tmp_path / "rows.json"
    path.write_bytes(text)
    refused([*NOTHING_RUNS, "--out", path], str(path))
    assert path.read_bytes() == text


# The table.


def cells_of(text):
    """Of a Markdown table, each row by its columns' names."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    split = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    columns, _, *rows = split
    assert columns == [name for name in ("#", *COLUMNS) if name in columns]
    return [dict.fromkeys(COLUMNS, "-") | dict(zip(columns, row, strict=True)) for row in rows]


@pytest.mark.parametrize(
    ("row", "column", "text"),
    [
        (make_row(memory_limit_gib=22.5), "hardware", "2 x NVIDIA H200, at most 22.5 GiB"),
        (make_row(device="cpu", gpus=1), "hardware", "CPU, 1 process"),
        (fail(make_row(gpus=1)), "hardware", "1 GPU"),
        (make_row("lora_all"), POLICIES, "none, full"),
        (make_row("lora_lm"), POLICIES, "-, full"),  # a frozen tower keeps nothing
        # What was chosen, not what was asked for.
        (make_row("full", policies={"language": "every 2"}), POLICIES, "none, every 2"),
        (make_row("full", implementation="original"), POLICIES, "-"),
        (make_row(policies={"gathered": 9.44e9}), "live parameters", "9.4e+09"),
        (make_row(policies={"gathered": 1e9}, zero_stage=2), "live parameters", "-"),
        (make_row(zero_stage=0), "method", "no ZeRO"),
        (make_row(settings=UNUSUAL), "method", "ZeRO-3, no compile, offload, layers_ahead 1"),
        (make_row(settings={"against": "original"}), "method", "ZeRO-3, the original's code"),
        (make_row(samples_per_s_per_gpu=3.7), "samples/s/GPU", "3.70"),
        (make_row(), "tokens/s/GPU", "1,512"),
        (make_row(), "roofline", "50%"),
        (make_row(step_s={"median": 2, "fastest": 1, "slowest": 3.1}), STEP, "2.000 (1.000-3.100)"),
        (make_row(), STEP, "-"),
        (make_row(peak_reserved_gib=1.36), "reserved", "1.4"),
        (fail(make_row()), "samples/s/GPU", "out of memory"),
        (fail(make_row()), "tokens/s/GPU", "-"),
        (fail(make_row(), "a\nnot done after 600 s"), "samples/s/GPU", "not done in time"),
        (fail(make_row(), "Signal 9 (SIGKILL) received"), "samples/s/GPU", "killed"),
        (fail(make_row(), "a|b\nis <none>"), "samples/s/GPU", r"a\|b is &lt;none>"),
        (fail(make_row(), "x" * 100), "samples/s/GPU", "x" * 57 + "..."),
    ],
)
def test_a_row_in_words(row, column, text):
    (cells,) = cells_of(markdown_table([row]))
    assert cells[column] == text


def test_rows_stand_by_workload_and_hardware_and_those_of_an_ablation_below():
    rows = [make_row(added="b"), make_row("qlora"), make_row("full")]
    rows += [make_row("lm", device="NVIDIA A100"), make_row("lm", 2), make_row(added="a")]
    cells = cells_of(markdown_table(rows))
    order = [rows[n]["command"] for n in (2, 3, 4, 1, 0, 5)]
    assert [f"glm4v-patched bench --trained {cell['trained']}" for cell in cells] == order
    assert [cell["added"] for cell in cells] == ["-"] * 4 + ["b", "a"]
    assert "| added |" not in markdown_table(rows[1:5])  # which says nothing of any row


def test_the_documented_table_has_every_row_beside_its_command():
    command = "glm4v-patched bench --rows docs/benchmarks/bench_*.json --into "
    command += "docs/benchmarks/README.md"
    page = (BENCHMARKS / "README.md").read_text()
    table = page[page.index(BEGIN) + len(BEGIN) : page.index(END)]
    assert table.strip() == markdown_table(MEASURED).strip(), f"run: {command}"
    assert command in page
    commands, cells = re.findall(r"^\d+\. `([^`]+)` \(python", table, re.MULTILINE), cells_of(table)
    shown = [(c, cell["tokens/s/GPU"]) for c, cell in zip(commands, cells, strict=True)]
    rows = [(row["command"], f"{row['tokens_per_s_per_gpu']:,.0f}") for row in MEASURED]
    assert sorted(shown) == sorted(rows)


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
        file.write_text(format_rows([row]))
    assert main(["bench", "--rows", *map(str, files)]) == 0
    assert capsys.readouterr().out == markdown_table(rows)
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):
        assert main(["bench", "--rows", *map(str, files), "--into", str(path)]) == 0
        assert path.read_text() == f"before\n{BEGIN}\n\n{markdown_table(rows)}\n{END}\nafter\n"


@pytest.mark.parametrize("text", ["", f"{END}\n{BEGIN}\n", f"{BEGIN}{BEGIN}{END}"])
def test_a_page_without_both_markers_is_refused_and_left_alone(tmp_path, text):
    path = tmp_path / "page.md"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{text.count(BEGIN)} lines .* {text.count(END)} lines"):
        insert("table\n", path)
    assert path.read_text() == text


# The command.


@pytest.mark.parametrize("row", MEASURED + TRIED, ids=lambda row: row["command"][-40:])
def test_a_rows_command_asks_for_its_settings(row):
    arguments = shlex.split(row["command"].removeprefix("TORCH_NCCL_HIGH_PRIORITY=1 "))[1:]
    (asked,) = settings_asked(_parser().parse_args(arguments))
    recorded = row["settings"]
    assert {name: getattr(asked, name) for name in recorded} == recorded
    again = shlex.split(command_of(asked, row["gpus"], on_cpu=False))[1:]
    assert settings_asked(_parser().parse_args(again)) == [asked]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--into", "README.md"], "--into"),
        (["--rows", str(FILES[0]), "--out", "new.json"], "--rows"),
        (["--rows", "none.json"], "none.json"),
        (["--batch", "8"], "--batch"),
        (["--torchao", "int8"], "--torchao int8"),
        (["--python", "python3"], "--python"),
        (["--out", "none/rows.json"], "none"),
        (["--pictures", "file"], "file"),
        (["--liger"], "liger needs not_there"),
        (["--trained", "lm", "qlora"], "qlora needs not_there"),
        (["--optimizer", "adamw_8bit"], "adamw_8bit needs not_there"),
        ([], "zero_stage 0 on 2 processes"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value[:1]),
)
def test_options_that_cannot_work_are_refused(tmp_path, refused, monkeypatch, arguments, named):
    for choice in ("liger", "qlora", "adamw_8bit"):
        monkeypatch.setitem(PACKAGES, choice, ["not_there"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    refused([*NOTHING_RUNS, *arguments], named)


# The pictures.


def bars_of(figure):
    """Of each bar, by its place: its parts from the left, as (name, left end, length)."""
    bars = {}
    for container in figure.axes[0].containers:
        for bar in container:
            part = (container.get_label(), bar.get_x(), bar.get_width())
            bars.setdefault(round(bar.get_y() + bar.get_height() / 2), []).append(part)
    return {place: [part for part in bar if part[2]] for place, bar in bars.items()}


def names_of(figure):
    return [label.get_text().replace("\n", " ") for label in figure.axes[0].get_yticklabels()]


def test_a_bar_is_parted_as_far_as_the_parts_of_the_peak_are_known():
    sizes = (4.0, 3.0, 2.0, 1.5, 1.0, 0.5)
    known = dict(zip(PARTS, sizes, strict=False))
    rows = [
        make_row(memory_gib=known, peak_allocated_gib=12.0, peak_reserved_gib=14.0),
        make_row(memory_gib=dict.fromkeys(PARTS) | {"weights": 4.0, "rest": 1.0}),
        make_row(memory_gib={"before the first step": 3.0, "between steps": 3.0}),
        make_row(micro_batch=2, memory_gib=None),
    ]
    figure = memory_figure(rows)
    lefts = (0, 4.0, 7.0, 9.0, 10.5, 11.5)
    assert bars_of(figure) == {
        0: [(name, *ends) for name, *ends in zip(known, lefts, sizes, strict=True)],
        1: [("weights", 0, 4.0), ("rest", 4.0, 1.0), (UNKNOWN, 5.0, 5.0)],
        2: [(UNKNOWN, 0, 10.0)],
        3: [(UNKNOWN, 0, 20.0)],
    }
    (reserved,) = [line for line in figure.axes[0].lines if line.get_label() == "reserved"]
    assert list(reserved.get_xdata()) == [14.0, 12.0, 12.0, 24.0]


def test_a_row_without_figures_says_why_where_its_bar_would_be():
    rows = [make_row(), fail(make_row()), make_row(peak_allocated_gib=None, peak_reserved_gib=None)]
    for draw, places, notes in (
        (memory_figure, [0], ["", "out of memory", "not measured"]),
        (speed_figure, [0, 2], ["", "out of memory", ""]),
    ):
        figure = draw(rows)
        assert [place for place, bar in bars_of(figure).items() if bar] == places
        assert [text.get_text().strip() for text in figure.axes[0].texts[:3]] == notes


def test_a_bar_is_named_by_what_sets_its_row_apart():
    rows = [make_row("lm", 4), make_row("lm", 4, settings={"optimizer": "adamw_8bit"})]
    rows.append(make_row("full", 4, memory_limit_gib=24))
    figure = speed_figure(rows)
    assert names_of(figure) == [
        "1; lm; 2 x NVIDIA H200; -, full; ZeRO-3",
        "2; lm; 2 x NVIDIA H200; -, full; ZeRO-3, optimizer adamw_8bit",
        "3; full; 2 x NVIDIA H200, at most 24 GiB; none, full; ZeRO-3",
    ]
    assert figure.get_suptitle() == (
        f"micro-batch, ids of text: 4, 512\nrows: #; trained; hardware; {POLICIES}; method"
    )
    (name,) = names_of(speed_figure(rows[:1]))
    assert name == "1; lm; 2 x NVIDIA H200; 4, 512; -, full; ZeRO-3"


@pytest.mark.parametrize(
    ("row", "names"),
    [
        (make_row(), ["memory.png", "speed.png"]),
        (fail(make_row()), []),
        (make_row(peak_allocated_gib=None, device="cpu"), ["speed.png"]),
    ],
)
def test_pictures_are_drawn_of_what_was_measured(tmp_path, row, names):
    assert [path.name for path in draw_pictures([row], tmp_path / "new" / "folder")] == names


@pytest.mark.parametrize("rows", [MEASURED, TRIED], ids=len)
def test_rows_of_any_age_are_drawn_and_left_as_they_are(tmp_path, rows):
    before = copy.deepcopy(rows)
    for path in draw_pictures(rows, tmp_path):
        with Image.open(path) as picture:
            assert picture.format == "PNG" and picture.convert("L").getextrema() == (0, 255)
    assert rows == before


def test_the_command_draws_the_rows_it_reads_in_the_tables_order(
    tmp_path, capsys, monkeypatch, refused
):
    drawn, speed, file = [], charts.speed_figure, tmp_path / "rows.json"
    monkeypatch.setattr(charts, "memory_figure", lambda rows: drawn.append(rows) or speed(rows))
    file.write_text(format_rows([make_row("qlora"), make_row(added="a"), make_row("lm")]))
    command = ["bench", "--rows", str(file), "--pictures", str(tmp_path)]
    assert main(command) == 0
    assert [row["workload"] for row in drawn[0]] == ["lm", "qlora", "lora_lm"]
    assert capsys.readouterr().out.endswith(f"memory.png\n{tmp_path / 'speed.png'}\n")
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as where it is not installed
    refused([*NOTHING_RUNS, "--pictures", tmp_path], "matplotlib")
