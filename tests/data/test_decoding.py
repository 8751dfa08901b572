"""Pictures that are decoded before a training: which are refused, and by which processes."""

import base64
import io
import os
import signal
import struct
import subprocess
import sys
import warnings
import zlib
from pathlib import Path

import psutil
import pytest
from PIL import Image

from glm4v_patched.data import check, decoding
from glm4v_patched.data.check import require_pictures
from glm4v_patched.data.decoding import find_fault, may_be_decoded, read_facts, read_facts_of_all
from tests.helpers.data_forms import png, turns, write_rows


def encoded(kind: str, mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise((64, 48), 80).convert(mode).save(buffer, kind)
    return buffer.getvalue()


def png_of(side: int, depth: int, color: int, lines: bytes) -> bytes:
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", side, side, depth, color, 0, 0, 0)),
        (b"IDAT", zlib.compress(lines)),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


def of_16_bits(kind: str) -> bytes:
    """A picture of 2 x 2 pixels, whose numbers are 256, in three channels; Pillow writes none."""
    numbers = (256).to_bytes(2, "big")
    if kind == "SGI":
        header = struct.pack(">HBBHHHH", 474, 0, 2, 3, 2, 2, 3)
        return header.ljust(512, b"\0") + numbers * 12
    if kind == "TIFF":
        entries = [(256, 3, 1, 2), (257, 3, 1, 2), (258, 3, 3, 122), (259, 3, 1, 1), (262, 3, 1, 2),
                   (273, 4, 1, 128), (277, 3, 1, 3), (278, 3, 1, 2), (279, 4, 1, 24)]  # fmt: skip
        content = struct.pack("<2sHIH", b"II", 42, 8, len(entries))
        content += b"".join(struct.pack("<HHII", *entry) for entry in entries) + bytes(4)
        return (
            content + struct.pack("<3H", 16, 16, 16).rjust(128 - len(content), b"\0") + numbers * 12
        )
    color, channels = {"RGB": (2, 3), "LA": (4, 2), "RGBA": (6, 4)}[kind]
    return png_of(2, 16, color, (b"\0" + numbers * 2 * channels) * 2)


def cut(content: bytes) -> bytes:
    return content[: len(content) * 3 // 4]


def flipped(content: bytes) -> bytes:
    half = len(content) // 2
    return content[:half] + bytes([content[half] ^ 255]) + content[half + 1 :]


KINDS = ("JPEG", "BMP", "GIF", "PNG", "TIFF", "WEBP", "PPM")
DEEP = {kind: of_16_bits(kind) for kind in ("RGB", "LA", "RGBA", "TIFF", "SGI")}
BAD = {f"16 bits, {kind}": (content, "has the mode .*;16[BL], ") for kind, content in DEEP.items()}
BAD |= {f"{kind} cut": (cut(encoded(kind)), "cannot be decoded") for kind in KINDS}
BAD |= {
    "PNG with a flipped byte": (flipped(encoded("PNG")), "cannot be decoded"),
    "empty": (b"", "is empty: it has 0 bytes"),
    "words": (b"hello", "cannot be decoded: it is no picture of a kind"),
    "EPS": (encoded("EPS"), "is PostScript"),
    "16 bits": (encoded("PNG", "I;16"), "has the mode I;16, .*expected 8 bits a channel"),
    "float": (encoded("TIFF", "F"), "has the mode F, .*expected 8 bits a channel"),
    "int32": (encoded("TIFF", "I"), "has the mode I, .*expected 8 bits a channel"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_picture_that_cannot_be_used_is_refused_with_file_and_line(tmp_path, processor, name):
    """And by the image processor, however it comes."""
    content, message = BAD[name]
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "b.png").write_bytes(content)
    path = write_rows(tmp_path / "data.jsonl", turns(image="a.png"), turns(image="b.png"))
    told = rf"1 of 2 .*\n.*data\.jsonl:2: the image .*b\.png {message}"
    with pytest.raises(ValueError, match=told):
        require_pictures(path, tmp_path / "m.sqlite")
    for picture in (str(tmp_path / "b.png"), content, base64.b64encode(content).decode()):
        with pytest.raises(ValueError):
            processor.image_processor(picture)
    for file in (tmp_path / "b.png", io.BytesIO(content)) if "16 bits," in name else ():
        image = Image.open(file)
        for _ in range(2):
            with pytest.raises(ValueError, match=";16[BL]', of more than 8 bits.*scale it"):
                processor.image_processor(image)


def test_pictures_of_every_kind_are_taken(tmp_path, processor):
    header = struct.pack("<2sIHHI", b"BM", 70, 0, 0, 54)
    header += struct.pack("<IiiHHIIiiII", 40, 2, 2, 1, 16, 0, 8, 0, 0, 0, 0)
    contents = [header + bytes(16)]  # 16 bits a pixel, not a channel
    modes = {"PNG": ["1", "L", "LA", "P", "RGB", "RGBA"], "JPEG": ["L", "RGB", "CMYK"]}
    contents += [encoded(kind, mode) for kind in KINDS for mode in modes.get(kind, ["RGB"])]
    assert [find_fault(content) for content in contents] == [None] * len(contents)
    processor.image_processor(contents)


@pytest.mark.parametrize("by", ["pixels", "Pillow's own limit", "bytes"])
def test_a_picture_too_large_to_decode_is_refused(tmp_path, monkeypatch, words, by):
    (tmp_path / "a.png").write_bytes(png())
    assert read_facts(str(tmp_path / "a.png")).fault is None and may_be_decoded(tmp_path / "a.png")
    owner, name, limit = {
        "pixels": (decoding, "MOST_PIXELS", 64),
        "Pillow's own limit": (Image, "MAX_IMAGE_PIXELS", 32),
        "bytes": (decoding, "MOST_BYTES", len(png())),
    }[by]
    monkeypatch.setattr(owner, name, limit)
    assert read_facts(str(tmp_path / "a.png")).fault is None
    monkeypatch.setattr(owner, name, limit - 1)
    fault = read_facts(str(tmp_path / "a.png")).fault
    words(fault, bytes_there=len(png()), bytes_taken=len(png()) - 1)
    assert not may_be_decoded(tmp_path / "a.png")


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "ICO"])
def test_a_picture_of_169_megapixels_is_told_by_its_header(tmp_path, kind):
    """It took 2 GB of memory, and 10 seconds."""
    (tmp_path / "a").write_bytes(with_sides_of_13_000(kind))
    fault, megabytes = looked_at(tmp_path / "a")
    assert fault.startswith("is too large (13,000 x 13,000 pixels); expected 120,000,000 pixels")
    assert megabytes < 300


def test_a_picture_of_108_megapixels_is_taken_and_is_in_memory_once(tmp_path):
    Image.new("L", (12_000, 9_000)).convert("RGB").save(tmp_path / "a.jpg")
    fault, megabytes = looked_at(tmp_path / "a.jpg")
    assert fault == "None" and megabytes < 700


LOOK = r"""
import re, sys
from glm4v_patched.data.decoding import read_facts
most = lambda: int(re.search(r"VmHWM:\s*(\d+)", open("/proc/self/status").read())[1])
before = most()
print(read_facts(sys.argv[1]).fault, (most() - before) / 1024, sep="\n")
"""


def looked_at(path: Path) -> tuple[str, float]:
    """What a process finds of a picture, and what it takes in memory."""
    command = [sys.executable, "-c", LOOK, str(path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    fault, megabytes = told.splitlines()
    return fault, float(megabytes)


def with_sides_of_13_000(kind: str) -> bytes:
    side = 13_000
    if kind == "TIFF":
        buffer = io.BytesIO()
        Image.new("1", (side, side)).save(buffer, kind, compression="group4")
        return buffer.getvalue()
    content = png_of(side, 1, 0, bytes(side * (side // 8 + 1)))
    directory = struct.pack("<HHHBBBBHHII", 0, 1, 1, 64, 64, 0, 0, 1, 32, len(content), 22)
    return directory + content if kind == "ICO" else content


def test_pillows_warnings_are_not_shown_and_all_others_still_are(monkeypatch):
    """Also while threads look at pictures, where ``catch_warnings`` puts back another's filters."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 63)  # then Pillow warns
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with monkeypatch.context() as none:
            none.setattr(warnings, "catch_warnings", None)
            assert find_fault(png()) is None
        assert shown == []
        warnings.warn("of others", stacklevel=1)
    assert [str(each.message) for each in shown] == ["of others"]


# Processes


@pytest.fixture
def picture(tmp_path) -> str:
    (tmp_path / "a.png").write_bytes(png())
    return str(tmp_path / "a.png")


def test_processes_find_what_one_finds_in_the_same_order(tmp_path):
    contents = [content for content, _ in BAD.values()] + [png()] * 3
    paths = [str(tmp_path / f"{n}.png") for n in range(len(contents))] + ["no.png", "a\nb.png"]
    for path, content in zip(paths, contents, strict=False):
        Path(path).write_bytes(content)
    alone = list(read_facts_of_all(paths, 0))
    assert list(read_facts_of_all(paths, 2)) == alone == [read_facts(path) for path in paths]
    assert alone[-3].fault is None and alone[-2].fault == "does not exist"


def test_few_pictures_start_no_process_and_many_at_most_one_a_core():
    assert check._processes(64, 2**20) == 0
    assert check._processes(65, 2**20) == 1
    assert check._processes(10**6, 10**12) == os.cpu_count()


def test_a_picture_that_ends_its_process_is_named_and_the_others_are_decoded(picture, monkeypatch):
    script = "import os; from glm4v_patched.data import decoding as d; look = d.read_facts; "
    script += "d.read_facts = lambda path: os._exit(7) if 'fatal' in path else look(path); "
    script += "d.answer_until_input_ends(d.read_facts)"
    monkeypatch.setattr(decoding, "python_module", lambda _: [sys.executable, "-c", script])
    facts = list(read_facts_of_all([picture, "fatal", picture, "fatal", picture], 2))
    assert [fact.fault is None for fact in facts] == [True, False, True, False, True]
    assert facts[1].fault == "ended the process that decoded it, with exit status 7"


def test_processes_that_cannot_start_are_not_blamed_on_pictures(monkeypatch):
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    monkeypatch.setattr(decoding, "python_module", lambda _: command)
    with pytest.raises(RuntimeError, match="ended as it started, with exit status 3"):
        list(read_facts_of_all(["a.png"], 1))


ENDLESS = """
import itertools, signal, sys
from glm4v_patched.data.decoding import read_facts_of_all
signal.signal(signal.SIGINT, signal.default_int_handler)
for count, _ in enumerate(read_facts_of_all(itertools.repeat(sys.argv[1]), 2)):
    if not count:
        print("decoding", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_processes_end_with_the_one_that_started_them(picture, number):
    command = [sys.executable, "-c", ENDLESS, picture]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        parent.stdout.readline()
        children = psutil.Process(parent.pid).children(recursive=True)
        assert len(children) == 2
        parent.send_signal(number)
        parent.wait(20)
    assert psutil.wait_procs(children, timeout=20)[1] == []


@pytest.mark.parametrize("asked", [1, 50])
def test_processes_end_with_their_questions_or_when_no_more_answers_are_wanted(picture, asked):
    before = psutil.Process().children()
    answers = read_facts_of_all([picture] * 50, 2)
    for _ in range(asked):
        next(answers)
    children = [child for child in psutil.Process().children() if child not in before]
    assert len(children) == 2
    if asked == 50:
        assert next(answers, None) is None
    else:
        answers.close()
    assert not any(child.is_running() for child in children)


def test_reading_rows_and_decoding_pictures_needs_no_torch():
    script = "import sys; from glm4v_patched.data import decoding, formats, check_cache, rows; "
    script += "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
