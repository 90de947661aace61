"""What a random tape says, joined position by position in plain Python.

It shares nothing with the package but the rows that were written, so it cannot share its mistakes.
Floats are compared as bits. Missing is None.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import numpy as np

from rolltape.store import Masked
from rolltape.store.keys import Key
from rolltape.store.schema import SUPPORT_EXPLICIT, SUPPORT_UNRECORDED
from rolltape.store.sequences import Sequence
from tests.random_tapes import LOGPROBS, Made

NAN = 0x7FC00000


def expected(made: Made, key: Key) -> dict[str, Any]:
    """Everything that is known of one sequence."""
    length, prompt = size(made, key)
    out: dict[str, Any] = {"length": length}
    for column in ("ids", "loss_mask", *LOGPROBS):
        out[column] = _column(made.of("tokens", key), column, length)
    out["semantics"] = _positions(made.of("tokens", key), length)
    for role in ("used", "live"):
        rows = [r for r in made.of("routes", key) if r["role"] == role]
        out[role] = _routes(rows, length) if rows else None
    supports = made.of("supports", key)
    out["supports"] = _supports(supports, length) if supports else None
    distributions = made.of("distributions", key)
    out["distributions"] = _distributions(distributions, length) if distributions else None
    spans = sorted(made.of("activations", key), key=lambda r: r["start"])
    out["activations"] = [
        (r["start"], r["dtype"], _bits(r["_data"][: max(0, length - r["start"])]))
        for r in spans
        if r["start"] < length or not r["n"]
    ]
    notes = sorted(made.of("annotations", key), key=lambda r: r["t_ns"])
    out["annotations"] = {
        r["name"]: r["text"] if r["number"] is None else np.float64(r["number"]).tobytes()
        for r in notes
    }
    for name, column in (("step", "step"), ("version", "weight_version")):
        out[name] = _produced(made.of("forwards", key), column, length, prompt)
    return out


def read(sequence: Sequence) -> dict[str, Any]:
    """The same, as the package reads it; of a window its positions alone."""
    out: dict[str, Any] = {"length": sequence.length}
    out["ids"] = _list(sequence.tokens)
    out["loss_mask"] = _list(sequence.loss_mask)
    out |= {name: _list(sequence.logprob(name)) for name in LOGPROBS}
    out["semantics"] = _positions(
        [{"start": s, "n": n, "semantics": said} for s, n, said in sequence.semantics],
        sequence.length,
    )
    for role in ("used", "live"):
        out[role] = read_routes(sequence, role)
    supports = sequence.supports()
    out["supports"] = None
    if supports is not None:
        sets = [
            (int(state), supports.ids[a:b].tolist())
            for state, a, b in zip(
                supports.state, supports.offsets[:-1], supports.offsets[1:], strict=True
            )
        ]
        out["supports"] = (supports.derived, sets)
    found = sequence.distributions()
    out["distributions"] = None
    if found is not None:
        rows = [
            (found.ids[p].tolist(), _bits(found.logprobs[p]), _bits(found.tail[p]))
            if found.valid[p]
            else None
            for p in range(len(found))
        ]
        spans = [{"start": s, "n": n, "semantics": said or {}} for s, n, said in found.semantics]
        out["distributions"] = (rows, _positions(spans, len(found)))
    out["activations"] = [
        (start, dtype, _bits(data)) for start, dtype, data in sequence.activations().get("norm", [])
    ]
    out["annotations"] = {
        name: np.float64(value).tobytes() if isinstance(value, float) else value
        for name, value in sequence.annotations.items()
    }
    out["step"], out["version"] = _list(sequence.step), _list(sequence.weight_version)
    return out


def read_routes(sequence: Sequence, role: str, layers: list[int] | None = None) -> Any:
    """Routes of a role as (layers, [per position [per layer (ids, weights, margin)]], missing)."""
    routes = sequence.routes(role, layers)
    if routes is None:
        return None
    rows = []
    for p in range(len(routes.ids)):
        row: list[Any] = []
        for at in range(len(routes.layers)):
            if not routes.valid[p, at]:
                row.append(None)
                continue
            weights = None
            if routes.weights is not None and routes.weighted[p, at]:
                weights = _bits(routes.weights[p, at])
            margin = NAN if routes.margin is None else _bits(routes.margin[p, at])
            row.append((routes.ids[p, at].tolist(), weights, margin))
        rows.append(row)
    return routes.layers, rows, sorted(map(str, routes.missing))


def cut(whole: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """What a window over [start, stop) has to say, of columns with an entry a position."""
    out = {}
    for name in ("ids", "loss_mask", *LOGPROBS, "step", "version"):
        out[name] = whole[name][start:stop]
    for role in ("used", "live"):
        layers, rows = whole[role][:2] if whole[role] is not None else ((), [])
        # by layer: a window has the layers of the fragments that reach into it
        named = [
            {n: cell for n, cell in zip(layers, row, strict=True) if cell is not None}
            for row in rows[start:stop]
        ]
        out[role] = named if any(named) else None
    # nothing recorded is told apart from nothing there only of a whole sequence
    sets = whole["supports"][1][start:stop] if whole["supports"] is not None else []
    out["supports"] = sets if any(cell != (SUPPORT_UNRECORDED, []) for cell in sets) else None
    return out


def window(whole: dict[str, Any]) -> dict[str, Any]:
    """What was read of a window, in the form of `cut`."""
    return cut(whole, 0, len(whole["ids"]))


def rollup(sequence: dict[str, Any], made: Made, key: Key) -> dict[str, Any]:
    """The roll-ups that follow from a joined sequence, by brute force."""
    length, prompt = size(made, key)
    out: dict[str, Any] = {"length": length, "prompt_len": prompt}
    out["loss_tokens"] = sum(mask is True for mask in sequence["loss_mask"])
    for name in LOGPROBS:
        values = [
            (float(np.uint32(bits).view(np.float32)), p)
            for p, bits in enumerate(sequence[name])
            if bits is not None and p >= prompt
        ]
        finite = [(v, p) for v, p in values if math.isfinite(v)]
        out[f"{name}_count"] = len(values)
        out[f"{name}_non_finite"] = len(values) - len(finite)
        out[f"{name}_sum"] = math.fsum(v for v, _ in finite) if values else None
        out[f"{name}_min"], out[f"{name}_min_at"] = min(finite, default=(None, None))
    for role, rows_name in (("used", "route_rows"), ("live", "live_rows")):
        rows = sequence[role][1] if sequence[role] is not None else []
        counts = [sum(cell is not None for cell in row) for row in rows]
        out[rows_name] = sum(counts)
        if role == "used":
            out["routed"] = sum(n > 0 for n in counts)
    sets = sequence["supports"][1] if sequence["supports"] is not None else []
    sizes = [len(ids) for state, ids in sets if state == SUPPORT_EXPLICIT]
    out["explicit"], out["kept_sum"] = len(sizes), sum(sizes)
    out["kept_max"] = max(sizes, default=0)
    # those of a logprob: not of a forward that computed again what was there
    versions = [version for version in sequence["version"] if version is not None]
    out["version_min"], out["version_max"] = (
        min(versions, default=None),
        max(versions, default=None),
    )
    named = [e for e in made.of("events") if (e["request"], e["sample"]) == (key[1], key[2])]
    out["gaps"] = 0 if key.scoring else len(named)
    return out


def size(made: Made, key: Key) -> tuple[int, int]:
    """Length and prompt length."""
    rows = made.of("sequences", key)
    prompt = rows[-1]["prompt_len"] if rows else 0
    closed = [r["length"] for r in rows if r["length"] is not None]
    ends = [r["start"] + r["n"] for r in made.of("tokens", key)]
    return (closed[-1] if closed else max([prompt, *ends])), prompt


def _bits(values: Any) -> Any:
    return np.asarray(values, np.float32).view(np.uint32).tolist()


def _list(column: Masked) -> list[Any]:
    values = column.values
    plain = _bits(values) if values.dtype == np.float32 else values.tolist()
    return [v if ok else None for v, ok in zip(plain, column.valid, strict=True)]


def _cell(cell: Any) -> list[Any]:
    return _list(cell if isinstance(cell, Masked) else Masked.full(np.asarray(cell)))


def _column(rows: list[dict[str, Any]], column: str, length: int) -> list[Any]:
    out: list[Any] = [None] * length
    for row in rows:
        if row[column] is not None:
            for i, value in enumerate(_cell(row[column])[: max(0, length - row["start"])]):
                if out[row["start"] + i] is None:
                    out[row["start"] + i] = value
    return out


def _positions(rows: list[dict[str, Any]], length: int) -> Counter[tuple[int, str]]:
    """How often each thing is said of each position."""
    out: Counter[tuple[int, str]] = Counter()
    for row in rows:
        if row["semantics"] is not None:
            text = json.dumps(row["semantics"], sort_keys=True)
            end = min(row["start"] + row["n"], length)
            out.update((p, text) for p in range(row["start"], end))
    return out


def _routes(rows: list[dict[str, Any]], length: int) -> Any:
    layers = tuple(rows[0]["layers"])
    if any(set(row["layers"]) - set(layers) for row in rows):
        layers = tuple(sorted({layer for row in rows for layer in row["layers"]}))
    out: list[list[Any]] = [[None] * len(layers) for _ in range(length)]
    missing: list[tuple[Any, ...]] = []
    for row in sorted(rows, key=lambda r: r["step"]):
        missing += [tuple(e) for e in json.loads(row["missing"] or "[]")]
        for i in range(min(row["n"], length - row["start"])):
            for column, layer in enumerate(row["layers"]):
                at = layers.index(layer)
                if not row["_valid"][i, column] or out[row["start"] + i][at] is not None:
                    continue
                weights = None if row["_weights"] is None else _bits(row["_weights"][i, column])
                margin = NAN if row["_margin"] is None else _bits(row["_margin"][i, column])
                ids = row["_ids"][i, column].tolist()
                out[row["start"] + i][at] = (ids, weights, margin)
    said = [str((int(a), int(n), layer, str(why))) for a, n, layer, why in missing]
    return layers, out, sorted(said)


def _supports(rows: list[dict[str, Any]], length: int) -> Any:
    out: list[tuple[int, list[int]]] = [(SUPPORT_UNRECORDED, [])] * length
    for row in rows:
        for i in range(min(row["n"], length - row["start"])):
            if out[row["start"] + i][0] == SUPPORT_UNRECORDED:
                out[row["start"] + i] = (int(row["state"][i]), row["_sets"][i].tolist())
    return any(row["derived"] for row in rows), out


def _distributions(rows: list[dict[str, Any]], length: int) -> Any:
    out: list[Any] = [None] * length
    for row in rows:
        k, tail = row["k"], _cell(row["tail"])
        for i in range(min(row["n"], length - row["start"])):
            if tail[i] is not None and out[row["start"] + i] is None:
                part = slice(i * k, (i + 1) * k)
                ids, logprobs = row["ids"][part].tolist(), _bits(row["logprobs"][part])
                out[row["start"] + i] = (ids, logprobs, tail[i])
    # what nothing is said of is a statement too
    said = [{**row, "semantics": row["semantics"] or {}} for row in rows]
    return out, _positions(said, length)


def _produced(rows: list[dict[str, Any]], column: str, length: int, prompt: int) -> list[Any]:
    out: list[Any] = [None] * length
    for row in sorted(rows, key=lambda r: r["step"]):
        end = row["start"] + row["n"]
        unfinished = row["kind"] == "prefill" and end < prompt
        if row["kind"] == "dummy" or unfinished or row[column] is None or end >= length:
            continue
        if out[end] is None:
            out[end] = row[column]
    return out
