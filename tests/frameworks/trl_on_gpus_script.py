"""A user's script with TRL on several GPUs: ``trl_on_gpus_script.py JOB STEPS RATE ROWS [CACHE]``.

Nothing in it knows of glm4v_patched. In the current folder it finds ``model``, which has its code
beside it, and ``data/JOB``; it leaves ``out``, the model, or for ``dpo`` an ``adapter``, which was
trained under DeepSpeed's ZeRO-3 by ``deepspeed.json``. For ``grpo``, ``CACHE`` says how answers are
drawn: ``dynamic``, ``static``, or ``compiled``, a static cache with a compiled step.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoProcessor, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
from trl_script import COMMON, right_answers

ANSWERS = 16  # drawn for each question


def main(job: str, steps: int, rate: float, rows: int, cache: str = "dynamic") -> None:
    bf16 = job == "dpo"
    common = COMMON | {
        "max_steps": steps,
        "learning_rate": rate,
        "per_device_train_batch_size": rows,
        "bf16": bf16,
        "use_cpu": not torch.cuda.is_available(),
    }
    if job == "dpo":
        lora = LoraConfig(r=8, target_modules="all-linear")
        config = DPOConfig(**common, beta=0.3, max_length=None, deepspeed="deepspeed.json")
    else:
        config = GRPOConfig(
            **common,
            gradient_checkpointing=False,
            num_generations=ANSWERS,
            max_completion_length=8,
            temperature=1.0,
            beta=0.0,
            cache_implementation="dynamic" if cache == "dynamic" else "static",
        )
    set_seed(0)
    processor = AutoProcessor.from_pretrained("model", trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(
        "model", trust_remote_code=True, dtype=torch.bfloat16 if bf16 else torch.float32
    )
    given = {"processing_class": processor, "train_dataset": load_dataset(f"data/{job}")["train"]}
    if job == "dpo":
        trainer = DPOTrainer(model, args=config, **given, peft_config=lora)
    else:
        trainer = GRPOTrainer(model, right_answers, args=config, **given)
        # TRL turns off that transformers compiles the step of a static cache.
        trainer.generation_config.disable_compile = cache != "compiled"
        time_generation(trainer)
    trainer.train()
    trainer.save_model("adapter" if job == "dpo" else "out")
    if int(os.environ.get("RANK", 0)) == 0:
        processor.save_pretrained("adapter" if job == "dpo" else "out")
        trainer.state.save_to_json("state.json")


def time_generation(trainer) -> None:
    """Write the seconds of each call of ``generate`` of the first process to ``generate.json``."""
    generate, seconds = trainer.model.generate, []

    def timed(*inputs, **options):
        started = time.monotonic()
        drawn = generate(*inputs, **options)
        seconds.append(time.monotonic() - started)
        if trainer.accelerator.is_main_process:
            Path("generate.json").write_text(json.dumps(seconds))
        return drawn

    trainer.model.generate = timed


if __name__ == "__main__":
    job, steps, rate, rows, *rest = sys.argv[1:]
    main(job, int(steps), float(rate), int(rows), *rest)
