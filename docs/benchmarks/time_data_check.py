"""Measure the check of a data set.

``python docs/benchmarks/time_data_check.py NUMBER`` checks NUMBER rows of text twice, the second
time with the image cache, and prints seconds and memory of both checks and then of a process that
trains on the rows. With ``NUMBER WIDTH HEIGHT``, each row has a JPEG of noise; with ``--images N``,
rows share N of them.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

from glm4v_patched.data.check import check_sources
from glm4v_patched.data.source import DataSource
from glm4v_patched.demo.tiny_model import build_processor

TRAIN = """
import resource, sys, time
from pathlib import Path
from glm4v_patched.data.checked_data import CheckedData
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
started = time.perf_counter()
conversations = CheckedData.read(Path(sys.argv[1])).conversations()
for number in range(0, len(conversations), 100):
    conversations[number]
used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(f"a training process: {time.perf_counter() - started:.1f} s, {used / 1024:.0f} MiB")
"""


def draw(folder: Path, number: int, size: list[int], images: int) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    for image in range(images if size else 0):
        path = folder / f"{image:05}.jpg"
        Image.fromarray(np.roll(noise, image, axis=1)).save(path, quality=90)
    with (folder / "rows.jsonl").open(
        "w"
    ) as file:  # rows are not kept in memory, which is measured
        for row in range(number):
            question = {"role": "user", "content": f"What is {row}? " + "word " * 40}
            if size:
                question["image"] = str(folder / f"{row % images:05}.jpg")
            answer = {"role": "assistant", "content": f"It is {row}. " + "word " * 40}
            file.write(json.dumps({"messages": [question, answer]}) + "\n")


def cpu_seconds() -> float:
    processes = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    usages = [resource.getrusage(who) for who in processes]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main(number: int, size: list[int], images: int) -> None:
    processor = build_processor(["What is it?", "Noise."])
    with TemporaryDirectory() as name:
        folder = Path(name)
        draw(folder, number, size, images)
        sources = [DataSource(str(folder / "rows.jsonl"))]
        time.sleep(2.1)  # files that changed in the last two seconds are not cached
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for label in ("first", "next"):
            before, started = cpu_seconds(), time.perf_counter()
            checked = check_sources(sources, processor, 8192, image_cache=folder / "memory")
            wall, used = time.perf_counter() - started, cpu_seconds() - before
            more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024
            print(f"{label}: {used:.1f} s of CPU, {wall:.1f} s, {more:.0f} MiB more", flush=True)
        checked.write(folder / "data.json")
        subprocess.run([sys.executable, "-c", TRAIN, str(folder / "data.json")], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("number", type=int, help="rows")
    parser.add_argument("size", type=int, nargs="*", help="width and height of each row's image")
    parser.add_argument("--images", type=int, help="images that rows share (default: one per row)")
    options = parser.parse_args()
    if len(options.size) not in (0, 2):
        parser.error("give both width and height of the images, or neither")
    main(options.number, options.size, options.images or options.number)
