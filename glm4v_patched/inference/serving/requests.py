"""Requests of OpenAI's API, checked; needs no torch.

What the server cannot do is refused, unless the request asks for what it does anyway.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ...data.messages import describe_value, images_of
from ..questions import LEAST_PENALTY, LEAST_TEMPERATURE, MOST_PENALTY, Generation
from .conversation import drop_neutral, invalid, read_messages
from .limits import ApiError, ServerLimits, key_of
from .request_images import check_and_fetch_images
from .response_store import ResponseStore

# Keys that change nothing about an answer: names for who asks and in which conversation, and what
# other servers cache.
IGNORED: tuple[str, ...] = (
    "cache_salt",
    "chat_id",
    "conversation_id",
    "folder_id",
    "id",
    "message_id",
    "metadata",
)
IGNORED += ("parent_id", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention")
IGNORED += ("request_id", "safety_identifier", "session_id", "store", "user", "user_id")
# Of what the server cannot do, the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "chat_template_kwargs": ({}, {"enable_thinking": False}),
    "function_call": ("none", "auto"),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "reasoning": ({}, {"effort": "none"}),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "text": ({}, {"format": {"type": "text"}}, {"verbosity": "medium"}),
    "tool_choice": ("none", "auto"),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
}
NEUTRAL["text"] += (NEUTRAL["text"][1] | NEUTRAL["text"][2],)
# 0, false, or nothing in it.
OFF = ["background", "conversation", "continue_final_message", "echo", "files", "functions"]
OFF += ["filter_ids", "ignore_eos", "include", "include_stop_str_in_output", "logit_bias"]
OFF += ["logprobs", "min_p", "min_tokens", "priority", "stop_token_ids", "suffix", "tool_ids"]
OFF += ["tool_servers", "tools", "top_logprobs", "use_beam_search"]
NEUTRAL |= dict.fromkeys(OFF, ())
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
ALIASES = ("glm-4v", "glm-4v-9b")
"""What GLM-4's own clients call any glm-4v."""
PLACEHOLDERS = ("dummy",)
"""What huggingface_hub's client sends where it is given an address and no model."""
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


Messages = Annotated[list[dict[str, Any]], Field(min_length=1)]
AsMessages = BeforeValidator(
    lambda given: [{"role": "user", "content": given}] if isinstance(given, str) else given
)
Included = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""Of what no answer here has."""


class ChatRequest(Request):
    """Of ``/v1/chat/completions``."""

    messages: Messages
    max_tokens: AtLeastOne | None = None
    max_completion_tokens: AtLeastOne | None = None


class TextRequest(Request):
    """Of ``/v1/completions``, which continues a text."""

    prompt: Annotated[list[Text], Texts, Field(min_length=1, max_length=1)]
    max_tokens: AtLeastOne | None = None


class ResponseRequest(Request):
    """Of ``/v1/responses``."""

    input: Annotated[Messages, AsMessages]
    instructions: str | None = None
    previous_response_id: Text | None = None
    store: bool = True
    include: list[Included] = []
    max_output_tokens: AtLeastOne | None = None


Asking = ChatRequest | TextRequest | ResponseRequest


class Wanted(Request):
    """What is to be answered.

    Args:
        prompt: Messages as the processor takes them, with images as the bytes of files; or a text
            to continue.
        max_tokens: Of the answer, if the client says so.
        key: Of the request, under which the prompt is.
        items: Messages that are stored with the response.
    """

    prompt: list[dict] | str
    generation: Generation
    model: str = ""
    max_tokens: int | None = None
    key: str = "messages"
    items: list[dict] = []
    store: bool = False
    previous_response_id: str | None = None

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
    def images(self) -> int:
        return 0 if isinstance(self.prompt, str) else len(images_of(self.prompt))


class Stored(NamedTuple):
    """What a request may refer to, the limits of all that it then has, and what counts the bytes
    that it is read for it."""

    responses: ResponseStore
    limits: ServerLimits
    hold: Callable[[int], None]


def read_request(
    kind: type[Asking],
    body: dict[str, Any],
    names: Sequence[str],
    defaults: Generation,
    stored: Stored | None = None,
) -> Wanted:
    """Check the JSON of a request, whose images :class:`guard.Guard` has checked.

    Args:
        names: Of the models that are served; the first is that of a request without one.
        defaults: What is generated where the request does not say.
        stored: What a :class:`ResponseRequest` may refer to.
    """
    own = {k: v for k, v in body.items() if k in kind.model_fields and v is not None}
    others = {key: value for key, value in body.items() if key not in kind.model_fields}
    try:
        request = kind.model_validate(own | drop_neutral(others, IGNORED, NEUTRAL))
    except ValidationError as error:
        raise _as_api_error(error, kind) from None
    lengths = {k: v for k, v in request if k in LENGTHS and v is not None}
    if len({*lengths.values()}) > 1:
        told = " and ".join(f"{key} is {value}" for key, value in lengths.items())
        raise ApiError(400, f"{told}, which say the same: give one of them", "max_tokens")
    given = {key: value for key, value in request if key in Request.model_fields}
    given["model"] = model_called(request.model, names)
    return Wanted.model_construct(
        **given | _prompt(request, stored),
        generation=_generation(request, defaults),
        max_tokens=next(iter(lengths.values()), None),
    )


def _prompt(request: Asking, stored: Stored | None) -> dict[str, Any]:
    """Return what is to be answered, in fields of :class:`Wanted`."""
    if isinstance(request, TextRequest):
        return {"prompt": request.prompt[0], "key": "prompt"}
    if isinstance(request, ChatRequest):
        return {"prompt": read_messages(_keyed("messages", request.messages)), "key": "messages"}
    assert stored is not None
    before, own = [], []
    if (earlier := request.previous_response_id) is not None:
        text = stored.responses.conversation(earlier)
        stored.hold(len(text))  # a small request may refer to a large one
        before = json.loads(text)
    for key, item in _keyed("input", request.input):
        is_reference = item.get("type") == "item_reference" or [*item] == ["id"]
        own.append((key, stored.responses.item(str(item.get("id")), key) if is_reference else item))
    items = [*before, *(item for _, item in own)]
    if items != request.input:  # of which the guard has seen a part
        check_and_fetch_images({"input": items}, stored.limits)
    system = [("instructions", {"role": "system", "content": request.instructions or ""})]
    said = [*system, *(("previous_response_id", item) for item in before), *own]
    told = {"items": items, "store": request.store, "previous_response_id": earlier}
    return told | {"prompt": read_messages(said), "key": "input"}


def _keyed(key: str, items: Sequence[dict]) -> list[tuple[str, dict]]:
    return [(f"{key}[{number}]", item) for number, item in enumerate(items)]


def _as_api_error(error: ValidationError, kind: type[Asking]) -> ApiError:
    first = error.errors(include_url=False)[0]
    key = key_of(first["loc"])
    told = first["msg"]
    if first["type"] == "extra_forbidden":
        told = f"is not read; expected one of {', '.join(kind.model_fields)}"
    elif first["type"] != "missing":
        told += f", and it is {describe_value(first['input'])}"
    return ApiError(400, f"{key}: {told}", key)


def model_called(name: str | None, names: Sequence[str]) -> str:
    """Which of the models that are served a client means; raises ``ApiError`` if none."""
    if name in names:
        return str(name)
    if name is None or name in ALIASES or (name in PLACEHOLDERS and len(names) == 1):
        return names[0]
    there = " and ".join(map(describe_value, names))
    told = f"there is no model {describe_value(name)}; this server has {there}"
    raise ApiError(404, told, "model", "model_not_found")


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
        told = f"is {given['temperature']:g}; expected 0, for the likeliest tokens, or at least "
        raise invalid("temperature", f"{told}{LEAST_TEMPERATURE:g}")
    return replace(defaults, **given)
