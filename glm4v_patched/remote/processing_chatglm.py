"""Processor of glm-4v-9b: tokenizer and image processor in one call.

The published tokenizer writes three ids for an image, which the published model expands in
``forward``. This processor returns expanded prompts, so that ids, mask, labels and logits have the
same length. In an expanded prompt, an image is its begin id, one id for each inner token, and its
end id.
"""

from typing import Any

from transformers import BatchFeature, ProcessorMixin
from transformers.image_utils import ImageInput
from transformers.utils import IMAGE_PROCESSOR_NAME, cached_file

# transformers 4.57 copies to its module cache only the files that this file itself imports. So this
# file also imports the files that its imports need.
from .configuration_chatglm import keep_our_auto_classes
from .image_processing_chatglm import ChatGLMImageProcessor, flatten_images
from .tokenization_chatglm import (
    MODALITIES_HINT,
    VIDEO_AND_AUDIO_ARGUMENTS,
    ChatGLM4Tokenizer,
    as_conversations,
    find_images,
    is_empty_media,
    refuse_media,
)

DOWNLOAD_OPTIONS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
)


class ChatGLMProcessor(ProcessorMixin):
    """Processor that makes model inputs from text, conversations and images.

    Attributes:
        num_image_tokens: Number of inner tokens of an image: one for each 2 x 2 patches.
        image_token, image_token_id: Text and id of the inner tokens.
    """

    # transformers 4.57 needs these three attributes, with names of Auto classes for custom classes.
    # 5.x reads the signature of __init__.
    attributes = ["image_processor", "tokenizer"]
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"
    _auto_class = "AutoProcessor"

    # The model has no video, so this token is free. The published placeholder, <|endoftext|>, is
    # also the padding token, which collators mask.
    image_token = "<|begin_of_video|>"

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        if self.chat_template is None:
            self.chat_template = tokenizer.chat_template
        side = image_processor.size["height"]
        if getattr(tokenizer, "image_size", None) is None:
            tokenizer.image_size = side
        elif tokenizer.image_size != side:
            raise ValueError(
                f"the tokenizer has image_size {tokenizer.image_size} but the image processor "
                f"makes images of {side}: give both the image_size of the model's vision_config"
            )

    @property
    def num_image_tokens(self) -> int:
        side, patch = self.image_processor.size["height"], self.image_processor.patch_size
        return (side // patch // 2) ** 2

    @property
    def image_token_id(self) -> int:
        return self.tokenizer.convert_tokens_to_ids(self.image_token)

    @property
    def model_input_names(self) -> list[str]:
        return [*self.tokenizer.model_input_names, *self.image_processor.model_input_names]

    @classmethod
    def get_processor_dict(cls, pretrained_model_name_or_path, **kwargs):
        # transformers' method calls cls.get_possibly_dynamic_module to find the class of an audio
        # tokenizer. Call it with a subclass in which that method raises an error.
        parent: Any = super(ChatGLMProcessor, _AudioTokenizerRefusal)
        return parent.get_processor_dict(pretrained_model_name_or_path, **kwargs)

    @classmethod
    def _get_arguments_from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs) -> list:
        """Load tokenizer and image processor with our classes.

        Auto classes would ask again whether to trust remote code.
        """
        tokenizer = ChatGLM4Tokenizer.from_pretrained(pretrained_model_name_or_path, **kwargs)
        options = {name: kwargs[name] for name in DOWNLOAD_OPTIONS if kwargs.get(name) is not None}
        config_file = cached_file(
            pretrained_model_name_or_path,
            IMAGE_PROCESSOR_NAME,
            _raise_exceptions_for_missing_entries=False,
            **options,
        )
        if config_file is None:
            # The published repository has no such file, but tokenizer_config.json has the size.
            return [ChatGLMImageProcessor(size=tokenizer.image_size), tokenizer]
        image_processor = ChatGLMImageProcessor.from_pretrained(
            pretrained_model_name_or_path, **options
        )
        return [image_processor, tokenizer]

    def save_pretrained(self, save_directory, push_to_hub: bool = False, **kwargs):
        """Save as transformers does, and save preprocessor_config.json, which 4.57 reads."""
        self.image_processor.save_pretrained(save_directory)
        return super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    def to_dict(self, **options) -> dict:
        """Return the settings to save, with our ``auto_map`` (transformers 4 passes options)."""
        values = super().to_dict(**options)
        if auto_map := keep_our_auto_classes(values.pop("auto_map", None), self._auto_class):
            values["auto_map"] = auto_map
        return values

    def __call__(
        self,
        images: ImageInput | None = None,
        text: str | list | None = None,
        videos: Any = None,
        audio: Any = None,
        *,
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool | str = False,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        padding_side: str | None = None,
        return_tensors: str | None = None,
        **kwargs,
    ) -> BatchFeature:
        """Encode texts and images.

        An image in a text is ``<|begin_of_image|>``, one placeholder, ``<|end_of_image|>``. The
        placeholder is expanded to `num_image_tokens` ids; an image that is expanded already stays
        as it is. Special tokens in a text are encoded as special tokens, so pass text from users to
        `apply_chat_template` instead.

        Args:
            images: Images as the image processor takes them, in the order of their begin ids. Or a
                list with an item for each text: a list of its images, or None.
            text: A text, a list of texts, or sequences of ids.
            videos, audio: None or empty, because the model takes neither; the names ``video`` and
                ``audios`` are accepted, too.
            add_special_tokens: Prepend ``[gMASK]<sop>`` to texts that do not begin with it.
            return_tensors: ``"pt"``, ``"np"`` or None for lists (``pixel_values`` is then numpy).
            **kwargs: ``text_kwargs`` and ``images_kwargs``, dicts of options for the tokenizer and
                the image processor.

        Returns:
            Always a batch: ``input_ids`` and ``attention_mask`` ``[B, L]``; with images also
            ``pixel_values``, float32 ``[number of images, 3, S, S]``.

        Raises:
            ValueError: Images do not match their ids, an image would be truncated, or an option is
                unknown.
        """
        text_options = {
            "add_special_tokens": add_special_tokens,
            "padding": padding,
            "truncation": truncation,
            "max_length": max_length,
            "pad_to_multiple_of": pad_to_multiple_of,
            "padding_side": padding_side,
            "return_tensors": return_tensors,
        }
        options, images_kwargs = _merge_options(
            text_options, kwargs | {"videos": videos, "audio": audio}
        )
        if text is None:
            if images is None:
                raise ValueError("neither text nor images were given: pass at least one of them")
            tensor_type = options["return_tensors"]
            return self.image_processor(
                _flatten_and_count(images)[0], return_tensors=tensor_type, **images_kwargs
            )
        sequences = {"input_ids": self._encode(text, options["add_special_tokens"])}
        return self._build_batch(sequences, images, options, images_kwargs)

    def apply_chat_template(  # type: ignore[override]  # the base class says that it returns text
        self,
        conversation: list[dict] | list[list[dict]],
        chat_template: str | None = None,
        *,
        return_assistant_tokens_mask: bool = False,
        tokenize: bool = False,
        padding: bool | str = False,
        truncation: bool | str = False,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        padding_side: str | None = None,
        return_tensors: str | None = None,
        return_dict: bool = False,
        processor_kwargs: dict[str, Any] | None = None,
        **kwargs,
    ) -> str | list[str] | list[list[int]] | BatchFeature:
        """Format conversations like the tokenizer's method, with images and expanded prompts.

        Images are read from the messages: under ``"image"`` of a message as published, or under
        ``"image"``, ``"url"``, ``"path"``, ``"base64"`` or ``"image_url"`` of a part of a content
        list. An image may be a PIL image, array, tensor, path, URL, base64, or the bytes of a file.
        Unknown keys are refused. The characters ``<image>`` in a text are plain text.

        Args:
            processor_kwargs: Options of `__call__`, as transformers 5 passes them.
            **kwargs: ``tools``, ``documents``, ``add_generation_prompt`` and
                ``continue_final_message``, as for the tokenizer; variables for the template.

        Returns:
            Text (``tokenize=False``), the ids of expanded prompts as a batch, or with
            ``return_dict`` the same as `__call__`, plus ``assistant_masks`` if requested.
        """
        text_options = {
            "add_special_tokens": False,  # the template has [gMASK]<sop>
            "padding": padding,
            "truncation": truncation,
            "max_length": max_length,
            "pad_to_multiple_of": pad_to_multiple_of,
            "padding_side": padding_side,
            # In transformers 5, "auto" means the processor's default, which is None here.
            "return_tensors": None if return_tensors == "auto" else return_tensors,
        }
        options, images_kwargs = _merge_options(text_options, processor_kwargs or {})
        kwargs["chat_template"] = self._resolve_template(chat_template)
        if not tokenize:
            return self.tokenizer.apply_chat_template(conversation, tokenize=False, **kwargs)
        conversations, _ = as_conversations(conversation)
        sequences = self.tokenizer.encode_chats(
            conversations, return_assistant_tokens_mask=return_assistant_tokens_mask, **kwargs
        )
        images = [find_images(messages) for messages in conversations]
        batch = self._build_batch(sequences, images, options, images_kwargs)
        return batch if return_dict else batch["input_ids"]

    def _resolve_template(self, chat_template: str | None) -> str | None:
        """Return ``chat_template``, the template of that name, or by default the processor's."""
        templates = self.chat_template
        if isinstance(templates, dict):
            return templates.get(chat_template or "default", chat_template)
        return templates if chat_template is None else chat_template

    def _encode(self, text: str | list, add_special_tokens: bool) -> list[list[int]]:
        """Return one list of ids for each text. Sequences of ids are returned as they are."""
        if isinstance(text, str) or (len(text) > 0 and isinstance(text[0], int)):
            text = [text]
        prefix = self.tokenizer.get_prefix_tokens()
        sequences = []
        for item in text:
            if not isinstance(item, str):
                sequences.append(list(item))
                continue
            ids = self.tokenizer(item, add_special_tokens=False)["input_ids"]
            # A text from apply_chat_template has the prefix already.
            if add_special_tokens and ids[: len(prefix)] != prefix:
                ids = prefix + ids
            sequences.append(ids)
        return sequences

    def _build_batch(
        self, sequences: dict[str, list[list[int]]], images: Any, options: dict, images_kwargs: dict
    ) -> BatchFeature:
        """Expand, check, truncate and pad sequences, and add the images.

        Args:
            sequences: ``input_ids`` and other lists that are aligned with them, by name.
            images: As for `__call__`.
            options: Options of `__call__` for the text, by name.
        """
        options = {name: value for name, value in options.items() if name != "add_special_tokens"}
        limit = self.tokenizer.truncation_limit(options.pop("truncation"), options["max_length"])
        expanded: dict[str, list[list[int]]] = {name: [] for name in sequences}
        counts = []
        for text_index, ids in enumerate(sequences["input_ids"]):
            original_indices, spans = self._plan_expansion(text_index, ids)
            counts.append(len(spans))
            remaining = self._truncation_slice(text_index, len(original_indices), spans, limit)
            for name, values in sequences.items():
                expanded[name].append([values[text_index][i] for i in original_indices])
            for start, stop in spans:
                inner_ids = [self.image_token_id] * (stop - start - 2)
                expanded["input_ids"][-1][start + 1 : stop - 1] = inner_ids
            for values in expanded.values():
                values[-1] = values[-1][remaining]

        flat, passed_counts = _flatten_and_count(images)
        if len(flat) != sum(counts) or passed_counts not in (None, counts):
            raise ValueError(
                f"the texts have {counts} begin-of-image ids but {passed_counts or len(flat)} "
                "images were passed: pass one image for each, or put the images into messages and "
                "call apply_chat_template"
            )
        batch = BatchFeature(dict(self.tokenizer.pad_sequences(expanded, **options)))
        if flat:
            tensor_type = options["return_tensors"]
            batch.update(self.image_processor(flat, return_tensors=tensor_type, **images_kwargs))
        return batch

    def _plan_expansion(
        self, text_index: int, ids: list[int]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Compute how to expand the images of one sequence.

        Returns:
            For each expanded token, its index in ``ids``; and for each image, the range ``(start,
            stop)`` of its expanded tokens, with begin and end.
        """
        begin_id, end_id = self.tokenizer.convert_tokens_to_ids(
            ["<|begin_of_image|>", "<|end_of_image|>"]
        )
        num_inner, inner_id = self.num_image_tokens, self.image_token_id
        original_indices: list[int] = []
        spans = []
        i = 0
        while i < len(ids):
            original_indices.append(i)
            if ids[i] == begin_id:
                markers = (j for j in range(i + 1, len(ids)) if ids[j] in (begin_id, end_id))
                end = next(markers, None)
                if end is None or ids[end] != end_id:
                    raise ValueError(
                        f"text {text_index}: the image that begins at token {i} of {len(ids)} has "
                        "no end-of-image id: was the text cut inside an image?"
                    )
                inner = ids[i + 1 : end]
                if len(inner) != 1 and inner != [inner_id] * num_inner:
                    raise ValueError(
                        f"text {text_index}: the image that begins at token {i} has {len(inner)} "
                        f"ids, expected 1 or {num_inner} times {self.image_token}: was the text "
                        "made for another image size?"
                    )
                start = len(original_indices) - 1
                spans.append((start, start + num_inner + 2))
                original_indices += [i + 1] * num_inner + [end]
                i = end
            i += 1
        return original_indices, spans

    def _truncation_slice(
        self, text_index: int, length: int, spans: list[tuple[int, int]], limit: int | None
    ) -> slice:
        """Return the slice of an expanded sequence that remains after truncation to ``limit``.

        Raises:
            ValueError: Truncation would cut an image.
        """
        if limit is None or length <= limit:
            return slice(None)
        on_right = self.tokenizer.truncation_side == "right"
        first, last = (0, limit) if on_right else (length - limit, length)
        for start, stop in spans:
            if start < first or stop > last:
                needed = spans[-1][1] if on_right else length - spans[0][0]
                raise ValueError(
                    f"text {text_index}: truncating {length} ids to max_length {limit} would cut "
                    f"the image at tokens {start} to {stop - 1}: use a max_length of at least "
                    f"{needed}, or leave the image out"
                )
        return slice(first, last)


class _AudioTokenizerRefusal(ChatGLMProcessor):
    """A processor class that refuses ``audio_tokenizer`` in ``processor_config.json``.

    transformers would load the audio tokenizer's class from any repository that the file names.
    """

    @staticmethod
    def get_possibly_dynamic_module(module_name):
        raise ValueError(
            f"processor_config.json has an audio_tokenizer, {module_name}, whose code would be "
            "downloaded and run; this model has no audio: remove it"
        )


def _merge_options(
    text_options: dict[str, Any], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Merge named options with those in ``text_kwargs`` and ``images_kwargs``.

    Returns:
        Options of the tokenizer, and options of the image processor.
    """
    kwargs = dict(kwargs)
    images_kwargs = dict(kwargs.pop("images_kwargs", None) or {})
    text_kwargs = {**(kwargs.pop("text_kwargs", None) or {}), **kwargs}
    refuse_media(text_kwargs, VIDEO_AND_AUDIO_ARGUMENTS, MODALITIES_HINT)
    # return_tensors is an option of texts and of images; the texts' value wins.
    tensor_type = images_kwargs.pop("return_tensors", None)
    unknown_text = text_kwargs.keys() - text_options.keys()
    unknown = sorted(unknown_text | (images_kwargs.keys() - {"do_convert_rgb"}))
    if unknown:
        raise ValueError(
            f"unknown options {unknown}: text takes {sorted(text_options)}, images_kwargs takes "
            "['do_convert_rgb']; the size of images cannot be passed: the image processor has it"
        )
    # add_special_tokens may be given twice with different values: apply_chat_template sets it, too.
    for name in sorted(text_kwargs.keys() - {"add_special_tokens", "return_tensors"}):
        # An option that was not passed has its default, which is false.
        if text_options[name] and text_options[name] != text_kwargs[name]:
            raise ValueError(
                f"{name} was given twice, as {text_options[name]!r} and as {text_kwargs[name]!r} "
                "in text_kwargs: give it once"
            )
    tensor_type = text_options["return_tensors"] or text_kwargs.get("return_tensors") or tensor_type
    return text_options | text_kwargs | {"return_tensors": tensor_type}, images_kwargs


def _flatten_and_count(images: Any) -> tuple[list, list[int] | None]:
    """Return a flat list of images, and the number of images of each text.

    The numbers are ``None`` if ``images`` is not a list with an item for each text.
    """
    if is_empty_media(images):
        return [], None
    if isinstance(images, (list, tuple)) and any(
        item is None or isinstance(item, (list, tuple)) for item in images
    ):
        per_text = [[] if is_empty_media(item) else flatten_images(item) for item in images]
        return [image for group in per_text for image in group], [len(group) for group in per_text]
    return flatten_images(images), None
