"""Times the check of a data set.

``python docs/benchmarks/time_data_check.py NUMBER WIDTH HEIGHT`` draws that many JPEGs of
noise in a temporary folder, and checks them twice: anew, and remembered.
"""

import argparse
import resource
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

from glm4v_patched.data.check import check_file
from glm4v_patched.data.rows import write_conversations
from glm4v_patched.demo.tiny_model import build_processor


def main(number: int, width: int, height: int) -> None:
    processor = build_processor(["What is it?", "Noise."])
    with TemporaryDirectory() as name:
        folder = Path(name)
        noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
        conversations = []
        for index in range(number):
            path = folder / f"{index:05}.jpg"
            Image.fromarray(np.roll(noise, index, axis=1)).save(path, quality=90)
            question = {"role": "user", "image": str(path), "content": "What is it?"}
            conversations.append([question, {"role": "assistant", "content": "Noise."}])
        write_conversations(folder / "rows.jsonl", conversations)
        time.sleep(2.1)  # a file that has only just changed is not remembered
        for which in ("first", "next"):
            before, started = _cpu_seconds(), time.perf_counter()
            check_file(folder / "rows.jsonl", processor, 8192, memory=folder / "memory")
            wall = time.perf_counter() - started
            print(f"{which}: {_cpu_seconds() - before:.1f} s of CPU, {wall:.1f} s")


def _cpu_seconds() -> float:
    used = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(of.ru_utime + of.ru_stime for of in used)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("number", "width", "height"):
        parser.add_argument(name, type=int)
    main(**vars(parser.parse_args()))
