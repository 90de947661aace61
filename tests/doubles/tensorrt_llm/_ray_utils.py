"""Control actions as decorators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def control_action_decorator(func: Callable[..., Any] | None = None, *, drain: bool = True) -> Any:
    """The method of a worker runs inside `self.engine.control_action(drain=drain)`."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self.engine.control_action(drain=drain):
                return method(self, *args, **kwargs)

        return wrapper

    return decorate if func is None else decorate(func)
