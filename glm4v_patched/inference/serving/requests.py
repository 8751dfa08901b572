"""Requests of OpenAI's API, checked; needs no torch.

What the server cannot do is refused, unless the request asks for what it does anyway.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ...data.messages import as_words, check_messages, pictures_of, replace_pictures
from ...data.pictures import from_data_url
from ..questions import LEAST_PENALTY, LEAST_TEMPERATURE, MOST_PENALTY, Generation
from .limits import ApiError

# Keys that change nothing about an answer.
IGNORED = ("metadata", "prompt_cache_key", "safety_identifier", "user")
# Of what the server cannot do, the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "text": ({"format": {"type": "text"}},),
    "tool_choice": ("none", "auto"),
    "truncation": ("disabled",),
}
# 0, false, or nothing in it.
OFF = ["chat_template_kwargs", "continue_final_message", "echo", "ignore_eos", "include"]
OFF += ["include_stop_str_in_output", "logit_bias", "logprobs", "min_p", "min_tokens", "store"]
OFF += ["stop_token_ids", "suffix", "tools", "top_logprobs", "use_beam_search"]
NEUTRAL |= dict.fromkeys(OFF, ())
# The same of a message, a part of it, and its picture: clients send back what they got.
NEUTRAL_OF_MESSAGES = dict.fromkeys(("annotations", "tool_calls", "logprobs"), ())
IGNORED_OF_MESSAGES = ("name", "cache_control", "detail", "min_pixels", "max_pixels")
"""The template shows no names, and the model sees pictures in one size."""
ROLES = {"developer": "system"}
TEXTS = ("text", "input_text", "output_text")
IMAGES = ("image_url", "image", "input_image")
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
ALIASES = ("glm-4v", "glm-4v-9b")
"""What GLM-4's own clients call any glm-4v."""
MOST_TEMPERATURE = 100

Text = Annotated[str, Field(min_length=1)]
Texts = BeforeValidator(lambda given: [given] if isinstance(given, str) else given)
"""Of a list, which may be one text."""
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
AtLeastOne = Annotated[int, Field(ge=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False


class Request(_Strict):
    """The keys of all requests; ``top_k`` and ``repetition_penalty`` are additions to OpenAI's API,
    as vLLM has them."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=MOST_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=LEAST_PENALTY, le=MOST_PENALTY)] | None = None
    presence_penalty: Penalty = 0
    frequency_penalty: Penalty = 0
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[list[Stop], Texts, Field(max_length=16)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()


class ChatRequest(Request):
    """Of ``/v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_tokens: AtLeastOne | None = None
    max_completion_tokens: AtLeastOne | None = None

    def asked(self) -> list[dict[str, Any]]:
        return self.messages


class TextRequest(Request):
    """Of ``/v1/completions``, which continues a text."""

    prompt: Annotated[list[Text], Texts, Field(min_length=1, max_length=1)]
    max_tokens: AtLeastOne | None = None

    def asked(self) -> str:
        return self.prompt[0]


class ResponseRequest(Request):
    """Of ``/v1/responses``, of which the server remembers none."""

    input: Text | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: AtLeastOne | None = None

    def asked(self) -> list[dict[str, Any]]:
        said = self.input
        asked = [{"role": "user", "content": said}] if isinstance(said, str) else said
        return [{"role": "system", "content": self.instructions or ""}, *asked]


Asking = ChatRequest | TextRequest | ResponseRequest


class Wanted(Request):
    """What is to be answered.

    Args:
        prompt: Messages as the processor takes them, with pictures as the bytes of files; or a text
            to continue.
        max_tokens: Of the answer, if the client says so.
    """

    prompt: list[dict] | str
    generation: Generation
    model: str = ""
    max_tokens: int | None = None

    def goes_with(self, other: "Wanted") -> bool:
        """Whether both may be answered in one batch. What a seed draws depends on the batch."""
        one, two = (
            (w.model, w.generation, w.penalties, isinstance(w.prompt, str)) for w in (self, other)
        )
        return one == two and self.seed is None and other.seed is None

    @property
    def penalties(self) -> tuple[float, float]:
        """OpenAI's, of tokens that the answer has: presence and frequency."""
        return self.presence_penalty, self.frequency_penalty

    @property
    def pictures(self) -> int:
        return 0 if isinstance(self.prompt, str) else len(pictures_of(self.prompt))


def read_request(
    kind: type[Asking], body: dict[str, Any], names: Sequence[str], defaults: Generation
) -> Wanted:
    """Check the JSON of a request, whose pictures :class:`guard.Guard` has checked.

    Args:
        names: Of the models that are served; the first is that of a request without one.
        defaults: What is generated where the request does not say.
    """
    try:
        request = kind.model_validate(_plain(body, IGNORED, NEUTRAL))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        told = first["msg"]
        if first["type"] == "extra_forbidden":
            told = f"is not read; expected one of {', '.join(kind.model_fields)}"
        elif first["type"] != "missing":
            told += f", and it is {as_words(first['input'])}"
        raise ApiError(400, f"{key}: {told}", key) from None
    asked = request.asked()
    lengths = {k: v for k, v in request if k in LENGTHS and v is not None}
    if len({*lengths.values()}) > 1:
        told = " and ".join(f"{key} is {value}" for key, value in lengths.items())
        raise ApiError(400, f"{told}, which say the same: give one of them", "max_tokens")
    given = {key: value for key, value in request if key in Request.model_fields}
    given["model"] = model_called(request.model, names)
    return Wanted.model_construct(
        **given,
        prompt=asked if isinstance(asked, str) else _messages(asked),
        generation=_generation(request, defaults),
        max_tokens=next(iter(lengths.values()), None),
    )


def model_called(name: str | None, names: Sequence[str]) -> str:
    """Which of the models that are served a client means; raises ``ApiError`` if none."""
    if name in names:
        return str(name)
    if name is None or name in ALIASES:
        return names[0]
    there = " and ".join(map(as_words, names))
    told = f"there is no model {as_words(name)}; this server has {there}"
    raise ApiError(404, told, "model", "model_not_found")


def _plain(
    given: dict[str, Any], ignored: Sequence[str], neutral: dict[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """Without the keys that change nothing at their values, null among them."""
    plain = {k: v for k, v in given.items() if v is not None and k not in ignored}
    for key in neutral.keys() & plain.keys():
        value, values = plain.pop(key), neutral[key]
        # As JSON, where true is not 1.
        same = (value == n and isinstance(value, bool) == isinstance(n, bool) for n in values)
        if not (any(same) if values else not value):
            expected = " or ".join(map(json.dumps, values)) or "nothing"
            told = f"{key} is {as_words(value)}, which this server cannot do; expected {expected}"
            raise ApiError(400, told, key, "unsupported_parameter")
    return plain


def _messages(given: list[dict[str, Any]]) -> list[dict]:
    found: dict[str, bytes] = {}

    def keep(url: Any) -> str:
        key = str(len(found))
        found[key] = from_data_url(url)
        return key

    try:
        plain = [_message(message) for message in given]
        plain = [m for m in plain if m.get("role") != "system" or m.get("content") != ""]
        messages = check_messages(plain, keep, to_learn=False)
    except ValueError as error:
        raise ApiError(400, str(error), "messages") from None
    if messages[-1]["role"] == "assistant":
        raise ApiError(
            400, "messages end with the assistant; expected a question of the user", "messages"
        )
    return replace_pictures(messages, found.__getitem__)


def _message(given: dict[str, Any]) -> dict[str, Any]:
    message = {"content": ""} | _plain(given, IGNORED_OF_MESSAGES, NEUTRAL_OF_MESSAGES)
    if message.get("type") == "message":  # of /v1/responses
        message = {k: v for k, v in message.items() if k not in ("type", "id", "status")}
    for key in ("train", "loss", "weight", "image"):  # of files of data
        if key in message:
            raise ValueError(f"the key {as_words(key)} is not read")
    role: Any = message.get("role")
    if isinstance(role, str):
        message["role"] = ROLES.get(role, role)
    if isinstance(message["content"], list):
        message["content"] = [_part(part) for part in message["content"]]
    return message


def _part(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    part = _plain(given, IGNORED_OF_MESSAGES, NEUTRAL_OF_MESSAGES)
    if part.get("type") in TEXTS:
        return part | {"type": "text"}
    if part.get("type") not in IMAGES:
        return part
    [key] = part.keys() - {"type"} if len(part) == 2 else [""]
    url = part.get(key)
    if isinstance(url, dict):
        url = _plain(url, IGNORED_OF_MESSAGES, {})
        url = url["url"] if [*url] == ["url"] else None
    # No other key: what stands there, the guard has not looked at.
    if key not in ("image_url", "image") or not isinstance(url, str):
        told = '{"type": "image_url", "image_url": {"url": "data:image/...;base64,..."}}'
        raise ValueError(f"a picture is {as_words(part)}; expected {told}")
    return {"type": "image", "image": url}


def _generation(request: Request, defaults: Generation) -> Generation:
    names = ("temperature", "top_p", "top_k", "repetition_penalty")
    given: dict[str, Any] = {k: v for k, v in request if k in names and v is not None}
    if given.get("top_p") == 1:  # of all tokens: no choice among them
        given["top_p"] = None
    if given.get("top_k") in (-1, 0):  # vLLM's words for the same
        given["top_k"] = None
    if 0 in (given.get("temperature"), given.get("top_p")):  # the likeliest token alone
        given |= {"temperature": None, "top_p": None, "top_k": None}
    elif given.get("temperature", LEAST_TEMPERATURE) < LEAST_TEMPERATURE:
        raise ApiError(
            400,
            f"temperature is {given['temperature']:g}; expected 0, for the likeliest tokens, or at "
            f"least {LEAST_TEMPERATURE:g}",
            "temperature",
        )
    return replace(defaults, **given)
