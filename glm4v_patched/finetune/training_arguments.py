"""The fields of the installed transformers' ``TrainingArguments``, read from its source.

Importing it would import torch, which takes seconds. Fields that a recipe has other words for are
refused by name.
"""

import ast
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

_PLAIN: dict[str, Any] = {
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "dict": dict[str, Any],
    "list": list[Any],
    "None": None,
    "Any": Any,
}

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
    for start, reason in REASONS.items():
        if name == start or name.startswith(start + "_"):
            return f"trainer.{name} cannot be set: {reason}"
    return None


@cache
def installed_fields() -> dict[str, Any]:
    """The fields' types by name, without those that are refused.

    Types are plain ones, and ``Literal`` of the values of an enumeration; others are ``Any``, to be
    checked by transformers itself.

    Raises:
        RuntimeError: transformers is not installed, or its source is not as expected.
    """
    folder = _transformers_folder()
    choices = dict(_enumerations(folder / "trainer_utils.py"))
    found = {}
    for statement in _class_body(folder / "training_args.py", "TrainingArguments"):
        # As dataclasses have it: names with a type, of which those with _ are not for callers.
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
            if not name.startswith("_") and refusal(name) is None:
                found[name] = _type_of(statement.annotation, choices)
    if "learning_rate" not in found:
        raise _not_as_expected()
    return found


def _transformers_folder() -> Path:
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        raise RuntimeError("transformers is not installed: recipes hand its TrainingArguments on")
    return Path(spec.origin).parent


def _not_as_expected() -> RuntimeError:
    return RuntimeError(
        f"TrainingArguments of transformers {version('transformers')} cannot be read from its "
        "source: install a tested release, 4.57.6 to 5.24"
    )


def _class_body(file: Path, name: str) -> list[ast.stmt]:
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.ClassDef) and statement.name == name:
            return statement.body
    raise _not_as_expected()


def _enumerations(file: Path) -> Iterator[tuple[str, Any]]:
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if not isinstance(statement, ast.ClassDef):
            continue
        bases = [base.id for base in statement.bases if isinstance(base, ast.Name)]
        values = [
            line.value.value
            for line in statement.body
            if isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant)
        ]
        if "ExplicitEnum" in bases and values:
            yield statement.name, Literal[tuple(values)]


def _type_of(node: ast.expr, choices: dict[str, Any]) -> Any:
    """The type that an annotation names; of enumerations beside text, their values alone."""
    match node:
        case ast.Constant(value=None):
            return None
        case ast.Name(id=name):
            return choices.get(name, _PLAIN.get(name, Any))
        case ast.BinOp(op=ast.BitOr()):
            return _union([node.left, node.right], choices)
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return _union([inner, ast.Constant(None)], choices)
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=parts)):
            return _union(parts, choices)
        case ast.Subscript(value=ast.Name(id="list" | "dict" as name)):
            return _PLAIN[name]
    return Any


def _union(parts: list[ast.expr], choices: dict[str, Any]) -> Any:
    if any(isinstance(part, ast.Name) and part.id in choices for part in parts):
        parts = [part for part in parts if not (isinstance(part, ast.Name) and part.id == "str")]
    result = _type_of(parts[0], choices)
    for part in parts[1:]:
        other = _type_of(part, choices)
        if Any in (result, other):
            return Any
        result = result | other
    return result
