"""Other programs' names for a recipe's fields, and their fields that a recipe may not have.

The programs are LLaMA-Factory, ms-swift, TRL, unsloth and transformers' ``TrainingArguments``.
"""

_BATCH_SIZE = "trainer.per_device_train_batch_size"
_PACKED = "data.pack_to, which wastes less than grouping by length"

# Other programs' names (right) for a key of a recipe or an option of the command line (left), which
# messages suggest, with a value or a note.
_RECIPE_EQUIVALENTS = {
    "out": "output_dir",
    "--overwrite": "overwrite_output_dir",
    "--resume or --resume-from": "resume_from_checkpoint",
    "--device cpu": "use_cpu no_cuda use_mps_device",
    "data.train": "do_train dataset train_dataset dataset_name dataset_path train_file",
    "data.eval and trainer.eval_strategy": "do_eval do_predict",
    "engine.zero_stage and engine.offload": "deepspeed",
    "engine.precision": "bf16 fp16 bf16_full_eval fp16_full_eval fp16_opt_level fp16_backend "
    "half_precision_backend torch_dtype dtype",
    "engine.optimizer": "optim optim_args optim_target_modules adafactor",
    "engine.tower and engine.language": "gradient_checkpointing gradient_checkpointing_kwargs "
    "activation_checkpointing activation_checkpointing_kwargs",
    "engine.compile": "torch_compile torch_compile_backend torch_compile_mode torchdynamo",
    "trainer.warmup_steps, which is a share of all steps if it is below 1": "warmup_ratio",
    _BATCH_SIZE: "per_gpu_train_batch_size micro_batch batch_size micro_batch_size",
    f"{_BATCH_SIZE}; checkpointing already follows the free memory": "auto_find_batch_size",
    "trainer.per_device_eval_batch_size": "per_gpu_eval_batch_size",
    _PACKED: "group_by_length train_sampling_strategy length_column_name",
    "model": "model_name_or_path model_name model_id model_path base_model",
    "revision": "model_revision",
    "model, which may be a folder of adapters": "adapter_name_or_path adapters",
    "data.eval": "eval_dataset val_dataset validation_file",
    "data.eval: 0.05, a share of the rows": "val_size test_size split_dataset_ratio",
    "data.image_folder": "media_dir image_dir",
    "data.pack_to: 8192, the maximum tokens of a packed sequence": "packing pack",
    "trained: lora_lm (the language model) or lora_all (the vision tower, too)": "finetuning_type "
    "train_type tuner_type sft_type use_peft",
    "trained: qlora": "load_in_4bit quantization_bit quant_bits",
    "trained: lm, lora_lm or qlora, which freeze the vision tower": "freeze_vision_tower "
    "freeze_vit freeze_multi_modal_projector freeze_aligner finetune_vision_layers",
    "lora.rank": "lora_r lora_rank r",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.targets": "lora_target target_modules",
    "trainer.gradient_accumulation_steps": "accumulation grad_accum",
    "trainer.learning_rate": "lr",
    "trainer.learning_rate: {tower: 1.0e-6, projector: 1.0e-5, language_model: 1.0e-5}": "vit_lr",
    "trainer.lr_scheduler_type": "scheduler",
    "trainer.num_train_epochs": "epochs num_epochs",
    "trainer.max_grad_norm": "clipping",
    "trainer.save_total_limit": "keep_checkpoints",
    "engine.language and engine.tower, which follow the free memory": "use_gradient_checkpointing "
    "vit_gradient_checkpointing",
    "trainer.report_to: wandb": "use_wandb",
    "trainer.report_to: swanlab": "use_swanlab",
}
# Names of other programs' fields that are refused (right), by the reason (left). Such a name with a
# suffix is refused, too: hub refuses hub_token.
_REFUSED = {
    "DeepSpeed shards the weights: engine.zero_stage": "fsdp",
    "the launcher starts the processes: --processes": "ddp local_rank "
    "parallelism_config accelerator_config mp_parameters",
    "TPUs are not supported": "tpu",
    "hyperparameter search is not supported": "ray",
    "python -m hub_upload publishes a model after training": "push_to_hub hub",
    "the section data names the columns": "remove_unused_columns label_names",
    "it needs the logits of all positions, which are never built here": "label_smoothing_factor",
    "its kernels are not for this model's layers: engine.compile fuses them": "use_liger_kernel "
    "liger_kernel",
    "no answers are generated in a training step": "use_cache",
    "it is for models with a state that lasts from batch to batch": "past_index",
    "it is for other models": "jit_mode_eval",
    "NaN and infinite losses are always logged: max_nonfinite_steps": "logging_nan_inf_filter",
    "weights are always saved as safetensors": "save_safetensors",
    "a checkpoint with the model alone cannot be resumed from; for no checkpoints, leave out "
    "trainer.save_steps": "save_only_model",
    "all processes see one file system": "save_on_each_node",
    "SIGTERM ends the training, and --resume continues it": "enable_jit_checkpoint",
    "a resumed run always continues with the rows that it has not seen": "ignore_data_skip",
    "a resumed run always restores them": "restore_callback_states_from_checkpoint",
    "the loss is computed without logits, so there are no predictions to collect": ""
    "prediction_loss_only include_inputs_for_metrics include_for_metrics batch_eval_metrics "
    "eval_do_concat_batches eval_use_gather_object eval_accumulation_steps "
    "use_legacy_prediction_loop",
    "rows are never cut; data.on_bad: skip leaves out those that are too long": "cutoff_len "
    "max_length max_seq_length max_seq_len model_max_length truncation_strategy",
    "the model has its own chat template": "template chat_template",
    "glm-4v is the only model": "model_type",
    "supervised fine-tuning on data.train is the only stage": "stage",
    "all images have the model's size": "image_max_pixels max_pixels",
    "attention is torch's, which chooses the fastest kernel": "flash_attn attn_impl "
    "attn_implementation",
    "the code of this package runs, never that in the model's folder": "trust_remote_code",
    "rows are checked on all CPU cores": "preprocessing_num_workers dataset_num_proc",
    "loss.png is always drawn": "plot_loss",
}


def _by_name(table: dict[str, str]) -> dict[str, str]:
    """Return the text on the left of a table for each name on its right."""
    return {name: text for text, names in table.items() for name in names.split()}


RECIPE_EQUIVALENTS, REFUSED_FIELDS = _by_name(_RECIPE_EQUIVALENTS), _by_name(_REFUSED)
_ATTENTION = dict.fromkeys(["q_proj", "k_proj", "v_proj", "qkv_proj"], "query_key_value")
OTHER_VALUES = {
    "trained": {
        "lora": "lora_lm or lora_all",
        "freeze": "lm",
        "all": "full",
        "llm": "lm",
        "adapter": "projector",
    },
    "trainer.learning_rate": {"adapter": "projector"},
    "lora.targets": {
        **_ATTENTION,
        "o_proj": "dense",
        "gate_proj": "dense_h_to_4h",
        "up_proj": "dense_h_to_4h",
        "down_proj": "dense_4h_to_h",
        "all": "all-linear",
    },
}
"""For each field, the value to write in place of another program's value or a layer's name in other
models."""


def trainer_field_refusal(name: str) -> str | None:
    """Return why a field may not be in ``trainer``, or None if it may.

    The installed release of transformers need not have a field of that name.
    """
    if name == "ddp_timeout":  # accepted, unlike the other fields that begin with "ddp"
        return None
    if name in RECIPE_EQUIVALENTS:
        return f"trainer.{name} is set by the recipe; expected {RECIPE_EQUIVALENTS[name]}"
    reason = _refusal_reason(name)
    return reason and f"trainer.{name} cannot be set: {reason}"


def _refusal_reason(name: str) -> str | None:
    prefixes = (p for p in REFUSED_FIELDS if name == p or name.startswith(p + "_"))
    return next((REFUSED_FIELDS[prefix] for prefix in prefixes), None)


def field_suggestion(name: str) -> str | None:
    """Return what to write in place of another program's field; None for an unknown name."""
    if name in RECIPE_EQUIVALENTS:
        return f"did you mean {RECIPE_EQUIVALENTS[name]}?"
    reason = _refusal_reason(name)
    return reason and f"it is not needed: {reason}"
