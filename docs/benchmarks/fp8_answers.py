"""What fp8 changes in answers: logits, by the kind of layer that is held so, and likeliest tokens.

``PYTHONPATH=. python docs/benchmarks/fp8_answers.py MODEL DATA --out FILE`` gives a model rows that
end with their answers, as training does, and compares the logits at the answers' tokens with those
in bf16: with each kind of layer in fp8 alone, and with all, as ``--weights fp8`` has them.
``FILE`` gets, for each, the relative distance of all logits and how many of the tokens would have
been drawn otherwise after the same text.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from glm4v_patched.data.collate import ConversationCollator
from glm4v_patched.data.rows import read_conversations
from glm4v_patched.engine.implementations import set_implementation
from glm4v_patched.engine.kernels.fp8_linear import Fp8StoredLinear
from glm4v_patched.installed_versions import versions
from glm4v_patched.models.find import find_source
from glm4v_patched.models.loading import LoadedModel, load_with_processor
from glm4v_patched.remote.loss import IGNORE_INDEX


def logits_of_answers(loaded: LoadedModel, conversations: list[list[dict]], rows: int) -> Tensor:
    """``(T, V)`` fp32, of the tokens that are learned."""
    model, processor = loaded
    collate, found = ConversationCollator(processor), []
    for first in range(0, len(conversations), rows):
        batch = collate(conversations[first : first + rows])
        labels = batch.pop("labels")[:, 1:]
        if (pixels := batch.get("pixel_values")) is not None:
            batch["pixel_values"] = pixels.to(model.dtype)
        with torch.no_grad():
            logits = model(**{name: x.to(model.device) for name, x in batch.items()}).logits
        found.append(logits[:, :-1].cpu()[labels != IGNORE_INDEX].float())
    return torch.cat(found)


def kind_of(name: str) -> str:
    """Return the tower and the name of a layer, without what LoRA adds."""
    inner = name.removesuffix(".base_layer").rpartition(".")[2]
    return f"{'tower' if '.vision.' in name else 'language'}.{inner}"


def held(model: str, device: str) -> Iterator[tuple[str, LoadedModel]]:
    """The model with the layers of one kind in fp8, one kind after the other, and with all."""
    base = find_source(model)
    in_fp8 = load_with_processor(base, device, "fp8").model.named_modules()
    names = [name for name, module in in_fp8 if isinstance(module, Fp8StoredLinear)]
    for kind in sorted({*map(kind_of, names)}):
        loaded = load_with_processor(base, device)
        for name in names:
            if kind_of(name) == kind:
                linear = loaded.model.get_submodule(name)
                set_implementation(linear, Fp8StoredLinear)
                linear.quantize_weight(stores_transposed=False)
        yield kind, loaded
    yield "all", load_with_processor(base, device, "fp8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder of a model or of adapters")
    parser.add_argument("data", type=Path, help="rows that end with their answers")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    parser.add_argument("--rows", type=int, default=256, help="of the file, the first ones")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()

    conversations = read_conversations(options.data)[: options.rows]
    exact = logits_of_answers(
        load_with_processor(find_source(options.model), options.device),
        conversations,
        options.batch_size,
    )
    report: dict = {"rows": len(conversations), "tokens": len(exact)}
    report["versions"] = versions(("torch", "transformers", "fa3-fwd"))
    if options.device != "cpu":
        report["gpu"] = torch.cuda.get_device_name()
    for kind, loaded in held(options.model, options.device):
        found = logits_of_answers(loaded, conversations, options.batch_size)
        report[kind] = {
            "relative_distance": ((found - exact).norm() / exact.norm()).item(),
            "other_tokens": int((found.argmax(1) != exact.argmax(1)).sum()),
        }
        print(kind, report[kind], flush=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
