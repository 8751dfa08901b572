"""What people write who come from LLaMA-Factory, ms-swift, TRL or unsloth, in a recipe's words.

What ``TrainingArguments`` calls so is in :mod:`recipe_trainer`.
"""

from .recipe_trainer import INSTEAD, reason_against

_TRAINED = "trained: lora_lm (the language model) or lora_all (the vision tower, too)"
_FROZEN = "trained, whose lm, lora_lm and qlora leave the vision tower as it is"
_NEVER_CUT = "rows are never cut; data.on_bad: skip leaves out those that are too long"
_BATCH = "trainer.per_device_train_batch_size"
_KEPT = "engine.language and engine.tower, which follow the free memory"

MEANT = {
    "model_name_or_path": "model",
    "model_name": "model",
    "model_id": "model",
    "model_path": "model",
    "base_model": "model",
    "model_revision": "revision",
    "adapter_name_or_path": "model, which may be a folder of adapters",
    "adapters": "model, which may be a folder of adapters",
    "dataset": "data.train",
    "train_dataset": "data.train",
    "dataset_name": "data.train",
    "dataset_path": "data.train",
    "train_file": "data.train",
    "eval_dataset": "data.eval",
    "val_dataset": "data.eval",
    "validation_file": "data.eval",
    "val_size": "data.eval: 0.05, a share of the rows",
    "test_size": "data.eval: 0.05, a share of the rows",
    "split_dataset_ratio": "data.eval: 0.05, a share of the rows",
    "media_dir": "data.image_folder",
    "image_dir": "data.image_folder",
    "packing": "data.pack_to: 8192, the positions of a packed row",
    "pack": "data.pack_to: 8192, the positions of a packed row",
    "finetuning_type": _TRAINED,
    "train_type": _TRAINED,
    "tuner_type": _TRAINED,
    "sft_type": _TRAINED,
    "use_peft": _TRAINED,
    "load_in_4bit": "trained: qlora",
    "quantization_bit": "trained: qlora",
    "quant_bits": "trained: qlora",
    "freeze_vision_tower": _FROZEN,
    "freeze_vit": _FROZEN,
    "freeze_multi_modal_projector": _FROZEN,
    "freeze_aligner": _FROZEN,
    "finetune_vision_layers": _FROZEN,
    "lora_r": "lora.rank",
    "lora_rank": "lora.rank",
    "r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_target": "lora.targets",
    "target_modules": "lora.targets",
    "micro_batch": _BATCH,
    "batch_size": _BATCH,
    "micro_batch_size": _BATCH,
    "accumulation": "trainer.gradient_accumulation_steps",
    "grad_accum": "trainer.gradient_accumulation_steps",
    "lr": "trainer.learning_rate",
    "vit_lr": "trainer.learning_rate: {tower: 1.0e-6, adapter: 1.0e-5, language_model: 1.0e-5}",
    "scheduler": "trainer.lr_scheduler_type",
    "epochs": "trainer.num_train_epochs",
    "num_epochs": "trainer.num_train_epochs",
    "clipping": "trainer.max_grad_norm",
    "keep_checkpoints": "trainer.save_total_limit",
    "torch_dtype": "engine.precision",
    "dtype": "engine.precision",
    "use_gradient_checkpointing": _KEPT,
    "vit_gradient_checkpointing": _KEPT,
    "use_wandb": "trainer.report_to: wandb",
    "use_swanlab": "trainer.report_to: swanlab",
}
"""A key of a recipe, or a key with its value, and what else there is to know."""

NOT_NEEDED = {
    "cutoff_len": _NEVER_CUT,
    "max_length": _NEVER_CUT,
    "max_seq_length": _NEVER_CUT,
    "max_seq_len": _NEVER_CUT,
    "model_max_length": _NEVER_CUT,
    "truncation_strategy": _NEVER_CUT,
    "template": "the model has its own chat template",
    "chat_template": "the model has its own chat template",
    "model_type": "there is one model here",
    "stage": "answers are learned from data.train, and nothing else is trained for",
    "image_max_pixels": "all pictures have the model's size",
    "max_pixels": "all pictures have the model's size",
    "flash_attn": "attention is torch's, which chooses the fastest kernel",
    "attn_impl": "attention is torch's, which chooses the fastest kernel",
    "attn_implementation": "attention is torch's, which chooses the fastest kernel",
    "trust_remote_code": "this package's code runs, never a folder's",
    "preprocessing_num_workers": "rows are checked on all processors",
    "dataset_num_proc": "rows are checked on all processors",
    "plot_loss": "loss.png is always drawn",
}
"""Why nothing stands for it."""

OTHER_VALUES = {
    "trained": {"lora": "lora_lm or lora_all", "freeze": "lm", "all": "full", "llm": "lm"},
}


def cure(name: str) -> str | None:
    """What to do about a key that is another program's; None of others."""
    if meant := MEANT.get(name) or INSTEAD.get(name):
        return f"did you mean {meant}?"
    reason = NOT_NEEDED.get(name) or reason_against(name)
    return reason and f"it is not needed: {reason}"
