"""Times how long rows of pictures with questions take to read, in every form of files.

``PYTHONPATH=. python docs/benchmarks/time_forms.py NUMBER`` makes so many rows in each form, in a
temporary folder, by the tools that people make them with, and prints for each the line that a
recipe needs beside ``train`` and the seconds until all of its rows are read (with the import of
``datasets``, where it is needed first; pictures are not decoded).
"""

import argparse
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import datasets
import yaml

from glm4v_patched.data.suggestion import line_of
from tests.helpers.data_forms import FORMS, draw, make, read_by_the_printed_line


def main(number: int) -> None:
    datasets.disable_progress_bars()
    print("| form | what `data` needs beside `train` | seconds |\n|---|---|---|")
    for name in FORMS:
        with TemporaryDirectory() as folder:
            os.chdir(folder)
            os.environ["XDG_CACHE_HOME"] = os.environ["HF_DATASETS_CACHE"] = f"{folder}/cache"
            path, fields = make(name, Path(folder), draw(Path(folder), number))
            _, line = read_by_the_printed_line(path, fields)
            known = {"columns": yaml.safe_load(line)} if line else {}
            started = time.perf_counter()
            rows, _ = read_by_the_printed_line(path, fields | known)
            seconds = time.perf_counter() - started
            assert len(rows) == number, name
            if columns := fields.pop("columns", None) or yaml.safe_load(line or ""):
                line = line_of(columns).partition("=")[2]
            needed = [f"columns: {line}"] if line else []
            needed += [f"{key}: {value}" for key, value in fields.items()]
            told = f"`{', '.join(needed)}`" if needed else "nothing"
            print(f"| {name} | {told} | {seconds:.1f} |", flush=True)
            os.chdir("/")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("number", type=int, help="rows of each form")
    main(parser.parse_args().number)
