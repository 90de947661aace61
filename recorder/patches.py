"""Patches of an engine: each one put around something that exists, all undone together."""

from __future__ import annotations

from typing import Any

import wrapt


class _Patch(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """Ours: a wrapper that another tool has put there is patched like anything else."""


def _pass_on(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return wrapped(*args, **kwargs)


class _Gate:
    """The wrapper of a patch, which can be taken out of it."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper

    def __call__(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return self.wrapper(wrapped, instance, args, kwargs)


class Patches:
    """The patches of one adapter module."""

    def __init__(self) -> None:
        self._made: list[tuple[Any, str, Any, _Patch, _Gate]] = []

    def __bool__(self) -> bool:
        return bool(self._made)

    def around(self, owner: Any, name: str, wrapper: Any, *, inherited: bool = False) -> bool:
        """Put `wrapper` around an attribute that `owner` itself has.

        Args:
            owner: a class or a module.
            name: of the attribute. One that does not exist is left alone: `rolltape doctor` says
                what is missing then.
            wrapper: called as wrapt does: (wrapped, instance, args, kwargs).
            inherited: where `owner` is a class that inherits it, patch the class that has it.

        Returns:
            Whether it was there and not patched by us before.
        """
        if inherited:
            owner = next((c for c in owner.__mro__ if name in vars(c)), owner)
        original = vars(owner).get(name)
        if original is None or isinstance(original, _Patch):
            return False
        gate = _Gate(wrapper)
        patch = _Patch(original, gate)
        self._made.append((owner, name, original, patch, gate))
        setattr(owner, name, patch)
        return True

    def undo(self) -> None:
        """Take all of them away, the last one first.

        What another tool has put around one of them stays; ours then only passes the call on.
        """
        while self._made:
            owner, name, original, patch, gate = self._made.pop()
            if vars(owner).get(name) is patch:
                setattr(owner, name, original)
            else:
                gate.wrapper = _pass_on
