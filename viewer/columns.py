"""Dense columns of one sequence, from the report and the tape: what the token strip shows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from rolltape.store.columns import Masked
from rolltape.store.schema import TOKEN_STATES
from rolltape.store.sequences import LOGPROBS, Sequence
from rolltape.viewer.answers import bad_parameter, unknown
from rolltape.viewer.arrays import encode
from rolltape.viewer.library import Pair
from rolltape.viewer.stats import STATS, stats, stats_there

#: States of a position: the report's, and the one of a position that no report covers.
STATES = (*TOKEN_STATES, "not_diffed")
_CODE = {name: code for code, name in enumerate(STATES)}
COMPARED, MASKED, NON_FINITE = _CODE["compared"], _CODE["masked"], _CODE["non_finite"]
NOT_SCORED, NOT_DIFFED = _CODE["not_scored"], _CODE["not_diffed"]

#: |delta| thresholds that the strip offers, nats.
PRESETS = (1e-3, 1e-2, 1e-1, 1.0)

_CELLS: dict[str, Any] = {
    "state": np.uint8,
    "a_logprob": np.float32,
    "b_logprob": np.float32,
    "delta": np.float32,
    "flips": np.int32,
    "ids": np.uint32,
}

MAX_WINDOW = 4096
MAX_BUCKETS = 1024
NO_ROUTE = 0xFFFF

#: Bits of the `flags` array.
FLAGS = ("id", "text", "a", "b", "delta", "equal", "prompt")


@dataclass(frozen=True)
class Columns:
    """Everything per position of one sequence, positions 0..n-1 over prompt + response.

    Args:
        n: positions.
        prompt_len: prompt tokens.
        ids: uint32 token ids; none valid when the tape is not open.
        state: uint8, index into `STATES`.
        a: float32 logprobs of side A.
        b: float32 logprobs of side B; none valid without a report.
        delta: float32, b - a.
        equal: bool, compared and the same 32 bits.
        flips: int32, MoE layers that disagree; invalid without a route on both sides.
        column: which logprob column `a` and `b` are: processed, scaled or raw; None unknown.
    """

    n: int
    prompt_len: int
    ids: Masked
    state: np.ndarray
    a: Masked
    b: Masked
    delta: Masked
    equal: np.ndarray
    flips: Masked
    column: str | None

    def over(self, threshold: float) -> np.ndarray:
        """Positions that deserve a look: |delta| over the threshold, or not finite."""
        big = self.delta.valid & (np.abs(self.delta.fill(0)) > threshold)
        return np.flatnonzero(big | (self.state == NON_FINITE))


def load_columns(pair: Pair, name: str) -> Columns:
    """Columns of the sequence with that id.

    Raises:
        Problem: 404, neither tape nor report has it.
    """
    sequence = pair.find(name)
    rows = pair.report_rows("tokens", name, list(_CELLS))
    found = pair.compared.get(name)
    if sequence is None and not len(rows) and found is None:
        raise unknown("sequence", name, "the sequence list has all of them")
    cells = _report_cells(rows)
    n = len(cells["state"])
    prompt_len = int((found or {}).get("prompt_len") or 0)
    ids = cells["ids"].resized(n)
    state = np.full(n, NOT_DIFFED, np.uint8)
    told = len(cells["ids"]) == n and cells["state"].valid.all() and len(rows)
    if sequence is not None and told and sequence.length <= n:
        prompt_len = sequence.prompt_len  # the report has all that the tape would say
    elif sequence is not None:
        n, prompt_len = max(n, sequence.length), sequence.prompt_len
        own = sequence.token_columns(["ids", "loss_mask"])
        ids = own["ids"].resized(n)
        state = np.full(n, NOT_DIFFED, np.uint8)
        mask = own["loss_mask"].resized(n)
        state[mask.valid & ~mask.values] = MASKED
    column = str(pair.summary["column"]) if pair.summary.get("column") else None
    a, b, delta = (cells[c].resized(n) for c in ("a_logprob", "b_logprob", "delta"))
    if not len(rows) and sequence is not None:
        column, a = _own_logprob(sequence, column)
        a = a.resized(n)
        state[(state == NOT_DIFFED) & ~a.valid] = NOT_SCORED
    given = cells["state"]
    known = given.valid & (given.values < len(TOKEN_STATES))
    state[: len(given)][known] = given.values[known]
    both = (state == COMPARED) & a.valid & b.valid
    equal = both & (_bits(a.values) == _bits(b.values))
    flips = cells["flips"].resized(n)
    return Columns(n, prompt_len, ids, state, a, b, delta, equal, flips, column)


def _report_cells(rows: pa.Table) -> dict[str, Masked]:
    if not len(rows):
        return {name: Masked.empty(0, dtype) for name, dtype in _CELLS.items()}
    last = len(rows) - 1  # of several rows of a sequence the last one counts
    return {name: _cell(rows.column(name)[last], dtype) for name, dtype in _CELLS.items()}


def _cell(scalar: pa.ListScalar, dtype: Any) -> Masked:
    if not scalar.is_valid:
        return Masked.empty(0, dtype)
    values = scalar.values
    valid = values.is_valid().to_numpy(zero_copy_only=False)
    return Masked(values.fill_null(0).to_numpy(zero_copy_only=False).astype(dtype), valid)


def _own_logprob(sequence: Sequence, column: str | None) -> tuple[str | None, Masked]:
    for name in [column] if column in LOGPROBS else LOGPROBS:
        found = sequence.logprob(str(name))
        if found.valid.any():
            return name, found
    return None, Masked.empty(sequence.length, np.float32)


def _bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


def next_of(found: np.ndarray, start: int, *, back: bool) -> dict[str, int | None]:
    """The next of some positions after `start`, or before it, with its rank and how many there are.

    Args:
        found: int [m], ascending.
        start: where the reader is.
        back: look before it.
    """
    at = int(np.searchsorted(found, start, side="left" if back else "right"))
    index = at - 1 if back else at
    there = 0 <= index < len(found)
    return {
        "position": int(found[index]) if there else None,
        "rank": index + 1 if there else None,
        "of": len(found),
    }


def minimap(columns: Columns) -> dict[str, object]:
    """At most 1,024 buckets over the sequence: max |delta| and what else lies in each.

    Returns:
        `starts` (first position of each bucket), `max_abs` (null where nothing was compared),
        `state` (name of the state that matters most in the bucket).
    """
    count = min(MAX_BUCKETS, columns.n)
    if not count:
        return {"starts": [], "max_abs": [], "state": []}
    starts = np.arange(count) * columns.n // count
    size = np.where(columns.delta.valid, np.abs(columns.delta.fill(0)), -1).astype(np.float64)
    size[np.isnan(size)] = -1
    peak = np.maximum.reduceat(size, starts)
    # what must not be overlooked first
    rank = (
        "not_diffed",
        "not_scored",
        "masked",
        "missing_b",
        "missing_a",
        "compared",
        "non_finite",
    )
    weight = np.array([rank.index(name) for name in STATES])[columns.state]
    state = np.maximum.reduceat(weight, starts)
    return {
        "starts": starts.tolist(),
        "max_abs": [float(x) if x >= 0 else None for x in peak],
        "state": [rank[i] for i in state],
    }


def window(
    pair: Pair,
    columns: Columns,
    name: str,
    *,
    start: int,
    end: int,
    names: list[str] | None = None,
) -> bytes:
    """Positions [start, end) as safetensors bytes.

    Arrays: `ids` u32, `state` u8 (index into the metadata `states`), `flags` u8 (bits named by
    the metadata `flags`), `a`, `b`, `delta` f32 (see the flag bits for where they exist),
    `flips` u16 (65535: no route), `text_offsets` u32 [n + 1], `text_bytes` u8. Only when asked
    for those of `rolltape.viewer.stats`; the metadata `stats` says which of them the tapes have.

    Args:
        pair: where it lies.
        columns: of the sequence.
        name: its id on side A.
        start: first position.
        end: one behind the last.
        names: arrays; None is all but the stats.

    Raises:
        Problem: 400, no such array.
    """
    span = slice(start, end)
    makers: dict[str, Callable[[], np.ndarray]] = {
        "ids": lambda: columns.ids[span].fill(0).astype(np.uint32),
        "state": lambda: columns.state[span],
        "flags": lambda: _flags(columns, span, text()[2]),
        "a": lambda: columns.a[span].fill(np.nan).astype(np.float32),
        "b": lambda: columns.b[span].fill(np.nan).astype(np.float32),
        "delta": lambda: columns.delta[span].fill(np.nan).astype(np.float32),
        "flips": lambda: columns.flips[span].fill(NO_ROUTE).astype(np.uint16),
        "text_offsets": lambda: text()[0],
        "text_bytes": lambda: text()[1],
    }

    @functools.cache
    def text() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return _text(pair, columns.ids[span])

    for each in names or []:
        if each not in makers and each not in STATS:
            raise bad_parameter("cols", f"{each!r} is not one of {', '.join([*makers, *STATS])}")
    chosen = {n: makers[n]() for n in names or makers if n in makers}
    metadata = {
        "states": ",".join(STATES),
        "flags": ",".join(FLAGS),
        "start": str(start),
        "end": str(end),
        "stats": ",".join(stats_there(pair, name)),
    }
    if wanted := [n for n in names or [] if n in STATS]:
        made, why = stats(pair, name, columns.ids[span], start, end)
        chosen |= {n: made[n] for n in wanted}
        metadata["stats_missing"] = why
    return encode(chosen, metadata=metadata)


def _flags(columns: Columns, span: slice, known: np.ndarray) -> np.ndarray:
    bits = (
        columns.ids.valid[span],
        known,
        columns.a.valid[span],
        columns.b.valid[span],
        columns.delta.valid[span],
        columns.equal[span],
        np.arange(span.start, span.stop) < columns.prompt_len,
    )
    flags = np.zeros(span.stop - span.start, np.uint8)
    for bit, where in enumerate(bits):
        flags |= where.astype(np.uint8) << bit
    return flags


def _text(pair: Pair, ids: Masked) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    vocabulary, _ = pair.tokenizer
    known = np.zeros(len(ids), bool)
    pieces: list[bytes] = []
    for i, (token, valid) in enumerate(zip(ids.values.tolist(), ids.valid.tolist(), strict=True)):
        piece = vocabulary.get(token) if vocabulary is not None and valid else None
        known[i] = piece is not None
        pieces.append(piece or b"")
    offsets = np.zeros(len(ids) + 1, np.uint32)
    np.cumsum([len(p) for p in pieces], out=offsets[1:], dtype=np.uint32)
    return offsets, np.frombuffer(b"".join(pieces), np.uint8), known
