"""Process that measures generation, started by ``generation.py``.

``python -m glm4v_patched.bench.generation_worker SETTINGS OUT``.
"""

import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import timer  # it waits for the GPU

from ..installed_versions import versions
from .roofline import benchmark_config
from .training import device_name


def measure_batches(settings: dict, out: Path) -> None:
    """Build the model, measure every batch size, and write the rows to ``out`` after each."""
    device = torch.device(settings["device"])
    torch.manual_seed(0)
    bandwidth = copy_bandwidth(device)
    model = build_benchmark_model(settings)
    weight_bytes = weight_bytes_per_step(model)
    copied_settings = ("new_tokens", "prompt_tokens", "cache")
    common: dict[str, Any] = {name: settings[name] for name in copied_settings}
    common |= {"device": device_name(device.type == "cpu"), "weights_gb": weight_bytes / 1e9}
    common["bandwidth_gb_s"] = bandwidth / 1e9
    common["versions"] = versions(settings["packages"])
    rows: list[dict] = []
    for batch in settings["batch"]:
        row = {"batch": batch, **common}
        try:
            row |= measure_batch(model, settings, batch, device)
            row["bandwidth_share"] = weight_bytes * row["steps_per_s"] / bandwidth
        except torch.OutOfMemoryError as error:
            row["error"] = f"out of memory: {error}"[:300]
        rows.append(row)
        out.write_text(json.dumps(rows))


def build_benchmark_model(settings: dict) -> Any:
    """Build our model on the device with random weights, in bf16 (fp32 on a CPU).

    If the setting ``weights`` is set, quantize the weights of its layers, one layer at a time.
    """
    from ..engine.trainable import build_random_model
    from ..models.loading import build_on_device

    device = settings["device"]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device(device):
        build = partial(build_random_model, benchmark_config(settings["config"]), dtype=dtype)
        model = build_on_device(build, device, settings["weights"])
    return model.eval().requires_grad_(False)


def measure_batch(model: Any, settings: dict, batch: int, device: torch.device) -> dict:
    """Measure the seconds to the first token, and the tokens per second after that token."""
    inputs = image_prompts(model.config, settings, batch, device)
    new_tokens, caches, length = settings["new_tokens"], None, 0
    if settings["cache"] != "dynamic":
        from ..inference.decoding.static_cache import StaticCaches

        caches = StaticCaches(model, length_multiple=256)
        image_tokens = model.config.vision.num_image_tokens + 2
        length = image_tokens + settings["prompt_tokens"] + new_tokens

    def time_generate(tokens: int) -> float:
        began = timer()
        cache_options = {} if caches is None else caches.generate_kwargs(batch, length)
        with torch.no_grad():
            ids = model.generate(
                **inputs, **cache_options, max_new_tokens=tokens, do_sample=False,
                eos_token_id=None, pad_token_id=model.config.pad_token_id,
            )  # fmt: skip
        assert ids.shape[1] == inputs["input_ids"].shape[1] + tokens
        return timer() - began

    # The first runs capture the CUDA graph of a decode step.
    ready_s = time_generate(min(6, new_tokens)) + time_generate(min(6, new_tokens))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    first_times = [time_generate(1) for _ in range(settings["repeats"])]
    answer_times = [time_generate(new_tokens) for _ in range(settings["repeats"])]
    first, answer = statistics.median(first_times), statistics.median(answer_times)
    if answer <= first:
        raise RuntimeError(
            f"{new_tokens} tokens took {answer:.3f} s and the first one {first:.3f} s: the machine "
            "is too busy for a measurement; give more --new-tokens"
        )
    steps_per_s = (new_tokens - 1) / (answer - first)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    return {
        "tokens_per_s": batch * steps_per_s,
        "steps_per_s": steps_per_s,
        "first_token_s": first,
        "answers_s": {"fastest": min(answer_times), "slowest": max(answer_times)},
        "ready_s": ready_s,
        "peak_allocated_gib": peak,
    }


def image_prompts(config: Any, settings: dict, batch: int, device) -> dict[str, Tensor]:
    """Return prompts of random text with one unexpanded image placeholder each.

    ``input_ids`` and ``attention_mask`` are ``(batch, prompt_tokens + 3)``.
    """
    generator = torch.Generator().manual_seed(0)
    begin, end = config.boi_token_id, config.eoi_token_id
    image = torch.tensor([[begin, config.pad_token_id, end]]).repeat(batch, 1)
    first_special = min(begin, config.pad_token_id)
    shape = (batch, settings["prompt_tokens"])
    text = torch.randint(0, first_special, shape, generator=generator)
    ids = torch.cat((text[:, :2], image, text[:, 2:]), dim=1)
    side = config.vision.image_size
    pixels = torch.randn(batch, 3, side, side, generator=generator)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    mask = torch.ones_like(ids)
    inputs = {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels.to(dtype)}
    return {name: values.to(device) for name, values in inputs.items()}


def weight_bytes_per_step(model: Any) -> int:
    """Return the weight bytes that a decode step reads: the language model's without embeddings."""
    return sum(
        stored_bytes(tensor)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]  # fp8 scales
        if ".encoder." in name or ".output_layer." in name
    )


def stored_bytes(weight: Any) -> int:
    """Return the bytes of a weight, including the scales of weights quantized by bitsandbytes.

    Call it before the first forward, in which LLM.int8 moves the scales off the weight.
    """
    scales: list[Tensor] = []
    if type(weight).__name__ == "Params4bit":
        state = weight.quant_state.as_dict()
        scales = [value for value in state.values() if torch.is_tensor(value)]
    elif type(weight).__name__ == "Int8Params":
        scales = [weight.SCB]
    return sum(tensor.numel() * tensor.element_size() for tensor in (weight, *scales))


def copy_bandwidth(device: torch.device) -> float:
    """Return the memory bandwidth of a copy on the device, in bytes read and written per second."""
    size = 2**32 if device.type == "cuda" else 2**27
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target, times = torch.empty_like(source), []
    for _ in range(6):
        began = timer()
        target.copy_(source)
        times.append(timer() - began)
    return 2 * size / min(times)


if __name__ == "__main__":
    measure_batches(json.loads(sys.argv[1]), Path(sys.argv[2]))
