"""Fine-tune a glm-4v folder on a file of conversations: what every training process runs.

``python -m torch.distributed.run --nproc_per_node N -m glm4v_patched.training.recipe SETTINGS``,
where ``SETTINGS`` is a JSON file of :class:`Recipe`; ``--resume-from CHECKPOINT`` continues a run.
:mod:`launch` does that.
"""

import argparse
import hashlib
import json
import os
import sys
import threading
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

from ..remote.modeling_chatglm import GLM4VForCausalLM
from ..remote.processing_chatglm import ChatGLMProcessor
from .checkpoints import CompletionMarker, choose_checkpoint, require_same_settings
from .data import ConversationCollator, read_conversations
from .features import TowerFeatures
from .packing import PackingCollator, pack_conversations
from .zero import zero_config

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# What a continued run may change: where things are kept, and how often they are saved.
FREE_WHEN_RESUMING = {"model", "data", "out", "save_steps", "keep_checkpoints", "reuse_features"}


@dataclass(frozen=True)
class Recipe:
    """What to train and how. Paths are folders but for ``data``, a JSONL file.

    With ``save_steps``, a checkpoint to continue from is saved to ``out`` every so many steps (not
    at the last one, where the model itself is saved); the newest ``keep_checkpoints`` are kept, or
    all of them. ``precision`` is "bf16" or "fp32", of the weights and of the computation.

    With ``pack_to``, conversations are packed into rows of at most so many positions, no one longer
    than that, and ``micro_batch`` counts such rows.

    ``reuse_features``: a picture goes through the vision tower, which must be frozen, only the
    first time. What came out is kept in the folder that is named; or, if true, in the memory of
    each process, up to 16 GiB, which is of use to a single process: others draw other pictures in
    each epoch.
    """

    model: str
    data: str
    out: str
    steps: int
    micro_batch: int
    learning_rate: float
    zero_stage: int = 3
    seed: int = 0
    precision: str = "bf16"
    save_steps: int | None = None
    keep_checkpoints: int | None = None
    pack_to: int | None = None
    reuse_features: bool | str = False

    def __post_init__(self):
        if self.precision not in DTYPES:
            raise ValueError(
                f"precision is {self.precision!r}; expected one of {', '.join(DTYPES)}"
            )
        if not isinstance(self.reuse_features, bool | str) or self.reuse_features == "":
            raise ValueError(
                f"reuse_features is {self.reuse_features!r}; expected true, false or a folder"
            )
        for name in ("save_steps", "keep_checkpoints", "pack_to"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1, or null for none")

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2))

    @classmethod
    def read(cls, path: Path) -> "Recipe":
        """Raises ``ValueError`` naming the fields that are unknown or missing."""
        try:
            values = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        known = {field.name for field in fields(cls)}
        required = {field.name for field in fields(cls) if field.default is MISSING}
        wrong = [f"unknown: {name}" for name in values if name not in known]
        wrong += [f"missing: {name}" for name in sorted(required - set(values))]
        if wrong:
            raise ValueError(f"{path} is no recipe; {', '.join(wrong)}")
        return cls(**values)

    def starting_point(self, processes: int, resume: bool | Path) -> Path | None:
        """The checkpoint in ``out`` to continue from, or None; :func:`choose_checkpoint` has more.

        Raises:
            ValueError: none can be chosen, or it is of a run with other settings.
        """
        checkpoint = choose_checkpoint(Path(self.out), resume)
        if checkpoint is not None:
            require_same_settings(checkpoint, self.settings(processes))
        return checkpoint

    def settings(self, processes: int) -> dict:
        """What decides the course of training, and the same for a run and its continuation."""
        decisive = {k: v for k, v in asdict(self).items() if k not in FREE_WHEN_RESUMING}
        digest = hashlib.sha256(Path(self.data).read_bytes()).hexdigest()
        return decisive | {"processes": processes, "sha256 of data": digest}

    def features_of(self, model: GLM4VForCausalLM) -> TowerFeatures | None:
        """What keeps the tower's features, if they are to be kept."""
        if self.reuse_features is False:
            return None
        return TowerFeatures(model, None if self.reuse_features is True else self.reuse_features)

    def logging_steps(self) -> int:
        """For about 50 entries a run, none across a checkpoint, where a resumption would cut it."""
        wanted = max(self.steps // 50, 1)
        if self.save_steps is None:
            return wanted
        return max(n for n in range(1, wanted + 1) if self.save_steps % n == 0)


class RecipeTrainer(Trainer):
    """Saves the model with the config it came with, in checkpoints too: they can be loaded.

    With ``features``, pictures that they know do not go through the tower.
    """

    def __init__(self, model: GLM4VForCausalLM, features: TowerFeatures | None = None, **options):
        self.features = features
        if features is not None:
            options["data_collator"] = features.collator(options["data_collator"])
        # The Trainer puts the tokenizer's one end token in place of the model's three.
        self.stop_ids = model.config.eos_token_id
        super().__init__(model=model, **options)
        model.config.skip_logits = True

    def compute_loss(self, model, inputs, return_outputs=False, **options):
        if self.features is None:
            return super().compute_loss(model, inputs, return_outputs, **options)
        inputs = self.features.replace_pictures(inputs)
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **options)
        self.features.keep(outputs)
        return (loss, outputs) if return_outputs else loss

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        config = self.model.config
        config.eos_token_id = self.stop_ids
        config.skip_logits = False
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            config.skip_logits = True


def train(recipe: Recipe, checkpoint: Path | None = None) -> None:
    """Train all weights with both towers checkpointed; save the model to ``recipe.out``.

    Also writes ``training.json`` there, last: the loss history, and how many processes took part.

    Args:
        checkpoint: Complete checkpoint in ``recipe.out`` to continue from. In fp32 on a CPU the
            losses and weights are those of a run that was never stopped, to the bit.

    Raises:
        ValueError: :meth:`Recipe.starting_point` says when.
    """
    # Before the model: it makes from_pretrained load straight into the shards of ZeRO-3.
    arguments = TrainingArguments(
        output_dir=recipe.out,
        max_steps=recipe.steps,
        per_device_train_batch_size=recipe.micro_batch,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(recipe.steps // 20, 1),
        max_grad_norm=1.0,
        optim="adamw_torch",
        bf16=recipe.precision == "bf16",
        use_cpu=not torch.cuda.is_available(),
        deepspeed=zero_config(recipe.zero_stage, bf16=recipe.precision == "bf16"),
        remove_unused_columns=False,
        save_strategy="no" if recipe.save_steps is None else "steps",
        save_steps=recipe.save_steps or 0,
        report_to="none",
        logging_steps=recipe.logging_steps(),
        seed=recipe.seed,
    )
    recipe.starting_point(arguments.world_size, checkpoint or False)
    processor = ChatGLMProcessor.from_pretrained(recipe.model)
    conversations, collator = read_conversations(recipe.data), ConversationCollator(processor)
    if recipe.pack_to is not None:
        conversations = pack_conversations(conversations, processor, recipe.pack_to)
        collator = PackingCollator(processor)
    model = GLM4VForCausalLM.from_pretrained(recipe.model, dtype=DTYPES[recipe.precision])
    checkpoint_activations(model)
    trainer = RecipeTrainer(
        model,
        features=recipe.features_of(model),
        args=arguments,
        train_dataset=conversations,
        data_collator=collator,
        processing_class=processor,
        callbacks=[
            CompletionMarker(recipe.settings(arguments.world_size), recipe.keep_checkpoints)
        ],
    )
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    trainer.save_model()
    if trainer.is_world_process_zero():
        history = [
            {"step": entry["step"], "loss": entry["loss"]}
            for entry in trainer.state.log_history
            if "loss" in entry
        ]
        report = {"history": history, "world_size": arguments.world_size}
        Path(recipe.out, "training.json").write_text(json.dumps(report, indent=2))


def checkpoint_activations(model: GLM4VForCausalLM) -> None:
    options = {"use_reentrant": False}
    # transformers 5.23 renamed it and warns about the old name.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable(options)


def end_with_stdin() -> None:
    """End this process when its standard input ends: when whoever holds the other end is gone.

    The kernel closes that end however the holder dies, which no handler and, outside Linux, no
    death signal can promise; and torch elastic gives each process a session of its own, so that no
    signal to a group reaches it.
    """

    def wait_for_end() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        os._exit(1)

    threading.Thread(target=wait_for_end, daemon=True).start()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("settings", type=Path)
    parser.add_argument("--resume-from", type=Path)
    parser.add_argument("--end-with-stdin", action="store_true")
    options = parser.parse_args()
    if options.end_with_stdin:
        end_with_stdin()
    train(Recipe.read(options.settings), options.resume_from)
    torch.distributed.destroy_process_group()
