"""The JSON of answers, whole and streamed, as OpenAI's API has them."""

import json
import time
import uuid
from typing import Any

from .answer_queue import Ended


class Reply:
    """Of an endpoint, to one request.

    Args:
        model: Its name.
        prompt_tokens: Of the request.
        include_usage: Whether a stream ends with the number of tokens.
    """

    prefix, made_at = "", "created"

    def __init__(self, model: str, prompt_tokens: int, include_usage: bool = False):
        self.prompt_tokens, self.include_usage = prompt_tokens, include_usage
        name = f"{self.prefix}-{uuid.uuid4().hex}"
        self.head = {"id": name, self.made_at: int(time.time()), "model": model}

    def whole(self, text: str, end: Ended) -> dict[str, Any]:
        raise NotImplementedError

    def begin(self) -> list[str]:
        """Events before the answer."""
        return []

    def more(self, text: str) -> str:
        """The event of more of the answer."""
        raise NotImplementedError

    def end(self, text: str, end: Ended) -> list[str]:
        """Events after the answer, which was ``text``."""
        raise NotImplementedError


class TextReply(Reply):
    """Of ``/v1/completions``."""

    prefix, whole_kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def whole(self, text: str, end: Ended) -> dict[str, Any]:
        choice = self.choice(text, end.reason, is_whole=True)
        return self.head | {
            "object": self.whole_kind,
            "choices": [choice],
            "usage": self._usage(end),
        }

    def more(self, text: str) -> str:
        return self._chunk([self.choice(text)])

    def end(self, text: str, end: Ended) -> list[str]:
        usage = [self._chunk([], usage=self._usage(end))] if self.include_usage else []
        return [self._chunk([self.choice("", end.reason)]), *usage, "data: [DONE]\n\n"]

    def choice(
        self, text: str, reason: str | None = None, is_whole: bool = False
    ) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}

    def _chunk(self, choices: list[dict], **more: Any) -> str:
        return event(self.head | {"object": self.chunk_kind, "choices": choices} | more)

    def _usage(self, end: Ended) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": end.tokens,
            "total_tokens": self.prompt_tokens + end.tokens,
        }


class ChatReply(TextReply):
    """Of ``/v1/chat/completions``."""

    prefix, whole_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def begin(self) -> list[str]:
        return [self._chunk([self.choice("") | {"delta": {"role": "assistant", "content": ""}}])]

    def choice(
        self, text: str, reason: str | None = None, is_whole: bool = False
    ) -> dict[str, Any]:
        said = {"role": "assistant", "content": text}
        if not is_whole:
            said = {"content": text} if text else {}
        key = "message" if is_whole else "delta"
        return {"index": 0, key: said, "logprobs": None, "finish_reason": reason}


class ResponseReply(Reply):
    """Of ``/v1/responses``."""

    prefix, made_at = "resp", "created_at"

    def __init__(self, model: str, prompt_tokens: int, include_usage: bool = False):
        super().__init__(model, prompt_tokens)
        self.item = f"msg-{uuid.uuid4().hex}"
        self.number = 0

    def whole(self, text: str, end: Ended) -> dict[str, Any]:
        return self._response(text, end)

    def begin(self) -> list[str]:
        item, part = self._item("", "in_progress"), self._part("")
        return [
            self._event("created", response=self._response("")),
            self._event("in_progress", response=self._response("")),
            self._event("output_item.added", output_index=0, item=item | {"content": []}),
            self._event("content_part.added", **self._place(), part=part),
        ]

    def more(self, text: str) -> str:
        return self._event("output_text.delta", **self._place(), delta=text, logprobs=[])

    def end(self, text: str, end: Ended) -> list[str]:
        response = self._response(text, end)
        item = response["output"][0]
        place = self._place()
        return [
            self._event("output_text.done", **place, text=text, logprobs=[]),
            self._event("content_part.done", **place, part=self._part(text)),
            self._event("output_item.done", output_index=0, item=item),
            self._event(response["status"], response=response),
        ]

    def _event(self, kind: str, **values: Any) -> str:
        name = f"response.{kind}"
        told = {"type": name, "sequence_number": self.number} | values
        self.number += 1
        return f"event: {name}\n{event(told)}"

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.item, "output_index": 0, "content_index": 0}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": []}

    def _item(self, text: str, status: str) -> dict[str, Any]:
        content = [self._part(text)]
        said = {"type": "message", "role": "assistant", "content": content}
        return {"id": self.item, "status": status} | said

    def _response(self, text: str, end: Ended | None = None) -> dict[str, Any]:
        cut = end is not None and end.reason == "length"
        status = "in_progress" if end is None else "incomplete" if cut else "completed"
        tokens = 0 if end is None else end.tokens
        usage = {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt_tokens + tokens,
        }
        return self.head | {
            "object": "response",
            "status": status,
            "output": [] if end is None else [self._item(text, status)],
            "usage": None if end is None else usage,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": None,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": False,
            "tool_choice": "none",
            "tools": [],
        }


def event(value: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
