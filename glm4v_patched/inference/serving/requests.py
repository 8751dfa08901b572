"""Requests for chat completions, checked; needs no torch.

What the server cannot do is refused, unless the request asks for what it does anyway.
"""

import json
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...data.formats import read_messages
from ...data.messages import as_words, check_messages, replace_pictures
from ..questions import LEAST_PENALTY, LEAST_TEMPERATURE, MOST_PENALTY, Generation
from .errors import ApiError
from .limits import Limits
from .pictures import Pictures

# Keys that change nothing about an answer.
IGNORED = ("metadata", "prompt_cache_key", "safety_identifier", "user")
# Of what the server cannot do, the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}
ROLES = {"developer": "system"}
MOST_STOP_CHARACTERS = 1000

Text = Annotated[str, Field(min_length=1)]
AtLeastOne = Annotated[int, Field(ge=1)]
Penalty = Annotated[float, Field(ge=LEAST_PENALTY, le=MOST_PENALTY)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False


class ChatRequest(_Strict):
    """The keys of OpenAI's API that this server reads; ``top_k`` and ``repetition_penalty`` are
    additions, as vLLM has them."""

    messages: list[dict[str, Any]]
    model: str | None = None
    max_tokens: AtLeastOne | None = None
    max_completion_tokens: AtLeastOne | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: AtLeastOne | None = None
    repetition_penalty: Penalty | None = None
    seed: Seed | None = None
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()


@dataclass(frozen=True)
class Wanted:
    """What is to be answered.

    Args:
        messages: As the processor takes them; pictures are the bytes of files.
        max_tokens: Of the answer, if the client says so.
        seed: Of what is drawn, if the client says so.
        stop: Texts before which the answer ends.
    """

    messages: list[dict]
    generation: Generation
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False


def read_request(body: Any, name: str, defaults: Generation, limits: Limits) -> Wanted:
    """Check the JSON of a request.

    Args:
        name: Of the model that is served.
        defaults: What is generated where the request does not say.

    Raises:
        ApiError: says which key is wrong, and what is expected.
    """
    request = _checked(body)
    if request.model not in (None, name):
        raise ApiError(
            404,
            f"there is no model {as_words(request.model)}; this server has {as_words(name)}",
            "model",
            "model_not_found",
        )
    longest = [request.max_tokens, request.max_completion_tokens]
    if None not in longest and longest[0] != longest[1]:
        raise ApiError(
            400,
            f"max_tokens is {longest[0]} and max_completion_tokens {longest[1]}, which say the "
            "same: give one of them",
            "max_tokens",
        )
    return Wanted(
        messages=_messages(request.messages, limits),
        generation=_generation(request, defaults),
        max_tokens=next((n for n in longest if n is not None), None),
        seed=request.seed,
        stop=_stop(request.stop),
        stream=request.stream,
        include_usage=request.stream_options.include_usage,
    )


def _checked(body: Any) -> ChatRequest:
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is {as_words(body)}; expected an object")
    # null is how clients leave a key out.
    given = {k: v for k, v in body.items() if v is not None and k not in IGNORED}
    for key in NEUTRAL.keys() & given.keys():
        value = given.pop(key)
        if not any(_are_equal(value, each) for each in NEUTRAL[key]):
            expected = " or ".join(json.dumps(each) for each in NEUTRAL[key])
            raise ApiError(
                400,
                f"{key} is {as_words(value)}, which this server cannot do; expected {expected}, or "
                "leave it out",
                key,
                "unsupported_parameter",
            )
    try:
        return ChatRequest.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        told = first["msg"]
        if first["type"] == "extra_forbidden":
            told = f"is not read; expected one of {', '.join(ChatRequest.model_fields)}"
        elif first["type"] != "missing":
            told += f", and it is {as_words(first['input'])}"
        raise ApiError(400, f"{key}: {told}", key) from None


def _are_equal(one: Any, other: Any) -> bool:
    """As JSON has it, where true is not 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _stop(given: str | list[str] | None) -> tuple[str, ...]:
    stop = (given,) if isinstance(given, str) else tuple(given or ())
    longest = max(map(len, stop), default=0)
    if longest > MOST_STOP_CHARACTERS:
        raise ApiError(
            400,
            f"stop: a text has {longest:,} characters; this server takes {MOST_STOP_CHARACTERS:,}: "
            "give how it begins",
            "stop",
        )
    return stop


def _messages(given: list[dict[str, Any]], limits: Limits) -> list[dict]:
    # Clients send messages back as they got them, with keys that are null.
    plain = [{k: v for k, v in m.items() if v is not None or k == "content"} for m in given]
    for message in plain:
        role: Any = message.get("role")
        if isinstance(role, str):
            message["role"] = ROLES.get(role, role)
        # Of files of data.
        for key in ("train", "loss", "weight", "image"):
            if key in message:
                raise ApiError(400, f"messages: the key {as_words(key)} is not read", "messages")
    found: dict[str, bytes] = {}
    pictures = Pictures(limits)

    def keep(source: Any) -> str:
        key = str(len(found))
        found[key] = pictures.bytes_of(source)
        return key

    try:
        messages = check_messages(read_messages({"messages": plain}), keep, to_learn=False)
    except ValueError as error:
        raise ApiError(400, str(error), "messages") from None
    if messages[-1]["role"] == "assistant":
        raise ApiError(
            400, "messages end with the assistant; expected a question of the user", "messages"
        )
    return replace_pictures(messages, found.__getitem__)


def _generation(request: ChatRequest, defaults: Generation) -> Generation:
    given: dict[str, Any] = {
        name: value
        for name in ("temperature", "top_p", "top_k", "repetition_penalty")
        if (value := getattr(request, name)) is not None
    }
    if given.get("top_p") == 1:  # of all tokens: no choice among them
        given["top_p"] = None
    if given.get("temperature") == 0:  # OpenAI's word for greedy
        given |= {"temperature": None, "top_p": None, "top_k": None}
    elif given.get("temperature", LEAST_TEMPERATURE) < LEAST_TEMPERATURE:
        raise ApiError(
            400,
            f"temperature is {given['temperature']:g}; expected 0, for the likeliest tokens, or at "
            f"least {LEAST_TEMPERATURE:g}",
            "temperature",
        )
    return replace(defaults, **given)
