"""TRL and LLaMA-Factory, run as their users run them, on the stand-in for the published repository.

Without this package they fail. With its two lines, or started by ``glm4v_patched.run``, they train,
the pictures decide what is learned, and what they save answers in a process that does not know this
package.
"""

import importlib.metadata
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import glm4v_patched
from tests.frameworks.drawn_task import RUN, draw, history, judged, put_data, run, succeed
from tests.helpers.legacy_repository import write_legacy_repository
from tests.helpers.tiny import BOI

HERE = Path(__file__).parent


def unmet(name: str) -> list[str]:
    """What a package requires, itself included, and does not find."""
    try:
        requirements = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return [name]
    found = []
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement} (found {version})")
    return found


def needs(session: str, missing: list[str]) -> pytest.MarkDecorator:
    told = f"not installed: {', '.join(missing[:4])}; nox -f tests/noxfile.py -s {session}"
    return pytest.mark.skipif(bool(missing), reason=told)


def trl_is_too_old() -> list[str]:
    old = Version(importlib.metadata.version("trl")) < Version("0.29.1")
    return ["trl>=0.29.1"] if old else []


trl = needs("frameworks", unmet("trl") or trl_is_too_old())
# Without what it requires, as test_llamafactory.py has it, it does not run.
llamafactory = needs("llamafactory", unmet("llamafactory"))


@pytest.fixture(scope="module")
def conversations(tmp_path_factory) -> list[list[dict]]:
    return draw(tmp_path_factory.mktemp("drawn"))


@pytest.fixture(scope="module")
def place(tmp_path_factory, conversations) -> Callable[[], Path]:
    """Makes folders with the published repository, scripts and data sets in them."""

    def make() -> Path:
        folder = tmp_path_factory.mktemp("user")
        write_legacy_repository(folder / "published")
        put_data(folder, conversations)
        shutil.copytree(folder / "data" / "sft", folder / "pictures")
        shutil.copy(HERE / "sft_script.py", folder / "script.py")
        shutil.copy(HERE / "llamafactory_train.yaml", folder / "train.yaml")
        words = [
            {"instruction": f"What is on page {page}?", "input": "", "output": answer["content"]}
            for page, (_, answer) in enumerate(conversations)
        ]
        (folder / "data" / "words.json").write_text(json.dumps(words))
        sets = folder / "data" / "dataset_info.json"
        known = json.loads(sets.read_text()) | {"words": {"file_name": "words.json"}}
        sets.write_text(json.dumps(known))
        return folder

    return make


def assert_learned(output_dir: Path) -> None:
    first, *_, last = history(output_dir.parent, "loss", output_dir.name)
    assert last < first / 4


def moved(output_dir: Path) -> dict[str, bool]:
    """For each adapted module, whether its adapter has left zero, where it began."""
    adapter = load_file(output_dir / "adapter_model.safetensors")
    return {name: bool(value.any()) for name, value in adapter.items() if "lora_B" in name}


def assert_both_towers_learned(output_dir: Path) -> None:
    assert_learned(output_dir)
    modules = moved(output_dir)
    assert all(modules.values()), [name for name, has_moved in modules.items() if not has_moved]
    for tower in ("vision.transformer", "vision.linear_proj", "encoder"):
        assert any(tower in name for name in modules), tower


def assert_merged_answers_by_pictures(folder: Path, conversations) -> None:
    """And is what the saved adapter makes of the published weights."""
    config = json.loads((folder / "merged" / "config.json").read_text())
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_chatglm.GLM4VForCausalLM"
    right, swapped = judged(folder, "merged", conversations)
    assert right >= 0.9
    assert swapped <= 0.1
    with glm4v_patched.applied():
        base = AutoModelForCausalLM.from_pretrained(folder / "published")
        model = peft.PeftModel.from_pretrained(base, folder / "adapter").merge_and_unload()
        want = AutoModelForCausalLM.from_pretrained(folder / "merged").state_dict()
    got = model.state_dict()
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def trained_by_trl(place) -> Path:
    """What the user's script leaves when it is started by ``glm4v_patched.run``."""
    folder = place()
    succeed(folder, *RUN, "script.py")
    return folder


@trl
def test_trl_does_not_take_the_published_repository_for_a_vision_model(place):
    ended = run(place(), sys.executable, "script.py")
    assert ended.status == 1
    assert "does not seem to be a vision-language model" in ended.output


@trl
def test_trl_trains_both_towers_to_answer_by_the_pictures(trained_by_trl, conversations):
    assert_both_towers_learned(trained_by_trl / "adapter")
    assert_merged_answers_by_pictures(trained_by_trl, conversations)


@trl
def test_two_lines_train_what_the_run_entry_trains(place, trained_by_trl):
    folder = place()
    script = folder / "script.py"
    script.write_text(f"import glm4v_patched; glm4v_patched.apply()\n{script.read_text()}")
    succeed(folder, sys.executable, "script.py")
    want = load_file(trained_by_trl / "merged" / "model.safetensors")
    got = load_file(folder / "merged" / "model.safetensors")
    assert got.keys() == want.keys()
    assert [name for name, value in want.items() if not torch.equal(got[name], value)] == []


@trl
def test_the_command_of_trl_trains_the_repository_it_is_told(place, conversations):
    """It starts its script in another process, which gives the trainer the name of the model."""
    import datasets

    folder = place()
    rows = [
        {
            "images": [question["image"]],
            "messages": [{"role": "user", "content": question["content"]}, answer],
        }
        for question, answer in conversations
    ]
    data = datasets.Dataset.from_list(rows)
    data = data.cast_column("images", datasets.List(datasets.Image()))
    data.to_parquet(folder / "pictures" / "train.parquet")
    model = ("--model_name_or_path", "published", "--trust_remote_code", "--dtype", "float32")
    lora = ("--use_peft", "--lora_r", "8", "--lora_target_modules", "all-linear")
    steps = ("--max_steps", "80", "--per_device_train_batch_size", "8", "--logging_steps", "10")
    more = ("--learning_rate", "1e-2", "--max_length", "128", "--bf16", "false", "--use_cpu")
    where = ("--dataset_name", "pictures", "--output_dir", "adapter", "--report_to", "none")
    succeed(folder, *RUN, "trl", "sft", *model, *where, *lora, *steps, *more)
    assert_both_towers_learned(folder / "adapter")


# As the published model can, which LLaMA-Factory takes for granted, and the stand-in cannot.
CAN_GENERATE = """
    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        return {"input_ids": input_ids}
"""
TRAIN_WORDS = ("llamafactory-cli", "train", "train.yaml")
TRAIN_PICTURES = (*TRAIN_WORDS, "dataset=pictures", "output_dir=adapter")


@llamafactory
def test_llamafactory_trains_the_published_model_on_nothing(place):
    folder = place()
    ended = run(folder, *TRAIN_PICTURES)
    assert ended.status == 1
    assert "ValueError: This model does not support image input" in ended.output
    code = folder / "published" / "modeling_chatglm.py"
    code.write_text(code.read_text() + CAN_GENERATE)
    ended = run(folder, *TRAIN_WORDS, "finetuning_type=full")
    assert ended.status == 1
    assert f"ValueError: {BOI} is not in list" in ended.output


@llamafactory
@pytest.mark.parametrize("processes", [1, 2])
def test_the_command_of_llamafactory_trains_on_text(processes, place):
    """For more processes than one it starts itself again by another command, torchrun."""
    folder = place()
    of_torchrun = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(processes)}
    options = of_torchrun if processes > 1 else {}
    output = succeed(folder, *RUN, *TRAIN_WORDS, "use_cpu=true", **options)
    assert f"world size: {processes}" in output
    assert "Gradient checkpointing enabled." in output  # by functions of its own
    assert_learned(folder / "words")
    # No picture, no gradient for the tower.
    for name, has_moved in moved(folder / "words").items():
        assert has_moved == ("vision" not in name), name


@llamafactory
def test_what_llamafactory_trains_and_exports_answers_by_the_pictures(place, conversations):
    folder = place()
    output = succeed(folder, *RUN, *TRAIN_PICTURES)
    assert "Gradient checkpointing enabled." in output
    assert_both_towers_learned(folder / "adapter")
    model = ("--model_name_or_path", "published", "--adapter_name_or_path", "adapter")
    more = ("--template", "glm4", "--trust_remote_code", "true", "--export_dir", "merged")
    succeed(folder, *RUN, "llamafactory-cli", "export", *model, *more)
    assert_merged_answers_by_pictures(folder, conversations)
