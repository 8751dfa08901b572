"""A user's script with TRL's trainers: ``trl_script.py JOB STEPS LEARNING_RATE SEED``.

Nothing in it knows of glm4v_patched. In the current folder it finds ``model``, which has its code
beside it, and ``data/JOB``, a data set with images, named without ``_lora`` and ``_vllm``. It
leaves ``out``, the whole model that was trained, or, for ``dpo_lora``, which several processes
train under DeepSpeed's ZeRO-3 by ``deepspeed.json``, ``adapter``.
"""

import sys

import torch
import trl
from datasets import load_dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoProcessor,
    TrainerCallback,
    set_seed,
)

COMMON = {"output_dir": "run", "trust_remote_code": True, "max_grad_norm": 1.0, "logging_steps": 1}
COMMON |= {"per_device_train_batch_size": 24, "lr_scheduler_type": "constant_with_warmup"}
COMMON |= {"save_strategy": "no", "report_to": "none"}
COMMON |= {"bf16": False, "use_cpu": True, "disable_tqdm": True}
# Groups of 32 answers to each of 24 questions: of a smaller group, often none is right, and then
# nothing is learned from it.
ONLINE = {"per_device_train_batch_size": 768, "num_generations": 32, "lr_scheduler_type": "linear"}
ONLINE |= {"max_completion_length": 8, "temperature": 1.0, "beta": 0.0}
# vLLM generates, in the training process and on its GPU.
BY_VLLM = {"use_cpu": False, "use_vllm": True, "vllm_mode": "colocate"}
BY_VLLM |= {"vllm_gpu_memory_utilization": 0.2}
# Rows have an image of 1,602 ids with the real model, and TRL cuts them at 1,024.
WHOLE_ROWS = {"max_length": None}
OPTIONS: dict[str, dict] = {
    "SFT": WHOLE_ROWS,
    "DPO": WHOLE_ROWS | {"beta": 0.3},
    "KTO": WHOLE_ROWS | {"beta": 0.3},
    "Reward": WHOLE_ROWS,
    "GRPO": ONLINE,
    "RLOO": ONLINE,
}


def right_answers(completions, answer, **kwargs) -> list[float]:
    """The reward: 1 for the answer of the data set's column ``answer``, and 0 for all others."""
    return [
        float(completion[0]["content"].strip() == wanted)
        for completion, wanted in zip(completions, answer, strict=True)
    ]


class FreshImages(TrainerCallback):
    """vLLM keeps what the tower made of an image, and TRL does not say that the tower learns."""

    def __init__(self, trainer):
        self.engine = trainer.vllm_generation.llm.llm_engine

    def on_step_begin(self, args, state, control, **kwargs):
        self.engine.reset_encoder_cache()


def online_dpo(model, common: dict, kwargs: dict):
    """Two answers to each question: here of a batch in which each question comes 16 times."""
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    data = kwargs["train_dataset"]
    rows = {"train_dataset": data.select([*range(len(data))] * 16)}
    sizes = {"per_device_train_batch_size": len(data) * 16, "max_new_tokens": 8}
    config = OnlineDPOConfig(**common | sizes, temperature=1.0)
    return OnlineDPOTrainer(model, reward_funcs=right_answers, args=config, **kwargs | rows)


def main(job: str, steps: int, learning_rate: float, seed: int) -> None:
    set_seed(seed)
    common = COMMON | {"max_steps": steps, "learning_rate": learning_rate, "seed": seed}
    processor = AutoProcessor.from_pretrained("model", trust_remote_code=True)
    kind_of_job = job.removesuffix("_lora").removesuffix("_vllm")
    rows = load_dataset(f"data/{kind_of_job}")["train"]
    kwargs = {"processing_class": processor, "train_dataset": rows}
    kind, lora = AutoModelForCausalLM, {"task_type": "CAUSAL_LM"}
    labels: dict[str, int] = {}
    if job.startswith("reward"):
        # With this task_type peft trains and saves the new head, `score`, too.
        kind, lora = AutoModelForSequenceClassification, {"task_type": "SEQ_CLS"}
        kwargs["processing_class"], labels = processor.tokenizer, {"num_labels": 1}
    if job == "dpo_lora":
        common |= {"deepspeed": "deepspeed.json", "per_device_train_batch_size": 18}
    if job.endswith("_vllm"):
        common |= BY_VLLM
    model = kind.from_pretrained("model", trust_remote_code=True, dtype=torch.float32, **labels)
    if job.endswith("_lora"):
        kwargs["peft_config"] = LoraConfig(r=8, target_modules="all-linear", **lora)
    if job == "online_dpo":
        trainer = online_dpo(model, common, kwargs)
    else:
        name = "Reward" if kind_of_job == "reward" else kind_of_job.upper()
        config = getattr(trl, f"{name}Config")(**common | OPTIONS[name])
        reward = [right_answers] if OPTIONS[name] is ONLINE else []
        trainer = getattr(trl, f"{name}Trainer")(model, *reward, args=config, **kwargs)
    if job.endswith("_vllm"):
        trainer.add_callback(FreshImages(trainer))
    trainer.train()
    trained = trainer.model
    if job == "dpo_lora":
        trainer.save_model("adapter")  # all processes gather it
    elif job.endswith("_lora"):
        trained = trained.merge_and_unload()
    if trainer.is_world_process_zero():
        if job != "dpo_lora":
            trained.save_pretrained("out")
        processor.save_pretrained("adapter" if job == "dpo_lora" else "out")
        trainer.state.save_to_json("state.json")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
