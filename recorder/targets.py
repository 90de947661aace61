"""The places in an engine where an adapter stands, and whether an installed version has them.

Each adapter lists its targets in a module that imports no engine: `rolltape doctor` and the tests
compare the list with what is installed, and with a manifest made from the engine's own source.
"""

from __future__ import annotations

import dis
import importlib
import importlib.util
import inspect
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Target:
    """One function, method or class that an adapter patches, calls or reads.

    Args:
        module: dotted name.
        symbol: name inside of it, for example `Scheduler.schedule`; "" is the module itself.
        parameters: names of parameters that the adapter relies on, in any order.
        gives: what is recorded through it: tokens, logprobs, routes, supports, schedule, weights,
            settings, tactics, lifecycle.
        instead: what the tape lacks, or what is used instead, where it does not exist.
    """

    module: str
    symbol: str
    parameters: tuple[str, ...] = ()
    gives: str
    instead: str = ""

    @property
    def name(self) -> str:
        """`module:symbol`."""
        return f"{self.module}:{self.symbol}" if self.symbol else self.module


@dataclass(frozen=True, kw_only=True)
class Binding:
    """What was found of a target.

    Args:
        target: which.
        state: `bound`; `missing` (no such module or symbol); `changed` (parameters are gone);
            `failed` (its module does not import).
        detail: one line for people; "" when bound.
    """

    target: Target
    state: str
    detail: str = ""


def check(target: Target) -> Binding:
    """Look for a target in what is installed. Imports its module."""
    try:
        found: Any = importlib.import_module(target.module)
    except ModuleNotFoundError as error:
        return Binding(target=target, state="missing", detail=f"no module {error.name}")
    except Exception as error:  # whatever an engine's import may raise
        return Binding(target=target, state="failed", detail=f"{type(error).__name__}: {error}")
    for part in target.symbol.split(".") if target.symbol else ():
        owner, found = found, getattr(found, part, None)
        if found is None and inspect.isclass(owner) and _assigns(owner, part):
            return Binding(target=target, state="bound")
        if found is None:
            return Binding(target=target, state="missing", detail=f"no {part} in {target.module}")
    gone = sorted(set(target.parameters) - parameters_of(found))
    if gone:
        detail = f"no parameter {', '.join(gone)}"
        return Binding(target=target, state="changed", detail=detail)
    return Binding(target=target, state="bound")


def _assigns(owner: type, name: str) -> bool:
    """Whether a class declares a field, or a method of it sets one, that only its objects have."""
    return any(
        name in vars(cls).get("__annotations__", ())
        or any(_stores(member, name) for member in vars(cls).values())
        for cls in owner.__mro__
    )


def _stores(member: Any, name: str) -> bool:
    plain = getattr(member, "fset", None) or getattr(member, "__func__", member)
    code = getattr(inspect.unwrap(plain) if callable(plain) else None, "__code__", None)
    return code is not None and any(
        step.opname == "STORE_ATTR" and step.argval == name for step in dis.get_instructions(code)
    )


def parameters_of(function: Any) -> set[str]:
    """Names of the parameters of a function, or of a class's constructor; empty if unknown."""
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return set()
