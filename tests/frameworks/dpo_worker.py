"""Two processes run TRL's DPOTrainer under ZeRO-3, one scenario after the other.

Started by test_trl.py with a folder that holds ``model`` (and its processor), ``rows.json`` and
``scenarios.json``; rank 0 writes what happened to ``<name>.pt``.
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset, Features, Image, List, Value
from deepspeed.utils import safe_get_full_fp32_param
from peft import LoraConfig
from transformers import TrainerCallback, set_seed
from trl import DPOConfig, DPOTrainer

from glm4v_patched.remote.checkpointing import CheckpointedLayer
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor
from tests.distributed.strategies import save_on_first, zero_config
from tests.frameworks.trl_script import COMMON

STEPS = 3

AUTO = dict.fromkeys(
    ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
)


class WeightsByStep(TrainerCallback):
    """The adapters before the first step and after each."""

    def __init__(self):
        self.weights = []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 0:
            self.weights.append(adapters(model))

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.weights.append(adapters(model))


def adapters(model) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix("module."): safe_get_full_fp32_param(parameter).clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def preference_set(folder: Path, scenario: dict) -> Dataset:
    message = List({"role": Value("string"), "content": Value("string")})
    features = Features(
        {"images": List(Image()), "prompt": message, "chosen": message, "rejected": message}
    )
    rows = json.loads((folder / "rows.json").read_text())
    if scenario["other_images"]:
        pictures = [row["images"] for row in rows if row["images"]]
        others = iter(pictures[1:] + pictures[:1])
        rows = [row | {"images": next(others)} if row["images"] else row for row in rows]
    return Dataset.from_list(rows, features=features)


def run(scenario: dict, folder: Path) -> dict:
    use_reentrant = scenario["use_reentrant"]
    arguments = DPOConfig(
        **COMMON
        | {
            "max_steps": STEPS,
            "per_device_train_batch_size": 1,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
        },
        optim="adamw_torch",
        deepspeed=zero_config() | AUTO,
        # TRL makes every checkpoint under ZeRO-3 with adapters reentrant that it enables itself;
        # the other kind is enabled below.
        gradient_checkpointing=bool(use_reentrant),
        gradient_checkpointing_kwargs={"use_reentrant": bool(use_reentrant)},
        max_length=None,
        logging_first_step=True,
        seed=0,
    )
    set_seed(0)  # for the adapters, which older versions of TRL make before they seed
    model = GLM4VForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    if use_reentrant is False:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    runs = {"layers": 0, "images": 0}
    for layer in model.modules():
        if isinstance(layer, CheckpointedLayer):
            layer.layer_forward = counted(layer.layer_forward, runs)
    model.transformer.vision.register_forward_pre_hook(
        lambda _, inputs: runs.update(images=runs["images"] + int(inputs[0].any()) * len(inputs[0]))
    )
    by_step = WeightsByStep()
    trainer = DPOTrainer(
        model=model,
        args=arguments,
        train_dataset=preference_set(folder, scenario),
        processing_class=ChatGLMProcessor.from_pretrained(folder / "model"),
        # With biases: without one, the optimizer's group of weights that do not decay is empty,
        # DeepSpeed drops it, and the scheduler of torch 2.13 and transformers 4 misses it.
        peft_config=LoraConfig(r=4, target_modules=["query_key_value"], lora_bias=True),
        callbacks=[by_step],
    )
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": [entry["loss"] for entry in history],
        "weights": by_step.weights,
        "runs": runs,
    }


def counted(layer_forward, runs: dict):
    def forward(*inputs):
        runs["layers"] += 1
        return layer_forward(*inputs)

    return forward


def main() -> None:
    folder = Path(sys.argv[1])
    for scenario in json.loads((folder / "scenarios.json").read_text()):
        result = run(scenario, folder)
        save_on_first(result, folder / f"{scenario['name']}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
