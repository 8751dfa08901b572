"""Image preprocessing of glm-4v-9b as a transformers image processor.

The computation is upstream's: PIL bicubic resize to a square without keeping the aspect ratio,
division by 255, normalisation with the CLIP constants, float32, channels first. It needs Pillow
and numpy, not torchvision, and is the same code on transformers 4.57 and 5.x.
"""

import numpy as np
from transformers.image_processing_utils import BaseImageProcessor, BatchFeature
from transformers.image_transforms import to_pil_image
from transformers.image_utils import ImageInput, make_flat_list_of_images

PIL_BICUBIC = 3  # PIL.Image.Resampling.BICUBIC, written out so that importing needs no Pillow


class ChatGLMImageProcessor(BaseImageProcessor):
    """Turn images into the ``pixel_values`` the vision tower takes.

    Args:
        size: Side of the square in pixels: an int or ``{"height": S, "width": S}``. The tower has
            one position embedding per patch and does not interpolate, so it takes this size only.
        patch_size: Side of a vision patch in pixels.
        resample: PIL resampling filter.
        do_convert_rgb: Convert every image to RGB. Upstream leaves that to the caller.
        image_mean: Mean of each channel, on the 0..1 scale.
        image_std: Standard deviation of each channel, on the 0..1 scale.

    Raises:
        ValueError: ``size`` is not a square.
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

    def preprocess(
        self,
        images: ImageInput,
        do_convert_rgb: bool | None = None,
        return_tensors: str | None = "pt",
    ) -> BatchFeature:
        """Preprocess images.

        Args:
            images: A PIL image, an array or tensor (height, width and channels in either order,
                0..255 or 0..1), a path or URL, or a (nested) list of those.
            do_convert_rgb: Overrides the attribute for this call.
            return_tensors: ``"pt"``, ``"np"``, or None for numpy.

        Returns:
            ``pixel_values``: float32 ``[number of images, 3, S, S]``, nested lists flattened.

        Raises:
            ValueError: an image is not RGB and ``do_convert_rgb`` is off.
        """
        if do_convert_rgb is None:
            do_convert_rgb = self.do_convert_rgb
        flat = make_flat_list_of_images(self.fetch_images(images))
        pixels = [self._preprocess_one(image, do_convert_rgb) for image in flat]
        return BatchFeature({"pixel_values": np.stack(pixels)}, tensor_type=return_tensors)

    def _preprocess_one(self, image, do_convert_rgb: bool) -> np.ndarray:
        pil = to_pil_image(image)
        if do_convert_rgb:
            pil = pil.convert("RGB")
        elif pil.mode != "RGB":
            raise ValueError(
                f"an image has mode {pil.mode!r} with {len(pil.getbands())} channels, the model "
                "takes 3: convert it to RGB or leave do_convert_rgb on"
            )
        side = (self.size["width"], self.size["height"])
        pixels = np.asarray(pil.resize(side, resample=self.resample), dtype=np.float32)
        # Division, not multiplication by 1 / 255: the two differ in the last bit.
        pixels = pixels / np.float32(255)
        mean = np.asarray(self.image_mean, dtype=np.float32)
        std = np.asarray(self.image_std, dtype=np.float32)
        return ((pixels - mean) / std).transpose(2, 0, 1)


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
