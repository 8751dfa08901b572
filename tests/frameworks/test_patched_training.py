"""TRL and LLaMA-Factory, run as their users run them, on the stand-in for the published repository.

Without this package they fail. With its two lines, or started by ``glm4v_patched.run``, they train,
the pictures decide what is learned, and what they save answers in a process that does not know this
package.
"""

import importlib.metadata
import json
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
from tests.frameworks.drawn_task import RUN, draw, history, judged, run, succeed
from tests.helpers.legacy_repository import write_legacy_repository
from tests.helpers.tiny import BOI

HERE = Path(__file__).parent
TWO_LINES = "import glm4v_patched; glm4v_patched.apply()\n"
LORA = ("--use_peft", "--lora_r", "8", "--lora_target_modules", "all-linear")


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


def trl_is_too_old() -> list[str]:
    old = Version(importlib.metadata.version("trl")) < Version("0.29.1")
    return ["trl>=0.29.1"] if old else []


UNMET_BY_TRL = unmet("trl") or trl_is_too_old()
UNMET_BY_LLAMAFACTORY = unmet("llamafactory")
trl = pytest.mark.skipif(
    bool(UNMET_BY_TRL),
    reason=f"not installed: {', '.join(UNMET_BY_TRL)}; nox -f tests/noxfile.py -s frameworks",
)
# Without what it requires, as test_llamafactory.py has it, it does not run.
llamafactory = pytest.mark.skipif(
    bool(UNMET_BY_LLAMAFACTORY),
    reason=f"LLaMA-Factory does not run without {', '.join(UNMET_BY_LLAMAFACTORY[:4])}; "
    "nox -f tests/noxfile.py -s llamafactory",
)


@pytest.fixture(scope="module")
def conversations(tmp_path_factory) -> list[list[dict]]:
    return draw(tmp_path_factory.mktemp("drawn"))


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Callable[[], Path]:
    """Makes folders with the published repository in them."""

    def make() -> Path:
        folder = tmp_path_factory.mktemp("user")
        write_legacy_repository(folder / "published")
        return folder

    return make


def assert_learned(output_dir: Path) -> None:
    first, *_, last = history(output_dir.parent, "loss", output_dir.name)
    assert last < first / 4


def moved(output_dir: Path) -> dict[str, bool]:
    """For each adapted module, whether its adapter has left zero, where it began."""
    adapter = load_file(output_dir / "adapter_model.safetensors")
    return {name: bool(value.any()) for name, value in adapter.items() if "lora_B" in name}


def assert_both_towers_moved(output_dir: Path) -> None:
    modules = moved(output_dir)
    assert all(modules.values()), [name for name, has_moved in modules.items() if not has_moved]
    for tower in ("vision.transformer", "vision.linear_proj", "encoder"):
        assert any(tower in name for name in modules), tower


def assert_merged_answers_by_pictures(folder: Path, model: str, conversations) -> None:
    config = json.loads((folder / model / "config.json").read_text())
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_chatglm.GLM4VForCausalLM"
    right, swapped = judged(folder, model, conversations)
    assert right >= 0.9
    assert swapped <= 0.1


def assert_adapter_is_what_was_merged(folder: Path, adapter: str, merged: str) -> None:
    with glm4v_patched.applied():
        base = AutoModelForCausalLM.from_pretrained(folder / "published")
        model = peft.PeftModel.from_pretrained(base, folder / adapter).merge_and_unload()
        want = AutoModelForCausalLM.from_pretrained(folder / merged).state_dict()
    got = model.state_dict()
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=1e-6)


# TRL


@pytest.fixture(scope="module")
def trl_place(place, conversations) -> Callable[[str], Path]:
    """Makes folders with a data set in one of TRL's formats, too."""
    import datasets

    def make(form: str) -> Path:
        rows = []
        for question, answer in conversations:
            asked = {"role": "user", "content": question["content"]}
            row = {"images": [question["image"]]}
            if form == "messages":
                row["messages"] = [asked, answer]
            else:
                # The chat format has no end of a turn; without one, nobody learns to stop.
                ended = answer | {"content": answer["content"] + "<|endoftext|>"}
                row |= {"prompt": [asked], "completion": [ended]}
            rows.append(row)
        folder = place()
        (folder / "pictures").mkdir()
        data = datasets.Dataset.from_list(rows)
        data = data.cast_column("images", datasets.List(datasets.Image()))
        data.to_parquet(folder / "pictures" / "train.parquet")
        (folder / "script.py").write_text((HERE / "sft_script.py").read_text())
        return folder

    return make


@pytest.fixture(scope="module")
def trained_by_trl(trl_place) -> Path:
    """What the user's script leaves when it is started by ``glm4v_patched.run``."""
    folder = trl_place("prompt-completion")
    succeed(folder, *RUN, "script.py")
    return folder


@trl
def test_trl_does_not_take_the_published_repository_for_a_vision_model(trl_place):
    ended = run(trl_place("prompt-completion"), sys.executable, "script.py")
    assert ended.status == 1
    assert "does not seem to be a vision-language model" in ended.output


@trl
def test_trl_trains_both_towers(trained_by_trl):
    assert_learned(trained_by_trl / "adapter")
    assert_both_towers_moved(trained_by_trl / "adapter")


@trl
def test_what_trl_trained_answers_by_the_pictures(trained_by_trl, conversations):
    assert_merged_answers_by_pictures(trained_by_trl, "merged", conversations)
    assert_adapter_is_what_was_merged(trained_by_trl, "adapter", "merged")


@trl
def test_two_lines_train_what_the_run_entry_trains(trl_place, trained_by_trl):
    folder = trl_place("prompt-completion")
    script = folder / "script.py"
    script.write_text(TWO_LINES + script.read_text())
    succeed(folder, sys.executable, "script.py")
    want = load_file(trained_by_trl / "merged" / "model.safetensors")
    got = load_file(folder / "merged" / "model.safetensors")
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@trl
def test_the_command_of_trl_trains_the_repository_it_is_told(trl_place):
    """It starts its script in another process, which gives the trainer the name of the model."""
    folder = trl_place("messages")
    model = ("--model_name_or_path", "published", "--trust_remote_code", "--dtype", "float32")
    steps = ("--max_steps", "80", "--per_device_train_batch_size", "8", "--logging_steps", "10")
    more = ("--learning_rate", "1e-2", "--max_length", "128", "--bf16", "false", "--use_cpu")
    data = ("--dataset_name", "pictures", "--output_dir", "adapter", "--report_to", "none")
    succeed(folder, *RUN, "trl", "sft", *model, *data, *LORA, *steps, *more)
    assert_learned(folder / "adapter")
    assert_both_towers_moved(folder / "adapter")


# LLaMA-Factory


@pytest.fixture(scope="module")
def factory_place(place, conversations) -> Callable[[], Path]:
    """Makes folders with the recipe and data sets in LLaMA-Factory's formats, too."""

    def make() -> Path:
        folder = place()
        (folder / "data").mkdir()
        words, pictures = [], []
        for number, (question, answer) in enumerate(conversations):
            asked = {"instruction": f"What is on page {number}?", "input": ""}
            words.append(asked | {"output": answer["content"]})
            asked = question | {"content": "<image>" + question["content"]}
            pictures.append({"messages": [asked, answer], "images": [asked.pop("image")]})
        names = {"role_tag": "role", "content_tag": "content"}
        roles = {"user_tag": "user", "assistant_tag": "assistant"}
        form = {"formatting": "sharegpt", "tags": names | roles}
        columns = {"columns": {"messages": "messages", "images": "images"}}
        sets = {
            "words": {"file_name": "words.json"},
            "pictures": {"file_name": "pictures.json"} | form | columns,
        }
        for name, rows in {"words": words, "pictures": pictures, "dataset_info": sets}.items():
            (folder / "data" / f"{name}.json").write_text(json.dumps(rows))
        (folder / "train.yaml").write_text((HERE / "llamafactory_train.yaml").read_text())
        return folder

    return make


# As the published model can, which LLaMA-Factory takes for granted, and the stand-in cannot.
CAN_GENERATE = """
    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        return {"input_ids": input_ids}
"""
TRAIN_WORDS = ("llamafactory-cli", "train", "train.yaml")
TRAIN_PICTURES = (*TRAIN_WORDS, "dataset=pictures", "output_dir=adapter")


@pytest.fixture(scope="module")
def trained_by_factory(factory_place) -> tuple[Path, str]:
    """Where adapters were trained on pictures and merged, and what the training wrote."""
    folder = factory_place()
    output = succeed(folder, *RUN, *TRAIN_PICTURES)
    model = ("--model_name_or_path", "published", "--adapter_name_or_path", "adapter")
    more = ("--template", "glm4", "--trust_remote_code", "true", "--export_dir", "merged")
    succeed(folder, *RUN, "llamafactory-cli", "export", *model, *more)
    return folder, output


@llamafactory
def test_llamafactory_trains_the_published_model_on_no_text(factory_place):
    folder = factory_place()
    code = folder / "published" / "modeling_chatglm.py"
    code.write_text(code.read_text() + CAN_GENERATE)
    ended = run(folder, *TRAIN_WORDS, "finetuning_type=full")
    assert ended.status == 1
    assert f"ValueError: {BOI} is not in list" in ended.output


@llamafactory
def test_llamafactory_finds_nothing_for_pictures_in_the_published_repository(factory_place):
    ended = run(factory_place(), *TRAIN_PICTURES)
    assert ended.status == 1
    assert "ValueError: This model does not support image input" in ended.output


@llamafactory
@pytest.mark.parametrize("processes", [1, 2])
def test_the_command_of_llamafactory_trains_on_text(processes, factory_place):
    """For more processes than one it starts itself again by another command, torchrun."""
    folder = factory_place()
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
def test_llamafactory_trains_both_towers_on_pictures(trained_by_factory):
    folder, output = trained_by_factory
    assert "Gradient checkpointing enabled." in output
    assert_learned(folder / "adapter")
    assert_both_towers_moved(folder / "adapter")


@llamafactory
def test_what_llamafactory_exports_answers_by_the_pictures(trained_by_factory, conversations):
    folder, _ = trained_by_factory
    assert_merged_answers_by_pictures(folder, "merged", conversations)
    assert_adapter_is_what_was_merged(folder, "adapter", "merged")
