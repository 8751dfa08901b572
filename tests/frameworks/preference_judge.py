"""Which of two answers a saved model prefers, asked with nothing of this package.

Run as a file in a fresh process: ``python preference_judge.py MODEL PAIRS OUT``. ``PAIRS`` is JSON:
``[[question, picture, one answer, another answer], ...]``; ``OUT`` gets a list of bools, whether
the one is preferred. A model with one label scores whole conversations.
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
    AutoTokenizer,
)


def main(folder: str, pairs: list[list]) -> list[bool]:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    scores = "SequenceClassification" in config.architectures[0]
    kind = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    # Who trains on texts saves no processor.
    processor = (AutoTokenizer if scores else AutoProcessor).from_pretrained(
        folder, trust_remote_code=True
    )
    tokenizer = processor if scores else processor.tokenizer
    model = kind.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()

    @torch.no_grad()
    def value(question: str, picture: str | None, answer: str) -> float:
        asked = {"role": "user", "content": question} | ({"image": picture} if picture else {})
        options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        prompt = processor.apply_chat_template([asked], add_generation_prompt=True, **options)
        said = tokenizer(f"\n{answer}<|endoftext|>", add_special_tokens=False, return_tensors="pt")[
            "input_ids"
        ]
        prompt["input_ids"] = torch.cat((prompt["input_ids"], said), dim=1)
        prompt.pop("position_ids", None)  # of the prompt alone
        prompt["attention_mask"] = torch.ones_like(prompt["input_ids"])
        logits = model(**prompt).logits
        if scores:
            return logits.item()
        logps = logits[:, -said.shape[1] - 1 : -1].log_softmax(dim=-1)
        return logps.gather(-1, said[..., None]).sum().item()

    return [value(q, picture, one) > value(q, picture, other) for q, picture, one, other in pairs]


if __name__ == "__main__":
    preferred = main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))
    Path(sys.argv[3]).write_text(json.dumps(preferred))
