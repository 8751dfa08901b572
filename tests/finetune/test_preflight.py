"""What is told of a training before anything expensive starts."""

import ctypes
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from glm4v_patched.cli import main
from glm4v_patched.demo import command as demo
from glm4v_patched.engine import gpus
from glm4v_patched.engine.gpus import Gpu, Gpus, find_gpus
from glm4v_patched.engine.memory_plan import count_parameters, count_trained
from glm4v_patched.engine.options import PARTS, TRAINED, EngineOptions, part_of
from glm4v_patched.engine.trainable import LORA_TARGETS, select_weights
from glm4v_patched.finetune import disk, preflight
from glm4v_patched.finetune.disk import checkpoints_at_once, saved_bytes
from glm4v_patched.finetune.preflight import check
from glm4v_patched.finetune.recipe import fields, whole_recipe
from glm4v_patched.finetune.recipe_file import RecipeError, place_all
from glm4v_patched.finetune.worker import require_gpu
from glm4v_patched.models import placement
from glm4v_patched.models.base import ADAPTER_WEIGHTS
from glm4v_patched.models.placement import Placement, place
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.helpers.recipes import LEAST, recipe
from tests.helpers.tiny import tiny_model

H200 = Gpu("NVIDIA H200", 150_000_000_000)


@pytest.fixture
def has_gpus(monkeypatch):
    """Makes this a machine with so many GPUs."""

    def have(number: int, reason: str = "") -> None:
        for module in (preflight, placement):
            monkeypatch.setattr(module, "find_gpus", lambda: Gpus((H200,) * number, reason))

    return have


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("preflight") / "model"
    tiny_model().save_pretrained(folder)
    return folder


@pytest.fixture
def asked(tmp_path, model_folder, monkeypatch) -> Path:
    """A recipe that can be run, whatever disk this machine has."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**12))
    (tmp_path / "train.jsonl").write_text("{}\n")
    values = LEAST | {
        "model": str(model_folder),
        "out": str(tmp_path / "new" / "out"),
        "data": {"train": str(tmp_path / "train.jsonl")},
    }
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    return tmp_path / "r.yaml"


def told(asked: Path, *overrides: str, **options) -> list[str]:
    """Lines of the error, without where they come from; none if there is no error."""
    try:
        check(asked, overrides, **({"device": "cpu"} | options))
    except RecipeError as error:
        return [line.split(": ", 1)[1] for line in str(error).split("\n")]
    return []


# Processes and GPUs


@pytest.mark.parametrize(
    ("number", "processes", "zero_stage", "expected"),
    [(8, None, 3, 8), (8, None, 0, 1), (8, 3, 2, 3), (1, None, 3, 1), (2, 2, 1, 2), (2, 1, 0, 1)],
)
def test_each_process_has_a_gpu_and_by_default_all_are_used(
    has_gpus, number, processes, zero_stage, expected
):
    has_gpus(number)
    assert place(processes, zero_stage=zero_stage) == Placement(expected)


@pytest.mark.parametrize(
    ("number", "processes", "zero_stage", "message"),
    [
        (0, None, 3, "there is no GPU: none here; to use the CPU all the same: --device cpu"),
        (0, 1, 0, "there is no GPU: none here"),
        (2, 4, 3, "4 processes on 2 GPUs: .* expected --processes 2 or fewer, or --device cpu"),
        (1, 2, 3, "2 processes on 1 GPUs: .* expected --processes 1, or --device cpu"),
        (8, 2, 0, "engine.zero_stage 0 on 2 processes: .*; expected --processes 1, or"),
    ],
)
def test_too_few_gpus_are_refused_and_never_replaced_by_the_cpu(
    has_gpus, number, processes, zero_stage, message
):
    has_gpus(number, "none here")
    with pytest.raises(ValueError, match=message):
        place(processes, zero_stage=zero_stage)


def test_the_cpu_is_taken_where_it_is_asked_for(has_gpus):
    has_gpus(8)
    assert place(None, "cpu") == Placement(1, on_cpu=True)
    assert place(3, "cpu") == Placement(3, on_cpu=True)
    with pytest.raises(ValueError, match="zero_stage 0 on 3 processes"):
        place(3, "cpu", zero_stage=0)


class Driver:
    """Stands for NVIDIA's: the functions that are called, with C's conventions."""

    def __init__(self, names: list[str], fails: str = "", status: int = 999):
        self.names, self.fails, self.status = names, fails, status

    def __getattr__(self, function: str):
        return lambda *arguments: self.call(function, arguments)

    def call(self, function: str, arguments: tuple) -> int:
        if function == self.fails:
            return self.status
        match function, arguments:
            case "cuInit", (0,):
                pass
            case "cuDeviceGetCount", (number,):
                number._obj.value = len(self.names)
            case "cuDeviceGet", (device, index):
                device._obj.value = index + 10
            case "cuDeviceGetName", (name, size, device):
                assert size == 256
                name.value = self.names[device.value - 10].encode()
            case "cuDeviceTotalMem_v2", (memory, device):
                memory._obj.value = 2**40 + device.value
            case _:
                pytest.fail(f"{function}{arguments}")
        return 0


@pytest.fixture
def has_driver(monkeypatch):
    def have(driver: Driver | None) -> None:
        def load(name: str) -> Driver:
            assert name == "libcuda.so.1"
            if driver is None:
                raise OSError("cannot open shared object file")
            return driver

        monkeypatch.setattr(gpus, "torch_without_cuda", lambda: False)
        monkeypatch.setattr(ctypes, "CDLL", load)

    return have


def test_gpus_are_those_of_the_driver(has_driver):
    has_driver(Driver(["NVIDIA H200", "NVIDIA A100"]))
    found = find_gpus()
    assert found.found == (Gpu("NVIDIA H200", 2**40 + 10), Gpu("NVIDIA A100", 2**40 + 11))
    assert len(found) == 2 and not found.reason


def test_why_there_is_no_gpu_is_said(has_driver, monkeypatch):
    has_driver(None)
    assert "libcuda.so.1 was not found" in find_gpus().reason
    has_driver(Driver([], fails="cuInit", status=802))
    assert find_gpus() == Gpus((), "NVIDIA's driver cannot be started: cuInit gave error 802")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for driver in (Driver([]), Driver([], fails="cuInit", status=100)):
        has_driver(driver)
        assert find_gpus() == Gpus((), "NVIDIA's driver shows none")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    assert find_gpus() == Gpus((), "CUDA_VISIBLE_DEVICES is '9'")


def test_a_driver_that_does_not_know_its_gpu_is_an_error(has_driver):
    has_driver(Driver(["NVIDIA H200"], fails="cuDeviceTotalMem_v2"))
    with pytest.raises(RuntimeError, match="error 999 about GPU 0"):
        find_gpus()


def test_the_driver_counts_as_torch_does():
    if torch.version.cuda is None:
        assert find_gpus().reason.startswith("this torch was built without CUDA")
    assert len(find_gpus()) == torch.cuda.device_count()


@pytest.mark.gpu
def test_the_driver_names_what_torch_names():
    first = find_gpus().found[0]
    assert first.name == torch.cuda.get_device_name()
    assert first.memory == torch.cuda.get_device_properties(0).total_memory


def test_a_process_that_was_given_a_gpu_does_not_train_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="torch sees no GPU"):
        require_gpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    require_gpu()


# The command line


def test_train_refuses_a_machine_without_a_gpu(asked, has_gpus, capsys):
    has_gpus(0, "none here")
    assert main(["train", str(asked)]) == 1
    assert "command line: there is no GPU: none here" in capsys.readouterr().err


def test_all_that_is_wrong_comes_in_one_answer(asked, has_gpus, capsys, tmp_path):
    has_gpus(2)
    text = asked.read_text().replace("learning_rate: 1.0", "learning_rate: -1")
    asked.write_text(text)
    fields = ["engine.compile=1", "--processes", "4", "data.train=none.jsonl", "model=modle"]
    assert main(["train", str(asked), *fields]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert sorted(lines) == [
        f"{asked}:8: trainer.learning_rate is -1; expected a number above 0, or one for each part",
        "command line: 4 processes on 2 GPUs: each needs one of its own; expected --processes 2 or "
        "fewer, or --device cpu",
        'command line: data.train is "none.jsonl": there is no such file',
        "command line: engine.compile is 1; expected true, false or auto",
        'command line: model is "modle": there is no such folder; expected a folder, or an id of '
        "the Hub as zai-org/glm-4v-9b",
    ]
    assert not (tmp_path / "new").exists()


def test_keys_that_are_there_twice_are_told_by_the_command_line(asked):
    asked.write_text(asked.read_text() + "out: other\n")
    assert told(asked) == ["out is there twice, in lines 2 and 12"]


@pytest.mark.parametrize("arguments", [["--procesess", "1"], ["x", "--foo"]])
def test_an_option_that_is_not_known_is_refused(asked, arguments, capsys):
    with pytest.raises(SystemExit):
        main(["train", str(asked), *arguments])
    assert "unrecognized arguments" in capsys.readouterr().err


def test_help_lists_the_fields(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "--processes N" in out and "engine.zero_stage: 0, 1, 2 or 3 (default 3)" in out


def test_a_mistake_is_answered_at_once(asked):
    """Nothing that takes a second is imported; of processor time, which others do not lengthen."""
    command = [sys.executable, "-m", "glm4v_patched.cli", "train", str(asked), "--device", "cpu"]
    before = os.times()
    done = subprocess.run([*command, "lora.rank=0"], capture_output=True, text=True, check=False)
    after = os.times()
    assert done.returncode == 1 and done.stderr.startswith("command line: lora.rank is 0")
    used = after.children_user + after.children_system
    used -= before.children_user + before.children_system
    assert used < 1


# The model


def test_a_recipe_that_can_be_run_has_no_faults(asked):
    assert told(asked) == []
    assert {path.name for path in asked.parent.iterdir()} == {"r.yaml", "train.jsonl"}


@pytest.mark.parametrize("name", ["our-org/glm-4v-tiny", "a/b", "zai-org/glm-4v-9b", "o/n_a.me"])
def test_ids_of_the_hub_are_not_looked_up(asked, name):
    assert told(asked, f"model={name}") == []


@pytest.mark.parametrize(
    "name",
    ["modle", "/no/such", "./org/name", "../x", "a/b/c", "a//b", "-a/b", "a/b-", "a/b.", "a--b/c"]
    + ["a/b..c", "a/b c", "ä/b", "~/model", "a/" + "b" * 95, "a/b.git", "x" * 5000],
)
def test_a_folder_that_is_not_there_is_told_as_such(asked, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [line] = told(asked, f"model={name}")
    assert "there is no such folder; expected a folder, or an id of the Hub" in line
    assert "Repo id" not in line


def changed_folder(tmp_path: Path, model_folder: Path, **files: str | None) -> str:
    """A copy of a model with other files, or without them."""
    shutil.copytree(model_folder, tmp_path / "changed")
    for name, content in files.items():
        path = tmp_path / "changed" / name.replace("__", ".")
        if content is None:
            path.unlink()
        else:
            path.write_text(content)
    return f"model={tmp_path / 'changed'}"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config__json": None}, "a folder without config.json"),
        ({"config__json": "{"}, "its config.json cannot be read"),
        ({"config__json": "[" * 100_000}, "its config.json cannot be read"),
        ({"config__json": "[]"}, "has model_type [] and is not a glm-4v's"),
        ({"config__json": '{"model_type": "llama"}'}, 'has model_type "llama" and is not'),
        ({"config__json": '{"model_type": "chatglm"}'}, "expected chatglm, with a vision_config"),
        ({"model__safetensors": None}, "a folder without weights; expected model.safetensors"),
        (
            {
                "model__safetensors__index__json": json.dumps(
                    {"weight_map": {"a": "model-1.safetensors", "b": "model.safetensors"}}
                )
            },
            "1 of 2 files of its index are missing: model-1.safetensors",
        ),
        (
            {"model__safetensors": "version https://git-lfs.github.com/spec/v1\noid sha256:0"},
            "model.safetensors is a pointer of git-lfs and has no weights; run git lfs pull there",
        ),
    ],
)
def test_a_folder_that_is_no_model_is_refused(asked, tmp_path, model_folder, files, message):
    [line] = told(asked, changed_folder(tmp_path, model_folder, **files))
    assert line.startswith(f'model is "{tmp_path / "changed"}": ') and message in line


OUTSIDE = ["../other/model.safetensors", "/etc/model.safetensors", "..", "", 5, "..\\a", "a\0b"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_that_names_files_outside_its_folder_is_refused(
    asked, tmp_path, model_folder, name
):
    index = json.dumps({"weight_map": {"a": "model.safetensors", "b": name}})
    [line] = told(
        asked, changed_folder(tmp_path, model_folder, model__safetensors__index__json=index)
    )
    assert f"its model.safetensors.index.json names {name!r}; expected names of files" in line


@pytest.mark.parametrize(
    "files",
    [
        {"model__safetensors__index__json": "{"},
        {"model__safetensors__index__json": '{"weight_map": []}', "model__bin": ""},
        {"model__safetensors": "\xff" * 9},
        {"model__safetensors": ""},
        {"model__safetensors": "\x02\0\0\0\0\0\0\0[]"},
    ],
)
def test_what_loading_will_tell_is_no_traceback_here(asked, tmp_path, model_folder, files):
    told(asked, changed_folder(tmp_path, model_folder, **files))


def test_adapters_are_a_model_and_looked_at_before_anything_starts(asked, tmp_path, model_folder):
    (tmp_path / "adapter").mkdir()
    config = {"peft_type": "LORA", "r": 8, "base_model_name_or_path": str(model_folder)}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.transformer.encoder.layers.0.self_attention.query_key_value"
    save_file({f"{name}.lora_A.weight": torch.ones(2)}, tmp_path / "adapter" / ADAPTER_WEIGHTS)
    on_them = [f"model={tmp_path / 'adapter'}", "trained=lora_lm"]
    assert told(asked, *on_them) == []
    lines = told(asked, *on_them, "lora.rank=4", "data.train=none.jsonl")
    assert len(lines) == 2 and "have rank 8, and lora.rank is 4" in "".join(lines)
    [line] = told(asked, on_them[0])
    assert "which holds LoRA adapters, and trained is 'full'" in line
    config["base_model_name_or_path"] = "../gone"
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    [line] = told(asked, *on_them)
    assert 'the model under the adapters is "../gone": there is no such folder' in line
    (tmp_path / "adapter" / "adapter_config.json").write_text("{")
    [line] = told(asked, *on_them)
    assert "adapter_config.json cannot be read" in line


def test_a_file_is_no_model(asked):
    [line] = told(asked, f"model={asked}")
    assert "a file, or a link to nothing; expected a folder, or an id" in line


# Files and folders


def test_data_must_be_a_file_with_something_in_it(asked, tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for name, message in [
        ("none", "there is no such file"),
        ("empty", "it is empty"),
        ("", "a folder without a data set; expected a file, or a folder that datasets has saved"),
        ("link", "no file, but a link to nothing"),
    ]:
        for field in ("data.train", "data.eval"):
            [line] = told(asked, f"{field}={tmp_path / name}")
            assert f": {message}" in line and f"{field} is " in line
            [line] = told(asked, f"{field}=[{{path: {tmp_path / name}, format: auto}}]")
            assert f": {message}" in line and f"{field} has " in line


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("data.train=[]", "data.train: an empty list; expected at least 1 set"),
        (
            "data.eval=[org/a, {path: org/b, weight: 2}]",
            "data.eval: set 2 of 2 has a weight",
        ),
        ("data.train=[5]", "data.train: set 1 of 1: is 5; expected a path, or {path: FILE, wei"),
        ("data.train=[a, {file: b}]", '2 of 2: "file" is not a field of a set; expected path'),
        ("data.train=[{path: a, wieght: 2}]", '"wieght" is not a field of a set; did you mean we'),
        ("data.train=[{weight: 2}]", "set 1 of 1: path is missing"),
        ("data.train=[{path: a, weight: 0}]", "weight is 0; expected a number above 0"),
        ("data.train=[{path: a, weight: '2'}]", 'weight is "2"; expected a number above 0'),
        ("data.train=[{path: a, format: llama}]", 'format is "llama"; expected auto, messages'),
        ("data.train=[{path: a, ignore: id}]", 'ignore is "id"; expected a list of names'),
        ("data.eval=[{path: ''}]", 'data.eval: set 1 of 1: path is ""; expected text'),
        (
            "data.eval=1.5",
            "data.eval is 1.5; expected a file, .* a number between 0 and 1 or null "
            r"\(0.05 holds out 5% of the rows, and 0.015 of 1.5%; for so many rows, name a file",
        ),
        ("data.eval=200", r"or null \(0.05 holds out 5% of the rows; for so many rows, name a"),
        (
            "data.eval=5%",
            "no such file; a share of the rows is a number without quotes or %: 0.",
        ),
        ("data.eval='0.1'", "no such file; a share of the rows is a number without quotes"),
        ("data.eval=true", "data.eval is true; expected a file"),
        ("data.format=llama", 'data.format is "llama"; expected auto, messages, conversations'),
        ("data.ignore=id", 'data.ignore is "id"; expected a list of names'),
        ("data.image_folder=none", "data.image_folder is .*: there is no such folder"),
    ],
)
def test_sets_that_cannot_be_are_told(asked, assignment, message):
    [line] = told(asked, assignment)
    assert re.search(message, line), line


def test_csv_is_refused_before_anything_is_read(asked, tmp_path):
    (tmp_path / "rows.csv").write_text("image,question\n")
    [line] = told(asked, f"data.train={tmp_path / 'rows.csv'}")
    assert "data.train is " in line and ": CSV is not read; give its columns the names" in line


def test_out_must_be_a_folder_that_can_be_made(asked, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for name, message in [
        ("file", "no folder, but a file or a link to nothing"),
        ("link", "no folder, but a file or a link to nothing"),
        ("file/out", f"{tmp_path / 'file'} is no folder"),
    ]:
        [line] = told(asked, f"out={tmp_path / name}")
        assert line == f'out is "{tmp_path / name}": {message}'
        [line] = told(asked, f"data.reuse_features={tmp_path / name}", "trained=lm")
        assert line.startswith("data.reuse_features is ") and line.endswith(message)
    # The superuser, as whom tests may run, is let in everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK)
    [line] = told(asked)
    assert line.endswith(f"{tmp_path} may not be written")
    assert not (tmp_path / "new").exists()


def test_eight_bits_and_missing_packages_are_told_here(asked, monkeypatch):
    def missing(choice):
        if choice == "adamw_8bit":
            raise RuntimeError("adamw_8bit needs bitsandbytes: pip install bitsandbytes")

    monkeypatch.setattr(preflight, "require_packages", missing)
    assert told(asked, "engine.optimizer=adamw_8bit") == [
        "engine.optimizer is adamw_8bit, which runs on a GPU, and --device is cpu; expected adamw",
        "adamw_8bit needs bitsandbytes: pip install bitsandbytes",
    ]


# Free disk


def test_a_disk_that_is_too_small_is_refused_with_both_numbers(asked, tmp_path, monkeypatch):
    def free(number: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=number))

    monkeypatch.setattr(disk, "saved_bytes", lambda *_: (28 * 10**9, 195 * 10**9))
    free(28 * 10**9)
    assert told(asked) == []
    free(28 * 10**9 - 1)
    [line] = told(asked)
    assert ": 28.0 GB are free there, and the model (28.0 GB) take 28.0 GB; expected" in line
    saving = ("trainer.max_steps=1000", "trainer.save_steps=100")
    free(1000 * 10**9)
    [line] = told(asked, *saving)
    assert "1000.0 GB are free there, and the model (28.0 GB) and up to 9 checkpoints" in line
    assert "(195.0 GB each) take 1783.0 GB" in line and "trainer.save_total_limit" in line
    assert told(asked, *saving, "trainer.save_total_limit=2") == []
    # Those of a run that is continued are on the disk.
    for step in (100, 200, 300, 400, 500):
        (tmp_path / "new" / "out" / f"checkpoint-{step}").mkdir(parents=True)
    assert told(asked, *saving) == []


def test_a_folder_of_pictures_is_no_place_for_a_run(asked, tmp_path):
    out = tmp_path / "photos"
    out.mkdir()
    assert told(asked, f"out={out}") == []
    (out / "loss.png").touch()  # a run's own
    assert told(asked, f"out={out}") == []
    for name in ("b.JPG", "a.png", "c.webp", "notes.txt"):
        (out / name).touch()
    [line] = told(asked, f"out={out}")
    assert "out is " in line and "holds pictures (a.png, b.JPG and 1 more), among which" in line
    # Pictures that were put there after a run.
    (out / "run.json").write_text('{"written": []}')
    assert told(asked, f"out={out}") == []


def test_the_published_models_sizes_are_known_before_it_is_there(asked, monkeypatch):
    tower, language = count_parameters(ChatGLMConfig())
    sizes = {name: math.prod(shape) for name, shape in disk.PUBLISHED_SHAPES.items()}
    assert sum(sizes.values()) == tower + language
    assert sum(size for name, size in sizes.items() if ".vision." in name) == tower
    with torch.device("meta"):
        model = GLM4VForCausalLM(ChatGLMConfig())
    found = {name: [*weight.shape] for name, weight in model.named_parameters()}
    listed = {n: shape for n, shape in disk.PUBLISHED_SHAPES.items() if "others" not in n}
    assert {name: found[name] for name in listed} == listed
    for part in PARTS:
        assert sum(math.prod(s) for n, s in found.items() if part_of(n) == part) == sum(
            size for name, size in sizes.items() if part_of(name) == part
        )
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=20 * 10**9))
    [line] = told(asked, "model=zai-org/glm-4v-9b")
    assert "20.0 GB are free there, and the model (27.8 GB)" in line
    assert told(asked, "model=zai-org/glm-4v-9b", "trained=lora_all") == []


@pytest.mark.parametrize(
    ("max_steps", "save_steps", "limit", "most"),
    [(10, None, None, 0), (10, 3, None, 3), (10, 5, None, 1), (10, 5, 1, 1), (10, 20, None, 0)]
    + [(1000, 10, 2, 3), (1000, 10, None, 99), (30, 10, 1, 2)],
)
def test_an_old_checkpoint_goes_when_a_new_one_is_complete(max_steps, save_steps, limit, most):
    asked = recipe({"trainer.max_steps": max_steps, "trainer.save_steps": save_steps})
    assert checkpoints_at_once(asked.override({"trainer.save_total_limit": limit}).flat()) == most


@pytest.mark.parametrize(
    ("trained", "targets"),
    [(trained, None) for trained in TRAINED]
    + [("lora_all", "all-linear"), ("lora_lm", ["dense"]), ("tower+adapter", None)],
)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_saved_model_has_the_size_of_its_weights(model_folder, trained, targets, precision):
    known = {
        "trained": trained,
        "lora.rank": 4,
        "lora.targets": targets,
        "lora.use_dora": None,
        "engine.zero_stage": 3,
        "engine.precision": precision,
        "engine.optimizer": "adamw",
    }
    lora = recipe({"lora.rank": 4, "lora.targets": targets}).lora.options(trained)
    model = select_weights(tiny_model(), "lora_lm" if trained == "qlora" else trained, lora)
    saved = model.state_dict()
    if trained in LORA_TARGETS:
        saved = {name: w for name, w in saved.items() if "lora_" in name}
    width = 2 if precision == "bf16" else 4
    found, checkpoint = saved_bytes(known, disk.shapes_of(model_folder))
    assert found == sum(weight.numel() for weight in saved.values()) * width
    learned = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    options = EngineOptions(trained=trained, lora=lora)
    assert count_trained(model.config, options) == learned
    if trained in LORA_TARGETS or trained == "full":  # else what is frozen is there twice
        assert checkpoint == pytest.approx(found + 12 * learned, rel=1e-3)


FEW = settings(max_examples=150, derandomize=True, deadline=None)
MANY = settings(max_examples=3000, derandomize=True, deadline=None)
ANYTHING = (
    st.none()
    | st.booleans()
    | st.integers(-2, 5)
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["/dev/null", "/proc/1", "a/b", ".", "", "qlora", "lm", "adamw_8bit"])
    | st.sampled_from([[], {}, {"train": "/no/such"}, {"x": 1}, "full", 2**70, 1e-300])
)


@pytest.mark.parametrize("profile", [FEW, pytest.param(MANY, marks=pytest.mark.exhaustive)])
def test_any_recipe_can_be_run_or_is_refused(tmp_path_factory, model_folder, has_gpus, profile):
    """One whose fields are partly missing and partly anything."""
    folder = tmp_path_factory.mktemp("any")
    (folder / "train.jsonl").write_text("{}\n")
    right = {"model": str(model_folder), "out": str(folder / "out")}
    right |= {"data.train": str(folder / "train.jsonl")}
    right |= {f"trainer.{name}": value for name, value in LEAST["trainer"].items()}
    right |= {"trainer.save_steps": 2}
    has_gpus(2)

    @profile
    @given(
        st.sets(st.sampled_from(sorted(right)), max_size=2),
        st.dictionaries(
            st.sampled_from([name for name, _ in fields(whole_recipe())]), ANYTHING, max_size=2
        ),
        st.none() | st.integers(1, 4),
        st.sampled_from(["cuda", "cpu"]),
    )
    def attempt(missing, changed, processes, device):
        values, _ = place_all({}, {k: v for k, v in right.items() if k not in missing} | changed)
        (folder / "r.json").write_text(json.dumps(values))
        try:
            recipe, placement = check(folder / "r.json", (), processes, device)
        except RecipeError as error:
            for line in str(error).split("\n"):
                assert line.startswith((f"{folder}/r.json:", "command line: "))
            return
        assert recipe.flat().keys() >= right.keys() and placement.on_cpu == (device == "cpu")
        assert not (folder / "out").exists()

    attempt()


# The demo


@pytest.mark.parametrize(
    ("number", "processes", "device", "expected"),
    [
        (0, None, None, Placement(2, on_cpu=True)),
        (0, 3, None, Placement(3, on_cpu=True)),
        (1, None, None, Placement(1)),
        (8, None, None, Placement(2)),
        (8, 4, None, Placement(4)),
        (8, None, "cpu", Placement(2, on_cpu=True)),
    ],
)
def test_the_demo_runs_without_options_wherever_it_can(
    has_gpus, monkeypatch, capsys, number, processes, device, expected
):
    has_gpus(number, "none here")
    monkeypatch.setattr(demo, "find_gpus", preflight.find_gpus)
    assert demo.place_demo(processes, device) == expected
    said = capsys.readouterr().out
    assert ("the demo runs on the CPU, as there is no GPU: none here" in said) == (number == 0)


def test_the_demo_leaves_gpus_for_the_cpu_only_where_that_is_asked_for(has_gpus, monkeypatch):
    has_gpus(2)
    monkeypatch.setattr(demo, "find_gpus", preflight.find_gpus)
    with pytest.raises(ValueError, match="4 processes on 2 GPUs"):
        demo.place_demo(4, None)
