"""A trainer is assembled of samples made in memory as of those of a recipe."""

import torch

from glm4v_patched.engine.options import EngineOptions
from glm4v_patched.engine.prepare import prepare_model
from glm4v_patched.finetune.assembly import build_trainer, init_training
from glm4v_patched.finetune.training_arguments import LoopOptions
from tests.helpers.tiny import text, tiny_model

DECIDED = {"tower": "full", "language": "full", "offload": False, "compile": False}


def test_samples_in_memory_are_trained_without_a_recipe(tmp_path):
    options = EngineOptions(
        trained="lm", zero_stage=0, precision="fp32", stage3_max_live_parameters=0, **DECIDED
    )
    arguments_given = {
        "use_cpu": True,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
    }
    arguments_given |= {
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    arguments = init_training(
        options, {"output_dir": str(tmp_path), "remove_unused_columns": False} | arguments_given
    )
    ids = torch.tensor(text(8))
    trainer = build_trainer(
        lambda: prepare_model(options, lambda **_: tiny_model().float()),
        arguments,
        LoopOptions(),
        train_dataset=[{"input_ids": ids, "labels": ids}] * 24,
        data_collator=lambda rows: {name: torch.stack([r[name] for r in rows]) for name in rows[0]},
    )
    trainer.train()
    first, *_, last = (entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    assert trainer.state.global_step == 3 and last < first
