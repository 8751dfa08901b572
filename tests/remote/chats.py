"""What tests of chats say."""

from PIL import Image

IMAGE = "<|begin_of_image|><|endoftext|><|end_of_image|>"


def user(content, **rest) -> list[dict]:
    return [{"role": "user", "content": content, **rest}]


def picture(color="red", size=(30, 20)) -> Image.Image:
    return Image.new("RGB", size, color)
