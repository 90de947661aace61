"""The `engines` rows of the processes of one engine, and the one row that they add up to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rolltape.store.jsonable import read_object

#: Columns that hold JSON objects.
JSON_COLUMNS = ("ranks", "requested", "effective", "versions")
# What is true of one process only: the merged row of several has none of it.
_OF_A_PROCESS = ("writer", "process", "pid", "ranks")
_MAY_DIFFER = ("host", "replica", "device", "adapter")
# Who knows best: a worker runs the model, the front end was asked.
_RUNS = ("worker", "core", "frontend")
_ASKED = ("frontend", "core", "worker")


def read_processes(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of `engines` with the JSON columns decoded, one a process and engine.

    A process that learns more later writes another row; what that one says counts.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        for name in JSON_COLUMNS:
            row[name] = read_object(row[name])
        known = found.setdefault((row["engine"], row["writer"]), row)
        if known is not row:
            for name, value in row.items():
                if isinstance(value, dict) and name in JSON_COLUMNS:
                    known[name] = {**known[name], **value}
                elif value is not None:
                    known[name] = value
    return list(found.values())


def merge_processes(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What one engine is, from the rows of its processes.

    Of each fact the first that is not null counts, workers before the core before the front end;
    of `requested` the other way round. Settings are merged by name.

    Returns:
        The columns of `engines`. Where processes say different things of the model or of a
        setting, `disagreements` has them all: name -> {process: value}.
    """
    if len(rows) == 1:
        return rows[0]
    runs, asked = (sorted(rows, key=_by(order)) for order in (_RUNS, _ASKED))
    merged: dict[str, Any] = {}
    disagreements: dict[str, dict[str, Any]] = {}
    for name in rows[0]:
        if name in _OF_A_PROCESS:
            merged[name] = {} if name == "ranks" else None
        elif name == "started_ns":
            merged[name] = min((r[name] for r in rows if r[name] is not None), default=None)
        elif name in JSON_COLUMNS:
            cells = [(_who(r), r[name]) for r in (asked if name == "requested" else runs)]
            keys = list(dict.fromkeys(key for _, cell in cells for key in cell))
            said = {key: [(who, c[key]) for who, c in cells if key in c] for key in keys}
            merged[name] = {key: values[0][1] for key, values in said.items()}
            for key, values in said.items():
                _note(disagreements, f"{name}.{key}", values)
        else:
            values = [(_who(r), r[name]) for r in runs if r[name] is not None]
            merged[name] = values[0][1] if values else None
            if name in ("host", "replica") and len({value for _, value in values}) > 1:
                merged[name] = None
            elif name not in _MAY_DIFFER:
                _note(disagreements, name, values)
    if disagreements:
        merged["disagreements"] = disagreements
    return merged


def process_name(row: Mapping[str, Any]) -> str:
    """`worker tp 1/2`, `core`, `frontend`: what a process of an engine is called."""
    ranks = row["ranks"] if isinstance(row["ranks"], dict) else {}
    parts = [
        f"{kind} {'/'.join(map(str, rank)) if isinstance(rank, list) else rank}"
        for kind, rank in ranks.items()
    ]
    replica = [] if row.get("replica") is None else [f"replica {row['replica']}"]
    return " ".join([str(row.get("process") or "process"), *replica, *parts])


def _who(row: Mapping[str, Any]) -> str:
    return f"{process_name(row)} ({row['pid']})" if row["pid"] is not None else process_name(row)


def _by(order: Sequence[str]) -> Any:
    def place(row: Mapping[str, Any]) -> tuple[Any, ...]:
        kind = row.get("process")
        known = order.index(kind) if kind in order else -1
        return known, json.dumps(row["ranks"], sort_keys=True), row["started_ns"] or 0

    return place


def _note(
    disagreements: dict[str, dict[str, Any]], name: str, values: Sequence[tuple[str, Any]]
) -> None:
    if any(value != values[0][1] for _, value in values[1:]):
        disagreements[name] = dict(values)
