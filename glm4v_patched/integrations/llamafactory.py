"""Images of glm-4v in LLaMA-Factory's ``template: glm4``.

``python -m glm4v_patched.run llamafactory-cli train ...`` registers this plug-in by itself; other
scripts call :func:`register` here and in ``llamafactory_composite``.
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
from .api_check import TESTED_LLAMAFACTORY, require_members
from .image_tags import BEGIN_OF_IMAGE, END_OF_IMAGE, IMAGE_TAG, UNEXPANDED_IMAGE, move_images_first

logger = logging.getLogger(__name__)

PLUGIN_NAME = "glm4v_9b"
PATCHED_TEMPLATE = "glm4"
# LLaMA-Factory tokenizes slots one by one. As in the model's own chat template, the line feed after
# a role therefore never merges with the following text into one token.
TEMPLATE_SLOTS = {
    "format_user": ["<|user|>\n", "{{content}}", "<|assistant|>"],
    "format_assistant": ["\n", "{{content}}"],
    "format_system": ["<|system|>\n", "{{content}}"],
    "format_observation": ["<|observation|>\n", "{{content}}", "<|assistant|>"],
}


@dataclass
class GLM4VPlugin(mm_plugin.BasePlugin):
    """Puts the tokens of a message's images before its text, for LLaMA-Factory's templates.

    An image is a begin token, one image token for each of its embeddings, and an end token.
    """

    def process_messages(self, messages, images, videos, audios, processor):
        self._validate_input(processor, images, videos, audios)
        self._validate_messages(messages, images, videos, audios)
        image = UNEXPANDED_IMAGE
        if self.expand_mm_tokens:
            image = (
                BEGIN_OF_IMAGE + processor.image_token * processor.num_image_tokens + END_OF_IMAGE
            )
        messages = deepcopy(messages)
        for message in messages:
            num_images, text = move_images_first(message["content"])
            message["content"] = image * num_images + text.replace(IMAGE_TAG, image)
        return messages

    def _regularize_images(self, images, **options):
        """Load images at full size and ignore ``image_max_pixels``: the processor resizes them."""
        sources = [
            image["bytes"] or image["path"] if isinstance(image, dict) else image
            for image in images
        ]
        return {"images": [as_image(source) for source in sources]}


class GLM4VTemplate(Template):
    """LLaMA-Factory's template ``glm4``, extended for glm-4v.

    Text models of GLM-4 use the same template, and nothing changes for them.
    """

    def fix_special_tokens(self, tokenizer):
        super().fix_special_tokens(tokenizer)
        if not isinstance(tokenizer, ChatGLM4Tokenizer):  # another model's tokenizer
            return
        self.mm_plugin = mm_plugin.get_mm_plugin(PLUGIN_NAME, image_token="<|begin_of_video|>")
        for name, slots in TEMPLATE_SLOTS.items():
            setattr(self, name, StringFormatter(slots=slots))
        logger.info(
            "template glm4 passes images to glm-4v at full size: image_max_pixels and "
            "image_min_pixels have no effect"
        )


def register() -> None:
    """Register the plug-in for the template ``glm4``; calling it again changes nothing."""
    if PLUGIN_NAME in mm_plugin.PLUGINS:
        return
    glm4v_patched.apply()
    methods = ("_validate_input", "_validate_messages", "_regularize_images")
    require_members(mm_plugin.BasePlugin, methods, "llamafactory", TESTED_LLAMAFACTORY)
    require_members(Template, ["fix_special_tokens"], "llamafactory", TESTED_LLAMAFACTORY)
    require_members(
        TEMPLATES[PATCHED_TEMPLATE], TEMPLATE_SLOTS, "llamafactory", TESTED_LLAMAFACTORY
    )
    mm_plugin.register_mm_plugin(PLUGIN_NAME, GLM4VPlugin)
    TEMPLATES[PATCHED_TEMPLATE] = GLM4VTemplate(**vars(TEMPLATES[PATCHED_TEMPLATE]))
