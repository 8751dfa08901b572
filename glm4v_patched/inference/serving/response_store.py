"""An in-memory store of the conversations of ``/v1/responses``, to which later requests may refer.

All clients share one API key, so the key does not separate them. Ids are random, so only a client
that received an id knows it.
"""

import json
import threading
from collections import OrderedDict
from typing import Any

from .limits import ApiError

MAX_RESPONSES = 1000
MAX_STORED_BODIES = 4
"""Size limit of all stored conversations together, as a multiple of a request's size limit."""
MAX_ITEM_BYTES = 16 * 10**6
"""Size limit of all stored answers together. AI SDKs refer to answers by their ids."""
NOT_STORED_HINT = (
    "it was sent with store: false, was dropped to free memory, or is older than the server's "
    "last start: send the messages themselves in input"
)


class LruStore:
    """An LRU cache of JSON values with a maximum number of entries and of bytes."""

    def __init__(self, max_entries: int, max_bytes: int):
        self.max_entries, self.max_bytes = max_entries, max_bytes
        # Stored as JSON text, because its size is known and callers cannot change it.
        self._texts: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def put(self, key: str, value: Any) -> None:
        """Store a value; drop the least recently used ones beyond the limits."""
        text = json.dumps(value).encode()
        with self._lock:
            self._bytes -= len(self._texts.pop(key, b""))
            self._texts[key] = text
            self._bytes += len(text)
            while len(self._texts) > self.max_entries or self._bytes > self.max_bytes:
                _, oldest = self._texts.popitem(last=False)
                self._bytes -= len(oldest)

    def get(self, key: str) -> bytes | None:
        """Return the JSON of a value, or None."""
        with self._lock:
            if key in self._texts:
                self._texts.move_to_end(key)
            return self._texts.get(key)


class ResponseStore:
    """Stored responses, to which requests refer by ``previous_response_id`` and ``item_reference``.

    Args:
        max_body_bytes: Largest size of a request.
    """

    def __init__(self, max_body_bytes: int):
        max_bytes = MAX_STORED_BODIES * max_body_bytes
        self._conversations = LruStore(MAX_RESPONSES, max_bytes)
        # Answers are also stored on their own, without the images of the conversation: clients that
        # refer to an answer send the images with every request.
        self._items = LruStore(MAX_RESPONSES * 16, MAX_ITEM_BYTES)

    def save(self, items: list[dict[str, Any]], response: dict[str, Any]) -> None:
        """Store a response.

        Args:
            items: All messages of the conversation before the response.
            response: The response as the client gets it.
        """
        self._conversations.put(response["id"], [*items, *response["output"]])
        for item in response["output"]:
            self._items.put(item["id"], item)

    def conversation(self, response_id: str) -> bytes:
        """Return the JSON of the messages that ``previous_response_id`` refers to."""
        messages = self._conversations.get(response_id)
        if messages is None:
            key, quoted_id = "previous_response_id", json.dumps(response_id)
            message = f"{key}: there is no stored response {quoted_id}; {NOT_STORED_HINT}"
            raise ApiError(400, message, key, "previous_response_not_found")
        return messages

    def item(self, item_id: str, key: str) -> dict[str, Any]:
        """Return the message that an ``item_reference`` refers to.

        Args:
            key: The key of the reference in the request, for errors.
        """
        item = self._items.get(item_id)
        if item is None:
            message = f"{key}: there is no stored item {json.dumps(item_id)}; {NOT_STORED_HINT}"
            raise ApiError(404, message, key)
        return json.loads(item)
