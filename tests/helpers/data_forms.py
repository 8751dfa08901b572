"""The forms in which people have pictures with questions and answers, each made by the tool that
people make it with: ``FORMS`` has a name, what makes it, and the fields of the set that it needs
beside its columns."""

import csv
import io
import json
import re
import shutil
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pandas
import pyarrow
import yaml
from PIL import Image

from glm4v_patched.data.checked_data import CheckedData
from glm4v_patched.data.collate import Size
from glm4v_patched.data.rows import Fault, Row, read_rows
from glm4v_patched.data.source import make_sources

QUESTION = "What is in the picture?"


def said(role: str, content: Any = "x", **more: Any) -> dict:
    return {"role": role, "content": content, **more}


def turns(question: Any = "q", answer: Any = "a", **more: Any) -> list[dict]:
    """A question with an answer."""
    return [said("user", question, **more), said("assistant", answer)]


def write_rows(path: Path, *rows: Any) -> Path:
    """JSON lines; of a list the messages, of a text the line itself."""
    lines = [{"messages": row} if isinstance(row, list) else row for row in rows]
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def found(checked: CheckedData) -> tuple:
    """All that a check has found, to compare it with another's."""
    files = [(file.path, file.sha256) for file in (*checked.files, *checked.pictures)]
    sizes = [checked.column(name).tolist() for name in Size._fields]
    rows = checked.row_lines, checked.row_digests, [*checked.conversations()]
    plain = checked.sources, checked.pack_to, checked.skipped, checked.asked
    return *plain, files, sizes, rows, checked.eval and found(checked.eval)


def png(colour: Any = "red") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(buffer, "PNG")
    return buffer.getvalue()


class Example(NamedTuple):
    """A row: the name of its picture, which lies in ``pictures``, and its answer. All rows ask
    :data:`QUESTION`."""

    picture: str
    answer: str


def draw(folder: Path, number: int) -> list[Example]:
    """So many pictures in ``folder/pictures``, no two of one colour."""
    (folder / "pictures").mkdir()
    examples = []
    for at in range(number):
        examples.append(Example(f"{at:012}.png", ("red", "007", "NA", "blue, green")[at % 4]))
        colour = at * 5 % 256, at // 51, 99
        Image.new("RGB", (32, 32), colour).save(folder / "pictures" / examples[-1].picture)
    return examples


def read_by_the_printed_line(
    path: Path, fields: dict, line: str | None = None
) -> tuple[list[Row], str | None]:
    """The rows of a set, and the value of ``data.columns`` that was printed, if one was.

    Args:
        line: That value, where it is known.
    """
    given = {"path": str(path), **fields} | ({"columns": yaml.safe_load(line)} if line else {})
    rows = [row for source in make_sources([given], {}) for row in read_rows(source)]
    faults = {row.text for row in rows if isinstance(row, Fault)}
    if not faults:
        return [row for row in rows if isinstance(row, Row)], line
    assert line is None, faults
    (fault,) = faults
    (line,) = re.findall(r"'data\.columns=(.*?)'", fault)
    return read_by_the_printed_line(path, fields, line)


Rows = Sequence[Example]
Make = Callable[[Path, Rows], Path]


def records(rows: Rows) -> list[dict]:
    return [
        {"image": f"pictures/{row.picture}", "question": QUESTION, "answer": row.answer}
        for row in rows
    ]


def _llava(rows: Rows) -> list[dict]:
    made = []
    for row in records(rows):
        asked = {"from": "human", "value": f"<image>\n{row['question']}"}
        turns = [asked, {"from": "gpt", "value": row["answer"]}]
        made.append({"id": "1", "image": row["image"], "conversations": turns})
    return made


def _dump(path: Path, value: Any) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps(value))
    return path


def _lines(path: Path, values: Sequence[dict]) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def _dataset(folder: Path, rows: Rows) -> datasets.Dataset:
    """With the pictures in it, as ``push_to_hub`` uploads it."""
    pictures = [str(folder / "pictures" / row.picture) for row in rows]
    columns = {"image": pictures, "question": [QUESTION] * len(rows)}
    table = datasets.Dataset.from_dict(columns | {"answer": [row.answer for row in rows]})
    return table.cast_column("image", datasets.Image())


def _bytes_dataset(folder: Path, rows: Rows) -> datasets.Dataset:
    return _dataset(folder, rows).map(_embed, features=_dataset(folder, rows).features)


def _embed(row: dict) -> dict:
    buffer = io.BytesIO()
    row["image"].save(buffer, "PNG")
    return row | {"image": {"bytes": buffer.getvalue(), "path": None}}


def jsonl(folder: Path, rows: Rows) -> Path:
    return _lines(folder / "rows.jsonl", records(rows))


def json_object(folder: Path, rows: Rows) -> Path:
    return _dump(folder / "rows.json", {"version": "1.0", "data": records(rows)})


def pandas_file(name: str, method: str, **options: Any) -> Make:
    """As pandas writes it."""

    def make(folder: Path, rows: Rows) -> Path:
        getattr(pandas.DataFrame(records(rows)), method)(folder / name, **options)
        return folder / name

    return make


def jsonl_zst(folder: Path, rows: Rows) -> Path:
    made = jsonl(folder, rows).with_suffix(".jsonl.zst")
    with pyarrow.output_stream(str(made), compression="zstd") as file:
        file.write(made.with_suffix("").read_bytes())
    return made


def several_files(folder: Path, rows: Rows) -> Path:
    half = len(rows) // 2
    _lines(folder / "rows-0.jsonl", records(rows)[:half])
    _lines(folder / "rows-1.jsonl", records(rows)[half:])
    return folder / "rows-*.jsonl"


def csv_file(folder: Path, rows: Rows) -> Path:
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["image", "question", "answer"])
        writer.writeheader()
        writer.writerows(records(rows))
    return folder / "rows.csv"


def parquet(folder: Path, rows: Rows) -> Path:
    _bytes_dataset(folder, rows).to_parquet(folder / "rows.parquet")
    return folder / "rows.parquet"


def arrow(folder: Path, rows: Rows) -> Path:
    _bytes_dataset(folder, rows).save_to_disk(folder / "saved")
    return next((folder / "saved").glob("*.arrow"))


def saved(folder: Path, rows: Rows) -> Path:
    return arrow(folder, rows).parent


def downloaded(folder: Path, rows: Rows) -> Path:
    """As ``hf download`` leaves it: the splits in ``data``, a card that describes them."""
    data = folder / "downloaded" / "data"
    data.mkdir(parents=True)
    _bytes_dataset(folder, rows).to_parquet(data / "train-00000-of-00001.parquet")
    _bytes_dataset(folder, rows[:1]).to_parquet(data / "test-00000-of-00001.parquet")
    (data.parent / ".cache" / "huggingface").mkdir(parents=True)
    splits = "".join(f"  - split: {of}\n    path: data/{of}-*\n" for of in ("train", "test"))
    card = f"---\nconfigs:\n- config_name: default\n  data_files:\n{splits}---\n# Pictures\n"
    (data.parent / "README.md").write_text(card)
    return data.parent


def downloaded_jsonl(folder: Path, rows: Rows) -> Path:
    """As LLaVA's on the Hub: lists of JSON beside a folder of pictures."""
    made = folder / "downloaded"
    _dump(made / "train.json", _llava(rows))
    shutil.copytree(folder / "pictures", made / "pictures")
    return made


def metadata(kind: str) -> Make:
    def make(folder: Path, rows: Rows) -> Path:
        made = folder / "photos"
        shutil.copytree(folder / "pictures", made)
        # As object, for datasets before 4.1 takes no large_string, which pandas 3 writes.
        columns = [{"file_name": row.picture, "text": row.answer} for row in rows]
        table = pandas.DataFrame(columns).astype(object)
        if kind == "csv":
            table.to_csv(made / "metadata.csv", index=False)
        elif kind == "jsonl":
            table.to_json(made / "metadata.jsonl", orient="records", lines=True)
        else:
            table.to_parquet(made / "metadata.parquet")
        return made

    return make


def classes(folder: Path, rows: Rows) -> Path:
    made = folder / "photos"
    for row in rows:
        (made / row.answer).mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "pictures" / row.picture, made / row.answer)
    return made


def webdataset(folder: Path, rows: Rows) -> Path:
    """By tar, as WebDataset's authors describe it."""
    with tarfile.open(folder / "rows.tar", "w") as archive:
        for row in rows:
            archive.add(folder / "pictures" / row.picture, row.picture)
            text = json.dumps({"question": QUESTION, "answer": row.answer}).encode()
            member = tarfile.TarInfo(Path(row.picture).with_suffix(".json").name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    return folder / "rows.tar"


def llama_factory(folder: Path, rows: Rows) -> Path:
    made = folder / "data"
    asked = {"role": "user", "content": f"<image>{QUESTION}"}
    values = [
        {
            "messages": [asked, {"role": "assistant", "content": row.answer}],
            "images": [f"pictures/{row.picture}"],
        }
        for row in rows
    ]
    _dump(made / "mine.json", values)
    shutil.copytree(folder / "pictures", made / "pictures")
    tags = {"role_tag": "role", "content_tag": "content"}
    tags |= {"user_tag": "user", "assistant_tag": "assistant"}
    columns = {"messages": "messages", "images": "images"}
    entry = {"file_name": "mine.json", "formatting": "sharegpt", "columns": columns, "tags": tags}
    _dump(made / "dataset_info.json", {"mine": entry, "other": {"file_name": "other.json"}})
    return made


def ms_swift(folder: Path, rows: Rows) -> Path:
    made = [
        {"query": row["question"], "response": row["answer"], "images": [row["image"]]}
        for row in records(rows)
    ]
    return _lines(folder / "rows.jsonl", [row | {"history": [], "system": ""} for row in made])


def the_cauldron(folder: Path, rows: Rows) -> Path:
    text = dict.fromkeys(("user", "assistant", "source"), datasets.Value("string"))
    features = {"images": datasets.List(datasets.Image()), "texts": datasets.List(text)}
    values = [
        {
            "images": [row["image"]],
            "texts": [{"user": QUESTION, "assistant": row["answer"], "source": "mine"}],
        }
        for row in _bytes_dataset(folder, rows)
    ]
    made = datasets.Dataset.from_list(values, features=datasets.Features(features))
    made.to_parquet(folder / "rows.parquet")
    return folder / "rows.parquet"


def llava(folder: Path, rows: Rows) -> Path:
    return _dump(folder / "rows.json", _llava(rows))


def coco_captions(folder: Path, rows: Rows) -> Path:
    images = [
        {"id": at, "file_name": row.picture, "height": 32, "width": 32, "license": 1}
        for at, row in enumerate(rows)
    ]
    annotations = [
        {"image_id": at, "id": 100 + at, "caption": row.answer} for at, row in enumerate(rows)
    ]
    info = {"year": 2017, "contributor": "COCO Consortium"}
    licenses = [{"url": "http://creativecommons.org", "id": 1, "name": "CC"}]
    whole = {"info": info, "licenses": licenses, "images": images, "annotations": annotations}
    return _dump(folder / "captions_train2017.json", whole)


def vqa_v2(folder: Path, rows: Rows) -> Path:
    questions = [
        {"image_id": at, "question": QUESTION, "question_id": 1000 + at} for at in range(len(rows))
    ]
    annotations = [
        {
            "question_id": 1000 + at,
            "image_id": at,
            "multiple_choice_answer": row.answer,
            "answers": [{"answer": row.answer, "answer_confidence": "yes", "answer_id": 1}],
        }
        for at, row in enumerate(rows)
    ]
    info = {"info": {"version": "2.0"}, "data_subtype": "train2014", "license": {"name": "CC"}}
    _dump(folder / "annotations.json", info | {"annotations": annotations})
    for at, row in enumerate(rows):
        name = f"COCO_train2014_{at:012}.jpg"  # a PNG by another name, so that its pixels stay
        shutil.copy(folder / "pictures" / row.picture, folder / "pictures" / name)
    return _dump(folder / "questions.json", info | {"questions": questions})


PICTURES = {"image_folder": "pictures"}
FORMS: dict[str, tuple[Make, dict[str, Any]]] = {
    "Parquet": (parquet, {}),
    "Arrow": (arrow, {}),
    "save_to_disk": (saved, {}),
    "hf download": (downloaded, {}),
    "hf download, JSON": (downloaded_jsonl, {}),
    "CSV": (csv_file, {}),
    "CSV of pandas, .gz": (pandas_file("rows.csv.gz", "to_csv"), {}),
    "TSV": (pandas_file("rows.tsv", "to_csv", sep="\t", index=False), {}),
    "JSONL": (jsonl, {}),
    "JSONL, .gz": (pandas_file("rows.jsonl.gz", "to_json", orient="records", lines=True), {}),
    "JSONL, .zst": (jsonl_zst, {}),
    "JSONL, several files": (several_files, {}),
    "JSON array": (pandas_file("rows.json", "to_json", orient="records"), {}),
    'JSON {"data": [...]}': (json_object, {}),
    "imagefolder, metadata.csv": (metadata("csv"), {}),
    "imagefolder, metadata.jsonl": (metadata("jsonl"), {}),
    "imagefolder, metadata.parquet": (metadata("parquet"), {}),
    "a folder a class": (classes, {}),
    "WebDataset": (webdataset, {}),
    "LLaVA": (llava, {}),
    "LLaMA-Factory": (llama_factory, {"subset": "mine"}),
    "ms-swift": (ms_swift, {}),
    "the_cauldron": (the_cauldron, {}),
    "COCO captions": (coco_captions, PICTURES),
    "VQA v2": (vqa_v2, {"annotations": "annotations.json"} | PICTURES),
}
