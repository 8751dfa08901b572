"""Measure how long rows of images with questions take to read, in every file format.

``PYTHONPATH=. python docs/benchmarks/time_forms.py NUMBER`` writes NUMBER rows in each format to a
temporary folder, by the tools that people use. It prints the recipe fields that each format needs
besides ``train``, and the seconds until all rows are read (including the import of ``datasets``
where it is first needed; images are not decoded).
"""

import argparse
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import datasets
import yaml

from tests.data.forms import FORMS, draw, make, read_form


def main(number: int) -> None:
    datasets.disable_progress_bars()
    print("| form | what `data` needs beside `train` | seconds |\n|---|---|---|")
    for name in FORMS:
        with TemporaryDirectory() as folder:
            os.chdir(folder)
            os.environ["XDG_CACHE_HOME"] = os.environ["HF_DATASETS_CACHE"] = f"{folder}/cache"
            path, fields = make(name, Path(folder), draw(Path(folder), number))
            started = time.perf_counter()
            rows = read_form(path, fields)
            seconds = time.perf_counter() - started
            assert len(rows) == number, name
            needed = yaml.safe_dump(fields, default_flow_style=True, sort_keys=False, width=1000)
            cell = f"`{needed.strip()[1:-1]}`" if fields else "nothing"
            print(f"| {name} | {cell} | {seconds:.1f} |", flush=True)
            os.chdir("/")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("number", type=int, help="rows of each form")
    main(parser.parse_args().number)
