"""Find which of two answers a saved model prefers, without this package.

Run as a file in a fresh process: ``python preference_judge.py MODEL SETS OUT``. ``SETS`` is JSON:
lists of ``[question, image, first answer, second answer]``; ``OUT`` gets for each a list of bools,
whether the first is preferred. A model with one label scores whole conversations.
"""

import json
import sys
from pathlib import Path

sys.modules["glm4v_patched"] = None  # makes its import fail

import torch  # noqa: E402
from transformers import (  # noqa: E402
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoProcessor,
)

folder, sets, out = sys.argv[1:]
config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
# OpenRLHF saves its own class name.
scores = config.architectures[0] in ("ChatGLMForSequenceClassification", "RewardModel")
kind = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
labels = {"num_labels": 1} if scores else {}
# Training on texts saves only a tokenizer, which AutoProcessor loads, too.
processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
model = kind.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32, **labels).eval()


@torch.no_grad()
def value(question: str, image: str | None, answer: str) -> float:
    message = {"role": "user", "content": question} | ({"image": image} if image else {})
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    prompt = processor.apply_chat_template([message], add_generation_prompt=True, **options)
    answer_ids = processor.tokenizer.encode(f"\n{answer}<|endoftext|>", add_special_tokens=False)
    prompt["input_ids"] = torch.cat((prompt["input_ids"], torch.tensor([answer_ids])), dim=1)
    prompt.pop("position_ids", None)  # they cover the prompt only
    prompt["attention_mask"] = torch.ones_like(prompt["input_ids"])
    logits = model(**prompt).logits
    if scores:
        return logits.item()
    logps = logits[:, -len(answer_ids) - 1 : -1].log_softmax(dim=-1)
    return logps.gather(-1, torch.tensor(answer_ids)[None, :, None]).sum().item()


preferred = [
    [value(q, image, one) > value(q, image, other) for q, image, one, other in pairs]
    for pairs in json.loads(Path(sets).read_text())
]
Path(out).write_text(json.dumps(preferred))
