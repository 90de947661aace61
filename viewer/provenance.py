"""What made the two sides, next to each other: engine, model, dtype, versions, switches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rolltape.store.sequences import Tape
from rolltape.viewer.library import Pair

#: (label, column of the `engines` table), in the order in which they are shown.
_ENGINE = (
    ("adapter", "adapter"),
    ("model", "model"),
    ("model type", "model_type"),
    ("fingerprint", "model_fingerprint"),
    ("layers", "num_layers"),
    ("experts", "num_experts"),
    ("experts a token", "experts_per_token"),
    ("dtype", "dtype"),
    ("device", "device"),
    ("ranks", "ranks"),
    ("host", "host"),
)

_DEEP = 6


def provenance(pair: Pair) -> list[dict[str, Any]]:
    """Rows {name, a, b, differs, main}; values are text, null where a side does not say.

    `main` rows are few and come first; the others are settings, versions and the environment.
    """
    a = _facts(pair.tape, pair.side("a"))
    b = _facts(pair.b, pair.side("b")) if pair.report is not None else {}
    names = list(dict.fromkeys([*a, *b]))
    main = {"path", "role", *(label for label, _ in _ENGINE)}
    rows = []
    for name in names:
        left, right = a.get(name), b.get(name)
        both = left is not None and right is not None
        rows.append(
            {
                "name": name,
                "a": left,
                "b": right,
                "differs": both and left != right and name not in ("path", "role"),
                "main": name in main or name.startswith(("switches", "versions")),
            }
        )
    return sorted(rows, key=lambda r: not r["main"])


def _facts(tape: Tape | None, side: Mapping[str, Any]) -> dict[str, str]:
    """Flat name -> text; from the tape if it is open, else from what the report says of it."""
    if tape is None:
        return dict(_flatten("", side))
    facts = {"path": str(tape.path), "role": tape.role}
    engines = list(tape.engines.values())
    for label, column in _ENGINE:
        values = [e[column] for e in engines if e.get(column) not in (None, {}, "")]
        if values:
            texts = (_ranks(v) if label == "ranks" else _text(v) for v in values)
            facts[label] = " | ".join(dict.fromkeys(texts))
    if len(engines) > 1:
        facts["engines"] = str(len(engines))
    header = tape.header.get("provenance")
    facts |= dict(_flatten("", header if isinstance(header, Mapping) else {}))
    for engine in engines:
        for column in ("versions", "requested", "effective"):
            for name, value in _flatten(column, engine.get(column) or {}):
                facts.setdefault(name, value)
    if tape.parent:
        facts["parent"] = tape.parent
    return facts


def _flatten(prefix: str, value: Any, depth: int = 0) -> Iterable[tuple[str, str]]:
    if isinstance(value, Mapping) and value and depth < _DEEP:
        for key, inner in value.items():
            name = f"{prefix}.{key}" if prefix else str(key)
            yield from _flatten(name, inner, depth + 1)
    elif value not in (None, {}, [], ""):
        yield prefix, _text(value)


def _ranks(value: Any) -> str:
    """`{"tp": [0, 2]}` -> `tp 0/2`."""
    if not isinstance(value, Mapping):
        return _text(value)
    return ", ".join(
        f"{k} {'/'.join(map(str, v)) if isinstance(v, list) else v}" for k, v in value.items()
    )


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(_text(v) for v in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
