"""Images that are decoded before a training: which are refused, and by whom."""

import base64
import io
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path
from threading import Barrier

import pytest
from PIL import Image

from glm4v_patched.data import decoding
from glm4v_patched.data.check import require_images
from glm4v_patched.data.decoding import (
    ImageCheck,
    check_image_file,
    check_image_files,
    find_image_problem,
    has_decodable_header,
)
from tests.data.samples import png, turns, write_rows


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
    """An image of 2 x 2 pixels, whose numbers are 256, in three channels; Pillow writes none."""
    numbers = (256).to_bytes(2, "big")
    if kind == "SGI":
        header = struct.pack(">HBBHHHH", 474, 0, 2, 3, 2, 2, 3)
        return header.ljust(512, b"\0") + numbers * 12
    return png_of(2, 16, 2, (b"\0" + numbers * 2 * 3) * 2)


KINDS = ("JPEG", "BMP", "GIF", "PNG", "TIFF", "WEBP", "PPM")
DEEP = "has mode .*;16[BL]', with more than 8 bits, and it is unknown which value is white"
BAD = {f"16 bits, {kind}": (of_16_bits(kind), DEEP) for kind in ("RGB", "SGI")}
BAD |= {
    f"{kind} cut": (encoded(kind)[: len(encoded(kind)) * 3 // 4], "cannot be read as an image: ")
    for kind in KINDS
}
BAD |= {
    "empty": (b"", "is empty: it has 0 bytes"),
    "words": (b"hello", "is text, such as a server's error: copy or download it again"),
    "unknown": (b"8BPS\0\1", "cannot be read as an image: Pillow does not know"),
    "EPS": (encoded("EPS"), "is EPS, which Pillow renders with another program"),
    "16 bits": (encoded("PNG", "I;16"), "has mode 'I;16', with more than 8 bits"),
}


def test_an_image_that_cannot_be_used_is_refused_with_file_and_line(tmp_path, processor):
    """And by the image processor, however it comes."""
    for number, (content, message) in enumerate(BAD.values()):
        file = tmp_path / f"{number}.png"
        file.write_bytes(content)
        path = write_rows(tmp_path / "data.jsonl", turns(), turns(image=file.name))
        message_re = rf"1 of 2 .*\n.*data\.jsonl:2: the image .*{file.name} {message}"
        with pytest.raises(ValueError, match=message_re):
            require_images(path, tmp_path / "m.sqlite")
        for image in (str(file), content, base64.b64encode(content).decode()):
            with pytest.raises(ValueError):
                processor.image_processor(image)
        if message == DEEP:
            image = Image.open(file)
            for _ in range(2):
                with pytest.raises(ValueError, match=";16[BL]', with more than 8 bits.*scale it"):
                    processor.image_processor(image)


def test_images_of_every_kind_are_taken(processor):
    modes = {"PNG": ["1", "L", "LA", "P", "RGB", "RGBA"], "JPEG": ["L", "RGB", "CMYK"]}
    contents = [encoded(kind, mode) for kind in KINDS for mode in modes.get(kind, ["RGB"])]
    assert [find_image_problem(content) for content in contents] == [None] * len(contents)
    processor.image_processor(contents)


@pytest.fixture
def image(tmp_path) -> str:
    (tmp_path / "a.png").write_bytes(png())
    return str(tmp_path / "a.png")


@pytest.mark.parametrize("by", ["pixels", "Pillow's own limit", "bytes"])
def test_an_image_too_large_to_decode_is_refused(image, monkeypatch, words, by):
    owner, name, limit = {
        "pixels": (decoding, "MAX_PIXELS", 64),
        "Pillow's own limit": (Image, "MAX_IMAGE_PIXELS", 32),
        "bytes": (decoding, "MAX_IMAGE_BYTES", len(png())),
    }[by]
    monkeypatch.setattr(owner, name, limit)
    assert check_image_file(image).problem is None and has_decodable_header(image)
    monkeypatch.setattr(owner, name, limit - 1)
    words(check_image_file(image).problem, bytes_there=len(png()), bytes_taken=len(png()) - 1)
    assert not has_decodable_header(image)


LOOK = r"""
import re, sys
from glm4v_patched.data.decoding import find_image_problem, check_image_file
most = lambda: int(re.search(r"VmHWM:\s*(\d+)", open("/proc/self/status").read())[1])
find_image_problem(b"")  # what it imports is there
before = most()
problems = [check_image_file(path).problem for path in sys.argv[1:]]
print(*problems, (most() - before) / 1024, sep="\n")
"""


def test_an_image_of_169_megapixels_is_told_by_its_header_and_one_of_27_is_in_memory_once(tmp_path):
    (tmp_path / "a.png").write_bytes(png_of(13_000, 1, 0, b""))
    Image.new("RGB", (6_000, 4_500)).save(tmp_path / "b.jpg")
    command = [sys.executable, "-c", LOOK, str(tmp_path / "a.png"), str(tmp_path / "b.jpg")]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    large, fault, megabytes = output.splitlines()
    assert large.startswith("is too large (13,000 x 13,000 pixels); expected at most 120,000,000")
    assert fault == "None" and float(megabytes) < 2.2 * 3 * 27


def test_threads_find_at_the_same_time_what_one_finds_in_the_same_order(tmp_path, monkeypatch):
    contents = [content for content, _ in BAD.values()] + [png()] * 3
    paths = [str(tmp_path / f"{n}.png") for n in range(len(contents))] + ["no.png", "a\nb.png"]
    for path, content in zip(paths, contents, strict=False):
        Path(path).write_bytes(content)
    paths += paths[: len(paths) % 2]  # each has another one
    alone = [*map(check_image_file, paths)]
    assert [facts.problem for facts in alone].count(None) == 3
    both = Barrier(2)

    def when_another_does(path: str) -> ImageCheck:
        both.wait(timeout=20)
        return check_image_file(path)

    monkeypatch.setattr(decoding, "check_image_file", when_another_does)
    monkeypatch.setattr(decoding, "count_cores", lambda: 2)
    monkeypatch.setattr(decoding, "IMAGES_PER_SUBMIT", 6)
    assert [*check_image_files(paths)] == alone


def test_images_whose_answers_nobody_waits_for_are_not_decoded(monkeypatch):
    decoded = []
    monkeypatch.setattr(
        decoding, "check_image_file", lambda path: decoded.append(path) or time.sleep(0.01)
    )
    answers = check_image_files(["a.png"] * 10_000)
    next(answers)
    answers.close()
    assert len(decoded) < decoding.IMAGES_PER_SUBMIT
