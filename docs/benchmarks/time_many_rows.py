"""Times the check of many rows of text.

``python docs/benchmarks/time_many_rows.py NUMBER`` prints seconds and the peak of memory, of the
check and then of a process that trains on the rows.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

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


def main(number: int) -> None:
    from glm4v_patched.data.check import check_file
    from glm4v_patched.demo.tiny_model import build_processor

    processor = build_processor(["What is it?", "Noise."])
    with TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "rows.jsonl").open("w") as file:
            for row in range(number):
                asked = {"role": "user", "content": f"What is {row}? " + "word " * 40}
                answer = {"role": "assistant", "content": f"It is {row}. " + "word " * 40}
                file.write(json.dumps({"messages": [asked, answer]}) + "\n")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for which in ("first", "next"):
            started = time.perf_counter()
            checked = check_file(folder / "rows.jsonl", processor, 8192, memory=folder / "memory")
            used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            print(f"{which}: {time.perf_counter() - started:.1f} s, {used / 1024:.0f} MiB more")
        checked.write(folder / "data.json")
        command = [sys.executable, "-c", TRAIN, str(folder / "data.json")]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("number", type=int, help="rows of text")
    main(**vars(parser.parse_args()))
