"""Fine-tune a glm-4v folder on a file of conversations: what every training process runs.

``python -m torch.distributed.run --nproc_per_node N -m glm4v_patched.finetune.trainer SETTINGS``,
where ``SETTINGS`` is a JSON file of :class:`Recipe`; ``--resume-from CHECKPOINT`` continues a run.
:mod:`launch` does that.
"""

import argparse
import hashlib
import json
import os
import sys
import threading
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed
from transformers.dynamic_module_utils import custom_object_save

from ..data.collate import ConversationCollator
from ..data.feature_cache import TowerFeatures
from ..data.formats import read_conversations
from ..data.packing import PackingCollator, pack_conversations
from ..remote.configuration_chatglm import ChatGLMConfig
from ..remote.modeling_chatglm import GLM4VForCausalLM
from ..remote.processing_chatglm import ChatGLMProcessor
from ..training.activations import checkpoint_layers
from ..training.choices import (
    check_optimizer,
    check_policy,
    check_trained,
    gathers_whole_layers,
    trains_tower,
)
from ..training.compilation import compile_layers
from ..training.gathering import gather_whole_layers
from ..training.gradient_norm import take_norms_in_place
from ..training.memory import Kept, Training, choose_kept, choose_offload, free_memory
from ..training.pacing import limit_run_ahead
from ..training.weights import hold_in_fp32, loaded_in_4_bits, select_weights
from ..training.zero import zero_config
from .checkpoints import CompletionMarker, choose_checkpoint, require_same_settings

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# What a continued run may change: where things are kept, how often they are saved, and what is
# computed twice (under ZeRO-3, to or from selective policies, that changes the rounding).
FREE_WHEN_RESUMING = {"model", "revision", "data", "out", "save_steps", "keep_checkpoints"}
FREE_WHEN_RESUMING |= {"reuse_features", "tower", "language"}

# The Trainer's names.
OPTIMIZERS = {"adamw": "adamw_torch", "adamw_8bit": "adamw_bnb_8bit"}


@dataclass(frozen=True)
class Recipe:
    """What to train and how. Paths are folders but for ``data``, a JSONL file.

    ``model`` may also be an id of the Hub, at ``revision``.

    ``trained`` is one of :data:`choices.TRAINED`. Of LoRA, with adapters of rank ``lora_rank``,
    ``out`` gets the adapters alone. ``tower`` and ``language`` are policies of
    :func:`activations.checkpoint_layers`; "auto" is the fastest for which the GPUs' free memory
    suffices (:mod:`memory`; "full" on a CPU). ``compile`` compiles layers (:mod:`compilation`).
    ``optimizer`` is one of :data:`choices.OPTIMIZERS`; ``offload`` keeps its states and the fp32
    weights on the CPU, "auto" does so where nothing else fits.

    ``zero_stage`` 0 is a single process without DeepSpeed, which qlora asks for. What is trained is
    then held in fp32, and computed with under autocast where ``precision`` is "bf16".

    With ``save_steps``, a checkpoint to continue from is saved to ``out`` every so many steps (not
    at the last one, where the model itself is saved); the newest ``keep_checkpoints`` are kept, or
    all of them. ``precision`` is "bf16" or "fp32", of the computation and of what is saved.

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
    trained: str = "full"
    lora_rank: int = 8
    tower: str = "auto"
    language: str = "auto"
    compile: bool = False
    optimizer: str = "adamw"
    offload: bool | str = "auto"
    revision: str | None = None

    def __post_init__(self):
        if self.precision not in DTYPES:
            raise ValueError(
                f"precision is {self.precision!r}; expected one of {', '.join(DTYPES)}"
            )
        check_trained(self.trained)
        check_policy("tower", self.tower, or_auto=True)
        check_policy("language", self.language, or_auto=True)
        check_optimizer(self.optimizer)
        if self.offload not in (True, False, "auto"):
            raise ValueError(f"offload is {self.offload!r}; expected true, false or 'auto'")
        if self.offload is True and self.zero_stage == 0:
            raise ValueError(
                "offload with zero_stage 0: ZeRO offloads the optimizer; expected zero_stage 1, 2 "
                "or 3, or offload to be false"
            )
        if self.offload is True and self.optimizer == "adamw_8bit":
            raise ValueError(
                "offload with adamw_8bit, which runs on a GPU: expected optimizer to be adamw, or "
                "offload to be false"
            )
        if not isinstance(self.compile, bool):
            raise ValueError(f"compile is {self.compile!r}; expected true or false")
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"zero_stage is {self.zero_stage!r}; expected 0, 1, 2 or 3")
        if self.trained == "qlora" and self.zero_stage != 0:
            raise ValueError(
                f"qlora with zero_stage {self.zero_stage}: weights of 4 bits cannot be sharded; "
                "expected zero_stage 0, and one process"
            )
        if self.revision is not None and (not self.revision or Path(self.model).is_dir()):
            raise ValueError(
                f"revision is {self.revision!r} of {self.model}; expected null for a folder, and "
                "a branch, tag or commit for an id of the Hub"
            )
        if not isinstance(self.reuse_features, bool | str) or self.reuse_features == "":
            raise ValueError(
                f"reuse_features is {self.reuse_features!r}; expected true, false or a folder"
            )
        if self.reuse_features and trains_tower(self.trained):
            raise ValueError(
                f"{self.trained} trains the vision tower, whose features change with every step "
                "and cannot be reused; expected trained to be lm, lora_lm or qlora, or "
                "reuse_features to be false"
            )
        if self.lora_rank < 1:
            raise ValueError(f"lora_rank is {self.lora_rank}; expected at least 1")
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
            ValueError: none can be chosen, it is of a run with other settings, or several processes
                are to train without ZeRO.
        """
        if self.zero_stage == 0 and processes != 1:
            raise ValueError(
                f"zero_stage 0 on {processes} processes: without ZeRO a single one trains; "
                "expected --processes 1, or zero_stage 1, 2 or 3"
            )
        checkpoint = choose_checkpoint(Path(self.out), resume)
        if checkpoint is not None:
            defaults = {f.name: f.default for f in fields(self) if f.default is not MISSING}
            defaults = {k: v for k, v in defaults.items() if k not in FREE_WHEN_RESUMING}
            require_same_settings(checkpoint, self.settings(processes), defaults)
        return checkpoint

    def settings(self, processes: int) -> dict:
        """What decides the course of training, and the same for a run and its continuation."""
        decisive = {k: v for k, v in asdict(self).items() if k not in FREE_WHEN_RESUMING}
        digest = hashlib.sha256(Path(self.data).read_bytes()).hexdigest()
        return decisive | {"processes": processes, "sha256 of data": digest}

    def chosen_by_memory(
        self, config: ChatGLMConfig, row_length: int, images: int, processes: int, free: float
    ) -> tuple["Recipe", float]:
        """This recipe with a choice for what is "auto", and how many weights may stay gathered
        (:func:`zero_config`).

        Args:
            row_length: Positions of the longest row, images included.
            images: The most images in a row.
            free: Bytes on each GPU, 0 for none.
        """
        training = Training(
            trained=self.trained,
            micro_batch=self.micro_batch,
            row_length=row_length,
            images_per_row=images,
            zero_stage=self.zero_stage,
            processes=processes,
            optimizer=self.optimizer,
            compiled=self.compile,
        )
        offload = self.offload
        if offload == "auto":
            may = free > 0 and self.zero_stage > 0 and self.optimizer != "adamw_8bit"
            offload = may and choose_offload(config, training, free)
        training = replace(training, offload=offload)
        kept = choose_kept(config, training, free, Kept(self.tower, self.language, None))
        chosen = replace(self, tower=kept.tower, language=kept.language, offload=offload)
        return chosen, kept.gathered

    def deepspeed_config(self, kept_gathered: float = 1e9) -> dict | None:
        """What DeepSpeed is given; None where it takes no part."""
        if self.zero_stage == 0:
            return None
        return zero_config(
            self.zero_stage,
            self.precision == "bf16",
            whole_layers=self.gathers_whole_layers,
            kept_gathered=kept_gathered,
            offload_optimizer=self.offload is True,
        )

    @property
    def gathers_whole_layers(self) -> bool:
        return gathers_whole_layers(self.zero_stage, self.compile, self.tower, self.language)

    def features_of(self, model: nn.Module) -> TowerFeatures | None:
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

    Adapters get the code beside them, with which a process without this package loads their base.
    With ``features``, pictures that they know do not go through the tower.

    Args:
        model: A glm-4v, or peft's around one.
    """

    def __init__(self, model: nn.Module, features: TowerFeatures | None = None, **options):
        self.features = features
        if features is not None:
            options["data_collator"] = features.collator(options["data_collator"])
        self.has_adapters = hasattr(model, "get_base_model")
        self.inner: GLM4VForCausalLM = model.get_base_model() if self.has_adapters else model
        if self.has_adapters:
            # To see whether embeddings have grown, peft would ask the Hub for its newest config.
            model.save_pretrained = partial(model.save_pretrained, save_embedding_layers=False)
        # The Trainer puts the tokenizer's one end token in place of the model's three.
        self.stop_ids = self.inner.config.eos_token_id
        super().__init__(model=model, **options)
        self.inner.config.skip_logits = True

    def create_optimizer(self, *model) -> torch.optim.Optimizer:
        """The Trainer's, without groups in which nothing is trained.

        Of LoRA all weights decay and those that do not are none. DeepSpeed drops such a group, the
        scheduler keeps a rate for it, and the first step ends in "zip() argument 2 is longer".
        """
        optimizer = super().create_optimizer(*model)
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        return optimizer

    def compute_loss(self, model, inputs, return_outputs=False, **options):
        if self.features is None:
            return super().compute_loss(model, inputs, return_outputs, **options)
        inputs = self.features.replace_pictures(inputs)
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **options)
        self.features.keep(outputs)
        return (loss, outputs) if return_outputs else loss

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        config = self.inner.config
        config.eos_token_id = self.stop_ids
        config.skip_logits = False
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            config.skip_logits = True
        if self.has_adapters and self.args.should_save:
            custom_object_save(self.inner, output_dir or self.args.output_dir)


def train(recipe: Recipe, checkpoint: Path | None = None) -> None:
    """Train what the recipe says; save the model, or the adapters, to ``recipe.out``.

    Also writes ``training.json`` there, last: the loss history, and how many processes took part.

    Args:
        checkpoint: Complete checkpoint in ``recipe.out`` to continue from. In fp32 on a CPU the
            losses and weights are those of a run that was never stopped, to the bit.

    Raises:
        ValueError: :meth:`Recipe.starting_point` says when.
    """
    processor = ChatGLMProcessor.from_pretrained(recipe.model, revision=recipe.revision or "main")
    conversations, collator = read_conversations(recipe.data), ConversationCollator(processor)
    if recipe.pack_to is not None:
        conversations = pack_conversations(conversations, processor, recipe.pack_to)
        collator = PackingCollator(processor)
    chosen, kept_gathered = _for_this_machine(recipe, conversations, processor)
    # Before the model: it makes from_pretrained load straight into the shards of ZeRO-3.
    arguments = TrainingArguments(
        output_dir=recipe.out,
        max_steps=recipe.steps,
        per_device_train_batch_size=recipe.micro_batch,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(recipe.steps // 20, 1),
        max_grad_norm=1.0,
        optim=OPTIMIZERS[recipe.optimizer],
        bf16=recipe.precision == "bf16",
        use_cpu=not torch.cuda.is_available(),
        deepspeed=chosen.deepspeed_config(kept_gathered),
        remove_unused_columns=False,
        save_strategy="no" if recipe.save_steps is None else "steps",
        save_steps=recipe.save_steps or 0,
        report_to="none",
        logging_steps=recipe.logging_steps(),
        seed=recipe.seed,
    )
    recipe.starting_point(arguments.world_size, checkpoint or False)
    set_seed(recipe.seed)  # adapters are random
    model = build_model(chosen)
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
    if recipe.zero_stage == 0:
        _round_trained(model, DTYPES[recipe.precision])
    trainer.save_model()
    if trainer.is_world_process_zero():
        history = [
            {"step": entry["step"], "loss": entry["loss"]}
            for entry in trainer.state.log_history
            if "loss" in entry
        ]
        report = {"history": history, "world_size": arguments.world_size}
        Path(recipe.out, "training.json").write_text(json.dumps(report, indent=2))


def _for_this_machine(
    recipe: Recipe, rows: list, processor: ChatGLMProcessor
) -> tuple[Recipe, float]:
    """:meth:`Recipe.chosen_by_memory` for these rows; all processes come to the same."""
    if "auto" not in (recipe.tower, recipe.language, recipe.offload):
        return recipe, 1e9
    config = ChatGLMConfig.from_pretrained(recipe.model, revision=recipe.revision or "main")
    if not torch.cuda.is_available():
        return recipe.chosen_by_memory(config, 1, 1, 1, free_memory())
    if recipe.zero_stage:
        import deepspeed

        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        deepspeed.init_distributed()
    processes = int(os.environ.get("WORLD_SIZE", 1))
    longest = longest_row(rows, processor)
    chosen, gathered = recipe.chosen_by_memory(config, *longest, processes, free_memory())
    if int(os.environ.get("RANK", 0)) == 0:
        choice = f"tower {chosen.tower}, language {chosen.language}, offload {chosen.offload}"
        print(f"by memory, for rows of {longest[0]} positions: {choice}", flush=True)
    return chosen, gathered


def longest_row(rows: list, processor: ChatGLMProcessor) -> tuple[int, int]:
    """Positions of the longest row, and the most images in one.

    Args:
        rows: Conversations, or what :func:`pack_conversations` made of them.
    """
    count = ConversationCollator(processor).count
    packed = [row if isinstance(row[0], list) else [row] for row in rows]
    counts = [[count(conversation) for conversation in row] for row in packed]
    totals = [[sum(kind) for kind in zip(*row, strict=True)] for row in counts]
    positions, images = zip(*totals, strict=True)
    return max(positions), max(images)


def build_model(recipe: Recipe) -> nn.Module:
    """The model, ready for the Trainer: loaded, what is not trained frozen, policies set, compiled.

    "auto" must have been decided (:meth:`Recipe.chosen_by_memory`).
    Under ZeRO-3 the weights are loaded straight into shards if ``TrainingArguments`` with the
    recipe's ``deepspeed_config`` were made before.
    """
    dtype = DTYPES[recipe.precision]
    options = {"dtype": dtype, "revision": recipe.revision or "main"}
    if recipe.trained == "qlora":
        options |= loaded_in_4_bits(dtype, "cuda:0" if torch.cuda.is_available() else "cpu")
    model = GLM4VForCausalLM.from_pretrained(recipe.model, **options)
    model = select_weights(model, recipe.trained, recipe.lora_rank)
    if recipe.revision is not None and hasattr(model, "peft_config"):
        model.peft_config["default"].revision = recipe.revision  # of the base
    if recipe.zero_stage == 0:
        hold_in_fp32(model)
    checkpoint_layers(model, recipe.tower, recipe.language)
    if recipe.compile:
        compile_layers(model)
    if recipe.gathers_whole_layers:
        gather_whole_layers(model)
    if recipe.zero_stage == 3:
        limit_run_ahead(model)
        take_norms_in_place(model)
    return model


def _round_trained(model: nn.Module, dtype: torch.dtype) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


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


def leave() -> None:
    """End this process without waiting for threads of DeepSpeed and inductor, when all is saved.

    They may be killed by Python half-way at its end, which aborts a process that has done its work.
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("settings", type=Path)
    parser.add_argument("--resume-from", type=Path)
    parser.add_argument("--end-with-stdin", action="store_true")
    options = parser.parse_args()
    if options.end_with_stdin:
        end_with_stdin()
    train(Recipe.read(options.settings), options.resume_from)
    leave()
