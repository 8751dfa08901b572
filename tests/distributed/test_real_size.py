"""Recipes at the real size, random weights, all that goes by memory left open; two large GPUs.

``pytest -s -m two_gpu tests/distributed/test_real_size.py`` also prints the recipe's choice and the
Trainer's figures. Needs 60 GB of disk under pytest's ``--basetemp`` and as much CPU memory.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from glm4v_patched.data.rows import write_conversations
from glm4v_patched.demo.pictures import draw_data_set
from glm4v_patched.demo.tiny_model import build_processor
from glm4v_patched.finetune.recipe import Recipe
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM

pytestmark = pytest.mark.two_gpu

STEPS = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Pictures of 1120 x 1120 with questions, and a model of 13.9 G random weights in bf16."""
    folder = tmp_path_factory.mktemp("real_size")
    side = ChatGLMConfig().vision.image_size
    conversations = draw_data_set(folder / "pictures", 32, seed=0, side=side)
    write_conversations(folder / "train.jsonl", conversations)
    texts = [message["content"] for messages in conversations for message in messages]
    processor = build_processor(texts, side, max_length=ChatGLMConfig().seq_length)
    tokenizer = processor.tokenizer
    begin, end = tokenizer.convert_tokens_to_ids(["<|begin_of_image|>", "<|end_of_image|>"])
    config = ChatGLMConfig(
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|user|>"]),
        boi_token_id=begin,
        eoi_token_id=end,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GLM4VForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")
    del model
    torch.cuda.empty_cache()
    return folder


@pytest.mark.parametrize(("trained", "micro_batch"), [("lora_lm", 4), ("full", 1)])
def test_recipe_chooses_by_memory_and_trains(folder, trained, micro_batch):
    out = folder / trained
    recipe = Recipe.of(
        {
            "model": str(folder / "model"),
            "out": str(out),
            "trained": trained,
            "data": {"train": str(folder / "train.jsonl")},
            "engine": {"compile": True},
            "trainer": {
                "max_steps": STEPS,
                "per_device_train_batch_size": micro_batch,
                "learning_rate": 1e-3 if trained == "lora_lm" else 1e-5,
            },
        }
    )
    recipe.write(folder / "recipe.json")
    command = [sys.executable, "-m", "glm4v_patched.cli", "train", str(folder / "recipe.json")]
    done = subprocess.run(
        [*command, "--processes", "2"], capture_output=True, text=True, check=False, timeout=400
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-4000:]
    told = ("kept  ", "memory  ", "trained: ")
    said = [line for line in output.splitlines() if any(word in line for word in told)]
    print("", trained, *said, sep="\n")
    # Weights are drawn, so that the first loss is near that of guessing.
    assert any(line.startswith("kept  ") for line in said)
    losses = [entry["loss"] for entry in json.loads((out / "training.json").read_text())["history"]]
    assert losses[0] == pytest.approx(math.log(ChatGLMConfig().padded_vocab_size), rel=0.2)
    assert losses[-1] < losses[0]
    saved = sorted(out.glob("*.safetensors"))
    assert saved, sorted(path.name for path in out.iterdir())
    for path in saved:
        with safe_open(path, "pt") as file:
            assert all(file.get_tensor(name).isfinite().all() for name in file.keys())  # noqa: SIM118
