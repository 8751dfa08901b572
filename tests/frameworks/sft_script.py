"""A user's script: LoRA on both towers of glm-4v, with TRL. Nothing in it knows of glm4v_patched.

It finds ``published``, the model's repository, and ``images``, a data set; it leaves ``adapter``
and ``merged``.
"""

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoProcessor, set_seed
from trl import SFTConfig, SFTTrainer

set_seed(0)  # older versions of TRL make adapters before they seed
model = AutoModelForCausalLM.from_pretrained(
    "published", trust_remote_code=True, dtype=torch.float32
)
processor = AutoProcessor.from_pretrained("published", trust_remote_code=True)
trainer = SFTTrainer(
    model=model,
    processing_class=processor,
    train_dataset=load_dataset("images", split="train"),
    peft_config=LoraConfig(r=8, target_modules="all-linear"),
    args=SFTConfig(
        output_dir="adapter",
        max_steps=80,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        gradient_checkpointing=True,
        max_length=None,  # an image of the real model is 1,602 ids long, TRL's default is 1,024
        logging_steps=10,
        bf16=False,
        use_cpu=True,
        report_to="none",
    ),
)
trainer.train()
trainer.save_model()
merged = trainer.model.merge_and_unload()
merged.save_pretrained("merged")
processor.save_pretrained("merged")
