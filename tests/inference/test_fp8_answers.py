"""docs/benchmarks/fp8_answers.py, on a CPU."""

import json
import runpy
import sys

from glm4v_patched.engine import fp8
from tests.helpers.processes import ROOT

KINDS = {
    *(f"language.{name}" for name in fp8.LANGUAGE_TARGETS),
    *(f"tower.{name}" for name in {*fp8.TOWER_TARGETS} - {"dense"}),
}


def test_each_kind_of_layer_is_held_in_fp8_alone_and_all_together(
    files, referenced, tmp_path, monkeypatch
):
    out = tmp_path / "report.json"
    arguments = [files.model, referenced, "--out", out, "--device", "cpu", "--batch-size", 2]
    monkeypatch.setattr(sys, "argv", ["fp8_answers.py", *map(str, arguments)])
    monkeypatch.setattr(fp8, "_allow_cpu", True)
    runpy.run_path(str(ROOT / "docs" / "benchmarks" / "fp8_answers.py"), run_name="__main__")
    report = json.loads(out.read_text())
    assert report["rows"] == 4 < report["tokens"]
    results = {name: result for name, result in report.items() if isinstance(result, dict)}
    distances = {name: results[name]["relative_distance"] for name in (*KINDS, "all")}
    assert results.keys() == {*distances, "versions"}
    assert min(distances.values()) > 0 and max(distances.values()) == distances["all"] < 0.1
