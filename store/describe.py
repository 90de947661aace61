"""What a tape holds and what it lacks, as one JSON-able object: `rolltape info`."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.store import codecs
from rolltape.store.columns import Masked
from rolltape.store.keys import Key
from rolltape.store.schema import (
    REPORT_TABLES,
    SUPPORT_EXPLICIT,
    SUPPORT_FULL,
    SUPPORT_UNRECORDED,
    TAPE_TABLES,
)
from rolltape.store.sequences import LOGPROBS, Sequence, Tape
from rolltape.store.shards import LIVE, list_shards
from rolltape.store.tape import Folder, Report, seal_problems

_SUPPORT_NAMES = {
    SUPPORT_FULL: "full",
    SUPPORT_EXPLICIT: "explicit",
    SUPPORT_UNRECORDED: "unrecorded",
}
_EVENT_FACTS = ("kind", "engine", "request", "start", "n")
_SHOWN = 20  # gaps and hook errors that are listed one by one


def describe_tape(tape: Tape) -> dict[str, Any]:
    """Everything `rolltape info` says of a tape; open it with `skip_damaged`.

    Returns:
        Counts and shares; `problems` names what is damaged, torn or missing, `damaged` is true if
        something that was written can no longer be read.
    """
    sequences = list(tape)
    tables = describe_tables(tape, TAPE_TABLES)
    response = sum(max(0, s.length - s.prompt_len) for s in sequences)
    broken = seal_problems(tape.path, tape.seal)
    torn = [p for p in tape.problems if "were ignored" in p]
    return {
        "kind": "tape",
        "path": str(tape.path),
        "uuid": tape.uuid,
        "format": tape.header["format"],
        "created": tape.header.get("created"),
        "role": tape.role,
        "parent": tape.parent,
        "provenance": tape.header.get("provenance", {}),
        "engines": [_engine(row) for row in tape.engines.values()],
        "sequences": {
            "total": len(sequences),
            "by_finish": dict(Counter(s.finish for s in sequences).most_common()),
            "groups": len({s.info["group"] for s in sequences if s.info["group"] is not None}),
            "longest": max((s.length for s in sequences), default=0),
        },
        "tokens": {
            "prompt": sum(s.prompt_len for s in sequences),
            "response": response,
            "loss": _loss_tokens(tape),
        },
        "coverage": {
            "logprobs": _logprob_coverage(tape, response),
            "routes": _route_coverage(tape),
            "supports": _support_coverage(tape, response),
            "activations": _activation_coverage(tape),
        },
        "weights": _weights(tape),
        "events": _events(tape),
        "tables": tables,
        "bytes": sum(t["bytes"] for t in tables.values()),
        "seal": _seal(tape),
        "problems": [*broken, *tape.problems],
        "damaged": len(broken) + len(tape.problems) > len(torn),
    }


def describe_report(report: Report) -> dict[str, Any]:
    """Everything `rolltape info` says of a diff report."""
    tables = describe_tables(report, REPORT_TABLES)
    return {
        "kind": "report",
        "path": str(report.path),
        "uuid": report.uuid,
        "format": report.header["format"],
        "created": report.header.get("created"),
        "summary": report.summary,
        "tables": tables,
        "bytes": sum(t["bytes"] for t in tables.values()),
        "problems": list(report.problems),
        "damaged": bool(report.problems),
    }


def describe_tables(folder: Folder, schemas: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Rows, bytes on disk and shards of every table that has any."""
    found = {}
    for name in schemas:
        shards = [(p, p.stat().st_size) for p in list_shards(folder.path / name) if p.exists()]
        if shards:
            found[name] = {
                "rows": len(folder.table(name)),
                "bytes": sum(size for _, size in shards),
                "shards": len(shards),
                "live": sum(p.name.endswith(LIVE) for p, _ in shards),
            }
    return found


def _engine(row: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if v is not None}


def _loss_tokens(tape: Tape) -> int:
    flat = pc.list_flatten(tape.table("tokens").column("loss_mask"))
    return int(pc.sum(flat.cast(pa.int64())).as_py() or 0)


def _logprob_coverage(tape: Tape, response: int) -> dict[str, dict[str, Any]]:
    """Response tokens with each column, and what the columns mean."""
    table = tape.table("tokens")
    prompts = {s.key: s.prompt_len for s in tape}
    prompt = np.array([prompts.get(key, 0) for key in _keys(table)], np.int64)
    first_scored = prompt - table.column("start").to_numpy()  # index within the fragment
    counts = dict.fromkeys(LOGPROBS, 0)
    non_finite = dict.fromkeys(LOGPROBS, 0)
    for name in LOGPROBS:
        column = table.column(name)
        sizes = pc.list_value_length(column).fill_null(0).to_numpy()
        flat = pc.list_flatten(column)
        known = flat.is_valid().to_numpy()
        index = np.arange(len(known)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        known = known & (index >= np.repeat(first_scored, sizes))
        counts[name] = int(known.sum())
        non_finite[name] = int((known & ~np.isfinite(flat.fill_null(0).to_numpy())).sum())
    return {
        name: {
            "tokens": counts[name],
            "share": counts[name] / response,
            "non_finite": non_finite[name],
        }
        for name in LOGPROBS
        if counts[name] and response
    }


def _keys(table: Any) -> list[Key]:
    columns = (table.column(c).to_pylist() for c in ("engine", "request", "sample", "pass"))
    return [Key(*row) for row in zip(*columns, strict=True)]


def _route_coverage(tape: Tape) -> dict[str, Any]:
    """Per role and layer the positions with a route, of those that had a forward (0..T-2)."""
    wanted = [
        "engine",
        "request",
        "sample",
        "pass",
        "start",
        "n",
        "role",
        "layers",
        "valid",
        "missing",
    ]
    table = tape.table("routes").select(wanted)
    lengths = {s.key: s.length for s in tape}
    seen: dict[tuple[str, int], dict[Key, np.ndarray]] = defaultdict(dict)
    reasons: Counter[str] = Counter()
    for key, row in zip(_keys(table), table.to_pylist(), strict=True):
        if key not in lengths:
            continue
        shape = (row["n"], len(row["layers"]))
        valid = codecs.decode_bits(row["valid"], shape, field="routes.valid")
        for column, layer in enumerate(row["layers"]):
            bits = seen[row["role"], layer].setdefault(key, np.zeros(lengths[key], bool))
            span = bits[row["start"] : row["start"] + row["n"]]
            span |= valid[: len(span), column]
        for _, n, layer, reason in json.loads(row["missing"]) if row["missing"] else []:
            reasons[reason] += n * (len(row["layers"]) if layer is None else 1)
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


def _support_coverage(tape: Tape, response: int) -> dict[str, Any]:
    """Response positions by state, and the sizes of the explicit kept sets."""
    table = tape.table("supports").select(
        ["engine", "request", "sample", "pass", "start", "derived", "state", "counts"]
    )
    if not len(table):
        return {}
    prompts = {s.key: s.prompt_len for s in tape}
    states = np.zeros(3, np.int64)
    sizes: list[np.ndarray] = []
    derived = False
    for key, row in zip(_keys(table), table.to_pylist(), strict=True):
        skip = max(0, prompts.get(key, 0) - row["start"])
        state = np.asarray(row["state"], np.uint8)[skip:]
        states += np.bincount(state, minlength=3)[:3]
        sizes.append(np.asarray(row["counts"], np.int64)[skip:][state == SUPPORT_EXPLICIT])
        derived |= bool(row["derived"])
    kept = np.concatenate(sizes)
    counts = {name: int(states[value]) for value, name in _SUPPORT_NAMES.items()}
    counts["unrecorded"] += max(0, response - int(states.sum()))
    return {
        **counts,
        "derived": derived,
        "mean_size": float(kept.mean()) if kept.size else None,
        "largest": int(kept.max()) if kept.size else None,
    }


def _activation_coverage(tape: Tape) -> dict[str, int]:
    table = tape.table("activations").select(["site", "n"])
    counts: Counter[str] = Counter()
    for row in table.to_pylist():
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
        }
        for row in rows
    ]


def _events(tape: Tape) -> dict[str, Any]:
    rows = sorted(tape.rows("events"), key=lambda r: r["t_ns"])
    faults = [r for r in rows if r["kind"] in ("gap", "hook_error")]
    return {
        "by_kind": dict(Counter(r["kind"] for r in rows).most_common()),
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
