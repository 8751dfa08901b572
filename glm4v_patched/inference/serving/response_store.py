"""Conversations of ``/v1/responses`` that later requests may refer to; in memory, within limits.

There is one API key, and ids are random: whoever knows an id has been sent it.
"""

import json
import threading
from collections import OrderedDict
from typing import Any

from .limits import ApiError

MAX_RESPONSES = 1000
LARGEST_BODIES = 4
"""The stored conversations may have the bytes of so many of the largest requests."""
MAX_ITEM_BYTES = 16 * 10**6
"""Of all stored answers: their texts alone, which AI SDKs refer to."""
CURE = (
    "it was sent with store: false, has been dropped to make room or is from before the server "
    "was started: send the messages themselves in input"
)


class Recent:
    """A mapping of JSON values that drops the least recently used beyond its limits."""

    def __init__(self, max_entries: int, max_bytes: int):
        self.max_entries, self.max_bytes = max_entries, max_bytes
        # As text: of the same size in memory as in the count, and safe from changes.
        self._texts: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def put(self, key: str, value: Any) -> None:
        text = json.dumps(value).encode()
        with self._lock:
            self._texts[key] = text
            self._bytes += len(text)
            while len(self._texts) > self.max_entries or self._bytes > self.max_bytes:
                _, oldest = self._texts.popitem(last=False)
                self._bytes -= len(oldest)

    def get(self, key: str) -> bytes | None:
        """Return the JSON of a value."""
        with self._lock:
            if key in self._texts:
                self._texts.move_to_end(key)
            return self._texts.get(key)


class ResponseStore:
    """What ``previous_response_id`` and ``item_reference`` stand for.

    Args:
        max_body_bytes: Of a request.
    """

    def __init__(self, max_body_bytes: int):
        max_bytes = LARGEST_BODIES * max_body_bytes
        self._conversations = Recent(MAX_RESPONSES, max_bytes)
        # Apart: clients that refer to items send their images again with every request.
        self._items = Recent(MAX_RESPONSES * 16, MAX_ITEM_BYTES)

    def save(self, items: list[dict[str, Any]], response: dict[str, Any]) -> None:
        """Keep a response.

        Args:
            items: All messages that it answers.
            response: As the client gets it.
        """
        self._conversations.put(response["id"], [*items, *response["output"]])
        for item in response["output"]:
            self._items.put(item["id"], item)

    def conversation(self, name: str) -> bytes:
        """Return the JSON of the messages that ``previous_response_id`` stands for."""
        found = self._conversations.get(name)
        if found is None:
            key = "previous_response_id"
            told = f"{key}: there is no stored response {json.dumps(name)}; {CURE}"
            raise ApiError(400, told, key, "previous_response_not_found")
        return found

    def item(self, name: str, key: str) -> dict[str, Any]:
        """Return the message that an ``item_reference`` at ``key`` stands for."""
        found = self._items.get(name)
        if found is None:
            raise ApiError(404, f"{key}: there is no stored item {json.dumps(name)}; {CURE}", key)
        return json.loads(found)
