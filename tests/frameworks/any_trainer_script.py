"""A user's script for trainers that take any model: ``any_trainer_script.py TRAINER STEPS RATE``.

Nothing in it knows of glm4v_patched. In the current folder it finds ``model``, which has its code
beside it, and ``rows.json``, conversations with one picture each; it leaves ``out``, the whole
model, and ``losses.json``. Launchers may start several processes of it.
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoProcessor, Trainer, TrainingArguments

ROWS_OF_A_STEP = 24


class Collator:
    """Batches of questions, answers and pictures, of which the answers are learned."""

    def __init__(self):
        self.processor = AutoProcessor.from_pretrained("model", trust_remote_code=True)

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        asked = [
            [{"role": "user", "image": row["image"], "content": row["question"]}] for row in rows
        ]
        batch = self.processor.apply_chat_template(
            asked,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            padding=True,
            return_tensors="pt",
        )
        tokenizer = self.processor.tokenizer
        answers = tokenizer(
            [f"\n{row['answer']}<|endoftext|>" for row in rows],
            add_special_tokens=False,
            padding=True,
            padding_side="right",
            return_tensors="pt",
        )
        # The end of an answer has the id of padding, too: what is padding, the mask says.
        unlearned = torch.full_like(batch["input_ids"], -100)
        labels = answers["input_ids"].masked_fill(answers["attention_mask"] == 0, -100)
        return {
            "input_ids": torch.cat((batch["input_ids"], answers["input_ids"]), dim=1),
            "attention_mask": torch.cat(
                (batch["attention_mask"], answers["attention_mask"]), dim=1
            ),
            "labels": torch.cat((unlearned, labels), dim=1),
            "pixel_values": batch["pixel_values"],
        }


def load() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        "model", trust_remote_code=True, dtype=torch.float32
    )


def batches(processes: int, collator: Collator) -> DataLoader:
    rows = json.loads(Path("rows.json").read_text())
    return DataLoader(
        rows, batch_size=ROWS_OF_A_STEP // processes, shuffle=True, collate_fn=collator
    )


def endless(loader: DataLoader):
    while True:
        yield from loader


def with_trainer(steps: int, rate: float) -> None:
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    deepspeed = "deepspeed.json" if Path("deepspeed.json").exists() else None
    arguments = TrainingArguments(
        output_dir="run",
        max_steps=steps,
        learning_rate=rate,
        weight_decay=0.01,
        lr_scheduler_type="constant_with_warmup",
        per_device_train_batch_size=ROWS_OF_A_STEP // processes,
        gradient_checkpointing=True,
        remove_unused_columns=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        deepspeed=deepspeed,
        disable_tqdm=True,
    )
    collator = Collator()
    rows = json.loads(Path("rows.json").read_text())
    trainer = Trainer(load(), arguments, data_collator=collator, train_dataset=rows)
    trainer.train()
    trainer.save_model("out")
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        finish(losses, collator)


def with_accelerate(steps: int, rate: float) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    collator = Collator()
    model = load()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    loader = batches(accelerator.num_processes, collator)
    model, optimizer, loader = accelerator.prepare(model.train(), optimizer, loader)
    losses = []
    for _, batch in zip(range(steps), endless(loader), strict=False):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained("out", state_dict=state)
        finish(losses, collator)
    accelerator.end_training()


def with_lightning(steps: int, rate: float) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = load().train()
            self.losses = []

        def training_step(self, batch, index):
            loss = self.model(**batch).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.model.parameters(), lr=rate)

    collator, module = Collator(), Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=steps,
        max_epochs=-1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, batches(2, collator))
    if trainer.is_global_zero:
        module.model.save_pretrained("out")
        finish(module.losses, collator)


def with_fabric(steps: int, rate: float) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0)
    collator, model = Collator(), load()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    model, optimizer = fabric.setup(model.train(), optimizer)
    loader = fabric.setup_dataloaders(batches(2, collator))
    losses = []
    for _, batch in zip(range(steps), endless(loader), strict=False):
        loss = model(**batch).loss
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if fabric.is_global_zero:
        model.module.save_pretrained("out")
        finish(losses, collator)


def with_ray(steps: int, rate: float) -> None:
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer, prepare_model

    folder = os.getcwd()

    def worker() -> None:
        os.chdir(folder)
        torch.manual_seed(torch.distributed.get_rank())
        collator, model = Collator(), prepare_model(load().train())
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        losses = []
        for _, batch in zip(range(steps), endless(batches(2, collator)), strict=False):
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if torch.distributed.get_rank() == 0:
            model.module.save_pretrained("out")
            finish(losses, collator)

    TorchTrainer(worker, scaling_config=ScalingConfig(num_workers=2)).fit()


def finish(losses: list[float], collator: Collator) -> None:
    collator.processor.save_pretrained("out")
    Path("losses.json").write_text(json.dumps(losses))


TRAINERS = {
    "trainer": with_trainer,
    "accelerate": with_accelerate,
    "lightning": with_lightning,
    "fabric": with_fabric,
    "ray": with_ray,
}

if __name__ == "__main__":
    torch.manual_seed(0)
    TRAINERS[sys.argv[1]](int(sys.argv[2]), float(sys.argv[3]))
