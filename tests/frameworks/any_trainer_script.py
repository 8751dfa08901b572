"""A user's script for trainers that take any model: ``any_trainer_script.py TRAINER STEPS RATE``.

Nothing in it knows of glm4v_patched. In the current folder it finds ``model``, which has its code
beside it, and ``rows.json``, conversations with one image each; it leaves ``out``, the whole
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
    """Batches of questions, answers and images, of which the answers are learned."""

    def __init__(self, folder: Path | str = "model"):
        self.processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        questions = [
            [{"role": "user", "image": row["image"], "content": row["question"]}] for row in rows
        ]
        batch = self.processor.apply_chat_template(
            questions,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            padding=True,
            return_tensors="pt",
        )
        answers = self.processor.tokenizer(
            [f"\n{row['answer']}<|endoftext|>" for row in rows],
            add_special_tokens=False,
            padding=True,
            padding_side="right",
            return_tensors="pt",
        )
        # The end of an answer has the id of padding, too: what is padding, the mask says.
        batch["labels"] = torch.full_like(batch["input_ids"], -100)
        answers["labels"] = answers["input_ids"].masked_fill(answers["attention_mask"] == 0, -100)
        for name in ("input_ids", "attention_mask", "labels"):
            batch[name] = torch.cat((batch[name], answers[name]), dim=1)
        return dict(batch)


def load(name: str = "model", dtype: torch.dtype = torch.float32, **options) -> torch.nn.Module:
    options |= {"trust_remote_code": True, "dtype": dtype}
    return AutoModelForCausalLM.from_pretrained(name, **options).train()


def read_rows() -> list[dict]:
    return json.loads(Path("rows.json").read_text())


def batches(processes: int) -> DataLoader:
    size = ROWS_OF_A_STEP // processes
    return DataLoader(read_rows(), batch_size=size, shuffle=True, collate_fn=Collator())


def endless(loader: DataLoader):
    while True:
        yield from loader


def train(steps: int, model, optimizer, loader, backward, clip) -> list[float]:
    """The loop of who has no trainer; the losses. ``clip`` takes weights and the highest norm."""
    losses = []
    for _, batch in zip(range(steps), endless(loader), strict=False):
        loss = model(**batch).loss
        backward(loss)
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def finish(losses: list[float]) -> None:
    Collator().processor.save_pretrained("out")
    Path("losses.json").write_text(json.dumps(losses))


def with_trainer(steps: int, rate: float, adapted=None) -> None:
    on_gpus = torch.cuda.is_available() and adapted is not None
    arguments = TrainingArguments(
        output_dir="run",
        max_steps=steps,
        learning_rate=rate,
        weight_decay=0.01,
        lr_scheduler_type="constant_with_warmup",
        per_device_train_batch_size=ROWS_OF_A_STEP // int(os.environ.get("WORLD_SIZE", "1")),
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        bf16=adapted is not None,
        remove_unused_columns=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=not on_gpus,
        deepspeed="deepspeed.json" if Path("deepspeed.json").exists() else None,
        disable_tqdm=True,
    )
    model = adapted() if adapted else load()
    trainer = Trainer(model, arguments, data_collator=Collator(), train_dataset=read_rows())
    trainer.train()
    trainer.save_model("adapter" if adapted else "out")
    if trainer.is_world_process_zero():
        finish([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


def with_adapters(steps: int, rate: float) -> None:
    """On the published repository, in bf16; one process splits the model over all GPUs."""
    from peft import LoraConfig, get_peft_model

    def adapted():
        alone = "WORLD_SIZE" not in os.environ and torch.cuda.is_available()
        model = load("published", torch.bfloat16, device_map="auto" if alone else None)
        model.enable_input_require_grads()
        return get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))

    with_trainer(steps, rate, adapted)


def with_accelerate(steps: int, rate: float) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = load()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    loader = batches(accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    clip = accelerator.clip_grad_norm_
    losses = train(steps, model, optimizer, loader, accelerator.backward, clip)
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained("out", state_dict=state)
        finish(losses)
    accelerator.end_training()


def with_lightning(steps: int, rate: float) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = load()
            self.losses = []

        def training_step(self, batch, index):
            loss = self.model(**batch).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.model.parameters(), lr=rate)

    module = Module()
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
    trainer.fit(module, batches(2))
    if trainer.is_global_zero:
        module.model.save_pretrained("out")
        finish(module.losses)


def with_fabric(steps: int, rate: float) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0)
    model = load()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=rate))

    def clip(_, norm: float) -> None:
        fabric.clip_gradients(model, optimizer, max_norm=norm)

    loader = fabric.setup_dataloaders(batches(2))
    losses = train(steps, model, optimizer, loader, fabric.backward, clip)
    if fabric.is_global_zero:
        model.module.save_pretrained("out")
        finish(losses)


def with_ray(steps: int, rate: float) -> None:
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer, prepare_model

    folder = os.getcwd()

    def worker() -> None:
        os.chdir(folder)
        torch.manual_seed(torch.distributed.get_rank())
        model = prepare_model(load())
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)

        clip = torch.nn.utils.clip_grad_norm_
        losses = train(steps, model, optimizer, batches(2), torch.Tensor.backward, clip)
        if torch.distributed.get_rank() == 0:
            model.module.save_pretrained("out")
            finish(losses)

    TorchTrainer(worker, scaling_config=ScalingConfig(num_workers=2)).fit()


TRAINERS = {
    "trainer": with_trainer,
    "adapters": with_adapters,
    "accelerate": with_accelerate,
    "lightning": with_lightning,
    "fabric": with_fabric,
    "ray": with_ray,
}

if __name__ == "__main__":
    torch.manual_seed(0)
    TRAINERS[sys.argv[1]](int(sys.argv[2]), float(sys.argv[3]))
