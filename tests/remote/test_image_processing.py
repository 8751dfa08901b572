"""The image processor: equal to the published preprocessing; its inputs and errors."""

import base64
import io
import os
import socket
import struct
import zlib
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread, Timer

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from glm4v_patched.remote import image_processing_chatglm
from glm4v_patched.remote.image_processing_chatglm import ChatGLMImageProcessor
from tests.helpers.refused import refused


@pytest.fixture(scope="module")
def golden(data_dir):
    return load_file(data_dir / "image_preprocess.safetensors")


@pytest.fixture
def image(golden):
    return Image.fromarray(golden["in.image_uint8_hwc"].numpy())


@pytest.fixture
def pixels(image_processor):
    return lambda image: image_processor(image)["pixel_values"]


def test_pixels_equal_upstream(pixels, image, golden):
    """Measured max error: 0.0 (Pillow 13.0.0, numpy 2.4; transformers 4.57.6 and 5.23.0).

    Equality is the right tolerance: division and subtraction of float32 are correctly rounded on
    every machine, so only the resize can differ, by at least one level of 1/255, which is 0.0142.
    """
    actual = pixels(image)
    assert actual.shape == (1, 3, 56, 56) and actual.dtype == torch.float32
    assert (actual[0] - golden["out.image_size_56"]).abs().max() == 0


def test_images_are_stacked_in_order(image_processor, pixels, image):
    other = Image.new("RGB", (30, 20), "red")
    both = pixels([[image], [other, image]])
    assert torch.equal(both, torch.cat([pixels(image) for image in (image, other, image)]))
    assert isinstance(image_processor(other, return_tensors="np")["pixel_values"], np.ndarray)


def test_size_is_a_square_and_that_of_the_published_model_by_default():
    assert ChatGLMImageProcessor().size == {"height": 1120, "width": 1120}
    assert ChatGLMImageProcessor(size=56).size == {"height": 56, "width": 56}
    with refused(ValueError, "height 56", "width 70"):
        ChatGLMImageProcessor(size={"height": 56, "width": 70})
    with pytest.raises(ValueError, match="square, got height None and width None"):
        ChatGLMImageProcessor(size={"shortest_edge": 56})


@pytest.mark.parametrize("resample", Image.Resampling, ids=lambda resample: resample.name)
def test_images_are_resized_by_the_filter_of_that_number(pixels, image, tmp_path, resample):
    processor = ChatGLMImageProcessor(size=56, resample=resample)
    processor.save_pretrained(tmp_path)
    expected = pixels(image.resize((56, 56), resample))  # resized no more
    for of_filter in (processor, ChatGLMImageProcessor.from_pretrained(tmp_path)):
        assert torch.equal(of_filter(image)["pixel_values"], expected)


@pytest.fixture
def serve(tmp_path):
    """Serve ``tmp_path`` and return the base URL. A query is the target of a redirect."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

        def do_GET(self):
            if not self.path.startswith("/to?"):
                return super().do_GET()
            self.send_response(302)
            self.send_header("Location", self.path.partition("?")[2])
            self.end_headers()

    handler = partial(Handler, directory=str(tmp_path))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def encoded(image: Image.Image, suffix: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, suffix, **options)
    return file.getvalue()


# By EXIF: what the first row and the first column of the stored image are.
TURNS = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    6: Image.Transpose.ROTATE_270,
}


@pytest.mark.parametrize("orientation", TURNS)
def test_every_way_of_giving_an_image_turns_it_upright(pixels, image, tmp_path, serve, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data, path = encoded(image, "PNG", exif=exif), tmp_path / "held.png"
    path.write_bytes(data)
    turn = TURNS[orientation]
    upright = image if turn is None else image.transpose(turn)
    text = base64.b64encode(data).decode()
    with Image.open(path) as opened:
        for image in [
            *(str(path), path, f"{serve}/held.png", f"{serve}/to?{serve}/held.png"),
            *(data, bytearray(data), memoryview(data)),
            *(text, f"data:image/png;base64,{text}", base64.encodebytes(data).decode()),
            *(opened, opened.convert("RGB"), np.asarray(upright), torch.tensor(np.array(upright))),
        ]:
            assert torch.equal(pixels(image), pixels(upright)), type(image)


@pytest.mark.parametrize("mode", ["1", "P", "RGB", "LA", "PA", "CMYK", "YCbCr"])
def test_images_of_every_mode_of_8_bits_become_rgb_as_pillow_does_it(pixels, image, mode):
    image = image.convert("RGBA" if mode in ("PA", "LA") else "RGB").convert(mode)
    assert torch.equal(pixels(image), pixels(image.convert("RGB")))


@pytest.mark.parametrize("by", ["setting", "argument"])
@pytest.mark.parametrize("mode", ["1", "LA", "CMYK"])
def test_other_modes_than_rgb_are_refused_where_do_convert_rgb_is_false(
    image_processor, image, mode, by
):
    convert = {
        "setting": ChatGLMImageProcessor(size=56, do_convert_rgb=False),
        "argument": partial(image_processor, do_convert_rgb=False),
    }[by]
    convert(image.convert("RGB"))
    image = image.convert("RGBA" if mode == "LA" else "RGB").convert(mode)
    with pytest.raises(ValueError, match=f"mode '{mode}' with . channels, the model takes 3"):
        convert(image)


@pytest.mark.parametrize("mode", ["L", "RGBA"])
@pytest.mark.parametrize("kind", ["uint8", "int64", "float32", "bfloat16"])
def test_arrays_have_the_pixels_of_their_image(pixels, image, mode, kind):
    image = image.convert(mode)
    tensor = torch.from_numpy(np.array(image))
    tensor = (tensor / 255 if "float" in kind else tensor).to(getattr(torch, kind))
    first = tensor if mode == "L" else tensor.permute(2, 0, 1)
    arrays = [tensor, first]
    arrays += [t.numpy() for t in arrays if kind != "bfloat16"]
    for array in arrays:
        assert torch.equal(pixels(array), pixels(image))


def test_float_and_bool_pixels_are_rounded_to_8_bits(pixels):
    for value, level in [(0.4999, 127), (0.5001, 128), (True, 255), (np.float32(200), 200)]:
        want = pixels(np.full((8, 8, 3), level, dtype=np.uint8))
        assert torch.equal(pixels(np.full((8, 8, 3), value)), want)
    of_width_4 = torch.rand(3, 9, 4)
    assert torch.equal(pixels(of_width_4), pixels(of_width_4.permute(1, 2, 0)))


def of_16_bits_a_channel() -> bytes:
    """Build a PNG with 16 bits per channel, which Pillow does not write."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        end = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + end

    header = struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0)
    rows = zlib.compress(b"\0" + bytes(range(12)))
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


@pytest.mark.parametrize(("mode", "kind"), [("I;16", np.uint16), ("I", np.int32), ("F", "f4")])
def test_images_of_more_than_8_bits_are_refused(image_processor, tmp_path, mode, kind):
    image, path = Image.fromarray(np.full((9, 7), 40_000, dtype=kind)), tmp_path / "deep.tiff"
    assert image.mode == mode
    image.save(path)
    message = "image 1 of 2: .* has mode '[IF].*which value is white"
    for form in (image, path):
        with pytest.raises(ValueError, match=message):
            image_processor([Image.new("RGB", (9, 9)), form])
    with pytest.raises(ValueError, match="has mode 'RGB;16B', with more than 8 bits"):
        image_processor(of_16_bits_a_channel())


UNCLEAR = {
    "above 255": (np.full((9, 7, 3), 300, dtype=np.int64), "int64 values from 300 to 300"),
    "nan": (np.full((9, 7, 3), np.nan), "float64 values from nan to nan"),
    "complex": (np.full((9, 7, 3), 1j), "complex128"),
    "of two sides": (np.full((3, 9, 3), 5, dtype=np.uint8), "(3, 9, 3)"),
    "empty": (np.zeros((0, 7, 3), dtype=np.uint8), "(0, 7, 3)"),
    "a number": (5, "a int"),
}


@pytest.mark.parametrize("case", UNCLEAR)
def test_ambiguous_and_empty_arrays_are_refused(image_processor, case):
    value, named = UNCLEAR[case]
    with refused(ValueError, "image 0 of 1", named) as caught:
        image_processor([value])
    if isinstance(value, np.ndarray):
        with pytest.raises(ValueError) as of_tensor:
            image_processor(torch.from_numpy(value))
        assert str(of_tensor.value) == str(caught.value)
    with pytest.raises(ValueError, match="0 images were given"):
        image_processor([])


def test_files_that_cannot_be_read_are_named(image_processor, image, tmp_path, serve, monkeypatch):
    (tmp_path / "cut.jpg").write_bytes(encoded(image, "JPEG")[:300])
    for source, named in [
        (tmp_path / "cut.jpg", "cut.jpg cannot be read as an image"),
        ("none.png", "there is no file 'none.png'"),
        ("a b" * 1000, "there is no file '.{77}\\.\\.\\.'"),
        (encoded(image, "PNG")[:200], "cannot be read"),
        (f"{serve}/to?ftp://127.0.0.1:9/a", "it redirects to 'ftp://127.0.0.1:9/a'; expected http"),
        (f"{serve}/none.png", "http://127.0.0.1:.*none.png cannot be read as an image: .*404"),
    ]:
        with pytest.raises(ValueError, match=f"image 0 of 1: .*{named}"):
            image_processor(source)
    monkeypatch.setattr(image_processing_chatglm, "FETCH_TIMEOUT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        Timer(10, silent.close).start()
        with pytest.raises(ValueError, match="cannot be read as an image: .*timed out"):
            image_processor(f"http://127.0.0.1:{silent.getsockname()[1]}/a.png")
    monkeypatch.undo()
    # An endless response is not read to its end.
    monkeypatch.setattr(image_processing_chatglm, "MAX_FETCHED_BYTES", 100)
    for length, message in ((101, "has more than 100 bytes, too many"), (100, "cannot be read")):
        (tmp_path / "long.png").write_bytes(b"x" * length)
        with pytest.raises(ValueError, match=f"long.png {message}"):
            image_processor(f"{serve}/long.png")


def test_no_other_program_is_run_for_an_image(image_processor, image, tmp_path, monkeypatch):
    ghostscript = tmp_path / "gs"
    ghostscript.write_text(f"#!/bin/sh\ntouch {tmp_path / 'was-run'}\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    data, path = encoded(image, "EPS"), tmp_path / "disguised.png"
    path.write_bytes(data)
    for image in (path, data, base64.b64encode(data).decode()):
        with pytest.raises(ValueError, match="is EPS, .* convert it to PNG"):
            image_processor(image)
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_means_and_deviations_that_make_pixels_nan_are_refused(value):
    for name in ("image_std", "image_mean")[: 1 if value == 0 else 2]:
        with pytest.raises(ValueError, match=f"{name} is "):
            ChatGLMImageProcessor(size=56, **{name: [0.5, value, 0.5]})
    assert ChatGLMImageProcessor(size=56, image_mean=[0.0, 0.0, 0.0]).image_mean == [0.0] * 3
