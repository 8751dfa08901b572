"""Tokenizer of glm-4v-9b, backed by the `tokenizers` library.

Ids are upstream's. A folder with only ``tokenizer.model`` (the ranks) is converted on loading, and
``save_pretrained`` writes ``tokenizer.json``. Ordinary encoding gives no position ids: the model
makes them. Chats have them, as upstream's.
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

# First: it raises for versions of transformers that lack what is imported below.
from .configuration_chatglm import PROCESSOR, keep_known_settings, own_places

# isort: split
import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import BatchEncoding, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import render_jinja_template

from .image_processing_chatglm import ChatGLMImageProcessor

ROLES = ("system", "user", "assistant", "observation")
# In the order of their ids, which follow the ranks in the original vocabulary.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    *(f"<|{role}|>" for role in ROLES),
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
)
PROMPT_PREFIX = ("[gMASK]", "<sop>")
# What clean_up_tokenization_spaces takes the spaces from, in this order, as transformers has it.
UNTIDY = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
PROCESSOR_FILE = "processing_chatglm.py"
# What the tokenizers of other models can be asked to add to a text, or to take away.
OPTIONS_OF_OTHERS = (
    "add_prefix_space",
    "add_bos_token",
    "add_eos_token",
    "do_lower_case",
    "remove_space",
    "strip_accents",
)

# Settings of the tokenizer's file.
SAVED = {"added_tokens_decoder", "additional_special_tokens", "auto_map", "backend"}
SAVED |= {"chat_template"}
SAVED |= {"clean_up_tokenization_spaces", "extra_special_tokens", "image_size", "model_max_length"}
SAVED |= {"model_input_names", "padding_side", "processor_class", "split_special_tokens"}
SAVED |= {"tokenizer_class", "truncation_side", *OPTIONS_OF_OTHERS}
# What transformers puts beside them, which says where the tokenizer was loaded from.
LOADING_KWARGS = {"name_or_path", "is_local", "local_files_only", "_commit_hash", "special_tokens_map_file"}
LOADING_KWARGS |= {"tokenizer_file", "vocab_file", "files_loaded", "tokenizer_object", "device_map"}

# What rows may have beside their ids and mask, of the same length.
PADDED_WITH_0 = {"position_ids", "assistant_masks"}

# The ranks were learned on pieces cut by this pattern (that of cl100k_base): part of the format.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)

# `piece_break` is undefined, hence empty, wherever this is rendered by somebody else. Our
# tokenizer puts a mark there, because upstream tokenizes a content apart from the line above it.
# The generation block holds all that follows <|assistant|>, which is where the prompt for
# generation ends: the line of metadata (a tool's name, mostly empty) is the model's to write too.
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

# Noncharacters, which Unicode keeps for a program's own use; in a user's text they are escaped.
_ESCAPE = "\ufdd0"
_PIECE_BREAK = "\ufdd1"
_ESCAPED = re.compile(_ESCAPE + r"(\d{7})")
_CHARACTER = re.compile(_ESCAPED.pattern + "|.", re.DOTALL)


class ChatGLM4Tokenizer(PreTrainedTokenizerFast):
    """Byte-level BPE with GLM-4's special tokens and chat format.

    ``[gMASK]<sop>`` is put before every ordinary encoding. As upstream, ordinary encoding reads
    special tokens out of the text; `apply_chat_template` never reads them out of a message.

    Args:
        vocab_file: Original ranks (``tokenizer.model``), read if there is no ``tokenizer_file``.
        image_size: Side in pixels of the images that `apply_chat_template` makes.
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
                # Upstream's code formats chats itself and never reads the template of its folder.
                chat_template = None
        _refuse_options_of_others(kwargs)
        if kwargs.get("processor_class") is not None:
            kwargs["processor_class"] = PROCESSOR  # whatever class the file names
        if kwargs.get("backend") is not None:
            kwargs["backend"] = "tokenizers"  # the only one, whichever the file names
        kwargs.setdefault("eos_token", "<|endoftext|>")
        kwargs.setdefault("pad_token", "<|endoftext|>")
        # transformers 5 saves this list as `extra_special_tokens`, where 4.57 takes only a dict (of
        # named tokens); both take the older name.
        listed = list(kwargs.pop("additional_special_tokens", None) or ())
        if not isinstance(kwargs.get("extra_special_tokens"), dict):
            listed += kwargs.pop("extra_special_tokens", None) or ()
        elif not kwargs["extra_special_tokens"]:
            del kwargs["extra_special_tokens"]
        named = {str(token): token for token in (*SPECIAL_TOKENS, *listed)}
        kwargs["additional_special_tokens"] = list(named.values())
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
        """Put ``[gMASK]<sop>`` before texts, also where transformers 5 would take it away: when
        ``add_bos_token`` or ``add_eos_token`` is set."""
        _refuse_options_of_others(vars(self), prefix="_")
        prefix = " ".join(PROMPT_PREFIX)
        self.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{prefix} $A",
            pair=f"{prefix} $A $B",
            special_tokens=[(token, self.convert_tokens_to_ids(token)) for token in PROMPT_PREFIX],
        )

    @classmethod
    def convert_to_native_format(cls, trust_remote_code: bool = False, **kwargs) -> dict[str, Any]:
        """Leave the files to ``__init__``: transformers 5 would take ``tokenizer.json`` apart, and
        read ``tokenizer.model`` as sentencepiece."""
        return kwargs

    def save_pretrained(self, save_directory, *args, **kwargs):
        """Save as transformers does, so that ``AutoProcessor`` loads the folder, too.

        A tokenizer that came with a processor names that in its file. Saved alone, it brings the
        processor's code along, or does not name it where that is not at hand. Settings that it
        does not have are logged, and not saved.
        """
        given = {key: value for key, value in self.init_kwargs.items() if key not in LOADING_KWARGS}
        kept = keep_known_settings(given, SAVED | self.special_tokens_map.keys(), "tokenizer_config.json")
        places = own_places(given.get("auto_map"), self._auto_class)
        saved, code = Path(save_directory, PROCESSOR_FILE), Path(__file__).with_name(PROCESSOR_FILE)
        if "AutoProcessor" in places and not saved.exists() and not Path(save_directory).is_file():
            if code.exists():
                saved.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(code, saved)
            else:
                del places["AutoProcessor"]
        self.init_kwargs = kept | {"auto_map": places}
        return super().save_pretrained(save_directory, *args, **kwargs)

    @functools.wraps(PreTrainedTokenizerFast.__call__)  # its signature is read by others
    def __call__(self, *args, **kwargs) -> BatchEncoding:
        # transformers' tokenizers drop them, with a line in the log.
        drop_empty(kwargs, IMAGES, "give images to the processor (AutoProcessor)")
        drop_empty(kwargs, VIDEOS_AND_AUDIO, IMAGES_AND_TEXT)
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
        """Format one conversation or a list of them, as upstream's method does.

        A message is a dict, a dataclass or one of pydantic's models: ``{"role", "content"}`` with
        optional ``"metadata"``, ``"tools"`` and ``"image"`` (upstream's form: one image; None, and
        as upstream False, 0, and what is empty, is none), or has a list of ``{"type": "text",
        "text": ...}`` and ``{"type": "image", ...}`` as content. The images of a message come
        first, wherever they stand in that list. Messages with neither image nor text are left out.
        Other keys are refused unless they are None; a template of one's own may read more.

        With ``tokenize=True`` no string that is given becomes a special token, whatever the
        template. A plain string (``tokenize=False``) cannot keep the two apart.

        Args:
            add_special_tokens: ``False`` leaves out the ``[gMASK]<sop>`` at the beginning.
            tokenizer_kwargs: ``pad_to_multiple_of`` and ``padding_side``.
            **kwargs: ``documents`` and other variables for the template.

        Returns:
            Text (``tokenize=False``: a string, or a list for a list of conversations), else always
            a batch with an image as three ids: its ids ``[B, L]``, or with ``return_dict`` also
            ``attention_mask``, ``position_ids`` ``[B, L]`` (0 at padding), ``assistant_masks`` if
            asked for, and ``images`` if the messages hold images: float32 ``[number of images,
            3, S, S]`` in the order of their begin ids, a torch tensor unless ``return_tensors`` is
            ``"np"``. Without ``return_dict`` images are not opened. In image parts of a content
            list images may be missing, from all.
        """
        if not isinstance(add_generation_prompt, (int, type(None))):
            raise ValueError(
                f"add_generation_prompt is a {type(add_generation_prompt).__name__}: by place the "
                "arguments are in the published order; give tools, documents and chat_template by "
                "name"
            )
        conversations, is_batched = as_batch(conversation)
        options = tokenizer_kwargs or {}
        if unknown := sorted(options.keys() - {"pad_to_multiple_of", "padding_side"}):
            raise ValueError(
                f"unknown tokenizer_kwargs {unknown}: use pad_to_multiple_of and padding_side"
            )
        if return_assistant_tokens_mask and not (tokenize and return_dict):
            raise ValueError(
                "return_assistant_tokens_mask=True needs tokenize=True and return_dict=True"
            )
        rendering = kwargs | {
            "tools": tools,
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "return_assistant_tokens_mask": return_assistant_tokens_mask,
        }
        if not tokenize:
            texts, _ = self._render(conversations, None, **rendering)
            if not add_special_tokens:
                texts = [text.removeprefix("".join(PROMPT_PREFIX)) for text in texts]
            return texts if is_batched else texts[0]
        rows = self.encode_chats(conversations, **rendering)
        if not add_special_tokens:
            prefix = self.get_prefix_tokens()
            starts = [len(prefix) * (row[: len(prefix)] == prefix) for row in rows["input_ids"]]
            for name, values in rows.items():
                rows[name] = [row[at:] for row, at in zip(values, starts, strict=True)]
        limit = self.truncation_limit(truncation, max_length)
        if limit is not None:
            cut = slice(None, limit) if self.truncation_side == "right" else slice(-limit, None)
            rows = {name: [row[cut] for row in values] for name, values in rows.items()}
        images = self._images(conversations, rows["input_ids"]) if return_dict else []
        rows["position_ids"] = [[*range(len(row))] for row in rows["input_ids"]]
        encoding = self.pad_rows(
            rows, padding=padding, max_length=max_length, return_tensors=return_tensors, **options
        )
        if not return_dict:
            return encoding["input_ids"]
        if images:
            prepare = ChatGLMImageProcessor(size=self.image_size)
            kind = "np" if return_tensors == "np" else "pt"
            encoding["images"] = prepare(images, return_tensors=kind)["pixel_values"]
        return encoding

    def encode_chats(
        self, conversations: list[list[dict]], return_assistant_tokens_mask: bool = False, **options
    ) -> dict[str, list[list[int]]]:
        """``input_ids`` of conversations, images as three ids and not opened, and with
        ``return_assistant_tokens_mask`` ``assistant_masks``, as long.

        Args:
            **options: ``tools``, ``chat_template``, ``add_generation_prompt``,
                ``continue_final_message``, as `apply_chat_template` takes them, and variables.
        """
        options["return_assistant_tokens_mask"] = return_assistant_tokens_mask
        escape = _Escaper(self._special_ids())
        rendered, spans = self._render(conversations, escape, **options)
        encoded = self._encode_rendered(rendered, spans or [()] * len(rendered))
        rows = {"input_ids": [ids for ids, _ in encoded]}
        if return_assistant_tokens_mask:
            rows["assistant_masks"] = [mask for _, mask in encoded]
        return rows

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
        """The texts of conversations, and the spans of what an assistant says, if asked for."""
        drop_empty(variables, IMAGES, "put images into the messages, under 'image'")
        drop_empty(variables, VIDEOS_AND_AUDIO, IMAGES_AND_TEXT)
        template = self.get_chat_template(chat_template, tools)
        for messages in conversations:
            _check_conversation(messages, own_template=template == CHAT_TEMPLATE)
        if continue_final_message and (add_generation_prompt or return_assistant_tokens_mask):
            raise ValueError(
                "continue_final_message excludes add_generation_prompt and "
                "return_assistant_tokens_mask: the final message is left open"
            )
        variables.pop("sanitize_control_tokens", None)  # of transformers 5.23: always the case here
        if tools is not None:
            # Schemas are made here, so that docstrings are escaped like any other string.
            tools = [
                tool if isinstance(tool, Mapping) else get_json_schema(tool)
                for tool in _as_dicts(tools)
            ]
        escape = escaper or (lambda value: value)
        piece_break = _PIECE_BREAK if escaper else ""
        made: Any = self.render_template(
            conversations=[[escape(_said(m)) for m in messages] for messages in conversations],
            tools=escape(tools),
            chat_template=template,
            return_assistant_tokens_mask=return_assistant_tokens_mask,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **{**self.special_tokens_map, **escape(variables), "piece_break": piece_break},
        )
        return made

    def _images(self, conversations: list[list[dict]], rows: list[list[int]]) -> list:
        """The images of all messages in the order of their begin ids, not opened yet."""
        found = [find_images(messages, may_miss=True) for messages in conversations]
        flat = [image for of_row in found for image in of_row]
        if all(image is None for image in flat):
            return []  # there are none, or the caller keeps those of image parts elsewhere
        found = [find_images(messages) for messages in conversations]
        for name in ("<|begin_of_image|>", "<|end_of_image|>"):
            marker = cast(int, self.convert_tokens_to_ids(name))
            for number, (images, row) in enumerate(zip(found, rows, strict=True)):
                if row.count(marker) != len(images):
                    raise ValueError(
                        f"conversation {number} holds {len(images)} images, but its ids have "
                        f"{row.count(marker)} times {name}: give a longer max_length, or a chat "
                        "template that writes images"
                    )
        if self.image_size is None:
            raise ValueError(
                f"{len(flat)} images were given but this tokenizer has image_size None: give it "
                "the image_size of the model's vision_config"
            )
        return flat

    def get_prefix_tokens(self) -> list[int]:
        """The ids of ``[gMASK]<sop>``."""
        return cast(list[int], self.convert_tokens_to_ids(list(PROMPT_PREFIX)))

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """``[gMASK]<sop>`` before the ids, and those of a pair after them, as encoding does."""
        return [*self.get_prefix_tokens(), *token_ids_0, *(token_ids_1 or ())]

    def get_special_tokens_mask(
        self,
        token_ids_0: list[int],
        token_ids_1: list[int] | None = None,
        already_has_special_tokens: bool = False,
    ) -> list[int]:
        """1 for special tokens and 0 for others: of these ids, or of what
        :meth:`build_inputs_with_special_tokens` makes of them."""
        if already_has_special_tokens:
            return super().get_special_tokens_mask(token_ids_0, token_ids_1, True)
        num_given = len(self.build_inputs_with_special_tokens(token_ids_0, token_ids_1))
        num_prefix = len(self.get_prefix_tokens())
        return [1] * num_prefix + [0] * (num_given - num_prefix)

    def _decode(
        self,
        token_ids: int | list[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        spaces_between_special_tokens: bool = True,
        **kwargs,
    ) -> str:
        """As slow tokenizers, of which the published one is one: a space on either side of each
        added token, and the bytes between two of them decoded for themselves."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        if skip_special_tokens:
            special = set(self.all_special_ids)
            ids = [token for token in ids if token not in special]
        added = self.added_tokens_decoder
        pieces: list[str] = []
        for is_added, run in itertools.groupby(ids, added.__contains__):
            if is_added:
                pieces += [str(added[token]) for token in run]
            elif text := self.backend_tokenizer.decode(list(run), skip_special_tokens=False):
                pieces.append(text)
        text = (" " if spaces_between_special_tokens else "").join(pieces)
        if clean_up_tokenization_spaces is None:
            clean_up_tokenization_spaces = self.clean_up_tokenization_spaces
        if clean_up_tokenization_spaces:
            for written in UNTIDY:
                text = text.replace(written, written.strip())
        return text

    def build_single_message(
        self,
        role: str,
        metadata: str,
        message: str,
        tokenize: bool = True,
        message_prefix: list[int] | None = None,
    ) -> list[int] | str:
        """One message of a chat: ``<|role|>``, metadata, a newline, ``message_prefix`` (ids), the
        text. Special tokens are not read out of the texts."""
        if role not in ROLES:
            raise ValueError(f"the message has the role {role!r}: use {', '.join(ROLES)}")
        if not tokenize:
            return f"<|{role}|>{metadata}\n{message}"
        encode = self._plain_tokenizer().encode
        head, text = (
            encode(piece, add_special_tokens=False).ids for piece in (f"{metadata}\n", message)
        )
        role_id = cast(int, self.convert_tokens_to_ids(f"<|{role}|>"))
        return [role_id, *head, *(message_prefix or []), *text]

    @classmethod
    def _patch_mistral_regex(cls, tokenizer, *args, **kwargs):
        """Leave the pattern alone: transformers takes folders that it saved itself in 4.57.3 to
        4.57.6 for Mistral's, and offers another one, which would change the ids."""
        return tokenizer

    def _pad(self, encoded_inputs, *, padding_side=None, **options) -> dict:  # type: ignore[override]
        """As transformers', with 0 at padding in :data:`PADDED_WITH_0`."""
        padded = super()._pad(encoded_inputs, padding_side=padding_side, **options)
        on_left = (padding_side or self.padding_side) == "left"
        for name in padded.keys() & PADDED_WITH_0:
            values = list(padded[name])
            fill = [0] * (len(padded["input_ids"]) - len(values))
            padded[name] = fill + values if on_left else values + fill
        return padded

    def truncation_limit(self, truncation: bool | str | None, max_length: int | None) -> int | None:
        """The length that ``truncation`` cuts rows to, or None if it cuts nothing."""
        if truncation in (None, False, "do_not_truncate"):
            return None
        return self.model_max_length if max_length is None else max_length

    def pad_rows(
        self,
        rows: dict[str, list[list[int]]],
        *,
        padding: bool | str = False,
        max_length: int | None = None,
        **options,
    ) -> BatchEncoding:
        """Pad rows of ids, and of what :data:`PADDED_WITH_0` names, with their attention mask."""
        # The base class takes a length without this strategy for a request to truncate.
        max_length = max_length if padding == "max_length" else None
        return self.pad(dict(rows), padding=padding, max_length=max_length, **options)

    def _special_ids(self) -> dict[str, int]:
        return {str(t): i for i, t in self.added_tokens_decoder.items() if t.special}

    def _encode_rendered(
        self, rendered: Sequence[str], spans: Sequence[Sequence[tuple[int, int]]]
    ) -> list[tuple[list[int], list[int]]]:
        """Of rendered chats whose user strings are escaped the ids, each with 1 if it stands for
        characters in the chat's ``spans``."""
        specials = self._special_ids()
        marks = sorted([*specials, _PIECE_BREAK], key=len, reverse=True)
        split = re.compile("(" + "|".join(map(re.escape, marks)) + ")").split
        chats = [split(text) for text in rendered]
        # In one call for all of them: a tokenizer is made for it, and it works on several cores.
        encodings = iter(
            self._plain_tokenizer().encode_batch(
                [_unescape(piece) for pieces in chats for piece in pieces[::2]],
                add_special_tokens=False,
            )
        )

        def encode(pieces: list[str], of_chat: Sequence[tuple[int, int]]):
            def in_spans(first: int, last: int) -> int:
                return int(any(first < end and last > start for start, end in of_chat))

            ids, mask, at = [], [], 0
            for number, piece in enumerate(pieces):
                if number % 2 == 0:
                    encoding = next(encodings)
                    ids += encoding.ids
                    if of_chat:
                        # Where each character of the unescaped piece begins in the chat.
                        places = [m.start() + at for m in re.finditer(_CHARACTER, piece)]
                        places.append(at + len(piece))
                        mask += [in_spans(places[a], places[b]) for a, b in encoding.offsets]
                    else:
                        mask += [0] * len(encoding.ids)
                elif piece != _PIECE_BREAK:
                    ids.append(specials[piece])
                    mask.append(in_spans(at, at + len(piece)))
                at += len(piece)
            return ids, mask

        return [encode(pieces, of_chat) for pieces, of_chat in zip(chats, spans, strict=True)]

    def _plain_tokenizer(self) -> Tokenizer:
        """A tokenizer with this vocabulary that reads no special token out of a text.

        It shares the model with the real one (nothing is copied), whose settings, which other
        threads may be using, stay as they are.
        """
        real = self.backend_tokenizer
        plain = Tokenizer(real.model)
        if real.normalizer is not None:
            plain.normalizer = real.normalizer
        if real.pre_tokenizer is not None:
            plain.pre_tokenizer = real.pre_tokenizer
        plain.add_tokens([token for _, token in sorted(self.added_tokens_decoder.items())])
        plain.encode_special_tokens = True
        return plain


def convert_ranks(
    vocab_file: str, special_tokens: dict[int, str | AddedToken] | None = None
) -> Tokenizer:
    """Convert a tiktoken ranks file (lines of ``base64 rank``) to a tokenizer with the same ids.

    transformers' TikTokenConverter would need the tiktoken package only to read the file.

    Args:
        special_tokens: id -> token. Defaults to GLM-4's, numbered from the end of the ranks.
    """
    with open(vocab_file, "rb") as lines:
        pairs = (line.split() for line in lines if line.strip())
        ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    printable = bytes_to_unicode()

    def as_text(token: bytes) -> str:
        return "".join(printable[byte] for byte in token)

    # tiktoken joins the neighbors whose union ranks lowest, whichever way the union is cut in two.
    # The ranks of this file are no order of learning (a token may rank below its own parts), so
    # one merge for each token would not do.
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        merges += [(left, right) for left, right in cuts if left in ranks and right in ranks]
    model = BPE(
        vocab={as_text(token): rank for token, rank in ranks.items()},
        merges=[(as_text(left), as_text(right)) for left, right in merges],
        # tiktoken looks a whole piece up before it merges.
        ignore_merges=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    wanted = special_tokens or {len(ranks) + i: token for i, token in enumerate(SPECIAL_TOKENS)}
    for number, special in sorted(wanted.items()):
        tokenizer.add_special_tokens([AddedToken(str(special), special=True, normalized=False)])
        if tokenizer.token_to_id(str(special)) != number:
            raise ValueError(
                f"{special} should have id {number} but follows {vocab_file} as "
                f"{tokenizer.token_to_id(str(special))}: that file and the added_tokens_decoder of "
                "tokenizer_config.json are not of the same tokenizer"
            )
    return tokenizer


def _refuse_options_of_others(given: Mapping[str, Any], prefix: str = "") -> None:
    for name in OPTIONS_OF_OTHERS:
        if value := given.get(prefix + name):
            raise ValueError(
                f"{name} is {value!r}, but this tokenizer only puts [gMASK]<sop> before a text: "
                "leave it out, and write a space or <|endoftext|> into the text where it belongs"
            )


def as_batch(conversation: Any) -> tuple[list[list], bool]:
    """Return a list of conversations of dicts, and whether a list of them is what was given."""
    conversation = getattr(conversation, "messages", conversation)
    if len(conversation) == 0:
        raise ValueError("the conversation has 0 messages: give at least 1")
    is_batched = isinstance(conversation[0], (list, tuple)) or hasattr(conversation[0], "messages")
    conversations = conversation if is_batched else [conversation]
    plain = [_as_dicts(getattr(messages, "messages", messages)) for messages in conversations]
    return plain, is_batched


def _as_dicts(value: Any) -> Any:
    """``value`` with dicts in the place of dataclasses and of pydantic's models, such as OpenAI's
    client gives. Images in them are not copied."""
    if isinstance(value, Mapping):
        return {key: _as_dicts(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_as_dicts, value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _as_dicts(getattr(value, field.name)) for field in fields(value)}
    if callable(dump := getattr(value, "model_dump", None)) and not isinstance(value, type):
        return _as_dicts(dump())
    return value


def _is_no_image(value: Any) -> bool:
    """Whether a message's ``image`` is none. The published code asks whether it is true."""
    has_truth = (Sequence, Mapping, int, float, np.generic)  # of an array it may have none
    return value is None or (isinstance(value, has_truth) and not value)


def is_empty(value: Any) -> bool:
    """Return whether an argument for images, videos or audio holds none, however nested."""
    if isinstance(value, (list, tuple)):
        return all(map(is_empty, value))
    if hasattr(value, "shape"):
        return 0 in value.shape
    return value is None or (isinstance(value, (str, bytes, Mapping)) and not value)


# By the names of transformers' processors, and of their callers.
IMAGES = ("images", "image", "pixel_values")
VIDEOS_AND_AUDIO = ("videos", "video", "audio", "audios", "videos_kwargs", "audio_kwargs")
IMAGES_AND_TEXT = "this model takes images and text"


def drop_empty(given: dict[str, Any], names: Sequence[str], cure: str) -> None:
    """Remove ``names`` from ``given``. Raises ``ValueError`` for one that is not empty."""
    for name in names:
        if not is_empty(given.pop(name, None)):
            raise ValueError(f"the call was given {name}, which nothing reads: {cure}")


def _said(message: Mapping) -> dict:
    """Without what is none: templates would print "None"."""
    return {
        key: value
        for key, value in message.items()
        if value is not None and not (key == "image" and _is_no_image(value))
    }


def _parts(message: Mapping) -> Sequence:
    content = message.get("content")
    return content if isinstance(content, (list, tuple)) else ()


def find_images(messages: list[dict], may_miss: bool = False) -> list:
    """The images of a conversation, as given, in the order in which the template places them.

    An image part that names no image is an error, or a ``None`` if it ``may_miss``.
    """
    found = []
    for number, message in enumerate(messages):
        if not _is_no_image(message.get("image")):
            found.append(message["image"])
        for part in _parts(message):
            if part.get("type") not in ("image", "image_url"):
                continue
            image = next((part[key] for key in IMAGE_SOURCES if part.get(key) is not None), None)
            if isinstance(image, dict):
                image = image.get("url")
            if image is None and not may_miss:
                raise ValueError(
                    f"message {number} has an image part with 0 images: put one under 'image', "
                    "'url' or 'path', or use tokenize=False and pass images to the processor"
                )
            found.append(image)
    return found


MESSAGE_KEYS = ("role", "content", "metadata", "tools", "image")
IMAGE_SOURCES = ("image", "url", "path", "base64", "image_url")
PART_KEYS = {"text": ("text",), "image": IMAGE_SOURCES, "image_url": IMAGE_SOURCES}


def _check_conversation(messages: list, own_template: bool) -> None:
    """Raise ``ValueError`` for what the template would drop, or write as the name of its type."""
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(
                "a message must be a dict, a dataclass or a model of pydantic, got "
                f"{type(message).__name__}"
            )
        place = f"message {number}"
        _check_type(place, message, "content", (str, list, tuple, type(None)), "string or parts")
        if own_template:
            _refuse_other_keys(place, message, MESSAGE_KEYS)
            _check_type(place, message, "metadata", (str, type(None)), "string")
        for at, part in enumerate(_parts(message)):
            if isinstance(part, Mapping) and part.get("type") == "text":
                _check_type(f"{place}, part {at},", part, "text", str, "string")
            if own_template:
                _check_part(f"{place}, part {at},", part)


def _check_type(place: str, given: Mapping, key: str, kinds: Any, wanted: str) -> None:
    if not isinstance(given.get(key), kinds):
        raise ValueError(
            f"{place} has {key} of type {type(given.get(key)).__name__}: give a {wanted}"
        )


def _check_part(place: str, part: Any) -> None:
    if not isinstance(part, Mapping):
        raise ValueError(f"{place} is a {type(part).__name__}: give a dict with a type")
    if part.get("type") not in PART_KEYS:
        return  # the template says so
    _refuse_other_keys(place, part, ("type", *PART_KEYS[part["type"]]))
    sources = [name for name in IMAGE_SOURCES if part.get(name) is not None]
    if len(sources) > 1:
        raise ValueError(f"{place} has its image under {' and '.join(sources)}: give one of them")
    # {"url": None} stands for one that is kept elsewhere.
    for name in sources:
        if not isinstance(part[name], Mapping) and _is_no_image(part[name]):
            raise ValueError(
                f"{place} is an image, but under {name!r} it has {part[name]!r}, which is none: "
                "put an image there, or leave out the part"
            )


def _refuse_other_keys(place: str, given: Mapping, known: Sequence[str]) -> None:
    # None is what a table has where a row has no such key. OpenAI's client has empty lists, too.
    for key, value in given.items():
        is_there = value is not None and not (isinstance(value, (list, tuple)) and not value)
        if key not in known and is_there:
            raise ValueError(
                f"{place} has the key {key!r}, which nothing reads: it may have "
                f"{', '.join(known)}; one image goes under 'image' of a message, several as "
                "parts {'type': 'image', 'image': ...} of a list under 'content'"
            )


class _Escaper:
    """Deep copy of template inputs in which no string holds a special token.

    The first character of each becomes `_ESCAPE` and its number, in digits because templates change
    the case of strings; also of a part of one at the end of a string, where a template may append
    the rest.
    """

    def __init__(self, specials: dict[str, int]) -> None:
        # Only the first character is consumed, so overlapping occurrences are all found.
        found = {_ESCAPE, _PIECE_BREAK}
        for token in specials:
            found.add(f"{re.escape(token[0])}(?={re.escape(token[1:])})")
            for end in range(1, len(token)):
                found.add(rf"{re.escape(token[0])}(?={re.escape(token[1:end])}\Z)")
        self._pattern = re.compile("|".join(sorted(found)))

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
        # Images and the like: templates ask only whether they are there, and printing an object
        # would let a string in.
        return self(f"<{type(value).__name__}>")


def _unescape(text: str) -> str:
    return _ESCAPED.sub(lambda m: chr(int(m[1])), text)
