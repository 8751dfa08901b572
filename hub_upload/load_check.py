"""Loads what is published, asks it and trains it, in a process that has nothing else of ours.

A process of :mod:`verify` runs this file. The package is made impossible to import first, so what
works here works for whoever downloads the repository. Results are printed one by one: a process
that is killed for its memory tells nothing afterwards.
"""

import contextlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

QUESTION = "What is in this image? 你好，世界！\n\tdef f(x):  return x"
# Without weights, the model is one of these widths, with the same vocabulary and images.
SHRUNK = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "kv_channels": 16}
SHRUNK |= {"num_attention_heads": 4, "multi_query_group_num": 2, "skip_logits": True}
SHRUNK_TOWER = {"num_hidden_layers": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128}
STEPS = ["loads", "answers", "trains"]


def check(source: str) -> Iterator[str]:
    """What each of the steps found; raises where one fails."""
    import torch
    import transformers

    def load(auto: str) -> Any:
        """A class of the folder's own."""
        from_pretrained = getattr(transformers, auto).from_pretrained
        loaded = from_pretrained(source, trust_remote_code=True, local_files_only=True)
        module = type(loaded).__module__
        assert module.startswith("transformers_modules."), f"{auto} loads a class of {module}"
        return loaded

    processor, tokenizer = load("AutoProcessor"), load("AutoTokenizer")
    load("AutoImageProcessor")
    ids = tokenizer(QUESTION, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == QUESTION, f"{QUESTION!r} does not survive its ids {ids}"
    if any(Path(source).glob("*.safetensors")):
        model, held = load("AutoModelForCausalLM"), "the weights"
    else:
        config = load("AutoConfig")
        values = config.to_dict() | SHRUNK | {"name_or_path": source, "dtype": "float32"}
        values["vision_config"] = config.vision_config | SHRUNK_TOWER
        from_config = transformers.AutoModelForCausalLM.from_config
        model = from_config(type(config)(**values), trust_remote_code=True)
        held = "2 + 2 layers of width 64 with random weights"
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    yield f"{versions}: {len(tokenizer):,} ids, {held}"

    inputs, other = (inputs_of(processor, seed, model.dtype) for seed in range(2))
    model.eval()
    with torch.no_grad():
        logits = [model(**batch).logits[0, -1].float() for batch in (inputs, other)]
    change = (logits[0] - logits[1]).abs().max().item()
    assert 0 < change < math.inf, f"another image changes logits by {change}"
    with torch.no_grad():  # by the settings of its generation_config.json
        drawn = model.generate(**inputs, max_new_tokens=4)
    number = drawn.shape[1] - inputs["input_ids"].shape[1]
    yield f"{number} tokens; another image changes logits by {change:.1e}"

    model.train()
    # Renamed in transformers 5.23; the old name goes at 6.0.
    renamed = getattr(model, "activation_checkpointing_enable", None)
    (renamed or model.gradient_checkpointing_enable)({"use_reentrant": False})
    loss = model(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    without = [n for n, grad in grads.items() if grad is None or not grad.isfinite().all()]
    assert not without, f"{len(without)} have no finite gradient, such as {without[0]}"
    yield f"loss {loss.item():.3f}, {len(grads):,} gradients, with activation checkpointing"


def inputs_of(processor: Any, seed: int, dtype: Any) -> dict[str, Any]:
    """A question about a drawn image."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    chat = [{"role": "user", "image": Image.fromarray(pixels), "content": QUESTION}]
    options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    return dict(processor.apply_chat_template(chat, tokenize=True, **options).to(dtype))


def main(source: str) -> None:
    """Print a line of JSON after each step, and nothing else."""
    found = check(source)
    for step in STEPS:
        with contextlib.redirect_stdout(sys.stderr):
            told = next(found)
        print(json.dumps([step, "passed", told]), flush=True)


if __name__ == "__main__":
    sys.modules["glm4v_patched"] = None  # type: ignore[assignment]
    try:
        main(sys.argv[1])
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")
