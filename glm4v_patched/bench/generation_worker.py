"""Measures generation: the process that ``generation.py`` starts.

``python -m glm4v_patched.bench.generation_worker SETTINGS OUT``.
"""

import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..installed_versions import versions


def measure_batches(settings: dict, out: Path) -> None:
    """Build the model, measure every batch, and write a row after each."""
    device = torch.device(settings["device"])
    torch.manual_seed(0)
    bandwidth = copy_bandwidth(device)
    model = build(settings)
    weights = weight_bytes_per_step(model)
    same = ("new_tokens", "prompt_tokens", "cache")
    common: dict[str, Any] = {name: settings[name] for name in same}
    common |= {"device": device_label(device), "weights_gb": weights / 1e9}
    common["bandwidth_gb_s"] = bandwidth / 1e9
    common["versions"] = versions(settings["packages"])
    rows: list[dict] = []
    for batch in settings["batch"]:
        row = {"batch": batch, **common}
        try:
            row |= measure_batch(model, settings, batch, device)
            row["bandwidth_share"] = weights * row["steps_per_s"] / bandwidth
        except torch.OutOfMemoryError as error:
            row["error"] = f"out of memory: {error}"[:300]
        rows.append(row)
        out.write_text(json.dumps(rows))


def build(settings: dict) -> Any:
    """Ours, with random weights in bf16, made on the device; fp32 on a CPU. Those of the layers are
    then held as the settings say, one after the other."""
    from ..engine.trainable import build_random_model
    from ..models.loading import build_on_device
    from ..remote.configuration_chatglm import ChatGLMConfig

    file = settings["config"]
    sizes = json.loads(Path(file).read_text(encoding="utf-8")) if file else {}
    device = settings["device"]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device(device):
        build = partial(build_random_model, ChatGLMConfig(**sizes), dtype=dtype)
        model = build_on_device(build, device, settings["weights"])
    return model.eval().requires_grad_(False)


def measure_batch(model: Any, settings: dict, batch: int, device: torch.device) -> dict:
    """Seconds to the first token, and tokens a second after it."""
    inputs = image_prompts(model.config, settings, batch, device)
    new, caches, positions = settings["new_tokens"], None, 0
    if settings["cache"] != "dynamic":
        from ..inference.decoding.static_cache import StaticCaches

        caches = StaticCaches(model, length_multiple=256)
        images = model.config.vision.num_image_tokens + 2
        positions = images + settings["prompt_tokens"] + new

    def seconds(tokens: int) -> float:
        synchronize(device)
        began = time.perf_counter()
        given = {} if caches is None else caches.generate_kwargs(batch, positions)
        with torch.no_grad():
            ids = model.generate(
                **inputs, **given, max_new_tokens=tokens, do_sample=False, eos_token_id=None,
                pad_token_id=model.config.pad_token_id,
            )  # fmt: skip
        synchronize(device)
        assert ids.shape[1] == inputs["input_ids"].shape[1] + tokens
        return time.perf_counter() - began

    # At first a step is recorded.
    ready = seconds(min(6, new)) + seconds(min(6, new))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    firsts = [seconds(1) for _ in range(settings["repeats"])]
    wholes = [seconds(new) for _ in range(settings["repeats"])]
    first, whole = statistics.median(firsts), statistics.median(wholes)
    if whole <= first:
        raise RuntimeError(
            f"{new} tokens took {whole:.3f} s and the first {first:.3f} s: the machine is too busy "
            "to be measured; ask for more --new-tokens"
        )
    steps_per_s = (new - 1) / (whole - first)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    return {
        "tokens_per_s": batch * steps_per_s,
        "steps_per_s": steps_per_s,
        "first_token_s": first,
        "answers_s": {"fastest": min(wholes), "slowest": max(wholes)},
        "ready_s": ready,
        "peak_allocated_gib": peak,
    }


def image_prompts(config: Any, settings: dict, batch: int, device) -> dict[str, Tensor]:
    """Rows of text around an image each, whose place is one id between begin and end."""
    generator = torch.Generator().manual_seed(0)
    begin, end = config.boi_token_id, config.eoi_token_id
    image = torch.tensor([[begin, config.pad_token_id, end]]).repeat(batch, 1)
    most = min(begin, config.pad_token_id)
    text = torch.randint(0, most, (batch, settings["prompt_tokens"]), generator=generator)
    ids = torch.cat((text[:, :2], image, text[:, 2:]), dim=1)
    side = config.vision.image_size
    pixels = torch.randn(batch, 3, side, side, generator=generator)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    mask = torch.ones_like(ids)
    inputs = {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels.to(dtype)}
    return {name: values.to(device) for name, values in inputs.items()}


def weight_bytes_per_step(model: Any) -> int:
    """Of the weights that one decoding step reads: the language model's, without its embeddings."""
    return sum(
        stored_bytes(each)
        for name, each in [*model.named_parameters(), *model.named_buffers()]  # scales of fp8
        if ".encoder." in name or ".output_layer." in name
    )


def stored_bytes(weight: Any) -> int:
    """Of a weight, with its scales where bitsandbytes holds it in fewer bytes. Nothing has been
    computed with it: LLM.int8's layers then take the scales away from their weights."""
    parts: list[Tensor] = []
    if type(weight).__name__ == "Params4bit":
        parts = [each for each in weight.quant_state.as_dict().values() if torch.is_tensor(each)]
    elif type(weight).__name__ == "Int8Params":
        parts = [weight.SCB]
    return sum(each.numel() * each.element_size() for each in (weight, *parts))


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy reads and writes."""
    size = 2**32 if device.type == "cuda" else 2**27
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target, times = torch.empty_like(source), []
    for _ in range(6):
        synchronize(device)
        began = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        times.append(time.perf_counter() - began)
    return 2 * size / min(times)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def device_label(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "cpu"


if __name__ == "__main__":
    measure_batches(json.loads(sys.argv[1]), Path(sys.argv[2]))
