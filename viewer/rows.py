"""Rows of steps: which kinds a window of steps has, and the rows of one step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from rolltape.store.sequences import Tape
from rolltape.viewer.answers import unknown
from rolltape.viewer.ids import ids_of, known, prompt_lengths
from rolltape.viewer.steps import KINDS, Steps, steps_of
from rolltape.viewer.tactics import known_by

#: Bits of the kinds of rows that a step has. `chunk` is a prefill that ends before its prompt does.
FLAGS = ("prefill", "decode", "verify", "recompute", "cached", "chunk", "score", "dummy")
#: Rows of which the kinds are read for one window.
MOST = 1 << 16

_NUMBERS = ("call", "rows", "columns", "tokens", "padded_tokens", "threads")
_TEXTS = ("graph", "attention", "experts", "sdpa", "cache")
_BIT = {name: 1 << i for i, name in enumerate(FLAGS)}
_KINDS = ["engine", "step", "request", "sample", "pass", "start", "n", "kind"]


def row_flags(tape: Tape, steps: Steps, at: np.ndarray) -> np.ndarray | None:
    """Which kinds of rows some steps have.

    Args:
        tape: where they were recorded.
        steps: of that tape.
        at: int64 [m], where the steps stand in `steps`.

    Returns:
        uint8 [m], bits of `FLAGS`, 0 where no row was recorded; None when there are more than
        `MOST` rows.
    """
    if int(steps.numbers["rows"][at].clip(1).sum()) > MOST:
        return None
    flags = np.zeros(len(at), np.uint8)
    for engine in range(len(steps.engines)):
        where = steps.of(engine)
        mine = np.flatnonzero((at >= where.start) & (at < where.stop))
        if not len(mine):
            continue
        mine = mine[np.argsort(steps.step[at[mine]], kind="stable")]
        numbers = steps.step[at[mine]]
        low, high = int(numbers[0]), int(numbers[-1])
        found = tape.between(
            "forwards", engine=steps.engines[engine], first=low, last=high, columns=_KINDS
        )
        for batch in found.to_batches():
            step = batch.column("step").to_numpy()
            place = np.minimum(np.searchsorted(numbers, step), len(numbers) - 1)
            wanted = numbers[place] == step
            np.bitwise_or.at(flags, mine[place[wanted]], _bits(tape, batch)[wanted])
    return flags


def _bits(tape: Tape, batch: pa.RecordBatch) -> np.ndarray:
    coded = batch.column("kind").dictionary_encode()
    table = np.array([_BIT.get(name, 0) for name in coded.dictionary.to_pylist()] or [0], np.uint8)
    bits = table[coded.indices.to_numpy()]
    prefills = np.flatnonzero(bits == _BIT["prefill"])
    chunks = _unfinished(tape, batch.take(pa.array(prefills)))
    bits[prefills[chunks]] |= _BIT["chunk"]
    return np.asarray(bits)


def _unfinished(tape: Tape, batch: pa.RecordBatch) -> np.ndarray:
    """bool [rows]: the prefill ends before the prompt of its sequence does."""
    end = batch.column("start").to_numpy() + batch.column("n").to_numpy()
    return np.asarray(end < prompt_lengths(tape, ids_of(pa.Table.from_batches([batch]))))


def step_detail(tape: Tape, engine: str, step: int) -> dict[str, Any]:
    """Answer of `runs/{run}/steps/{engine}/{step}`: one step whole.

    Args:
        tape: where it was recorded.
        engine: its id, or the beginning of it that only one engine has.
        step: its number.

    Raises:
        Problem: 404, no such engine or step.
    """
    steps = steps_of(tape)
    found = [i for i, name in enumerate(steps.engines) if name == engine]
    found = found or [i for i, name in enumerate(steps.engines) if name.startswith(engine)]
    if len(found) != 1:
        why = "no engine of this tape with steps" if not found else "several engines begin so"
        raise unknown("engine", engine, why)
    at = steps.find(found[0], step)
    where = steps.of(found[0])
    if at is None:
        range_ = f"{int(steps.step[where].min())} to {int(steps.step[where].max())}"
        raise unknown("step", str(step), f"the engine has steps {range_}, not all of them perhaps")
    name = steps.engines[found[0]]
    timed = steps.axis == "time"
    graph = steps.text("graph", at)
    row = tape.between("steps", engine=name, first=step, last=step).to_pylist()[0]
    return {
        "engine": name,
        "step": step,
        "kind": KINDS[steps.kind[at]],
        "t_ns": str(int(steps.t[at])) if timed else None,
        "duration_ns": int(steps.duration[at]) if timed and steps.duration[at] >= 0 else None,
        "previous": int(steps.step[at - 1]) if at > where.start else None,
        "next": int(steps.step[at + 1]) if at + 1 < where.stop else None,
        **{n: row[n] for n in (*_NUMBERS, *_TEXTS)},
        "batch": _batch(tape, name, step),
        "tactics": known_by(
            tape, engine=name, graph=graph, t_ns=int(steps.t[at]) if timed else None
        ),
    }


def _batch(tape: Tape, engine: str, step: int, most: int = 1024) -> dict[str, Any]:
    """The rows of one step in batch order: at most `most` of them, and how many there are."""
    table = tape.step_rows(engine, step)
    shown = table.slice(0, most)
    flags = np.concatenate([_bits(tape, b) for b in shown.to_batches()] or [np.zeros(0, np.uint8)])
    rows = []
    ids = ids_of(shown)
    there = known(tape, ids).tolist()
    for i, (row, bits) in enumerate(zip(shown.to_pylist(), flags.tolist(), strict=True)):
        names = ("row", "start", "n", "kind", "drafted", "accepted", "weight_version", "kv_source")
        facts = {name: row[name] for name in names}
        rows.append(
            {
                **facts,
                "seq": None if row["kind"] == "dummy" else ids[i].as_py(),
                "known": there[i],
                "chunk": bool(bits & _BIT["chunk"]),
            }
        )
    return {"rows": rows, "of": table.num_rows}
