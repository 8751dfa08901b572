"""The forms of images with questions that forms.yaml describes."""

import contextlib
import json
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pandas
import pyarrow
import yaml

from glm4v_patched.data.rows import ConversationRow, RowProblem, iter_rows
from glm4v_patched.data.source import make_sources, suffix_of
from tests.data.samples import png
from tests.helpers.pages import ROOT, blocks

QUESTION = "What is in the image?"


class Example(NamedTuple):
    """A row: its image, which lies in ``images``, and its answer to :data:`QUESTION`."""

    image: str
    answer: str


def draw(folder: Path, number: int) -> list[Example]:
    """So many images in ``folder/images``, no two of one color."""
    (folder / "images").mkdir()
    answers = ("red", "007", "NA", "blue, green")
    examples = [Example(f"{at:012}.png", answers[at % 4]) for at in range(number)]
    for at, row in enumerate(examples):
        (folder / "images" / row.image).write_bytes(png((at * 5 % 256, at // 51, 99), 32))
    return examples


FORMS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def make(form: str, folder: Path, examples: list[Example]) -> tuple[Path, dict[str, Any]]:
    """Make a form of what was drawn in a folder; its path, and the fields that it needs."""
    rows = []
    for number, example in enumerate(examples):
        embedded = {"bytes": (folder / "images" / example.image).read_bytes(), "path": None}
        more = {"stem": example.image[:-4], "number": number, "embedded": embedded}
        rows.append(example._asdict() | more)
    files = dict(FORMS[form])
    fields, path, code = (files.pop(key, None) for key in ("fields", "path", "code"))
    for name, content in files.items():
        of_files: dict[str, list[dict]] = {}
        for row in rows:
            of_files.setdefault(name.format(**row), []).append(row)
        for file, some in of_files.items():
            _write(folder, file, content, some)
    if code is not None:
        (text,) = (
            example for example in blocks(ROOT / "docs" / "data.md", "python") if code in example
        )
        with contextlib.chdir(folder):
            exec(compile(text, "data.md", "exec"), {})
    return folder / (path or next(iter(files))), fields or {}


def _write(folder: Path, name: str, content: Any, rows: list[dict]) -> None:
    path, suffix = folder / name, suffix_of(name)
    path.parent.mkdir(exist_ok=True, parents=True)
    if content == "image":
        path.write_bytes(rows[0]["embedded"]["bytes"])
    elif suffix == ".tar":
        with tarfile.open(path, "w") as archive:
            for file in sorted((folder / content).iterdir()):
                archive.add(file, file.name)
    elif path.suffix == ".zst":
        with pyarrow.output_stream(str(path), compression="zstd") as file:
            file.write((folder / content).read_bytes())
    elif isinstance(content, str):
        path.write_text(content)
    elif isinstance(content, dict):
        whole = {
            key: [_of_row(item[0], row) for row in rows] if isinstance(item, list) else item
            for key, item in content.items()
        }
        path.write_text(json.dumps(_of_row(whole, rows[0])))
    else:
        _write_rows(path, suffix, [_of_row(content[0], row) for row in rows])


def _write_rows(path: Path, suffix: str, rows: list[dict]) -> Any:
    if suffix in (".parquet", ""):
        table, name = datasets.Dataset.from_list(rows), next(iter(rows[0]))
        # With the images in it, as push_to_hub uploads it.
        kinds = {"image": datasets.Image(), "images": datasets.List(datasets.Image())}
        table = table.cast_column(name, kinds[name]) if name in kinds else table
        return table.to_parquet(path) if suffix else table.save_to_disk(path)
    table = pandas.DataFrame(rows)
    if suffix in (".csv", ".tsv"):
        between = "\t" if suffix == ".tsv" else ","
        return table.to_csv(path, sep=between, index=path.suffix == ".gz")  # as by default
    return table.to_json(path, orient="records", lines=suffix == ".jsonl")


def _of_row(value: Any, row: dict) -> Any:
    if isinstance(value, dict):
        return {key: _of_row(item, row) for key, item in value.items()}
    if isinstance(value, list):
        return [_of_row(item, row) for item in value]
    if isinstance(value, str):
        return row[value[1:-1]] if value[1:-1] in row else value.format(**row)
    return value


def read_form(path: Path, fields: dict) -> list[ConversationRow | RowProblem]:
    """The rows of a set."""
    sources = make_sources([{"path": str(path), **fields}], {})
    return [row for source in sources for row in iter_rows(source)]
