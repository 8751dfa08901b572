"""What doctor says of a machine and of a recipe: each fault that can be seen, with its cure."""

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

import pytest

from glm4v_patched.cli import main
from glm4v_patched.doctor import machine, packages
from glm4v_patched.doctor import recipe as of_recipe
from glm4v_patched.doctor.findings import Finding, finding, table
from glm4v_patched.engine import memory_check
from glm4v_patched.engine.gpus import Gpu, Gpus, GpuMemoryUse
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
    """A machine with two GPUs on which nothing is wrong."""
    (tmp_path / "Python.h").touch()
    for place, name, value in (
        (machine, "find_gpus", Gpus((Gpu("NVIDIA H200", 150 * 10**9, (9, 0)),) * 2)),
        (machine, "driver_cuda_version", (13, 0)),
        (machine, "torch_cuda_version", (12, 8)),
        (machine, "query_gpu_memory_use", [GpuMemoryUse(number, 0, 10**11) for number in range(2)]),
        (shutil, "disk_usage", Usage(10**14, 0, 10**14)),
        (resource, "getrlimit", (10**6, 10**6)),
        (shutil, "which", "/bin/true"),
        (machine.sysconfig, "get_paths", {"include": str(tmp_path)}),
    ):
        monkeypatch.setattr(place, name, lambda *given, value=value, **options: value)


GIB = 2**30


def faults(on_cpu: bool = False) -> dict[str, Finding]:
    """What is not in order, by its check."""
    found = {each.check: each for each in machine.check_machine(on_cpu) if each.verdict != "ok"}
    assert all(each.cure for name, each in found.items() if each.verdict == "fails"), found
    return found


def test_nothing_is_wrong_with_a_sound_machine(sound, monkeypatch):
    assert faults() == {} and faults(on_cpu=True) == {}
    # A limit that cannot be raised is no fault.
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1024))
    assert faults() == {}


@pytest.mark.parametrize("runs", [(12, 0), (12, 8), (13, 0)])
def test_a_driver_of_torchs_major_cuda_or_a_newer_one_is_no_fault(sound, monkeypatch, runs):
    monkeypatch.setattr(machine, "driver_cuda_version", lambda: runs)  # torch has 12.8
    assert "driver" not in faults()


# Each fault: what of the machine is replaced, and by what.
NO_GPU = (machine, "find_gpus", lambda: Gpus((), "NVIDIA's driver shows none"))
OLDER_DRIVER = (machine, "driver_cuda_version", lambda: (11, 8))
VOLTAS = Gpus((Gpu("Tesla V100", 32 * 10**9, (7, 0)),) * 2)
VOLTA = (machine, "find_gpus", lambda: VOLTAS)
USES = [GpuMemoryUse(0, 0, 150 * GIB), GpuMemoryUse(1, 41 * GIB, 150 * GIB)]
MAX_IDLE_GPU_MEMORY = (machine, "query_gpu_memory_use", lambda: USES)
NO_HEADERS = (machine.sysconfig, "get_paths", lambda: {"include": "/nowhere"})
NO_COMPILER = (shutil, "which", lambda name, path=None: None)
SMALL_DISK = (shutil, "disk_usage", lambda folder: Usage(10**14, 0, 2**26))
FEW_FILES = (resource, "getrlimit", lambda kind: (1024, 1048576))


@pytest.mark.parametrize(
    ("fault", "check", "verdict", "named"),
    [
        (NO_GPU, "GPUs", "warning", "NVIDIA's driver shows none"),
        (OLDER_DRIVER, "driver", "fails", "11.8"),
        (VOLTA, "bf16", "warning", "GPU 1"),
        (MAX_IDLE_GPU_MEMORY, "GPU 1", "warning", "41 of 150 GiB"),
        (NO_COMPILER, "compiler", "fails", "gcc"),
        (NO_HEADERS, "compiler", "fails", "/nowhere/Python.h"),
        (SMALL_DISK, "/dev/shm", "warning", "0.06 of"),
        (FEW_FILES, "open files", "warning", "1,024"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_of_the_machine_is_told_with_its_cure(
    sound, monkeypatch, words, fault, check, verdict, named
):
    monkeypatch.setattr(*fault)
    found = faults()[check]
    assert found.verdict == verdict
    text = f"{found.found}\n> {found.cure}"
    assert named in text
    words(text, temporary=tempfile.gettempdir())


def test_room_for_the_published_weights_is_wanted_while_they_are_not_there(
    sound, monkeypatch, tmp_path
):
    monkeypatch.setattr(*SMALL_DISK)
    monkeypatch.setattr(machine, "hub_cache", lambda: tmp_path)
    assert "28.0 GB may be needed" in faults()["disk: cache of the Hub"].found
    there = tmp_path / "models--zai-org--glm-4v-9b" / "snapshots" / "abc"
    there.mkdir(parents=True)
    (there / "config.json").touch()
    assert "disk: cache of the Hub" not in faults()


@pytest.mark.parametrize(
    ("name", "found", "verdict"),
    [
        ("transformers", "4.44.2", "fails"),
        ("transformers", FIRST_UNTESTED_TRANSFORMERS, "warning"),
        ("torch", None, "fails"),
        ("torch", "2.10.0", "fails"),
        ("torch", "3.0", None),
    ],
)
def test_versions_outside_of_the_range_are_told(monkeypatch, name, found, verdict):
    def installed(asked):
        if asked == name and found is None:
            raise PackageNotFoundError(asked)
        return {name: found, "torchvision": "0.26.0"}.get(asked) or version(asked)

    ours = ["torch>=2.11", f"transformers{TESTED_TRANSFORMERS}", "deepspeed>=0.16.9,<0.20"]
    needs = {"glm4v-patched": ours, "torchvision": ["torch==2.11.0"]}
    monkeypatch.setattr(packages, "version", installed)
    monkeypatch.setattr(packages, "requires", needs.get)
    monkeypatch.setattr(packages, "metadata", lambda name: {"Requires-Python": ">=3.11"})
    told = {each.check: each for each in packages.check_packages() if each.verdict != "ok"}
    assert (told[name].verdict if verdict else told.get(name)) == verdict
    assert verdict is None or f"install '{name}" in told[name].cure
    if name == "torch" and found:
        needed = f"torchvision 0.26.0 needs torch==2.11.0, and {found}"
        clash = told["versions together"]
        assert needed in clash.found and clash.verdict == "fails"


def test_what_will_fail_comes_last_and_commands_stay_whole():
    command = "pip install " + "x" * 120 + " y"
    failing = finding("torch", "fails", f"{'old ' * 40}: {command}")
    assert failing.cure == command
    found = [failing, Finding("disk", "ok", "fine")]
    lines = table(found, 0.25).splitlines()
    assert lines[0] == "ok      disk   fine"
    assert lines[1].startswith("fails   torch  old old") and max(map(len, lines[:3])) <= 100
    assert f"> {command}" in lines[-2]
    assert lines[-1] == "2 checks in 0.2 s: 1 will fail, 0 warnings"


def test_doctor_is_quick_and_loads_no_torch():
    code = "import sys; sys.modules['torch'] = None; from glm4v_patched.cli import main; "
    code += "sys.exit(main(['doctor', '--json', '--device', 'cpu']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    told = json.loads(done.stdout)
    assert told["seconds"] < 3 and done.returncode == int(told["fails"])
    assert {"Python", "deepspeed", "/dev/shm"} <= {each["check"] for each in told["findings"]}


def test_the_status_says_whether_something_will_fail(sound, monkeypatch, capsys):
    monkeypatch.setattr(packages, "requires", lambda name: [])
    monkeypatch.setattr(packages, "metadata", lambda name: {"Requires-Python": ">=3.11"})
    assert main(["doctor"]) == 0
    monkeypatch.setattr(*VOLTA)
    assert main(["doctor"]) == 0  # a warning
    monkeypatch.setattr(*OLDER_DRIVER)
    assert main(["doctor"]) == 1
    assert "1 will fail, 1 warning" in capsys.readouterr().out


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Recipe:
    return drawn_recipe(tmp_path_factory.mktemp("doctor"))


@pytest.fixture
def asked(drawn, tmp_path) -> Path:
    """The recipe's file, with a model of its own."""
    folder = tmp_path / "model"
    shutil.copytree(drawn.model, folder)
    changes = {"model": str(folder), "out": str(tmp_path / "out")}
    write_recipe(drawn.override(changes), tmp_path / "recipe.json")
    return tmp_path / "recipe.json"


def checks(path: Path, *overrides: str) -> dict[str, Finding]:
    return {each.check: each for each in of_recipe.check_recipe(path, overrides, None, "cpu")}


def test_a_recipe_that_can_be_trained_is_described(asked, capsys):
    found = checks(asked)
    assert {each.verdict for each in found.values()} == {"ok"}
    assert "20 samples, 20 images" in found["data"].found
    assert found.keys() >= {"recipe", "folder (out)", "model", "data", "memory and disk"}
    assert "as published (fp8 is off): " in found["implementations: training"].found
    assert "2 x language model MLP" in found["implementations: inference"].found
    assert main(["doctor", str(asked), "--device", "cpu", "--json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["findings"]
    assert not Path(json.loads(asked.read_text())["out"]).exists()  # nothing was written


def test_the_first_rows_are_shown_as_they_are_learned(asked, capsys):
    folder = Path(asked).parent
    shutil.copy(next(Path(Recipe.read(asked).data.train).parent.rglob("*.png")), folder / "a.png")
    (folder / "rows.csv").write_text("file,what\na.png,red\nb.png,blue\na.png,red\n")
    columns = 'data.columns={question: "What is it?", answer: what, image: file}'
    given = [f"data.train={folder / 'rows.csv'}", "data.eval=null", columns]
    assert main(["doctor", str(asked), *given, "--rows", "2"]) == 1
    first, second = capsys.readouterr().out.split(f"{folder}/rows.csv:")[1:]
    assert first.startswith(f"2:\n  image {folder}/a.png\n")
    assert "What is it?" in first and "red" in re.findall(r"\[\[(.*?)\]\]", first, re.DOTALL)[0]
    assert second.startswith("3:") and "b.png" in second and "there is no file" in second
    assert main(["doctor", str(asked), *given, "--rows", "1"]) == 0
    capsys.readouterr()
    # Without columns, they are shown.
    assert main(["doctor", str(asked), *given[:2], "--rows", "1"]) == 1
    assert '"file" ("a.png"), "what" ("red")' in capsys.readouterr().out
    assert main(["doctor", "--rows", "1"]) == 1 == main(["doctor", str(asked), "--rows", "0"])


def test_all_faults_of_the_fields_are_told_and_what_else_can_be_is_looked_at(asked):
    fields = of_recipe.check_recipe(asked, ["engine.zero_stage=7", "trained=all"], 1, "cpu")
    found = [each.found for each in fields if each.verdict == "fails"]
    assert len(found) == 2 and all(text.startswith("command line: ") for text in found)
    # Without the GPUs that are wanted.
    found = {each.check: each for each in of_recipe.check_recipe(asked, [], 64, "cuda")}
    assert found["recipe"].verdict == "fails"
    assert found["data"].verdict == "ok" and "memory and disk" not in found
    # With groups of ZeRO++ that do not fit the processes.
    found = checks(asked, "engine.zero_hpz_partition_size=2")
    assert found["recipe"].verdict == "fails" and found["data"].verdict == "ok"


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
    ("damage", "check", "told"),
    [
        (cut_weights, "recipe", r"model.safetensors has [\d,]+ of its [\d,]+ bytes"),
        (lose_tokenizer, "data", "tokenizer"),
        (lose_image_size, "data", "its processor makes 16 tokens of an image, and the model takes 4"),
    ],
)
def test_a_damaged_model_is_told(asked, damage, check, told):
    damage(asked.parent / "model")
    found = checks(asked)
    assert found[check].verdict == "fails"
    assert re.search(told, found[check].found), found[check]
    # Rows are measured by the model's own tokenizer, and it is not known which that is.
    assert ("data" in found) is (check == "data")


def test_a_small_disk_and_rows_that_cannot_be_used_are_told(asked, monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    (tmp_path / "bad.jsonl").write_text('{"messages": [], "images": []}\n')
    found = checks(asked, f"data.train={tmp_path / 'bad.jsonl'}")
    assert found["data"].verdict == "fails" and "bad.jsonl:1: " in found["data"].found
    found = checks(asked)
    assert found["memory and disk"].verdict == "fails" and found["data"].verdict == "ok"
    assert "1.0 kB are free there, and the model (" in found["memory and disk"].found


def test_rows_that_are_left_out_or_have_no_image_are_a_warning(asked, tmp_path):
    said = [{"role": role, "content": "Hello"} for role in ("user", "assistant")]
    shown = [said[0] | {"image": "a.png"}, said[1]]
    shutil.copy(next(Path(Recipe.read(asked).data.train).parent.rglob("*.png")), tmp_path / "a.png")
    rows = "".join(json.dumps({"messages": each}) + "\n" for each in (said, [], shown))
    (tmp_path / "some.jsonl").write_text(rows)
    sets = [f"data.train={tmp_path / 'some.jsonl'}", "data.eval=null"]
    assert checks(asked, *sets)["data"].verdict == "fails"
    every = checks(asked, *sets, "data.on_bad=skip")
    found, doubt = every["data"], every["data, warning"]
    assert found.verdict == "warning" and "1 row skipped" in found.found
    assert doubt.verdict == "warning" and "1 of 2 samples have no image" in doubt.found


def test_a_folder_that_another_run_holds_is_told_and_left_as_it_is(asked, tmp_path):
    with locked(tmp_path / "out"):
        before = (tmp_path / "out" / "run.lock").read_bytes()
        found = checks(asked)["folder (out)"]
        assert found.verdict == "fails" and "another run writes to" in found.found
        assert (tmp_path / "out" / "run.lock").read_bytes() == before
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / "model.safetensors").touch()
    assert checks(asked)["folder (out)"].verdict == "fails"


def test_memory_that_does_not_suffice_is_told(asked, monkeypatch):
    monkeypatch.setattr(memory_check, "free_ram", lambda: 1e6)
    found = checks(asked)["memory and disk"]
    assert found.verdict == "fails" and "a step takes" in found.found
    monkeypatch.undo()
    monkeypatch.setattr(Plan, "is_tight", True)
    found = checks(asked)["memory and disk"]
    assert found.verdict == "warning" and "lora_lm, qlora" in found.cure
