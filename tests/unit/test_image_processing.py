"""The image processor against upstream's preprocessing, its inputs and its errors."""

import json

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
    scaled = image_processor(array.astype(np.float32) / 255)["pixel_values"]
    # Floats pass through 8 bits, where truncation can move a value by 1/255.
    assert (scaled - want).abs().max() < 0.04


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
