"""Files and tables that rows are read from, and the files of images that rows hold."""

import base64
import json
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import datasets
import pytest

from glm4v_patched.data import fetching, text_rows
from glm4v_patched.data.image_files import ImageFiles
from glm4v_patched.data.messages import images_of
from glm4v_patched.data.rows import iter_rows, read_conversations
from glm4v_patched.data.source import DataSource, find_source_problem
from tests.data.samples import png, turns, write_rows


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_has_the_rows_of_the_lines(tmp_path, indent):
    rows = [{"messages": turns(f'q{n} \u2028 ] , \\ " {"x" * n}')} for n in range(30)]
    (tmp_path / "a.json").write_text("\ufeff\n" + json.dumps(rows, indent=indent) + "\n")
    lines = iter_rows(write_rows(tmp_path / "a.jsonl", *rows))
    assert [*iter_rows(tmp_path / "a.json")] == [*lines]  # numbered alike


def test_lines_are_lines_whatever_their_file_is_called_and_lists_they_have(tmp_path):
    rows = [{"q": f"q{n}", "a": "a", "notes": [{"of": "the row"}]} for n in range(2)]
    path = write_rows(tmp_path / "a.json", *rows)
    source = DataSource(str(path), columns={"question": "q", "answer": "a"}, ignore=("notes",))
    assert read_conversations(source) == [turns("q0"), turns("q1")]


def test_a_large_array_is_refused_with_what_makes_lines_of_it(tmp_path, monkeypatch):
    text = json.dumps([{"messages": turns(str(n))} for n in range(9)])
    for name, content in (("a.json", text), ("b.json", f'{{"data": {text}}}')):
        path = tmp_path / name
        path.write_text(content)
        monkeypatch.setattr(text_rows, "MAX_DOCUMENT_CHARACTERS", len(content))
        assert len([*iter_rows(path)]) == 9
        monkeypatch.setattr(text_rows, "MAX_DOCUMENT_CHARACTERS", len(content) - 1)
        message = (
            f"{name} has over {len(content) - 1} characters in one .* jq -c '.*' {path} > {path}l"
        )
        with pytest.raises(ValueError, match=message):
            [*iter_rows(path)]


@pytest.fixture
def saved(tmp_path) -> Path:
    """A folder with two splits, of which one has a row without an image between others."""
    features = {"role": datasets.Value("string"), "content": datasets.Value("string")}
    rows = {
        "messages": [turns("<image>q"), turns(), turns("<image><image>q")],
        "images": [[{"bytes": png()}], [], [{"bytes": png()}, {"bytes": png("blue")}]],
    }
    kinds = {"messages": [features], "images": datasets.List(datasets.Image())}
    table = datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))
    splits = datasets.DatasetDict({"train": table, "test": table.select([1])})
    splits.save_to_disk(tmp_path / "table")
    return tmp_path / "table"


def test_tables_with_images_in_them_are_read_by_their_splits(saved, cache):
    before = sorted(saved.rglob("*"))
    first, second, third = read_conversations(saved)
    assert sorted(saved.rglob("*")) == before  # a copy may be as large as the disk
    (red,), (again, blue) = images_of(first), images_of(third)
    assert Path(red).read_bytes() == png() and Path(red).parent == cache and again == red
    assert Path(blue).read_bytes() == png("blue") and second == turns()
    assert read_conversations(DataSource(str(saved), split="test")) == [turns()]
    with pytest.raises(ValueError, match="has the splits test, train and not val: set split"):
        read_conversations(DataSource(str(saved), split="val"))


def test_a_field_that_has_no_effect_is_refused(saved, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    datasets.Dataset.from_list([{"q": "a"}]).to_parquet(folder / "a.parquet")
    for path, effective in (
        (folder / "a.parquet", set()),
        (folder, {"split", "subset"}),
        (saved, {"split"}),
    ):
        for name in {"split", "subset", "revision"} - effective:
            source = DataSource(str(path), **{name: "train"})
            with pytest.raises(ValueError, match=f"{name} is 'train', and has no effect on"):
                read_conversations(source)
            assert f"{name} is 'train'" in find_source_problem(source)


def test_what_a_table_lacks_in_a_row_is_not_there_and_false_is(tmp_path):
    rows = [
        {"messages": [*turns(), turns()[0], turns()[1] | {"train": False}], "note": "x"},
        {"messages": turns("q", image=str(tmp_path / "a.png")), "note": None},
    ]
    notes = datasets.ClassLabel(names=["w", "x"])
    (tmp_path / "a.png").write_bytes(png())
    datasets.Dataset.from_list(rows).cast_column("note", notes).to_parquet(tmp_path / "a.parquet")
    source = DataSource(str(tmp_path / "a.parquet"), ignore=("note",))
    assert read_conversations(source) == [row["messages"] for row in rows]
    with pytest.raises(ValueError, match=r'a\.parquet, row 1: the key "note" .* data\.ignore'):
        read_conversations(source.path)


def test_a_class_of_minus_1_is_refused(tmp_path):
    """``datasets`` writes -1 for it."""
    features = datasets.Features({"q": datasets.Value("string"), "a": datasets.ClassLabel(2)})
    table = datasets.Dataset.from_dict({"q": ["a"], "a": [-1]}, features=features)
    table.to_parquet(tmp_path / "a.parquet")
    source = DataSource(str(tmp_path / "a.parquet"), columns={"question": "q", "answer": "a"})
    with pytest.raises(ValueError, match="row 1: a is -1; expected a class from 0 to 1"):
        read_conversations(source)


@pytest.fixture
def files(tmp_path, cache) -> ImageFiles:
    return ImageFiles(str(tmp_path), allow_urls=True)


def test_bytes_are_written_once_and_again_if_their_file_was_cut(files, cache):
    url = "data:image/png;base64," + base64.b64encode(png()).decode()
    (path,) = {files.path_of(way) for way in (png(), {"bytes": png(), "path": "x.png"}, url)}
    before = Path(path).stat().st_mtime_ns
    assert files.path_of(png()) == path and Path(path).stat().st_mtime_ns == before
    assert [file.name for file in cache.iterdir()] == [Path(path).name]
    Path(path).write_bytes(b"cut")
    assert Path(files.path_of(png())).read_bytes() == png()


def test_empty_bytes_are_no_image_and_do_not_stand_for_the_file_of_their_path(files, tmp_path):
    (tmp_path / "x.png").write_bytes(png())
    assert Path(files.path_of({"bytes": b"", "path": "x.png"})).read_bytes() == b""
    assert files.path_of({"bytes": None, "path": "x.png"}) == str(tmp_path / "x.png")


def test_a_full_disk_is_no_fault_of_a_row(tmp_path, monkeypatch):
    """With ``data.on_bad: skip`` such rows would be left out."""

    def write(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("glm4v_patched.data.image_files.write_atomically", write)
    url = "data:image/png;base64," + base64.b64encode(png()).decode()
    path = write_rows(tmp_path / "a.jsonl", turns(image=url))
    with pytest.raises(RuntimeError, match="images/.* cannot be written: No space.*XDG_CACHE"):
        [*iter_rows(path)]


def test_paths_are_of_the_folder_and_may_be_those_of_windows(files, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").touch()
    ways = ("./b/../photos/a.png", {"bytes": None, "path": "photos/a.png"}, "photos\\a.png")
    for way in (*ways, ".\\photos\\a.png"):
        assert files.path_of(way) == str(tmp_path / "photos" / "a.png")
    for way in ("photos/a.png/", "photos/a.png//", "photos/a.png/.", "photos/a.png/x/..", "."):
        with pytest.raises(ValueError, match="a folder; expected the path of a file"):
            files.path_of(way)


def test_an_image_whose_name_has_a_backslash_is_found(files, tmp_path):
    (tmp_path / "photos").mkdir()
    for name in ("photos/a.png", "photos\\a.png"):  # the second is a name of one file
        (tmp_path / name).touch()
    assert files.path_of("photos\\a.png") == str(tmp_path / "photos\\a.png")


class Server(SimpleHTTPRequestHandler):
    """Sends files of the folder that the server has."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, directory=arguments[2].folder, **options)

    def log_message(self, *arguments):
        pass

    def copyfile(self, source, out):
        out.write(source.read()[: 40 if "cut" in self.path else None])


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A folder, and the URL under which its files are served until the block ends."""
    folder = tmp_path / "served"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        server.folder = str(folder)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(fetching, "ALLOWED_PORTS", [server.server_port])
        monkeypatch.setattr(fetching, "is_public", lambda address: True)
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_urls_are_fetched_once_and_only_where_allowed(files, tmp_path, served, words):
    folder, url = served
    for name, content in (("a", png()), ("cut", png()), ("page", b"<html>Too many</html>")):
        (folder / f"{name}.png").write_bytes(content)
    port = url.rpartition(":")[2]
    with words.refused(ValueError, "data.allow_urls: true", port=port):
        ImageFiles(str(tmp_path)).path_of(f"{url}/a.png")
    path = files.path_of(f"{url}/a.png")
    assert Path(path).read_bytes() == png()
    with words.refused(ValueError, "no.png", "404", port=port):
        files.path_of(f"{url}/no.png")
    with pytest.raises(ValueError, match=rf"ended after 40 of {len(png())} bytes"):
        files.path_of(f"{url}/cut.png")
    with words.refused(ValueError, "page.png", "<html>Too many", port=port):
        files.path_of(f"{url}/page.png")
    (folder / "page.png").write_bytes(png("blue"))  # it is one later
    downloaded = Path(files.path_of(f"{url}/page.png"))
    assert downloaded.read_bytes() == png("blue") and len([*downloaded.parent.iterdir()]) == 2
    (folder / "a.png").unlink()
    assert files.path_of(f"{url}/a.png") == path
