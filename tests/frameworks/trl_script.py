"""A user's script with TRL's trainers: ``trl_script.py JOB STEPS LEARNING_RATE SEED``.

Nothing in it knows of glm4v_patched.

In the current folder it finds ``model``, which has its code beside it, and ``data/JOB``, a data set
with pictures; it leaves ``out``, the whole model that was trained.
"""

import sys

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoProcessor,
    set_seed,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

COMMON = {
    "output_dir": "run",
    "trust_remote_code": True,
    "per_device_train_batch_size": 24,
    "lr_scheduler_type": "constant_with_warmup",
    "max_grad_norm": 1.0,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "bf16": False,
    "use_cpu": True,
    "disable_tqdm": True,
}
# Groups of 32 answers to each of 24 questions: of a smaller group, often none is right, and then
# nothing is learned from it.
ONLINE = {
    "per_device_train_batch_size": 768,
    "num_generations": 32,
    "lr_scheduler_type": "linear",
    "max_completion_length": 8,
    "temperature": 1.0,
    "beta": 0.0,
}


def right_answers(completions, answer, **kwargs) -> list[float]:
    """The reward: 1 for the answer of the data set's column ``answer``, and 0 for all others."""
    return [
        float(completion[0]["content"].strip() == wanted)
        for completion, wanted in zip(completions, answer, strict=True)
    ]


def online_dpo(model, common: dict, given: dict):
    """Two answers to each question: here of a batch in which each question comes 16 times."""
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    data = given["train_dataset"]
    rows = {"train_dataset": data.select([*range(len(data))] * 16)}
    config = OnlineDPOConfig(
        **common | {"per_device_train_batch_size": len(data) * 16},
        max_new_tokens=8,
        temperature=1.0,
    )
    trainer = OnlineDPOTrainer(model, reward_funcs=right_answers, args=config, **given | rows)
    # TRL takes a model for one that sees if transformers itself lists its type.
    trainer.is_vision_model = True
    return trainer


def main(job: str, steps: int, learning_rate: float, seed: int) -> None:
    set_seed(seed)
    common = COMMON | {"max_steps": steps, "learning_rate": learning_rate, "seed": seed}
    processor = AutoProcessor.from_pretrained("model", trust_remote_code=True)
    given = {"processing_class": processor, "train_dataset": load_dataset(f"data/{job}")["train"]}
    if job == "reward":
        model = AutoModelForSequenceClassification.from_pretrained(
            "model", trust_remote_code=True, dtype=torch.float32, num_labels=1
        )
        given["processing_class"] = processor.tokenizer
        trainer = RewardTrainer(model, args=RewardConfig(**common, max_length=None), **given)
    else:
        model = AutoModelForCausalLM.from_pretrained(
            "model", trust_remote_code=True, dtype=torch.float32
        )
        # Rows have an image of 1,602 ids with the real model, and TRL cuts them at 1,024.
        whole_rows = common | {"max_length": None}
        if job == "sft":
            trainer = SFTTrainer(model, args=SFTConfig(**whole_rows), **given)
        elif job == "sft_lora":
            lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
            trainer = SFTTrainer(model, args=SFTConfig(**whole_rows), **given, peft_config=lora)
        elif job == "dpo":
            trainer = DPOTrainer(model, args=DPOConfig(**whole_rows, beta=0.3), **given)
        elif job == "kto":
            trainer = KTOTrainer(model, args=KTOConfig(**whole_rows, beta=0.3), **given)
        elif job == "grpo":
            config = GRPOConfig(**common | ONLINE)
            trainer = GRPOTrainer(model, right_answers, args=config, **given)
        elif job == "rloo":
            config = RLOOConfig(**common | ONLINE)
            trainer = RLOOTrainer(model, right_answers, args=config, **given)
        elif job == "online_dpo":
            trainer = online_dpo(model, common, given)
        else:
            raise ValueError(f"there is no job {job}")
    trainer.train()
    trained = trainer.model
    if job == "sft_lora":
        trained.save_pretrained("adapter")
        trained = trained.merge_and_unload()
    trained.save_pretrained("out")
    processor.save_pretrained("out")
    trainer.state.save_to_json("state.json")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
