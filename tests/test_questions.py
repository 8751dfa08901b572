"""The answers of docs/questions.md that tell a reader what to run, run on the demo's model."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import load_file

from glm4v_patched.demo.tiny_model import IMAGE_SIDE
from tests.helpers.pages import ROOT, blocks
from tests.helpers.processes import cpu_environment

PAGE = ROOT / "docs" / "questions.md"
TRAIN = "demo_output/data/train.jsonl"
SMALL = (
    "engine.zero_stage=0 data.max_samples=64 trainer.gradient_accumulation_steps=1 "
    "trainer.per_device_train_batch_size=4 --device cpu --processes 1"
)


def run_in(folder: Path, command: str) -> subprocess.CompletedProcess:
    """Run a ``glm4v-patched`` command without a GPU."""
    arguments = [sys.executable, "-m", "glm4v_patched", *shlex.split(command)[1:]]
    environment = cpu_environment() | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def succeed_in(folder: Path, command: str) -> str:
    result = run_in(folder, command)
    assert result.returncode == 0, f"{command}\n{result.stdout[-3000:]}{result.stderr[-3000:]}"
    return result.stdout


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("questions")
    succeed_in(folder, "glm4v-patched demo --steps 2 --device cpu --processes 1")
    return folder


@pytest.mark.slow
def test_the_table_of_cards_is_the_output_of_its_script():
    """It takes a minute; the planner is asked for 60 cells."""
    script = ROOT / "docs" / "benchmarks" / "memory_for_cards.py"
    environment = cpu_environment() | {"PYTHONPATH": str(ROOT)}
    printed = subprocess.check_output([sys.executable, script], env=environment, text=True)
    table = printed[printed.index("| cards") :].strip()
    assert table in PAGE.read_text("utf-8")


@pytest.mark.slow
def test_a_checkpoint_starts_a_run_with_another_learning_rate(demo):
    first = f"glm4v-patched train lora_1x80gb model=demo_output/trained data.train={TRAIN} "
    first += f"out=trained trainer.max_steps=3 trainer.save_steps=2 {SMALL}"
    succeed_in(demo, first)
    longer = first.replace("max_steps=3", "max_steps=4")
    options = "trainer.learning_rate=5e-5 --resume-from trained/checkpoint-2"
    refused = run_in(demo, f"{longer} {options}")
    [quoted] = blocks(PAGE, "text")
    for line in quoted.replace("checkpoint-400", "checkpoint-2").splitlines():
        assert line.strip() in refused.stderr + refused.stdout
    assert refused.returncode != 0

    [command] = [line for line in blocks(PAGE, "bash") if "checkpoint-400" in line]
    command = command.strip().replace("checkpoint-400", "checkpoint-2").replace("my.jsonl", TRAIN)
    output = succeed_in(demo, f"{command} trainer.max_steps=3 trainer.save_steps=null {SMALL}")
    assert "step 2/3" in output and "lr 5.0e-5" in output


@pytest.mark.slow
def test_the_tower_alone_changes(demo):
    [recipe] = [text for text in blocks(PAGE, "yaml") if "trained: [tower]" in text]
    (demo / "tower.yaml").write_text(recipe)
    command = f"glm4v-patched train tower.yaml model=demo_output/trained data.train={TRAIN} "
    command += f"out=tower trainer.max_steps=2 trainer.learning_rate=1e-2 {SMALL}"
    succeed_in(demo, command)
    before = load_file(demo / "demo_output" / "trained" / "model.safetensors")
    after = load_file(demo / "tower" / "model.safetensors")
    changed = [name for name in before if not before[name].equal(after[name])]
    tower = ("transformer.vision.transformer.", "transformer.vision.patch_embedding.")
    assert changed and [name for name in changed if not name.startswith(tower)] == []


@pytest.mark.slow
def test_a_special_token_is_split_by_the_chat_template_and_a_normal_one_is_not(demo):
    from transformers import AutoProcessor

    for special in (False, True):
        processor = AutoProcessor.from_pretrained(
            demo / "demo_output" / "trained", trust_remote_code=True
        )
        processor.tokenizer.add_tokens(["<verdict>"], special_tokens=special)
        messages = [{"role": "user", "content": "a <verdict>"}]
        batch = processor.apply_chat_template(messages, tokenize=True, return_dict=True)
        token = processor.tokenizer.convert_tokens_to_ids("<verdict>")
        assert (token in batch["input_ids"][0]) is not special


def test_no_supervised_token_is_a_loss_of_0(model):
    import torch

    ids = torch.tensor([[3, 4, 5, 6]])
    loss = model(input_ids=ids, labels=torch.full_like(ids, -100)).loss
    loss.backward()
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    assert loss.item() == 0 and not any(gradient.any() for gradient in gradients)


def test_pairs_for_dpo_become_a_table_with_images(tmp_path, monkeypatch):
    from datasets import load_dataset

    monkeypatch.chdir(tmp_path)
    [row] = blocks(PAGE, "json")
    (tmp_path / "pairs.jsonl").write_text(row)
    Image.new("RGB", (IMAGE_SIDE, IMAGE_SIDE), "orange").save("cat.png")
    (tmp_path / "pairs").mkdir()
    [code] = [text for text in blocks(PAGE, "python") if "pairs.jsonl" in text]
    exec(compile(code, str(PAGE), "exec"), {})
    [pair] = load_dataset("pairs", split="train")
    assert pair["images"][0].size == (IMAGE_SIDE, IMAGE_SIDE)
    assert {*pair} == {*json.loads(row)}
    assert re.findall(r"<\|\w+\|>$", pair["chosen"][0]["content"]) == ["<|endoftext|>"]


@pytest.fixture
def model():
    from tests.helpers.tiny import tiny_model

    return tiny_model()
