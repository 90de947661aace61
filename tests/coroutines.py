"""Runs coroutines, whatever runs in the calling thread."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that ran on an event loop of its own, in a thread of its own.

    Playwright's synchronous interface leaves a loop running in the main thread for as long as a
    browser is open, so `asyncio.run` would fail there after a test of the viewer.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()
