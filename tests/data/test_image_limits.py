"""What an image may cost, told by its header: in data, and in requests to a server."""

import base64
import io
import re
import struct
import zlib

import pytest
from PIL import Image

from glm4v_patched.data import decoding
from glm4v_patched.data.decoding import find_image_problem, has_decodable_header
from glm4v_patched.data.image_limits import MAX_PARTS, MAX_SIDE, count_decoded_pixels, open_image
from glm4v_patched.inference.serving.limits import ApiError, ServerLimits
from glm4v_patched.inference.serving.request_images import IMAGE_FORMATS, check_and_fetch_images


def encoded(kind: str, size=(8, 8), mode="RGB", **options) -> bytes:
    file = io.BytesIO()
    Image.new(mode, size).save(file, kind, **options)
    return file.getvalue()


def send(content: bytes) -> None:
    """Have an image checked as a server checks those of requests."""
    url = f"data:image/any;base64,{base64.b64encode(content).decode()}"
    image = {"type": "image_url", "image_url": {"url": url}}
    check_and_fetch_images({"messages": [{"role": "user", "content": [image]}]}, ServerLimits())


def pixels(content: bytes) -> int:
    return count_decoded_pixels(
        open_image(content, IMAGE_FORMATS), content, ServerLimits().max_pixels
    )


def chunk(name: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(before: bytes = b"", after: bytes = b"") -> bytes:
    content = encoded("PNG")
    data, end = content.index(b"IDAT") - 4, content.index(b"IEND") - 4
    return content[:data] + before + content[data:end] + after + content[end:]


def with_scans(number: int, size=(64, 64)) -> bytes:
    """A progressive JPEG, whose last scan is there again and again."""
    content = encoded("JPEG", size, progressive=True)
    last, num_scans = content.rindex(b"\xff\xda"), content.count(b"\xff\xda")
    return content[:-2] + content[last:-2] * (number - num_scans) + b"\xff\xd9"


def tiled(side: int) -> bytes:
    """A TIFF whose one tile is larger than the image."""
    data = zlib.compress(bytes(16 * 16))
    tags = {256: 8, 257: 8, 258: 8, 259: 8, 262: 1, 277: 1, 322: side, 323: side}
    tags |= {324: 8 + 2 + 12 * 10 + 4, 325: len(data)}
    entries = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items()]
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + b"".join([*entries, bytes(4), data])


def run_length_encoded(pairs: int) -> bytes:
    """A BMP of 8 bits."""
    header = struct.pack("<IiiHHIIiiII", 40, 4000, 4000, 1, 8, 1, 0, 0, 0, 256, 0)
    start = struct.pack("<IHHI", 0, 0, 0, 14 + 40 + 1024)
    return b"BM" + start + header + bytes(1024) + b"\1\5" * pairs


PARTS = MAX_PARTS + 5000
JPEG = encoded("JPEG")
COSTLY = {
    "wide": (encoded("PNG", (MAX_SIDE + 1, 1), "1"), "at most 32,768 per side"),
    "tall": (encoded("PNG", (1, MAX_SIDE + 1), "1"), "at most 32,768 per side"),
    "a tall GIF": (encoded("GIF", (1, MAX_SIDE + 1), "P"), "at most 32,768 per side"),
    "scans": (with_scans(400_000, (16, 16))[:2_000_000], "over .* parts"),
    "segments": (JPEG[:2] + b"\xff\xef\x00\x02" * PARTS + JPEG[2:], "over .* parts"),
    "chunks before": (png(chunk(b"prVt") * PARTS), "over .* parts"),
    "chunks after": (png(after=chunk(b"prVt") * PARTS), "over .* parts"),
    "chunks of data": (png(chunk(b"IDAT") * PARTS), "over .* parts"),
    # Decoded in Python: 20 to 35 s for 30 MB, and over a minute for 1 MB of comments.
    "runs of BMP": (run_length_encoded(5 * 10**6), "decodes BMP in Python, where 10,001,078 bytes"),
    "text": (b"P3 1600 1600 255 " + b"1 " * 1600 * 1600 * 3, "Pillow decodes PPM in Python"),
    "bits as text": (b"P1 3000 3000 " + b"1" * 9 * 10**6, "Pillow decodes PPM in Python"),
    "levels": (b"P5 3000 3000 7 " + bytes(9 * 10**6), "Pillow decodes PPM in Python"),
    "comments": (b"P2 9 9 255 " + b"#a\n" * 70_000 + b"1 " * 81, "Pillow decodes PPM in Python"),
    "tiles": (tiled(30_000), "tiles of 30,000 x 30,000"),
}


@pytest.mark.parametrize("kind", COSTLY)
def test_an_image_that_costs_more_than_its_pixels_say_is_refused(kind, tmp_path):
    """And before it is decoded: an image of one pixel in a column took 10 s."""
    content, message = COSTLY[kind]
    assert re.search(message, find_image_problem(content) or "")
    (tmp_path / "a").write_bytes(content)
    assert not has_decodable_header(str(tmp_path / "a"))
    with pytest.raises(ApiError, match=message) as error:
        send(content)
    assert (error.value.status, error.value.code) == (400, "image_too_large")


def test_each_scan_beyond_those_of_libjpeg_counts_as_pixels(monkeypatch):
    of_one = 64 * 64
    for scans, counted in ((10, of_one), (20, 2 * of_one), (25, of_one * 5 // 2)):
        content = with_scans(scans)
        assert count_decoded_pixels(open_image(content), content, 10**6) == counted
        monkeypatch.setattr(decoding, "MAX_PIXELS", counted)
        assert find_image_problem(content) is None
        monkeypatch.setattr(decoding, "MAX_PIXELS", counted - 1)
        assert "is too large" in str(find_image_problem(content))
    # What lies behind the first image, or in its metadata, is none of its scans.
    content = encoded("JPEG", comment=b"\xff\xda" * 100) + b"\xff\xda" * 100
    assert count_decoded_pixels(open_image(content), content, 64) == 64


def test_images_at_the_limits_are_taken_in_any_number_of_frames():
    frames = [Image.new("L", (8, 8), shade) for shade in range(60)]
    for kind in ("GIF", "WEBP", "TIFF", "PNG"):
        file = io.BytesIO()
        frames[0].save(file, kind, save_all=True, append_images=frames[1:])
        assert find_image_problem(file.getvalue()) is None
        assert pixels(file.getvalue()) == 64
    for size in ((MAX_SIDE, 1), (1, MAX_SIDE)):
        assert find_image_problem(encoded("PNG", size, "1")) is None
    assert find_image_problem(png(chunk(b"prVt") * 9000)) is None
    assert find_image_problem(tiled(16)) is None


def test_each_byte_that_is_decoded_in_python_costs_as_much_as_sixteen_pixels():
    for content in (run_length_encoded(10**5), b"P2 9 9 255 #a\n" + b"1 " * 81):
        assert pixels(content) >= 16 * len(content)


def test_clients_send_the_formats_that_are_named():
    for kind in set(IMAGE_FORMATS) - {"MPO"}:
        assert pixels(encoded(kind)) == 64
        send(encoded(kind))
    for kind in ("ICO", "TGA", "PCX", "ICNS"):
        content = encoded(kind, (32, 32))
        assert find_image_problem(content) is None  # of data
        with pytest.raises(ApiError, match=rf"it is {kind}; expected BMP, .*: convert it to PNG"):
            send(content)
