"""Register glm-4v and cogagent-9b with ms-swift 4: their loader, submodules and chat template.

``python -m glm4v_patched.run swift sft ...`` registers glm-4v by itself. With swift's command::

    swift sft --external_plugins $(python -m glm4v_patched.integrations ms-swift) ...

This model type replaces ms-swift's own ``chatglm4v``, which works only with the published code and
is renamed to ``chatglm4v_of_swift``.
"""

from copy import deepcopy
from io import BytesIO
from pathlib import Path
from typing import Any

from swift.model import (
    MODEL_MAPPING,
    ModelGroup,
    ModelLoader,
    ModelMeta,
    MultiModelKeys,
    register_model,
    register_model_arch,
)
from swift.template import (
    TEMPLATE_MAPPING,
    StdTemplateInputs,
    Template,
    TemplateMeta,
    load_file,
    register_template,
)
from transformers import AutoProcessor

import glm4v_patched

from ..patch.config_json import read_json_object, why_not_glm4v
from ..patch.patch_set import AttributePatch, PatchSet
from ..remote.image_processing_chatglm import as_image
from ..terminal_text import pluralize
from .api_check import TESTED_MS_SWIFT, require_members
from .image_tags import BEGIN_OF_IMAGE, END_OF_IMAGE, IMAGE_TAG, UNEXPANDED_IMAGE, move_images_first

SWIFT_TYPE = "chatglm4v"
STOCK_SWIFT_TYPE = "chatglm4v_of_swift"
# A Unicode noncharacter at which texts are split before they are tokenized. As in the model's own
# chat template, the line feed after a role therefore never merges with the following text into one
# token.
PIECE_BREAK = "\ufdd1"


class GLM4VLoader(ModelLoader):
    """Loads config and processor with the Auto classes that ``glm4v_patched.apply`` has patched."""

    def get_config(self, model_dir):
        if reason := _glm4v_folder_problem(model_dir):
            raise ValueError(
                f"{model_dir}: its config.json is not the config of a glm-4v: {reason}. For "
                f"ms-swift's own code, give --model_type and --template {STOCK_SWIFT_TYPE}"
            )
        return super().get_config(model_dir)

    def get_processor(self, model_dir, config):
        # swift would load AutoTokenizer, because the published repository has no
        # preprocessor_config.json.
        return AutoProcessor.from_pretrained(model_dir)


class GLM4VTemplate(Template):
    """Encodes as the model's processor does, and supervises the tokens that a recipe supervises.

    An image is a begin token, one image token for each of its embeddings, and an end token. The
    prompt ends with the role ``<|assistant|>``; the model generates the line feed after the role,
    so it is supervised.
    """

    # Truncation never cuts these tokens; swift adds the image token to the list.
    placeholder_tokens = [BEGIN_OF_IMAGE, END_OF_IMAGE]
    # Packed samples are separated where position_ids restart at 0.
    support_padding_free = True

    @staticmethod
    def _load_image(image, load_images):
        # swift's own method ignores the EXIF orientation.
        if isinstance(image, dict):
            image = image.get("bytes") or image.get("path")
        source = load_file(image)
        return as_image(source.getvalue() if isinstance(source, BytesIO) else source)

    def replace_tag(self, media_type, index, inputs):
        if media_type != "image":
            raise ValueError(f"a sample contains {media_type}; glm-4v takes only images")
        if self.mode in ("vllm", "lmdeploy", "sglang"):  # engines that expand the placeholder
            return [UNEXPANDED_IMAGE]
        begin, end = self.tokenizer.convert_tokens_to_ids([BEGIN_OF_IMAGE, END_OF_IMAGE])
        image_tokens = [self.processor.image_token_id] * self.processor.num_image_tokens
        return [[begin, *image_tokens, end]]

    def _swift_prepare_inputs(self, inputs):
        super()._swift_prepare_inputs(inputs)
        if self.template_backend != "swift" or not self.use_chat_template:
            return
        for message in inputs.messages:
            content = message["content"]
            if message["role"] == "user" and isinstance(content, str):
                num_images, text = move_images_first(content)
                tags = f"{IMAGE_TAG * num_images}{PIECE_BREAK}" if num_images else ""
                message["content"] = tags + text
            elif message["role"] == "assistant":
                message["content"] = _start_on_new_line(content)

    def _tokenize(self, context, **kwargs):
        tokenize = super()._tokenize
        pieces = context.split(PIECE_BREAK)
        return [token for piece in pieces if piece for token in tokenize(piece, **kwargs)]

    def _encode(self, inputs):
        # GRPO encodes prompts without their images, to log them.
        if inputs.images or self._is_supervised(inputs):
            _check_image_tags(inputs)
        encoded = super()._encode(inputs)
        begin = self.tokenizer.convert_tokens_to_ids(BEGIN_OF_IMAGE)
        if (num_tokens := encoded["input_ids"].count(begin)) != len(inputs.images):
            raise ValueError(
                f"a sample has {pluralize(len(inputs.images), 'image')}, and its texts have "
                f"{pluralize(num_tokens, f'{BEGIN_OF_IMAGE} token')}: remove the token from them"
            )
        if encoded.get("labels") is not None and self.use_chat_template:
            self._supervise_turn_ends(encoded)
        if inputs.images:
            pixels = self.processor.image_processor(inputs.images, return_tensors="pt")
            encoded["pixel_values"] = pixels["pixel_values"]
        return encoded

    def _is_supervised(self, inputs: StdTemplateInputs) -> bool:
        last = inputs.messages[-1]
        return self.is_training and last["role"] == "assistant" and last["content"] is not None

    def _supervise_turn_ends(self, encoded: dict[str, Any]) -> None:
        """Supervise the role token that follows an answer: the model generates it to stop."""
        roles = self.tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
        ids, labels, scale = encoded["input_ids"], encoded["labels"], encoded.get("loss_scale")
        for index in range(1, len(ids)):
            if ids[index] in roles and labels[index - 1] >= 0 > labels[index]:
                labels[index] = ids[index]
                if scale is not None:
                    scale[index] = scale[index - 1]

    def decode_generate_ids(self, *args, **kwargs):
        return super().decode_generate_ids(*args, **kwargs).removeprefix("\n")


def register() -> None:
    """Register the model and its template; calling it again changes nothing."""
    if _patches.is_applied:
        return
    glm4v_patched.apply()
    methods = ("_encode", "_load_image", "_swift_prepare_inputs", "_tokenize")
    require_members(Template, (*methods, "decode_generate_ids"), "ms-swift", TESTED_MS_SWIFT)
    require_members(ModelLoader, ("get_processor", "get_config"), "ms-swift", TESTED_MS_SWIFT)
    _register_template()
    _register_model()
    _patches.apply()


def _register_template() -> None:
    stock = TEMPLATE_MAPPING[SWIFT_TYPE]
    stock.template_type = STOCK_SWIFT_TYPE
    register_template(stock)
    register_template(
        TemplateMeta(
            SWIFT_TYPE,
            prefix=["[gMASK]<sop>"],
            system_prefix=[f"[gMASK]<sop><|system|>\n{PIECE_BREAK}{{{{SYSTEM}}}}"],
            prompt=[f"<|user|>\n{PIECE_BREAK}{{{{QUERY}}}}<|assistant|>"],
            chat_sep=[],
            suffix=["<|endoftext|>"],
            stop_words=["<|endoftext|>", "<|user|>", "<|observation|>"],
            agent_template="chatglm4",
            template_cls=GLM4VTemplate,
        ),
        exist_ok=True,
    )


def _register_model() -> None:
    stock = MODEL_MAPPING[SWIFT_TYPE]
    models = [model for group in stock.model_groups for model in group.models]
    if not any(model.hf_model_id == "zai-org/glm-4v-9b" for model in models):
        raise RuntimeError(
            f"ms-swift's model type {SWIFT_TYPE} has no glm-4v-9b; install the version that "
            f"glm4v_patched is tested with: ms-swift=={TESTED_MS_SWIFT}"
        )
    stock.model_groups = []
    stock.model_type, stock.template = STOCK_SWIFT_TYPE, STOCK_SWIFT_TYPE
    stock.candidate_templates = [STOCK_SWIFT_TYPE]
    stock.model_arch = stock.model_arch.arch_name  # register_model looks it up by name again
    register_model(stock)
    register_model_arch(
        MultiModelKeys(
            SWIFT_TYPE,
            embedding="transformer.embedding.word_embeddings",
            module_list="transformer.encoder.layers",
            lm_head="transformer.output_layer",
            language_model=[f"transformer.{n}" for n in ("encoder", "embedding", "output_layer")],
            vision_tower="transformer.vision",
            aligner=[f"transformer.vision.{n}" for n in ("linear_proj", "conv", "boi", "eoi")],
        ),
        exist_ok=True,
    )
    register_model(
        ModelMeta(
            SWIFT_TYPE,
            [ModelGroup(models)],
            GLM4VLoader,
            template=SWIFT_TYPE,
            model_arch=SWIFT_TYPE,
            architectures=["GLM4VForCausalLM", *stock.architectures],
            is_multimodal=True,
        ),
        exist_ok=True,
    )


def _glm4v_folder_problem(folder: str) -> str | None:
    config = Path(folder) / "config.json"
    if not config.is_file():
        return "there is none"
    return why_not_glm4v(read_json_object(config))


def _match_by_config(original):
    """Make swift recognize a glm-4v by its config.

    swift itself uses the folder's name, or the architecture, which six other models share.
    """

    def get_matched_model_meta(model_id_or_path):
        if _glm4v_folder_problem(model_id_or_path) is None:
            return deepcopy(MODEL_MAPPING[SWIFT_TYPE])
        return original(model_id_or_path)

    return get_matched_model_meta


_patches = PatchSet(
    [AttributePatch("swift.model.model_meta", "get_matched_model_meta", _match_by_config)]
)


def _check_image_tags(inputs: StdTemplateInputs) -> None:
    """Refuse a sample with more image tags than images: swift would tokenize them as text."""
    texts = [inputs.system, *(message["content"] for message in inputs.messages)]
    num_tags = sum(text.count(IMAGE_TAG) for text in texts if isinstance(text, str))
    if num_tags > len(inputs.images):
        raise ValueError(
            f"a sample has {pluralize(len(inputs.images), 'image')}, and its messages have "
            f'{pluralize(num_tags, f"{IMAGE_TAG} tag")}: give each tag its image, in "images"'
        )


def _start_on_new_line(content: Any) -> Any:
    """Begin an answer with a line feed; an answer of generated token ids has one already."""
    if isinstance(content, str):
        return f"\n{PIECE_BREAK}{content}"
    if isinstance(content, list) and content and isinstance(content[0], str):
        return [f"\n{PIECE_BREAK}{content[0]}", *content[1:]]
    return content
