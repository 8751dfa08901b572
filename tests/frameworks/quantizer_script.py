"""A user's script: quantize glm-4v, save it, and load it again. Nothing in it knows of
glm4v_patched.

In the current folder it finds ``model``, which has its code beside it, and ``rows.json``: questions
about an image, their right answers, and for each another image, of which the answer is wrong.

- ``quantizer_script.py quantize CODE``: CODE makes ``model``, by a configuration (``load(CONFIG)``)
  or by the quantizer's own functions. These may save it into ``quantized``. It leaves ``saved`` and
  ``quantized.json``.
- ``quantizer_script.py reload``: ask what was saved, in a fresh process; leaves ``reloaded.json``.
"""

import json
import sys
from pathlib import Path

sys.modules["glm4v_patched"] = None  # makes its import fail

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoProcessor  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PARTS = {"vision": "transformer.vision.", "head": "transformer.output_layer"}


def load(config=None, folder: str = "model", dtype: torch.dtype = torch.bfloat16):
    options = {} if config is None else {"quantization_config": config}
    return AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=dtype, device_map=DEVICE, **options
    ).eval()


def prompts(image: str = "image") -> dict[str, torch.Tensor]:
    """One batch of all questions."""
    asked = [
        [{"role": "user", "image": row[image], "content": row["question"]}]
        for row in json.loads(Path("rows.json").read_text())
    ]
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "padding": True}
    processor = AutoProcessor.from_pretrained("model", trust_remote_code=True)
    return processor.apply_chat_template(asked, add_generation_prompt=True, **options).to(DEVICE)


@torch.no_grad()
def ask(model) -> dict:
    """Logits behind each question, and answers to the images and to the swapped images."""
    tokenizer = AutoProcessor.from_pretrained("model", trust_remote_code=True).tokenizer
    found = {"logits": model(**prompts()).logits[:, -1].float().cpu()}
    for name in ("image", "swapped"):
        batch = prompts(name)
        ids = model.generate(**batch, max_new_tokens=8, do_sample=False)
        texts = tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], True)
        found[name] = [text.strip() for text in texts]
    return found


def linear_layers(model) -> dict[str, tuple]:
    """By name, what tells a quantized layer from another: classes, and names of its tensors."""
    layers = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        tensors = [*module._parameters, *module._buffers]
        layers[name] = (type(module), type(weight), getattr(weight, "dtype", None), tensors)
    return layers


def quantize(code: str) -> None:
    plain = load()
    names = [n for n, module in plain.named_modules() if isinstance(module, torch.nn.Linear)]
    before, expected = linear_layers(plain), ask(plain)
    scope = {"load": load, "prompts": prompts, "torch": torch}
    exec(code, scope)
    saved = [path.parent for path in Path().glob("quantized/**/config.json")]
    if saved:  # by the quantizer, which may leave nothing of the model in memory
        saved[0].rename("saved")
    model = load(folder="saved") if saved else scope["model"]
    after, found = linear_layers(model), ask(model)
    why_not_saved = ""
    if not saved:
        try:
            model.save_pretrained("saved")
        except Exception as error:  # some quantizers cannot save: the result is still measured
            why_not_saved = f"{type(error).__name__}: {error}"
    counts = {}
    for name in names:
        part = next((p for p, prefix in PARTS.items() if name.startswith(prefix)), "language")
        done, every = counts.get(part, (0, 0))
        counts[part] = (done + (after.get(name) != before[name]), every + 1)
    torch.save(found["logits"], "logits.pt")
    difference = (found["logits"] - expected["logits"]).norm() / expected["logits"].norm()
    rows = json.loads(Path("rows.json").read_text())
    more = {"layers": counts, "distance": float(difference), "why_not_saved": why_not_saved}
    write("quantized.json", found, rows, **more)


def reload() -> None:
    model = load(folder="saved")
    found = ask(model)
    before = torch.load("logits.pt")
    difference = float((found["logits"] - before).norm() / before.norm())
    write("reloaded.json", found, json.loads(Path("rows.json").read_text()), distance=difference)


def write(path: str, found: dict, rows: list[dict], **more) -> None:
    right = {
        name: sum(row["answer"] == text for row, text in zip(rows, found[name], strict=True))
        for name in ("image", "swapped")
    }
    answers = found["image"]
    values = {"answers": answers, "right": right["image"], "swapped": right["swapped"], **more}
    Path(path).write_text(json.dumps(values))


if __name__ == "__main__":
    quantize(sys.argv[2]) if sys.argv[1] == "quantize" else reload()
