"""Build a small model by the code of a built folder, ask it and train it one step.

:mod:`checks` runs this file in a process that cannot import our package, so what works here works
for everyone who downloads the repository.
"""

import contextlib
import math
import sys
from typing import Any

TEST_QUESTION = "What is in this image? 你好，世界！\n\tdef f(x):  return x"
# Sizes of the small model; vocabulary and image size are the folder's. Loading weights of the real
# size would take longer and show no more than the check of their names and shapes.
TINY_SIZES = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "kv_channels": 16}
TINY_SIZES |= {"num_attention_heads": 4, "multi_query_group_num": 2, "skip_logits": True}
TINY_TOWER = {"num_hidden_layers": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128}


def run(source: str) -> str:
    """Load, answer and train; return a summary.

    Args:
        source: Folder of the published model.
    """
    import torch
    import transformers

    def load(auto: str) -> Any:
        """Load with the auto class of transformers that ``auto`` names, by the folder's code."""
        from_pretrained = getattr(transformers, auto).from_pretrained
        loaded = from_pretrained(source, trust_remote_code=True, local_files_only=True)
        module = type(loaded).__module__
        assert module.startswith("transformers_modules."), (
            f"{auto} loaded a class of {module}, not the folder's own"
        )
        return loaded

    processor, tokenizer = load("AutoProcessor"), load("AutoTokenizer")
    load("AutoImageProcessor")
    ids = tokenizer(TEST_QUESTION, add_special_tokens=False)["input_ids"]
    decoded = tokenizer.decode(ids)
    assert decoded == TEST_QUESTION, f"{TEST_QUESTION!r} becomes {decoded!r} after ids {ids}"
    config = load("AutoConfig")
    values = config.to_dict() | TINY_SIZES | {"name_or_path": source, "dtype": "float32"}
    values["vision_config"] = config.vision_config | TINY_TOWER
    from_config = transformers.AutoModelForCausalLM.from_config
    model = from_config(type(config)(**values), trust_remote_code=True)
    model.generation_config = transformers.GenerationConfig.from_pretrained(source)

    inputs, other = (make_inputs(processor, seed, model.dtype) for seed in range(2))
    model.eval()
    with torch.no_grad():
        logits = [model(**batch).logits[0, -1].float() for batch in (inputs, other)]
    change = (logits[0] - logits[1]).abs().max().item()
    assert 0 < change < math.inf, f"another image changes the logits by {change}"
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=4)
    num_tokens = output.shape[1] - inputs["input_ids"].shape[1]

    model.train()
    # transformers 5.23 renamed this method; 6.0 removes the old name.
    enable_checkpointing = getattr(model, "activation_checkpointing_enable", None)
    (enable_checkpointing or model.gradient_checkpointing_enable)({"use_reentrant": False})
    loss = model(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    bad = [n for n, grad in grads.items() if grad is None or not grad.isfinite().all()]
    assert not bad, f"{len(bad)} weights have no finite gradient, such as {bad[0]}"
    return (
        f"transformers {transformers.__version__}, torch {torch.__version__}: "
        f"{len(tokenizer):,} token ids; answered with {num_tokens} tokens; another image changes "
        f"the logits by {change:.1e}; loss {loss.item():.3f}, {len(grads):,} gradients, with "
        "activation checkpointing"
    )


def make_inputs(processor: Any, seed: int, dtype: Any) -> dict[str, Any]:
    """Return model inputs for a question about a random image.

    Args:
        dtype: dtype of the pixel values.
    """
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    chat = [{"role": "user", "image": Image.fromarray(pixels), "content": TEST_QUESTION}]
    options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    return dict(processor.apply_chat_template(chat, tokenize=True, **options).to(dtype))


if __name__ == "__main__":
    sys.modules["glm4v_patched"] = None  # type: ignore[assignment]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            summary = run(sys.argv[1])
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")
    print(summary)
