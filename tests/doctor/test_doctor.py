"""doctor: each problem of a machine and of a recipe is found, with its cure."""

import json
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections import namedtuple
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from glm4v_patched.cli import main
from glm4v_patched.doctor import machine, packages
from glm4v_patched.doctor import recipe as recipe_checks
from glm4v_patched.doctor.findings import Finding, finding_from_error, format_findings
from glm4v_patched.engine import memory_check
from glm4v_patched.engine.gpus import Gpu, Gpus
from glm4v_patched.finetune.plan import Plan
from glm4v_patched.finetune.recipe.sections import Recipe
from glm4v_patched.finetune.run_folder import locked
from glm4v_patched.remote.configuration_chatglm import (
    FIRST_UNTESTED_TRANSFORMERS,
    TESTED_TRANSFORMERS,
)
from tests.helpers.recipes import drawn_recipe, write_recipe

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def sound(monkeypatch, tmp_path):
    """A machine with two GPUs and no problems."""
    (tmp_path / "Python.h").touch()
    for module, name, value in (
        (machine, "find_gpus", Gpus((Gpu("NVIDIA H200", 150 * 10**9, (9, 0)),) * 2)),
        (machine, "driver_cuda_version", (13, 0)),
        (machine, "torch_cuda_version", (12, 8)),
        (machine, "free_bytes_per_gpu", [149 * 10**9] * 2),
        (shutil, "disk_usage", Usage(10**14, 0, 10**14)),
        (resource, "getrlimit", (10**6, 10**6)),
        (shutil, "which", "/bin/true"),
        (machine.sysconfig, "get_paths", {"include": str(tmp_path)}),
    ):
        monkeypatch.setattr(module, name, lambda *args, value=value, **kwargs: value)


def problems(on_cpu: bool = False) -> dict[str, Finding]:
    """The findings that are not ok, by their checks; those that fail have a cure."""
    findings = {x.check: x for x in machine.check_machine(on_cpu) if x.verdict != "ok"}
    assert all(x.cure for x in findings.values() if x.verdict == "fails"), findings
    return findings


def test_a_sound_machine_has_no_problems(sound, monkeypatch):
    assert problems() == {} and problems(on_cpu=True) == {}
    assert next(machine.check_machine(False)).detail == "2: NVIDIA H200 (150 GB)"
    # A limit that cannot be raised is not reported.
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1024))
    assert problems() == {}


@pytest.mark.parametrize("runs", [(12, 0), (12, 8), (13, 0)])
def test_a_driver_of_torchs_major_cuda_or_a_newer_one_is_no_problem(sound, monkeypatch, runs):
    monkeypatch.setattr(machine, "driver_cuda_version", lambda: runs)  # torch has 12.8
    assert "driver" not in problems()


# The arguments of monkeypatch.setattr that give the machine each problem.
NO_GPU = (machine, "find_gpus", lambda: Gpus((), "NVIDIA's driver shows none"))
OLDER_DRIVER = (machine, "driver_cuda_version", lambda: (11, 8))
VOLTAS = Gpus((Gpu("Tesla V100", 32 * 10**9, (7, 0)),) * 2)
VOLTA = (machine, "find_gpus", lambda: VOLTAS)
GPU_IN_USE = (machine, "free_bytes_per_gpu", lambda count: [149 * 10**9, 100 * 10**9])
FULL_GPU = (machine, "free_bytes_per_gpu", Mock(side_effect=RuntimeError("error 2 for GPU 0")))
NO_HEADERS = (machine.sysconfig, "get_paths", lambda: {"include": "/nowhere"})
NO_COMPILER = (shutil, "which", lambda name, path=None: None)
SMALL_DISK = (shutil, "disk_usage", lambda folder: Usage(10**14, 0, 2**26))
FEW_FILES = (resource, "getrlimit", lambda kind: (1024, 1048576))


@pytest.mark.parametrize(
    ("problem", "check", "verdict", "part"),
    [
        (NO_GPU, "GPUs", "warning", "NVIDIA's driver shows none"),
        (OLDER_DRIVER, "driver", "fails", "11.8"),
        (VOLTA, "bf16", "warning", "GPU 1"),
        (GPU_IN_USE, "GPU 1", "warning", "47 of 140 GiB"),
        (FULL_GPU, "GPU memory", "warning", "error 2 for GPU 0"),
        (NO_COMPILER, "compiler", "fails", "gcc"),
        (NO_HEADERS, "compiler", "fails", "/nowhere/Python.h"),
        (SMALL_DISK, "/dev/shm", "warning", "0.06 of"),
        (FEW_FILES, "open files", "warning", "1,024"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_problem_of_the_machine_is_reported_with_its_cure(
    sound, monkeypatch, words, problem, check, verdict, part
):
    monkeypatch.setattr(*problem)
    finding = problems()[check]
    assert finding.verdict == verdict
    text = f"{finding.detail}\n> {finding.cure}"
    assert part in text
    words(text, temporary=tempfile.gettempdir())


def test_the_compiler_that_cc_names_is_looked_for(sound, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/clang" if name == "clang-18" else None)
    monkeypatch.setenv("CC", "clang-18")
    assert "compiler" not in problems()
    monkeypatch.delenv("CC")
    assert problems()["compiler"].verdict == "fails"


def test_disk_space_for_the_published_weights_is_needed_until_they_are_cached(
    sound, monkeypatch, tmp_path
):
    monkeypatch.setattr(*SMALL_DISK)
    monkeypatch.setattr(machine, "hub_cache", lambda: tmp_path)
    assert "28.0 GB may be needed" in problems()["disk: Hub cache"].detail
    snapshot = tmp_path / "models--zai-org--glm-4v-9b" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    assert "disk: Hub cache" not in problems()


@pytest.mark.parametrize(
    ("name", "installed", "verdict"),
    [
        ("transformers", "4.44.2", "fails"),
        ("transformers", FIRST_UNTESTED_TRANSFORMERS, "warning"),
        ("torch", None, "fails"),
        ("torch", "2.10.0", "fails"),
        ("torch", "3.0", None),
    ],
)
def test_versions_outside_of_the_range_are_reported(monkeypatch, name, installed, verdict):
    def find_version(package):
        if package == name and installed is None:
            raise PackageNotFoundError(package)
        return {name: installed, "torchvision": "0.26.0"}.get(package) or version(package)

    ours = ["torch>=2.11", f"transformers{TESTED_TRANSFORMERS}", "deepspeed>=0.16.9,<0.20"]
    needs = {"glm4v-patched": ours, "torchvision": ["torch==2.11.0"]}
    monkeypatch.setattr(packages, "version", find_version)
    monkeypatch.setattr(packages, "requires", needs.get)
    monkeypatch.setattr(packages, "metadata", lambda name: {"Requires-Python": ">=3.11"})
    findings = {x.check: x for x in packages.check_packages() if x.verdict != "ok"}
    assert (findings[name].verdict if verdict else findings.get(name)) == verdict
    assert verdict is None or f"install '{name}" in findings[name].cure
    if name == "torch" and installed:
        needed = f"torchvision 0.26.0 needs torch==2.11.0, and {installed}"
        clash = findings["versions together"]
        assert needed in clash.detail and clash.verdict == "fails"


@pytest.mark.parametrize("spelling", ["huggingface-hub", "huggingface_hub", "HuggingFace.Hub"])
def test_a_conflict_is_reported_however_the_other_package_spells_the_name(monkeypatch, spelling):
    needs = {"glm4v-patched": [], "tokenizers": [f"{spelling}<1"]}
    monkeypatch.setattr(packages, "version", {"tokenizers": "1", "huggingface-hub": "2"}.get)
    monkeypatch.setattr(packages, "requires", needs.get)
    monkeypatch.setattr(packages, "metadata", lambda name: {"Requires-Python": ">=3.11"})
    clash = next(x for x in packages.check_packages() if x.check == "versions together")
    assert clash.verdict == "warning" and "and 2 is installed" in clash.detail


def test_a_nightly_build_is_within_the_range_of_the_version_that_it_becomes(monkeypatch):
    installed = {"torch": "2.12.0.dev20261101", "torchvision": "0.27.0"}
    needs = {"glm4v-patched": ["torch>=2.11"], "torchvision": ["torch>=2.11"]}
    monkeypatch.setattr(packages, "version", lambda name: installed.get(name) or version(name))
    monkeypatch.setattr(packages, "requires", needs.get)
    monkeypatch.setattr(packages, "metadata", lambda name: {"Requires-Python": ">=3.11"})
    verdicts = {finding.check: finding.verdict for finding in packages.check_packages()}
    assert verdicts["torch"] == verdicts["versions together"] == "ok"


def test_failures_come_last_and_commands_are_not_wrapped():
    command = "pip install " + "x" * 120 + " y"
    failing = finding_from_error("torch", "fails", f"{'old ' * 40}: {command}")
    assert failing.cure == command
    findings = [failing, Finding("disk", "ok", "fine")]
    lines = format_findings(findings, 0.25).splitlines()
    assert lines[0] == "ok      disk   fine"
    assert lines[1].startswith("fails   torch  old old") and max(map(len, lines[:3])) <= 100
    assert f"> {command}" in lines[-2]
    assert lines[-1] == "2 checks in 0.2 s: 1 will fail, 0 warnings"


def test_doctor_is_quick_and_loads_no_torch():
    code = "import sys; sys.modules['torch'] = None; from glm4v_patched.cli import main; "
    code += "sys.exit(main(['doctor', '--json', '--device', 'cpu']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert report["seconds"] < 3 and done.returncode == int(report["fails"])
    assert {"Python", "deepspeed", "/dev/shm"} <= {x["check"] for x in report["findings"]}


def test_the_exit_status_is_1_if_something_will_fail(sound, monkeypatch, capsys):
    monkeypatch.setattr(packages, "requires", lambda name: [])
    monkeypatch.setattr(packages, "metadata", lambda name: {"Requires-Python": ">=3.11"})
    assert main(["doctor"]) == 0
    monkeypatch.setattr(*VOLTA)
    assert main(["doctor"]) == 0  # a warning
    monkeypatch.setattr(*OLDER_DRIVER)
    assert main(["doctor"]) == 1
    assert "1 will fail, 1 warning" in capsys.readouterr().out


@pytest.fixture(scope="module")
def shared_recipe(tmp_path_factory) -> Recipe:
    return drawn_recipe(tmp_path_factory.mktemp("doctor"))


@pytest.fixture
def recipe_file(shared_recipe, tmp_path) -> Path:
    """The recipe's file, with a copy of its model that a test may damage."""
    folder = tmp_path / "model"
    shutil.copytree(shared_recipe.model, folder)
    changes = {"model": str(folder), "out": str(tmp_path / "out")}
    write_recipe(shared_recipe.override(changes), tmp_path / "recipe.json")
    return tmp_path / "recipe.json"


def checks(path: Path, *overrides: str) -> dict[str, Finding]:
    return {x.check: x for x in recipe_checks.check_recipe(path, overrides, None, "cpu")}


def test_a_recipe_that_can_be_trained_is_described(recipe_file, capsys):
    findings = checks(recipe_file)
    assert {finding.verdict for finding in findings.values()} == {"ok"}
    assert "20 samples, 20 images" in findings["data"].detail
    assert findings.keys() >= {"recipe", "folder (out)", "model", "data", "memory and disk"}
    assert "as published (fp8 is off): " in findings["implementations: training"].detail
    assert "2 x language model MLP" in findings["implementations: inference"].detail
    assert main(["doctor", str(recipe_file), "--device", "cpu", "--json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["findings"]
    assert not Path(json.loads(recipe_file.read_text())["out"]).exists()  # nothing was written


def test_the_first_rows_are_printed_with_supervised_tokens_and_unusable_ones_exit_with_1(
    recipe_file, capsys
):
    folder = Path(recipe_file).parent
    shutil.copy(
        next(Path(Recipe.read(recipe_file).data.train).parent.rglob("*.png")), folder / "a.png"
    )
    (folder / "rows.csv").write_text("file,what\na.png,red\nb.png,blue\na.png,red\n")
    columns = 'data.columns={question: "What is it?", answer: what, image: file}'
    overrides = [f"data.train={folder / 'rows.csv'}", "data.eval=null", columns]
    assert main(["doctor", str(recipe_file), *overrides, "--rows", "2"]) == 1
    first, second = capsys.readouterr().out.split(f"{folder}/rows.csv:")[1:]
    assert first.startswith(f"2:\n  image {folder}/a.png\n")
    assert "What is it?" in first and "red" in re.findall(r"\[\[(.*?)\]\]", first, re.DOTALL)[0]
    assert second.startswith("3:") and "b.png" in second and "there is no file" in second
    assert main(["doctor", str(recipe_file), *overrides, "--rows", "1"]) == 0
    capsys.readouterr()
    # Without data.columns, the columns of the file are listed.
    assert main(["doctor", str(recipe_file), *overrides[:2], "--rows", "1"]) == 1
    assert '"file" ("a.png"), "what" ("red")' in capsys.readouterr().out
    assert main(["doctor", "--rows", "1"]) == 1 == main(["doctor", str(recipe_file), "--rows", "0"])


def test_all_problems_of_the_fields_are_reported_and_the_rest_is_checked(recipe_file):
    overrides = ["engine.zero_stage=7", "trained=all"]
    fields = recipe_checks.check_recipe(recipe_file, overrides, 1, "cpu")
    details = [finding.detail for finding in fields if finding.verdict == "fails"]
    assert len(details) == 2 and all(text.startswith("command line: ") for text in details)
    # On a machine with too few GPUs.
    findings = {x.check: x for x in recipe_checks.check_recipe(recipe_file, [], 64, "cuda")}
    assert findings["recipe"].verdict == "fails"
    assert findings["data"].verdict == "ok" and "memory and disk" not in findings
    # With a ZeRO++ group size that does not divide the processes.
    findings = checks(recipe_file, "engine.zero_hpz_partition_size=2")
    assert findings["recipe"].verdict == "fails" and findings["data"].verdict == "ok"


def cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def lose_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def lose_image_size(folder: Path) -> None:
    for name in ("tokenizer_config.json", "preprocessor_config.json", "processor_config.json"):
        if (folder / name).is_file():
            (folder / name).write_text((folder / name).read_text().replace(": 56", ": 112"))


@pytest.mark.parametrize(
    ("damage", "check", "message"),
    [
        (cut_weights, "recipe", r"model.safetensors has [\d,]+ of its [\d,]+ bytes"),
        (lose_tokenizer, "data", "tokenizer"),
        (
            lose_image_size,
            "data",
            "its processor expands an image to 16 tokens, and the model takes 4",
        ),
    ],
)
def test_a_damaged_model_is_reported(recipe_file, damage, check, message):
    damage(recipe_file.parent / "model")
    findings = checks(recipe_file)
    assert findings[check].verdict == "fails"
    assert re.search(message, findings[check].detail), findings[check]
    # Rows are tokenized by the model's own tokenizer, so a damaged model leaves them unchecked.
    assert ("data" in findings) is (check == "data")


def test_a_small_disk_and_unusable_rows_are_reported(recipe_file, monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    (tmp_path / "bad.jsonl").write_text('{"messages": [], "images": []}\n')
    data = checks(recipe_file, f"data.train={tmp_path / 'bad.jsonl'}")["data"]
    assert data.verdict == "fails" and "bad.jsonl:1: " in data.detail
    findings = checks(recipe_file)
    assert findings["memory and disk"].verdict == "fails" and findings["data"].verdict == "ok"
    assert "1.0 kB are free there, and the model (" in findings["memory and disk"].detail


def test_rows_that_are_left_out_or_have_no_image_are_a_warning(recipe_file, tmp_path):
    text_only = [{"role": role, "content": "Hello"} for role in ("user", "assistant")]
    with_image = [text_only[0] | {"image": "a.png"}, text_only[1]]
    shutil.copy(
        next(Path(Recipe.read(recipe_file).data.train).parent.rglob("*.png")), tmp_path / "a.png"
    )
    conversations = (text_only, [], with_image)
    rows = "".join(json.dumps({"messages": messages}) + "\n" for messages in conversations)
    (tmp_path / "some.jsonl").write_text(rows)
    sets = [f"data.train={tmp_path / 'some.jsonl'}", "data.eval=null"]
    assert checks(recipe_file, *sets)["data"].verdict == "fails"
    findings = checks(recipe_file, *sets, "data.on_bad=skip")
    data, warning = findings["data"], findings["data warnings"]
    assert data.verdict == "warning" and "1 row skipped" in data.detail
    assert warning.verdict == "warning" and "1 of 2 samples have no image" in warning.detail


def test_json_is_all_of_stdout_also_if_rows_are_left_out(recipe_file, tmp_path, capsys):
    train = Path(Recipe.read(recipe_file).data.train)
    rows = Path(shutil.copytree(train.parent, tmp_path / "data")) / train.name
    rows.write_text(rows.read_text() + '{"messages": []}\n')
    overrides = [f"data.train={rows}", "data.on_bad=skip", "--device", "cpu", "--json"]
    main(["doctor", str(recipe_file), *overrides])
    out, err = capsys.readouterr()
    assert json.loads(out)["findings"] and f"{rows.name}:" in err


def test_a_folder_locked_by_another_run_is_reported_and_not_changed(recipe_file, tmp_path):
    with locked(tmp_path / "out"):
        before = (tmp_path / "out" / "run.lock").read_bytes()
        finding = checks(recipe_file)["folder (out)"]
        assert finding.verdict == "fails" and "another run writes to" in finding.detail
        assert (tmp_path / "out" / "run.lock").read_bytes() == before
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / "model.safetensors").touch()
    assert checks(recipe_file)["folder (out)"].verdict == "fails"


def test_too_little_memory_is_reported(recipe_file, monkeypatch):
    monkeypatch.setattr(memory_check, "free_ram", lambda: 1e6)
    finding = checks(recipe_file)["memory and disk"]
    assert finding.verdict == "fails" and "a step takes" in finding.detail
    monkeypatch.undo()
    monkeypatch.setattr(Plan, "is_tight", True)
    finding = checks(recipe_file)["memory and disk"]
    assert finding.verdict == "warning" and "lora_lm or qlora" in finding.cure
