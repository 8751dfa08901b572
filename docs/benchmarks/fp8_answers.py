"""Measure how fp8 weights change logits and greedy tokens, by the kind of layer.

``PYTHONPATH=. python docs/benchmarks/fp8_answers.py MODEL DATA --out FILE`` runs a model on
conversations with their answers, as training does, and compares the logits at the answers' tokens
with those in bf16: with only one kind of layer in fp8, and with all, as in ``--weights fp8``. For
each, ``FILE`` gets the relative distance of all logits, and the number of positions whose most
likely token changes.
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
    """Return the logits of the supervised tokens, ``(tokens, vocabulary)`` in fp32."""
    model, processor = loaded
    collate, supervised = ConversationCollator(processor), []
    for first in range(0, len(conversations), rows):
        batch = collate(conversations[first : first + rows])
        labels = batch.pop("labels")[:, 1:]
        if (pixels := batch.get("pixel_values")) is not None:
            batch["pixel_values"] = pixels.to(model.dtype)
        with torch.no_grad():
            logits = model(**{name: x.to(model.device) for name, x in batch.items()}).logits
        supervised.append(logits[:, :-1].cpu()[labels != IGNORE_INDEX].float())
    return torch.cat(supervised)


def kind_of(name: str) -> str:
    """Return tower and name of a linear layer, without the suffix that LoRA adds."""
    inner = name.removesuffix(".base_layer").rpartition(".")[2]
    return f"{'tower' if '.vision.' in name else 'language'}.{inner}"


def models_in_fp8(model: str, device: str) -> Iterator[tuple[str, LoadedModel]]:
    """Yield the model with one kind of layer in fp8, for each kind, and with all of them."""
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
    parser.add_argument("data", type=Path, help="conversations with answers")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    parser.add_argument("--rows", type=int, default=256, help="number of conversations to use")
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
    for kind, loaded in models_in_fp8(options.model, options.device):
        logits = logits_of_answers(loaded, conversations, options.batch_size)
        report[kind] = {
            "relative_distance": ((logits - exact).norm() / exact.norm()).item(),
            "other_tokens": int((logits.argmax(1) != exact.argmax(1)).sum()),
        }
        print(kind, report[kind], flush=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
