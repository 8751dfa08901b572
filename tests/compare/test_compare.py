"""compare: a stand-in of the published code and ours on the same samples, and the verdicts."""

import io
import json
import re
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from glm4v_patched.cli import main
from glm4v_patched.compare import command, environment, worker
from glm4v_patched.compare.inputs import CASES_FILE, write_cases
from glm4v_patched.compare.verdicts import (
    Comparison,
    ModelOutputs,
    compare_outputs,
    format_comparisons,
)
from glm4v_patched.data.collate import ConversationCollator
from glm4v_patched.engine.environment import python_module_command
from glm4v_patched.engine.gpus import Gpus
from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor
from tests.helpers.legacy_repository import remote_code_under, write_legacy_repository
from tests.helpers.tiny import tiny_model, update_json

# Makes the original's code write its environment, modules and paths where the test can read them.
SPY = """
import json, os, sys
with open({seen!r}, "w") as file:
    json.dump([dict(os.environ), [*sys.modules], sys.path], file)
"""


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("compare") / "original"
    write_legacy_repository(folder)
    code = folder / "modeling_chatglm.py"
    code.write_text(code.read_text() + SPY.format(seen=str(folder / "seen.json")))
    return folder


def run_in_process(job: dict, work: Path) -> ModelOutputs:
    paths = {"tensors": f"{work} tensors", "results": f"{work} results"}
    worker.run_job(job | paths)
    return ModelOutputs(json.loads(Path(paths["results"]).read_text()), load_file(paths["tensors"]))


@pytest.fixture(scope="module")
def compared(original) -> tuple[int, list[dict], str]:
    """Exit status, comparisons and stderr of ``compare``, with secrets in the environment. Ours is
    computed in this process, which has torch already."""
    in_other_process = command._compute

    def compute(line: list[str], environment: dict[str, str], work: Path, job: dict):
        if not job.get("ours"):
            return in_other_process(line, environment, work, job)
        assert line == python_module_command("glm4v_patched.compare.worker")
        assert environment["HF_HUB_OFFLINE"] == "1"
        return run_in_process(job, work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "_compute", compute)
        patch.setattr(command, "find_python_versions", lambda *_: "a transformers")
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "a secret")
        options = ["--run-code", "--python", sys.executable, "--precision", "fp32"]
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            status = main(["compare", str(original), "--device", "cpu", "--json", *options])
    return status, json.loads(out.getvalue()), err.getvalue()


def test_both_agree_except_where_the_original_is_reported_as_wrong(compared):
    image, text, padded = (
        {line["quantity"]: line for line in compared[1] if line["sample"] == sample}
        for sample in ("image", "text", "padded batch")
    )
    assert {line["verdict"] for line in image.values()} == {"same"} and compared[0] == 0
    quantities = {"logits", "loss", "gradients", "answer (greedy tokens)", "image positions"}
    assert image.keys() == quantities and image["image positions"]["original"] == "shared"
    assert text["rotation"]["original"] == text["rotation"]["ours"] == "neighboring pairs"
    assert text["rotation"]["verdict"] == "same"
    assert image["gradients"]["ours"] == "7 weights"
    assert text["logits"]["verdict"] == text["answer (greedy tokens)"]["verdict"] == "same"
    assert text["loss"]["verdict"] == "the original is wrong"
    assert "is not in list" in text["loss"]["note"] and float(text["loss"]["ours"]) > 0
    assert {line["verdict"] for line in padded.values()} == {"the original is wrong"}
    assert "loses the images" in padded["loss, change by other images"]["note"]
    assert padded["loss, change by other images"]["original"] == "0.00000"
    assert padded["vision tower's gradients"]["original"] == "0 weights"
    assert float(padded["loss, difference from samples alone"]["ours"]) < 1e-5


def test_the_original_runs_without_tokens_and_its_files_are_listed(compared, original):
    variables, modules, paths = json.loads((original / "seen.json").read_text())
    assert "a secret" not in variables.values() and variables["HF_HUB_OFFLINE"] == "1"
    home = Path(variables["HF_HOME"])
    assert home.is_relative_to(variables["HOME"]) and not home.is_relative_to(Path.home())
    assert [name for name in modules if name.startswith("glm4v_patched")] == []
    assert "" not in paths
    for file in original.glob("*.py"):
        assert re.search(rf"{file.name} \([\d,]+ bytes, sha256 [0-9a-f]{{16}}\)", compared[2])
    assert re.search(r"about [\d.]+ MB \([\d.]+ kB of weights\).*are free", compared[2])


@pytest.mark.parametrize(
    ("verdict", "status"),
    [("same", 0), ("the original is wrong", 0), ("DIFFERENT", 1), ("OURS IS WRONG", 1)],
)
def test_the_status_is_1_where_ours_differs(original, monkeypatch, verdict, status):
    monkeypatch.setattr(command, "find_python_versions", lambda *_: "a transformers")
    comparisons = [Comparison("text", "loss", "1", "2", verdict)]
    monkeypatch.setattr(command, "compare", lambda *_: comparisons)
    arguments = ["compare", str(original), "--device", "cpu", "--run-code", "--python", "python"]
    assert main(arguments) == status


def test_prompts_end_at_the_assistant_s_turn_and_out_of_memory_ends_the_worker(original, tmp_path):
    write_cases(tmp_path, original)
    collator = ConversationCollator(ChatGLMProcessor.from_pretrained(original))
    cases = load_file(tmp_path / CASES_FILE)
    for case in ("prompt text", "prompt image"):
        assert cases[f"{case}/input_ids"][0, -1] == collator.assistant_id

    def fail(error: Exception):
        raise error

    results: dict = {}
    worker.record_result(results, "loss", fail, ValueError("no"))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        worker.record_result(results, "logits", fail, torch.cuda.OutOfMemoryError())
    assert results == {"loss": {"error": "ValueError: no"}}


# Lines of tests/parity/reference.py, with which the original computes here, and other ones.
FROM_CONFIG = 'rotation = positions, base, config["original_rope"]'
PAIRS = {FROM_CONFIG: "rotation = positions, base, True"}
HALVES = {FROM_CONFIG: "rotation = positions, base, False"}
COUNTED = {
    "positions += [position] * len(new)": (
        "positions += range(len(positions), len(positions) + len(new))"
    )
}


@pytest.mark.parametrize(
    ("code", "original_rope", "rotation", "positions"),
    [
        (HALVES, False, "halves, same", "shared, same"),
        (PAIRS, False, "neighboring pairs, DIFFERENT: true", "shared, same"),
        (PAIRS | COUNTED, True, "neighboring pairs, same", "counted, DIFFERENT"),
        (HALVES | COUNTED, True, "halves, DIFFERENT: false", "counted, DIFFERENT"),
    ],
)
def test_a_difference_is_traced_to_rotation_or_image_positions(
    original, tmp_path, code, original_rope, rotation, positions
):
    folder = shutil.copytree(original, tmp_path / "original")
    model_file, reference = folder / "modeling_chatglm.py", folder / "visual.py"
    model_file.write_text(model_file.read_text().partition(SPY[:20])[0])
    text = reference.read_text()
    for old, new in code.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    reference.write_text(text)
    update_json(folder / "config.json", original_rope=original_rope)
    _, supervised = write_cases(tmp_path, folder)
    job = {"folder": str(folder), "cases": str(tmp_path / CASES_FILE), "dtype": "float32"}
    job |= {"device": "cpu", "answer_tokens": 2}
    with remote_code_under(tmp_path / "modules"):
        outputs = [run_in_process(job | {"ours": ours}, tmp_path) for ours in (False, True)]
    lines = {line.quantity: line for line in compare_outputs(*outputs, supervised, "fp32")}
    for quantity, expected in (("rotation", rotation), ("image positions", positions)):
        line, (words, _, value) = lines[quantity], expected.partition(": ")
        assert f"{line.original}, {line.verdict}" == words
        # Both figures, of which one is that of rounding.
        figures = sorted(map(float, re.findall(r"by ([\d.e-]+) with", line.note)))
        assert len(figures) == 2 and figures[0] < 1e-4 < 1e-2 < figures[1]
        assert (f"set original_rope in config.json to {value}" in line.note) == bool(value)
    assert "do not train or serve" in lines["image positions"].note or positions == "shared, same"
    assert (lines["logits"].verdict == "same") == ("DIFFERENT" not in rotation + positions)


def test_rotations_that_give_almost_the_same_logits_are_not_told_apart():
    ours = computed()
    shared, counted = (
        f"image, {worker.ROPE_PAIRS}, {name}/logits" for name in worker.POSITION_KINDS
    )
    ours.tensors[counted] = ours.tensors[shared] + 0.9e-3  # within the tolerance
    assert verdicts(computed(), ours) == set()
    apart = computed(**{"logits image": 0.5e-3})
    assert verdicts(apart, ours) == {("image", "image positions", "undecided")}
    same = computed()
    same.tensors[counted] = same.tensors[shared]
    assert verdicts(computed(), same) == {("image", "image positions", "undecided")}
    # Neither kind of positions gives the logits of the original.
    ours.tensors[shared] = ours.tensors[shared] + 2
    different = {("image", "image positions", "DIFFERENT")}
    assert verdicts(computed(**{"logits image": 1.0}), ours) > different


def refused(capsys, *arguments) -> str:
    capsys.readouterr()
    assert main(["compare", *map(str, arguments)]) == 1
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ("", r"modeling_chatglm.py \((.|\n)*--run-code\n$"),
        ("--run-code", r"give --python PATH of an environment with transformers 4\.44\.2"),
        ("--run-code --python /bin/false", "/bin/false cannot be used: it ended with status 1"),
        ("--run-code --python python --device cuda", "there is no GPU: no driver"),
    ],
)
def test_no_code_runs_without_the_option_and_a_usable_python(
    original, capsys, monkeypatch, options, error
):
    monkeypatch.setattr(command, "compare", lambda *_: pytest.fail("it was run"))
    monkeypatch.setattr("glm4v_patched.models.placement.find_gpus", lambda: Gpus((), "no driver"))
    assert re.search(error, refused(capsys, original, *options.split()))


@pytest.mark.parametrize(
    ("original_rope", "wrong", "right", "needed"),
    [
        (True, ("4.41.2", "4.45"), ("4.42.0", "4.43.0.dev0", "4.44.2"), ">=4.42,<4.45"),
        (False, ("4.41.2",), ("4.44.2", "4.47.1", "4.57.6"), ">=4.42"),  # a cogagent's
    ],
)
def test_only_versions_of_transformers_that_the_code_works_with_are_accepted(
    tmp_path, original_rope, wrong, right, needed
):
    python = tmp_path / "python"
    for version in (*wrong, *right):
        python.write_text(f'#!/bin/sh\necho \'["{version}", "2.11"]\'\n')
        python.chmod(0o700)
        if version in right:
            versions = environment.find_python_versions(str(python), original_rope)
            assert versions == f"transformers {version}, torch 2.11"
            continue
        with pytest.raises(RuntimeError, match=f"transformers {version}, and .* needs {needed};"):
            environment.find_python_versions(str(python), original_rope)


def test_too_little_memory_is_an_error_before_code_runs(original, monkeypatch, capsys):
    monkeypatch.setattr(command, "find_python_versions", lambda *_: "a transformers")
    monkeypatch.setattr(command, "_compute", lambda *_: pytest.fail("it was run"))
    arguments = [original, "--run-code", "--python", "python", "--device", "cpu"]
    needed = []
    monkeypatch.setattr(command, "format_bytes", lambda size: needed.append(size) or str(size))
    for missing in (lambda: 1, lambda: needed[0] - 1):
        monkeypatch.setattr("glm4v_patched.engine.ram.free_ram", missing)
        assert re.search(
            r"needs about [\d.]+ \([\d.]+ of weights\) and [\d.]+ are free",
            refused(capsys, *arguments),
        )


def test_a_folder_without_the_published_code_is_refused(original, tmp_path, capsys):
    folder = tmp_path / "model"
    assert "is not a folder; expected your download" in refused(capsys, folder)
    tiny_model().save_pretrained(folder)
    assert "is this package's" in refused(capsys, folder)
    for file in folder.glob("*.py"):
        file.unlink()
    assert "has no modeling_chatglm.py" in refused(capsys, folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert "does not belong to a glm-4v" in refused(capsys, folder)
    for name in ("visual.py", "tokenizer.model"):
        copy = tmp_path / f"without {name}"
        shutil.copytree(original, copy, ignore=shutil.ignore_patterns(name))
        assert re.search(f"has no {name}", refused(capsys, copy, "--run-code"))


def computed(**changes: float) -> ModelOutputs:
    """Outputs of a correct model; changes are added to one of its numbers."""
    results, tensors = {}, {}
    losses = {"text": 2.0, "image": 1.0, "other image": 3.0, "batch": 2.5, "swapped": 3.0}
    for case, loss in losses.items():
        results[case] = {"loss": loss + changes.get(f"loss {case}", 0.0)}
        results[case]["rotation"] = worker.ROPE_PAIRS
        shape = (2 if case in ("batch", "swapped") else 1, 8, 4)
        tensors[f"{case}/logits"] = torch.zeros(shape) + changes.get(f"logits {case}", 0.0)
        for rotation, positions in product(worker.ROPE_KINDS, worker.POSITION_KINDS):
            is_ours = (rotation, positions) == (worker.ROPE_PAIRS, worker.SHARED_IDS)
            logits = tensors[f"{case}/logits"] + (0 if is_ours else 9)
            tensors[f"{case}, {rotation}, {positions}/logits"] = logits
        for name in ("transformer.vision.boi", "transformer.encoder.final_layernorm.weight"):
            gradient = torch.ones(3) + changes.get(f"gradient {case}", 0.0)
            tensors[f"{case}/gradient/{name}"] = gradient
    for case in ("prompt text", "prompt image"):
        results[case] = {"answer": [1, 2 + int(changes.get(case, 0))], "generate": [1, 2]}
    return ModelOutputs(results, tensors)


SUPERVISED = {"text": 3, "image": 2, "other image": 6, "batch": 8, "swapped": 8}


def verdicts(original: ModelOutputs, ours: ModelOutputs) -> set[tuple[str, str, str]]:
    comparisons = compare_outputs(original, ours, SUPERVISED, "fp32")
    assert format_comparisons(comparisons)
    return {(x.sample, x.quantity, x.verdict) for x in comparisons if x.verdict != "same"}


@pytest.mark.parametrize(
    ("change", "sample", "quantity"),
    [
        ({"logits image": 1.0, "logits batch": 1.0, "logits other image": 1.0}, *[""] * 2),
        ({"gradient image": 0.1}, "image", "gradients"),
        ({"logits text": float("nan")}, "text", "logits"),
    ],
)
def test_a_difference_on_a_single_sample_does_not_blame_the_original(change, sample, quantity):
    assert verdicts(computed(), computed()) == set()
    different = verdicts(computed(), computed(**change))
    line = sample or "image", quantity or "logits", "DIFFERENT"
    beside = {("image", "image positions", "DIFFERENT")} if not sample else set()
    beside |= {("text", "rotation", "DIFFERENT")} if "logits text" in change else set()
    assert different == {line} | beside


def test_the_loss_of_a_batch_is_the_mean_over_supervised_tokens_and_not_over_samples():
    mean_over_samples = computed(**{"loss batch": -0.5})  # of 1 and 3, with 2 and 6 tokens
    line = "padded batch", "loss, difference from samples alone", "OURS IS WRONG"
    assert verdicts(computed(), mean_over_samples) == {line}


NAN, INF = float("nan"), float("inf")


def broken(key: str, value: float) -> ModelOutputs:
    """Outputs with one number that is not finite, and not the first one that is compared."""
    outputs = computed()
    case, _, name = key.partition("/")
    if name == "loss":
        outputs.results[case]["loss"] = value
    else:
        tensor = outputs.tensors.setdefault(key, torch.zeros(1, 8, 4))
        tensor.view(-1)[1] = value
    return outputs


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize(
    ("key", "sample", "quantity"),
    [
        ("text/gradient/transformer.encoder.final_layernorm.weight", "text", "gradients"),
        ("batch/gradient/transformer.vision.boi", "padded batch", "vision tower's gradients"),
        ("image/logits", "image", "logits"),
        ("other image/logits", "padded batch", "logits, difference from samples alone"),
        ("batch/logits", "padded batch", "logits, difference from samples alone"),
        ("batch/loss", "padded batch", "loss, difference from samples alone"),
        ("other image/loss", "padded batch", "loss, difference from samples alone"),
        ("swapped/loss", "padded batch", "loss, change by other images"),
        ("text/loss", "text", "loss"),
        ("prompt image/logits", "image", "answer (greedy tokens)"),
    ],
)
def test_a_number_that_is_not_finite_is_never_the_same(key, sample, quantity, value):
    right, wrong = computed(), broken(key, value)
    for original, ours in ((right, wrong), (wrong, right), (wrong, wrong)):
        [verdict] = {
            verdict
            for *key, verdict in verdicts(original, ours)
            if tuple(key) == (sample, quantity)
        }
        assert verdict in ("DIFFERENT", "OURS IS WRONG") or original is wrong
    assert ours_fail(right, wrong) and ours_fail(wrong, wrong)


def ours_fail(original: ModelOutputs, ours: ModelOutputs) -> bool:
    reached = {verdict for *_, verdict in verdicts(original, ours)}
    return bool(reached & {"DIFFERENT", "OURS IS WRONG"})


def test_ours_is_wrong_where_it_fails_or_loses_images():
    def wrong(quantity: str, sample: str = "padded batch") -> set[tuple[str, str, str]]:
        return {(sample, quantity, "OURS IS WRONG")}

    without = computed(**{"loss swapped": -0.5})
    assert verdicts(computed(), without) == wrong("loss, change by other images")
    failing = computed()
    failing.results["text"]["loss"] = {"error": "ValueError: no"}
    assert wrong("loss", "text") < verdicts(computed(), failing)
    apart = computed(**{"loss batch": 0.1, "loss swapped": 0.1})
    assert verdicts(computed(), apart) == wrong("loss, difference from samples alone")
    blind, tower = computed(**{"gradient batch": -1.0}), "vision tower's gradients"
    assert verdicts(computed(), blind) == wrong(tower) == verdicts(blind, blind)
    assert verdicts(blind, computed()) == {("padded batch", tower, "the original is wrong")}
