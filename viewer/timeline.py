"""The schedule: a window of steps by lane, as spans or, where they are many, as bins."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from rolltape.store.processes import process_name
from rolltape.store.sequences import Tape
from rolltape.viewer.answers import Problem, bad_parameter
from rolltape.viewer.happenings import events_in, version_bands
from rolltape.viewer.rows import FLAGS, MOST, row_flags
from rolltape.viewer.spreadsheet import harmless
from rolltape.viewer.steps import KINDS, NUMBERS, Steps, steps_of

MAX_SPANS = 20_000
MAX_EXPORT = 100_000
_BINS = 512
_CELLS = 16_384
_MAP_BINS = 240

_SHOWN = NUMBERS
_NAMED = ("graph", "attention", "experts", "cache")

_MAPS: WeakKeyDictionary[Tape, dict[str, Any]] = WeakKeyDictionary()


def lanes_of(steps: Steps) -> list[dict[str, Any]]:
    """A lane for each engine and kind that it has steps of."""
    out = []
    for i, engine in enumerate(steps.engines):
        counts = np.bincount(steps.kind[steps.of(i)], minlength=len(KINDS)).tolist()
        for kind, count in zip(KINDS, counts, strict=True):
            if count:
                lane = f"{engine}:{kind}"
                out.append({"id": lane, "engine": engine, "kind": kind, "steps": count})
    return out


def timeline(
    tape: Tape,
    *,
    t0: int | None = None,
    t1: int | None = None,
    lanes: list[str] | None = None,
    max_spans: int = 10_000,
) -> dict[str, Any]:
    """Everything of the window [t0, t1).

    Args:
        tape: where the steps were recorded.
        t0: ns since the epoch, or a step number when `axis` is `step`; None is the first step.
        t1: likewise; None is behind the last step.
        lanes: ids of `lanes_of`; None is all.
        max_spans: with more steps in the window, they are put together in bins.

    Returns:
        The answer of `runs/{run}/timeline`. Times in it are offsets from `origin`, in the unit of
        the axis; the duration of a step is the time until the next one of its engine begins.

    Raises:
        Problem: 400, a window or lane that cannot be.
    """
    steps = steps_of(tape)
    every = lanes_of(steps)
    origin, end = _extent(steps)
    chosen = _chosen(every, lanes)
    t0 = origin if t0 is None else t0
    t1 = end if t1 is None else t1
    if t1 <= t0:
        raise bad_parameter("t1", "must be after t0")
    at = _in_window(steps, t0, t1, chosen)
    answer = {
        "axis": steps.axis,
        "untimed": steps.untimed,
        "steps": len(steps),
        "forwards": tape.count("forwards") > 0 if not len(steps) else True,
        "origin": str(origin),
        "extent": end - origin,
        "window": [t0 - origin, t1 - origin],
        "engines": [_engine(tape, steps, i) for i in range(len(steps.engines))],
        "lanes": every,
        "kinds": KINDS,
        "names": {name: steps.names[name] for name in _NAMED},
        "in_window": len(at),
        "map": _map(tape, steps, origin, end),
        "spans": None,
        "bins": None,
        "flags": FLAGS,
        "flags_limit": MOST,
        **events_in(tape, origin, t0, t1, timed=steps.axis == "time"),
        "versions": version_bands(tape, origin, timed=steps.axis == "time"),
    }
    if len(at) > max_spans:
        count = max(64, min(_BINS, _CELLS // max(1, len(every))))
        answer["bins"] = _bins(steps, at, every, t0, np.linspace(0, t1 - t0, count + 1))
    else:
        answer["spans"] = _spans(tape, steps, at, every, origin)
    return answer


def _extent(steps: Steps) -> tuple[int, int]:
    """First start, and the last end or one behind the last start."""
    if not len(steps):
        return 0, 1
    ends = steps.t + np.maximum(steps.duration, 0)
    return int(steps.t.min()), max(int(ends.max()), int(steps.t.max()) + 1)


def _chosen(every: list[dict[str, Any]], lanes: list[str] | None) -> set[str]:
    known = {lane["id"] for lane in every}
    for lane in lanes or ():
        if lane not in known:
            raise bad_parameter("lanes", f"{lane!r} is not one of the lanes of this tape")
    return known if lanes is None else set(lanes)


def _in_window(steps: Steps, t0: int, t1: int, lanes: set[str]) -> np.ndarray:
    """Where the steps stand that reach into [t0, t1) and are of these lanes."""
    parts = []
    for i, engine in enumerate(steps.engines):
        where = steps.of(i)
        t = steps.t[where]
        # the one that began before the window reaches into it, unless that is not known
        low = max(int(np.searchsorted(t, t0, side="right")) - 1, 0)
        high = int(np.searchsorted(t, t1, side="left"))
        at = np.arange(where.start + low, where.start + max(high, low))
        at = at[(steps.t[at] >= t0) | (steps.t[at] + steps.duration[at] > t0)]
        wanted = np.array([f"{engine}:{kind}" in lanes for kind in KINDS])
        parts.append(at[wanted[steps.kind[at]]])
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _lane_codes(steps: Steps, at: np.ndarray, every: list[dict[str, Any]]) -> np.ndarray:
    """int [m]: index of the lane of each step."""
    index = {lane["id"]: i for i, lane in enumerate(every)}
    table = [index.get(f"{engine}:{kind}", -1) for engine in steps.engines for kind in KINDS]
    return np.asarray(np.array(table)[steps.engine[at] * len(KINDS) + steps.kind[at]])


def _spans(
    tape: Tape, steps: Steps, at: np.ndarray, every: list[dict[str, Any]], origin: int
) -> dict[str, Any]:
    flags = row_flags(tape, steps, at)
    return {
        "lane": _lane_codes(steps, at, every).tolist() if len(at) else [],
        "step": steps.step[at].tolist(),
        "t": (steps.t[at] - origin).tolist(),
        "duration": _nulls(steps.duration[at]),
        **{name: _nulls(steps.numbers[name][at]) for name in _SHOWN},
        **{name: _nulls(steps.texts[name][at]) for name in _NAMED},
        "flags": flags.tolist() if flags is not None else None,
    }


def _nulls(values: np.ndarray) -> list[int | None]:
    found: list[int | None] = values.tolist()
    if len(values) and int(values.min()) < 0:
        return [None if x is None or x < 0 else x for x in found]
    return found


def _bins(
    steps: Steps, at: np.ndarray, every: list[dict[str, Any]], t0: int, edges: np.ndarray
) -> dict[str, Any]:
    """Per lane and bin: share of time in per mille, most rows of a step, steps that begin there.

    `edges` count from the start of the window.
    """
    codes = _lane_codes(steps, at, every)
    lanes = []
    for i in range(len(every)):
        mine = at[codes == i]
        share, rows, begun = _binned(steps, mine, t0, edges)
        lanes.append({"share": share.tolist(), "rows": _nulls(rows), "steps": begun.tolist()})
    return {"edges": np.rint(edges).astype(np.int64).tolist(), "lanes": lanes}


def _binned(
    steps: Steps, at: np.ndarray, t0: int, edges: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(share in per mille, most rows or -1, steps that begin) of the bins, of steps of one engine.

    `edges` count from t0: times since the epoch would not fit a float.
    A share that is not 0 is at least 1: nothing that ran may look as if it had not.
    """
    count = len(edges) - 1
    if not len(at):
        return np.zeros(count, int), np.full(count, -1), np.zeros(count, int)
    start = (steps.t[at] - t0).astype(np.float64)
    end = start + np.maximum(steps.duration[at], 0)
    covered = np.concatenate([[0.0], np.cumsum(end - start)])
    # time covered up to a moment: whole steps before it, and the part of the one it lies in
    before = np.searchsorted(start, edges, side="right")
    last = np.maximum(before - 1, 0)
    part = np.minimum(edges, end[last]) - start[last]
    upto = np.where(before > 0, covered[last] + np.maximum(part, 0), 0.0)
    share = np.diff(upto) / np.diff(edges)
    permille = np.where(share > 0, np.clip(np.rint(share * 1000), 1, 1000), 0).astype(int)
    begins = np.searchsorted(start, edges, side="left")
    first = np.minimum(np.searchsorted(end, edges[:-1], side="right"), begins[:-1])
    rows = _most(steps.numbers["rows"][at], first, begins[1:])
    return permille, rows, np.diff(begins)


def _most(values: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Largest of values[low:high] of each pair; -1 where that is empty."""
    padded = np.append(values, -1)
    pairs = np.stack([low, np.maximum(high, low)], 1).ravel()
    most = np.maximum.reduceat(padded, pairs)[::2]
    return np.where(high > low, most, -1)


def _map(tape: Tape, steps: Steps, origin: int, end: int) -> dict[str, Any]:
    """The whole tape in few bins: per kind the share of engine time, for the minimap."""
    if tape not in _MAPS:
        edges = np.linspace(0, end - origin, _MAP_BINS + 1)
        shares = np.zeros((len(KINDS), _MAP_BINS))
        for i in range(len(steps.engines)):
            where = np.arange(steps.bounds[i], steps.bounds[i + 1])
            for kind in range(len(KINDS)):
                mine = where[steps.kind[where] == kind]
                shares[kind] += _binned(steps, mine, origin, edges)[0]
        shares /= max(1, len(steps.engines))
        found = {k: np.ceil(s).astype(int).tolist() for k, s in zip(KINDS, shares, strict=True)}
        _MAPS[tape] = {kind: share for kind, share in found.items() if any(share)}
    return _MAPS[tape]


def _engine(tape: Tape, steps: Steps, i: int) -> dict[str, Any]:
    engine = steps.engines[i]
    where = steps.of(i)
    facts = tape.engine(engine)
    own = [p for p in tape.processes if p["engine"] == engine]
    return {
        "id": engine,
        "role": facts.get("role"),
        "adapter": facts.get("adapter"),
        "replica": facts.get("replica"),
        "processes": [process_name(row) for row in own],
        "steps": where.stop - where.start,
        "first": int(steps.step[where].min()),
        "last": int(steps.step[where].max()),
    }


# -- as a file ---------------------------------------------------------------------------------


def exported(
    tape: Tape, format_: str, *, t0: int | None, t1: int | None, lanes: list[str] | None
) -> bytes:
    """The steps of a window as a file.

    Args:
        tape: where they were recorded.
        format_: `perfetto` (Chrome trace events; times in us from `origin_ns`) or `csv`.
        t0: see `timeline`.
        t1: see `timeline`.
        lanes: see `timeline`.

    Raises:
        Problem: 413, more than `MAX_EXPORT` steps.
    """
    steps = steps_of(tape)
    origin, end = _extent(steps)
    t0, t1 = origin if t0 is None else t0, end if t1 is None else t1
    at = _in_window(steps, t0, t1, _chosen(lanes_of(steps), lanes))
    if len(at) > MAX_EXPORT:
        detail = f"{len(at):,} steps; at most {MAX_EXPORT:,} in a file: narrow the window"
        raise Problem(413, "window too large", detail, field="t1", limit=MAX_EXPORT)
    if format_ == "csv":
        return _csv(steps, at).encode()
    events = events_in(tape, origin, t0, t1, timed=steps.axis == "time", most=MAX_EXPORT)["events"]
    body = {
        "traceEvents": [*_tracks(tape, steps), *_complete(steps, at, origin), *_instants(events)],
        "displayTimeUnit": "ms",
        "otherData": {
            "origin_ns": str(origin),
            "axis": steps.axis,
            "durations": "until the next step of the engine begins",
        },
    }
    return json.dumps(body, separators=(",", ":")).encode()


def _cells(steps: Steps, at: np.ndarray) -> Iterator[tuple[int, dict[str, Any]]]:
    """(index of the engine, columns) of steps; null columns are left out."""
    numbers = {name: steps.numbers[name][at].tolist() for name in steps.numbers}
    texts = {name: steps.texts[name][at].tolist() for name in steps.texts if name != "kind"}
    engines = steps.engine[at].tolist()
    for i, engine in enumerate(engines):
        cells: dict[str, Any] = {n: v[i] for n, v in numbers.items() if v[i] >= 0}
        cells |= {n: steps.names[n][v[i]] for n, v in texts.items() if v[i] >= 0}
        yield engine, cells


def _complete(steps: Steps, at: np.ndarray, origin: int) -> Iterator[dict[str, Any]]:
    unit = 1000 if steps.axis == "time" else 1
    t, duration = (steps.t[at] - origin).tolist(), steps.duration[at].tolist()
    kinds, numbers = steps.kind[at].tolist(), steps.step[at].tolist()
    for i, (engine, cells) in enumerate(_cells(steps, at)):
        known = {} if duration[i] >= 0 else {"duration": "not known: the last step"}
        yield {
            "name": KINDS[kinds[i]],
            "cat": "step",
            "ph": "X",
            "ts": t[i] / unit,
            "dur": max(duration[i], 0) / unit,
            "pid": engine + 1,
            "tid": kinds[i] + 1,
            "args": {"step": numbers[i], **cells, **known},
        }


def _tracks(tape: Tape, steps: Steps) -> Iterator[dict[str, Any]]:
    for i, engine in enumerate(steps.engines):
        role = tape.engine(engine).get("role") or "engine"
        about = {"name": f"{role} {engine}"}
        yield {"name": "process_name", "ph": "M", "pid": i + 1, "tid": 0, "args": about}
        for kind in np.unique(steps.kind[steps.of(i)]).tolist():
            about = {"name": KINDS[kind]}
            yield {"name": "thread_name", "ph": "M", "pid": i + 1, "tid": kind + 1, "args": about}


def _instants(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for event in events:
        if event["t"] is not None:
            args = {"detail": event["detail"], "engine": event["engine"], "count": event["count"]}
            at = event["t"] / 1000
            yield {"name": event["kind"], "ph": "i", "s": "g", "ts": at, "pid": 0, "args": args}


def _csv(steps: Steps, at: np.ndarray) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = [*steps.numbers, *(n for n in steps.texts if n != "kind")]
    writer.writerow(["engine", "step", "kind", "t_ns", "duration_ns", *names])
    timed = steps.axis == "time"
    for (engine, cells), i in zip(_cells(steps, at), at.tolist(), strict=True):
        t = int(steps.t[i]) if timed else ""
        duration = int(steps.duration[i]) if timed and steps.duration[i] >= 0 else ""
        head = [steps.engines[engine], int(steps.step[i]), KINDS[steps.kind[i]], t, duration]
        writer.writerow([harmless(cell) for cell in (*head, *(cells.get(n, "") for n in names))])
    return out.getvalue()
