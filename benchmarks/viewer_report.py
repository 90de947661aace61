"""The report of the tapes that `viewer_tape.py` makes, as `rolltape diff --layers` writes it.

Not a benchmark. A diff of tapes this large takes longer than a test may; the measures of each
sequence are its own, those of the whole come from every sixteenth sequence.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from viewer_plan import Plan, choices, logprobs, mixed, token_ids, uniform

from rolltape.replay.drift import counts_over, drift, first_divergent
from rolltape.replay.measures import (
    Deltas,
    by_position,
    by_version,
    histogram,
    measure,
    same_bits,
)
from rolltape.replay.report import IN_HEADER, SPARKS
from rolltape.store import Masked, TapeWriter, create_report, seal
from rolltape.store import open as open_tape
from rolltape.store.columns import make_batch, ragged
from rolltape.store.jsonable import jsonable
from rolltape.store.places import LocalPlace
from rolltape.store.schema import REPORT_TABLES, TOKEN_STATES
from rolltape.store.shards import JSON_CHECKSUM
from rolltape.store.tape import REPORT_HEADER
from rolltape.store.writer import BUFFER_BYTES, put_json

#: (table, columns) of rows to write.
Columns = Iterator[tuple[str, dict[str, Any]]]

COMPARED, MASKED, NON_FINITE, NOT_SCORED = (
    TOKEN_STATES.index(name) for name in ("compared", "masked", "non_finite", "not_scored")
)
ROUTED = ("decisions", "disagree", "order_only")
STRETCHES = ("0-15", "16-63", "64-255", "256-1023", "1024+")


@dataclass
class Routing:
    """Adds up agreement of routes by (slice, layer): counts as in `ROUTED`, then margins."""

    sums: dict[str, np.ndarray]
    tokens: int = 0
    tokens_any: int = 0
    sequences: int = 0
    missing: int = 0

    def add(self, plan: Plan, i: int) -> dict[str, Any]:
        """Count a sequence; returns its layers that flip at each position, and its own counts."""
        cached = int(plan.cached[i])  # what the prefix cache had was not routed
        made = choices(plan.tokens(i)[cached:-1], plan.layers)
        said = cached + np.arange(len(made.a)) - plan.prompt[i]
        stretch = np.searchsorted((0, 16, 64, 256, 1024), said, side="right") - 1
        for name in ("all", *(f"position:{s}" for s in STRETCHES)):
            here = slice(None) if name == "all" else stretch == STRETCHES.index(name[9:])
            flips, swaps, margin = made.flipped[here], made.swapped[here], made.margin[here]
            counts = [
                np.full(plan.layers, len(flips)),
                flips.sum(0),
                swaps.sum(0),
                (flips * margin).sum(0),
                (~flips * margin).sum(0),
                np.where(flips, margin, 0).max(0, initial=0),
            ]
            total = self.sums.setdefault(name, np.zeros((6, plan.layers)))
            total[:5] += counts[:5]
            total[5] = np.maximum(total[5], counts[5])
        any_ = made.flipped.any(1)
        self.tokens += len(any_)
        self.tokens_any += int(any_.sum())
        self.missing += cached * plan.layers
        self.sequences += 1
        return {
            "flips": np.append(np.full(cached, -1), made.flipped.sum(1)),
            "decisions": made.flipped.size,
            "disagree": int(made.flipped.sum()),
            "tokens_any": int(any_.sum()),
            "routed_tokens": len(any_),
        }

    def row(self, sums: np.ndarray) -> dict[str, Any]:
        counts = {name: int(sums[at]) for at, name in enumerate(ROUTED)}
        agree = counts["decisions"] - counts["disagree"]
        return {
            **counts,
            "top1_disagree": None,
            "weight_l1": None,
            "flip_margin_mean": sums[3] / counts["disagree"] if counts["disagree"] else None,
            "flip_margin_max": float(sums[5]) if counts["disagree"] else None,
            "agree_margin_mean": sums[4] / agree if agree else None,
        }

    def table(self) -> list[dict[str, Any]]:
        return [
            {"layer": layer, "slice": name, **self.row(sums[:, layer])}
            for name, sums in self.sums.items()
            for layer in range(sums.shape[1])
        ]

    def summary(self) -> dict[str, Any] | None:
        if not self.sequences:
            return None

        def whole(name: str) -> dict[str, Any]:
            sums = self.sums[name].sum(1)
            sums[5] = self.sums[name][5].max()
            row = self.row(sums)
            return {**row, "frac_disagree": row["disagree"] / max(row["decisions"], 1)}

        return {
            **whole("all"),
            "sequences": self.sequences,
            "tokens": self.tokens,
            "tokens_any": self.tokens_any,
            "missing_a": self.missing,
            "missing_b": 0,
            "a_role": "used",
            "b_role": "used",
            "used": None,
            "margin_side": "b",
            "per_layer": [
                {k: v for k, v in row.items() if k != "slice"}
                for row in self.table()
                if row["slice"] == "all"
            ],
            "by_position": {s: whole(f"position:{s}") for s in STRETCHES},
            "by_version": {},
        }


@dataclass
class Compared:
    """What is gathered over the sequences for the summary."""

    states: np.ndarray
    by_sequence: list[dict[str, Any]]
    by_group: dict[str, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))
    sample: list[tuple[np.ndarray, ...]] = field(default_factory=list)


def write_report(plan: Plan, a: Path, b: Path, out: Path) -> None:
    """Write the folder."""
    routing, compared = Routing({}), Compared(np.zeros(len(TOKEN_STATES), np.int64), [])
    create_report(out, summary={})
    with TapeWriter(out) as writer:
        for table, columns in _sequences(plan, routing, compared):
            writer.append(table, columns)
        if rows := routing.table():
            writer.append("routing", {name: [r[name] for r in rows] for name in rows[0]})
        for batch in _activations(plan):
            writer.append_batch("activations", batch)
    # only now it is known what the summary says: a diff holds in memory what is too much here
    header = json.loads((out / REPORT_HEADER).read_text())
    header.pop(JSON_CHECKSUM)
    header["summary"] = jsonable(_summary(plan, a, b, routing, compared))
    if len(compared.by_sequence) <= IN_HEADER:
        header["summary"]["by_sequence"] = [
            {k: v for k, v in jsonable(row).items() if k not in _IN_TABLE}
            for row in compared.by_sequence
        ]
    put_json(LocalPlace(out), REPORT_HEADER, header)
    seal(out)


def _sequences(plan: Plan, routing: Routing, compared: Compared) -> Columns:
    """Rows of `sequences` and `tokens`, 32 sequences at a time; adds up what the summary says."""
    scored = plan.scored()
    for some in np.split(scored, np.arange(32, len(scored), 32)):
        rows, flips = [], []
        length = plan.length[some]
        index = np.concatenate([plan.tokens(i) for i in some])
        lp_a, lp_b = logprobs(index)
        drawn = np.concatenate([np.arange(plan.length[i]) >= plan.prompt[i] for i in some])
        mask = np.concatenate([plan.mask(i) for i in some])
        state = np.where(mask, COMPARED, np.where(drawn, MASKED, NOT_SCORED)).astype(np.uint8)
        state[(state == COMPARED) & ~np.isfinite(lp_a)] = NON_FINITE
        exact = lp_b.astype(np.float64) - lp_a
        counted = state == COMPARED
        compared.states += np.bincount(state, minlength=len(TOKEN_STATES))
        ends = np.cumsum(length)
        for number, (i, end) in enumerate(zip(some.tolist(), ends.tolist(), strict=True)):
            span = slice(end - int(length[number]), end)
            at = np.flatnonzero(counted[span])
            delta, bits = exact[span][at], same_bits(lp_a[span][at], lp_b[span][at])
            found = routing.add(plan, i) if plan.dense[i] else None
            flips.append(
                Masked.empty(int(length[number]), np.int32)
                if found is None
                else Masked(found["flips"], found["flips"] >= 0).resized(int(length[number]))
            )
            rows.append(_row(plan, i, state[span], at, delta, bits, found))
            compared.by_group[plan.group(i)].append(np.stack([delta, bits]))
            if len(compared.by_sequence) % 16 == 0:
                pair = np.full(len(at), len(compared.by_sequence))
                said = at - plan.prompt[i]
                compared.sample.append((delta, bits, pair, at, said, pair // 1024))
            compared.by_sequence.append(rows[-1])
        names = REPORT_TABLES["sequences"].names
        yield "sequences", {n: [r[n] for r in rows] for n in names}
        offsets = pa.array(np.append(0, ends).astype(np.int32))
        values = {
            "a_logprob": pa.array(lp_a, mask=~drawn, from_pandas=False),
            "b_logprob": pa.array(lp_b, mask=~drawn, from_pandas=False),
            "delta": pa.array(exact.astype(np.float32), mask=~counted, from_pandas=False),
        }
        table = {
            "a": [r["a"] for r in rows],
            "n": length,
            "state": ragged(state, length, pa.uint8()),
            **{n: pa.ListArray.from_arrays(offsets, v) for n, v in values.items()},
            "flips": flips,
            "ids": pa.ListArray.from_arrays(offsets, pa.array(token_ids(index))),
        }
        yield "tokens", table


def _row(
    plan: Plan,
    i: int,
    state: np.ndarray,
    at: np.ndarray,
    delta: np.ndarray,
    bits: np.ndarray,
    routing: dict[str, Any] | None,
) -> dict[str, Any]:
    measures = measure(delta, bits)
    over = at[np.abs(delta) > 0.1]
    counts = np.bincount(state, minlength=len(TOKEN_STATES))
    names = ("decisions", "disagree", "tokens_any", "routed_tokens")
    return {
        "a": plan.key(i).id,
        "b": plan.key(i, trainer=True).id,
        "group": plan.group(i),
        "prompt_len": int(plan.prompt[i]),
        "length": int(plan.length[i]),
        "finish": plan.FINISH[plan.finish[i]],
        "paired_by": "key",
        "ambiguous": False,
        "weight_version": None,
        "compared": len(delta),
        "masked": int(counts[MASKED]),
        "missing": 0,
        "non_finite": int(counts[NON_FINITE]),
        **measures,
        "max_at": int(at[np.abs(delta).argmax()]) if len(at) else None,
        "spark": _spark(int(plan.length[i]), at, delta),
        "first_over": int(over.min()) if len(over) else None,
        "tokens": dict(zip(TOKEN_STATES, counts.tolist(), strict=True)),
        **{n: None if routing is None else routing[n] for n in names},
        "routing": routing and {n: routing[n] for n in names[:3]} | {"tokens": routing[names[3]]},
    }


def _activations(plan: Plan) -> Iterator[pa.RecordBatch]:
    """A row a sequence and layer: all layers of a sequence, then the next."""
    layers = np.arange(plan.layers)
    types = {
        **dict.fromkeys(("max_abs", "rel_l2", "cosine"), pa.float32()),
        "equal": pa.bool_(),
        "ulp": pa.int64(),
        "non_finite": pa.int32(),
    }
    for i in np.flatnonzero(plan.dense).tolist():
        n = int(plan.length[i])
        index = layers[:, None] + plan.tokens(i) * 1024
        size, hashed = uniform(index, 7), mixed(index, 8)
        # little differs in the first layers, then errors grow
        equal = hashed % np.uint64(64) > np.minimum(4 * layers, 64).astype(np.uint64)[:, None]
        rel = 10 ** (-6 + 3.5 * layers[:, None] / plan.layers + 0.8 * size)
        rel[hashed % np.uint64(9973) == 0] *= 40
        rel[equal] = 0
        values = {
            "max_abs": rel * (3 + size),
            "rel_l2": rel,
            "cosine": 1 - rel * rel / 2,
            "equal": equal,
            "ulp": rel * 256 * (1 + size),
            "non_finite": np.zeros_like(rel),
        }
        lengths = np.full(plan.layers, n)
        columns = {
            name: ragged(v.ravel().astype(types[name].to_pandas_dtype()), lengths, types[name])
            for name, v in values.items()
        }
        batch = make_batch(
            "activations",
            REPORT_TABLES["activations"],
            {
                "a": [plan.key(i).id] * plan.layers,
                "site": [f"layers.{layer}.out" for layer in layers],
                "start": 0,
                "n": lengths,
                **columns,
                "sketched": False,
            },
        )
        rows = max(1, BUFFER_BYTES // (26 * n))  # as many as the writer collects
        for start in range(0, plan.layers, rows):
            yield batch.slice(start, rows)


def _summary(plan: Plan, a: Path, b: Path, routing: Routing, compared: Compared) -> dict[str, Any]:
    sample = [np.concatenate(parts) for parts in zip(*compared.sample, strict=True)]
    delta, bits, pair, position, said, version = sample
    known = Masked.full(version)
    deltas = Deltas(delta, bits.astype(bool), pair, position, said, known)
    counts = dict(zip(TOKEN_STATES, compared.states.tolist(), strict=True))
    drawn = [r for r in compared.by_sequence if r["max_abs"] is not None]
    worst = max(drawn, key=lambda r: r["max_abs"])
    whole = histogram(delta, bits.astype(bool))
    factor = counts["compared"] / max(len(delta), 1)
    sites = int(plan.length[plan.dense].sum()) * plan.layers
    unequal = sites * 15 // 16
    front = {
        "site": "layers.0.out",
        "sequence": compared.by_sequence[0]["a"],
        "position": 0,
        "rel_l2": 1e-6,
        "max_abs": 3e-6,
        "column": 0,
        "ulp": 1,
        "non_finite": 0,
        "threshold": None,
    }
    names = ("decisions", "disagree", "order_only", "top1_disagree")
    routes = routing.summary()
    activations = {
        "verdict": "divergent",
        "reason": f"{sites:,} rows of {plan.layers} sites compared",
        "front": front,
        "earliest": front,
        "above": {},
        "floor": None,
        "sites": [_site(plan, layer, front) for layer in range(plan.layers)],
    }
    return {
        "verdict": "divergent",
        "reason": f"different bits in {counts['compared'] * 5 // 9:,} logprobs",
        "column": "processed",
        **measure(delta, bits.astype(bool)),
        "tokens_compared": counts["compared"],
        "max_abs": worst["max_abs"],
        "max_at": {"sequence": worst["a"], "position": worst["max_at"]},
        "tokens": counts,
        "non_finite": counts["non_finite"],
        "non_finite_detail": {
            "a": {"NaN": counts["non_finite"], "Infinity": 0, "-Infinity": 0},
            "b": {"NaN": 0, "Infinity": 0, "-Infinity": 0},
            "where": [],
        },
        "histogram": {
            **whole,
            "bitwise": int(whole["bitwise"] * factor),
            "counts": [int(c * factor) for c in whole["counts"]],
        },
        "routing": routes,
        "over": {name: int(n * factor) for name, n in counts_over(delta).items()},
        "drift": drift(deltas, [], open_tape(a), open_tape(b)),
        "first_divergent": first_divergent(activations if sites else None, routing.table()),
        "supports": {"compared": 0, "equal": 0, "differ": 0, "first_differing": None},
        "activations": activations if sites else None,
        "noise": None,
        "identity": [],
        "warnings": [{"kind": "open", "message": "some sequences of a are open", "count": 1}],
        "compared": {
            "sequences": len(compared.by_sequence),
            "logprobs": counts["compared"],
            "routes": routes["decisions"] if routes else 0,
            "supports": 0,
            "activations": sites,
        },
        "differences": {
            "logprobs": counts["compared"] * 5 // 9,
            **({"routes": routes[names[1]], "route_order": routes[names[2]]} if routes else {}),
            "supports": 0,
            "activations": unequal,
        },
        "not_compared": {"supports": "a and b recorded none"},
        "semantics": {"column": "processed", "spans": [], "differences": []},
        "by_semantics": {},
        "by_position": by_position(deltas),
        "by_version": by_version(deltas),
        "by_group": {
            name: measure(*_both(parts)) for name, parts in sorted(compared.by_group.items())
        },
        "alignment": {
            "pairs": len(compared.by_sequence),
            "by_key": len(compared.by_sequence),
            "by_digest": 0,
            "ambiguous": 0,
            "unmatched_a": len(plan) - len(compared.by_sequence),
            "unmatched_b": 0,
        },
        "a": _side(a),
        "b": _side(b),
        "settings": [],
        "scoring": None,
    }


#: Columns of the `sequences` table that a row of `by_sequence` has under another name.
_IN_TABLE = (
    *("compared", "masked", "missing", "non_finite", "weight_version", "spark"),
    *("decisions", "disagree", "tokens_any", "routed_tokens"),
)  # fmt: skip


def _spark(length: int, at: np.ndarray, delta: np.ndarray) -> Masked:
    count = min(SPARKS, length)
    peak, seen = np.zeros(count), np.zeros(count, bool)
    np.maximum.at(peak, at * count // length, np.abs(delta))
    seen[at * count // length] = True
    return Masked(peak.astype(np.float32), seen)


def _both(parts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    delta, bits = np.concatenate(parts, axis=1)
    return delta, bits.astype(bool)


def _site(plan: Plan, layer: int, front: dict[str, Any]) -> dict[str, Any]:
    rel = 10 ** (-6 + 3.5 * layer / plan.layers)
    positions = int(plan.length[plan.dense].sum())
    at = {"sequence": front["sequence"], "position": 0}
    return {
        "site": f"layers.{layer}.out",
        "positions": positions,
        "equal": positions // 16 if layer < 16 else 0,
        "sketched": 0,
        "non_finite": 0,
        "non_finite_at": None,
        "max_abs": 250 * rel,
        "max_at": {**at, "column": 0},
        "mean_max_abs": 7 * rel,
        "rel_l2_mean": 2 * rel,
        "rel_l2_max": 200 * rel,
        "cosine_mean": 1 - rel * rel,
        "cosine_min": 1 - 100 * rel * rel,
        "ulp_max": 1000,
        "first_unequal": at,
    }


def _side(path: Path) -> dict[str, Any]:
    tape = open_tape(path)
    names = ("engine", "adapter", "model", "model_type", "dtype", "device")
    return {
        "path": str(path),
        "uuid": tape.uuid,
        "role": tape.role,
        "parent": tape.parent,
        "sequences": len(tape),
        "sealed": True,
        "engines": [{name: row[name] for name in names} for row in tape.engines.values()],
    }
