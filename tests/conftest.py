"""For all tests: those with a browser come last."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Playwright leaves an event loop running in the main thread until the browser is closed.

    Whoever asks whether there is one, as asyncio and engines do, would be told so by mistake.
    """
    items.sort(key=lambda item: item.get_closest_marker("browser") is not None)
