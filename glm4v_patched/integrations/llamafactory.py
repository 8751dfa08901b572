"""glm-4v's images for LLaMA-Factory: ``template: glm4`` takes them where the model is a glm-4v.

``python -m glm4v_patched.run llamafactory-cli train ...`` registers it by itself. A script of its
own calls :func:`register` and that of ``llamafactory_composite``.
"""

import logging
from copy import deepcopy
from dataclasses import dataclass

from llamafactory.data import mm_plugin
from llamafactory.data.formatter import StringFormatter
from llamafactory.data.template import TEMPLATES, Template

import glm4v_patched

from ..remote.image_processing_chatglm import as_image
from ..remote.tokenization_chatglm import ChatGLM4Tokenizer
from .api_check import require_members
from .image_tags import BEGIN_OF_IMAGE, END_OF_IMAGE, IMAGE_TAG, UNEXPANDED_IMAGE, move_images_first

logger = logging.getLogger(__name__)

PLUGIN_NAME = "glm4v_9b"
PATCHED_TEMPLATE = "glm4"
TESTED = "0.9.5"
# Pieces that are encoded one by one, as the model's own chat template does: the line feed after a
# role never becomes one token with what follows it.
TEMPLATE_SLOTS = {
    "format_user": ["<|user|>\n", "{{content}}", "<|assistant|>"],
    "format_assistant": ["\n", "{{content}}"],
    "format_system": ["<|system|>\n", "{{content}}"],
    "format_observation": ["<|observation|>\n", "{{content}}", "<|assistant|>"],
}


@dataclass
class GLM4VPlugin(mm_plugin.BasePlugin):
    """An image is begin id, a fill id for each of its positions, end id, before the words."""

    def process_messages(self, messages, images, videos, audios, processor):
        self._validate_input(processor, images, videos, audios)
        self._validate_messages(messages, images, videos, audios)
        image = UNEXPANDED_IMAGE
        if self.expand_mm_tokens:
            image = BEGIN_OF_IMAGE + processor.image_token * processor.num_image_tokens + END_OF_IMAGE
        messages = deepcopy(messages)
        for message in messages:
            number, words = move_images_first(message["content"])
            message["content"] = image * number + words.replace(IMAGE_TAG, image)
        return messages

    def _regularize_images(self, images, **options):
        """At full size: the model's processor is to see more than ``image_max_pixels``."""
        sources = [
            image["bytes"] or image["path"] if isinstance(image, dict) else image
            for image in images
        ]
        return {"images": [as_image(source) for source in sources]}


class GLM4VTemplate(Template):
    """LLaMA-Factory's glm4, which the text models of GLM-4 have too: these it leaves as it is."""

    def fix_special_tokens(self, tokenizer):
        super().fix_special_tokens(tokenizer)
        if not isinstance(tokenizer, ChatGLM4Tokenizer):  # that of another model
            return
        self.mm_plugin = mm_plugin.get_mm_plugin(PLUGIN_NAME, image_token="<|begin_of_video|>")
        for name, slots in TEMPLATE_SLOTS.items():
            setattr(self, name, StringFormatter(slots=slots))
        logger.info(
            "glm4 takes glm-4v's images, at full size: image_max_pixels and image_min_pixels "
            "have no effect"
        )


def register() -> None:
    """Register the plug-in, and have the template ``glm4`` use it. Again does nothing."""
    if PLUGIN_NAME in mm_plugin.PLUGINS:
        return
    glm4v_patched.apply()
    methods = ("_validate_input", "_validate_messages", "_regularize_images")
    require_members(mm_plugin.BasePlugin, methods, "llamafactory", TESTED)
    require_members(Template, ["fix_special_tokens"], "llamafactory", TESTED)
    require_members(TEMPLATES[PATCHED_TEMPLATE], TEMPLATE_SLOTS, "llamafactory", TESTED)
    mm_plugin.register_mm_plugin(PLUGIN_NAME, GLM4VPlugin)
    TEMPLATES[PATCHED_TEMPLATE] = GLM4VTemplate(**vars(TEMPLATES[PATCHED_TEMPLATE]))
