"""Image preprocessing of glm-4v-9b as a transformers image processor.

The computation is upstream's: PIL bicubic resize to a square without keeping the aspect ratio,
division by 255, normalization with the CLIP constants, float32, channels first. An image has the
same pixels whichever way it comes; what cannot be told is refused (:func:`as_image`).
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

from .configuration_chatglm import PROCESSOR, log_unknown, own_places

if is_vision_available():
    import PIL.Image
    import PIL.ImageOps

PIL_BICUBIC = 3  # PIL.Image.Resampling.BICUBIC, written out: without Pillow there is no PIL here
ORIENTATION = 0x0112  # the EXIF tag
SECONDS_TO_ANSWER = 60
MOST_BYTES_FETCHED = 256 * 2**20
# How Pillow says that a file has 16 bits a channel; in "BGR;16" they are a pixel's.
OF_16_BITS = (";16B", ";16L", ";16N")


SAVED = {"size", "patch_size", "resample", "do_convert_rgb", "image_mean", "image_std"}
SAVED |= {"image_processor_type"}
# Where transformers 4 and 5 keep the name of its processor's class.
OF_PROCESSOR = ("_processor_class", "processor_class")


class ChatGLMImageProcessor(BaseImageProcessor):
    """Turn images into the ``pixel_values`` the vision tower takes.

    Args:
        size: Side of the square in pixels: an int or ``{"height": S, "width": S}``. The tower has
            one position embedding per patch and does not interpolate, so it takes this size only.
        patch_size: Side of a vision patch in pixels.
        do_convert_rgb: Convert every image to RGB. Upstream leaves that to the caller.
        image_mean, image_std: Of each channel, on the 0..1 scale.
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
        self.size = _square(1120 if size is None else size)
        self.patch_size = patch_size
        self.resample = int(resample)
        self.do_convert_rgb = do_convert_rgb
        self.image_mean = list(image_mean or (0.48145466, 0.4578275, 0.40821073))
        self.image_std = list(image_std or (0.26862954, 0.26130258, 0.27577711))
        for name, values in (("image_mean", self.image_mean), ("image_std", self.image_std)):
            if len(values) != 3 or not all(isinstance(one, Real) for one in values):
                raise ValueError(f"{name} is {values!r:.200}; expected three numbers")
            with np.errstate(all="ignore"):
                numbers = np.array(values, np.float32)
                factors = 1 / numbers if name == "image_std" else numbers
            if not (np.isfinite(numbers) & np.isfinite(factors)).all():
                raise ValueError(
                    f"{name} is {values}, which makes pixel values NaN, infinite or all the same: "
                    "give finite numbers, and in image_std none that is 0 in float32"
                )

    def save_pretrained(self, save_directory, *args, **kwargs):
        """As usual, but for settings that this class does not have: these are logged, not saved."""
        log_unknown(sorted(vars(self).keys() - self.to_dict()), "preprocessor_config.json")
        return super().save_pretrained(save_directory, *args, **kwargs)

    def to_dict(self) -> dict:
        """What is saved, here and in the processor's file: settings, and where the code is."""
        values = super().to_dict()
        own = {key: values[key] for key in SAVED if key in values}
        own |= {key: PROCESSOR for key in OF_PROCESSOR if values.get(key)}
        if places := own_places(values.get("auto_map"), self._auto_class):
            own["auto_map"] = places
        return own

    def preprocess(
        self,
        images: ImageInput,
        do_convert_rgb: bool | None = None,
        return_tensors: str | None = "pt",
    ) -> BatchFeature:
        """Preprocess images.

        Args:
            images: An image as :func:`as_image` takes it, or a (nested) list of those; arrays
                and tensors of four dimensions are several.
            return_tensors: ``"pt"``, ``"np"``, or None for numpy.

        Returns:
            ``pixel_values``: float32 ``[number of images, 3, S, S]``, nested lists flattened.

        Raises:
            ValueError: an image cannot be read or is not clear, or is not RGB and
                ``do_convert_rgb`` is off; names its number.
        """
        if do_convert_rgb is None:
            do_convert_rgb = self.do_convert_rgb
        flat = flat_images(images)
        if not flat:
            raise ValueError("0 images were given: give at least 1")
        side = self.size["height"]
        pixels = np.empty((len(flat), 3, side, side), np.float32)
        for number, image in enumerate(flat):
            try:
                self._preprocess_one(image, do_convert_rgb, pixels[number])
            except ValueError as error:
                raise ValueError(f"image {number} of {len(flat)}: {error}") from error
        return BatchFeature({"pixel_values": pixels}, tensor_type=return_tensors)

    def _preprocess_one(self, image, do_convert_rgb: bool, out: np.ndarray) -> None:
        """Write ``[3, S, S]`` to ``out``."""
        pil = as_image(image)
        if do_convert_rgb:
            pil = pil.convert("RGB")
        elif pil.mode != "RGB":
            raise ValueError(
                f"it has mode {pil.mode!r} with {len(pil.getbands())} channels, the model takes 3: "
                "convert it to RGB or leave do_convert_rgb on"
            )
        side = (self.size["width"], self.size["height"])
        pixels = np.asarray(pil.resize(side, resample=self.resample))
        # Division, not multiplication by 1 / 255: the two differ in the last bit. Of each of the
        # 256 values once, which takes a third of the time.
        values = np.arange(256, dtype=np.float32) / np.float32(255)
        channels = zip(self.image_mean, self.image_std, strict=True)
        for channel, (mean, std) in enumerate(channels):
            table = (values - np.float32(mean)) / np.float32(std)
            np.take(table, pixels[..., channel], out=out[channel], mode="clip")


def as_image(image) -> "PIL.Image.Image":
    """A PIL image of 8 bits a channel, upright.

    Args:
        image: A PIL image; the path of a file (``str`` or ``pathlib.Path``); an URL; base64, also
            as ``data:image/...``; the bytes of a file; or an array or tensor, ``(height, width)``
            or with 1, 3 or 4 channels first or last. Numbers are 0 to 255, or, in floating point,
            0 to 1; ``bool`` is black and white. An image that says in EXIF how it was held is
            turned, a PIL image too.

    Raises:
        ValueError: it cannot be read, or what counts as white or where its channels are is not
            known. A PIL image whose pixels were loaded does not show that its file had 16 bits in
            each of several channels.
    """
    if isinstance(image, (str, os.PathLike, bytes, bytearray, memoryview)):
        image = _open(image)
    if isinstance(image, PIL.Image.Image):
        return _upright(image)
    if isinstance(image, torch.Tensor):
        image = image.detach().cpu()
        image = (image.float() if image.dtype == torch.bfloat16 else image).numpy()
    elif not hasattr(image, "__array__"):
        raise ValueError(
            f"it is a {type(image).__name__}: give a PIL image, a path, an URL, base64, the bytes "
            "of a file, an array or a tensor"
        )
    array = _in_8_bits(_channels_last(np.asarray(image)))
    return PIL.Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array)


def _open(source) -> "PIL.Image.Image":
    name = "what the bytes hold"
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        name, source = source, _fetched(source)
    elif isinstance(source, (str, os.PathLike)) and os.path.isfile(source):
        name = source = os.fspath(source)
    elif isinstance(source, os.PathLike):
        raise ValueError(f"there is no file {os.fspath(source)}")
    elif isinstance(source, str):
        shown = source if len(source) <= 80 else f"{source[:77]}..."
        name = f"there is no file {shown!r}; what it holds as base64"
        encoded = source.partition(",")[2] if source.startswith("data:image/") else source
        with _reading(name):  # lines may be broken anywhere
            source = base64.b64decode("".join(encoded.split()), validate=True)
    with _reading(name):
        return PIL.Image.open(source if isinstance(source, str) else io.BytesIO(source))


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Turn whatever a broken file makes Pillow's readers raise, or a host, into ``ValueError``."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{name} cannot be read as an image: {error}") from error


class _OnlyToHttp(urllib.request.HTTPRedirectHandler):
    """Python's own follows to ftp, too."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        if not newurl[:8].lower().startswith(("http://", "https://")):
            raise ValueError(f"it leads to {newurl[:80]!r}; expected http or https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _fetched(url: str) -> bytes:
    # Some hosts refuse Python's own name.
    request = urllib.request.Request(url, headers={"User-Agent": "transformers"})
    opener = urllib.request.build_opener(_OnlyToHttp)
    with _reading(url), opener.open(request, timeout=SECONDS_TO_ANSWER) as answer:
        content = answer.read(MOST_BYTES_FETCHED + 1)
    if len(content) > MOST_BYTES_FETCHED:
        raise ValueError(
            f"{url} has more than {MOST_BYTES_FETCHED} bytes, which is no image: save it to a "
            "file and give its path if it is one"
        )
    return content


def _upright(image: "PIL.Image.Image") -> "PIL.Image.Image":
    name = getattr(image, "filename", "") or "it"
    if image.format == "EPS":
        raise ValueError(
            f"{name} is {image.format}, which Pillow has another program draw: convert it to PNG"
        )
    _refuse_deep(name, _file_of_16_bits(image))  # which is forgotten once the pixels are loaded
    with _reading(name):  # files are decoded here, not when they are opened
        image.load()
        turned = image.getexif().get(ORIENTATION, 1) != 1
        image = PIL.ImageOps.exif_transpose(image) if turned else image
    _refuse_deep(name, image.mode if image.mode.startswith(("I", "F")) else None)
    return image


def _refuse_deep(name: str, mode: str | None) -> None:
    if mode is not None:
        raise ValueError(
            f"{name} has mode {mode!r}, of more than 8 bits, and does not say which number is "
            "white: scale it yourself and save it with 8 bits a channel, e.g. with white at 65535 "
            "Image.fromarray((numpy.asarray(image) / 257).astype('uint8'))"
        )


def _file_of_16_bits(image: "PIL.Image.Image") -> str | None:
    """Pillow's name for the numbers in a file of 16 bits in each of several channels."""
    if image.mode.startswith("I"):
        return None
    for codec, _, _, arguments in getattr(image, "tile", ()):
        mode = arguments[0] if isinstance(arguments, tuple) and arguments else arguments
        if codec == "SGI16":
            return f"{mode};16B"
        if isinstance(mode, str) and mode.endswith(OF_16_BITS):
            return mode
    return None


def _channels_last(array: np.ndarray) -> np.ndarray:
    if array.ndim == 2 and array.size:
        return array[..., None]
    if array.ndim != 3 or not array.size:
        raise ValueError(
            f"it has shape {array.shape}: give (height, width), (height, width, channels) or "
            "(channels, height, width)"
        )
    for channels in ((1, 3), (4,)):
        first, last = array.shape[0] in channels, array.shape[2] in channels
        if first and last:
            raise ValueError(
                f"it has shape {array.shape}, in which the channels may be the first or the last "
                "dimension: give a PIL image"
            )
        if first or last:
            return array if last else array.transpose(1, 2, 0)
    raise ValueError(f"it has shape {array.shape}, without 1, 3 or 4 channels first or last")


def _in_8_bits(array: np.ndarray) -> np.ndarray:
    if array.dtype == np.uint8:
        return array
    if array.dtype == bool:
        return array.astype(np.uint8) * np.uint8(255)
    if array.dtype.kind not in "iuf":
        raise ValueError(f"it holds {array.dtype}, not numbers")
    smallest, largest = array.min(), array.max()
    if array.dtype.kind == "f" and smallest >= 0 and largest <= 1:
        return np.rint(array * 255).astype(np.uint8)
    # Comparisons with NaN are false.
    if smallest >= 0 and largest <= 255 and (array == np.rint(array)).all():
        return array.astype(np.uint8)
    raise ValueError(
        f"it holds {array.dtype} from {smallest} to {largest}: give whole numbers from 0 to 255, "
        "or floating point from 0 to 1"
    )


def flat_images(images) -> list:
    if isinstance(images, (list, tuple)):
        return [image for item in images for image in flat_images(item)]
    return list(images) if getattr(images, "ndim", 0) == 4 else [images]


def _square(size: int | dict[str, int]) -> dict[str, int]:
    if isinstance(size, int):
        return {"height": size, "width": size}
    height, width = size.get("height"), size.get("width")
    if height is None or height != width:
        raise ValueError(
            f"size must be a square, got height {height} and width {width}: pass one number, the "
            "image_size of the model's vision_config"
        )
    return {"height": height, "width": width}
