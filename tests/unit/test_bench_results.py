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

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "tests" / "results").glob("bench_*.json"))
MEASURED = [row for file in FILES for row in read_rows(file)]


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
    """Of a Markdown table, each row by its columns' names."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert rows[0] == list(COLUMNS)
    return [dict(zip(COLUMNS, row, strict=True)) for row in rows[2:]]


def test_every_measured_row_stands_in_the_table_beside_its_command():
    text = markdown_table(MEASURED)
    commands = dict(re.findall(r"^(\d+)\. `([^`]+)`", text, re.MULTILINE))
    cells = cells_of(text)
    assert len(cells) == len(commands) == len(MEASURED)
    left = list(MEASURED)
    for cell in cells:
        row = next(row for row in left if row["command"] == commands[cell["#"]])
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
            make_row(settings={"kept_gathered": 2e8}),
            "method",
            "ZeRO-3, AdamW, compiled, 0.2 G weights kept gathered",
        ),
        (make_row(implementation="original"), "method", "the original's code, ZeRO-3, AdamW"),
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


def test_the_readmes_table_is_what_the_rows_give():
    command = "glm4v-patched bench --rows tests/results/bench_*.json --into README.md"
    readme = (ROOT / "README.md").read_text()
    table = readme[readme.index(BEGIN) + len(BEGIN) : readme.index(END)]
    assert table.strip() == markdown_table(MEASURED).strip(), f"run: {command}"
    assert command in readme


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
        (["--rows", str(FILES[0]), "--out", "new.json"], "--rows measures nothing"),
        (["--rows", "none.json"], "none.json"),
    ],
)
def test_options_of_rows_that_cannot_work_are_refused(arguments, message, capsys):
    assert main([*NOTHING_RUNS, *arguments]) == 1
    assert message in capsys.readouterr().err


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


def keys_of(axes):
    """The short name under each bar, by position."""
    axes.figure.draw_without_rendering()
    labels = [label.get_text() for label in axes.get_xticklabels(minor=True)]
    return dict(zip(axes.get_xticks(minor=True), labels, strict=True))


def texts_of(axes):
    return [(text.xy, text.get_text()) for text in axes.texts]


def names_of(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def curves_of(axes):
    """Lines with a name, as {name: [(x, y), ...]}."""
    return {
        line.get_label(): list(zip(*line.get_data(), strict=True))
        for line in axes.lines
        if not line.get_label().startswith("_")
    }


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
    left = memory_figure(rows).axes[0]
    heights = {position: sum(part[2] for part in bar) for position, bar in bars_of(left).items()}
    assert heights == pytest.approx({0: 10.512, 1: 10.512, 2: 10.512, 4: 12.048, 5: 12.048})
    assert keys_of(left) == {0: "#1", 1: "#2", 2: "#3", 4: "#2", 5: "#3"}
    assert list(left.get_xticks()) == [1, 4.5]
    assert [label.get_text() for label in left.get_xticklabels()] == ["512", "2,048"]
    assert names_of(left) == [
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
    assert keys_of(right) == {0: "#1", 2: "#1", 4: "#1"}


def test_a_line_of_speed_runs_over_what_was_measured():
    rows = [make_row(name, micro_batch=n) for n in (4, 1, 2) for name in ("lm", "lora_lm")]
    rows += [make_row("lm", micro_batch=2, text_tokens=n) for n in (2048, 8192)]
    left, right = speed_figure(rows).axes
    assert curves_of(left) == {
        "language model; recomputed: -, full": [
            (512, 2512.0),
            (2048, 4048.0),
            (8192, 10192.0),
        ],
        "LoRA, language model; recomputed: -, full": [(512, 2512.0)],
    }
    curve = [(1, 1512.0), (2, 2512.0), (4, 4512.0)]
    assert curves_of(right) == {
        "language model; recomputed: -, full": curve,
        "LoRA, language model; recomputed: -, full": curve,
    }
    assert (left.get_title(), right.get_title()) == ("micro-batch 2", "512 ids of text")


def test_a_failed_row_is_marked_on_the_axis_in_its_lines_colour():
    rows = [make_row("lm", micro_batch=n) for n in (1, 2)] + [make_row("full", micro_batch=1)]
    rows += [fail(make_row(name, micro_batch=4), OUT_OF_MEMORY) for name in ("full", "lm")]
    for row in rows:
        row["device"] = "NVIDIA H200"
    right = speed_figure(rows).axes[1]
    assert [len(curve) for curve in curves_of(right).values()] == [1, 2]
    assert texts_of(right) == [((4, 0), "out of memory")] * 2
    assert right.texts[0].xyann != right.texts[1].xyann  # beside each other
    named = [line for line in right.lines if not line.get_label().startswith("_")]
    marks = [line for line in right.lines if line.get_marker() == "x"]
    assert [(*mark.get_xdata(), *mark.get_ydata()) for mark in marks] == [(4, 0)] * 2
    assert [mark.get_color() for mark in marks] == [line.get_color() for line in named]
    assert [text.get_color() for text in right.texts] == [line.get_color() for line in named]


def test_methods_and_hardware_have_lines_of_their_own():
    rows = [
        make_row(),
        make_row(implementation="original"),
        make_row(settings={"optimizer": "adamw_8bit"}),
        make_row(memory_limit_gib=24),
        make_row(
            settings={"language": "auto"}, policies={"tower": "none", "language": "attention"}
        ),
    ]
    names = list(curves_of(speed_figure(rows).axes[0]))
    assert len(names) == len(set(names)) == 5
    parts = ("the original's code", "8-bit AdamW", "at most 24 GiB", "-, attention")
    assert [sum(part in name for name in names) for part in parts] == [1, 1, 1, 1]
    assert all("ZeRO-3" not in name for name in names)  # what all have is said once, above


def test_a_row_that_is_measured_again_takes_the_place_of_the_first():
    rows = [make_row(), make_row(tokens_per_s_per_gpu=7.0)]
    (curve,) = curves_of(speed_figure(rows).axes[0]).values()
    assert curve == [(512, 7.0)]


def test_single_points_off_the_common_values_are_drawn_too():
    rows = [make_row(micro_batch=4), make_row(micro_batch=1, text_tokens=6000)]
    left, right = speed_figure(rows).axes
    name = "LoRA, language model; recomputed: -, full"
    assert curves_of(left).keys() == {f"{name}; micro-batch 1", f"{name}; micro-batch 4"}
    assert sorted(curves_of(left).values()) == [[(512, 4512.0)], [(6000, 7000.0)]]
    assert sorted(curves_of(right).values()) == [[(1, 7000.0)], [(4, 4512.0)]]
    # Points of the line that the other panel has are not scattered over this one.
    rows = [make_row(micro_batch=n) for n in (1, 2, 4)]
    assert list(curves_of(speed_figure(rows).axes[0]).values()) == [[(512, 1512.0)]]


def test_a_line_is_where_most_was_measured_even_if_others_were_elsewhere():
    rows = [make_row("lm", micro_batch=1, text_tokens=n) for n in (512, 2048)]
    rows += [make_row(name, micro_batch=4) for name in ("lm", "full", "lora_lm", "lora_all")]
    left, right = speed_figure(rows).axes
    name = "language model; recomputed: -, full"
    assert curves_of(left)[f"{name}; micro-batch 1"] == [(512, 1512.0), (2048, 3048.0)]
    assert f"{name}; micro-batch 4" not in curves_of(left)  # its line is in the other panel
    assert curves_of(right)[name] == [(1, 1512.0), (4, 4512.0)]


def test_the_pictures_show_what_was_measured():
    measured = [row for row in MEASURED if "error" not in row]
    for axes in speed_figure(MEASURED).axes:
        speeds = {speed for curve in curves_of(axes).values() for _, speed in curve}
        assert speeds and speeds <= {row["tokens_per_s_per_gpu"] for row in measured}
    figure = memory_figure(MEASURED)
    for axes in figure.axes:
        reserved = set(reserved_of(axes).values())
        assert reserved and reserved <= {row["peak_reserved_gib"] for row in measured}
    (legend,) = figure.legends
    drawn = {name for axes in figure.axes for bar in bars_of(axes).values() for name, *_ in bar}
    assert {text.get_text() for text in legend.get_texts()} == drawn | {"reserved"}
    assert "ZeRO-3" in legend.get_title().get_text()


@pytest.mark.parametrize("rows", [MEASURED, [make_row(micro_batch=n) for n in (1, 2, 64)]])
def test_nothing_is_drawn_outside_of_its_panel(rows):
    for axes in speed_figure(rows).axes:
        points = [point for curve in curves_of(axes).values() for point in curve]
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
