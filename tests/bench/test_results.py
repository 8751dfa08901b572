"""What becomes of measured rows: their file, the table, the pictures."""

import copy
import json
import re
import resource
import sys
from pathlib import Path

import pytest
from PIL import Image

from glm4v_patched.bench.pictures import PARTS, draw_pictures, memory_figure, speed_figure
from glm4v_patched.bench.rows import add_row, format_rows, read_rows
from glm4v_patched.bench.table import BEGIN, COLUMNS, END, insert, markdown_table
from glm4v_patched.cli import main
from glm4v_patched.engine.options import PACKAGES

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "docs" / "benchmarks").glob("bench_*.json"))
MEASURED = [row for file in FILES for row in read_rows(file)]
DRAWN = [row for row in MEASURED if "added" not in row]


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
        "offload": False,
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
        ("", "is no file of rows"),
        ('{"workload": "lm"}\n{"workload": "lm"}\n', "is no file of rows"),
        ("{}", "holds a JSON dict, no array"),
        ("[1]", "entry 1 of 1 has no gpus, micro_batch"),
        ('[{"workload": "lm", "gpus": 2, "settings": {}}]', "1 has no micro_batch, text_tokens"),
        (b"\xff\xfe", "is no file of rows"),
    ],
)
def test_a_file_that_holds_no_rows_is_refused_before_anything_runs(tmp_path, capsys, text, message):
    path = tmp_path / "rows.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    before = path.read_bytes()
    assert main([*NOTHING_RUNS, "--out", str(path)]) == 1
    printed = capsys.readouterr()
    assert message in printed.err and "or a new file" in printed.err
    assert printed.out == "" and path.read_bytes() == before


def test_a_file_in_a_folder_that_is_not_there_is_refused_before_anything_runs(tmp_path, capsys):
    assert main([*NOTHING_RUNS, "--out", str(tmp_path / "none" / "rows.json")]) == 1
    printed = capsys.readouterr()
    assert "is no folder; make it first" in printed.err and printed.out == ""


# The table.


def cells_of(text):
    """Of Markdown tables, each row by its columns' names."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    found, columns = [], None
    for line in lines:
        row = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if row[0] == COLUMNS[0]:
            columns = row
            assert [name for name in columns if name != "added"] == list(COLUMNS)
        elif row[0] != "---":
            found.append(dict(zip(columns, row, strict=True)))
    return found


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
            if row["command"] == commands[cell["#"]] and ("added" in row) == ("added" in cell)
        )
        left.remove(row)
        assert row["workload"] in commands[cell["#"]]
        batch, text_tokens = cell["micro-batch, ids of text"].split(", ")
        assert (int(batch), int(text_tokens.replace(",", ""))) == (
            row["micro_batch"],
            row["text_tokens"],
        )
        if "error" in row:
            assert cell["tokens/s/GPU"] == "-"
            continue
        for column, name, rounding in (
            ("samples/s/GPU", "samples_per_s_per_gpu", {"rel": 0.006}),  # three digits
            ("tokens/s/GPU", "tokens_per_s_per_gpu", {"abs": 0.51}),
            ("GiB allocated", "peak_allocated_gib", {"abs": 0.051}),
            ("reserved", "peak_reserved_gib", {"abs": 0.051}),
        ):
            assert float(cell[column].replace(",", "")) == pytest.approx(row[name], **rounding)
        assert cell["roofline"] == f"{100 * row['roofline_share']:.0f}%"
        assert cell["hardware"].startswith(f"{row['gpus']} x {row['device']}")
        assert f"torch {row['versions']['torch']}" in text


@pytest.mark.parametrize(
    ("row", "column", "text"),
    [
        (make_row("qlora", gpus=1), "trained", "QLoRA, language model"),
        (make_row(), "hardware", "2 x NVIDIA H200"),
        (make_row(memory_limit_gib=22.5), "hardware", "2 x NVIDIA H200, at most 22.5 GiB"),
        (make_row(device="cpu", gpus=1), "hardware", "CPU, 1 process"),
        (fail(make_row(gpus=1), "?"), "hardware", "1 GPU"),
        (make_row(text_tokens=6000), "micro-batch, ids of text", "1, 6,000"),
        (make_row(), "method", "ZeRO-3, AdamW, compiled"),
        (make_row(zero_stage=0), "method", "no ZeRO, AdamW, compiled"),
        (
            make_row(
                offload=True,
                settings={"optimizer": "adamw_8bit", "compile": False, "reuse_features": True},
            ),
            "method",
            "ZeRO-3, 8-bit AdamW, optimizer on the CPU, not compiled, features reused",
        ),
        (
            make_row(settings={"all_logits": True}),
            "method",
            "ZeRO-3, AdamW, compiled, all logits",
        ),
        (
            make_row(settings={"kept_gathered": 2e8}),
            "method",
            "ZeRO-3, AdamW, compiled, 0.2 G weights kept gathered",
        ),
        (
            make_row(settings={"gather_in_place": False}),
            "method",
            "ZeRO-3, AdamW, compiled, gathers copied",
        ),
        (  # linear by linear, in place or not
            make_row(settings={"gather_in_place": False, "compile": False}),
            "method",
            "ZeRO-3, AdamW, not compiled",
        ),
        (
            make_row(settings={"attention": "eager", "shortest_text": 1024, "packed": True}),
            "method",
            "ZeRO-3, AdamW, compiled, eager attention, texts from 1,024, packed",
        ),
        (make_row(implementation="original"), "method", "the original's code, ZeRO-3, AdamW"),
        (
            make_row(implementation="original", settings={"attention": "eager", "liger": True}),
            "method",
            "the original's code, ZeRO-3, AdamW",
        ),
        (
            make_row(settings={"attention": "eager", "liger": True}),
            "method",
            "ZeRO-3, AdamW, compiled, eager attention, Liger's kernels",
        ),
        (make_row(samples_per_s_per_gpu=0.01234), "samples/s/GPU", "0.0123"),
        (make_row(samples_per_s_per_gpu=12345.6), "samples/s/GPU", "12,346"),
        (make_row(peak_reserved_gib=None), "reserved", "-"),
    ],
)
def test_a_row_in_words(row, column, text):
    (cells,) = cells_of(markdown_table([row]))
    assert cells[column] == text


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (make_row("lora_all"), "none, full"),
        (make_row("lora_lm"), "-, full"),  # a frozen tower keeps nothing
        (make_row("full", settings={"tower": "auto", "language": "auto"}), "auto, auto"),
        (
            make_row(
                "full",
                settings={"tower": "auto", "language": "auto"},
                policies={"tower": "every 2", "language": "selective"},
            ),
            "every 2, selective",
        ),
        (make_row("full", policies=None), "none, full"),
        (make_row("full", implementation="original"), "its own"),
    ],
)
def test_the_policies_that_were_chosen_come_before_those_asked_for(row, text):
    (cells,) = cells_of(markdown_table([row]))
    assert cells["recomputed of tower, language model"] == text


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
    figures = ("tokens/s/GPU", "roofline", "GiB allocated", "reserved")
    assert [cells[name] for name in figures] == ["-"] * 4


def test_rows_stand_by_workload_and_hardware():
    rows = [
        make_row("qlora", text_tokens=1),
        make_row("lm", text_tokens=2),
        make_row("full", text_tokens=3),
        make_row("lm", text_tokens=4, device="NVIDIA A100"),
        make_row("lm", text_tokens=5),
    ]
    cells = cells_of(markdown_table(rows))
    assert [cell["micro-batch, ids of text"][-1] for cell in cells] == ["3", "4", "2", "5", "1"]
    assert [cell["#"] for cell in cells] == ["1", "2", "3", "4", "5"]


def test_rows_of_an_ablation_stand_below_in_their_order():
    steps = [make_row(added=name, samples_per_s_per_gpu=n) for n, name in enumerate("ba", 2)]
    text = markdown_table([steps[0], make_row("lm"), steps[1]])
    tables = [block for block in text.split("\n\n") if block.startswith("| #")]
    assert len(tables) == 2 and "added" not in tables[0]
    assert tables[1].splitlines()[0] == "| # | added | " + " | ".join(COLUMNS[1:]) + " |"
    cells = [line.strip("| ").split(" | ") for line in tables[1].splitlines()[2:]]
    assert [row[:2] for row in cells] == [["2", "b"], ["3", "a"]]
    assert [row[7] for row in cells] == ["2.00", "3.00"]
    assert text.index("3. `glm4v-patched bench --workload lora_lm`") > text.index("| 3 | a |")
    assert "| # | trained" not in markdown_table(steps)


def test_the_documented_table_is_what_the_rows_give():
    command = "glm4v-patched bench --rows docs/benchmarks/bench_*.json --into docs/performance.md"
    page = (ROOT / "docs" / "performance.md").read_text()
    table = page[page.index(BEGIN) + len(BEGIN) : page.index(END)]
    assert table.strip() == markdown_table(MEASURED).strip(), f"run: {command}"
    assert command in page


def test_a_table_goes_between_the_markers_and_nowhere_else(tmp_path, capsys):
    path, rows = tmp_path / "page.md", tmp_path / "rows.json"
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    rows.write_text(format_rows([make_row()]))
    for _ in range(2):
        assert main(["bench", "--rows", str(rows), "--into", str(path)]) == 0
        table = markdown_table([make_row()])
        assert path.read_text() == f"before\n{BEGIN}\n\n{table}\n{END}\nafter\n"
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("text", ["", f"{BEGIN}\n", f"{END}\n{BEGIN}\n", f"{BEGIN}{BEGIN}{END}"])
def test_a_page_without_both_markers_is_refused_and_left_alone(tmp_path, text):
    path = tmp_path / "page.md"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{text.count(BEGIN)} lines .* {text.count(END)} lines"):
        insert("table\n", path)
    assert path.read_text() == text


def test_rows_of_several_files_make_one_table(tmp_path, capsys):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    rows = [make_row("lm"), fail(make_row("full"), OUT_OF_MEMORY)]
    for file, row in zip(files, rows, strict=True):
        file.write_text(format_rows([row]))
    assert main(["bench", "--rows", *map(str, files)]) == 0
    assert capsys.readouterr().out == markdown_table(rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--into", "README.md"], "name them with --rows"),
        (["--ablation", "--against", "original"], "--ablation with --against"),
        (["--rows", str(FILES[0]), "--out", "new.json"], "--rows measures nothing"),
        (["--rows", "none.json"], "none.json"),
    ],
)
def test_options_that_cannot_work_are_refused(arguments, message, capsys):
    assert main([*NOTHING_RUNS, *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("choice", "arguments"),
    [
        ("liger", ["--liger"]),
        ("adamw_8bit", ["--optimizer", "adamw_8bit"]),
        ("qlora", ["--workload", "lm", "qlora"]),
    ],
)
def test_what_a_choice_lacks_is_said_before_anything_runs(choice, arguments, capsys, monkeypatch):
    monkeypatch.setitem(PACKAGES, choice, ["not_there"])
    assert main([*NOTHING_RUNS, *arguments]) == 1
    assert f"{choice} needs not_there: pip install not_there" in capsys.readouterr().err


# The pictures.


def bars_of(axes):
    """Of each bar, by its position: its parts from the bottom up, as (name, bottom, height)."""
    bars = {}
    for container in axes.containers:
        for bar in container:
            middle = round(bar.get_x() + bar.get_width() / 2, 6)
            part = (container.get_label(), bar.get_y(), bar.get_height())
            bars.setdefault(middle, []).append(part)
    return bars


def places_of(axes):
    """The key and the value that stand under each place, as {place: (key, value)}."""
    axes.figure.draw_without_rendering()
    keys = [label.get_text() for label in axes.get_xticklabels(minor=True)]
    values = iter(axes.get_xticklabels())
    found, before = {}, None
    for place, key in zip(axes.get_xticks(minor=True), keys, strict=True):
        if place - 1 != before:  # a gap: the next group
            value = next(values).get_text()
        found[place], before = (key, value), place
    return found


def texts_of(axes):
    return [(text.xy, text.get_text()) for text in axes.texts]


def names_of(figure):
    return [text.get_text() for text in figure.legends[-1].get_texts()]


def curves_of(axes):
    """Lines by their key, as {key: [(value, speed), ...]}."""
    places, curves = places_of(axes), {}
    for line in (line for line in axes.lines if line.get_marker() == "o" and len(line.get_xdata())):
        ((key, *more),) = [sorted({places[place][0] for place in line.get_xdata()})]
        assert not more and key not in curves
        curves[key] = [(places[place][1], speed) for place, speed in line.get_xydata()]
    return curves


def sweep(*workloads):
    """Of each workload: text lengths at micro-batch 1, micro-batches at 512; memory chooses."""
    asked = {"tower": "auto", "language": "auto", "kept_gathered": None}
    chosen = {1: "none", 2: "attention", 4: "selective", 8: "full"}
    shapes = [(1, n) for n in (512, 1024, 2048, 4096, 6000)] + [(n, 512) for n in (2, 4, 8)]
    return [
        make_row(name, *shape, asked, policies={"tower": "none", "language": chosen[shape[0]]})
        for name in workloads
        for shape in shapes
    ]


# Long names, and nothing that all have in common.
LONG = {"offload": True, "memory_limit_gib": 22.5, "device": "NVIDIA A100-SXM4-80GB"}
WORDY = {"tower": "selective", "language": "selective", "optimizer": "adamw_8bit"}
TWENTY = [
    make_row("lora_lm", n % 3 + 1, settings=WORDY | {"kept_gathered": n * 1e7}, **LONG)
    for n in range(1, 20)
] + [make_row("full", implementation="original", zero_stage=2, gpus=1)]


def reserved_of(axes):
    """Heights of the marks, by position."""
    marks = [line for line in axes.lines if line.get_label() == "reserved"]
    assert all(len(set(mark.get_ydata())) == 1 for mark in marks)
    return {round(sum(mark.get_xdata()) / 2, 6): mark.get_ydata()[0] for mark in marks}


def test_a_bar_is_stacked_from_the_parts_of_the_peak():
    parts = dict(zip(PARTS, (4.0, 3.0, 2.0, 1.5, 1.0, 0.5), strict=True))
    row = make_row(memory_gib=parts, peak_allocated_gib=12.0, peak_reserved_gib=14.0)
    for axes in memory_figure([row]).axes:
        assert bars_of(axes)[0] == [
            ("weights", 0, 4.0),
            ("gradients", 4.0, 3.0),
            ("optimizer", 7.0, 2.0),
            ("activations", 9.0, 1.5),
            ("logits", 10.5, 1.0),
            ("rest", 11.5, 0.5),
        ]
        assert reserved_of(axes) == {0: 14.0}


def test_a_bar_is_as_high_as_the_peak_where_parts_are_not_known():
    some = dict.fromkeys(PARTS) | {"weights": 4.0, "rest": 1.0}
    rows = [
        make_row(micro_batch=1, memory_gib=some),
        make_row(micro_batch=2),
        make_row(micro_batch=3, memory_gib={"before the first step": 3.0, "between steps": 3.0}),
    ]
    bars = bars_of(memory_figure(rows).axes[1])
    unknown = "allocated, not told apart"
    assert bars == {
        0: [("weights", 0, 4.0), ("rest", 4.0, 1.0), (unknown, 5.0, pytest.approx(5.512))],
        2: [(unknown, 0, pytest.approx(20.512))],
        4: [(unknown, 0, pytest.approx(30.512))],
    }


def test_bars_stand_in_groups_under_their_value_each_with_its_key():
    rows = [
        make_row(name, text_tokens=n) for n in (512, 2048) for name in ("lm", "lora_lm", "full")
    ]
    rows.remove(make_row("full", text_tokens=2048))
    figure = memory_figure(rows)
    left = figure.axes[0]
    heights = {position: sum(part[2] for part in bar) for position, bar in bars_of(left).items()}
    assert heights == pytest.approx({0: 10.512, 1: 10.512, 2: 10.512, 4: 12.048, 5: 12.048})
    assert places_of(left) == {
        0: ("#1", "512"),
        1: ("#2", "512"),
        2: ("#3", "512"),
        4: ("#2", "2,048"),
        5: ("#3", "2,048"),
    }
    assert list(left.get_xticks()) == [1, 4.5]
    assert names_of(figure) == [
        "#1: all weights; recomputed: none, full",
        "#2: language model; recomputed: -, full",
        "#3: LoRA, language model; recomputed: -, full",
    ]


def test_a_failed_row_is_named_where_its_bar_would_be():
    rows = [make_row(micro_batch=1), fail(make_row(micro_batch=2, device=None), OUT_OF_MEMORY)]
    rows[1]["device"] = "NVIDIA H200"
    rows.append(make_row(micro_batch=3, peak_allocated_gib=None, peak_reserved_gib=None))
    right = memory_figure(rows).axes[1]
    assert bars_of(right).keys() == {0}
    assert texts_of(right) == [((2, 0), "out of memory"), ((4, 0), "not measured")]
    assert places_of(right) == {0: ("#1", "1"), 2: ("#1", "2"), 4: ("#1", "3")}


def test_a_line_of_speed_runs_over_what_was_measured():
    rows = [make_row(name, micro_batch=n) for n in (4, 1, 2) for name in ("lm", "lora_lm")]
    rows += [make_row("lm", micro_batch=2, text_tokens=n) for n in (2048, 8192)]
    left, right = speed_figure(rows).axes
    assert curves_of(left) == {
        "#1": [("512", 2512.0), ("2,048", 4048.0), ("8,192", 10192.0)],
        "#2": [("512", 2512.0)],
    }
    curve = [("1", 1512.0), ("2", 2512.0), ("4", 4512.0)]
    assert curves_of(right) == {"#1": curve, "#2": curve}
    assert left.get_title() == "micro-batch: 2"
    assert right.get_title() == "ids of text in a sample, beside its image: 512"


def test_a_failed_row_is_marked_on_the_axis_in_its_lines_colour():
    rows = [make_row("lm", micro_batch=n) for n in (1, 2)] + [make_row("full", micro_batch=1)]
    rows += [fail(make_row(name, micro_batch=4), OUT_OF_MEMORY) for name in ("full", "lm")]
    for row in rows:
        row["device"] = "NVIDIA H200"
    right = speed_figure(rows).axes[1]
    assert curves_of(right) == {"#1": [("1", 1512.0)], "#2": [("1", 1512.0), ("2", 2512.0)]}
    marks = [line for line in right.lines if line.get_marker() == "x"]
    places = places_of(right)
    assert [places[mark.get_xdata()[0]] for mark in marks] == [("#1", "4"), ("#2", "4")]
    assert texts_of(right) == [((mark.get_xdata()[0], 0), "out of memory") for mark in marks]
    colours = [line.get_color() for line in right.lines if line.get_marker() == "o"]
    assert [mark.get_color() for mark in marks] == colours
    assert [text.get_color() for text in right.texts] == colours


def test_one_legend_names_each_series_once_with_the_colour_it_has_in_both_panels():
    rows = sweep("lm", "lora_lm") + [make_row("full", 4, n) for n in (512, 2048)]
    figure = speed_figure(rows)
    (legend,) = figure.legends
    assert names_of(figure) == [
        "#1: all weights; recomputed: none, full",
        "#2: language model; chosen by memory",
        "#3: LoRA, language model; chosen by memory",
    ]
    assert legend.get_title().get_text() == "all: ZeRO-3; AdamW; compiled; 2 x NVIDIA H200"
    colours = [line.get_color() for line in legend.get_lines()]
    assert len(set(colours)) == 3
    for axes in figure.axes:
        assert axes.get_legend() is None
        for line in axes.lines:
            number = places_of(axes)[line.get_xdata()[0]][0].strip("#abc")
            assert line.get_color() == colours[int(number) - 1]
    names = names_of(memory_figure(rows))
    assert names == names_of(figure)


def test_methods_and_hardware_have_lines_of_their_own():
    rows = [
        make_row(),
        make_row(implementation="original"),
        make_row(settings={"optimizer": "adamw_8bit"}),
        make_row(memory_limit_gib=24),
        make_row(settings={"language": "attention"}),
    ]
    figure = speed_figure(rows)
    names = names_of(figure)
    assert len(names) == len(set(names)) == 5
    assert [len(curves_of(axes)) for axes in figure.axes] == [5, 5]
    parts = ("the original's code", "8-bit AdamW", "at most 24 GiB", "-, attention")
    assert [sum(part in name for name in names) for part in parts] == [1, 1, 1, 1]
    assert all("ZeRO-3" not in name for name in names)  # what all have is said once, above


@pytest.mark.parametrize(
    ("workload", "asked", "words"),
    [
        ("full", {"tower": "auto", "language": "auto"}, "chosen by memory"),
        ("lm", {"language": "auto"}, "chosen by memory"),  # a frozen tower's policy is idle
        ("full", {"tower": "full", "language": "auto"}, "recomputed: full, auto"),
        ("full", {"tower": "full", "language": "full"}, "recomputed: full, full"),
        ("lm", {"language": "auto", "kept_gathered": 2e8}, "recomputed: -, auto"),
    ],
)
def test_rows_that_ask_alike_make_one_line_whatever_was_chosen(workload, asked, words):
    rows = [
        make_row(workload, 1, 512, asked, policies={"language": "none", "gathered": 1e12}),
        make_row(workload, 4, 512, asked, policies={"language": "every 2", "gathered": 1e9}),
    ]
    figure = speed_figure(rows)
    (name,) = names_of(figure)
    assert name.endswith(words)
    assert curves_of(figure.axes[1]) == {"#1": [("1", 1512.0), ("4", 4512.0)]}
    kept = "0.2 G weights kept gathered" in figure.legends[-1].get_title().get_text()
    assert kept == ("kept_gathered" in asked)


def test_a_row_that_is_measured_again_takes_the_place_of_the_first():
    rows = [make_row(), make_row(tokens_per_s_per_gpu=7.0)]
    (curve,) = curves_of(speed_figure(rows).axes[0]).values()
    assert curve == [("512", 7.0)]


def test_single_points_off_the_common_values_are_drawn_too():
    rows = [make_row(micro_batch=4), make_row(micro_batch=1, text_tokens=6000)]
    figure = speed_figure(rows)
    left, right = figure.axes
    assert curves_of(left) == {"#1a": [("6,000", 7000.0)], "#1b": [("512", 4512.0)]}
    assert curves_of(right) == {"#1a": [("4", 4512.0)], "#1b": [("1", 7000.0)]}
    assert left.get_title() == "micro-batch: 1 (a), 4 (b)"
    assert right.get_title() == "ids of text in a sample, beside its image: 512 (a), 6,000 (b)"
    assert names_of(figure) == ["#1: LoRA, language model; recomputed: -, full"]
    # Points of the line that the other panel has are not scattered over this one.
    rows = [make_row(micro_batch=n) for n in (1, 2, 4)]
    assert curves_of(speed_figure(rows).axes[0]) == {"#1": [("512", 1512.0)]}


def test_a_line_is_where_most_was_measured_even_if_others_were_elsewhere():
    rows = [make_row("lm", micro_batch=1, text_tokens=n) for n in (512, 2048)]
    rows += [make_row(name, micro_batch=4) for name in ("lm", "full", "lora_lm", "lora_all")]
    left, right = speed_figure(rows).axes
    assert curves_of(left)["#2a"] == [("512", 1512.0), ("2,048", 3048.0)]
    assert "#2b" not in curves_of(left)  # its line is in the other panel
    assert curves_of(right)["#2"] == [("1", 1512.0), ("4", 4512.0)]


def test_the_pictures_show_what_was_measured():
    measured = [row for row in DRAWN if "error" not in row]
    for axes in speed_figure(DRAWN).axes:
        speeds = {speed for curve in curves_of(axes).values() for _, speed in curve}
        assert speeds and speeds <= {row["tokens_per_s_per_gpu"] for row in measured}
    figure = memory_figure(DRAWN)
    for axes in figure.axes:
        reserved = set(reserved_of(axes).values())
        assert reserved and reserved <= {row["peak_reserved_gib"] for row in measured}
    drawn = {name for axes in figure.axes for bar in bars_of(axes).values() for name, *_ in bar}
    legend = {text.get_text() for text in figure.legends[0].get_texts()}
    assert legend == drawn | {"reserved"}


@pytest.mark.parametrize(
    "rows", [DRAWN, TWENTY, sweep("full", "lm", "lora_lm"), DRAWN + sweep("lora_lm")]
)
@pytest.mark.parametrize("draw", [memory_figure, speed_figure])
def test_a_picture_of_many_rows_is_legible(draw, rows):
    figure = draw(rows)
    figure.draw_without_rendering()
    legend = figure.legends[-1].get_window_extent()
    assert legend.x0 >= 0 and legend.x1 <= figure.bbox.x1 and legend.y0 >= 0
    for axes in figure.axes:
        panel = axes.get_position()
        assert panel.height >= 0.5 and panel.width >= 0.45  # of the figure
        above = axes.get_window_extent()
        for minor in (True, False):
            labels = [label.get_window_extent() for label in axes.get_xticklabels(minor=minor)]
            assert all(a.x1 < b.x0 for a, b in zip(labels, labels[1:], strict=False))
            assert max(label.y1 for label in labels) < above.y0
            above = min(labels, key=lambda label: label.y0)
        assert legend.y1 < axes.xaxis.label.get_window_extent().y0 < above.y0
        bars = [bar.get_window_extent().width for group in axes.containers for bar in group]
        assert all(width >= 8 for width in bars)  # pixels


@pytest.mark.parametrize("rows", [DRAWN, [make_row(micro_batch=n) for n in (1, 2, 64)]])
def test_nothing_is_drawn_outside_of_its_panel(rows):
    for axes in speed_figure(rows).axes:
        points = [point for line in axes.lines for point in line.get_xydata()]
        assert axes.get_xlim()[0] < min(x for x, _ in points)
        assert axes.get_xlim()[1] > max(x for x, _ in points)
        assert axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > max(y for _, y in points)
    for axes in memory_figure(rows).axes:
        marks = reserved_of(axes)
        assert axes.get_xlim()[0] < min(marks) - 0.4 and axes.get_xlim()[1] > max(marks) + 0.4
        assert axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > max(marks.values())


@pytest.mark.parametrize(
    "row", [make_row(), fail(make_row(), OUT_OF_MEMORY), make_row(peak_allocated_gib=None)]
)
def test_one_row_makes_both_pictures(tmp_path, row):
    paths = draw_pictures([row], tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["memory.png", "speed.png"]
    for path in paths:
        with Image.open(path) as picture:
            assert picture.format == "PNG" and picture.convert("L").getextrema() == (0, 255)


def test_the_command_draws_the_rows_it_reads(tmp_path, capsys):
    assert main(["bench", "--rows", str(FILES[0]), "--pictures", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"memory.png", "speed.png"}
    assert capsys.readouterr().out.endswith(f"{tmp_path / 'speed.png'}\n")


def test_pictures_that_cannot_be_drawn_are_refused_before_anything_runs(
    tmp_path, capsys, monkeypatch
):
    file = tmp_path / "file"
    file.write_text("")
    assert main([*NOTHING_RUNS, "--pictures", str(file)]) == 1
    printed = capsys.readouterr()
    assert "file is a file; pictures need a folder" in printed.err and printed.out == ""
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as where it is not installed
    assert main([*NOTHING_RUNS, "--pictures", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "pip install matplotlib" in printed.err and printed.out == ""


def test_no_rows_make_no_picture(tmp_path, capsys):
    empty = tmp_path / "rows.json"
    empty.write_text("[]")
    assert main(["bench", "--rows", str(empty), "--pictures", str(tmp_path)]) == 1
    assert "there are no rows to draw" in capsys.readouterr().err


def test_drawing_changes_no_row():
    rows = copy.deepcopy(MEASURED)
    memory_figure(rows), speed_figure(rows), markdown_table(rows)
    assert rows == MEASURED
