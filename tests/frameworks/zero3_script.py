"""A user's script: adapters for glm-4v by transformers' Trainer. It knows nothing of glm4v_patched.

``zero3_script.py WAY ROWS``. In the current folder it finds ``published``, the model repository,
and ``rows.json``; it leaves ``adapter``. The ways are those of the reports:

- ``zero3``: DeepSpeed's ZeRO-3 on several processes, by ``deepspeed.json``
- ``split``: one process, the model split over all GPUs by ``device_map="auto"``
- ``qwen``: several processes without DeepSpeed, as Qwen's finetune.py starts them
"""

import json
import os
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, set_seed

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
LINEAR = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]


def pixels(path: str, side: int) -> torch.Tensor:
    picture = Image.open(path).convert("RGB").resize((side, side), Image.Resampling.BICUBIC)
    values = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    values = values.view(side, side, 3).permute(2, 0, 1) / 255
    return (values - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def row_of(row: dict, tokenizer, side: int) -> dict:
    """Three ids stand for a picture, as the published code has it."""

    def ids(text: str) -> list[int]:
        # The published tokenizer cannot pad, so not encode(), on transformers newer than 4.44.
        return tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text))

    def special(*names: str) -> list[int]:
        return tokenizer.convert_tokens_to_ids(list(names))

    prompt = special("[gMASK]", "<sop>", "<|user|>") + ids("\n")
    prompt += special("<|begin_of_image|>", "<|endoftext|>", "<|end_of_image|>")
    prompt += ids(row["question"]) + special("<|assistant|>")
    answer = ids(f"\n{row['answer']}") + special("<|endoftext|>")
    labels = [-100] * len(prompt) + answer
    return {"input_ids": prompt + answer, "labels": labels, "images": pixels(row["image"], side)}


def batch_of(rows: list[dict]) -> dict[str, torch.Tensor]:
    """Padded on the left."""
    longest = max(len(row["input_ids"]) for row in rows)
    batch = {"images": torch.stack([row["images"] for row in rows])}
    for name, fill in (("input_ids", PAD), ("labels", -100), ("attention_mask", 0)):
        filled = [row.get(name, [1] * len(row["input_ids"])) for row in rows]
        batch[name] = torch.tensor([[fill] * (longest - len(row)) + row for row in filled])
    return batch


way, number = sys.argv[1], int(sys.argv[2])
set_seed(0)
arguments = TrainingArguments(
    output_dir="run",
    max_steps=60,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    per_device_train_batch_size=number,
    gradient_checkpointing=True,
    gradient_checkpointing_kwargs={"use_reentrant": False},
    deepspeed="deepspeed.json" if way == "zero3" else None,
    bf16=True,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    remove_unused_columns=False,
    disable_tqdm=True,
    dataloader_pin_memory=False,
    use_cpu=not torch.cuda.is_available(),
)
tokenizer = AutoTokenizer.from_pretrained("published", trust_remote_code=True)
PAD = tokenizer.convert_tokens_to_ids("<|endoftext|>")
device_map = {"device_map": "auto"} if way == "split" else {}
model = AutoModelForCausalLM.from_pretrained(
    "published", trust_remote_code=True, dtype=torch.bfloat16, **device_map
)
model.enable_input_require_grads()
model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=LINEAR))
side = model.config.vision_config["image_size"]
rows = [row_of(row, tokenizer, side) for row in json.loads(Path("rows.json").read_text())]
trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=batch_of)
trainer.train()
trainer.save_model("adapter")
if int(os.environ.get("RANK", 0)) == 0:
    trainer.state.save_to_json("state.json")
