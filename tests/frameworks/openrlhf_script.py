"""OpenRLHF's models and losses on a CPU: ``openrlhf_script.py JOB STEPS LEARNING_RATE``.

``actor`` learns from images, as the PPO trainer calls it; ``reward`` from pairs of texts, as
train_rm does. Its own commands ask for a GPU. It imports flash_attn, which is installed on a GPU
only, for packed rows: empty modules stand in for it. In the current folder it finds ``model``,
``rows.json`` and ``data``; it leaves ``out`` and ``losses.json``.
"""

import importlib.machinery
import shutil
import sys
from pathlib import Path
from types import ModuleType

import torch
from any_trainer_script import Collator, finish, read_rows
from datasets import load_dataset

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


def actor():
    actor = Actor("model", attn_implementation="sdpa", param_dtype="bf16")
    actor.model.float()
    actor.gradient_checkpointing_enable({"use_reentrant": False})
    assert actor.is_vlm
    batch = Collator()(read_rows())
    ids, learned = batch.pop("input_ids"), (batch.pop("labels") != -100).long()
    loss_of = SFTLoss()

    def loss() -> torch.Tensor:
        logps = actor(ids, return_logprobs=True, **batch)
        return loss_of(logps, learned[:, 1:])

    return actor.model, loss


def reward():
    model = get_llm_for_sequence_regression(
        "model", "reward", attn_implementation="sdpa", init_value_head=True
    ).float()
    data = load_dataset("data/reward")["train"]
    texts = [*data["chosen"], *data["rejected"]]
    rows = Collator().processor.tokenizer(texts, padding=True, return_tensors="pt")
    loss_of = PairWiseLoss()

    def loss() -> torch.Tensor:
        return loss_of(*model(rows["input_ids"], rows["attention_mask"]).chunk(2))

    return model, loss


torch.manual_seed(0)
model, loss_of = {"actor": actor, "reward": reward}[sys.argv[1]]()
optimizer = torch.optim.AdamW(model.parameters(), lr=float(sys.argv[3]), weight_decay=0.0)
losses = []
for _ in range(int(sys.argv[2])):
    loss = loss_of()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
model.save_pretrained("out")
finish(losses)
if sys.argv[1] == "reward":
    # Its class is made by a function of OpenRLHF, so that no code is saved with it.
    for code in Path("model").glob("*.py"):
        shutil.copy(code, "out")
