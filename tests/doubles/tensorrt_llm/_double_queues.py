"""What the front end is answered through."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, NamedTuple


class ErrorResponse(NamedTuple):
    client_id: int
    error_msg: str
    request_id: int


class RequestError(RuntimeError):
    """An error of one request."""


def has_event_loop() -> bool:
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        return True
    return False


class AsyncQueue:
    """Filled by any thread, read in the event loop in which it was made."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self.sync_q = self

    def put(self, item: Any) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    async def get(self) -> Any:
        return await self._queue.get()
