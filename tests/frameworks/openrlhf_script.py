"""OpenRLHF's models and losses on a CPU: ``openrlhf_script.py JOB STEPS LEARNING_RATE``.

``actor`` learns from pictures, as the PPO trainer calls it; ``reward`` from pairs of texts, as
train_rm does. Its own commands ask for a GPU. It imports flash_attn, which is installed on a GPU
only, for packed rows: empty modules stand in for it. In the current folder it finds ``model``,
``rows.json`` and ``data``; it leaves ``out`` and ``losses.json``.
"""

import importlib.machinery
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import torch
from datasets import load_dataset
from transformers import AutoProcessor

MODULES = ("flash_attn", "flash_attn.bert_padding", "flash_attn.utils")
for name in (*MODULES, "flash_attn.utils.distributed"):
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
for name in ("index_first_axis", "pad_input", "rearrange", "unpad_input"):
    setattr(sys.modules["flash_attn.bert_padding"], name, None)
sys.modules["flash_attn.utils.distributed"].all_gather = None

from openrlhf.models import (  # noqa: E402
    Actor,
    PairWiseLoss,
    SFTLoss,
    get_llm_for_sequence_regression,
)
from openrlhf.utils.vlm_utils import process_prompt_with_images  # noqa: E402


def train_actor(steps: int, rate: float) -> list[float]:
    actor = Actor("model", attn_implementation="sdpa", param_dtype="bf16")
    actor.model.float()
    actor.gradient_checkpointing_enable({"use_reentrant": False})
    assert actor.is_vlm
    processor = AutoProcessor.from_pretrained("model", trust_remote_code=True)
    samples = []
    for row in json.loads(Path("rows.json").read_text()):
        asked = [{"role": "user", "image": row["image"], "content": row["question"]}]
        prompt = processor.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        ids, pictures, _ = process_prompt_with_images(processor, prompt, row["image"])
        answer = processor.tokenizer.encode(
            f"\n{row['answer']}<|endoftext|>", add_special_tokens=False
        )
        samples.append((ids, answer, pictures))
    longest = max(len(ids) + len(answer) for ids, answer, _ in samples)
    pad = processor.tokenizer.pad_token_id
    sequences, mask, learned = [], [], []
    for ids, answer, _ in samples:
        fill = longest - len(ids) - len(answer)
        sequences.append([pad] * fill + ids + answer)
        mask.append([0] * fill + [1] * (longest - fill))
        learned.append([0] * (longest - len(answer)) + [1] * len(answer))
    sequences, mask, learned = (torch.tensor(rows) for rows in (sequences, mask, learned))
    pixel_values = torch.cat([pictures["pixel_values"] for _, _, pictures in samples])
    loss_of = SFTLoss()
    optimizer = torch.optim.AdamW(actor.parameters(), lr=rate, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        logps = actor(
            sequences, attention_mask=mask, return_logprobs=True, pixel_values=pixel_values
        )
        loss = loss_of(logps, learned[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    actor.model.save_pretrained("out")
    processor.save_pretrained("out")
    return losses


def train_reward_model(steps: int, rate: float) -> list[float]:
    model = get_llm_for_sequence_regression(
        "model", "reward", attn_implementation="sdpa", init_value_head=True
    ).float()
    tokenizer = AutoProcessor.from_pretrained("model", trust_remote_code=True).tokenizer
    data = load_dataset("data/reward")["train"]
    rows = tokenizer([*data["chosen"], *data["rejected"]], padding=True, return_tensors="pt")
    loss_of = PairWiseLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        chosen, rejected = model(rows["input_ids"], rows["attention_mask"]).chunk(2)
        loss = loss_of(chosen, rejected)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained("out")
    tokenizer.save_pretrained("out")
    # Its class is made by a function of OpenRLHF, so that no code is saved with it.
    for code in Path("model").glob("*.py"):
        shutil.copy(code, "out")
    return losses


if __name__ == "__main__":
    torch.manual_seed(0)
    train = {"actor": train_actor, "reward": train_reward_model}[sys.argv[1]]
    losses = train(int(sys.argv[2]), float(sys.argv[3]))
    Path("losses.json").write_text(json.dumps(losses))
