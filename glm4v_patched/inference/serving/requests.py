"""Parse and check requests of OpenAI's API; needs no torch.

The server refuses options that it does not support, unless their value is a no-op.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ...data.messages import describe_value, images_of
from ..questions import MAX_PENALTY, MIN_PENALTY, MIN_TEMPERATURE, Generation
from .conversation import drop_neutral_keys, invalid_key, read_messages
from .limits import ApiError, ServerLimits, format_key
from .request_images import check_and_fetch_images
from .response_store import ResponseStore

# Keys without effect on an answer: ids of users and conversations, and options of caches.
IGNORED_KEYS: tuple[str, ...] = (
    "cache_salt",
    "chat_id",
    "conversation_id",
    "folder_id",
    "id",
    "message_id",
    "metadata",
)
IGNORED_KEYS += ("parent_id", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention")
IGNORED_KEYS += ("request_id", "safety_identifier", "session_id", "store", "user", "user_id")
# Unsupported keys, with the values that are no-ops and therefore accepted.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
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
    "text": (
        {},
        {"format": {"type": "text"}},
        {"verbosity": "medium"},
        {"format": {"type": "text"}, "verbosity": "medium"},
    ),
    "tool_choice": ("none", "auto"),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
}
# Unsupported keys that are accepted only if they are 0, false or empty.
OFF_KEYS = ["background", "conversation", "continue_final_message", "echo", "files", "functions"]
OFF_KEYS += ["filter_ids", "ignore_eos", "include", "include_stop_str_in_output", "logit_bias"]
OFF_KEYS += ["logprobs", "min_p", "min_tokens", "priority", "stop_token_ids", "suffix", "tool_ids"]
OFF_KEYS += ["tool_servers", "tools", "top_logprobs", "use_beam_search"]
NEUTRAL_VALUES |= dict.fromkeys(OFF_KEYS, ())  # () stands for 0, false and empty values
MAX_TOKENS_KEYS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
ALIASES = ("glm-4v", "glm-4v-9b")
"""Names that GLM-4's own clients use for any glm-4v."""
PLACEHOLDER_NAMES = ("dummy",)
"""Model names that huggingface_hub's client sends if its user gives an address and no model."""
MAX_TEMPERATURE = 100

Text = Annotated[str, Field(min_length=1)]
TextAsList = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
"""Accept one text in place of a list of texts."""
StopText = Annotated[str, Field(min_length=1, max_length=1000)]
AtLeastOne = Annotated[int, Field(ge=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class _StrictModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(_StrictModel):
    """``stream_options`` of a request."""

    include_usage: bool = False
    include_obfuscation: bool = False


class BaseRequest(_StrictModel):
    """The keys that all requests share.

    ``top_k`` and ``repetition_penalty`` are additions to OpenAI's API, the same as vLLM's.
    """

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=MIN_PENALTY, le=MAX_PENALTY)] | None = None
    presence_penalty: Penalty = 0
    frequency_penalty: Penalty = 0
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[list[StopText], TextAsList, Field(max_length=16)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()


Messages = Annotated[list[dict[str, Any]], Field(min_length=1)]
TextAsMessages = BeforeValidator(
    lambda value: [{"role": "user", "content": value}] if isinstance(value, str) else value
)
"""Accept one text in place of a list of messages."""
Included = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""Values of ``include``. They have no effect, because no answer of this server has such data."""


class ChatRequest(BaseRequest):
    """A request of ``/v1/chat/completions``."""

    messages: Messages
    max_tokens: AtLeastOne | None = None
    max_completion_tokens: AtLeastOne | None = None


class TextRequest(BaseRequest):
    """A request of ``/v1/completions``, which continues a text."""

    prompt: Annotated[list[Text], TextAsList, Field(min_length=1, max_length=1)]
    max_tokens: AtLeastOne | None = None


class ResponseRequest(BaseRequest):
    """A request of ``/v1/responses``."""

    input: Annotated[Messages, TextAsMessages]
    instructions: str | None = None
    previous_response_id: Text | None = None
    store: bool = True
    include: list[Included] = []
    max_output_tokens: AtLeastOne | None = None


AnyRequest = ChatRequest | TextRequest | ResponseRequest


class ParsedRequest(BaseRequest):
    """A parsed request of any endpoint.

    Args:
        prompt: Messages for the processor, with the bytes of image files; or a text to continue.
        max_tokens: Maximum number of tokens in the answer; None if the client sets none.
        prompt_key: The key under which the request has the prompt, for errors.
        items: The conversation's messages before the answer, stored with a response.
        store: Whether the response is stored.
    """

    prompt: list[dict] | str
    generation: Generation
    model: str = ""
    max_tokens: int | None = None
    prompt_key: str = "messages"
    items: list[dict] = []
    store: bool = False
    previous_response_id: str | None = None

    def can_batch_with(self, other: "ParsedRequest") -> bool:
        """Return whether both may be answered in one batch.

        Requests with a seed are answered alone, because sampled tokens depend on the batch.
        """
        if self.seed is not None or other.seed is not None:
            return False
        return self._batch_key() == other._batch_key()

    def _batch_key(self) -> tuple[Any, ...]:
        """Return what must be the same for all requests of a batch."""
        return self.model, self.generation, self.penalties, isinstance(self.prompt, str)

    @property
    def penalties(self) -> tuple[float, float]:
        """OpenAI's presence and frequency penalty."""
        return self.presence_penalty, self.frequency_penalty

    @property
    def num_images(self) -> int:
        """Number of images in the prompt."""
        return 0 if isinstance(self.prompt, str) else len(images_of(self.prompt))


class StoredContext(NamedTuple):
    """Stored responses that a request may refer to, and checks for them.

    Args:
        limits: Limits for the messages of the request and the stored messages together.
        count_bytes: Adds the bytes of stored messages to the request's size; raises ``ApiError`` if
            all requests together exceed their limit.
    """

    responses: ResponseStore
    limits: ServerLimits
    count_bytes: Callable[[int], None]


def read_request(
    request_type: type[AnyRequest],
    body: dict[str, Any],
    names: Sequence[str],
    defaults: Generation,
    stored: StoredContext | None = None,
) -> ParsedRequest:
    """Parse the JSON of a request whose images :class:`guard.Guard` has checked.

    Args:
        names: Names of the served models; requests without a model use the first.
        defaults: Values of generation options that the request does not set.
        stored: Responses that a :class:`ResponseRequest` may refer to.

    Raises:
        ApiError: Names the key with the problem.
    """
    fields = request_type.model_fields
    values = {k: v for k, v in body.items() if k in fields and v is not None}
    other_values = {k: v for k, v in body.items() if k not in fields}
    try:
        # Unknown keys remain, and model_validate refuses them.
        values |= drop_neutral_keys(other_values, IGNORED_KEYS, NEUTRAL_VALUES)
        request = request_type.model_validate(values)
    except ValidationError as error:
        raise _validation_error(error, request_type) from None
    token_limits = {k: v for k, v in request if k in MAX_TOKENS_KEYS and v is not None}
    if len({*token_limits.values()}) > 1:
        both = " and ".join(f"{key} is {value}" for key, value in token_limits.items())
        raise ApiError(400, f"{both}, but both mean the same: send one of them", "max_tokens")
    common_fields = {key: value for key, value in request if key in BaseRequest.model_fields}
    common_fields["model"] = resolve_model_name(request.model, names)
    return ParsedRequest.model_construct(
        **common_fields | _parse_prompt(request, stored),
        generation=_parse_generation(request, defaults),
        max_tokens=next(iter(token_limits.values()), None),
    )


def _parse_prompt(request: AnyRequest, stored: StoredContext | None) -> dict[str, Any]:
    """Return the prompt and related fields of :class:`ParsedRequest`."""
    if isinstance(request, TextRequest):
        return {"prompt": request.prompt[0], "prompt_key": "prompt"}
    if isinstance(request, ChatRequest):
        messages = read_messages(_with_keys("messages", request.messages))
        return {"prompt": messages, "prompt_key": "messages"}
    assert stored is not None
    previous_items, new_items = [], []
    if (previous_id := request.previous_response_id) is not None:
        content = stored.responses.conversation(previous_id)
        stored.count_bytes(len(content))  # small requests may refer to large conversations
        previous_items = json.loads(content)
    for key, item in _with_keys("input", request.input):
        if item.get("type") == "item_reference" or [*item] == ["id"]:
            item = stored.responses.item(str(item.get("id")), key)
        new_items.append((key, item))
    items = [*previous_items, *(item for _, item in new_items)]
    if items != request.input:  # the guard has not checked stored messages
        check_and_fetch_images({"input": items}, stored.limits)
    system = [("instructions", {"role": "system", "content": request.instructions or ""})]
    previous = [("previous_response_id", item) for item in previous_items]
    return {
        "items": items,
        "store": request.store,
        "previous_response_id": previous_id,
        "prompt": read_messages([*system, *previous, *new_items]),
        "prompt_key": "input",
    }


def _with_keys(key: str, items: Sequence[dict]) -> list[tuple[str, dict]]:
    """Return each item of a list with its path in the request, such as ``input[0]``."""
    return [(f"{key}[{index}]", item) for index, item in enumerate(items)]


def _validation_error(error: ValidationError, request_type: type[AnyRequest]) -> ApiError:
    """Convert pydantic's first error to an error for the client."""
    first = error.errors(include_url=False)[0]
    key = format_key(first["loc"])
    problem = first["msg"]
    if first["type"] == "extra_forbidden":
        problem = (
            f"this key is not supported; expected one of {', '.join(request_type.model_fields)}"
        )
    elif first["type"] != "missing":
        problem += f", not {describe_value(first['input'])}"
    return ApiError(400, f"{key}: {problem}", key)


def resolve_model_name(name: str | None, names: Sequence[str]) -> str:
    """Return the served model that a client's ``name`` refers to, or raise ``ApiError``."""
    if name in names:
        return str(name)
    if name is None or name in ALIASES or (name in PLACEHOLDER_NAMES and len(names) == 1):
        return names[0]
    served = " and ".join(map(describe_value, names))
    message = f"there is no model {describe_value(name)}; this server has {served}"
    raise ApiError(404, message, "model", "model_not_found")


def _parse_generation(request: BaseRequest, defaults: Generation) -> Generation:
    """Return the request's generation options, with defaults for those that it does not set."""
    names = ("temperature", "top_p", "top_k", "repetition_penalty")
    options: dict[str, Any] = {k: v for k, v in request if k in names and v is not None}
    if options.get("top_p") == 1:  # all tokens
        options["top_p"] = None
    if options.get("top_k") in (-1, 0):  # vLLM's values for all tokens
        options["top_k"] = None
    if 0 in (options.get("temperature"), options.get("top_p")):  # greedy
        options |= {"temperature": None, "top_p": None, "top_k": None}
    elif options.get("temperature", MIN_TEMPERATURE) < MIN_TEMPERATURE:
        problem = f"is {options['temperature']:g}; expected 0 (greedy), or at least"
        raise invalid_key("temperature", f"{problem} {MIN_TEMPERATURE:g}")
    return replace(defaults, **options)
