"""Image preprocessing of glm-4v-9b as a transformers image processor.

The computation is that of the published code: PIL bicubic resize to a square without keeping the
aspect ratio, division by 255, normalization with the CLIP constants, float32, channels first. An
image may be passed in several forms (:func:`as_image`), which all give the same pixels. Ambiguous
input is refused.
"""

import base64
import io
import os
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real

import numpy as np
import torch
from transformers.image_processing_utils import BaseImageProcessor, BatchFeature
from transformers.image_utils import ImageInput
from transformers.utils import is_vision_available

from .configuration_chatglm import PROCESSOR_CLASS, keep_our_auto_classes, warn_unsaved

if is_vision_available():
    import PIL.Image
    import PIL.ImageOps

PIL_BICUBIC = 3  # PIL.Image.Resampling.BICUBIC, as a number, because Pillow may not be installed
EXIF_ORIENTATION = 0x0112  # the EXIF tag "Orientation"
FETCH_TIMEOUT_SECONDS = 60
MAX_FETCHED_BYTES = 256 * 2**20
# Suffixes of Pillow's raw modes with 16 bits per channel. ("BGR;16" has 16 bits per pixel.)
PILLOW_16_BIT_SUFFIXES = (";16B", ";16L", ";16N")


SAVED_IMAGE_PROCESSOR_FIELDS = {"image_processor_type", "size", "patch_size", "resample"}
SAVED_IMAGE_PROCESSOR_FIELDS |= {"do_convert_rgb", "image_mean", "image_std"}
# The setting that names the processor's class, in transformers 4 and in 5.
PROCESSOR_CLASS_KEYS = ("_processor_class", "processor_class")


class ChatGLMImageProcessor(BaseImageProcessor):
    """Image processor that makes ``pixel_values`` for the vision tower.

    Args:
        size: Side of the square in pixels: an int or ``{"height": S, "width": S}``. It must be the
            model's ``image_size``, because the tower does not interpolate position embeddings.
        patch_size: Side of a vision patch in pixels.
        resample: Pillow's number of the resampling filter.
        do_convert_rgb: Convert every image to RGB. The published code leaves that to the caller.
        image_mean, image_std: A number for each channel, for pixel values from 0 to 1.
    """

    model_input_names = ["pixel_values"]
    _auto_class = "AutoImageProcessor"

    def __init__(
        self,
        size: int | dict[str, int] | None = None,
        patch_size: int = 14,
        resample: int = PIL_BICUBIC,
        do_convert_rgb: bool = True,
        image_mean: list[float] | None = None,
        image_std: list[float] | None = None,
        **kwargs,
    ) -> None:
        super().__init__(**kwargs)
        self.size = _square_size(1120 if size is None else size)
        self.patch_size = patch_size
        self.resample = int(resample)
        self.do_convert_rgb = do_convert_rgb
        self.image_mean = list(image_mean or (0.48145466, 0.4578275, 0.40821073))
        self.image_std = list(image_std or (0.26862954, 0.26130258, 0.27577711))
        for name, values in (("image_mean", self.image_mean), ("image_std", self.image_std)):
            if len(values) != 3 or not all(isinstance(value, Real) for value in values):
                raise ValueError(f"{name} is {values!r:.200}; expected three numbers")
            with np.errstate(all="ignore"):
                numbers = np.array(values, np.float32)
                factors = 1 / numbers if name == "image_std" else numbers
            if not (np.isfinite(numbers) & np.isfinite(factors)).all():
                raise ValueError(
                    f"{name} is {values}, which makes pixel values NaN, infinite or all equal: "
                    "give finite numbers, and in image_std numbers that are not 0 in float32"
                )

    def save_pretrained(self, save_directory, *args, **kwargs):
        """Save as transformers does, but only settings of this class; log all other settings."""
        warn_unsaved(sorted(vars(self).keys() - self.to_dict()), "preprocessor_config.json")
        return super().save_pretrained(save_directory, *args, **kwargs)

    def to_dict(self) -> dict:
        """Return the settings to save in this class's file and in the processor's file."""
        values = super().to_dict()
        saved = {key: values[key] for key in SAVED_IMAGE_PROCESSOR_FIELDS if key in values}
        saved |= {key: PROCESSOR_CLASS for key in PROCESSOR_CLASS_KEYS if values.get(key)}
        if auto_map := keep_our_auto_classes(values.get("auto_map"), self._auto_class):
            saved["auto_map"] = auto_map
        return saved

    def preprocess(
        self,
        images: ImageInput,
        do_convert_rgb: bool | None = None,
        return_tensors: str | None = "pt",
    ) -> BatchFeature:
        """Preprocess images.

        Args:
            images: An image as :func:`as_image` takes it, a (nested) list of images, or a 4D array
                or tensor of several images.
            return_tensors: ``"pt"``, ``"np"``, or None for numpy.

        Returns:
            ``pixel_values``: float32 ``[number of images, 3, S, S]``, in the order of the flattened
            list.

        Raises:
            ValueError: An image cannot be read or is ambiguous, or ``do_convert_rgb`` is off and an
                image is not RGB. The message has the index of the image.
        """
        if do_convert_rgb is None:
            do_convert_rgb = self.do_convert_rgb
        flat = flatten_images(images)
        if not flat:
            raise ValueError("0 images were given: give at least 1")
        side = self.size["height"]
        pixels = np.empty((len(flat), 3, side, side), np.float32)
        for index, image in enumerate(flat):
            try:
                self._preprocess_one(image, do_convert_rgb, pixels[index])
            except ValueError as error:
                raise ValueError(f"image {index} of {len(flat)}: {error}") from error
        return BatchFeature({"pixel_values": pixels}, tensor_type=return_tensors)

    def _preprocess_one(self, image, do_convert_rgb: bool, out: np.ndarray) -> None:
        """Write the pixel values of one image to ``out``, ``[3, S, S]``."""
        pil = as_image(image)
        if do_convert_rgb:
            pil = pil.convert("RGB")
        elif pil.mode != "RGB":
            raise ValueError(
                f"it has mode {pil.mode!r} with {len(pil.getbands())} channels, the model takes 3: "
                "convert it to RGB or leave do_convert_rgb on"
            )
        size = (self.size["width"], self.size["height"])
        pixels = np.asarray(pil.resize(size, resample=self.resample))
        # Multiplication by 1 / 255 would differ from the published code in the last bit. A lookup
        # table of all 256 values takes a third of the time of computing every pixel.
        values = np.arange(256, dtype=np.float32) / np.float32(255)
        channels = zip(self.image_mean, self.image_std, strict=True)
        for channel, (mean, std) in enumerate(channels):
            table = (values - np.float32(mean)) / np.float32(std)
            np.take(table, pixels[..., channel], out=out[channel], mode="clip")


def as_image(image) -> "PIL.Image.Image":
    """Convert an image to a PIL image with 8 bits per channel, upright.

    Args:
        image: A PIL image; the path of a file (``str`` or ``pathlib.Path``); a URL; base64, also
            as ``data:image/...``; the bytes of a file; or an array or tensor, ``(height, width)``
            or with 1, 3 or 4 channels first or last. Values of arrays and tensors are 0 to 255, or
            0 to 1 in floating point; ``bool`` is black and white. The EXIF orientation is applied,
            also to a PIL image.

    Raises:
        ValueError: The image cannot be read, has more than 8 bits per channel, or it is unknown
            which dimension has the channels. (After ``load``, a PIL image no longer shows that its
            file has 16-bit color channels, so it is accepted.)
    """
    if isinstance(image, (str, os.PathLike, bytes, bytearray, memoryview)):
        image = _open_image(image)
    if isinstance(image, PIL.Image.Image):
        return _load_upright(image)
    if isinstance(image, torch.Tensor):
        image = image.detach().cpu()
        image = (image.float() if image.dtype == torch.bfloat16 else image).numpy()
    elif not hasattr(image, "__array__"):
        raise ValueError(
            f"it is a {type(image).__name__}: give a PIL image, a path, a URL, base64, the bytes "
            "of a file, an array or a tensor"
        )
    array = _to_uint8(_to_channels_last(np.asarray(image)))
    return PIL.Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array)


def _open_image(source) -> "PIL.Image.Image":
    """Open an image that is passed as a URL, a path, base64 or bytes."""
    subject = "the bytes"
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        subject, source = source, _fetch_image(source)
    elif isinstance(source, (str, os.PathLike)) and os.path.isfile(source):
        subject = source = os.fspath(source)
    elif isinstance(source, os.PathLike):
        raise ValueError(f"there is no file {os.fspath(source)}")
    elif isinstance(source, str):
        shortened = source if len(source) <= 80 else f"{source[:77]}..."
        subject = f"there is no file {shortened!r}, and as base64 it"
        encoded = source.partition(",")[2] if source.startswith("data:image/") else source
        with _as_value_error(subject):  # base64 may have line breaks anywhere
            source = base64.b64decode("".join(encoded.split()), validate=True)
    with _as_value_error(subject):
        return PIL.Image.open(source if isinstance(source, str) else io.BytesIO(source))


@contextmanager
def _as_value_error(subject: str) -> Iterator[None]:
    """Turn any exception into a ``ValueError``: ``subject`` "cannot be read as an image"."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{subject} cannot be read as an image: {error}") from error


class _HttpOnlyRedirects(urllib.request.HTTPRedirectHandler):
    """Handler that follows redirects to http and https only; Python's own follows ftp, too."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        if not newurl[:8].lower().startswith(("http://", "https://")):
            raise ValueError(f"it redirects to {newurl[:80]!r}; expected http or https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _fetch_image(url: str) -> bytes:
    """Download a file, up to a size and a time limit."""
    # Some servers refuse Python's default user agent.
    request = urllib.request.Request(url, headers={"User-Agent": "transformers"})
    opener = urllib.request.build_opener(_HttpOnlyRedirects)
    with _as_value_error(url), opener.open(request, timeout=FETCH_TIMEOUT_SECONDS) as response:
        content = response.read(MAX_FETCHED_BYTES + 1)
    if len(content) > MAX_FETCHED_BYTES:
        raise ValueError(
            f"{url} has more than {MAX_FETCHED_BYTES} bytes, too many for an image: if it is one, "
            "save it to a file and give its path"
        )
    return content


def _load_upright(image: "PIL.Image.Image") -> "PIL.Image.Image":
    """Decode an image and apply its EXIF orientation.

    Raises:
        ValueError: The image cannot be decoded, or has more than 8 bits per channel.
    """
    name = getattr(image, "filename", "") or "it"
    if image.format == "EPS":
        raise ValueError(
            f"{name} is {image.format}, which Pillow renders with another program: convert it to "
            "PNG"
        )
    # Check before load(), after which Pillow no longer has the file's raw mode.
    _refuse_high_bit_depth(name, _find_16_bit_mode(image))
    with _as_value_error(name):  # load() decodes the file
        image.load()
        is_rotated = image.getexif().get(EXIF_ORIENTATION, 1) != 1
        image = PIL.ImageOps.exif_transpose(image) if is_rotated else image
    _refuse_high_bit_depth(name, image.mode if image.mode.startswith(("I", "F")) else None)
    return image


def _refuse_high_bit_depth(name: str, mode: str | None) -> None:
    """Raise ``ValueError`` if an image has a mode of more than 8 bits per channel.

    Args:
        mode: That mode; ``None`` if the image has another one.
    """
    if mode is not None:
        raise ValueError(
            f"{name} has mode {mode!r}, with more than 8 bits, and it is unknown which value is "
            "white: scale it yourself and save it with 8 bits per channel, e.g. if white is 65535 "
            "by Image.fromarray((numpy.asarray(image) / 257).astype('uint8'))"
        )


def _find_16_bit_mode(image: "PIL.Image.Image") -> str | None:
    """Return Pillow's raw mode if a file has 16 bits in each of several channels, else ``None``.

    Pillow converts such a file to 8 bits per channel when it decodes the file.
    """
    if image.mode.startswith("I"):
        return None  # one channel, whose mode stays the same
    for codec, _, _, arguments in getattr(image, "tile", ()):
        mode = arguments[0] if isinstance(arguments, tuple) and arguments else arguments
        if codec == "SGI16":
            return f"{mode};16B"
        if isinstance(mode, str) and mode.endswith(PILLOW_16_BIT_SUFFIXES):
            return mode
    return None


def _to_channels_last(array: np.ndarray) -> np.ndarray:
    """Return an array ``(height, width, channels)``; raise ``ValueError`` if that is ambiguous."""
    if array.ndim == 2 and array.size:
        return array[..., None]
    if array.ndim != 3 or not array.size:
        raise ValueError(
            f"it has shape {array.shape}: give (height, width), (height, width, channels) or "
            "(channels, height, width)"
        )
    # 1 or 3 channels take precedence over 4.
    for channels in ((1, 3), (4,)):
        first, last = array.shape[0] in channels, array.shape[2] in channels
        if first and last:
            raise ValueError(
                f"it has shape {array.shape}, in which the channels may be first or last: give a "
                "PIL image"
            )
        if first or last:
            return array if last else array.transpose(1, 2, 0)
    raise ValueError(f"it has shape {array.shape}, without 1, 3 or 4 channels first or last")


def _to_uint8(array: np.ndarray) -> np.ndarray:
    """Convert values from 0 to 255, from 0.0 to 1.0, or bool; raise ``ValueError`` for others."""
    if array.dtype == np.uint8:
        return array
    if array.dtype == bool:
        return array.astype(np.uint8) * np.uint8(255)
    if array.dtype.kind not in "iuf":
        raise ValueError(f"it has values of {array.dtype}: give numbers")
    smallest, largest = array.min(), array.max()
    if array.dtype.kind == "f" and smallest >= 0 and largest <= 1:
        return np.rint(array * 255).astype(np.uint8)
    # NaN fails these comparisons.
    if smallest >= 0 and largest <= 255 and (array == np.rint(array)).all():
        return array.astype(np.uint8)
    raise ValueError(
        f"it has {array.dtype} values from {smallest} to {largest}: give integers from 0 to 255, "
        "or floating point from 0 to 1"
    )


def flatten_images(images) -> list:
    """Return all images of nested lists, and of 4D arrays and tensors, as one list."""
    if isinstance(images, (list, tuple)):
        return [image for item in images for image in flatten_images(item)]
    return list(images) if getattr(images, "ndim", 0) == 4 else [images]


def _square_size(size: int | dict[str, int]) -> dict[str, int]:
    if isinstance(size, int):
        return {"height": size, "width": size}
    height, width = size.get("height"), size.get("width")
    if height is None or height != width:
        raise ValueError(
            f"size must be square, got height {height} and width {width}: pass one number, the "
            "image_size of the model's vision_config"
        )
    return {"height": height, "width": width}
