"""LLaMA-Factory's ``train`` with pictures for glm-4v, which none of its templates has a place for.

``llamafactory_pictures.py RECIPE.yaml [name=value ...]``. Nothing in it knows of glm4v_patched.
"""

from llamafactory.data.mm_plugin import get_mm_plugin
from llamafactory.data.template import TEMPLATES
from llamafactory.train.tuner import run_exp

# The three ids of an image in the published form, which the model grows to its positions.
IMAGE = "<|begin_of_image|><|endoftext|><|end_of_image|>"
TEMPLATES["glm4"].mm_plugin = get_mm_plugin("llava", image_token=IMAGE, expand_mm_tokens=False)

if __name__ == "__main__":
    run_exp()
