"""Pictures that are decoded before a training: which are refused, and by which processes."""

import base64
import io
import struct
import subprocess
import sys
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
    header = struct.pack(">IIBBBBB", side, side, depth, color, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b"")]
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
    return png_of(2, 16, 2, (b"\0" + numbers * 2 * 3) * 2)


KINDS = ("JPEG", "BMP", "GIF", "PNG", "TIFF", "WEBP", "PPM")
DEEP = "has the mode .*;16[BL], "
BAD = {f"16 bits, {kind}": (of_16_bits(kind), DEEP) for kind in ("RGB", "SGI")}
BAD |= {
    f"{kind} cut": (encoded(kind)[: len(encoded(kind)) * 3 // 4], "cannot be decoded")
    for kind in KINDS
}
BAD |= {
    "empty": (b"", "is empty: it has 0 bytes"),
    "words": (b"hello", "cannot be decoded: it is no picture of a kind"),
    "EPS": (encoded("EPS"), "is PostScript"),
    "16 bits": (encoded("PNG", "I;16"), "has the mode I;16, .*expected 8 bits a channel"),
}


def test_a_picture_that_cannot_be_used_is_refused_with_file_and_line(tmp_path, processor):
    """And by the image processor, however it comes."""
    for number, (content, message) in enumerate(BAD.values()):
        file = tmp_path / f"{number}.png"
        file.write_bytes(content)
        path = write_rows(tmp_path / "data.jsonl", turns(), turns(image=file.name))
        told = rf"1 of 2 .*\n.*data\.jsonl:2: the image .*{file.name} {message}"
        with pytest.raises(ValueError, match=told):
            require_pictures(path, tmp_path / "m.sqlite")
        for picture in (str(file), content, base64.b64encode(content).decode()):
            with pytest.raises(ValueError):
                processor.image_processor(picture)
        if message == DEEP:
            image = Image.open(file)
            for _ in range(2):
                with pytest.raises(ValueError, match=";16[BL]', of more than 8 bits.*scale it"):
                    processor.image_processor(image)


def test_pictures_of_every_kind_are_taken(processor):
    modes = {"PNG": ["1", "L", "LA", "P", "RGB", "RGBA"], "JPEG": ["L", "RGB", "CMYK"]}
    contents = [encoded(kind, mode) for kind in KINDS for mode in modes.get(kind, ["RGB"])]
    assert [find_fault(content) for content in contents] == [None] * len(contents)
    processor.image_processor(contents)


@pytest.mark.parametrize("by", ["pixels", "Pillow's own limit", "bytes"])
def test_a_picture_too_large_to_decode_is_refused(picture, monkeypatch, words, by):
    owner, name, limit = {
        "pixels": (decoding, "MOST_PIXELS", 64),
        "Pillow's own limit": (Image, "MAX_IMAGE_PIXELS", 32),
        "bytes": (decoding, "MOST_BYTES", len(png())),
    }[by]
    monkeypatch.setattr(owner, name, limit)
    assert read_facts(picture).fault is None and may_be_decoded(picture)
    monkeypatch.setattr(owner, name, limit - 1)
    words(read_facts(picture).fault, bytes_there=len(png()), bytes_taken=len(png()) - 1)
    assert not may_be_decoded(picture)


LOOK = r"""
import re, sys
from glm4v_patched.data.decoding import read_facts
most = lambda: int(re.search(r"VmHWM:\s*(\d+)", open("/proc/self/status").read())[1])
before = most()
print(*(read_facts(path).fault for path in sys.argv[1:]), (most() - before) / 1024, sep="\n")
"""


def test_a_picture_of_169_megapixels_is_told_by_its_header_and_one_of_108_is_in_memory_once(
    tmp_path,
):
    (tmp_path / "a.png").write_bytes(png_of(13_000, 1, 0, bytes(13_000 * (13_000 // 8 + 1))))
    Image.new("L", (12_000, 9_000)).convert("RGB").save(tmp_path / "b.jpg")
    command = [sys.executable, "-c", LOOK, str(tmp_path / "a.png"), str(tmp_path / "b.jpg")]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    large, fault, megabytes = told.splitlines()
    assert large.startswith("is too large (13,000 x 13,000 pixels); expected 120,000,000 pixels")
    assert fault == "None" and float(megabytes) < 700


def test_processes_find_what_one_finds_in_the_same_order(tmp_path):
    assert (check._processes(64, 2**20), check._processes(65, 2**20)) == (0, 1)
    contents = [content for content, _ in BAD.values()] + [png()] * 3
    paths = [str(tmp_path / f"{n}.png") for n in range(len(contents))] + ["no.png", "a\nb.png"]
    for path, content in zip(paths, contents, strict=False):
        Path(path).write_bytes(content)
    alone = list(read_facts_of_all(paths, 0))
    assert list(read_facts_of_all(paths, 2)) == alone
    assert alone[-3].fault is None and alone[-2].fault == "does not exist"


@pytest.fixture
def picture(tmp_path) -> str:
    (tmp_path / "a.png").write_bytes(png())
    return str(tmp_path / "a.png")


def test_a_picture_that_ends_its_process_is_named_and_the_others_are_decoded(picture, monkeypatch):
    script = "import os; from glm4v_patched.data import decoding as d; look = d.read_facts; "
    ends = "(os._exit(7) if 'exit' in p else os.kill(os.getpid(), 9)) if 'fatal' in p"
    script += f"d.read_facts = lambda p: {ends} else look(p); "
    command = [sys.executable, "-c", script + "d.main()"]
    monkeypatch.setattr(decoding, "python_module", lambda _: command)
    facts = list(read_facts_of_all([picture, "fatal", picture, "fatal exit", picture], 2))
    assert [fact.fault is None for fact in facts] == [True, False, True, False, True]
    assert facts[1].fault == "ended the process that decoded it, by signal 9"
    assert facts[3].fault == "ended the process that decoded it, with exit status 7"
    for end, told in (
        ("raise SystemExit(3)", "with exit status 3"),
        ("import os; os.abort()", "by signal 6"),
    ):
        command[2] = end  # of which no picture is to blame
        with pytest.raises(RuntimeError, match=f"ended as it started, {told}"):
            list(read_facts_of_all(["a.png"], 1))


ENDLESS = """
import sys
from glm4v_patched.data.decoding import read_facts_of_all
for _ in read_facts_of_all(sys.argv[1:] * 10**6, 2):
    print("decoding", flush=True)
"""


def test_processes_end_with_the_one_that_was_killed(picture):
    command = [sys.executable, "-c", ENDLESS, picture]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        parent.stdout.readline()
        children = psutil.Process(parent.pid).children(recursive=True)
        assert len(children) == 2
        parent.kill()
    assert psutil.wait_procs(children, timeout=20)[1] == []


def test_processes_end_with_their_questions_or_when_no_more_answers_are_wanted(picture):
    for asked in (1, 50):
        before = psutil.Process().children()
        answers = read_facts_of_all([picture] * 50, 2)
        for _ in range(asked):
            next(answers)
        children = [child for child in psutil.Process().children() if child not in before]
        assert len(children) == 2
        assert next(answers, None) is None if asked == 50 else answers.close() is None
        assert not any(child.is_running() for child in children)
