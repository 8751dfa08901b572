"""Tokenizer of glm-4v-9b, backed by the `tokenizers` library.

It returns the same token ids as the published tokenizer. A folder that has only ``tokenizer.model``
(tiktoken's file of tokens and their ranks) is converted when it is loaded. ``save_pretrained``
writes ``tokenizer.json``. As in the published code, ``apply_chat_template`` returns position ids.
"""

import base64
import functools
import itertools
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, cast

# This import comes first: it reports a transformers that is too old for the imports below.
from .configuration_chatglm import PROCESSOR_CLASS, keep_known_settings, keep_our_auto_classes

# isort: split
import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import BatchEncoding, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import render_jinja_template

from .image_processing_chatglm import ChatGLMImageProcessor

CHAT_ROLES = ("system", "user", "assistant", "observation")
# In the order of their ids. The first id follows the last rank of tokenizer.model.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    *(f"<|{role}|>" for role in CHAT_ROLES),
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
)
PROMPT_PREFIX = ("[gMASK]", "<sop>")
# With clean_up_tokenization_spaces, decoding removes the spaces in these patterns, in this order,
# as transformers does.
CLEAN_UP_PATTERNS = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
PROCESSOR_FILE = "processing_chatglm.py"
# Options with which tokenizers of other models change a text.
UNSUPPORTED_TEXT_OPTIONS = (
    "add_prefix_space",
    "add_bos_token",
    "add_eos_token",
    "do_lower_case",
    "remove_space",
    "strip_accents",
)

# The settings that tokenizer_config.json may have.
SAVED_TOKENIZER_FIELDS = {"added_tokens_decoder", "additional_special_tokens", "auto_map"}
SAVED_TOKENIZER_FIELDS |= {"backend", "chat_template", "clean_up_tokenization_spaces"}
SAVED_TOKENIZER_FIELDS |= {"extra_special_tokens", "image_size", "model_max_length"}
SAVED_TOKENIZER_FIELDS |= {"model_input_names", "padding_side", "processor_class"}
SAVED_TOKENIZER_FIELDS |= {"split_special_tokens", "tokenizer_class", "truncation_side"}
SAVED_TOKENIZER_FIELDS |= {*UNSUPPORTED_TEXT_OPTIONS}
# Arguments that transformers stores among the settings, although they only describe the loading.
LOADING_KWARGS = {"name_or_path", "is_local", "local_files_only", "_commit_hash", "device_map"}
LOADING_KWARGS |= {"special_tokens_map_file", "tokenizer_file", "vocab_file", "files_loaded"}
LOADING_KWARGS |= {"tokenizer_object"}

# Keys of a batch that are padded with 0.
ZERO_PADDED_KEYS = {"position_ids", "assistant_masks"}

# Texts are split by this pattern before BPE, as when the vocabulary was trained. It is the pattern
# of tiktoken's cl100k_base.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)

# The published code tokenizes the text of a message separately from the line above it, which has
# role and metadata. So our tokenizer passes a special character to the template as `piece_break`,
# and tokenizes the strings before and after this character separately. Other code leaves
# `piece_break` undefined, so that it renders as nothing. The generation block begins after
# <|assistant|>, where a generation prompt ends, because the model also generates the metadata (a
# tool's name, or empty). Do not change the template: saved tokenizers contain it, and a saved
# template that differs from this one counts as a custom template.
CHAT_TEMPLATE = r"""
{%- macro describe(tools) %}
    {{- '<|system|>\n' }}{{ piece_break }}
    {{- '你是一个名为 GLM-4 的人工智能助手。你是基于智谱AI训练的语言模型 GLM-4 模型开发的，' }}
    {{- '你的任务是针对用户的问题和要求提供适当的答复和支持。' }}
    {%- for tool in tools %}
        {%- if tool['type'] is defined and tool['type'] != 'function' %}
            {{- raise_exception('a tool has type ' ~ tool['type'] ~ ', of which this template has '
                ~ 'no text: give tools of type function, or describe it in a system message') }}
        {%- endif %}
        {%- set function = tool['function'] if tool['function'] is defined else tool %}
        {{- '\n\n## ' + function['name'] + '\n\n' + (function | tojson(indent=4)) }}
        {{- '\n在调用上述函数时，请使用 Json 格式表示调用的参数。' }}
    {%- endfor %}
{%- endmacro %}
{%- macro body(metadata, images, text) %}
    {{- (metadata or '') + '\n' }}
    {{- '<|begin_of_image|><|endoftext|><|end_of_image|>' * images }}
    {{- piece_break }}{{ text }}
{%- endmacro %}
{{- '[gMASK]<sop>' }}
{%- if tools %}{{ describe(tools) }}{% endif %}
{%- for message in messages %}
    {%- set role = message['role'] %}
    {%- if role not in ['system', 'user', 'assistant', 'observation'] %}
        {{- raise_exception('message ' ~ loop.index0 ~ ' has the role ' ~ role ~ ': use system, '
            ~ 'user, assistant or observation') }}
    {%- endif %}
    {%- if message['tools'] %}{{ describe(message['tools']) }}{% endif %}
    {%- set found = namespace(images=0, text='') %}
    {%- if message['image'] is defined and message['image'] is not none %}
        {%- set found.images = 1 %}
    {%- endif %}
    {%- if message['content'] is string %}
        {%- set found.text = message['content'] %}
    {%- elif message['content'] %}
        {%- for part in message['content'] %}
            {%- if part['type'] == 'text' %}
                {%- set found.text = found.text + part['text'] %}
            {%- elif part['type'] in ['image', 'image_url'] %}
                {%- set found.images = found.images + 1 %}
            {%- else %}
                {{- raise_exception('message ' ~ loop.index0 ~ ' has a part of type '
                    ~ part['type'] ~ ': use text or image') }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {%- if found.images or found.text %}
        {{- '<|' + role + '|>' }}
        {%- if role == 'assistant' %}
            {%- generation %}
            {{- body(message['metadata'], found.images, found.text) }}
            {%- endgeneration %}
        {%- else %}
            {{- body(message['metadata'], found.images, found.text) }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
""".strip()

# Special characters in rendered texts. Unicode reserves them for internal use (noncharacters). In
# the caller's texts they are escaped.
_ESCAPE = "\ufdd0"
_PIECE_BREAK = "\ufdd1"
# An escaped character, and any character of a rendered text, which may be an escaped one.
_ESCAPED = re.compile(_ESCAPE + r"(\d{7})")
_CHARACTER = re.compile(_ESCAPED.pattern + "|.", re.DOTALL)


class ChatGLM4Tokenizer(PreTrainedTokenizerFast):
    """Byte-level BPE with GLM-4's special tokens and chat format.

    ``__call__`` prepends ``[gMASK]<sop>`` and encodes special tokens in the text as such, like the
    published code. `apply_chat_template` encodes special tokens in a message as plain text.

    Args:
        vocab_file: The published ``tokenizer.model``, read if there is no ``tokenizer_file``.
        image_size: Side in pixels of the images that `apply_chat_template` preprocesses.
        **kwargs: As for `PreTrainedTokenizerFast`. ``eos_token`` and ``pad_token`` default to
            ``<|endoftext|>``, ``padding_side`` to left.
    """

    vocab_files_names = {"vocab_file": "tokenizer.model", "tokenizer_file": "tokenizer.json"}
    model_input_names = ["input_ids", "attention_mask"]
    padding_side = "left"
    render_template = staticmethod(render_jinja_template)
    _auto_class = "AutoTokenizer"

    def __init__(
        self,
        vocab_file: str | None = None,
        tokenizer_file: str | None = None,
        tokenizer_object: Tokenizer | None = None,
        image_size: int | None = None,
        chat_template: str | dict[str, str] | None = None,
        **kwargs,
    ) -> None:
        if tokenizer_object is None and tokenizer_file is None:
            if vocab_file is None:
                raise ValueError(
                    "no vocabulary: give a folder or path with tokenizer.json or tokenizer.model, "
                    "or pass tokenizer_object"
                )
            tokenizer_object = convert_ranks(vocab_file, kwargs.get("added_tokens_decoder"))
            if isinstance(chat_template, str) and "<|begin_of_image|>" not in chat_template:
                # The published code formats chats itself and ignores the template in its folder.
                chat_template = None
        _refuse_unsupported_options(kwargs)
        if kwargs.get("processor_class") is not None:
            kwargs["processor_class"] = PROCESSOR_CLASS  # even if the file names another one
        if kwargs.get("backend") is not None:
            kwargs["backend"] = "tokenizers"  # even if the file names another one
        kwargs.setdefault("eos_token", "<|endoftext|>")
        kwargs.setdefault("pad_token", "<|endoftext|>")
        # transformers 5 saves the list of special tokens as `extra_special_tokens`, where 4.57
        # takes only a dict of named tokens. Both versions take `additional_special_tokens`.
        extra_tokens = list(kwargs.pop("additional_special_tokens", None) or ())
        if not isinstance(kwargs.get("extra_special_tokens"), dict):
            extra_tokens += kwargs.pop("extra_special_tokens", None) or ()
        elif not kwargs["extra_special_tokens"]:
            del kwargs["extra_special_tokens"]
        unique_tokens = {str(token): token for token in (*SPECIAL_TOKENS, *extra_tokens)}
        kwargs["additional_special_tokens"] = list(unique_tokens.values())
        super().__init__(
            tokenizer_file=tokenizer_file,
            tokenizer_object=tokenizer_object,
            image_size=image_size,
            chat_template=chat_template or CHAT_TEMPLATE,
            **kwargs,
        )
        self.image_size = image_size
        self.update_post_processor()

    def update_post_processor(self) -> None:
        """Make the backend prepend ``[gMASK]<sop>``.

        transformers 5 calls this method when ``add_bos_token`` or ``add_eos_token`` is set. Its own
        method would remove the prefix.
        """
        _refuse_unsupported_options(vars(self), prefix="_")
        prefix = " ".join(PROMPT_PREFIX)
        self.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{prefix} $A",
            pair=f"{prefix} $A $B",
            special_tokens=[(token, self.convert_tokens_to_ids(token)) for token in PROMPT_PREFIX],
        )

    @classmethod
    def convert_to_native_format(cls, trust_remote_code: bool = False, **kwargs) -> dict[str, Any]:
        """Return the arguments unchanged, so that ``__init__`` reads the files.

        The method of transformers 5 would rebuild the tokenizer from parts of ``tokenizer.json``,
        and read ``tokenizer.model`` as sentencepiece.
        """
        return kwargs

    def save_pretrained(self, save_directory, *args, **kwargs):
        """Save as transformers does, so that ``AutoProcessor`` loads the folder, too.

        If the ``auto_map`` names the processor, its code file is copied to ``save_directory``. If
        this code was loaded without that file, the entry is left out. Unknown settings are logged
        and not saved.
        """
        settings = {
            key: value for key, value in self.init_kwargs.items() if key not in LOADING_KWARGS
        }
        known = SAVED_TOKENIZER_FIELDS | self.special_tokens_map.keys()
        saved_settings = keep_known_settings(settings, known, "tokenizer_config.json")
        auto_map = keep_our_auto_classes(settings.get("auto_map"), self._auto_class)
        source = Path(__file__).with_name(PROCESSOR_FILE)
        target = Path(save_directory, PROCESSOR_FILE)
        needs_code = "AutoProcessor" in auto_map and not target.exists()
        if needs_code and not Path(save_directory).is_file():
            if source.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
            else:
                del auto_map["AutoProcessor"]
        self.init_kwargs = saved_settings | {"auto_map": auto_map}
        return super().save_pretrained(save_directory, *args, **kwargs)

    @functools.wraps(PreTrainedTokenizerFast.__call__)  # frameworks read its signature
    def __call__(self, *args, **kwargs) -> BatchEncoding:
        # transformers' method would only log that it drops images and other media.
        refuse_media(kwargs, IMAGE_ARGUMENTS, "give images to the processor (AutoProcessor)")
        refuse_media(kwargs, VIDEO_AND_AUDIO_ARGUMENTS, MODALITIES_HINT)
        return super().__call__(*args, **kwargs)

    def apply_chat_template(  # type: ignore[override]  # in the published order of arguments
        self,
        conversation: list[dict] | list[list[dict]],
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        padding: bool | str = False,
        truncation: bool | str = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
        return_dict: bool = False,
        tokenizer_kwargs: dict[str, Any] | None = None,
        add_special_tokens: bool = True,
        *,
        tools: list | None = None,
        chat_template: str | None = None,
        continue_final_message: bool | str = False,
        return_assistant_tokens_mask: bool = False,
        **kwargs,
    ) -> str | list[str] | list[list[int]] | BatchEncoding:
        """Format one conversation or a list of conversations, as the published method does.

        A message is a dict, a dataclass or a pydantic model: ``{"role", "content"}`` with optional
        ``"metadata"``, ``"tools"`` and ``"image"``. ``"image"`` is one image, or a false value for
        none. ``"content"`` may be a list of ``{"type": "text", "text": ...}`` and ``{"type":
        "image", ...}``. The images of a message are placed before its text. Messages with neither
        image nor text are left out. Any other key is refused unless its value is None or the
        template is a custom one.

        With ``tokenize=True``, special tokens in the caller's text are encoded as plain text. With
        ``tokenize=False``, they cannot be distinguished from those of the template.

        Args:
            add_special_tokens: ``False`` leaves out the ``[gMASK]<sop>`` at the beginning.
            tokenizer_kwargs: A dict, which may have ``pad_to_multiple_of`` and ``padding_side``.
            **kwargs: ``documents`` and other variables for the template.

        Returns:
            With ``tokenize=False`` a string, or a list of strings for a list of conversations.
            Otherwise always a batch of unexpanded prompts (three ids for an image): the ids
            ``[B, L]``. With ``return_dict`` a dict with the ids, ``attention_mask``,
            ``position_ids`` ``[B, L]`` (0 at padding), ``assistant_masks`` if requested, and
            ``images`` if the messages have images: float32 ``[number of images, 3, S, S]`` in the
            order of their begin ids, a torch tensor unless ``return_tensors`` is ``"np"``. Without
            ``return_dict``, images are not read.
        """
        if not isinstance(add_generation_prompt, (int, type(None))):
            raise ValueError(
                f"add_generation_prompt is a {type(add_generation_prompt).__name__}: positional "
                "arguments are in the published order; give tools, documents and chat_template by "
                "name"
            )
        conversations, is_batched = as_conversations(conversation)
        options = tokenizer_kwargs or {}
        if unknown := sorted(options.keys() - {"pad_to_multiple_of", "padding_side"}):
            raise ValueError(
                f"unknown tokenizer_kwargs {unknown}: use pad_to_multiple_of and padding_side"
            )
        if return_assistant_tokens_mask and not (tokenize and return_dict):
            raise ValueError(
                "return_assistant_tokens_mask=True needs tokenize=True and return_dict=True"
            )
        render_options = kwargs | {
            "tools": tools,
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "return_assistant_tokens_mask": return_assistant_tokens_mask,
        }
        if not tokenize:
            texts, _ = self._render(conversations, None, **render_options)
            if not add_special_tokens:
                texts = [text.removeprefix("".join(PROMPT_PREFIX)) for text in texts]
            return texts if is_batched else texts[0]
        sequences = self.encode_chats(conversations, **render_options)
        if not add_special_tokens:
            prefix = self.get_prefix_tokens()
            starts = [
                len(prefix) if ids[: len(prefix)] == prefix else 0 for ids in sequences["input_ids"]
            ]
            for name, values in sequences.items():
                sequences[name] = [x[start:] for x, start in zip(values, starts, strict=True)]
        limit = self.truncation_limit(truncation, max_length)
        if limit is not None:
            on_right = self.truncation_side == "right"
            for name, values in sequences.items():
                # x[-limit:] would keep everything if limit is 0.
                sequences[name] = [
                    x[:limit] if on_right else x[max(len(x) - limit, 0) :] for x in values
                ]
        images = self._collect_images(conversations, sequences["input_ids"]) if return_dict else []
        sequences["position_ids"] = [[*range(len(ids))] for ids in sequences["input_ids"]]
        encoding = self.pad_sequences(
            sequences,
            padding=padding,
            max_length=max_length,
            return_tensors=return_tensors,
            **options,
        )
        if not return_dict:
            return encoding["input_ids"]
        if images:
            image_processor = ChatGLMImageProcessor(size=self.image_size)
            image_type = "np" if return_tensors == "np" else "pt"
            pixel_values = image_processor(images, return_tensors=image_type)["pixel_values"]
            encoding["images"] = pixel_values
        return encoding

    def encode_chats(
        self, conversations: list[list[dict]], return_assistant_tokens_mask: bool = False, **options
    ) -> dict[str, list[list[int]]]:
        """Encode conversations as unexpanded prompts, without reading their images.

        Args:
            **options: ``tools``, ``chat_template``, ``add_generation_prompt``,
                ``continue_final_message``, as for `apply_chat_template`, and template variables.

        Returns:
            ``input_ids`` and, if requested, ``assistant_masks``, one list for each conversation.
        """
        options["return_assistant_tokens_mask"] = return_assistant_tokens_mask
        escaper = _Escaper(self._special_ids())
        rendered, spans = self._render(conversations, escaper, **options)
        encoded = self._encode_rendered(rendered, spans or [()] * len(rendered))
        sequences = {"input_ids": [ids for ids, _ in encoded]}
        if return_assistant_tokens_mask:
            sequences["assistant_masks"] = [mask for _, mask in encoded]
        return sequences

    def _render(
        self,
        conversations: list[list[dict]],
        escaper: "_Escaper | None",
        *,
        tools: list | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        return_assistant_tokens_mask: bool = False,
        **variables,
    ) -> tuple[list[str], list]:
        """Render conversations.

        Args:
            escaper: Escapes special tokens in the caller's strings; ``None`` leaves them.

        Returns:
            The texts, and for each text the character spans of the assistant's turns (an empty list
            if they are not requested).
        """
        refuse_media(variables, IMAGE_ARGUMENTS, "put images into the messages, under 'image'")
        refuse_media(variables, VIDEO_AND_AUDIO_ARGUMENTS, MODALITIES_HINT)
        template = self.get_chat_template(chat_template, tools)
        for messages in conversations:
            _check_conversation(messages, is_default_template=template == CHAT_TEMPLATE)
        if continue_final_message and (add_generation_prompt or return_assistant_tokens_mask):
            raise ValueError(
                "continue_final_message excludes add_generation_prompt and "
                "return_assistant_tokens_mask: the final message is left open"
            )
        # This option of transformers 5.23 has no effect here: special tokens are always escaped.
        variables.pop("sanitize_control_tokens", None)
        if tools is not None:
            # Build schemas of functions before escaping, so that docstrings are escaped, too.
            tools = [
                tool if isinstance(tool, Mapping) else get_json_schema(tool)
                for tool in _as_dicts(tools)
            ]
        escape = escaper or (lambda value: value)
        piece_break = _PIECE_BREAK if escaper else ""
        chats = [[escape(_drop_none(m)) for m in messages] for messages in conversations]
        rendered: Any = self.render_template(
            conversations=chats,
            tools=escape(tools),
            chat_template=template,
            return_assistant_tokens_mask=return_assistant_tokens_mask,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **{**self.special_tokens_map, **escape(variables), "piece_break": piece_break},
        )
        return rendered

    def _collect_images(self, conversations: list[list[dict]], sequences: list[list[int]]) -> list:
        """Return the images of all messages, without reading them, in the order of their begin ids.

        Raises:
            ValueError: Images do not match the ids, or only some image parts have an image.
        """
        per_conversation = [find_images(messages, allow_missing=True) for messages in conversations]
        flat = [image for images in per_conversation for image in images]
        if all(image is None for image in flat):
            return []  # there are no images, or the caller passes them to the processor
        per_conversation = [find_images(messages) for messages in conversations]
        for name in ("<|begin_of_image|>", "<|end_of_image|>"):
            marker = cast(int, self.convert_tokens_to_ids(name))
            for index, (images, ids) in enumerate(zip(per_conversation, sequences, strict=True)):
                if ids.count(marker) != len(images):
                    raise ValueError(
                        f"conversation {index} has {len(images)} images, but its ids have "
                        f"{ids.count(marker)} times {name}: give a longer max_length, or a chat "
                        "template that writes images"
                    )
        if self.image_size is None:
            raise ValueError(
                f"{len(flat)} images were given but this tokenizer has image_size None: give it "
                "the image_size of the model's vision_config"
            )
        return flat

    def get_prefix_tokens(self) -> list[int]:
        """Return the ids of ``[gMASK]<sop>``."""
        return cast(list[int], self.convert_tokens_to_ids(list(PROMPT_PREFIX)))

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """Return ``[gMASK]<sop>``, the ids, and the ids of a second text."""
        return [*self.get_prefix_tokens(), *token_ids_0, *(token_ids_1 or ())]

    def get_special_tokens_mask(
        self,
        token_ids_0: list[int],
        token_ids_1: list[int] | None = None,
        already_has_special_tokens: bool = False,
    ) -> list[int]:
        """Return 1 for special tokens and 0 for others.

        The mask has an entry for each id that :meth:`build_inputs_with_special_tokens` returns, or
        with ``already_has_special_tokens`` for each id in ``token_ids_0``.
        """
        if already_has_special_tokens:
            return super().get_special_tokens_mask(token_ids_0, token_ids_1, True)
        num_ids = len(self.build_inputs_with_special_tokens(token_ids_0, token_ids_1))
        num_prefix = len(self.get_prefix_tokens())
        return [1] * num_prefix + [0] * (num_ids - num_prefix)

    def _decode(
        self,
        token_ids: int | list[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        spaces_between_special_tokens: bool = True,
        **kwargs,
    ) -> str:
        """Decode like the published tokenizer, which is a slow tokenizer of transformers.

        By default a space separates an added token from its neighbors. The tokens between two added
        tokens are decoded as one byte sequence.
        """
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        if skip_special_tokens:
            special_ids = set(self.all_special_ids)
            ids = [token_id for token_id in ids if token_id not in special_ids]
        added = self.added_tokens_decoder
        pieces: list[str] = []
        for is_added, run in itertools.groupby(ids, added.__contains__):
            if is_added:
                pieces += [str(added[token_id]) for token_id in run]
            elif text := self.backend_tokenizer.decode(list(run), skip_special_tokens=False):
                pieces.append(text)
        text = (" " if spaces_between_special_tokens else "").join(pieces)
        if clean_up_tokenization_spaces is None:
            clean_up_tokenization_spaces = self.clean_up_tokenization_spaces
        if clean_up_tokenization_spaces:
            for pattern in CLEAN_UP_PATTERNS:
                text = text.replace(pattern, pattern.strip())
        return text

    def build_single_message(
        self,
        role: str,
        metadata: str,
        message: str,
        tokenize: bool = True,
        message_prefix: list[int] | None = None,
    ) -> list[int] | str:
        """Encode one message: ``<|role|>``, metadata, a newline, ``message_prefix`` (ids), text.

        Special tokens in metadata and text are encoded as plain text. With ``tokenize=False`` the
        result is a string, without ``message_prefix``.
        """
        if role not in CHAT_ROLES:
            raise ValueError(f"the message has the role {role!r}: use {', '.join(CHAT_ROLES)}")
        if not tokenize:
            return f"<|{role}|>{metadata}\n{message}"
        encode = self._tokenizer_without_specials().encode
        head, text = (
            encode(piece, add_special_tokens=False).ids for piece in (f"{metadata}\n", message)
        )
        role_id = cast(int, self.convert_tokens_to_ids(f"<|{role}|>"))
        return [role_id, *head, *(message_prefix or []), *text]

    @classmethod
    def _patch_mistral_regex(cls, tokenizer, *args, **kwargs):
        """Return the tokenizer unchanged.

        transformers assumes that a folder that was saved by 4.57.3 to 4.57.6 has Mistral's wrong
        split pattern. It would replace our pattern, which would change ids.
        """
        return tokenizer

    def _pad(self, encoded_inputs, *, padding_side=None, **options) -> dict:  # type: ignore[override]
        """Pad as transformers does, and pad :data:`ZERO_PADDED_KEYS` with 0."""
        padded = super()._pad(encoded_inputs, padding_side=padding_side, **options)
        on_left = (padding_side or self.padding_side) == "left"
        for name in padded.keys() & ZERO_PADDED_KEYS:
            values = list(padded[name])
            fill = [0] * (len(padded["input_ids"]) - len(values))
            padded[name] = fill + values if on_left else values + fill
        return padded

    def truncation_limit(self, truncation: bool | str | None, max_length: int | None) -> int | None:
        """Return the maximum length after truncation, or None without truncation."""
        if truncation in (None, False, "do_not_truncate"):
            return None
        return self.model_max_length if max_length is None else max_length

    def pad_sequences(
        self,
        sequences: dict[str, list[list[int]]],
        *,
        padding: bool | str = False,
        max_length: int | None = None,
        **options,
    ) -> BatchEncoding:
        """Pad ``input_ids`` and :data:`ZERO_PADDED_KEYS`, and add the attention mask."""
        # With other kinds of padding, the base class would truncate to max_length.
        max_length = max_length if padding == "max_length" else None
        return self.pad(dict(sequences), padding=padding, max_length=max_length, **options)

    def _special_ids(self) -> dict[str, int]:
        """Map the special tokens to their ids."""
        added = self.added_tokens_decoder.items()
        return {str(token): token_id for token_id, token in added if token.special}

    def _encode_rendered(
        self, rendered: Sequence[str], spans: Sequence[Sequence[tuple[int, int]]]
    ) -> list[tuple[list[int], list[int]]]:
        """Encode rendered chats, in which the caller's strings are escaped.

        Args:
            spans: For each chat the character ranges of the assistant's turns.

        Returns:
            For each chat its ids, and a mask with 1 for ids of characters in the spans.
        """
        specials = self._special_ids()
        separators = sorted([*specials, _PIECE_BREAK], key=len, reverse=True)
        split = re.compile("(" + "|".join(map(re.escape, separators)) + ")").split
        # Even pieces are text, and odd ones are separators.
        chats = [split(text) for text in rendered]
        # One call encodes all chats, because the tokenizer encodes a batch on several cores.
        tokenizer = self._tokenizer_without_specials()
        # encode_batch_fast takes two thirds of the time of encode_batch, but returns no offsets.
        encode_all = tokenizer.encode_batch if any(spans) else tokenizer.encode_batch_fast
        texts = [_unescape(piece) for pieces in chats for piece in pieces[::2]]
        encodings = iter(encode_all(texts, add_special_tokens=False))

        def join(pieces: list[str], chat_spans: Sequence[tuple[int, int]]):
            """Return the ids and the mask of one chat."""

            def in_spans(start: int, stop: int) -> int:
                return int(any(start < span[1] and stop > span[0] for span in chat_spans))

            ids, mask, offset = [], [], 0
            for index, piece in enumerate(pieces):
                if index % 2 == 0:
                    encoding = next(encodings)
                    ids += encoding.ids
                    if chat_spans:
                        # encoding.offsets refer to the unescaped piece. For each of its characters,
                        # find the offset in the rendered chat.
                        offsets = [m.start() + offset for m in re.finditer(_CHARACTER, piece)]
                        offsets.append(offset + len(piece))
                        mask += [in_spans(offsets[i], offsets[j]) for i, j in encoding.offsets]
                    else:
                        mask += [0] * len(encoding.ids)
                elif piece != _PIECE_BREAK:
                    ids.append(specials[piece])
                    mask.append(in_spans(offset, offset + len(piece)))
                offset += len(piece)
            return ids, mask

        return [join(pieces, chat_spans) for pieces, chat_spans in zip(chats, spans, strict=True)]

    def _tokenizer_without_specials(self) -> Tokenizer:
        """Return a tokenizer with this vocabulary that encodes special tokens as plain text.

        It shares the BPE model with the backend tokenizer, whose settings must not change, because
        other threads may be using it.
        """
        backend = self.backend_tokenizer
        plain = Tokenizer(backend.model)
        if backend.normalizer is not None:
            plain.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            plain.pre_tokenizer = backend.pre_tokenizer
        plain.add_tokens([token for _, token in sorted(self.added_tokens_decoder.items())])
        plain.encode_special_tokens = True
        return plain


def build_pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    """Build the pre-tokenizer, which splits a text and maps its bytes to printable characters."""
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, to_bytes])


def convert_ranks(
    vocab_file: str, special_tokens: dict[int, str | AddedToken] | None = None
) -> Tokenizer:
    """Convert a tiktoken ranks file (lines of ``base64 rank``) to a tokenizer with the same ids.

    transformers' TikTokenConverter is not used, because it needs the tiktoken package.

    Args:
        special_tokens: Maps ids to tokens. Default: GLM-4's tokens, with ids after the last rank.

    Raises:
        ValueError: The ids of the special tokens do not follow the ranks in this file.
    """
    with open(vocab_file, "rb") as lines:
        pairs = (line.split() for line in lines if line.strip())
        ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    characters = bytes_to_unicode()

    def as_text(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    # tiktoken merges the two neighbors whose concatenation has the lowest rank. Their own ranks may
    # be higher, so every split of a token into two tokens is a merge.
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        splits = ((token[:i], token[i:]) for i in range(1, len(token)))
        merges += [(head, tail) for head, tail in splits if head in ranks and tail in ranks]
    model = BPE(
        vocab={as_text(token): rank for token, rank in ranks.items()},
        merges=[(as_text(head), as_text(tail)) for head, tail in merges],
        # As in tiktoken, a piece of text that is itself a token is not merged from its parts.
        ignore_merges=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = build_pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    if not special_tokens:
        special_tokens = {len(ranks) + i: token for i, token in enumerate(SPECIAL_TOKENS)}
    for token_id, special in sorted(special_tokens.items()):
        tokenizer.add_special_tokens([AddedToken(str(special), special=True, normalized=False)])
        if tokenizer.token_to_id(str(special)) != token_id:
            raise ValueError(
                f"{special} should have id {token_id}, but after the ranks of {vocab_file} it gets "
                f"{tokenizer.token_to_id(str(special))}: that file and added_tokens_decoder of "
                "tokenizer_config.json belong to different tokenizers"
            )
    return tokenizer


def _refuse_unsupported_options(options: Mapping[str, Any], prefix: str = "") -> None:
    """Raise ``ValueError`` if an unsupported option, whose key begins with ``prefix``, is true."""
    for name in UNSUPPORTED_TEXT_OPTIONS:
        if value := options.get(prefix + name):
            raise ValueError(
                f"{name} is {value!r}, but this tokenizer only prepends [gMASK]<sop> to a text: "
                "leave it out, and write spaces or <|endoftext|> into the text yourself"
            )


def as_conversations(conversation: Any) -> tuple[list[list], bool]:
    """Return a list of conversations (lists of dicts), and whether the argument was such a list."""
    conversation = getattr(conversation, "messages", conversation)
    if len(conversation) == 0:
        raise ValueError("the conversation has 0 messages: give at least 1")
    is_batched = isinstance(conversation[0], (list, tuple)) or hasattr(conversation[0], "messages")
    conversations = conversation if is_batched else [conversation]
    as_dicts = [_as_dicts(getattr(messages, "messages", messages)) for messages in conversations]
    return as_dicts, is_batched


def _as_dicts(value: Any) -> Any:
    """Convert nested dataclasses and pydantic models to dicts. Images in them are not copied."""
    if isinstance(value, Mapping):
        return {key: _as_dicts(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_as_dicts, value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _as_dicts(getattr(value, field.name)) for field in fields(value)}
    if callable(dump := getattr(value, "model_dump", None)) and not isinstance(value, type):
        return _as_dicts(dump())
    return value


def _is_image(value: Any) -> bool:
    """Return whether the ``image`` of a message is an image; a false value means no image."""
    types_with_truth = (Sequence, Mapping, int, float, np.generic)  # arrays may have no truth value
    return value is not None and not (isinstance(value, types_with_truth) and not value)


def is_empty_media(value: Any) -> bool:
    """Return whether an argument for images, videos or audio is empty, at any nesting."""
    if isinstance(value, (list, tuple)):
        return all(map(is_empty_media, value))
    if hasattr(value, "shape"):
        return 0 in value.shape
    return value is None or (isinstance(value, (str, bytes, Mapping)) and not value)


# Names of arguments that transformers' processors and their callers use.
IMAGE_ARGUMENTS = ("images", "image", "pixel_values")
VIDEO_AND_AUDIO_ARGUMENTS = ("videos", "video", "audio", "audios", "videos_kwargs", "audio_kwargs")
MODALITIES_HINT = "this model takes images and text"


def refuse_media(kwargs: dict[str, Any], names: Sequence[str], cure: str) -> None:
    """Remove empty arguments ``names`` from ``kwargs``; raise ``ValueError`` for one with media.

    Args:
        cure: What to do instead, for the message.
    """
    for name in names:
        if not is_empty_media(kwargs.pop(name, None)):
            raise ValueError(f"the call was given {name}, which nothing reads: {cure}")


def _drop_none(message: Mapping) -> dict:
    """Return a message without None values, which templates would print, and empty images."""
    return {
        key: value
        for key, value in message.items()
        if value is not None and (key != "image" or _is_image(value))
    }


def _content_parts(message: Mapping) -> Sequence:
    """Return the parts of a content that is a list; a content that is a text has none."""
    content = message.get("content")
    return content if isinstance(content, (list, tuple)) else ()


def find_images(messages: list[dict], allow_missing: bool = False) -> list:
    """Return the images of a conversation, without reading them, in the template's order.

    An image part without an image is ``None`` if ``allow_missing``, else a ``ValueError``.
    """
    images = []
    for index, message in enumerate(messages):
        if _is_image(message.get("image")):
            images.append(message["image"])
        for part in _content_parts(message):
            if part.get("type") not in ("image", "image_url"):
                continue
            image = next((part[key] for key in IMAGE_SOURCES if part.get(key) is not None), None)
            if isinstance(image, dict):
                image = image.get("url")
            if image is None and not allow_missing:
                raise ValueError(
                    f"message {index} has an image part with 0 images: put one under 'image', "
                    "'url' or 'path', or use tokenize=False and pass images to the processor"
                )
            images.append(image)
    return images


MESSAGE_KEYS = ("role", "content", "metadata", "tools", "image")
IMAGE_SOURCES = ("image", "url", "path", "base64", "image_url")
PART_KEYS = {"text": ("text",), "image": IMAGE_SOURCES, "image_url": IMAGE_SOURCES}


def _check_conversation(messages: list, is_default_template: bool) -> None:
    """Raise ``ValueError`` for values that the template would drop, or print as a type's name."""
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(
                "a message must be a dict, a dataclass or a pydantic model, got "
                f"{type(message).__name__}"
            )
        subject = f"message {index}"
        _check_type(subject, message, "content", (str, list, tuple, type(None)), "string or parts")
        if is_default_template:
            _refuse_unknown_keys(subject, message, MESSAGE_KEYS)
            _check_type(subject, message, "metadata", (str, type(None)), "string")
        for part_number, part in enumerate(_content_parts(message)):
            part_subject = f"{subject}, part {part_number},"
            if isinstance(part, Mapping) and part.get("type") == "text":
                _check_type(part_subject, part, "text", str, "string")
            if is_default_template:
                _check_part(part_subject, part)


def _check_type(subject: str, values: Mapping, key: str, types: Any, expected: str) -> None:
    if not isinstance(values.get(key), types):
        raise ValueError(
            f"{subject} has {key} of type {type(values.get(key)).__name__}: give a {expected}"
        )


def _check_part(subject: str, part: Any) -> None:
    if not isinstance(part, Mapping):
        raise ValueError(f"{subject} is a {type(part).__name__}: give a dict with a type")
    if part.get("type") not in PART_KEYS:
        return  # the template raises an error
    _refuse_unknown_keys(subject, part, ("type", *PART_KEYS[part["type"]]))
    sources = [name for name in IMAGE_SOURCES if part.get(name) is not None]
    if len(sources) > 1:
        raise ValueError(f"{subject} has its image under {' and '.join(sources)}: give one of them")
    # An image part without an image is valid: the caller may pass the image to the processor.
    for name in sources:
        if not isinstance(part[name], Mapping) and not _is_image(part[name]):
            raise ValueError(
                f"{subject} is an image, but its {name!r} is {part[name]!r}: put an image there, "
                "or leave out the part"
            )


def _refuse_unknown_keys(subject: str, values: Mapping, known: Sequence[str]) -> None:
    # None and empty lists count as absent: tables have None for missing keys, and OpenAI's client
    # returns empty lists.
    for key, value in values.items():
        is_set = value is not None and not (isinstance(value, (list, tuple)) and not value)
        if key not in known and is_set:
            raise ValueError(
                f"{subject} has the key {key!r}, which nothing reads: it may have "
                f"{', '.join(known)}; one image goes under 'image' of a message, several as "
                "parts {'type': 'image', 'image': ...} of a list under 'content'"
            )


class _Escaper:
    """Callable that copies template inputs and escapes special tokens in their strings.

    `_ESCAPE` and the decimal code point of the character replace the first character of a special
    token. A template that changes the case of a text does not change digits. An incomplete special
    token at the end of a string is escaped, too, because a template may append the rest.
    """

    def __init__(self, specials: dict[str, int]) -> None:
        # Patterns match only the first character, so that overlapping tokens are found, too.
        patterns = {_ESCAPE, _PIECE_BREAK}
        for token in specials:
            patterns.add(f"{re.escape(token[0])}(?={re.escape(token[1:])})")
            for end in range(1, len(token)):
                patterns.add(rf"{re.escape(token[0])}(?={re.escape(token[1:end])}\Z)")
        self._pattern = re.compile("|".join(sorted(patterns)))

    def __call__(self, value: Any) -> Any:
        if isinstance(value, str):
            plain = str.__str__(value)  # str() of an enum member is not its value
            return self._pattern.sub(lambda m: f"{_ESCAPE}{ord(m[0]):07d}", plain)
        if isinstance(value, Mapping):
            return {self(key): self(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self(item) for item in value]
        if isinstance(value, np.generic):
            return self(value.item())
        if value is None or isinstance(value, (bool, int, float)):
            return value
        # Templates only test whether images and other objects exist. The name of its type replaces
        # an object, because str() of the object could contain special tokens.
        return self(f"<{type(value).__name__}>")


def _unescape(text: str) -> str:
    return _ESCAPED.sub(lambda m: chr(int(m[1])), text)
