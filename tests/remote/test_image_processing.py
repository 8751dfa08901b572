"""The image processor against upstream's preprocessing, its inputs and its errors."""

import base64
import io
import json
import os
import stat
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from glm4v_patched.remote.image_processing_chatglm import ChatGLMImageProcessor


@pytest.fixture(scope="module")
def golden(data_dir):
    return load_file(data_dir / "image_preprocess.safetensors")


@pytest.fixture
def picture(golden):
    return Image.fromarray(golden["in.image_uint8_hwc"].numpy())


def test_pixels_equal_upstream(image_processor, picture, golden):
    """Measured max error: 0.0 (Pillow 13.0.0, numpy 2.4; transformers 4.57.6 and 5.23.0).

    Equality is the right tolerance: division and subtraction of float32 are correctly rounded on
    every machine, so only the resize can differ, by at least one level of 1/255, which is 0.0142.
    """
    got = image_processor(picture)["pixel_values"]
    want = golden["out.image_size_56"]
    assert got.shape == (1, 3, 56, 56)
    assert got.dtype == torch.float32
    assert (got[0] - want).abs().max() == 0


def test_every_kind_of_input_gives_the_same_pixels(image_processor, picture, tmp_path):
    want = image_processor(picture)["pixel_values"]
    array = np.asarray(picture)
    picture.save(tmp_path / "picture.png")
    for image in [
        array,
        array.transpose(2, 0, 1),
        torch.from_numpy(array.copy()),
        torch.from_numpy(array.copy()).permute(2, 0, 1),
        array[None],
        str(tmp_path / "picture.png"),
        [picture],
        [[picture]],
    ]:
        assert torch.equal(image_processor(image)["pixel_values"], want)
    for scaled in (array / 255, (array / 255).astype(np.float32), array.astype(np.float32)):
        assert torch.equal(image_processor(scaled)["pixel_values"], want)


def test_images_are_stacked_in_order(image_processor, picture):
    other = Image.new("RGB", (30, 20), "red")
    both = image_processor([[picture], [other, picture]])["pixel_values"]
    assert both.shape == (3, 3, 56, 56)
    assert torch.equal(both[0], both[2])
    assert torch.equal(both[1:2], image_processor(other)["pixel_values"])
    assert isinstance(image_processor(other, return_tensors="np")["pixel_values"], np.ndarray)


def test_images_become_rgb_unless_told_otherwise(image_processor):
    grey, clear = Image.new("L", (20, 20), 128), Image.new("RGBA", (20, 20))
    assert image_processor([grey, clear])["pixel_values"].shape == (2, 3, 56, 56)
    with pytest.raises(ValueError, match="mode 'L' with 1 channels, the model takes 3"):
        image_processor(grey, do_convert_rgb=False)


def test_size_must_be_square():
    assert ChatGLMImageProcessor(size=56).size == {"height": 56, "width": 56}
    with pytest.raises(ValueError, match="square, got height 56 and width 70"):
        ChatGLMImageProcessor(size={"height": 56, "width": 70})
    with pytest.raises(ValueError, match="square, got height None and width None"):
        ChatGLMImageProcessor(size={"shortest_edge": 56})


def test_saved_fields(image_processor, picture, tmp_path):
    image_processor.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert config["size"] == {"height": 56, "width": 56}
    assert config["patch_size"] == 14
    assert config["image_mean"] == [0.48145466, 0.4578275, 0.40821073]
    assert config["image_std"] == [0.26862954, 0.26130258, 0.27577711]
    auto = "image_processing_chatglm.ChatGLMImageProcessor"
    assert config["auto_map"] == {"AutoImageProcessor": auto}
    assert (tmp_path / "image_processing_chatglm.py").is_file()
    again = ChatGLMImageProcessor.from_pretrained(tmp_path)
    want = image_processor(picture)["pixel_values"]
    assert torch.equal(again(picture)["pixel_values"], want)


def test_defaults_are_those_of_the_published_model():
    assert ChatGLMImageProcessor().size == {"height": 1120, "width": 1120}


# The same pixels whichever way a picture comes


@pytest.fixture
def serve(tmp_path):
    """Serves ``tmp_path``; the base URL."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *of):
            pass

        def do_GET(self):
            if self.path != "/ftp":
                return super().do_GET()
            self.send_response(302)
            self.send_header("Location", "ftp://127.0.0.1:9/a")
            self.end_headers()

    handler = partial(Handler, directory=str(tmp_path))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def encoded(image: Image.Image, suffix: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, suffix, **options)
    return file.getvalue()


def held(image: Image.Image, orientation: int) -> bytes:
    """A PNG that says how the camera was held."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, "PNG", exif=exif)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_way_of_giving_a_picture_turns_it_upright(
    image_processor, picture, tmp_path, serve, orientation
):
    data = held(picture, orientation)
    path = tmp_path / "held.png"
    path.write_bytes(data)
    # By EXIF: what the first row and the first column of the stored picture are.
    turned = {
        2: [Image.Transpose.FLIP_LEFT_RIGHT],
        3: [Image.Transpose.ROTATE_180],
        4: [Image.Transpose.FLIP_TOP_BOTTOM],
        5: [Image.Transpose.TRANSPOSE],
        6: [Image.Transpose.ROTATE_270],
        7: [Image.Transpose.TRANSVERSE],
        8: [Image.Transpose.ROTATE_90],
    }
    upright = picture
    for turn in turned.get(orientation, []):
        upright = upright.transpose(turn)
    want = image_processor(upright)["pixel_values"]
    text = base64.b64encode(data).decode()
    with Image.open(path) as opened:
        for image in [
            str(path),
            path,
            f"{serve}/held.png",
            data,
            bytearray(data),
            memoryview(data),
            text,
            f"data:image/png;base64,{text}",
            base64.encodebytes(data).decode(),
            opened,
            opened.convert("RGB"),
            np.asarray(upright),
            torch.from_numpy(np.array(upright)),
        ]:
            assert torch.equal(image_processor(image)["pixel_values"], want), type(image)


MODES = ["1", "L", "P", "RGB", "RGBA", "LA", "PA", "CMYK", "YCbCr", "HSV", "RGBX"]


@pytest.mark.parametrize("mode", MODES)
def test_pictures_of_every_mode_of_8_bits_become_rgb_as_pillow_does_it(
    image_processor, picture, mode
):
    image = picture.convert("RGBA" if mode in ("PA", "LA") else "RGB").convert(mode)
    want = image_processor(image.convert("RGB"))["pixel_values"]
    assert torch.equal(image_processor(image)["pixel_values"], want)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
@pytest.mark.parametrize("kind", ["uint8", "int64", "float32", "float64", "float16", "bfloat16"])
def test_arrays_have_the_pixels_of_their_picture(image_processor, picture, mode, kind):
    image = picture.convert(mode)
    want = image_processor(image)["pixel_values"]
    tensor = torch.from_numpy(np.array(image))
    if "float" in kind:
        tensor = tensor / 255
    tensor = tensor.to(getattr(torch, kind))
    first = tensor if mode == "L" else tensor.permute(2, 0, 1)
    given = [tensor, first, tensor[None] if mode != "L" else first]
    given += [t.numpy() for t in given if kind != "bfloat16"]
    for image in given:
        assert torch.equal(image_processor(image)["pixel_values"], want)


def test_an_array_of_truth_is_black_and_white(image_processor):
    image = np.zeros((8, 8), dtype=bool)
    image[2:5] = True
    want = image_processor(Image.fromarray(image))["pixel_values"]
    assert torch.equal(image_processor(image)["pixel_values"], want)
    assert torch.equal(image_processor(image.astype(np.float32))["pixel_values"], want)


def test_floating_point_is_rounded_to_the_nearest_of_8_bits(image_processor):
    for value, level in [(0.999, 255), (0.001, 0), (0.4999, 127), (0.5001, 128)]:
        want = image_processor(np.full((8, 8, 3), level, dtype=np.uint8))["pixel_values"]
        assert torch.equal(image_processor(np.full((8, 8, 3), value))["pixel_values"], want)


DEEP = {
    "I;16": np.full((9, 7), 40_000, dtype=np.uint16),
    "I": np.full((9, 7), 70_000, dtype=np.int32),
    "F": np.full((9, 7), 0.5, dtype=np.float32),
}


@pytest.mark.parametrize("mode", DEEP)
@pytest.mark.parametrize("as_file", [False, True])
def test_refuses_pictures_that_do_not_say_what_is_white(image_processor, tmp_path, mode, as_file):
    image = Image.fromarray(DEEP[mode])
    assert image.mode == mode
    if as_file:
        path = tmp_path / ("deep.png" if mode == "I;16" else "deep.tiff")
        image.save(path)
        image = path
    with pytest.raises(ValueError, match="image 1 of 2: .* has mode '[IF].*which number is white"):
        image_processor([Image.new("RGB", (9, 9)), image])


@pytest.mark.parametrize(
    "array, named",
    [
        (np.full((9, 7, 3), 300, dtype=np.int64), "int64 from 300 to 300"),
        (np.full((9, 7, 3), -1, dtype=np.int16), "int16 from -1 to -1"),
        (np.full((9, 7, 3), 65535, dtype=np.uint16), "uint16 from 65535 to 65535"),
        (np.full((9, 7, 3), 1.5, dtype=np.float32), "float32 from 1.5 to 1.5"),
        (np.full((9, 7, 3), -0.1), "float64 from -0.1 to -0.1"),
        (np.full((9, 7, 3), np.nan), "float64 from nan to nan"),
        (np.full((9, 7, 3), np.inf), "float64 from inf to inf"),
        (np.full((9, 7, 3), 1j), "complex128, not numbers"),
        (np.full((3, 9, 3), 5, dtype=np.uint8), r"\(3, 9, 3\).*first or the last"),
        (np.full((9, 7, 2), 5, dtype=np.uint8), r"\(9, 7, 2\), without 1, 3 or 4 channels"),
        (np.zeros((0, 7, 3), dtype=np.uint8), r"shape \(0, 7, 3\)"),
        (np.zeros(5, dtype=np.uint8), r"shape \(5,\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses_arrays_that_are_no_clear_picture(image_processor, array, named):
    for given in (array, torch.from_numpy(array)):
        with pytest.raises(ValueError, match=f"image 0 of 1: it .*{named}"):
            image_processor(given)


@pytest.mark.parametrize(
    "wrong", [5, None, {"image": "a.png"}, pytest.param(object(), id="object")], ids=str
)
def test_refuses_what_is_no_picture(image_processor, wrong):
    with pytest.raises(ValueError, match=f"image 0 of 1: it is a {type(wrong).__name__}: give"):
        image_processor([wrong])
    with pytest.raises(ValueError, match="0 images were given"):
        image_processor([])


def test_refuses_files_that_cannot_be_read_and_names_them(
    image_processor, picture, tmp_path, serve
):
    (tmp_path / "cut.jpg").write_bytes(encoded(picture, "JPEG")[:300])
    (tmp_path / "text.png").write_text("no picture")
    for given, named in [
        (tmp_path / "cut.jpg", "cut.jpg cannot be read as a picture"),
        (str(tmp_path / "text.png"), "text.png cannot be read as a picture"),
        (tmp_path / "none.png", "there is no file .*none.png"),
        ("none.png", "there is no file 'none.png'"),
        ("imgs/none", "there is no file 'imgs/none'"),
        ("a b" * 1000, "there is no file '.{77}\\.\\.\\.'"),
        (b"no picture", "what the bytes hold cannot be read"),
        (encoded(picture, "PNG")[:200], "cannot be read"),
        (f"{serve}/ftp", "ftp cannot be fetched: it leads to 'ftp://127.0.0.1:9/a'; expected http"),
        (f"{serve}/none.png", "http://127.0.0.1:.*none.png cannot be fetched: .*404"),
        ("http://127.0.0.1:9/a.png", "127.0.0.1:9/a.png cannot be fetched"),
        (f"{serve}/text.png", "text.png cannot be read as a picture"),
    ]:
        with pytest.raises(ValueError, match=f"image 0 of 1: .*{named}"):
            image_processor(given)


def test_no_other_program_is_run_for_a_picture(image_processor, picture, tmp_path, monkeypatch):
    ghostscript = tmp_path / "gs"
    ghostscript.write_text(f"#!/bin/sh\ntouch {tmp_path / 'was-run'}\n")
    ghostscript.chmod(ghostscript.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    data = encoded(picture, "EPS")
    (tmp_path / "disguised.png").write_bytes(data)
    with Image.open(tmp_path / "disguised.png") as opened:
        for image in (tmp_path / "disguised.png", data, opened, base64.b64encode(data).decode()):
            with pytest.raises(ValueError, match="is EPS, .* convert it to PNG"):
                image_processor(image)
    assert not (tmp_path / "was-run").exists()


def test_an_answer_without_end_is_not_read_to_its_end(serve, tmp_path, monkeypatch):
    module = sys.modules[ChatGLMImageProcessor.__module__]
    monkeypatch.setattr(module, "MOST_BYTES_FETCHED", 100)
    (tmp_path / "long.png").write_bytes(b"x" * 101)
    with pytest.raises(ValueError, match="long.png has more than 100 bytes, which is no picture"):
        ChatGLMImageProcessor(size=28)(f"{serve}/long.png")
