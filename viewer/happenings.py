"""What happened besides steps: events, and which weights were in place when."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.store.sequences import Tape
from rolltape.viewer.ids import ids_of, known

#: Events that are marks on the timeline.
MARKED = ("update", "sleep", "wake", "abort", "preempt", "gap", "hook_error", "finding")
_MOST = 200
_BINS = 80
_DETAIL = 300

_KEPT: WeakKeyDictionary[Tape, pa.Table] = WeakKeyDictionary()
_STATES: WeakKeyDictionary[Tape, list[dict[str, Any]]] = WeakKeyDictionary()


def marked_events(tape: Tape) -> pa.Table:
    """The events of `MARKED` in the order of time; `seq` is the id of a sequence of the tape."""
    if tape not in _KEPT:
        columns = ["engine", "t_ns", "kind", "request", "sample", "detail"]
        schema = pa.schema([tape.schemas["events"].field(name) for name in columns])
        kinds = pa.array(MARKED)
        parts = [
            batch.filter(pc.is_in(batch.column("kind"), kinds))
            for _, _, batch in tape.batches("events", columns)
        ]
        table = pa.Table.from_batches(parts, schema).sort_by("t_ns").combine_chunks()
        ids = ids_of(table)
        names = pc.if_else(pa.array(known(tape, ids)), ids, pa.scalar(None, pa.string()))
        _KEPT[tape] = table.append_column("seq", names)
    return _KEPT[tape]


def events_in(
    tape: Tape, origin: int, t0: int, t1: int, *, timed: bool, most: int = _MOST
) -> dict[str, Any]:
    """Events of a window: `events`, and `events_total` by kind.

    Args:
        tape: where they were recorded.
        origin: what `t` counts from, ns.
        t0: window, ns.
        t1: window, ns.
        timed: whether the axis is time; else all events are given, without a place on it.
        most: with more, those of a kind and engine that are close together are one with a `count`.
    """
    table = marked_events(tape)
    t = table.column("t_ns").to_numpy()
    if timed:
        table = table.slice(low := int(np.searchsorted(t, t0)), int(np.searchsorted(t, t1)) - low)
        t = table.column("t_ns").to_numpy()
    counts = pc.value_counts(table.column("kind")).to_pylist()
    total = {row["values"]: row["counts"] for row in counts}
    number = np.ones(table.num_rows, np.int64)
    if table.num_rows > most:
        keep, number = _thinned(table, t)
        table = table.take(pa.array(keep))
    events = [
        {
            "kind": row["kind"],
            "t": row["t_ns"] - origin if timed else None,
            "engine": row["engine"],
            "seq": row["seq"],
            "detail": detail_words(row["detail"]),
            "count": count,
        }
        for row, count in zip(table.to_pylist(), number.tolist(), strict=True)
    ]
    return {"events": events, "events_total": total}


def _thinned(table: pa.Table, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows to keep, how many events each stands for)."""
    where = (t - t[0]) * _BINS // max(1, int(t[-1] - t[0]) + 1)
    kinds = table.column("kind").combine_chunks().dictionary_encode().indices.to_numpy()
    engines = table.column("engine").combine_chunks().fill_null("").dictionary_encode()
    keys = np.stack([where, kinds, engines.indices.to_numpy()])
    _, first, counts = np.unique(keys, axis=1, return_index=True, return_counts=True)
    order = np.argsort(first)
    return first[order], counts[order]


def members(text: str | None) -> dict[str, Any]:
    """The members of the detail of an event; none where it is no JSON object."""
    try:
        value = json.loads(text or "null")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def detail_words(text: str | None) -> str:
    """The detail of an event in a line: the message of a finding, else its members."""
    try:
        value = json.loads(text or "null")
    except (ValueError, RecursionError):
        value = text
    if value is None:
        return ""
    if not isinstance(value, dict):
        return str(value)[:_DETAIL]
    if isinstance(value.get("message"), str):
        return f"{value.get('code', '')} {value['message']}".strip()[:_DETAIL]
    return ", ".join(f"{k} = {v}" for k, v in value.items() if v is not None)[:_DETAIL]


def weight_states(tape: Tape) -> list[dict[str, Any]]:
    """A row a state of the weights of an engine; of each engine in the order of time.

    `engine`, `version`, `state`, `label`, `t_ns` (ns or None), `until` (when the next state began;
    None for the last one, or where times are missing), and `reason` where it is dirty.
    """
    if tape not in _STATES:
        _STATES[tape] = _states(tape)
    return _STATES[tape]


def _states(tape: Tape) -> list[dict[str, Any]]:
    names = ["engine", "version", "state", "t_ns"]
    columns = [*names, "label", "reason"]
    batches = [batch for _, _, batch in tape.batches("weights", columns)]
    schema = pa.schema([tape.schemas["weights"].field(name) for name in columns])
    table = pa.Table.from_batches(batches, schema)
    said = [("label", "max"), ("reason", "max")]
    rows = table.group_by(names).aggregate(said).to_pylist()
    rows.sort(key=lambda r: (r["engine"], r["t_ns"] is None, r["t_ns"] or 0, r["version"]))
    out = []
    for row, later in itertools.pairwise([*rows, None]):
        assert row is not None  # only the last one is
        same = later is not None and later["engine"] == row["engine"]
        state = {name: row[name] for name in names}
        state |= {"label": row["label_max"], "until": later["t_ns"] if same and later else None}
        state["reason"] = row["reason_max"] if row["state"] == "dirty" else None
        out.append(state)
    return out


def version_bands(tape: Tape, origin: int, *, timed: bool) -> list[dict[str, Any]]:
    """The states of the weights of the engine that has most, as bands of the timeline.

    Replicas are updated together; their own states are on the page of the weights. Without times
    there are no bands.
    """
    states = [row for row in weight_states(tape) if row["t_ns"] is not None]
    if not timed or not states:
        return []
    count = Counter(row["engine"] for row in states)
    engine = min(count, key=lambda name: (-count[name], name))
    return [
        {
            **{name: row[name] for name in ("engine", "version", "state", "label")},
            "t": row["t_ns"] - origin,
            "until": row["until"] - origin if row["until"] is not None else None,
        }
        for row in states
        if row["engine"] == engine
    ]
