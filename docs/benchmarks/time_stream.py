"""Measure the time to the first step of a training with streamed rows, on the CPU.

``python docs/benchmarks/time_stream.py NUMBER`` writes NUMBER rows with the same small image and
trains with ``data.check: first 1000``. It prints the seconds from the command to the first step,
and how much higher the training process's peak memory is than with 20 rows.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import yaml

ROW = [
    {"role": "user", "content": "What is it?", "image": "images/0000.png"},
    {"role": "assistant", "content": "A shape."},
]


def train(folder: Path, number: int, steps: int) -> tuple[float, float]:
    """Return the seconds until the first step is logged, and the process's peak memory in MiB."""
    rows, recipe = folder / f"{number}.jsonl", folder / f"{number}.yaml"
    with rows.open("w") as file:
        file.writelines(json.dumps({"id": n, "messages": ROW}) + "\n" for n in range(number))
    values = {
        "model": str(folder / "model"),
        "out": str(folder / f"out-{number}"),
        "data": {"train": str(rows), "check": "first 1000", "ignore": ["id"]},
        "trainer": {
            "max_steps": steps,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-3,
            "logging_steps": 1,
        },
        "engine": {"zero_stage": 0, "precision": "fp32"},
    }
    recipe.write_text(yaml.safe_dump(values))
    started, peak, first = time.monotonic(), 0, None
    command = [sys.executable, "-m", "glm4v_patched", "train", str(recipe), "--device", "cpu"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.05):
            for child in psutil.Process(process.pid).children():
                peak = max(peak, child.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step ") and first is None:
                first = time.monotonic() - started
    finally:
        ended.set()
        watcher.join()
    if process.wait() or first is None:
        sys.exit(f"the training ended with status {process.returncode}")
    return first, peak / 2**20


def main(number: int, steps: int) -> None:
    from glm4v_patched.demo.images import draw_data_set
    from glm4v_patched.demo.tiny_model import IMAGE_SIDE, build_from_scratch

    with TemporaryDirectory() as name:
        folder = Path(name)
        conversations = draw_data_set(folder / "images", 1, seed=0, side=IMAGE_SIDE)
        build_from_scratch(folder / "model", conversations, seed=0)
        [image] = (folder / "images").iterdir()
        image.rename(folder / "images" / "0000.png")
        _, few = train(folder, 20, steps)
        seconds, peak = train(folder, number, steps)
        print(f"{number:,} rows: first step after {seconds:.1f} s, {peak - few:.0f} MiB more")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("number", type=int, help="rows with an image")
    parser.add_argument("--steps", type=int, default=1200, help="training steps")
    main(**vars(parser.parse_args()))
