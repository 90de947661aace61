"""What may surprise the reader of a tape: surplus forwards, late facts that belong to nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pyarrow.compute as pc

from rolltape.store.index import INDEXED
from rolltape.store.late import ANY_SAMPLE, unresolved
from rolltape.store.schema import TAPE_TABLES
from rolltape.store.sequences import Tape

_SHOWN = 20  # of the annotations that belong to nothing


def surplus(tape: Tape) -> dict[str, dict[str, int]]:
    """What reaches beyond the end of its sequence, and is cut when it is read.

    An asynchronous engine starts the next forward before it knows that a sequence has ended.

    Returns:
        Per table with any: `sequences`, and `positions`, how far they reach beyond in all.
    """
    lengths = {key: length for key, (length, closed) in tape.lengths.items() if closed}
    found = {}
    for table in INDEXED:
        if "start" not in TAPE_TABLES[table].names:
            continue
        entries = tape.index.entries(table)
        ends = np.zeros(len(tape.index.codes), np.int64)
        np.maximum.at(ends, entries.code, entries.end)
        limit = np.full(len(ends), np.iinfo(np.int64).max)
        for key, code in tape.index.codes.items():
            limit[code] = lengths.get(key, limit[code])
        beyond = np.maximum(ends - limit, 0)
        if beyond.any():
            found[table] = {
                "sequences": int((beyond > 0).sum()),
                "positions": int(beyond.sum()),
            }
    return found


def tactic_counts(tape: Tape) -> dict[str, Any]:
    """Kernel choices by tuner and source, and those that nobody can see."""
    counts: Counter[tuple[str, str]] = Counter()
    unrecorded: dict[tuple[str, str], str | None] = {}
    for _, _, batch in tape.batches("tactics", ["tuner", "op", "source", "reason"]):
        for row in batch.to_pylist():
            counts[row["tuner"], row["source"]] += 1
            if row["source"] == "unrecorded":
                unrecorded.setdefault((row["tuner"], row["op"]), row["reason"])
    by_tuner: dict[str, dict[str, int]] = {}
    for (tuner, source), n in sorted(counts.items()):
        by_tuner.setdefault(tuner, {})[source] = n
    listed = [
        {"tuner": tuner, "op": op, "reason": reason}
        for (tuner, op), reason in sorted(unrecorded.items())
    ]
    return {"rows": counts.total(), "by_tuner": by_tuner, "unrecorded": listed}


def annotation_counts(tape: Tape) -> dict[str, Any]:
    """Late facts by name, and those by an external id that belong to no sequence."""
    names: Counter[str] = Counter()
    for _, _, batch in tape.batches("annotations", ["name"]):
        for row in pc.value_counts(batch.column("name")).to_pylist():
            names[row["values"]] += row["counts"]
    lost = list(unresolved(tape, tape.index, tape.externals)) if names else []
    return {
        "by_name": dict(names.most_common()),
        **{
            reason: sum(item.rows for item in lost if item.reason == reason)
            for reason in ("unmatched", "ambiguous")
        },
        "unresolved": [
            {
                "request": item.request,
                "sample": None if item.sample == ANY_SAMPLE else item.sample,
                "rows": item.rows,
                "reason": item.reason,
            }
            for item in lost[:_SHOWN]
        ],
    }


def notices(tape: Tape) -> list[str]:
    """What is not wrong with a tape but may surprise its reader, one sentence each."""
    found = [
        f"{table}: {row['sequences']} sequences have fragments beyond their end, "
        f"{row['positions']} positions; they are cut"
        for table, row in surplus(tape).items()
    ]
    facts = annotation_counts(tape)
    for reason, why in (
        ("unmatched", "no sequence has their external id"),
        ("ambiguous", "several sequences have their external id"),
    ):
        if facts[reason]:
            example = next(u["request"] for u in facts["unresolved"] if u["reason"] == reason)
            found.append(
                f"annotations: {facts[reason]} belong to no sequence: {why}, for example {example}"
            )
    for engine in tape.engines.values():
        for name in engine.get("disagreements", {}):
            found.append(f"engines: processes of {engine['engine'][:8]} disagree on {name}")
    return found
