"""A card's model-index has the scores of ``evaluate``, of the weights that are published."""

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from glm4v_patched.cli import main as glm4v_patched
from hub_upload.manifest import MANIFEST
from tests.helpers.answering import write_files
from tests.helpers.processes import on_the_cpu
from tests.helpers.publishable import NAME, TAG, as_files, flip


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory) -> tuple[Path, Path]:
    """A model, and the metrics.json that the command writes for it."""
    files = write_files(tmp_path_factory.mktemp("evaluated"))
    folder, out = files.model, files.data.parent / "scores"
    lines = files.data.read_text().splitlines(keepends=True)  # two of them end with a question
    (data := files.data.with_name("references.jsonl")).write_text("".join(lines[:2] + lines[5:]))
    command = ["evaluate", str(folder), "--data", str(data), "--out", str(out)]
    with on_the_cpu():
        assert glm4v_patched([*command, "--device", "cpu", "--max-new-tokens", "4"]) == 0
    return folder, out / "metrics.json"


@pytest.fixture
def build(run, tmp_path):
    def build(folder: Path, *more: object) -> tuple[int, str]:
        training = ("--fine-tune-of", "zai-org/glm-4v-9b", "--trained", "shapes", "--name", NAME)
        return run("build", "--weights", folder, "--out", tmp_path / "out", *training, *more)

    return build


@pytest.mark.parametrize(
    ("dataset", "kind"), [("our-org/shapes", "our-org/shapes"), ("drawn shapes", "private")]
)
def test_the_hub_reads_all_scores_also_those_of_0(dataset, kind, evaluated, build, run, tmp_path):
    folder, metrics = evaluated
    status, output = build(folder, "--evaluation", metrics, "--evaluated-on", dataset)
    assert status == 0, output
    report, card = json.loads(metrics.read_text()), ModelCard.load(tmp_path / "out" / "README.md")
    names = [name for name in report if f"{name}_swapped" in report and name != "rows"]
    expected = {n: report[n] for name in names for n in (name, f"{name}_swapped")}
    results = card.data.eval_results
    assert {r.metric_type: r.metric_value for r in results} == expected
    assert len(expected) >= 4 and 0 in expected.values()
    assert card.data.model_name == NAME.split("/")[1]
    for result in results:
        assert (result.dataset_name, result.dataset_type) == (dataset, kind)
        assert result.task_type == "image-text-to-text"
        assert result.source_url == f"https://huggingface.co/{NAME}/blob/{TAG}/{MANIFEST}"
    source = json.loads((tmp_path / "out" / MANIFEST).read_text())["evaluation"]
    assert source == {"dataset": dataset, "rows": report["rows"], "scores": expected}
    status, output = run("verify", tmp_path / "out", "--weights")
    assert status == 0, output


def test_a_build_from_a_build_keeps_them(evaluated, build, run, tmp_path):
    folder, metrics = evaluated
    assert build(folder, "--evaluation", metrics, "--evaluated-on", "shapes")[0] == 0
    built = tmp_path / "out"
    assert run("build", "--weights", built, "--out", tmp_path / "again", "--name", NAME)[0] == 0
    assert as_files(tmp_path / "again") == as_files(built)


def test_a_build_of_other_weights_beside_an_old_manifest_has_no_scores(evaluated, build, tmp_path):
    folder, metrics = evaluated
    assert build(folder, "--evaluation", metrics, "--evaluated-on", "shapes")[0] == 0
    other = shutil.copytree(tmp_path / "out", tmp_path / "other")  # a build links its weights
    shutil.rmtree(tmp_path / "out")
    flip(next(other.glob("*.safetensors")))
    assert build(other)[0] == 0
    assert json.loads((tmp_path / "out" / MANIFEST).read_text())["evaluation"] is None


def test_scores_of_other_weights_are_refused(evaluated, build, tmp_path):
    folder, metrics = evaluated
    other = shutil.copytree(folder, tmp_path / "other")
    flip(next(other.glob("*.safetensors")))
    status, output = build(other, "--evaluation", metrics, "--evaluated-on", "shapes")
    assert status == 1 and "has scores of other weights: " in output and "evaluate " in output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda report: report.update(rows=0), "rows"),
        (lambda report: report.update(exact_match=float("nan")), "exact_match"),
        (lambda report: report.pop("settings"), "settings"),
        (lambda report: report["settings"]["model"].clear(), "was not there"),
        (
            lambda report: report["settings"]["options"].update(weights="fp8"),
            "weights quantized to fp8",
        ),
    ],
    ids=["no rows", "nan", "no settings", "no digests", "fp8"],
)
def test_what_is_no_evaluation_is_refused(change, message, evaluated, build, tmp_path):
    folder, metrics = evaluated
    report = json.loads(metrics.read_text())
    change(report)
    (tmp_path / "metrics.json").write_text(json.dumps(report))
    scores = ("--evaluation", tmp_path / "metrics.json", "--evaluated-on", "shapes")
    status, output = build(folder, *scores)
    assert status == 1 and message in output and not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--evaluation", "--evaluated-on"])
def test_one_option_without_the_other_is_refused(option, evaluated, build):
    status, output = build(evaluated[0], option, "metrics.json")
    assert status == 1 and "expected both" in output
