"""A data set names files inside of itself, and nothing else: of whatever names a file in a folder
or in a data set of the Hub, each form that leads elsewhere is refused before anything is opened."""

import io
import json
import os
import shutil
import sys
import tarfile
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub.constants
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from glm4v_patched.data import cards, tables, text_rows
from glm4v_patched.data.folders import Folder, HubFolder, find_matching_files
from glm4v_patched.data.rows import (
    ConversationRow,
    RowProblem,
    iter_rows,
    read_conversations,
    split_usable_rows,
)
from glm4v_patched.data.source import DataSource
from glm4v_patched.data.tables import read_table
from tests.data.samples import png, turns, write_rows

SECRET = "a private word"
HUB_ID = "someone/cards"
WATCHED: list[tuple[str, str]] | None = None


def _watch(event: str, arguments: tuple) -> None:
    if WATCHED is not None and event in ("open", "socket.connect", "subprocess.Popen", "os.system"):
        WATCHED.append((event, str(arguments[1] if event == "socket.connect" else arguments[0])))


sys.addaudithook(_watch)


@pytest.fixture
def watched(monkeypatch) -> list[tuple[str, str]]:
    """What is opened, started and connected to."""
    events: list[tuple[str, str]] = []
    monkeypatch.setattr(sys.modules[__name__], "WATCHED", events)
    return events


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with rows, beside private files of all kinds."""
    folder = tmp_path / "set"
    (folder / "data").mkdir(parents=True)
    write_rows(folder / "data" / "a.jsonl", turns("inside"))
    (tmp_path / "private").mkdir()
    private = write_rows(tmp_path / "private" / "a.jsonl", turns(SECRET))
    shutil.copy(private, tmp_path / "private.jsonl")
    (tmp_path / "private.png").write_bytes(png())
    (tmp_path / "saved").mkdir()
    write_rows(tmp_path / "saved" / "a.jsonl", turns(SECRET))
    (tmp_path / "saved" / "state.json").write_text('{"_data_files": [{"filename": "a.jsonl"}]}')
    # fsspec renders it with jinja, which can run commands.
    refs = {"version": 1, "templates": {"u": "{{ 1 }}"}, "refs": {"a.jsonl": ["{{u}}"]}}
    (folder / "data" / "refs").write_text(json.dumps(refs))
    return folder


OUTSIDE = "OUTSIDE"
FORMS = (
    "OUTSIDE/private.jsonl",
    "../private.jsonl",
    "data/../../private.jsonl",
    "./../private.jsonl",
    "../*.jsonl",
    "../**/a.jsonl",
    "*/../../private.jsonl",
    "OUTSIDE/**/*.jsonl",
    "OUTSIDE/[p]rivate.jsonl",
    "~/private.jsonl",
    "file://OUTSIDE/private.jsonl",
    "file:OUTSIDE/private.jsonl",
    "local://OUTSIDE/private.jsonl",
    "http://127.0.0.1:9/a.jsonl",
    "HTTPS://127.0.0.1:9/a.jsonl",
    "ftp://127.0.0.1:9/a.jsonl",
    "hf://datasets/other/private/a.jsonl",
    "reference://a.jsonl::file://OUTSIDE/set/data/refs",
    "simplecache::file://OUTSIDE/private.jsonl",
    "filecache::http://127.0.0.1:9/a.jsonl",
    "zip://a.jsonl::http://127.0.0.1:9/a.zip",
    "data/a.jsonl::file://OUTSIDE/private.jsonl",
    "dir://OUTSIDE::private.jsonl",
    "\\\\127.0.0.1\\share\\a.jsonl",
    "data/a.jsonl\0",
    "..",
    "/",
    "",
)


def of_config(**fields) -> str:
    return yaml.safe_dump({"configs": [{"config_name": "default", **fields}]})


def readme(folder: Path, text: str) -> None:
    (folder / "README.md").write_text(f"---\n{text}---\n# Cards\n")


PLACES = {
    "data_files": lambda at, name: readme(at, of_config(data_files=name)),
    "data_files, a list": lambda at, name: readme(at, of_config(data_files=["data/a.jsonl", name])),
    "data_files, of a split": lambda at, name: readme(
        at, of_config(data_files=[{"split": "train", "path": ["data/a.jsonl", name]}])
    ),
    "data_files, of a split that is not read": lambda at, name: readme(
        at,
        of_config(
            data_files=[
                {"split": "train", "path": "data/a.jsonl"},
                {"split": "test", "path": name},
            ]
        ),
    ),
    "data_files, below data_dir": lambda at, name: readme(
        at, of_config(data_dir="data", data_files=name)
    ),
    "data_files of .huggingface.yaml": lambda at, name: (
        readme(at, "license: mit\n"),
        (at / ".huggingface.yaml").write_text(of_config(data_files=name)),
    ),
    "data_dir": lambda at, name: readme(at, of_config(data_dir=name)),
    "_data_files": lambda at, name: (at / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name}]})
    ),
}


def read(path: Path | str, **fields) -> list[ConversationRow | RowProblem]:
    return [*iter_rows(DataSource(str(path), **fields))]


def require_nothing_left(watched: list, outside: Path, inside: Path | None) -> None:
    """Assert that no private file was opened, and nothing started or connected to."""
    for event, arguments in watched:
        assert event == "open", (event, arguments)
        private = arguments.startswith(str(outside)) and not arguments.startswith(
            (str(inside), str(outside / "cache"))
        )
        assert not private, arguments


@pytest.mark.parametrize("place", PLACES)
def test_a_name_of_what_is_not_inside_is_refused_wherever_it_stands(
    folder, tmp_path, place, watched
):
    for form in FORMS:
        name = form.replace(OUTSIDE, str(tmp_path))
        if place == "data_dir" and name in ("", "/"):
            continue  # the folder itself, by join or strip: see below
        PLACES[place](folder, name)
        watched.clear()
        if "not read" in place:  # nor is it looked at, for it may not have been downloaded
            assert [row.messages for row in read(folder)] == [turns("inside")]
            require_nothing_left(watched, tmp_path, folder)
            continue
        with pytest.raises(ValueError) as refused:
            raise AssertionError(read(folder))
        message = str(refused.value)
        card = "README.md" if "yaml" not in place else ".huggingface.yaml"
        file = "state.json" if place == "_data_files" else card
        assert f"{folder}/{file}: " in message and place.partition(",")[0].split()[0] in message, (
            message
        )
        assert "not a file inside of" in message, (form, message)
        require_nothing_left(watched, tmp_path, folder)


def test_a_card_may_name_splits_that_were_not_downloaded(folder):
    patterns = [
        {"split": "test", "path": "data/test-*"},
        {"split": "train", "path": "./data/a.*"},
        {"split": "[odd]", "path": "data/[b].jsonl"},
    ]
    readme(folder, of_config(data_files=patterns))
    write_rows(folder / "data" / "[b].jsonl", turns("odd"))
    assert [row.messages for row in read(folder)] == [turns("inside")]
    assert [row.messages for row in read(folder, split="[odd]")] == [turns("odd")]
    with pytest.raises(ValueError, match='data_files names "data/test-.*", which is not a file'):
        read(folder, split="test")
    with pytest.raises(ValueError, match="has the splits test, train, .odd. and not dev: set"):
        read(folder, split="dev")


@pytest.mark.parametrize("spelling", ["data", "data/", "./data", "./data//"])
def test_a_data_dir_is_that_folder_and_none_whose_name_begins_alike(folder, spelling):
    (folder / "data-old").mkdir()
    write_rows(folder / "data-old" / "b.jsonl", turns("old"))
    readme(folder, of_config(data_dir=spelling))
    assert [row.messages for row in read(folder)] == [turns("inside")]


CARDS = {
    "no end": ("---\n" + "\n" * 2**19, None),
    "carriage returns": ("---\r" * 2**16, None),
    "numbers of base 60": ("---\nx: 1" + ":1" * 2**18 + "\n---\n", None),
    "words for other kinds": (
        "---\nx: [!!int 1:1, !!bool 7, !!python/name:os.system x]\n---\n",
        None,
    ),
    "100 levels": ("---\nx: " + "[" * 99 + "]" * 99 + "\n---\n", None),
    "101 levels": ("---\nx: " + "[" * 100 + "]" * 100 + "\n---\n", "nested more than 100 levels"),
    "one key twice": (
        "---\nconfigs:\n- config_name: a\n  data_files: a.jsonl\n  data_files: b.jsonl\n---\n",
        'the key "data_files" occurs 2 times',
    ),
    "a merge key": (
        "---\nconfigs:\n- &a {config_name: a}\n- {config_name: b, default: true, <<: *a}\n---\n",
        'the key "<<" is not read',
    ),
    "an unknown key": (
        "---\nconfigs: [{config_name: a, data_files: data/a.jsonl, filters: x}]\n---\n",
        'configs, a: the key "filters" is not read; remove it',
    ),
}


@pytest.mark.parametrize("card", CARDS)
def test_a_card_of_any_form_is_read_or_refused_at_once(folder, card):
    text, message = CARDS[card]
    (folder / "README.md").write_text(text, newline="")
    if message is None:
        assert [row.messages for row in read(folder)] == [turns("inside")]
    else:
        with pytest.raises(ValueError, match=f"README.md.*(?s:.*)(?:{message})"):
            read(folder)


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? ", "&a ["])
def test_a_card_nested_without_end_is_refused_before_it_is_composed(folder, monkeypatch, opening):
    """libyaml composes recursively in C, which ends the process on Python 3.12."""
    monkeypatch.setattr(
        cards._CardLoader, "get_single_node", lambda loader: pytest.fail("the card was composed")
    )
    for file in ("README.md", ".huggingface.yaml"):
        (folder / file).write_text(f"---\n{opening * 2**16}\n---\n")
        with pytest.raises(ValueError, match=f"(?s){file}: its YAML cannot be read: .*nest"):
            read(folder)
        (folder / file).unlink()


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_card_of_any_editor_chooses_the_files(folder, end):
    write_rows(folder / "data" / "b.jsonl", turns("chosen"))
    text = f"---\n{of_config(data_files='data/b.jsonl')}---\n# Cards\n"
    (folder / "README.md").write_text(text, encoding="utf-8-sig", newline=end)
    assert [row.messages for row in read(folder)] == [turns("chosen")]


def test_patterns_times_files_are_limited_and_names_are_not(folder, monkeypatch):
    monkeypatch.setattr(cards, "MAX_COMPARISONS", 10)
    readme(folder, of_config(data_files=["data/a.jsonl"] * 100))
    assert len(read(folder)) == 1
    readme(folder, of_config(data_files=["data/*.jsonl"] * 6))
    with pytest.raises(
        ValueError, match="has 6 paths for 3 files; expected at most 10 comparisons"
    ):
        read(folder)


def test_folders_that_may_not_be_read_are_not_left_out(folder, monkeypatch):
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("data"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    write_rows(folder / "b.jsonl", turns("other"))
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises((ValueError, OSError), match="Permission denied.*data"):
        read(folder)


def test_the_same_names_are_refused_of_the_hub(hub, folder, tmp_path, watched):
    rows = (folder / "data" / "a.jsonl").read_bytes()
    port = hub.endpoint.rpartition(":")[2]
    for file in ("README.md", ".huggingface.yaml"):
        for form in FORMS:
            name = form.replace(OUTSIDE, str(tmp_path))
            text = of_config(data_files=["data/a.jsonl", name])
            text = f"---\n{text}---\n" if file == "README.md" else text
            hub.add_repository(HUB_ID, {"data/a.jsonl": rows, file: text.encode()})
            watched.clear()
            with pytest.raises(ValueError, match=f"^{HUB_ID}/{file}: configs, default: data_f"):
                raise AssertionError(read(HUB_ID))
            connected = [arguments for event, arguments in watched if event == "socket.connect"]
            assert all(port in arguments for arguments in connected), connected
            opened = [
                (event, arguments) for event, arguments in watched if event != "socket.connect"
            ]
            require_nothing_left(opened, tmp_path, None)
    assert all(HUB_ID in request.path for request in hub.requests)


LINKS = {
    "a file of rows": ("data/b.jsonl", "private.jsonl", "data/b.jsonl is a link to"),
    "the card": ("README.md", "private.jsonl", "README.md is a link to"),
    "what save_to_disk says": ("state.json", "saved/state.json", "state.json is a link to"),
}


@pytest.mark.parametrize("link", LINKS)
def test_a_link_that_leaves_is_refused_and_one_that_stays_is_read(folder, tmp_path, link, watched):
    name, target, message = LINKS[link]
    (folder / name).symlink_to(tmp_path / target)
    with pytest.raises(ValueError, match=f"{message}.*{target}, outside of the folder") as refused:
        raise AssertionError(read(folder))
    assert "in the recipe" in str(refused.value)
    require_nothing_left(watched, tmp_path, folder)
    if link == "a file of rows":
        (folder / name).unlink()
        (folder / name).symlink_to("a.jsonl")
        assert len(read(folder)) == 2


def test_a_link_to_a_folder_whose_name_begins_alike_is_refused(folder):
    beside = folder.with_name(f"{folder.name}-private")
    beside.mkdir()
    (folder / "data" / "b.jsonl").symlink_to(write_rows(beside / "a.jsonl", turns(SECRET)))
    with pytest.raises(ValueError, match="is a link to .*-private/a.jsonl, outside of the folder"):
        read(folder)


def test_blobs_beside_a_folder_of_snapshots_are_not_those_of_the_hub(tmp_path):
    folder = tmp_path / "snapshots" / "set"
    (tmp_path / "blobs").mkdir()
    folder.mkdir(parents=True)
    blob = write_rows(tmp_path / "blobs" / "a", turns(SECRET))
    (folder / "a.jsonl").symlink_to(blob)
    with pytest.raises(ValueError, match="a.jsonl is a link to .*blobs/a, outside of the folder"):
        read(folder)


def test_rows_beside_images_are_not_looked_at_through_a_link(folder, tmp_path, watched):
    """Whether a JSON file beside an image is a row shows in it alone."""
    shutil.rmtree(folder / "data")
    for name in ("0.png", "1.png"):
        (folder / name).write_bytes(png())
    (tmp_path / "private.json").write_text(json.dumps({"messages": turns(SECRET)}))
    (folder / "0.json").symlink_to(tmp_path / "private.json")
    watched.clear()
    with pytest.raises(ValueError, match="0.json is a link to .*outside of the folder"):
        read(folder, columns={"question": "q?", "answer": "label", "image": "image"})
    require_nothing_left(watched, tmp_path, folder)


def test_linked_folders_and_their_files_are_none_of_the_set(folder, tmp_path):
    (folder / "more").symlink_to(tmp_path / "private")
    (folder / "test").symlink_to(tmp_path / "saved")
    assert [row.messages for row in read(folder)] == [turns("inside")]
    readme(folder, of_config(data_files="more/a.jsonl"))
    with pytest.raises(ValueError, match='names "more/a.jsonl", which is not a file inside of'):
        read(folder)


NAMED_IMAGES = ("OUTSIDE/private.png", "../private.png", "data/../../private.png", "linked.png")


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_metadata_of_images_name_images_of_the_folder(tmp_path, suffix):
    folder = tmp_path / "photos"
    (folder / "sub").mkdir(parents=True)
    for path in (tmp_path / "private.png", folder / "a.png", folder / "sub" / "b.png"):
        path.write_bytes(png())
    (folder / "linked.png").symlink_to(tmp_path / "private.png")
    names = ["a.png", "sub/b.png", "sub/../a.png", *NAMED_IMAGES, "http://127.0.0.1:9/a.png"]
    rows = [{"file_name": name.replace(OUTSIDE, str(tmp_path)), "text": "red"} for name in names]
    table = datasets.Dataset.from_list(rows)
    {"csv": table.to_csv, "jsonl": table.to_json, "parquet": table.to_parquet}[suffix](
        str(folder / f"metadata.{suffix}")
    )
    columns = {"question": "What?", "answer": "text", "image": "image"}
    results = read(folder, columns=columns)
    assert [row.images for row in results[:3]] == [
        [str(folder / name)] for name in ("a.png", "sub/b.png", "a.png")
    ]
    for row in results[3:7]:
        assert isinstance(row, RowProblem) and f"metadata.{suffix}" in row.text, row
        assert "private.png, outside of the folder" in row.text, row
    # As a name it is that of no file; nothing fetches it.
    assert results[7].images == [str(folder / "http:/127.0.0.1:9/a.png")]


def test_metadata_give_an_image_by_one_column(tmp_path):
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(png())
    rows = [{"file_name": "a.png", "text": "red"}, {"file_name": "a.png", "image": "b.png"}]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    first, second = read(tmp_path, columns={"question": "?", "answer": "text", "image": "image"})
    assert first.images == [str(tmp_path / "a.png")]
    assert "metadata.jsonl: has both file_name and image: keep" in second.text


def test_rows_of_the_hub_name_no_file_of_this_machine(hub, tmp_path, watched):
    images = tmp_path / "images"
    images.mkdir()
    for path in (tmp_path / "private.png", images / "a.png"):
        path.write_bytes(png())
    (images / "linked.png").symlink_to(tmp_path / "private.png")
    names = [str(tmp_path / "private.png"), "../private.png", f"file://{tmp_path}/private.png"]
    names += ["linked.png", "http://127.0.0.1:9/a.png", "hf://datasets/other/set/a.png"]
    inside = {"bytes": None, "path": str(images / "a.png")}
    cells = [{"bytes": None, "path": name} for name in names]
    cells = [{"bytes": png(), "path": names[0]}, *cells, inside, {"bytes": None, "path": "a.png"}]
    table = pa.table({"image": cells, "question": ["q"] * len(cells), "answer": ["a"] * len(cells)})
    pq.write_table(table, tmp_path / "a.parquet")
    texts = [{"image": name, "question": "q", "answer": "a"} for name in names]
    # Nor is one looked for that the words name.
    texts += [{"question": f"![]({names[0]})", "answer": "a"}]
    hub.add_repository(HUB_ID, {"data/a.parquet": (tmp_path / "a.parquet").read_bytes()})
    hub.add_repository("someone/texts", {"a.jsonl": "\n".join(map(json.dumps, texts)).encode()})
    watched.clear()
    columns = {name: name for name in table.column_names}
    (embedded,), faults = split_usable_rows(read(HUB_ID, columns=columns))
    assert Path(embedded.images[0]).read_bytes() == png() and len(faults) == len(cells) - 1
    assert f"outside of {tmp_path}/cache/hub/datasets--someone--cards;" in faults[0].text
    [words], _ = split_usable_rows(read("someone/texts", columns=columns))
    assert words.images == []
    # A folder that the recipe names has them, and its files alone.
    *others, absolute, relative = read(HUB_ID, columns=columns, image_folder=str(images))[1:]
    assert all(isinstance(row, RowProblem) for row in others), others
    assert absolute.images == relative.images == [str(images / "a.png")]
    private = [arguments for _, arguments in watched if "private.png" in arguments]
    assert not private


def test_hidden_files_and_all_in_hidden_folders_are_of_neither_the_hub_nor_a_folder(
    tmp_path, monkeypatch
):
    visible = ["_a.jsonl", "a.jsonl", "x.y/a.b.jsonl", "x/_y/a.jsonl"]
    hidden = [".a.jsonl", "__a.jsonl", ".x/a.jsonl", "__x/y/a.jsonl", "x/.y/z/a.jsonl", "x/._a"]
    for name in [*visible, *hidden]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    siblings = [SimpleNamespace(rfilename=name) for name in [*hidden, *visible]]
    info = SimpleNamespace(sha="c", siblings=siblings)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: info)
    assert HubFolder(HUB_ID, None).files == Folder(str(tmp_path)).files == visible


def test_a_data_set_of_the_hub_is_read_as_its_folder_is(hub, tmp_path):
    """Also out of the Hub's cache, in which files are links."""
    cache = Path(huggingface_hub.constants.HF_HUB_CACHE)
    local = tmp_path / "local"
    classes = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["x"])}
    )
    rows = [{"image": {"bytes": png(), "path": None}, "label": 0}]
    for name in ("train", "test"):
        datasets.Dataset.from_list(rows * (1 + (name == "train")), features=classes).to_parquet(
            local / "data" / f"{name}-00000-of-00001.parquet"
        )
    (local / "more").mkdir()
    write_rows(local / "more" / "a.jsonl", turns("more"))
    (local / "photos" / "one").mkdir(parents=True)
    (local / "photos" / "two").mkdir()
    for at, name in enumerate(("one/a.png", "two/b.png")):
        (local / "photos" / name).write_bytes(png((at, 9, 9)))
    configs = [
        {
            "config_name": "tables",
            "default": True,
            "data_files": [
                {"split": "train", "path": "data/train-*"},
                {"split": "test", "path": ["data/test-*"]},
            ],
        },
        {"config_name": "more", "data_dir": "more"},
        {"config_name": "photos", "data_files": "photos/**"},
    ]
    card = f"---\n{yaml.safe_dump({'configs': configs})}---\n"
    (local / "README.md").write_text(card)
    files = {
        str(path.relative_to(local)): path.read_bytes()
        for path in local.rglob("*")
        if path.is_file()
    }
    labels = {"question": "What?", "answer": "label", "image": "image"}
    results = []
    commit = hub.add_repository(HUB_ID, files).head
    hub.repositories[HUB_ID].add_commit({"README.md": b"", "more/a.jsonl": b"{}"})
    for split, subset, columns, number in (
        (None, None, labels, 2),
        ("test", "tables", labels, 1),
        (None, "more", None, 1),
        (None, "photos", labels, 2),
    ):
        options = {"split": split, "subset": subset, "columns": columns}
        of_hub = read_conversations(DataSource(HUB_ID, revision=commit, **options))
        of_folder = read_conversations(DataSource(str(local), **options))
        assert [said(row) for row in of_hub] == [said(row) for row in of_folder]
        assert len(of_hub) == number, subset
        results.append((options, of_hub))
    # All of its files are there now.
    [snapshot] = cache.glob(f"*/snapshots/{commit}")
    for options, of_hub in results:
        assert read_conversations(DataSource(str(snapshot), **options)) == of_hub
    num_downloads = len(hub.asked("GET", "/resolve/"))
    assert said(of_hub[0]) == ["What?", "one"], of_hub[0]
    read_conversations(DataSource(HUB_ID, revision=commit, columns=labels))
    assert len(hub.asked("GET", "/resolve/")) == num_downloads  # what is there is not fetched again
    with pytest.raises(ValueError, match="has the subsets tables, more, photos and not x: set"):
        read(HUB_ID, revision=commit, subset="x")


def said(messages: list[dict]) -> list[str]:
    return [message["content"] for message in messages]


def _many(value: Any, number: int) -> pa.Array:
    """Return a list of one value so often, in a row."""
    column = pa.DictionaryArray.from_arrays(np.zeros(number, "int32"), [value])
    return pa.ListArray.from_arrays([0, number], column)


@contextmanager
def counted_memory() -> Iterator[pa.MemoryPool]:
    """Yield a pool of the memory that pyarrow allocates in the block."""
    of_default = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(of_default)
    pa.set_memory_pool(pool)
    try:
        yield pool
    finally:
        pa.set_memory_pool(of_default)


TEXT = "x" * 2**12
REPEATED = {
    "one text in all rows": (lambda: _many(TEXT, 2400).flatten(), None),
    "one text in a list": (lambda: _many(TEXT, 2400), "a row has 9,830,400 bytes"),
    "nulls in a list": (lambda: pa.array([[None] * (2**16 + 1)]), "65,537 values"),
    "rows of nothing": (lambda: pa.nulls(2**20 + 1, pa.int8()), "1,048,577 values"),
    "a text that is packed": (lambda: pa.array(["x" * 2**21]), "a row group unpacks to 2,097,"),
}


@pytest.mark.parametrize("name", REPEATED)
def test_a_small_parquet_is_not_unpacked_to_a_large_one(tmp_path, monkeypatch, name):
    """The limits are a 256th of what they are, and so are these tables."""
    for limit in ("MAX_ROW_BYTES", "MAX_BYTES_PER_READ", "MAX_ROW_VALUES"):
        monkeypatch.setattr(tables, limit, getattr(tables, limit) // 256)
    make, message = REPEATED[name]
    path, options = tmp_path / "a.parquet", {"compression": "zstd", "store_schema": False}
    as_texts = make().type == pa.string()
    pq.write_table(
        pa.table({"q": make()}),
        path,
        use_dictionary=not as_texts,
        write_statistics=False,
        **options,
    )
    with counted_memory() as pool:
        rows = read_table(DataSource(str(path)))
        if message is None:
            assert sum(row["q"] == TEXT for _, row in rows) == 2400
            assert pool.max_memory() > 0
        else:
            with pytest.raises(
                ValueError, match=rf"a\.parquet.* {message}.*(write the table again|expected)"
            ):
                raise AssertionError([*rows])
    assert pool.max_memory() < 2**20


def test_a_parquet_of_many_levels_or_columns_is_refused(tmp_path, monkeypatch):
    """The limit on all lists of the footer holds before pyarrow builds the schema."""
    monkeypatch.setattr(tables, "MAX_FOOTER_ITEMS", 50)
    path = tmp_path / "a.parquet"
    for number in (49, 50):  # and the root
        pq.write_table(pa.table({f"a{at}": ["x"] for at in range(number)}), path)
        if number == 50:
            with pytest.raises(ValueError, match="has over 50 levels, columns or row groups"):
                [*read_table(DataSource(str(path)))]
        else:
            assert len([*read_table(DataSource(str(path)))]) == 1
    monkeypatch.undo()
    values = pa.array(["x"])
    for _ in range(60):
        values = pa.StructArray.from_arrays([values], ["a"])
    pq.write_table(pa.table({"a": values}), path)
    assert len([*read_table(DataSource(str(path)))]) == 1
    monkeypatch.setattr(tables, "MAX_NESTING", 59)
    with pytest.raises(ValueError, match="a column of 60 levels; expected at most 59"):
        [*read_table(DataSource(str(path)))]


def test_columns_of_parquet_in_other_files_are_refused(tmp_path, watched):
    pq.write_table(pa.table({"q": ["private"]}), tmp_path / "private.parquet")
    metadata = pq.read_metadata(tmp_path / "private.parquet")
    metadata.set_file_path("../private.parquet")
    metadata.write_metadata_file(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"the column q is in another file, '\.\./private"):
        read(tmp_path / "a.parquet")


def test_offsets_of_arrow_that_leave_its_bytes_are_refused(tmp_path):
    table, offsets = pa.table({"q": ["abc"]}), np.array([[0, 3], [0, 2**20]], "int32")
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as file:
        file.write_table(table)
    content = (tmp_path / "a.arrow").read_bytes().rpartition(offsets[0].tobytes())
    assert content[1]
    (tmp_path / "a.arrow").write_bytes(content[0] + offsets[1].tobytes() + content[2])
    with pytest.raises(ValueError, match=r"a\.arrow cannot be read: .*offset"):
        read(tmp_path / "a.arrow")


def test_names_of_files_are_matched_quickly():
    name = "/".join("a" * 30)
    assert find_matching_files([name], "**/" * 20 + "a") == [name]
    assert find_matching_files([name], "**/a/" * 15 + "b") == []
    assert find_matching_files([name], "**/" * 1000 + "a") == []
    assert find_matching_files([name], "*a" * 5000 + "b") == []


def write_arrow(path: Path, values: dict, kind: str = "stream", codec: str | None = None) -> None:
    table, options = pa.table(values), pa.ipc.IpcWriteOptions(compression=codec)
    opened = {"file": pa.ipc.new_file, "stream": pa.ipc.new_stream}[kind]
    with opened(path, table.schema, options=options) as file:
        file.write_table(table, max_chunksize=2**20)


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_batches_of_arrow_are_read(tmp_path, kind):
    number = 2500
    texts = [f"text {row % 7}" for row in range(number)]
    values = {"q": texts, "of": pa.array(texts).dictionary_encode(), "none": pa.nulls(number)}
    views = pa.DictionaryArray.from_arrays(
        np.zeros(number, "int8"), pa.array(["a view"], pa.string_view())
    )
    values |= {"views": views, "numbers": pa.array([*range(number)]).dictionary_encode()}
    values |= {"lists": [[row, None] for row in range(number)]}
    write_arrow(tmp_path / "a.arrow", values, kind)
    rows = [row for _, row in read_table(DataSource(str(tmp_path / "a.arrow")))]
    assert [row["q"] for row in rows] == [row["of"] for row in rows] == texts
    assert {*(row["views"] for row in rows)} == {"a view"} and rows[0]["numbers"] == 0
    assert rows[-1]["lists"] == [number - 1, None]


@pytest.mark.parametrize("kind", ["file", "stream"])
@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_compressed_arrow_is_refused_before_it_is_unpacked(tmp_path, codec, kind):
    texts = pa.array(["x" * 2**23])
    write_arrow(tmp_path / "a.arrow", {"q": texts, "of": texts.dictionary_encode()}, kind, codec)
    refused = pytest.raises(ValueError, match=r"a\.arrow is compressed or not a .*to_parquet")
    with counted_memory() as pool, refused:
        raise AssertionError(read(tmp_path / "a.arrow"))
    assert pool.max_memory() < 2**20


def test_arrow_that_is_compressed_as_of_old_and_what_the_footer_alone_leads_to_is_refused(tmp_path):
    batch = pa.record_batch([["a"]], names=["q"])
    with pa.ipc.new_stream(tmp_path / "a.arrow", batch.schema) as file:
        file.write_batch(batch, custom_metadata={"ARROW:experimental_compression": "zstd"})
    write_arrow(tmp_path / "b.arrow", {"q": ["a"]}, "file")
    content = (tmp_path / "b.arrow").read_bytes()
    (tmp_path / "b.arrow").write_bytes(content[:8] + bytes(8) + content[16:])  # as polars writes it
    for path in (tmp_path / "a.arrow", tmp_path / "b.arrow"):
        with pytest.raises(ValueError, match="is compressed or not a stream of batches.*polars"):
            raise AssertionError(read(path))


def test_a_small_arrow_does_not_make_rows_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MAX_ROW_VALUES", tables.MAX_ROW_VALUES // 256)
    write_arrow(tmp_path / "a.arrow", {"q": pa.nulls(2**19)})
    with pytest.raises(
        ValueError, match=r"bytes and \d+,\d+ rows or more; expected at most \d+,\d+"
    ):
        read(tmp_path / "a.arrow", columns={"question": "?", "answer": "q"})


@pytest.mark.parametrize(("kind", "suffix"), [("bz2", "bz2"), ("zstd", "zst")])
def test_a_compressed_text_is_not_unpacked_without_end(tmp_path, monkeypatch, kind, suffix):
    monkeypatch.setattr(text_rows, "MAX_UNPACKED_BYTES", 2**16)
    row = json.dumps({"messages": turns("inside")}) + "\n"
    path = tmp_path / f"a.jsonl.{suffix}"
    for blank in ("\n", " "):
        with pa.output_stream(str(path), compression=kind) as file:
            file.write((row + blank * 2**20).encode())
        size = path.stat().st_size
        message = rf"\.{suffix} has {size:,} bytes, and unpacks to over {max(2**16, 256 * size):,}"
        with pytest.raises(ValueError, match=message):
            read(path)
    with pa.output_stream(str(path), compression=kind) as file:
        file.write(row.encode() * 300)
    assert len(read(path)) == 300


def test_keys_of_an_object_and_columns_are_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(text_rows, "MAX_KEYS", 5)
    for number in (5, 6):
        names = [f"k{at}" for at in range(number)]
        path = write_rows(tmp_path / "a.jsonl", turns("inside"))
        row = {"messages": turns("inside"), "more": dict.fromkeys(names, 1)}
        path.write_text(json.dumps(row))
        (tmp_path / "a.csv").write_text(f"{','.join(names)}\n{','.join('x' * number)}\n")
        columns = {"question": "{k0} {k2} {k3} {k4}", "answer": "k1"}
        if number == 5:
            assert isinstance(read(path, ignore=("more",))[0], ConversationRow)
            assert isinstance(read(tmp_path / "a.csv", columns=columns)[0], ConversationRow)
            continue
        assert read(path, ignore=("more",))[0].text == "an object has 6 keys; expected at most 5"
        with pytest.raises(ValueError, match="a.csv:1: 6 columns; expected at most 5"):
            read(tmp_path / "a.csv", columns=columns)


BEFORE_ITSELF = {
    "of a header": lambda member: setattr(member, "size", -512),
    "of pax": lambda member: member.pax_headers.update(size="-1536"),
}


def refuse_negative(self, count: int) -> int:
    """Do as TarInfo._block does since CVE-2025-8194; ``next`` takes its error for the end."""
    if count < 0:
        raise tarfile.InvalidHeaderError("invalid offset")
    return -(-count // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


@pytest.mark.parametrize("newer_python", [False, True], ids=["", "newer Python"])
@pytest.mark.parametrize("place", BEFORE_ITSELF)
def test_a_member_of_an_archive_does_not_lead_back_to_itself(
    tmp_path, place, newer_python, monkeypatch
):
    if newer_python:
        monkeypatch.setattr(tarfile.TarInfo, "_block", refuse_negative)
    member = tarfile.TarInfo("a")  # without a suffix it is of no row
    BEFORE_ITSELF[place](member)
    of_text = tarfile.TarInfo("first.txt")
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(of_text)
    end = (tmp_path / "a.tar").read_bytes()[: tarfile.BLOCKSIZE]
    is_pax = place == "of pax"
    header = member.tobuf(tarfile.PAX_FORMAT if is_pax else tarfile.GNU_FORMAT)
    (tmp_path / "a.tar").write_bytes(end + header + bytes(2 * tarfile.BLOCKSIZE))
    with pytest.raises(
        ValueError, match=r"a\.tar: (a has -\d.* bytes; expected 0|neither a file nor the end)"
    ):
        read(tmp_path / "a.tar", columns={"question": "q?", "answer": "txt"})


def test_what_was_read_of_an_archive_is_not_held(tmp_path):
    header = tarfile.TarInfo("a").tobuf()
    (tmp_path / "a.tar").write_bytes(header * 2000 + bytes(2 * tarfile.BLOCKSIZE))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="contains 0 rows"):
            read(tmp_path / "a.tar", columns={"question": "q?", "answer": "txt"})
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()


def cut_archives(folder: Path) -> dict[str, bytes]:
    """Return damaged forms of an archive of three rows, at whose damage tarfile ends silently."""
    with tarfile.open(folder / "whole.tar", "w") as archive:
        for name in ("0.txt", "1.txt", "2.txt"):
            member = tarfile.TarInfo(name)
            member.size = 5
            archive.addfile(member, io.BytesIO(b"words"))
    second = 2 * tarfile.BLOCKSIZE  # behind a header and a block with its content
    whole = (folder / "whole.tar").read_bytes()
    return {
        "a flipped bit": whole[:second] + bytes([whole[second] ^ 1]) + whole[second + 1 :],
        "cut between files": whole[:second],
        "cut in a header": whole[: second + 300],
        "joined with cat": whole + whole,
    }


@pytest.mark.parametrize(
    "damage", ["a flipped bit", "cut between files", "cut in a header", "joined with cat"]
)
def test_rows_behind_the_damage_of_an_archive_are_not_lost_silently(tmp_path, damage):
    columns = {"question": "q?", "answer": "txt"}
    content = cut_archives(tmp_path)[damage]
    assert len(read(tmp_path / "whole.tar", columns=columns)) == 3
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(ValueError, match="a.tar: (neither a file nor the end|other bytes follow)"):
        read(tmp_path / "a.tar", columns=columns)


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_arrow_that_is_cut_between_batches_is_refused(tmp_path, kind):
    table = pa.table({"question": ["a?", "b?"], "answer": ["a", "b"]})
    opened = {"file": pa.ipc.new_file, "stream": pa.ipc.new_stream}[kind]
    sink = io.BytesIO()
    with opened(sink, table.schema) as file:
        for batch in table.to_batches(max_chunksize=1):
            file.write_batch(batch)
            end_of_batches = sink.tell()
    (tmp_path / "a.arrow").write_bytes(sink.getvalue()[:end_of_batches])
    with pytest.raises(ValueError, match=f"a.arrow ends at byte {end_of_batches:,} without"):
        read(tmp_path / "a.arrow")


@pytest.mark.parametrize("card", [None, "data/train-*"])
@pytest.mark.parametrize("hashes", [("", ""), ("-1a2b", "-3c4d")])  # older names have hashes
@pytest.mark.parametrize("missing", [0, 1])
def test_a_folder_with_a_missing_shard_is_refused(tmp_path, card, hashes, missing):
    (tmp_path / "data").mkdir()
    for number, ending in enumerate(hashes):
        name = f"train-{number:05}-of-00002{ending}.jsonl"
        write_rows(tmp_path / "data" / name, turns(f"row {number}"))
    write_rows(tmp_path / "data" / "test-00001-of-00002.jsonl", turns("of another split"))
    if card:
        readme(tmp_path, of_config(data_files=card))
    assert len(read(tmp_path)) == 2
    name = f"train-{missing:05}-of-00002"
    (tmp_path / f"data/{name}{hashes[missing]}.jsonl").unlink()
    with pytest.raises(ValueError, match=f"1 of 2 files of data/train: data/{name}.jsonl is"):
        read(tmp_path)


@pytest.mark.parametrize("form", [dict, list])
def test_a_card_names_the_classes_of_a_column_in_the_order_of_their_numbers(tmp_path, form):
    names = {str(number): f"class {number}" for number in range(11)}
    label = {"class_label": {"names": names if form is dict else [*names.values()]}}
    info = {"dataset_info": {"features": [{"name": "kind", "dtype": label}]}}
    readme(tmp_path, yaml.safe_dump(info, sort_keys=False))
    pq.write_table(pa.table({"ask": ["a?", "b?"], "kind": [2, 10]}), tmp_path / "a.parquet")
    source = DataSource(str(tmp_path), columns={"question": "ask", "answer": "kind"})
    answers = [messages[-1]["content"] for messages in read_conversations(source)]
    assert answers == ["class 2", "class 10"]
