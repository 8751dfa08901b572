"""Reads pictures with questions in every form: ``python -m tests.data.time_forms NUMBER``.

Makes so many rows in each form, in a temporary folder, by the tools that people make them with, and
prints for each the line that a recipe needs beside ``train`` and the seconds until all of its rows
are read (with the import of ``datasets``, where it is needed first; pictures are not decoded).
"""

import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import datasets
import yaml

from glm4v_patched.data.rows import Fault, Row, read_rows
from glm4v_patched.data.source import make_sources
from tests.helpers.data_forms import FORMS, draw

LINE = "'data.columns="


def main(number: int) -> None:
    datasets.disable_progress_bars()
    print("| form | what `data` needs beside `train` | seconds |\n|---|---|---|")
    for name, (make, fields) in FORMS.items():
        with TemporaryDirectory() as folder:
            os.chdir(folder)
            os.environ["XDG_CACHE_HOME"] = os.environ["HF_DATASETS_CACHE"] = f"{folder}/cache"
            path = make(Path(folder), draw(Path(folder), number))
            given = {"path": str(path), **fields}
            rows, needed = read(given), ", ".join(f"{key}: {of}" for key, of in fields.items())
            if isinstance(rows[0], Fault):
                line = rows[0].text.partition(LINE)[2].partition("'")[0]
                needed = ", ".join(filter(None, [f"columns: {line}", needed]))
                given["columns"] = yaml.safe_load(line)
            started = time.perf_counter()
            rows = read(given)
            seconds = time.perf_counter() - started
            assert len(rows) == number and all(isinstance(row, Row) for row in rows), name
            told = f"`{needed}`" if needed else "nothing"
            print(f"| {name} | {told} | {seconds:.1f} |", flush=True)
            os.chdir("/")


def read(given: dict) -> list[Row | Fault]:
    return [row for source in make_sources([given], {}) for row in read_rows(source)]


if __name__ == "__main__":
    main(int(sys.argv[1]))
