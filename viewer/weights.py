"""Versions of the weights: what was in place when, who holds the same, what was made with which."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.store.sequences import Tape
from rolltape.viewer.digests import (
    against_b,
    b_mismatches,
    complete,
    natural,
    unlike_engines,
    window,
)
from rolltape.viewer.happenings import detail_words, marked_events, members, weight_states
from rolltape.viewer.library import Pair
from rolltape.viewer.steps import steps_of
from rolltape.viewer.versions import Made, made_versions, staleness, straddling, used_versions

#: Findings about weights: an update that changed nothing, weights of an older version again.
_MOST = 2000
_CODES = ("RT405", "RT406")

Row = dict[str, Any]

_ALARMS: WeakKeyDictionary[Pair, list[Row]] = WeakKeyDictionary()
_REST: WeakKeyDictionary[Pair, Row] = WeakKeyDictionary()


def weights(pair: Pair, tape: Tape, version: int | None) -> Row:
    """Answer of `runs/{run}/weights`, see docs/viewer.md.

    Args:
        pair: of the run.
        tape: its tape A.
        version: the digests of some versions up to this one are given; None is the last one.
    """
    shown = window(tape, version)
    if pair not in _REST:
        _REST[pair] = _rest(pair, tape)
    against = against_b(pair, shown["versions"])
    return {**_REST[pair], "digests": shown, "against_b": against}


def _rest(pair: Pair, tape: Tape) -> Row:
    """What is the same whatever version is looked at."""
    used = used_versions(tape)
    return {
        "recorded": complete(tape).num_rows > 0 or bool(weight_states(tape)),
        "engines": _engines(tape, used),
        "states": _states(tape)[:_MOST],
        "states_total": len(weight_states(tape)),
        "updates": _updates(tape),
        "straddling": straddling(tape),
        "staleness": staleness(pair, tape),
        "alarms": alarms(pair),
    }


# -- what was in place -------------------------------------------------------------------------


def _states(tape: Tape) -> list[Row]:
    out = []
    for row in weight_states(tape):
        dirty = row["state"] == "dirty"
        times = {n: str(row[n]) if row[n] is not None else None for n in ("t_ns", "until")}
        out.append({**row, **times, "steps": _steps_within(tape, row) if dirty else None})
    return out


def _steps_within(tape: Tape, state: Row) -> int | None:
    """Steps of an engine that began while a state lasted; None where no times tell."""
    steps = steps_of(tape)
    if state["t_ns"] is None or steps.axis != "time" or state["engine"] not in steps.engines:
        return None
    t = steps.t[steps.of(steps.engines.index(state["engine"]))]
    low = int(np.searchsorted(t, state["t_ns"], side="left"))
    until = state["until"]
    high = len(t) if until is None else int(np.searchsorted(t, until, side="left"))
    return max(high - low, 0)


def _engines(tape: Tape, used: Mapping[str, tuple[int, int]]) -> list[Row]:
    names = dict.fromkeys([*tape.engines, *(r["engine"] for r in weight_states(tape)), *used])
    out = []
    for name in names:
        facts = tape.engine(name)
        out.append(
            {
                "id": name,
                **{n: facts.get(n) for n in ("role", "adapter", "replica", "dtype")},
                "quantization": _quantisation(facts.get("effective")),
                "used": list(used[name]) if name in used else None,
            }
        )
    return out


def _quantisation(effective: Any) -> list[str]:
    """Settings in force whose name speaks of quantisation."""
    if not isinstance(effective, Mapping):
        return []
    return [f"{k} = {v}" for k, v in effective.items() if "quant" in str(k).lower() and v]


def _updates(tape: Tape) -> list[Row]:
    """Updates as they were asked for and as they came, in the order of time.

    `state` is `applied`, `failed` or `requested`; of a request `applied` says whether a version of
    that name was in place at any time (None where the versions have no names).
    """
    table = marked_events(tape)
    rows = table.filter(pc.equal(table.column("kind"), "update")).to_pylist()
    labels: dict[str | None, set[str]] = defaultdict(set)
    for row in weight_states(tape):
        if row["state"] == "complete" and row["label"] is not None:
            labels[row["engine"]].add(row["label"])
    details = [members(row["detail"]) for row in rows]
    for row, detail in zip(rows, details, strict=True):
        for name in ("label", "name"):
            if detail.get("version") is not None and isinstance(detail.get(name), str):
                labels[row["engine"]].add(detail[name])
    out = []
    for row, detail in zip(rows, details, strict=True):
        state = "failed" if "failed" in detail else "requested" if "requested" in detail else ""
        asked = detail.get("requested")
        known = labels[row["engine"]]
        out.append(
            {
                "t_ns": str(row["t_ns"]),
                "engine": row["engine"],
                "state": state or "applied",
                "label": asked if state == "requested" else detail.get("label", detail.get("name")),
                "version": detail.get("version"),
                "applied": (asked in known if known else None) if state == "requested" else None,
                "detail": detail_words(row["detail"]),
            }
        )
    return out


# -- alarms ------------------------------------------------------------------------------------


def alarms(pair: Pair) -> list[Row]:
    """Notices about weights that tokens were made with and that are not what they should be."""
    tape = pair.tape
    if tape is None:
        return []
    if pair not in _ALARMS:
        made = made_versions(tape)
        _ALARMS[pair] = [
            *_mismatches(pair, made),
            *_unlike_engines(tape, made),
            *_dirty(tape),
            *(_findings(tape) if "finding" in pair.events else []),
        ]
    return _ALARMS[pair]


def _notice(level: str, title: str, text: str) -> Row:
    return {"level": level, "title": title, "text": text, "commands": [], "screen": "weights"}


def _used(rows: pa.Table, made: Mapping[str, Made]) -> tuple[list[int], list[str], bool]:
    """(versions, groups) of rows whose version made tokens of its engine, and whether it did.

    Where no version is known to have, those that may have made tokens.
    """
    found: dict[str, list[tuple[int, str]]] = {"yes": [], "maybe": [], "no": []}
    names = ["engine", "version", "group"]
    for row in rows.group_by(names).aggregate([]).to_pylist():
        of = made.get(row["engine"])
        word = of.says(row["version"]) if of is not None else "no"
        found[word].append((row["version"], row["group"]))
    chosen = found["yes"] or found["maybe"]
    groups = sorted({group for _, group in chosen}, key=natural)
    versions = sorted({version for version, _ in chosen})
    return versions, [g or "the whole model" for g in groups], bool(found["yes"])


def _mismatches(pair: Pair, made: Mapping[str, Made]) -> list[Row]:
    versions, groups, sure = _used(b_mismatches(pair), made)
    if not versions:
        return []
    text = (
        f"Version{'s' if len(versions) > 1 else ''} {_list(versions)} "
        f"{'made' if sure else 'may have made'} tokens, and A and B have other digests of "
        f"{_list(groups)}: the two sides {'did' if sure else 'may'} not "
        f"{'run' if sure else 'have run'} the same weights. Look at the weight sync before "
        "anything else."
    )
    return [_notice("error" if sure else "warn", "Weights of A and B differ", text)]


def _unlike_engines(tape: Tape, made: Mapping[str, Made]) -> list[Row]:
    versions, groups, sure = _used(unlike_engines(tape), made)
    if not versions:
        return []
    maybe = "" if sure else ", which may have made tokens"
    text = (
        f"Engines that went through the same updates hold other weights as version "
        f"{_list(versions)}{maybe}, in {_list(groups)}. Look whether an update reached every "
        "replica."
    )
    title = "Engines hold other weights as the same version"
    return [_notice("error" if sure else "warn", title, text)]


def _dirty(tape: Tape) -> list[Row]:
    rows = [s for s in _states(tape) if s["state"] == "dirty"]
    hit = [s for s in rows if s["steps"]]
    if hit:
        steps = sum(s["steps"] for s in hit)
        text = (
            f"{steps:,} step{'s' if steps != 1 else ''} began while the weights were being "
            f"written ({_list(sorted({str(s['reason']) for s in hit}))}): their tokens belong to "
            "no version."
        )
        return [_notice("error", "Tokens were made with half-written weights", text)]
    if any(s["steps"] is None for s in rows):
        text = "Whether steps ran meanwhile is not known: the steps or the weights have no times."
        return [_notice("warn", "Weights were being written", text)]
    return []


def _findings(tape: Tape) -> list[Row]:
    table = marked_events(tape)
    details = table.filter(pc.equal(table.column("kind"), "finding")).column("detail").to_pylist()
    found = [detail for detail in map(members, details) if detail.get("code") in _CODES]
    texts = list(dict.fromkeys(str(d.get("message")) for d in found))
    if not texts:
        return []
    more = f", and {len(texts) - 3} more" if len(texts) > 3 else ""
    return [_notice("warn", "An update brought no new weights", "; ".join(texts[:3]) + more + ".")]


def _list(items: Iterable[Any]) -> str:
    texts = [str(item) for item in items]
    shown = texts[:6]
    more = [f"{len(texts) - 6} more"] if len(texts) > 6 else []
    return ", ".join([*shown, *more])
