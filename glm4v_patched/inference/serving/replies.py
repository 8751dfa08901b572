"""The JSON of answers, whole and streamed, as OpenAI's API has them."""

import json
import time
import uuid
from typing import Any

from .answer_queue import AnswerEnd
from .limits import ApiError
from .requests import Wanted


class TextReply:
    """Of ``/v1/completions``, to one request."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    made_at = "created"

    def __init__(self, wanted: Wanted):
        self.include_usage = wanted.stream_options.include_usage
        name = f"{self.prefix}-{uuid.uuid4().hex}"
        self.head = {"id": name, self.made_at: int(time.time()), "model": wanted.model}

    def whole(self, text: str, end: AnswerEnd) -> dict[str, Any]:
        usage = {"object": self.kind, "usage": self.usage(end)}
        return self.head | usage | {"choices": [self.choice(text, end.reason, is_whole=True)]}

    def begin(self) -> list[str]:
        """Events before the answer."""
        return []

    def more(self, text: str) -> str:
        """The event of more of the answer."""
        return self._chunk([self.choice(text)])

    def end(self, text: str, end: AnswerEnd) -> list[str]:
        """Events after the answer, which was ``text``."""
        usage = [self._chunk([], usage=self.usage(end))] if self.include_usage else []
        return [self._chunk([self.choice("", end.reason)]), *usage, "data: [DONE]\n\n"]

    def failed(self, error: ApiError) -> list[str]:
        """Events in place of the rest of an answer."""
        return [event(error.body())]

    def choice(
        self, text: str, reason: str | None = None, is_whole: bool = False
    ) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}

    def usage(self, end: AnswerEnd) -> dict[str, Any]:
        told = {"prompt_tokens": end.prompt_tokens, "completion_tokens": end.tokens}
        return told | {"total_tokens": end.prompt_tokens + end.tokens}

    def _chunk(self, choices: list[dict], **more: Any) -> str:
        return event(self.head | {"object": self.chunk_kind, "choices": choices} | more)


class ChatReply(TextReply):
    """Of ``/v1/chat/completions``."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def begin(self) -> list[str]:
        return [self._chunk([self.choice("") | {"delta": {"role": "assistant", "content": ""}}])]

    def choice(
        self, text: str, reason: str | None = None, is_whole: bool = False
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reason}
        if is_whole:
            return choice | {"message": {"role": "assistant", "content": text}}
        return choice | {"delta": {"content": text} if text else {}}


class ResponseReply(TextReply):
    """Of ``/v1/responses``."""

    prefix, made_at = "resp", "created_at"

    def __init__(self, wanted: Wanted):
        super().__init__(wanted)
        self.item = f"msg-{uuid.uuid4().hex}"
        self.place = {"item_id": self.item, "output_index": 0, "content_index": 0}
        self.number = 0
        self.said = {"store": wanted.store, "previous_response_id": wanted.previous_response_id}

    def begin(self) -> list[str]:
        item = self._item("", "in_progress") | {"content": []}
        return [
            self._event("created", response=self.whole("")),
            self._event("in_progress", response=self.whole("")),
            self._event("output_item.added", output_index=0, item=item),
            self._event("content_part.added", **self.place, part=self._part("")),
        ]

    def more(self, text: str) -> str:
        return self._event("output_text.delta", **self.place, delta=text, logprobs=[])

    def failed(self, error: ApiError) -> list[str]:
        told = error.body()["error"]
        # Some clients look for the error inside of the event, some for its parts beside the type.
        parts = {key: told[key] for key in ("code", "message", "param")}
        reason = {"code": "server_error", "message": told["message"]}
        response = self.whole("") | {"status": "failed", "error": reason}
        return [
            self._named("error", **parts, error=told),
            self._event("failed", response=response),
        ]

    def end(self, text: str, end: AnswerEnd) -> list[str]:
        response = self.whole(text, end)
        return [
            self._event("output_text.done", **self.place, text=text, logprobs=[]),
            self._event("content_part.done", **self.place, part=self._part(text)),
            self._event("output_item.done", output_index=0, item=response["output"][0]),
            self._event(response["status"], response=response),
        ]

    def whole(self, text: str, end: AnswerEnd | None = None) -> dict[str, Any]:
        """Without an end, of an answer that is on its way."""
        cut = end is not None and end.reason == "length"
        status = "in_progress" if end is None else "incomplete" if cut else "completed"
        return (
            self.head
            | self.said
            | {
                "object": "response",
                "status": status,
                "output": [] if end is None else [self._item(text, status)],
                "usage": None if end is None else self.usage(end),
                "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
                "error": None,
                "instructions": None,
                "metadata": {},
                "parallel_tool_calls": False,
                "tool_choice": "none",
                "tools": [],
            }
        )

    def usage(self, end: AnswerEnd) -> dict[str, Any]:
        return {
            "input_tokens": end.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": end.tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": end.prompt_tokens + end.tokens,
        }

    def _event(self, kind: str, **values: Any) -> str:
        return self._named(f"response.{kind}", **values)

    def _named(self, name: str, **values: Any) -> str:
        told = {"type": name, "sequence_number": self.number} | values
        self.number += 1
        return f"event: {name}\n{event(told)}"

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": []}

    def _item(self, text: str, status: str) -> dict[str, Any]:
        said = {"type": "message", "role": "assistant", "content": [self._part(text)]}
        return {"id": self.item, "status": status} | said


def event(value: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
