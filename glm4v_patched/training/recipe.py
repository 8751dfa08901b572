"""Fine-tune a glm-4v folder on a file of conversations: what every training process runs.

``python -m torch.distributed.run --nproc_per_node N -m glm4v_patched.training.recipe SETTINGS``,
where ``SETTINGS`` is a JSON file of :class:`Recipe`. :mod:`launch` does that.
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

from ..remote.modeling_chatglm import GLM4VForCausalLM
from ..remote.processing_chatglm import ChatGLMProcessor
from .data import ConversationCollator, read_conversations
from .zero import zero_config


@dataclass(frozen=True)
class Recipe:
    """What to train and how. Paths are folders but for ``data``, a JSONL file."""

    model: str
    data: str
    out: str
    steps: int
    micro_batch: int
    learning_rate: float
    zero_stage: int = 3
    seed: int = 0

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2))


def train(recipe: Recipe) -> None:
    """Train all weights in bf16 with both towers checkpointed; save the model to ``recipe.out``.

    Also writes ``training.json`` there: the loss history, and how many processes took part.
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
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        deepspeed=zero_config(recipe.zero_stage),
        remove_unused_columns=False,
        save_strategy="no",
        report_to="none",
        logging_steps=max(recipe.steps // 50, 1),
        seed=recipe.seed,
    )
    processor = ChatGLMProcessor.from_pretrained(recipe.model)
    model = GLM4VForCausalLM.from_pretrained(recipe.model, dtype=torch.bfloat16)
    model.config.skip_logits = True
    checkpoint_activations(model)
    stop_ids = model.config.eos_token_id
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=read_conversations(recipe.data),
        data_collator=ConversationCollator(processor),
        processing_class=processor,
    )
    trainer.train()
    model.config.skip_logits = False
    # The Trainer put the tokenizer's one end token in place of the model's three.
    model.config.eos_token_id = stop_ids
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


if __name__ == "__main__":
    train(Recipe(**json.loads(Path(sys.argv[1]).read_text())))
    torch.distributed.destroy_process_group()
