"""The JSON of OpenAI's API for answers, complete and streamed."""

import json
import time
import uuid
from typing import Any

from .answer_queue import AnswerEnd
from .limits import ApiError
from .requests import ParsedRequest


class TextReply:
    """The reply to one request of ``/v1/completions``."""

    id_prefix, object_type, chunk_object_type = "cmpl", "text_completion", "text_completion"
    created_key = "created"

    def __init__(self, request: ParsedRequest):
        self.include_usage = request.stream_options.include_usage
        reply_id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self.common_fields = {
            "id": reply_id,
            self.created_key: int(time.time()),
            "model": request.model,
        }

    def full_response(self, text: str, end: AnswerEnd) -> dict[str, Any]:
        """Return the body of a reply that is not streamed."""
        return self.common_fields | {
            "object": self.object_type,
            "usage": self.usage(end),
            "choices": [self.choice(text, end.reason, is_full=True)],
        }

    def begin(self) -> list[str]:
        """Return the events before the answer."""
        return []

    def more(self, text: str) -> str:
        """Return the event with the next text of the answer."""
        return self._chunk([self.choice(text)])

    def end(self, text: str, end: AnswerEnd) -> list[str]:
        """Return the events after the answer, which is ``text``."""
        usage = [self._chunk([], usage=self.usage(end))] if self.include_usage else []
        return [self._chunk([self.choice("", end.reason)]), *usage, "data: [DONE]\n\n"]

    def failed(self, error: ApiError) -> list[str]:
        """Return the events that replace the rest of an answer after an error."""
        return [server_sent_event(error.body())]

    def choice(self, text: str, reason: str | None = None, is_full: bool = False) -> dict[str, Any]:
        """Return the only element of ``choices``.

        Args:
            reason: OpenAI's finish_reason; None while the answer goes on.
            is_full: Whether the reply is not streamed, so that ``text`` is the full answer.
        """
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}

    def usage(self, end: AnswerEnd) -> dict[str, Any]:
        """Return the field ``usage``, with the numbers of tokens."""
        usage = {"prompt_tokens": end.num_prompt_tokens, "completion_tokens": end.num_tokens}
        return usage | {"total_tokens": end.num_prompt_tokens + end.num_tokens}

    def _chunk(self, choices: list[dict], **fields: Any) -> str:
        chunk = {"object": self.chunk_object_type, "choices": choices}
        return server_sent_event(self.common_fields | chunk | fields)


class ChatReply(TextReply):
    """The reply to one request of ``/v1/chat/completions``."""

    id_prefix, object_type = "chatcmpl", "chat.completion"
    chunk_object_type = "chat.completion.chunk"

    def begin(self) -> list[str]:
        return [self._chunk([self.choice("") | {"delta": {"role": "assistant", "content": ""}}])]

    def choice(self, text: str, reason: str | None = None, is_full: bool = False) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reason}
        if is_full:
            return choice | {"message": {"role": "assistant", "content": text}}
        return choice | {"delta": {"content": text} if text else {}}


class ResponseReply(TextReply):
    """The reply to one request of ``/v1/responses``."""

    id_prefix, created_key = "resp", "created_at"

    def __init__(self, request: ParsedRequest):
        super().__init__(request)
        self.item_id = f"msg-{uuid.uuid4().hex}"
        self.content_location = {"item_id": self.item_id, "output_index": 0, "content_index": 0}
        self.sequence_number = 0
        previous = request.previous_response_id
        self.request_fields = {"store": request.store, "previous_response_id": previous}

    def begin(self) -> list[str]:
        item = self._item("", "in_progress") | {"content": []}
        return [
            self._event("created", response=self.full_response("")),
            self._event("in_progress", response=self.full_response("")),
            self._event("output_item.added", output_index=0, item=item),
            self._event("content_part.added", **self.content_location, part=self._part("")),
        ]

    def more(self, text: str) -> str:
        return self._event("output_text.delta", **self.content_location, delta=text, logprobs=[])

    def failed(self, error: ApiError) -> list[str]:
        body = error.body()["error"]
        # Some clients read the event's key "error", others the keys code, message and param.
        fields = {key: body[key] for key in ("code", "message", "param")}
        reason = {"code": "server_error", "message": body["message"]}
        response = self.full_response("") | {"status": "failed", "error": reason}
        return [
            self._named_event("error", **fields, error=body),
            self._event("failed", response=response),
        ]

    def end(self, text: str, end: AnswerEnd) -> list[str]:
        response = self.full_response(text, end)
        return [
            self._event("output_text.done", **self.content_location, text=text, logprobs=[]),
            self._event("content_part.done", **self.content_location, part=self._part(text)),
            self._event("output_item.done", output_index=0, item=response["output"][0]),
            self._event(response["status"], response=response),
        ]

    def full_response(self, text: str, end: AnswerEnd | None = None) -> dict[str, Any]:
        """Return the response; without ``end``, the answer is in progress."""
        is_cut = end is not None and end.reason == "length"
        status = "incomplete" if is_cut else "completed"
        if end is None:
            status = "in_progress"
        return (
            self.common_fields
            | self.request_fields
            | {
                "object": "response",
                "status": status,
                "output": [] if end is None else [self._item(text, status)],
                "usage": None if end is None else self.usage(end),
                "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
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
            "input_tokens": end.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": end.num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": end.num_prompt_tokens + end.num_tokens,
        }

    def _event(self, kind: str, **values: Any) -> str:
        return self._named_event(f"response.{kind}", **values)

    def _named_event(self, name: str, **values: Any) -> str:
        event = {"type": name, "sequence_number": self.sequence_number} | values
        self.sequence_number += 1
        return f"event: {name}\n{server_sent_event(event)}"

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": []}

    def _item(self, text: str, status: str) -> dict[str, Any]:
        message = {"type": "message", "role": "assistant", "content": [self._part(text)]}
        return {"id": self.item_id, "status": status} | message


def server_sent_event(value: dict[str, Any]) -> str:
    """Return the line of a server-sent event with JSON data."""
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
