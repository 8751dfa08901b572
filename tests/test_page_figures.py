"""Figures in tables of docs are those of the rows of results that they were made from."""

import re
from collections import Counter
from pathlib import Path

import pytest

from tests import every_version
from tests.helpers.pages import ROOT
from tests.tables import on_page, read_rows

DOCS = ROOT / "docs"
BENCHMARKS = DOCS / "benchmarks"
RESULTS = BENCHMARKS / "README.md"


def results(pattern: str) -> list[dict]:
    return [row for file in sorted(BENCHMARKS.glob(pattern)) for row in read_rows(file)]


def table(page: Path, head: str) -> list[list[str]]:
    """Cells of the rows below a table's first line that begins with ``head``."""
    _, begins, text = page.read_text("utf-8").partition(f"\n{head}")
    assert begins, f"{page.name} has no table {head}"
    lines = [line for line in text.partition("\n\n")[0].splitlines()[2:] if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def number(cell: str) -> float:
    return float(re.sub(r"[^\d.e-]", "", cell))


def short(value: float) -> float:
    """Round to three digits, as the tables of speeds do."""
    return float(f"{value:.3g}")


def test_the_table_of_releases_is_that_of_its_rows():
    page, file = every_version.PAGE.read_text("utf-8"), every_version.RESULTS
    assert page == on_page(page, file, every_version.table(read_rows(file))), (
        "python -m tests.every_version --page"
    )


def test_the_matrix_is_counted():
    rows = results("matrix.json")
    counts = Counter((row.get("deepspeed"), row["transformers"], row["outcome"]) for row in rows)
    lines = table(DOCS / "numerics.md", "| passed, cannot work |")
    versions = ("4.57.6", "5.8.0", "5.17.0", "5.23.0")
    assert len(lines) == 5
    for name, *cells in lines:
        deepspeed = name.split()[1] if name.startswith("DeepSpeed") else None
        for version, cell in zip(versions, cells, strict=True):
            keys = [(deepspeed, version, outcome) for outcome in ("passed", "cannot work")]
            assert cell == ", ".join(str(counts[key]) for key in keys), (name, version)
    total = Counter(row["outcome"] for row in rows)
    assert total.keys() == {"passed", "cannot work"}
    words = "5,832 passed, 0 failed, 864 cannot work"
    assert words in (DOCS / "numerics.md").read_text("utf-8")
    assert total == {"passed": 5832, "cannot work": 864}
    assert "6,696" in (ROOT / "README.md").read_text("utf-8") and len(rows) == 6696


@pytest.mark.parametrize(
    ("name", "file"), [("two CPU cores", "matrix.json"), ("two H200s", "two_gpu.json")]
)
def test_the_largest_differences_of_gradients_are_those_of_the_rows(name, file):
    lines = table(DOCS / "numerics.md", "| largest difference of a gradient")
    [cells] = [cells for cells in lines if cells[0].startswith(name)]
    for precision, cell in zip(("fp32", "bf16", "bf16_autocast"), cells[1:], strict=True):
        measured = [
            row["gradient_difference"]
            for row in results(file)
            if row["precision"] == precision and row["outcome"] == "passed"
        ]
        assert float(cell) == float(f"{max(measured):.1e}"), precision


def test_what_each_setting_brings_are_the_rows_of_the_ablation():
    lines = table(DOCS / "performance.md", "| added |")
    rows = results("bench_ablation_h200_x2.json")
    measured = [
        (short(row["samples_per_s_per_gpu"]), round(row["peak_allocated_gib"], 1)) for row in rows
    ]
    assert [(number(speed), number(gib)) for _, speed, gib in lines] == measured


def test_speeds_in_fp8_are_measured():
    lines = table(DOCS / "fp8.md", "| `glm4v-patched bench` with |")
    rows = [row for row in results("*h200*.json") if row.get("samples_per_s_per_gpu")]
    assert len(lines) == 10
    for command, bf16, fp8, times, reserved in lines:
        assert any(
            short(row["samples_per_s_per_gpu"]) == number(fp8)
            and round(row["peak_reserved_gib"], 1) == number(reserved)
            for row in rows
            if row.get("fp8")
        ), command
        if times != "-":
            assert any(
                short(row["samples_per_s_per_gpu"]) == number(bf16)
                for row in rows
                if not row.get("fp8") and "workload" in row
            ), command
            assert number(times) == pytest.approx(number(fp8) / number(bf16), abs=0.01), command


def test_the_servers_are_measured():
    lines = table(DOCS / "serving.md", "| server |")
    rows = results("serve_clients.json")
    assert len(lines) == len(rows)
    for (_, _, gpu, alone, together, tokens, health), row in zip(lines, rows, strict=True):
        assert gpu in row["gpu"]
        # A figure may be rounded up at a five.
        assert number(alone) == pytest.approx(row["alone"]["answers_per_s"], abs=0.0051)
        assert number(together) == pytest.approx(row["together"]["answers_per_s"], abs=0.0051)
        assert number(tokens) == pytest.approx(row["together"]["tokens_per_s"], abs=0.51)
        assert number(health) == pytest.approx(row["health_s"]["slowest"], abs=0.0051)


def test_generation_is_measured():
    lines = table(RESULTS, "| weights | cache |")
    rows = results("generate_h200.json")
    assert len(lines) == 11
    for weights, cache, batch, first, tokens, _, gib in lines:
        if "no row was kept" in weights:
            continue
        name = weights.strip("`").removeprefix("--weights ")
        assert any(
            (row.get("weights") or "bf16", row["cache"], row["batch"]) == (name, cache, int(batch))
            and number(first) == round(row["first_token_s"], 3)
            and number(tokens) == pytest.approx(row["tokens_per_s"], rel=0.005)
            and number(gib) == round(row["peak_allocated_gib"], 1)
            for row in rows
        ), (weights, cache, batch)


def test_answers_from_files_are_measured():
    rows = results("answers_h200.json")
    lines = table(RESULTS, "| weights | image |")
    assert len(lines) == 6
    for weights, image, batch, _, speed, first, command, _ in lines:
        assert any(
            (row["weights"], row["image"], row["batch"]) == (weights, image, int(batch))
            and number(speed) == round(row["answers_per_s"], 2)
            and number(first) == row["first_answer_s"]
            and number(command) == round(row["command_s"], 1)
            for row in rows
        ), (weights, image, speed)


def test_both_models_of_the_family_are_measured():
    """Rows of one kind are glm-4v's and cogagent's, which differ by less than 3 %."""
    rates: dict[tuple, dict[bool, float]] = {}
    for row in results("family_h200.json"):
        in_fp8 = row.get("fp8") or row.get("weights") == "fp8"
        kind = (row["workload"], row.get("batch"), "fp8" if in_fp8 else "bf16")
        rate = row.get("samples_per_s_per_gpu") or row["tokens_per_s"]
        rates.setdefault(kind, {})["cogagent" in row["command"]] = rate
    lines = table(RESULTS, "| measured | weights |")
    assert len(lines) == len(rates) == 8
    for measured, weights, *figures in lines:
        batch = re.search(r"batch (\d+)", measured)
        kind = ("generate", int(batch[1]), weights) if batch else ("lora_lm", None, weights)
        both = [rates[kind][is_cogagent] for is_cogagent in (False, True)]
        assert [number(cell) for cell in figures] == pytest.approx(both, rel=0.003)
        assert both[1] == pytest.approx(both[0], rel=0.03)


def test_the_recipes_that_ship_are_measured():
    # lora_both_2x80gb is the name that lora_all_2x80gb had when it was measured.
    rows = {
        row["recipe"].replace("lora_both", "lora_all"): row
        for row in results("recipes_h200_x2.json")
    }
    lines = table(RESULTS, "| recipe |")
    assert {line[0].strip("`") for line in lines} == rows.keys()
    for name, _, policies, speed, _, memory, predicted in lines:
        row = rows[name.strip("`")]
        assert policies == ", ".join(row["policies"][part] for part in ("tower", "language"))
        assert number(speed) == short(row["samples_per_s_per_gpu"])
        assert number(memory) == round(row["peak_allocated_gib"], 1)
        assert number(predicted.partition(";")[0]) == round(row["predicted_gib"], 1)


def test_the_table_of_gguf_is_that_of_its_rows():
    rows = results("gguf.json")
    lines = table(DOCS / "gguf.md", "| type | logits, images by our tower")
    assert [name.strip("`") for name, *_ in lines] == ["f32", "bf16", "f16", "q8_0", "q4_k_m"]
    for name, *cells in lines:
        random, [demo] = (
            [row for row in rows if row["type"] == name.strip("`") and row["weights"] == weights]
            for weights in ("random", "demo")
        )
        assert len(random) == 8 and all(row["ids_equal"] for row in random)
        expected = []
        for prefix in ("", "mmproj_"):
            expected.append(f"{max(row[f'{prefix}logit_difference'] for row in random):.2g}")
            expected.append(str(min(row[f"{prefix}same_tokens"] for row in random)))
            expected.append(f"{demo[f'{prefix}right']} / {demo[f'{prefix}right_swapped']}")
        assert cells == expected, name
    [ours] = [row for row in rows if row["type"] == "this package, f32"]
    assert (ours["right"], ours["right_swapped"]) == (1.0, 0.0)
