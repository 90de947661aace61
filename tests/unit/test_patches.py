"""Patches: around what exists, once, and gone without a trace."""

from __future__ import annotations

from typing import Any

import pytest
import wrapt

from rolltape.recorder.patches import Patches


def engine() -> tuple[type, type]:
    class Base:
        def run(self, x: int) -> int:
            return x

    class Engine(Base):
        @staticmethod
        def load(x: int) -> int:
            return x

        @classmethod
        def make(cls, x: int) -> tuple[type, int]:
            return cls, x

    return Base, Engine


@pytest.fixture
def seen() -> list[str]:
    return []


@pytest.fixture
def look(seen: list[str]) -> Any:
    def around(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        seen.append(wrapped.__name__)
        return wrapped(*args, **kwargs)

    return around


def test_methods_of_every_kind_do_what_they_did_and_are_seen(look: Any, seen: list[str]) -> None:
    _, kind = engine()
    patches = Patches()
    assert patches.around(kind, "load", look) and patches.around(kind, "make", look)
    assert kind.load(2) == 2 and kind.make(3) == (kind, 3) and kind().load(4) == 4
    assert seen == ["load", "make", "load"]


def test_what_a_class_inherits_is_patched_where_it_is_and_only_if_asked(
    look: Any, seen: list[str]
) -> None:
    base, kind = engine()
    patches = Patches()
    assert not patches.around(kind, "run", look) and not patches
    assert patches.around(kind, "run", look, inherited=True)
    assert kind().run(1) == base().run(1) == 1 and seen == ["run", "run"]
    assert not patches.around(kind, "absent", look, inherited=True)


def test_ours_are_not_put_twice_but_around_those_of_another_tool(
    look: Any, seen: list[str]
) -> None:
    base, _ = engine()
    base.run = wrapt.FunctionWrapper(base.run, look)
    first, second = Patches(), Patches()
    assert first.around(base, "run", look) and not second.around(base, "run", look)
    assert base().run(1) == 1 and seen == ["run", "run"]


def test_undo_leaves_nothing(look: Any, seen: list[str]) -> None:
    base, kind = engine()
    before = dict(vars(base)), dict(vars(kind))
    patches = Patches()
    patches.around(kind, "run", look, inherited=True)
    patches.around(kind, "make", look)
    patches.undo()
    assert (dict(vars(base)), dict(vars(kind))) == before
    assert not patches and kind().run(1) == 1 and not seen


def test_what_another_tool_put_around_ours_stays(look: Any, seen: list[str]) -> None:
    _, kind = engine()
    patches = Patches()
    patches.around(kind, "load", look)
    theirs: list[int] = []

    def around(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        theirs.append(args[0])
        return wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(kind, "load", around)
    assert kind.load(1) == 1 and seen == ["load"] and theirs == [1]
    patches.undo()
    assert kind.load(2) == 2 and seen == ["load"] and theirs == [1, 2]
