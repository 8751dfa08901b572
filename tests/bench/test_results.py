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

from glm4v_patched.bench.command import command_of, settings_asked
from glm4v_patched.bench.pictures import PARTS, UNKNOWN, draw_pictures, memory_figure, speed_figure
from glm4v_patched.bench.rows import (
    BEGIN,
    COLUMNS,
    END,
    add_row,
    format_rows,
    insert,
    markdown_table,
    read_rows,
)
from glm4v_patched.bench.settings import settings_of
from glm4v_patched.cli import _parser, main
from glm4v_patched.engine.options import PACKAGES
from glm4v_patched.printed import pip_install

POLICIES = "policies of tower, language model"
ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "docs" / "benchmarks"
FILES = sorted(BENCHMARKS.glob("bench_*.json"))
MEASURED = [row for file in FILES for row in read_rows(file)]
TRIED = read_rows(BENCHMARKS / "tried_h200_x2.json")


def make_row(workload="lora_lm", micro_batch=1, text_tokens=512, settings=None, **changes):
    """A row as ``bench`` writes it; speed and memory tell micro-batch and text length apart."""
    asked = {"workload": workload, "tower": "none", "language": "full", "compile": True}
    return {
        "workload": workload,
        "implementation": "ours",
        "gpus": 2,
        "micro_batch": micro_batch,
        "text_tokens": text_tokens,
        "zero_stage": 3,
        "memory_limit_gib": None,
        "settings": asked | (settings or {}),
        "samples_per_s_per_gpu": 1.25,
        "tokens_per_s_per_gpu": 1000.0 * micro_batch + text_tokens,
        "roofline_share": 0.5,
        "peak_allocated_gib": 10.0 * micro_batch + text_tokens / 1000,
        "peak_reserved_gib": 12.0 * micro_batch + text_tokens / 1000,
        "device": "NVIDIA H200",
        "command": f"glm4v-patched bench --workload {workload}",
    } | changes


def fail(row, error):
    """The row of processes that failed: no figures."""
    figures = ("samples", "tokens", "roofline", "peak", "device")
    return {name: row[name] for name in row if not name.startswith(figures)} | {"error": error}


# These contradict each other, and that is found last: should another check be gone, nothing runs.
NOTHING_RUNS = ["bench", "--zero-stage", "0", "--gpus", "2"]
OUT_OF_MEMORY = "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.0 GiB."


# The file.


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_of_rows_is_written_as_it_was_read(file):
    assert format_rows(read_rows(file)) == file.read_text()


def test_added_rows_are_lines_of_one_valid_array(tmp_path):
    path = tmp_path / "rows.json"
    rows = [make_row(micro_batch=1), make_row(micro_batch=2, losses=[float("nan"), 1.5])]
    for row in rows:
        add_row(path, row)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    found = json.loads(path.read_text(), parse_constant=refuse)
    assert found == [rows[0], rows[1] | {"losses": [None, 1.5]}]
    first, *lines, last = path.read_text().splitlines()
    assert (first, last) == ("[", "]")
    assert [json.loads(line.rstrip(",")) for line in lines] == found


def test_a_file_keeps_its_rows_when_the_disk_is_full(tmp_path):
    path = tmp_path / "rows.json"
    add_row(path, make_row())
    before = path.read_text()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            add_row(path, make_row(micro_batch=2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_to_a_file_of_rows_stays_one(tmp_path):
    path, link = tmp_path / "rows.json", tmp_path / "link.json"
    link.symlink_to(path)
    add_row(link, make_row())
    assert link.is_symlink() and len(read_rows(path)) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is no file of rows"),
        (b'{"workload": "lm"}\n{"workload": "lm"}\n', "is no file of rows"),
        (b"{}", "holds a JSON dict, no array"),
        (b"[1]", "entry 1 of 1 has no gpus, micro_batch"),
        (b'[{"workload": "lm", "gpus": 2, "settings": {}}]', "1 has no micro_batch, text_tokens"),
        (b"\xff\xfe", "is no file of rows"),
    ],
)
def test_a_file_that_holds_no_rows_is_refused_before_anything_runs(tmp_path, capsys, text, message):
    path = tmp_path / "rows.json"
    path.write_bytes(text)
    assert main([*NOTHING_RUNS, "--out", str(path)]) == 1
    printed = capsys.readouterr()
    assert message in printed.err and "or a new file" in printed.err
    assert printed.out == "" and path.read_bytes() == text


# The table.


def cells_of(text):
    """Of a Markdown table, each row by its columns' names."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    columns, _, *rows = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines
    ]
    assert columns == [name for name in ("#", *COLUMNS) if name in columns]
    return [dict.fromkeys(COLUMNS, "-") | dict(zip(columns, row, strict=True)) for row in rows]


def test_every_measured_row_stands_in_the_table_beside_its_command():
    text = markdown_table(MEASURED)
    commands = dict(re.findall(r"^(\d+)\. `([^`]+)`", text, re.MULTILINE))
    cells = cells_of(text)
    assert len(cells) == len(commands) == len(MEASURED)
    left = list(MEASURED)
    for cell in cells:
        row = next(
            row
            for row in left
            if row["command"] == commands[cell["#"]] and row.get("added", "-") == cell["added"]
        )
        left.remove(row)
        assert cell["trained"] == row["workload"]
        shape = f"{row['micro_batch']}, {row['text_tokens']:,}"
        assert cell["micro-batch, ids of text"] == shape
        for column, name, rounding in (
            ("samples/s/GPU", "samples_per_s_per_gpu", {"rel": 0.006}),  # three digits
            ("tokens/s/GPU", "tokens_per_s_per_gpu", {"abs": 0.51}),
            ("GiB allocated", "peak_allocated_gib", {"abs": 0.051}),
            ("reserved", "peak_reserved_gib", {"abs": 0.051}),
        ):
            assert float(cell[column].replace(",", "")) == pytest.approx(row[name], **rounding)
        assert cell["roofline"] == f"{100 * row['roofline_share']:.0f}%"
        seconds = [float(number) for number in re.findall(r"[\d.]+", cell[COLUMNS[-3]])]
        assert seconds == pytest.approx([*row["step_s"].values()], abs=6e-4)
        assert cell["hardware"].startswith(f"{row['gpus']} x {row['device']}")
        assert f"torch {row['versions']['torch']}" in text


@pytest.mark.parametrize(
    ("row", "column", "text"),
    [
        (make_row(), "hardware", "2 x NVIDIA H200"),
        (make_row(memory_limit_gib=22.5), "hardware", "2 x NVIDIA H200, at most 22.5 GiB"),
        (make_row(device="cpu", gpus=1), "hardware", "CPU, 1 process"),
        (fail(make_row(gpus=1), "?"), "hardware", "1 GPU"),
        (make_row("lora_all"), POLICIES, "none, full"),
        (make_row("lora_lm"), POLICIES, "-, full"),  # a frozen tower keeps nothing
        (  # what was chosen, not what was asked for
            make_row("full", policies={"tower": "every 2", "language": "selective"}),
            POLICIES,
            "every 2, selective",
        ),
        (make_row("full", implementation="original"), POLICIES, "-"),
        (make_row(settings={"kept_gathered": 2e8}), "live parameters", "2e+08"),
        (make_row(policies={"gathered": 9.44e9}), "live parameters", "9.4e+09"),
        (make_row(policies={"gathered": 1e9}, zero_stage=2), "live parameters", "-"),
        (make_row(), "method", "ZeRO-3"),
        (make_row(zero_stage=0), "method", "no ZeRO"),
        (
            make_row(
                settings={"optimizer": "adamw_8bit", "compile": False, "layers_ahead": 1},
            ),
            "method",
            "ZeRO-3, no compile, optimizer adamw_8bit, layers_ahead 1",
        ),
        (
            make_row(settings={"offload": True, "shortest_text": 64, "gather_in_place": False}),
            "method",
            "ZeRO-3, offload, shortest_text 64, no gather_in_place",
        ),
        (make_row(settings={"against": "original"}), "method", "ZeRO-3, the original's code"),
        (make_row(samples_per_s_per_gpu=0.01234), "samples/s/GPU", "0.0123"),
        (make_row(samples_per_s_per_gpu=3.7), "samples/s/GPU", "3.70"),
        (make_row(peak_reserved_gib=None), "reserved", "-"),
    ],
)
def test_a_row_in_words(row, column, text):
    (cells,) = cells_of(markdown_table([row]))
    assert cells[column] == text


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OUT_OF_MEMORY, "out of memory"),
        ("RuntimeError: HIP out of memory", "out of memory"),
        ("a\nb\nnot done after 600 s", "not done in time"),
        ("traceback : Signal 9 (SIGKILL) received by PID 7", "killed"),
        ("ValueError: a|b\nis <none>", r"ValueError: a\|b is &lt;none>"),
        ("ValueError: " + "x" * 100, "ValueError: " + "x" * 45 + "..."),
    ],
)
def test_a_failed_row_says_why_and_has_no_figures(error, reason):
    (cells,) = cells_of(markdown_table([fail(make_row(), error)]))
    assert cells["samples/s/GPU"] == reason
    assert [cells[name] for name in COLUMNS[COLUMNS.index("tokens/s/GPU") :]] == ["-"] * 5


def test_rows_stand_by_workload_and_hardware_and_those_of_an_ablation_below():
    rows = [
        make_row(text_tokens=9, added="b"),
        make_row("qlora", text_tokens=1),
        make_row("full", text_tokens=3),
        make_row("lm", text_tokens=4, device="NVIDIA A100"),
        make_row("lm", text_tokens=2),
        make_row(text_tokens=8, added="a"),
    ]
    text = markdown_table(rows)
    cells = cells_of(text)
    assert [cell["micro-batch, ids of text"][-1] for cell in cells] == [
        "3",
        "4",
        "2",
        "1",
        "9",
        "8",
    ]
    assert [cell["#"] for cell in cells] == ["1", "2", "3", "4", "5", "6"]
    assert [cell["added"] for cell in cells] == ["-"] * 4 + ["b", "a"]
    assert "| added |" not in markdown_table(rows[1:5])  # which says nothing of any row


def test_the_documented_table_is_what_the_rows_give():
    command = "glm4v-patched bench --rows docs/benchmarks/bench_*.json --into "
    command += "docs/benchmarks/README.md"
    page = (BENCHMARKS / "README.md").read_text()
    table = page[page.index(BEGIN) + len(BEGIN) : page.index(END)]
    assert table.strip() == markdown_table(MEASURED).strip(), f"run: {command}"
    assert command in page


def test_what_to_choose_is_measured():
    """Each row of the table by cards is a row of the results."""
    page = (ROOT / "docs" / "performance.md").read_text()
    pattern = r"^\| (\d) x (\d+) GB \| `(\w+)` \| (\d) \|.*\| ([\d.]+) \| ([\d.]+) \|$"
    chosen = re.findall(pattern, page, re.MULTILINE)
    assert len(chosen) >= 10
    measured = {
        (
            *(str(row["gpus"]), row["workload"], str(row["micro_batch"])),
            float(f"{row['samples_per_s_per_gpu']:.3g}"),
            round(row["peak_reserved_gib"], 1),
        )
        for row in MEASURED
    }
    for gpus, gigabytes, *row, speed, reserved in chosen:
        assert (gpus, *row, float(speed), float(reserved)) in measured
        assert float(reserved) + 1.5 < int(gigabytes)  # of the cards' names, which count in GiB


def test_a_table_goes_between_the_markers_and_nowhere_else(tmp_path, capsys):
    path = tmp_path / "page.md"
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    rows = [make_row("lm"), fail(make_row("full"), OUT_OF_MEMORY)]
    for file, row in zip(files, rows, strict=True):
        file.write_text(format_rows([row]))
    assert main(["bench", "--rows", *map(str, files)]) == 0
    assert capsys.readouterr().out == markdown_table(rows)
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):
        assert main(["bench", "--rows", *map(str, files), "--into", str(path)]) == 0
        assert path.read_text() == f"before\n{BEGIN}\n\n{markdown_table(rows)}\n{END}\nafter\n"
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("text", ["", f"{BEGIN}\n", f"{END}\n{BEGIN}\n", f"{BEGIN}{BEGIN}{END}"])
def test_a_page_without_both_markers_is_refused_and_left_alone(tmp_path, text):
    path = tmp_path / "page.md"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{text.count(BEGIN)} lines .* {text.count(END)} lines"):
        insert("table\n", path)
    assert path.read_text() == text


# The command.


@pytest.mark.parametrize("row", MEASURED + TRIED, ids=lambda row: row["command"][-40:])
def test_a_rows_command_asks_for_its_settings(row):
    """Of old rows, too: options that were renamed since are still taken."""
    arguments = shlex.split(row["command"].removeprefix("TORCH_NCCL_HIGH_PRIORITY=1 "))[1:]
    (asked,) = settings_asked(_parser().parse_args(arguments))
    recorded = settings_of(row)
    assert {name: getattr(asked, name) for name in recorded} == recorded
    again = shlex.split(command_of(asked, row["gpus"], on_cpu=False))[1:]
    assert settings_asked(_parser().parse_args(again)) == [asked]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--into", "README.md"], "name them with --rows"),
        (["--ablation", "--against", "original"], "--ablation with --against"),
        (["--rows", str(FILES[0]), "--out", "new.json"], "--rows measures nothing"),
        (["--rows", "none.json"], "none.json"),
        (["--out", "none/rows.json"], "is no folder; make it first"),
        (["--pictures", __file__], "is a file; pictures need a folder"),
    ],
)
def test_options_that_cannot_work_are_refused(arguments, message, capsys):
    assert main([*NOTHING_RUNS, *arguments]) == 1
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == ""


@pytest.mark.parametrize(
    ("choice", "arguments"),
    [
        ("liger", ["--liger"]),
        ("adamw_8bit", ["--optimizer", "adamw_8bit"]),
        ("qlora", ["--trained", "lm", "qlora"]),
    ],
)
def test_what_a_choice_lacks_is_said_before_anything_runs(choice, arguments, capsys, monkeypatch):
    monkeypatch.setitem(PACKAGES, choice, ["not_there"])
    assert main([*NOTHING_RUNS, *arguments]) == 1
    assert f"{choice} needs not_there: {pip_install('not_there')}" in capsys.readouterr().err


# The pictures.


def bars_of(figure):
    """Of each bar, by its place: its parts from the left, as (name, left end, length)."""
    bars = {}
    for container in figure.axes[0].containers:
        for bar in container:
            part = (container.get_label(), bar.get_x(), bar.get_width())
            bars.setdefault(round(bar.get_y() + bar.get_height() / 2), []).append(part)
    return {place: [part for part in bar if part[2]] for place, bar in bars.items()}


def notes_of(figure):
    return {text.get_position()[1]: text.get_text().strip() for text in figure.axes[0].texts}


def reserved_of(figure):
    (marks,) = [line for line in figure.axes[0].lines if line.get_label() == "reserved"]
    return list(marks.get_xdata())


def names_of(figure):
    return [label.get_text().replace("\n", " ") for label in figure.axes[0].get_yticklabels()]


def test_a_bar_is_parted_as_far_as_the_parts_of_the_peak_are_known():
    parts = dict(zip(PARTS, (4.0, 3.0, 2.0, 1.5, 1.0, 0.5), strict=False))
    rows = [
        make_row(memory_gib=parts, peak_allocated_gib=12.0, peak_reserved_gib=14.0),
        make_row(memory_gib=dict.fromkeys(PARTS) | {"weights": 4.0, "rest": 1.0}),
        make_row(memory_gib={"before the first step": 3.0, "between steps": 3.0}),
        make_row(micro_batch=2, memory_gib=None),
    ]
    figure = memory_figure(rows)
    assert bars_of(figure) == {
        0: [
            ("weights", 0, 4.0),
            ("gradients", 4.0, 3.0),
            ("optimizer", 7.0, 2.0),
            ("activations", 9.0, 1.5),
            ("logits", 10.5, 1.0),
            ("rest", 11.5, 0.5),
        ],
        1: [("weights", 0, 4.0), ("rest", 4.0, 1.0), (UNKNOWN, 5.0, pytest.approx(5.512))],
        2: [(UNKNOWN, 0, pytest.approx(10.512))],
        3: [(UNKNOWN, 0, pytest.approx(20.512))],
    }
    assert reserved_of(figure) == [14.0, 12.512, 12.512, 24.512]


def test_a_row_without_figures_says_why_where_its_bar_would_be():
    row = fail(make_row(micro_batch=2), OUT_OF_MEMORY)
    rows = [make_row(), row, make_row(peak_allocated_gib=None, peak_reserved_gib=None)]
    figure = memory_figure(rows)
    assert notes_of(figure) == {0: "", 1: "out of memory", 2: "not measured"}
    assert [place for place, bar in bars_of(figure).items() if bar] == [0]
    figure = speed_figure(rows)
    speeds = {place: bar[0][2] for place, bar in bars_of(figure).items() if bar}
    assert speeds == {0: 1512.0, 2: 1512.0}
    assert "out of memory" in notes_of(figure).values()


def test_a_bar_is_named_by_what_sets_its_row_apart():
    rows = [make_row("lm", 4), make_row("lm", 4, settings={"optimizer": "adamw_8bit"})]
    rows.append(make_row("full", 4, memory_limit_gib=24))
    figure = speed_figure(rows)
    assert names_of(figure) == [
        "1; lm; 2 x NVIDIA H200; -, full; ZeRO-3",
        "2; lm; 2 x NVIDIA H200; -, full; ZeRO-3, optimizer adamw_8bit",
        "3; full; 2 x NVIDIA H200, at most 24 GiB; none, full; ZeRO-3",
    ]
    assert figure.axes[0].get_title() == "micro-batch, ids of text: 4, 512"
    assert figure.axes[0].get_ylabel() == f"#; trained; hardware; {POLICIES}; method"
    (name,) = names_of(speed_figure(rows[:1]))
    assert name == "1; -; lm; 2 x NVIDIA H200; 4, 512; -, full; -; ZeRO-3"


ABLATION = [make_row(added=f"measure {n}") for n in range(3)]


@pytest.mark.parametrize("rows", [MEASURED, TRIED, ABLATION, MEASURED[:1]], ids=len)
@pytest.mark.parametrize("draw", [memory_figure, speed_figure])
def test_pictures_of_rows_of_any_age_are_whole_and_legible(draw, rows):
    before = copy.deepcopy(rows)
    figure = draw(rows)
    figure.draw_without_rendering()
    assert rows == before
    (axes,) = figure.axes
    names = [label.get_window_extent() for label in axes.get_yticklabels()]
    assert len(names) == len(rows) and min(name.x0 for name in names) >= 0
    assert all(above.y0 > below.y1 for above, below in zip(names, names[1:], strict=False))
    assert axes.get_position().width >= 0.4  # of the figure
    peaks = [row.get("peak_allocated_gib", 0) for row in rows]
    speeds = [row.get("tokens_per_s_per_gpu", 0) for row in rows]
    bars = {place: sum(part[2] for part in bar) for place, bar in bars_of(figure).items()}
    expected = peaks if draw is memory_figure else speeds
    found = [bars.get(place, 0) for place in range(len(rows))]
    assert found == pytest.approx(expected, rel=2e-3)
    longest = max(
        expected if draw is speed_figure else [r.get("peak_reserved_gib", 0) for r in rows]
    )
    assert axes.get_xlim()[0] == 0 and axes.get_xlim()[1] > longest


@pytest.mark.parametrize(
    "row", [make_row(), fail(make_row(), OUT_OF_MEMORY), make_row(peak_allocated_gib=None)]
)
def test_one_row_makes_both_pictures(tmp_path, row):
    paths = draw_pictures([row], tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["memory.png", "speed.png"]
    for path in paths:
        with Image.open(path) as picture:
            assert picture.format == "PNG" and picture.convert("L").getextrema() == (0, 255)


def test_the_command_draws_the_rows_it_reads(tmp_path, capsys, monkeypatch):
    drawn = []
    draw = lambda rows: drawn.append([row["workload"] for row in rows]) or speed_figure(rows)  # noqa: E731
    monkeypatch.setattr("glm4v_patched.bench.pictures.memory_figure", draw)
    file = tmp_path / "rows.json"
    file.write_text(format_rows([make_row("qlora"), make_row(added="a"), make_row("lm")]))
    assert main(["bench", "--rows", str(file), "--pictures", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith(
        f"{tmp_path / 'memory.png'}\n{tmp_path / 'speed.png'}\n"
    )
    assert {path.name for path in tmp_path.glob("*.png")} == {"memory.png", "speed.png"}
    assert drawn == [["lm", "qlora", "lora_lm"]]  # as in the table
    file.write_text("[]")
    assert main(["bench", "--rows", str(file), "--pictures", str(tmp_path)]) == 1
    assert "there are no rows to draw" in capsys.readouterr().err


def test_without_matplotlib_nothing_runs_and_the_cure_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as where it is not installed
    assert main([*NOTHING_RUNS, "--pictures", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "pip install matplotlib" in printed.err and printed.out == ""
