"""Patches of an engine: each one put around something that exists, all undone together."""

from __future__ import annotations

from typing import Any

import wrapt


class _Patch(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """Ours: a wrapper that another tool has put there is patched like anything else."""


class Patches:
    """The patches of one adapter module."""

    def __init__(self) -> None:
        self._made: list[tuple[Any, str, Any]] = []

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
        self._made.append((owner, name, original))
        setattr(owner, name, _Patch(original, wrapper))
        return True

    def undo(self) -> None:
        """Take all of them away, the last one first."""
        while self._made:
            owner, name, original = self._made.pop()
            setattr(owner, name, original)
