"""Files as people have them: each is read right, or refused with a command that makes it readable
when it is run as printed."""

import bz2
import gzip
import io
import json
import lzma
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
import unicodedata
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from PIL import Image, PngImagePlugin

from glm4v_patched.data import encodings, file_signatures
from glm4v_patched.data.decoding import find_image_problem
from glm4v_patched.data.messages import text_of
from glm4v_patched.data.rows import RowProblem, iter_rows, split_usable_rows
from glm4v_patched.data.source import DataSource, make_sources
from tests.data.samples import png, turns

QUESTION, ANSWER = "什么颜色？", "红"
TABLE = f"image,question,answer\na b.png,{QUESTION},{ANSWER}\na b.png,在哪里？,第二\n"
COLUMNS = {"question": "question", "answer": "answer", "image": "image"}


@pytest.fixture
def folder(tmp_path) -> Path:
    folder = tmp_path / "it's mine"  # a name that a shell must not split
    folder.mkdir()
    (folder / "a b.png").write_bytes(png())
    return folder


def line(image: str, **row) -> str:
    return json.dumps({"messages": turns(QUESTION, ANSWER, image=image), **row}) + "\n"


def read(path: Path, **fields) -> list:
    (source,) = make_sources([{"path": str(path), **fields}], {})
    rows, problems = split_usable_rows(iter_rows(source))
    if problems:
        raise ValueError(problems[0].text)
    return rows


def check(path: Path) -> None:
    """Check that the rows of TABLE are read from a file."""
    rows = read(path, **({} if path.suffix == ".jsonl" else {"columns": COLUMNS}))
    assert [text_of(message) for message in rows[0].messages] == [QUESTION, ANSWER]
    assert len(rows) == 2 and {*rows[0].images} == {str(path.parent / "a b.png")}


def run_cure(problem: str, folder: Path, result: str) -> Path:
    """Run the command at the end of a message, and return the file that it makes."""
    command = re.split(r"(?:expected rows|is right|separator|of text|drawing|PDF): ", problem)[-1]
    program = command.split()[0]
    for package in re.findall(r"import sys, (\w+)", command):
        if not find_spec("python_calamine" if package == "pandas" else package):
            pytest.skip(f"{package} is not installed")
    if not shutil.which(program):
        pytest.skip(f"{program} is not installed")
    environment = os.environ | {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1"}  # it installs nothing
    subprocess.run(["bash", "-c", command], check=True, timeout=120, env=environment)
    return next(folder.glob(result))


ENCODED = ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be")


@pytest.mark.parametrize("encoding", ENCODED)
def test_encodings_that_a_file_tells_of_are_read(folder, encoding):
    """Also of compressed files, and with the tabs that Excel writes as Unicode text."""
    (folder / "a.csv").write_bytes(TABLE.encode(encoding))
    check(folder / "a.csv")
    (folder / "a.csv").write_bytes(TABLE.replace(",", "\t").replace("\n", "\r\n").encode(encoding))
    check(folder / "a.csv")
    (folder / "b.csv.gz").write_bytes(gzip.compress(TABLE.encode(encoding)))
    check(folder / "b.csv.gz")
    (folder / "c.jsonl").write_bytes((line("a b.png") * 2).encode(encoding))
    check(folder / "c.jsonl")


PACKED = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("packed", ["", *PACKED])
def test_other_encodings_are_refused_with_the_command_that_converts_them(folder, packed):
    content = TABLE.encode("gb18030")
    path = folder / ("a.csv." + packed if packed else "a.csv")
    path.write_bytes(PACKED[packed](content) if packed else content)
    with pytest.raises(ValueError, match='"什么颜色？" in GB18030, .* in BIG5') as error:
        check(path)
    check(run_cure(str(error.value), folder, "*_converted.csv"))


SAMPLES = {
    "GB18030": ("图片,问题\n1.png,什么颜色？\n", "猫在红色的沙发上"),
    "BIG5": ("圖片裡有什麼？有一隻貓坐在紅色的沙發上。", "a.png,這是什麼顏色？"),
    "SHIFT_JIS": ("この画像には何がありますか？", "a.png,色は？"),
    "EUC-JP": ("この画像には何がありますか？", "a.png,色は？"),
    "EUC-KR": ("이 그림에는 무엇이 있습니까?", "a.png,무슨 색?"),
    "WINDOWS-1251": ("Что на этой картинке? Кот.", "Який колір?"),
    "WINDOWS-1252": ("Où est l'élève ? Déjà là…", "Straße, Größe: 5 €", "¿Qué año?", "“été” – 5 €"),
}


@pytest.mark.parametrize("encoding", SAMPLES)
def test_the_command_names_the_encoding_of_most_texts(encoding):
    for text in SAMPLES[encoding]:
        cure = encodings.encoding_cure("a.csv", ".csv", text.encode(encoding))
        assert cure and f"iconv -f {encoding} -t" in cure, text
        assert f"in {encoding}" in cure


def test_one_bad_byte_of_a_file_in_utf8_is_told_with_its_place(folder):
    (folder / "a.csv").write_bytes(TABLE.encode() + b"a b.png,\xff,x\na b.png,\0,x\n")
    *_, bad, null = iter_rows(DataSource(str(folder / "a.csv"), columns=COLUMNS))
    assert (bad.line, null.line) == (4, 5)
    assert "character 8 is the byte 0xff, which is not UTF-8" in bad.text
    assert "character 8 is the byte 0x00, which is no text" in null.text


def test_a_mark_where_files_were_joined_is_no_text(folder):
    first, second = TABLE.splitlines(keepends=True)[:2], TABLE.splitlines(keepends=True)[2:]
    (folder / "a.csv").write_text("".join(["\ufeff", *first, "\ufeff", *second]))
    (folder / "a.jsonl").write_text(("\ufeff" + line("a b.png")) * 2)
    check(folder / "a.csv")
    check(folder / "a.jsonl")


def xlsx() -> bytes:
    """A workbook with the cells of TABLE."""
    rows = "".join(
        "<row>" + "".join(f'<c t="inlineStr"><is><t>{cell}</t></is></c>' for cell in row) + "</row>"
        for row in (text.split(",") for text in TABLE.splitlines())
    )
    start, office = '<?xml version="1.0"?>', "http://schemas.openxmlformats.org/officeDocument/2006"
    main = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    package = "http://schemas.openxmlformats.org/package/2006"
    kind = "application/vnd.openxmlformats-officedocument.spreadsheetml"

    def relationship(name: str, target: str) -> str:
        inner = f'<Relationship Id="r1" Type="{office}/relationships/{name}" Target="{target}"/>'
        return f'<Relationships xmlns="{package}/relationships">{inner}</Relationships>'

    xml_by_path = {
        "[Content_Types].xml": f'<Types xmlns="{package}/content-types">'
        '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.'
        f'relationships+xml"/><Override PartName="/xl/workbook.xml" ContentType="{kind}.sheet.main'
        f'+xml"/><Override PartName="/xl/s.xml" ContentType="{kind}.worksheet+xml"/></Types>',
        "_rels/.rels": relationship("officeDocument", "xl/workbook.xml"),
        "xl/workbook.xml": f'<workbook xmlns="{main}" xmlns:r="{office}/relationships"><sheets>'
        '<sheet name="a" sheetId="1" r:id="r1"/></sheets></workbook>',
        "xl/_rels/workbook.xml.rels": relationship("worksheet", "s.xml"),
        "xl/s.xml": f'<worksheet xmlns="{main}"><sheetData>{rows}</sheetData></worksheet>',
    }
    return archive({path: start + xml for path, xml in xml_by_path.items()})


def archive(files: dict[str, str]) -> bytes:
    with io.BytesIO() as packed:
        with zipfile.ZipFile(packed, "w") as file:
            for name, text in files.items():
                file.writestr(name, text)
        return packed.getvalue()


def database() -> bytes:
    with sqlite3.connect(":memory:") as connection:
        connection.execute("create table mine (image, question, answer)")
        rows = [text.split(",") for text in TABLE.splitlines()[1:]]
        connection.executemany("insert into mine values (?, ?, ?)", rows)
        return connection.serialize()


# Files of rows: the content, what the message names, and the file that its command makes.
CONVERTED = {
    "a.csv": (TABLE.replace(",", "|").encode(), 'with "|" in its name', "*.csv"),
    "a.xlsx": (xlsx(), "is a workbook", "*.csv"),
    "a.zip": (archive({"a.csv": TABLE}), "is a zip archive", "*_converted/a.csv"),
    "a.db": (database(), "is an SQLite database", "*.json"),
    "a.csv.gz": (
        gzip.compress(archive({"a.csv": TABLE})),
        "zip archive, in a compressed",
        "*_conv*",
    ),
}


@pytest.mark.parametrize("name", CONVERTED)
def test_a_file_of_another_kind_is_refused_with_the_command_that_converts_it(folder, name):
    content, named, result = CONVERTED[name]
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(named)) as error:
        check(folder / name)
    converted = run_cure(str(error.value), folder, result.replace("*.", "*_converted."))
    if name == "a.csv.gz":  # the command unpacks it, and the next message names the archive
        with pytest.raises(ValueError, match="is a zip archive"):
            check(converted)
    elif converted.parent != folder:
        check(converted.rename(folder / "unpacked.csv"))
    else:
        check(converted)


# Files that no command converts, or none that a test may run.
REFUSED = {
    "damaged": (b"\xff\xfe" + TABLE.encode("utf-16-le") + b"\r\n", "damaged UTF-16"),
    "odd": (TABLE.encode("utf-16") + b"\n", "save it as UTF-8"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git -C .* lfs pull"),
    "page": (b"<!DOCTYPE html><html>Too many requests</html>", "web page: |web page; "),
    "error": (b'<?xml version="1.0"?><Error>AccessDenied</Error>', "server's error"),
    "document": (archive({"word/document.xml": ""}), "is a document; .* table as CSV"),
    "pickle": (b"\x80\x04\x95", "pickle, which can run code"),
    "zeros": (bytes(99), "only zero bytes; .* again"),
    "image": (png(), "not text; .* folder of an image"),
    "notes": (b"\0\x05\x16\x07\0\2\0\0Mac OS X", r"macOS's notes .* -name '\._\*' -delete"),
    "cut": (gzip.compress(TABLE.encode() * 99)[:-20], "cannot be read: "),
    "mark": (b"\xef\xbb\xbf", "contains 0 rows"),
    "nothing": (b"", "is empty"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_has_no_rows_is_refused_by_its_name(folder, name):
    content, named = REFUSED[name]
    for suffix in (".csv", ".jsonl"):
        (folder / f"a{suffix}").write_bytes(content)
        with pytest.raises(ValueError, match=named):
            check(folder / f"a{suffix}")


def test_paths_of_images_are_read_as_other_programs_write_them(folder):
    name = unicodedata.normalize("NFD", "é.png")
    (folder / name).write_bytes(png())
    (folder / "100%20.png").write_bytes(png())
    url = folder.as_uri()
    paths = {
        "a b.png": (
            f"file://{folder}/a b.png",
            f"{url}/a%20b.png",
            f"FILE:{folder}/a b.png",
            f"file://localhost{folder}/a%20b.png",
            ".\\a b.png",
        ),
        name: ("é.png", name, f"{url}/e%CC%81.png"),
        "100%20.png": (f"file://{folder}/100%20.png", f"{url}/100%2520.png"),
    }
    for expected, written in paths.items():
        (folder / "a.jsonl").write_text("".join(map(line, written)))
        assert {*sum((row.images for row in read(folder / "a.jsonl")), [])} == {
            str(folder / expected)
        }
    (folder / "100 .png").write_bytes(png())  # now the first of the two may be either
    (folder / "a.jsonl").write_text(line(paths["100%20.png"][0]))
    with pytest.raises(ValueError, match=r"may be .*/100%20\.png|may be .*/100 \.png"):
        read(folder / "a.jsonl")


def test_images_that_were_moved_are_found_by_their_old_root(folder):
    for root, written in (
        ("/mnt/old", "/mnt/old/a b.png"),
        ("/mnt/old/", "file:///mnt/old/a%20b.png"),
        ("C:\\old", "C:\\old\\a b.png"),
        ("C:\\old\\", "C:/old/a b.png"),
        ("\\\\server\\share", "\\\\server\\share\\a b.png"),
        ("images", "images/a b.png"),
    ):
        (folder / "a.jsonl").write_text(line(written) + line("a b.png"))
        fields = {"image_root": root, "image_folder": str(folder)}
        first, second = read(folder / "a.jsonl", **fields)
        assert first.images == second.images == [str(folder / "a b.png")]


def test_an_old_root_is_not_the_beginning_of_a_longer_name(folder):
    (folder / "a.jsonl").write_text(line("/mnt/older/a b.png"))
    with pytest.raises(ValueError, match="/mnt/older/a b.png does not exist"):
        read(folder / "a.jsonl", image_root="/mnt/old", image_folder=str(folder))


def talk(text: str, **row) -> str:
    speakers = {"user": text, "assistant": ANSWER}
    return json.dumps(
        {"conversations": [{"from": by, "value": value} for by, value in speakers.items()], **row}
    )


MINICPM = {"<image_01>": "a b.png", "<image_00>": "b.png"}


def test_images_named_in_the_text_are_read_in_its_order(folder):
    (folder / "b.png").write_bytes(png("blue"))
    (folder / "a.jsonl").touch()
    for row in (
        talk("Picture 1: <img>b.png</img>\nPicture 2: <img>a b.png</img>\nq"),
        talk("<image_00>\n<image_01>\nq", image=MINICPM),
        talk("<image>\n<image>\nq", image={"<image_00>": "b.png", "<image_01>": "a b.png"}),
    ):
        (folder / "a.jsonl").write_text(row)
        (only,) = read(folder / "a.jsonl")
        assert only.images == [str(folder / name) for name in ("b.png", "a b.png")]
        assert text_of(only.messages[0]) == "q"
    for row, named in (
        (talk("see <img>b.png</img> there"), "in the middle of the text"),
        (talk("<img>none.png</img>q"), "none.png does not exist"),
        (talk("<img>b.png</img>q", image="a b.png"), "the row has 1 images, but its messages"),
        (talk("<image_00>q", image=MINICPM), 'write "images": '),
        (talk("<image_00>q", image={"first": "b.png"}), '"first": write "images": '),
    ):
        (folder / "a.jsonl").write_text(row)
        with pytest.raises(ValueError, match=named):
            read(folder / "a.jsonl")


def test_nan_is_read_where_it_is_ignored_and_nowhere_else(folder):
    nan = float("nan")
    (folder / "a.jsonl").write_text(line("a b.png", score=nan, more={"loss": [nan]}))
    assert len(read(folder / "a.jsonl", ignore=["score", "more"])) == 1
    tool = {"type": "function", "function": {"name": "f", "parameters": {"most": nan}}}
    system = {"role": "system", "content": "", "tools": [tool]}
    for row, fields, named in (
        ({"messages": turns(), "score": nan}, {}, '"score" is not read'),
        ({"messages": [system, *turns()]}, {}, "message 1 of 3: .* not JSON compliant"),
        ({"question": "q", "answer": nan}, {"columns": COLUMNS}, "answer is NaN; expected text"),
    ):
        (folder / "a.jsonl").write_text(json.dumps(row))
        with pytest.raises(ValueError, match=named):
            read(folder / "a.jsonl", **fields)


@pytest.mark.parametrize(
    "more",
    [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"messages": turns(), "rejected_response": "b"},
        {"prompt": "q", "completion": "a", "label": False},
        {"input": {}, "preferred_output": [], "non_preferred_output": []},
        {"conversations": [], "chosen": {}, "rejected": {}},
    ],
    ids=["TRL", "ms-swift", "KTO", "OpenAI", "LLaMA-Factory"],
)
def test_preferences_are_refused_with_the_page_that_trains_on_them(folder, more):
    (folder / "a.jsonl").write_text(json.dumps(more))
    (row,) = iter_rows(folder / "a.jsonl")
    assert isinstance(row, RowProblem) and "TRL trains on (docs/frameworks.md)" in row.text
    page = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text()
    assert all(f"trl.{kind}Trainer" in page for kind in ("DPO", "KTO", "Reward"))


def encoded(kind: str, image: Image.Image | None = None, **options) -> bytes:
    with io.BytesIO() as file:
        (image or Image.new("RGB", (16, 16), "red")).save(file, kind, **options)
        return file.getvalue()


def commented(texts: int, size: int, compressed: bool) -> bytes:
    info = PngImagePlugin.PngInfo()
    for number in range(texts):
        info.add_text(f"text {number}", "x" * size, zip=compressed)
    return encoded("PNG", pnginfo=info)


PAGE = b"""%PDF-1.4
1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj
2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj
3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 99 99]>>endobj
trailer<</Root 1 0 R>>"""
DRAWING = b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'
# Images: the content, what the message names (none for images that are read), and the result.
IMAGES = {
    "avif": (encoded("AVIF"), None, ""),
    "text chunk": (commented(1, 2**20 + 9, False), None, ""),
    "long text": (commented(1, 2**21, True), "has over 1 MiB of text: ", "*_converted.png"),
    "many texts": (commented(70, 10**6, True), "has over 1 MiB of text: ", "*_converted.png"),
    "svg": (DRAWING, "is an SVG drawing: ", "*_converted-1.png"),
    "pdf": (PAGE, "is a PDF: ", "*_converted-1.png"),
    "dicom": (bytes(128) + b"DICM" + bytes(50), "is a DICOM file: dcmj2pnm", ""),
    "page": (b"<html>404 <svg></svg></html>", "is a web page: copy or download", ""),
    "error": (b'{"error": "too many requests"}', "is text, such as a server's error", ""),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS, .* pull", ""),
    "video": (b"\0\0\0\x18ftypmp42" + bytes(40), "is a video: .*ffmpeg -i", ""),
    "raw": (b"FUJIFILM" + bytes(99), "is a RAW photo: .*rawpy", ""),
    "heic": (b"\0\0\0\x18ftypheic" + bytes(40), "is HEIC or HEIF: .*install pillow-heif", ""),
    "zip": (archive({"a.png": ""}), "is a zip archive: unzip", ""),
}


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_is_read_or_refused_by_its_kind_with_a_command_that_converts_it(folder, name):
    content, named, result = IMAGES[name]
    path = folder / "c.png"
    path.write_bytes(content)
    problem = find_image_problem(content, str(path))
    if named is None:
        assert problem is None
        return
    assert problem and re.search(named, problem), problem
    if result:
        assert find_image_problem(run_cure(problem, folder, result).read_bytes()) is None


def test_heic_is_read_where_pillow_heif_is_installed():
    pillow_heif = pytest.importorskip("pillow_heif")
    content = encoded("HEIF", Image.new("RGB", (16, 16), (200, 20, 20)))
    assert content[4:8] == b"ftyp" and pillow_heif.is_supported(content)
    assert find_image_problem(content) is None


def test_every_cure_names_the_file_as_a_shell_reads_it():
    for _, cure in file_signatures.SIGNATURES.values():
        filled = file_signatures.fill_cure(cure, "/tmp/it's a.png")
        assert not re.search("FILE|RESULT|FOLDER", filled)
        if "FILE" in cure:
            assert """'/tmp/it'"'"'s a.png'""" in filled
        if "python -c" in cure:
            assert f"{shlex.quote(sys.executable)} -c" in filled
