"""Processor of glm-4v-9b: tokenizer and image processor in one call.

Upstream's tokenizer writes three ids for an image and its model grows the row inside ``forward``.
This processor emits the grown row, so that ids, mask, labels and logits have one length: an image
is its begin id, one fill id for every position its features take, and its end id.
"""

from typing import Any

from transformers import BatchFeature, ProcessorMixin
from transformers.image_utils import ImageInput
from transformers.utils import IMAGE_PROCESSOR_NAME, cached_file

# What these import themselves has to be imported here, too: transformers 4.57 looks no further.
from .configuration_chatglm import own_places
from .image_processing_chatglm import ChatGLMImageProcessor, flat_images
from .tokenization_chatglm import (
    IMAGES_AND_TEXT,
    VIDEOS_AND_AUDIO,
    ChatGLM4Tokenizer,
    as_batch,
    drop_empty,
    find_images,
    is_empty,
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
    """Make model inputs from text, conversations and images.

    Attributes:
        num_image_tokens: Positions between begin and end of an image, ``(S // patch // 2) ** 2``.
        image_token, image_token_id: What fills them.
    """

    # Read by transformers 4.57, which wants the Auto names for classes of one's own; 5.x reads
    # the signature of __init__.
    attributes = ["image_processor", "tokenizer"]
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"
    _auto_class = "AutoProcessor"

    # In the vocabulary and unused, as this model has no video. Upstream's placeholder is
    # <|endoftext|>, which is also the padding id that collators take out of labels and masks.
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
        reader: Any = super(ChatGLMProcessor, _WithoutAudio)
        return reader.get_processor_dict(pretrained_model_name_or_path, **kwargs)

    @classmethod
    def _get_arguments_from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs) -> list:
        """Load both parts as this file's siblings, so that no second trust question arises."""
        tokenizer = ChatGLM4Tokenizer.from_pretrained(pretrained_model_name_or_path, **kwargs)
        options = {name: kwargs[name] for name in DOWNLOAD_OPTIONS if kwargs.get(name) is not None}
        saved = cached_file(
            pretrained_model_name_or_path,
            IMAGE_PROCESSOR_NAME,
            _raise_exceptions_for_missing_entries=False,
            **options,
        )
        if saved is None:
            # Upstream's repository has no such file; the tokenizer's file holds the image size.
            return [ChatGLMImageProcessor(size=tokenizer.image_size), tokenizer]
        image_processor = ChatGLMImageProcessor.from_pretrained(
            pretrained_model_name_or_path, **options
        )
        return [image_processor, tokenizer]

    def save_pretrained(self, save_directory, push_to_hub: bool = False, **kwargs):
        # The image processor's own file with every version: 4.57 looks for it.
        self.image_processor.save_pretrained(save_directory)
        return super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    def to_dict(self, **options) -> dict:
        """What is saved: the image processor's settings, and where the code is.

        ``options`` are those of transformers 4.
        """
        values = super().to_dict(**options)
        if places := own_places(values.pop("auto_map", None), self._auto_class):
            values["auto_map"] = places
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

        An image in a text is ``<|begin_of_image|>``, one id, ``<|end_of_image|>`` and grows to
        `num_image_tokens` ids between the two; one that has grown stays. Special tokens in a text
        are read as such: text from users belongs in `apply_chat_template`.

        Args:
            images: As for the image processor, in the order of their begin ids; or one list (or
                None) for each text.
            text: A text, a list of texts, or rows of ids.
            videos, audio: None, or lists that hold none; also by the names ``video``, ``audios``.
            add_special_tokens: Put ``[gMASK]<sop>`` before texts that do not begin with it.
            return_tensors: ``"pt"``, ``"np"`` or None for lists (``pixel_values`` is then numpy).
            **kwargs: ``text_kwargs`` and ``images_kwargs``, dicts of options for either part.

        Returns:
            Always a batch: ``input_ids`` and ``attention_mask`` ``[B, L]``; with images also
            ``pixel_values``, float32 ``[number of images, 3, S, S]``.

        Raises:
            ValueError: images that do not fit their ids, truncation into an image, or an option
                that is unknown.
        """
        given = {
            "add_special_tokens": add_special_tokens,
            "padding": padding,
            "truncation": truncation,
            "max_length": max_length,
            "pad_to_multiple_of": pad_to_multiple_of,
            "padding_side": padding_side,
            "return_tensors": return_tensors,
        }
        options, of_images = _merge_options(given, kwargs | {"videos": videos, "audio": audio})
        if text is None:
            if images is None:
                raise ValueError("neither text nor images were given: pass at least one of them")
            tensors = options["return_tensors"]
            return self.image_processor(_flatten(images)[0], return_tensors=tensors, **of_images)
        rows = {"input_ids": self._encode(text, options["add_special_tokens"])}
        return self._finish(rows, images, options, of_images)

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
        """Format conversations, as the tokenizer's method of that name, with their images.

        Images are taken from the messages: under ``"image"`` in upstream's form, under
        ``"image"``, ``"url"``, ``"path"``, ``"base64"`` or ``"image_url"`` in a part of a content
        list. Each is what the image processor takes: a PIL image, an array, a tensor, a path, an
        URL, base64, or the bytes of a file. Keys that nothing reads are refused. The words
        ``<image>`` in a text are text.

        Args:
            processor_kwargs: Options of `__call__`, as transformers 5 passes them.
            **kwargs: ``tools``, ``documents``, ``add_generation_prompt`` and
                ``continue_final_message``, as the tokenizer takes them; variables for the template.

        Returns:
            Text (``tokenize=False``), the batch of grown ids, or with ``return_dict`` what
            `__call__` returns, plus ``assistant_masks`` if asked for.
        """
        given = {
            "add_special_tokens": False,  # the template writes them, once, whatever is asked for
            "padding": padding,
            "truncation": truncation,
            "max_length": max_length,
            "pad_to_multiple_of": pad_to_multiple_of,
            "padding_side": padding_side,
            # transformers 5 has "auto" for "the processor's own default", which is None here.
            "return_tensors": None if return_tensors == "auto" else return_tensors,
        }
        options, of_images = _merge_options(given, processor_kwargs or {})
        kwargs["chat_template"] = self._named_template(chat_template)
        if not tokenize:
            return self.tokenizer.apply_chat_template(conversation, tokenize=False, **kwargs)
        conversations, _ = as_batch(conversation)
        rows = self.tokenizer.encode_chats(
            conversations, return_assistant_tokens_mask=return_assistant_tokens_mask, **kwargs
        )
        images = [find_images(messages) for messages in conversations]
        out = self._finish(rows, images, options, of_images)
        return out if return_dict else out["input_ids"]

    def _named_template(self, chat_template: str | None) -> str | None:
        templates = self.chat_template
        if isinstance(templates, dict):
            return templates.get(chat_template or "default", chat_template)
        return templates if chat_template is None else chat_template

    def _encode(self, text: str | list, add_special_tokens: bool) -> list[list[int]]:
        if isinstance(text, str) or (len(text) > 0 and isinstance(text[0], int)):
            text = [text]
        prefix = self.tokenizer.get_prefix_tokens()
        rows = []
        for item in text:
            if not isinstance(item, str):
                rows.append(list(item))
                continue
            ids = self.tokenizer(item, add_special_tokens=False)["input_ids"]
            # The chat template writes the prefix itself; it must not come twice.
            if add_special_tokens and ids[: len(prefix)] != prefix:
                ids = prefix + ids
            rows.append(ids)
        return rows

    def _finish(
        self, rows: dict[str, list[list[int]]], images: Any, options: dict, of_images: dict
    ) -> BatchFeature:
        """Grow, check, cut and pad rows of ids, and add the images."""
        options = {name: value for name, value in options.items() if name != "add_special_tokens"}
        limit = self.tokenizer.truncation_limit(options.pop("truncation"), options["max_length"])
        grown: dict[str, list[list[int]]] = {name: [] for name in rows}
        counts = []
        for number, ids in enumerate(rows["input_ids"]):
            source, spans = self._grow(number, ids)
            counts.append(len(spans))
            kept = self._kept(number, len(source), spans, limit)
            for name, values in rows.items():
                grown[name].append([values[number][at] for at in source])
            for start, end in spans:
                fill = [self.image_token_id] * (end - start - 2)
                grown["input_ids"][-1][start + 1 : end - 1] = fill
            for values in grown.values():
                values[-1] = values[-1][kept]

        flat, per_row = _flatten(images)
        if len(flat) != sum(counts) or per_row not in (None, counts):
            raise ValueError(
                f"the rows hold {counts} begin-of-image ids but {per_row or len(flat)} images were "
                "passed: write each image into its text with apply_chat_template and pass each"
            )
        out = BatchFeature(dict(self.tokenizer.pad_rows(grown, **options)))
        if flat:
            tensors = options["return_tensors"]
            out.update(self.image_processor(flat, return_tensors=tensors, **of_images))
        return out

    def _grow(self, row: int, ids: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """The indices of ``ids`` that make the grown row, and its images' ranges in it."""
        begin, end = self.tokenizer.convert_tokens_to_ids(
            ["<|begin_of_image|>", "<|end_of_image|>"]
        )
        num_fill, fill = self.num_image_tokens, self.image_token_id
        source: list[int] = []
        spans = []
        at = 0
        while at < len(ids):
            source.append(at)
            if ids[at] == begin:
                close = next((i for i in range(at + 1, len(ids)) if ids[i] in (begin, end)), None)
                if close is None or ids[close] != end:
                    raise ValueError(
                        f"row {row}: the image that begins at position {at} of {len(ids)} has no "
                        "end-of-image id: was the text cut inside an image?"
                    )
                inside = ids[at + 1 : close]
                if len(inside) != 1 and inside != [fill] * num_fill:
                    raise ValueError(
                        f"row {row}: the image that begins at position {at} holds {len(inside)} "
                        f"ids, expected 1 or {num_fill} times {self.image_token}: was the text "
                        "made for another image size?"
                    )
                spans.append((len(source) - 1, len(source) + num_fill + 1))
                source += [at + 1] * num_fill + [close]
                at = close
            at += 1
        return source, spans

    def _kept(
        self, row: int, length: int, spans: list[tuple[int, int]], limit: int | None
    ) -> slice:
        """Return what truncation to ``limit`` keeps of a grown row of ``length``."""
        if limit is None or length <= limit:
            return slice(None)
        on_right = self.tokenizer.truncation_side == "right"
        first, last = (0, limit) if on_right else (length - limit, length)
        for start, end in spans:
            if start < first or end > last:
                needed = spans[-1][1] if on_right else length - spans[0][0]
                raise ValueError(
                    f"row {row}: {length} ids would be cut to max_length {limit}, into the image "
                    f"at positions {start} to {end - 1}: use a max_length of at least {needed}, "
                    "or leave the image out"
                )
        return slice(first, last)


class _WithoutAudio(ChatGLMProcessor):
    """Reads a folder's files. Of these, only an audio tokenizer makes transformers ask for a class,
    of any name, to load from wherever the file says."""

    @staticmethod
    def get_possibly_dynamic_module(module_name):
        raise ValueError(
            f"processor_config.json has an audio_tokenizer, {module_name}, which would be fetched "
            "from where it says; this model has no sound: take it out"
        )


def _merge_options(given: dict[str, Any], more: dict[str, Any]) -> tuple[dict, dict]:
    """Options of text, given flat or by part, and those of images."""
    more = dict(more)
    of_images = dict(more.pop("images_kwargs", None) or {})
    of_text = {**(more.pop("text_kwargs", None) or {}), **more}
    drop_empty(of_text, VIDEOS_AND_AUDIO, IMAGES_AND_TEXT)
    # Of either part; what is said of text goes first.
    tensors = of_images.pop("return_tensors", None)
    unknown = sorted((of_text.keys() - given.keys()) | (of_images.keys() - {"do_convert_rgb"}))
    if unknown:
        raise ValueError(
            f"unknown options {unknown}: text takes {sorted(given)}, images_kwargs takes "
            "['do_convert_rgb']; the image size is the image processor's"
        )
    # apply_chat_template of transformers says add_special_tokens beside what its caller says.
    for name in sorted(of_text.keys() - {"add_special_tokens", "return_tensors"}):
        if given[name] and given[name] != of_text[name]:  # defaults are false
            raise ValueError(
                f"{name} was given twice, as {given[name]!r} and as {of_text[name]!r} in "
                "text_kwargs: give it once"
            )
    tensors = given["return_tensors"] or of_text.get("return_tensors") or tensors
    return given | of_text | {"return_tensors": tensors}, of_images


def _flatten(images: Any) -> tuple[list, list[int] | None]:
    """Return a flat list of images, and how many each row has if they came in rows."""
    if is_empty(images):
        return [], None
    if isinstance(images, (list, tuple)) and any(
        item is None or isinstance(item, (list, tuple)) for item in images
    ):
        rows = [[] if is_empty(item) else flat_images(item) for item in images]
        return [image for row in rows for image in row], [len(row) for row in rows]
    return flat_images(images), None
