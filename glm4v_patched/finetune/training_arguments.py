"""The fields of the installed transformers' ``TrainingArguments``, as its dataclass has them.

Importing it imports torch, which takes seconds: only for a recipe with a field that we do not
declare. Fields that a recipe has other words for are refused by name, without that.
"""

import dataclasses
import functools
import operator
from enum import EnumType
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from .recipe_types import AtLeastZero, NotNegative

_PROCESSES = "processes and their group are the launcher's: --processes"
_COUNTED = "the loss is computed without logits, so there are no predictions to collect"
_POLICIES = "engine.tower and engine.language"
_PUBLISH = "python -m hub_upload, after training"

INSTEAD = {
    "output_dir": "out",
    "overwrite_output_dir": "--overwrite",
    "resume_from_checkpoint": "--resume or --resume-from",
    "do_train": "data.train",
    "do_eval": "data.eval and trainer.eval_strategy",
    "do_predict": "data.eval and trainer.eval_strategy",
    "use_cpu": "--device cpu",
    "no_cuda": "--device cpu",
    "use_mps_device": "--device cpu",
    "deepspeed": "engine.zero_stage and engine.offload",
    "bf16": "engine.precision",
    "fp16": "engine.precision",
    "bf16_full_eval": "engine.precision",
    "fp16_full_eval": "engine.precision",
    "fp16_opt_level": "engine.precision",
    "fp16_backend": "engine.precision",
    "half_precision_backend": "engine.precision",
    "optim": "engine.optimizer",
    "optim_args": "engine.optimizer",
    "optim_target_modules": "engine.optimizer",
    "adafactor": "engine.optimizer",
    "gradient_checkpointing": _POLICIES,
    "gradient_checkpointing_kwargs": _POLICIES,
    "activation_checkpointing": _POLICIES,
    "activation_checkpointing_kwargs": _POLICIES,
    "torch_compile": "engine.compile",
    "torch_compile_backend": "engine.compile",
    "torch_compile_mode": "engine.compile",
    "torchdynamo": "engine.compile",
    "warmup_ratio": "trainer.warmup_steps, which is a share of all steps if it is below 1",
    "per_gpu_train_batch_size": "trainer.per_device_train_batch_size",
    "per_gpu_eval_batch_size": "trainer.per_device_eval_batch_size",
    "group_by_length": "data.pack_to, which wastes less",
    "train_sampling_strategy": "data.pack_to, which wastes less than grouping by length",
    "length_column_name": "data.pack_to, which wastes less than grouping by length",
    "auto_find_batch_size": "trainer.per_device_train_batch_size; what is kept of activations "
    "already follows the free memory",
}
"""What to write in the place of a field that is the recipe's own."""

REASONS = {
    "fsdp": "the weights are sharded by DeepSpeed: engine.zero_stage",
    "ddp": _PROCESSES,
    "local_rank": _PROCESSES,
    "parallelism_config": _PROCESSES,
    "accelerator_config": _PROCESSES,
    "mp_parameters": _PROCESSES,
    "tpu": "there is no TPU here",
    "ray": "there is no hyperparameter search here",
    "push_to_hub": f"a model is published by {_PUBLISH}",
    "hub": f"a model is published by {_PUBLISH}",
    "remove_unused_columns": "the data's columns are the recipe's: data",
    "label_names": "the data's columns are the recipe's: data",
    "label_smoothing_factor": "it needs the logits of all positions, which are never built here",
    "use_liger_kernel": "its kernels are not for this model's layers: engine.compile fuses them",
    "liger_kernel": "its kernels are not for this model's layers: engine.compile fuses them",
    "use_cache": "no answers are generated in a training step",
    "past_index": "it is for models that hand states on from step to step",
    "jit_mode_eval": "it is of other models",
    "logging_nan_inf_filter": "what is not finite is always shown: max_nonfinite_steps",
    "save_safetensors": "weights are always saved as safetensors",
    "save_only_model": "a checkpoint that holds only the model cannot be continued from; to have "
    "none, leave out trainer.save_steps",
    "save_on_each_node": "all processes see one file system",
    "enable_jit_checkpoint": "SIGTERM ends the training, and --resume continues it",
    "ignore_data_skip": "a continued run goes on with the rows that it has not seen",
    "restore_callback_states_from_checkpoint": "a continued run always restores them",
    "prediction_loss_only": _COUNTED,
    "include_inputs_for_metrics": _COUNTED,
    "include_for_metrics": _COUNTED,
    "batch_eval_metrics": _COUNTED,
    "eval_do_concat_batches": _COUNTED,
    "eval_use_gather_object": _COUNTED,
    "eval_accumulation_steps": _COUNTED,
    "use_legacy_prediction_loop": _COUNTED,
}
"""Why a field is refused that nothing stands for; also of those that begin with such a name."""

# In the groups above and all the same handed on.
_HANDED_ON = {"ddp_timeout"}


def refusal(name: str) -> str | None:
    """Why a field of ``TrainingArguments`` may not be in a recipe; None for others.

    ``name`` need not be one of the installed release.
    """
    if name in _HANDED_ON:
        return None
    if name in INSTEAD:
        return f"trainer.{name} is set by the recipe; expected {INSTEAD[name]}"
    reason = reason_against(name)
    return reason and f"trainer.{name} cannot be set: {reason}"


def reason_against(name: str) -> str | None:
    """Why a field is refused that nothing stands for; None of others."""
    found = (why for start, why in REASONS.items() if name == start or name.startswith(f"{start}_"))
    return next(found, None)


def installed_fields() -> dict[str, Any]:
    """The fields' types by name, as pydantic is to check them, without those that are refused.

    Raises:
        RuntimeError: transformers cannot be imported.
    """
    try:
        from transformers import TrainingArguments
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(
            "trainer has fields of transformers' TrainingArguments, which cannot be imported: "
            f"{error}; glm4v-patched doctor, without a recipe, says what does not fit"
        ) from None
    names = [field.name for field in dataclasses.fields(TrainingArguments) if field.init]
    kinds = get_type_hints(TrainingArguments)
    return {name: _checked(kinds[name]) for name in names if refusal(name) is None}


def _checked(kind: Any) -> Any:
    """Of enumerations beside text, the values alone; numbers with the range that all fields have,
    for none is below 0."""
    if get_origin(kind) in (Union, UnionType):
        kinds = get_args(kind)
        if any(isinstance(part, EnumType) for part in kinds):
            kinds = tuple(part for part in kinds if part is not str)
        return functools.reduce(operator.or_, map(_checked, kinds))
    if isinstance(kind, EnumType):
        return Literal[tuple(choice.value for choice in cast(Any, kind))]
    return _KINDS.get(get_origin(kind) or kind, kind)


# Of what is in a list or a section, transformers makes its own types.
_KINDS: dict[Any, Any] = {
    int: AtLeastZero,
    float: NotNegative,
    list: list[Any],
    dict: dict[str, Any],
}
