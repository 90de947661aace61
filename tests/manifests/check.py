"""Compares an adapter's targets, and an engine's double, with the manifest of the real source."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rolltape.recorder.targets import Target

HERE = Path(__file__).parent
Entry = dict[str, Any]


def load(engine: str) -> dict[str, list[Entry]]:
    """What is known of each symbol, `module:symbol` -> an entry for each source that was read."""
    manifest = json.loads((HERE / f"{engine}.json").read_text())
    found: dict[str, list[Entry]] = {}
    for name, source in manifest["sources"].items():
        for symbol, entry in source["symbols"].items():
            found.setdefault(symbol, []).append({**entry, "source": name})
    return found


def target_problems(known: dict[str, list[Entry]], targets: Iterable[Target]) -> list[str]:
    """Targets that no source has with all their parameters.

    A target that says what is used `instead` of it may be absent, but must have been looked for.
    """
    problems = []
    for target in targets:
        entries = known.get(target.name, [])
        there = [e for e in entries if e["kind"] != "absent"]
        if not entries:
            problems.append(f"{target.name}: never looked for")
        elif not there and not target.instead:
            problems.append(f"{target.name}: in none of {len(entries)} sources")
        elif there and not any(set(target.parameters) <= _names(e) for e in there):
            problems.append(f"{target.name}: no source has {', '.join(target.parameters)}")
    return problems


def double_problems(known: dict[str, list[Entry]], package: str) -> list[str]:
    """Functions, classes and methods of a double that the real engine does not have like that.

    Args:
        known: from `load`.
        package: importable name of the double. Names that begin with `_double` are its own.
    """
    problems = []
    for name, thing in symbols(package):
        module, _, symbol = name.partition(":")
        entries = [e for e in known.get(name, []) if e["kind"] != "absent"]
        owner, _, member = symbol.rpartition(".")
        if not entries and owner:  # a member of a class whose members are listed
            classes = [e for e in known.get(f"{module}:{owner}", []) if e["kind"] == "class"]
            entries = [e2 for e in classes for e2 in _member(e, member)]
        if not entries:
            problems.append(f"{name}: not in the manifest")
        elif callable(thing) and not any(_agrees(thing, e) for e in entries):
            have = list(inspect.signature(thing).parameters)
            real = [e.get("parameters") for e in entries]
            problems.append(f"{name}: has {have}, the engine {real}")
    return problems


def symbols(package: str) -> Iterator[tuple[str, Any]]:
    """Every `module:symbol` that a double defines, with the thing itself."""
    root = importlib.import_module(package)
    for found in pkgutil.walk_packages(root.__path__, f"{package}."):
        if any(part.startswith("_double") for part in found.name.split(".")):
            continue
        module = importlib.import_module(found.name)
        for name, thing in vars(module).items():
            if getattr(thing, "__module__", None) != found.name or name.startswith("_double"):
                continue
            yield f"{found.name}:{name}", thing
            if inspect.isclass(thing):
                for member, value in vars(thing).items():
                    plain = value.__func__ if hasattr(value, "__func__") else value
                    if getattr(plain, "__module__", None) != found.name:
                        continue  # what Enum and NamedTuple put there
                    if inspect.isfunction(plain) and not member.startswith(("__", "_double")):
                        yield f"{found.name}:{name}.{member}", plain


def _member(entry: Entry, name: str) -> Iterator[Entry]:
    if name in entry["methods"]:
        yield {"kind": "method", "parameters": entry["methods"][name]}


def _agrees(thing: Any, entry: Entry) -> bool:
    if entry["kind"] in ("field", "name", "module"):
        return True
    if inspect.isclass(thing) and "__init__" not in vars(thing) and not _dataclass(thing):
        return entry["kind"] == "class"
    mine = list(inspect.signature(thing).parameters.values())
    real = [p for p in entry["parameters"] if p not in ("self", "cls")]
    collects = any(p.startswith("*") for p in real)
    mine = [p for p in mine if p.name not in ("self", "cls")]
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [p.name for p in mine if p.kind not in variable]
    wanted = [p for p in real if not p.startswith("*")]
    if collects:
        return set(wanted) <= set(names) or names == [n for n in wanted if n in names]
    # a double may leave parameters out, but not have others, nor another order
    return names == [n for n in wanted if n in names]


def _dataclass(thing: Any) -> bool:
    return hasattr(thing, "__dataclass_fields__")


def _names(entry: Entry) -> set[str]:
    plain = {p.lstrip("*") for p in entry.get("parameters", ())}
    return plain | set(entry.get("fields", ()))
