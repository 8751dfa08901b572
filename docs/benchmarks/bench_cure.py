"""What the cure of remote/checkpointing.py costs, on two GPUs, with layers of the real size.

``PYTHONPATH=. python docs/benchmarks/bench_cure.py --out FILE`` trains 8 layers
of each tower under ZeRO-3 with the cure and without it, in turns, and prints a line for each: the
median and the spread of the step time, all-gathers a step and peak memory. Without the cure is what
the installed DeepSpeed does by itself. ``--stage 2`` shows the cost where ZeRO-3 is not active.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from itertools import product
from pathlib import Path
from unittest import mock

import deepspeed
import torch
from transformers.integrations import HfDeepSpeedConfig

from glm4v_patched.remote import checkpointing
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.distributed.cells import Cell
from tests.distributed.matrix import counted_gathers, with_or_without_cure
from tests.distributed.strategies import select_weights, trainable
from tests.helpers.processes import gpu_environment, on_processes, run_with_limit

TEXT = 512


def zero_config(stage: int, live: float) -> dict:
    """Everything overlaps; up to ``live`` parameters stay gathered, for as long as they fit."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": 2e8,
            "stage3_prefetch_bucket_size": 2e8,
            "stage3_max_live_parameters": live,
            "stage3_max_reuse_distance": live,
            "stage3_param_persistence_threshold": 1e5,
        },
    }


def batch(config: ChatGLMConfig, rank: int) -> dict[str, torch.Tensor]:
    """One image of 1120 x 1120 and 512 ids of text, labels on the second half."""
    generator = torch.Generator().manual_seed(rank)
    text = torch.randint(0, 100_000, (TEXT,), generator=generator)
    image = torch.tensor([config.boi_token_id, config.pad_token_id, config.eoi_token_id])
    ids = torch.cat((image, text))[None]
    labels = ids.clone()
    labels[:, : 3 + TEXT // 2] = -100
    pixels = torch.randn(1, 3, 1120, 1120, generator=generator).bfloat16()
    inputs = {"input_ids": ids, "labels": labels, "pixel_values": pixels}
    return {name: values.cuda() for name, values in inputs.items()}


@contextmanager
def timed_cure(seconds: list[float]) -> Iterator[None]:
    """Append how long each entry into the cure, with its exit, keeps the process busy."""
    held = checkpointing.frozen_parameters_held

    @contextmanager
    def timed(layer):
        start = time.perf_counter()
        try:
            with held(layer):
                seconds.append(time.perf_counter() - start)
                try:
                    yield
                finally:  # a recomputation that has all it needs is left by an exception
                    start = time.perf_counter()
        finally:
            seconds.append(time.perf_counter() - start)

    with mock.patch.object(checkpointing, "frozen_parameters_held", timed):
        yield


def measure(cell: Cell, stage: int, live: float, layers: int, warm_up: int, steps: int) -> dict:
    """Build the model, train it and take it down again."""
    config = zero_config(stage, live)
    hf_config = HfDeepSpeedConfig(config)  # noqa: F841  # alive while the model is built
    torch.manual_seed(0)
    # Under stage 3 DeepSpeed itself puts every new parameter on the GPU, sharded.
    with nullcontext() if stage == 3 else torch.device("cuda"):
        model = GLM4VForCausalLM._from_config(
            ChatGLMConfig(
                num_layers=layers, vision_config={"num_hidden_layers": layers}, skip_logits=True
            ),
            dtype=torch.bfloat16,
        )
    model = select_weights(model, cell.weights)
    model.gradient_checkpointing_enable({"use_reentrant": cell.use_reentrant})
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-5, fused=True)
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)
    inputs = batch(engine.module.config, engine.global_rank)
    seconds, in_cure = [], []
    with with_or_without_cure(cell), timed_cure(in_cure):
        for step in range(warm_up + steps):
            if step == warm_up:
                torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
            torch.distributed.barrier()
            start = time.perf_counter()
            with counted_gathers() as gathers:
                loss = engine(**inputs).loss
                engine.backward(loss)
            engine.step()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    timed = sorted(seconds[warm_up:])
    row = {
        "deepspeed": version("deepspeed"),
        "stage": stage,
        "live": live,
        "weights": cell.weights,
        "use_reentrant": cell.use_reentrant,
        "cure": cell.cure,
        "step_s": round(statistics.median(timed), 4),
        "fastest_s": round(timed[0], 4),
        "slowest_s": round(timed[-1], 4),
        "in_cure_s": round(sum(in_cure) / len(seconds), 6),
        "gathers": len(gathers),
        "peak_allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "loss": round(loss.item(), 4),
    }
    engine.destroy()
    return row


def worker(settings: dict) -> None:
    deepspeed.init_distributed(verbose=False)
    torch.cuda.set_device(torch.distributed.get_rank())
    cell = Cell("zero3", settings["weights"], settings["use_reentrant"], cure=settings["cure"])
    row = measure(
        cell, *(settings[name] for name in ("stage", "live", "layers", "warm_up", "steps"))
    )
    if torch.distributed.get_rank() == 0:
        Path(settings["out"]).write_text(json.dumps(row))
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--weights", nargs="+", default=["lora_language", "lora_both", "all"])
    parser.add_argument("--reentrant", nargs="+", choices=["true", "false"], default=["false"])
    parser.add_argument("--cure", nargs="+", choices=["with", "without"])
    parser.add_argument("--stage", type=int, default=3)
    # The share of 8 layers in 3e9 of the whole model.
    parser.add_argument("--live", type=float, default=7.5e8, help="parameters kept gathered")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    if torch.cuda.device_count() < 2:
        parser.error(f"it trains on two GPUs, and there are {torch.cuda.device_count()}")
    cures = arguments.cure or ["with", "without"]
    for weights, reentrant, round_, turn in product(
        arguments.weights, arguments.reentrant, range(arguments.rounds), range(len(cures))
    ):
        cure = cures[(round_ + turn) % len(cures)]  # none is always the first of its round
        # Processes of its own for each: an engine that is taken down leaves memory behind.
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "row.json")
            settings = {
                "weights": weights,
                "use_reentrant": reentrant == "true",
                "cure": cure == "with",
                "stage": arguments.stage,
                "live": arguments.live,
                "layers": arguments.layers,
                "warm_up": arguments.warm_up,
                "steps": arguments.steps,
                "out": str(out),
            }
            command = on_processes(2, __file__, json.dumps(settings))
            ended = run_with_limit(command, 300, gpu_environment())
            if ended.status != 0:
                print(f"{settings}: {ended.output[-2000:]}", flush=True)
                continue
            line = out.read_text()
        print(line, flush=True)
        with arguments.out.open("a") as rows:
            rows.write(line + "\n")


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        worker(json.loads(sys.argv[1]))
    else:
        main()
