"""A user's script that quantizes glm-4v, saves it and loads it again, without glm4v_patched.

The current folder contains ``model``, with its code, and ``rows.json``: questions about an image,
their right answers, and for each another image, for which the answer is wrong.

- ``quantizer_script.py quantize CODE``: CODE defines ``model``, by a configuration
  (``load(CONFIG)``) or by the quantizer's own functions, which may save it to ``quantized``. Writes
  ``saved`` and ``quantized.json``.
- ``quantizer_script.py reload``: ask the saved model in a fresh process; writes ``reloaded.json``.
"""

import json
import sys
from pathlib import Path

sys.modules["glm4v_patched"] = None  # makes its import fail

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoProcessor  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SUBMODULES = {"vision": "transformer.vision.", "head": "transformer.output_layer"}


def load(config=None, folder: str = "model", dtype: torch.dtype = torch.bfloat16):
    options = {} if config is None else {"quantization_config": config}
    return AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=dtype, device_map=DEVICE, **options
    ).eval()


def prompts(image: str = "image") -> dict[str, torch.Tensor]:
    """Return one batch of all questions, with each row's image of this key."""
    chats = [
        [{"role": "user", "image": row[image], "content": row["question"]}]
        for row in json.loads(Path("rows.json").read_text())
    ]
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "padding": True}
    processor = AutoProcessor.from_pretrained("model", trust_remote_code=True)
    return processor.apply_chat_template(chats, add_generation_prompt=True, **options).to(DEVICE)


@torch.no_grad()
def ask(model) -> dict:
    """Return the logits after each question, and answers for the images and the swapped images."""
    tokenizer = AutoProcessor.from_pretrained("model", trust_remote_code=True).tokenizer
    outputs = {"logits": model(**prompts()).logits[:, -1].float().cpu()}
    for name in ("image", "swapped"):
        batch = prompts(name)
        ids = model.generate(**batch, max_new_tokens=8, do_sample=False)
        texts = tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], True)
        outputs[name] = [text.strip() for text in texts]
    return outputs


def linear_layers(model) -> dict[str, tuple]:
    """Return by module name the classes, dtype and tensors that change if a layer is quantized."""
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
    if saved:  # the quantizer may have freed the model in memory
        saved[0].rename("saved")
    model = load(folder="saved") if saved else scope["model"]
    after, outputs = linear_layers(model), ask(model)
    why_not_saved = ""
    if not saved:
        try:
            model.save_pretrained("saved")
        except Exception as error:  # some quantizers cannot save: the result is still measured
            why_not_saved = f"{type(error).__name__}: {error}"
    counts = {}
    for name in names:
        part = next((p for p, prefix in SUBMODULES.items() if name.startswith(prefix)), "language")
        quantized, total = counts.get(part, (0, 0))
        counts[part] = (quantized + (after.get(name) != before[name]), total + 1)
    torch.save(outputs["logits"], "logits.pt")
    difference = (outputs["logits"] - expected["logits"]).norm() / expected["logits"].norm()
    rows = json.loads(Path("rows.json").read_text())
    more = {"layers": counts, "distance": float(difference), "why_not_saved": why_not_saved}
    write("quantized.json", outputs, rows, **more)


def reload() -> None:
    model = load(folder="saved")
    outputs = ask(model)
    before = torch.load("logits.pt")
    difference = float((outputs["logits"] - before).norm() / before.norm())
    write("reloaded.json", outputs, json.loads(Path("rows.json").read_text()), distance=difference)


def write(path: str, outputs: dict, rows: list[dict], **more) -> None:
    right = {
        name: sum(row["answer"] == text for row, text in zip(rows, outputs[name], strict=True))
        for name in ("image", "swapped")
    }
    answers = outputs["image"]
    values = {"answers": answers, "right": right["image"], "swapped": right["swapped"], **more}
    Path(path).write_text(json.dumps(values))


if __name__ == "__main__":
    quantize(sys.argv[2]) if sys.argv[1] == "quantize" else reload()
