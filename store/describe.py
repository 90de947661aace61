"""What a tape holds and what it lacks, as one JSON-able object: `rolltape info`."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.store import codecs
from rolltape.store.columns import Masked
from rolltape.store.index import KEY_COLUMNS
from rolltape.store.keys import Key
from rolltape.store.notices import annotation_counts, surplus, tactic_counts
from rolltape.store.places import LocalPlace, Place
from rolltape.store.routes import read_missing
from rolltape.store.schema import (
    DERIVED_TABLES,
    REPORT_TABLES,
    SUPPORT_EXPLICIT,
    SUPPORT_FULL,
    SUPPORT_UNRECORDED,
    TAPE_TABLES,
)
from rolltape.store.sequences import LOGPROBS, Sequence, Tape
from rolltape.store.shards import LIVE, is_locked, shard_names
from rolltape.store.tape import Folder, Report, seal_problems

_SUPPORT_NAMES = {
    SUPPORT_FULL: "full",
    SUPPORT_EXPLICIT: "explicit",
    SUPPORT_UNRECORDED: "unrecorded",
}
_EVENT_FACTS = ("kind", "engine", "request", "start", "n")
#: What a problem says that is none: a kill may come between the rows of one sequence.
ORPHANS = "have no row in the sequences table"
_SHOWN = 20  # gaps and hook errors that are listed one by one


def describe_tape(tape: Tape) -> dict[str, Any]:
    """Everything `rolltape info` says of a tape; open it with `skip_damaged`.

    Returns:
        Counts and shares; `problems` names what is damaged, torn or missing, `damaged` is true if
        something that was written can no longer be read.
    """
    facts = tape.rollups()
    length, prompt = (facts.column(c).to_numpy() for c in ("length", "prompt_len"))
    response = int(np.maximum(length - prompt, 0).sum())
    finish = pc.value_counts(facts.column("finish")).to_pylist()
    coverage = {
        "logprobs": _logprob_coverage(facts, response),
        "routes": _route_coverage(tape),
        "supports": _support_coverage(tape, facts, response),
        "distributions": _distribution_coverage(tape),
        "activations": _activation_coverage(tape, None),
        "sketches": _activation_coverage(tape, codecs.SKETCH),
    }
    tables = describe_tables(tape, TAPE_TABLES)
    broken = seal_problems(tape.place, tape.seal)
    problems = [p for p in tape.problems if ORPHANS not in p]
    problems += orphans(tape, sealed=tape.seal is not None)
    harmless = [p for p in problems if "were ignored" in p or ORPHANS in p]
    return {
        "kind": "tape",
        "path": str(tape.place),
        "uuid": tape.uuid,
        "format": tape.header["format"],
        "created": tape.header.get("created"),
        "role": tape.role,
        "parent": tape.parent,
        "provenance": tape.header.get("provenance", {}),
        "engines": [_engine(row) for row in tape.engines.values()],
        "processes": [_process(row) for row in tape.processes],
        "sequences": {
            "total": len(facts),
            "by_finish": {
                row["values"]: row["counts"]
                for row in sorted(finish, key=lambda row: -int(row["counts"]))
            },
            "groups": pc.count_distinct(facts.column("group"), mode="only_valid").as_py(),
            "longest": int(length.max(initial=0)),
        },
        "tokens": {
            "prompt": int(prompt.sum()),
            "response": response,
            "loss": _sum(facts, "loss_tokens"),
        },
        "coverage": coverage,
        "weights": _weights(tape),
        "tactics": tactic_counts(tape),
        "annotations": annotation_counts(tape),
        "surplus": surplus(tape),
        "events": _events(tape),
        "tables": tables,
        "bytes": sum(t["bytes"] or 0 for t in tables.values()),
        "seal": _seal(tape),
        "problems": [*broken, *problems],
        "damaged": len(broken) + len(problems) > len(harmless),
    }


def orphans(tape: Tape, *, sealed: bool) -> list[str]:
    """Tokens of sequences that no row names; empty while their rows may follow."""
    tape.lengths  # noqa: B018 - finds them
    if not sealed or any(is_written(tape.place, table) for table in TAPE_TABLES):
        return []
    return [problem for problem in tape.problems if ORPHANS in problem]


def is_written(place: Place, table: str) -> bool:
    """Whether a living process is writing a shard of a table."""
    return isinstance(place, LocalPlace) and any(
        file.endswith(LIVE) and is_locked(place.path / table / file)
        for file in shard_names(place.files(table))
    )


def describe_report(report: Report) -> dict[str, Any]:
    """Everything `rolltape info` says of a diff report."""
    tables = describe_tables(report, REPORT_TABLES)
    return {
        "kind": "report",
        "path": str(report.place),
        "uuid": report.uuid,
        "format": report.header["format"],
        "created": report.header.get("created"),
        "summary": report.summary,
        "tables": tables,
        "bytes": sum(t["bytes"] or 0 for t in tables.values()),
        "problems": list(report.problems),
        "damaged": bool(report.problems),
    }


def describe_tables(folder: Folder, schemas: Mapping[str, Any]) -> dict[str, dict[str, int | None]]:
    """Rows, bytes on disk and shards of every table that has any.

    Every shard is checked against the hash in its name. Rows of derived tables are not counted.
    """
    found: dict[str, dict[str, int | None]] = {}
    for name in schemas:
        sizes = folder.place.files(name)
        shards = [file for file in shard_names(sizes) if file in sizes]
        if shards:
            derived = name in DERIVED_TABLES
            found[name] = {
                "rows": None if derived else folder.count(name, whole=True),
                "bytes": sum(sizes[file] for file in shards),
                "shards": len(shards),
                "live": sum(file.endswith(LIVE) for file in shards),
            }
    return found


def _engine(row: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if v is not None}


def _process(row: dict[str, Any]) -> dict[str, Any]:
    names = ("engine", "process", "ranks", "replica", "host", "pid", "device", "adapter")
    return {name: row[name] for name in names if row[name] not in (None, {})}


def _sum(facts: pa.Table, column: str) -> int:
    return int(pc.sum(facts.column(column)).as_py() or 0)


def _logprob_coverage(facts: pa.Table, response: int) -> dict[str, dict[str, Any]]:
    """Response tokens with each column, and how many of them are not finite."""
    counts = {name: _sum(facts, f"{name}_count") for name in LOGPROBS}
    return {
        name: {
            "tokens": counts[name],
            "share": counts[name] / response,
            "non_finite": _sum(facts, f"{name}_non_finite"),
        }
        for name in LOGPROBS
        if counts[name] and response
    }


def _route_coverage(tape: Tape) -> dict[str, Any]:
    """Per role and layer the positions with a route, of those that had a forward (0..T-2)."""
    lengths = {s.key: s.length for s in tape}
    seen: dict[tuple[str, int], dict[Key, np.ndarray]] = defaultdict(dict)
    reasons: Counter[str] = Counter()
    for key, row in _route_rows(tape):
        if key not in lengths:
            continue
        shape = (row["n"], len(row["layers"]))
        valid = codecs.decode_bits(row["valid"], shape, field="routes.valid")
        for column, layer in enumerate(row["layers"]):
            bits = seen[row["role"], layer].setdefault(key, np.zeros(lengths[key], bool))
            span = bits[row["start"] : row["start"] + row["n"]]
            span |= valid[: len(span), column]
        for start, n, layer, reason in read_missing(row["missing"], f"routes of {key.id}"):
            inside = max(0, min(n, lengths[key] - start))
            reasons[reason] += inside * (len(row["layers"]) if layer is None else 1)
    total = sum(max(0, length - 1) for length in lengths.values())
    out: dict[str, Any] = {}
    for (role, layer), found in sorted(seen.items()):
        positions = sum(int(b[: max(0, lengths[key] - 1)].sum()) for key, b in found.items())
        layers = out.setdefault(role, {"layers": {}})["layers"]
        layers[str(layer)] = {
            "positions": positions,
            "share": positions / total if total else 0.0,
        }
    if reasons:
        out["missing"] = dict(reasons.most_common())
    return out


def _route_rows(tape: Tape) -> Iterator[tuple[Key, dict[str, Any]]]:
    columns = [*KEY_COLUMNS, "start", "n", "role", "layers", "valid", "missing"]
    for _, _, batch in tape.batches("routes", columns):
        for row in batch.to_pylist():
            yield Key(*(row[c] for c in KEY_COLUMNS)), row


def _support_coverage(tape: Tape, facts: pa.Table, response: int) -> dict[str, Any]:
    """Response positions by state, and the sizes of the explicit kept sets."""
    spans: dict[Key, tuple[int, int]] = {}
    for *key, prompt, length in zip(
        *(facts.column(c).to_pylist() for c in (*KEY_COLUMNS, "prompt_len", "length")), strict=True
    ):
        spans[Key(*key)] = prompt, length
    states = np.zeros(3, np.int64)
    derived = rows = False
    for _, _, batch in tape.batches("supports", [*KEY_COLUMNS, "start", "derived", "state"]):
        rows = rows or batch.num_rows > 0
        for row in batch.to_pylist():
            prompt, end = spans.get(Key(*(row[c] for c in KEY_COLUMNS)), (0, 0))
            begin, stop = (max(0, p - row["start"]) for p in (prompt, end))
            state = np.asarray(row["state"], np.uint8)[begin:stop]
            states += np.bincount(state, minlength=3)[:3]
            derived |= bool(row["derived"])
    if not rows:
        return {}
    counts = {name: int(states[value]) for value, name in _SUPPORT_NAMES.items()}
    counts["unrecorded"] += max(0, response - int(states.sum()))
    explicit = _sum(facts, "explicit")
    return {
        **counts,
        "derived": derived,
        "mean_size": _sum(facts, "kept_sum") / explicit if explicit else None,
        "largest": pc.max(facts.column("kept_max")).as_py() if explicit else None,
    }


def _distribution_coverage(tape: Tape) -> dict[str, int]:
    """Positions with a recorded distribution, and the largest k."""
    positions = k = 0
    for _, _, batch in tape.batches("distributions", ["n", "k"]):
        positions += pc.sum(batch.column("n")).as_py() or 0
        k = max(k, pc.max(batch.column("k")).as_py() or 0)
    return {"positions": positions, "k": k} if positions else {}


def _activation_coverage(tape: Tape, encoding: str | None) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for _, _, batch in tape.batches("activations", ["site", "n", "encoding"]):
        for row in batch.to_pylist():
            if row["encoding"] == encoding:
                counts[row["site"]] += row["n"]
    return dict(counts)


def _weights(tape: Tape) -> list[dict[str, Any]]:
    rows = sorted(tape.rows("weights"), key=lambda r: (r["engine"], r["version"], r["group"] or ""))
    return [
        {
            "engine": row["engine"],
            "version": row["version"],
            "state": row["state"],
            "group": row["group"],
            "digest": None if row["digest"] is None else f"{row['digest']:016x}",
            "tensors": row["tensors"],
            "elements": row["elements"],
            "label": row["label"],
            "reason": row["reason"],
        }
        for row in rows
    ]


def _events(tape: Tape) -> dict[str, Any]:
    rows = sorted(tape.rows("events"), key=lambda r: r["t_ns"])
    faults = [r for r in rows if r["kind"] in ("gap", "hook_error")]
    findings = [json.loads(r["detail"] or "{}") for r in rows if r["kind"] == "finding"]
    return {
        "by_kind": dict(Counter(r["kind"] for r in rows).most_common()),
        "findings": findings[:_SHOWN],
        "faults": [
            {
                **{k: r[k] for k in _EVENT_FACTS if r[k] is not None},
                "detail": _detail(r["detail"]),
            }
            for r in faults[:_SHOWN]
        ],
    }


def _detail(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text  # shown as it stands: info must not fail on one bad row


def _seal(tape: Tape) -> dict[str, Any] | None:
    if tape.seal is None:
        return None
    return {
        "sealed": tape.seal.get("sealed"),
        "status": tape.seal.get("status", {}),
        "recovered": tape.seal.get("recovered", []),
        "live": tape.seal.get("live", []),
    }


def position_rows(sequence: Sequence, start: int, stop: int) -> dict[str, Any]:
    """Columns of one sequence over positions [start, stop), for `rolltape show`.

    Args:
        sequence: any sequence of a tape.
        start: first position.
        stop: one behind the last.

    Returns:
        `position`, `token`, `loss_mask`, `step`, `weight_version`, the logprob columns that hold
        anything, `support` (kept set size, "full" or None) and `routes`: by role the layers and,
        per position, the ids of each layer (None where there is no route).
    """
    span = slice(start, stop)
    columns: dict[str, Any] = {
        "position": list(range(start, stop)),
        "token": sequence.tokens[span],
        "loss_mask": sequence.loss_mask[span],
    }
    for name in LOGPROBS:
        column: Masked = sequence.logprob(name)
        if column.valid.any():
            columns[name] = column[span]
    supports = sequence.supports()
    if supports is not None:
        sizes = np.diff(supports.offsets)
        names = {SUPPORT_FULL: "full", SUPPORT_UNRECORDED: None}
        columns["support"] = [
            int(sizes[p]) if supports.state[p] == SUPPORT_EXPLICIT else names[supports.state[p]]
            for p in range(start, stop)
        ]
    columns["step"] = sequence.step[span]
    columns["weight_version"] = sequence.weight_version[span]
    routes: dict[str, Any] = {}
    for role in ("used", "live"):
        found = sequence.routes(role)
        if found is not None:
            ids = [
                [
                    found.ids[p, column].tolist() if found.valid[p, column] else None
                    for column in range(len(found.layers))
                ]
                for p in range(start, stop)
            ]
            routes[role] = {"layers": list(found.layers), "ids": ids}
    columns["routes"] = routes
    return columns
