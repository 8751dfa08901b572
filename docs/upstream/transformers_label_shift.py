"""Compare the loss that a Trainer logs with label smoothing to the model's own loss.

The smoothing is so small that both must be equal.
"""

import sys
import tempfile

import torch
import transformers
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Trainer,
    TrainingArguments,
)


class MyModel(LlamaForCausalLM):
    """A class with a name of its own, as a checkpoint with its own code has it."""


def logged_loss(model, row: dict, **options) -> float:
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=1, learning_rate=0.0, label_smoothing_factor=1e-6, use_cpu=True,
            report_to="none", disable_tqdm=True, **options,
        )  # fmt: skip
        return Trainer(model, arguments, train_dataset=[row] * 8).train().training_loss


transformers.logging.set_verbosity_error()
print("transformers", transformers.__version__, "torch", torch.__version__)
torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
text = LlamaConfig(vocab_size=8, num_attention_heads=2, **sizes)
vision = CLIPVisionConfig(num_attention_heads=2, image_size=8, patch_size=4, **sizes)
ids = torch.tensor([1, 2, 3, 4, 5, 6])
compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
wrong = 0
for title, model, options in (
    ("LlamaForCausalLM", LlamaForCausalLM(text), {}),
    ("LlamaForCausalLM, torch_compile", LlamaForCausalLM(text), compiled),
    (
        "LlavaForConditionalGeneration",
        LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text)),
        {},
    ),
    ("MyModel(LlamaForCausalLM)", MyModel(text), {}),
):
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(50)  # so that a shift changes the loss
        own = model(input_ids=ids[None], labels=ids[None]).loss.item()
    logged = logged_loss(model, {"input_ids": ids, "labels": ids}, **options)
    wrong += abs(logged - own) > 1e-3
    print(f"{title}: the model's loss {own:.4f}, the Trainer's {logged:.4f}")
print(f"{wrong} of 4 losses are wrong")
sys.exit(wrong > 0)
