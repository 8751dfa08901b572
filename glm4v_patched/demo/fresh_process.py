"""Answer questions about images with saved models, without this package.

The demo runs this script in a fresh process: ``python fresh_process.py REQUESTS ANSWERS``. The
script first makes the package unimportable, so a model that works here works for everybody who
downloads its folder. When its standard input closes, the file ``REQUESTS`` has the JSON
``[{"model": folder, "prompts": [messages, ...]}, ...]``, and the script writes
``[[answer, ...], ...]`` to the file ``ANSWERS``.
"""

import json
import sys
from pathlib import Path

sys.modules["glm4v_patched"] = None  # type: ignore[assignment]  # makes its import fail

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoProcessor  # noqa: E402
from transformers.utils.logging import disable_progress_bar  # noqa: E402

BATCH_SIZE = 32
MAX_NEW_TOKENS = 32


def answer_prompts(folder: str, prompts: list[list[dict]]) -> list[str]:
    """Return the greedy answers of the model in ``folder`` to prompts in chat format."""
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    if torch.cuda.is_available():
        model = model.cuda()
    answers = []
    for start in range(0, len(prompts), BATCH_SIZE):
        batch = processor.apply_chat_template(
            prompts[start : start + BATCH_SIZE],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            padding=True,
        ).to(model.device)
        with torch.no_grad():
            ids = model.generate(**batch, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        new_ids = ids[:, batch["input_ids"].shape[1] :]
        texts = processor.batch_decode(new_ids, skip_special_tokens=True)
        answers += [text.strip() for text in texts]
    return answers


if __name__ == "__main__":
    disable_progress_bar()  # loading a tiny model needs none
    sys.stdin.read()  # until the requests are written
    requests = json.loads(Path(sys.argv[1]).read_text())
    replies = [answer_prompts(request["model"], request["prompts"]) for request in requests]
    Path(sys.argv[2]).write_text(json.dumps(replies, ensure_ascii=False))
