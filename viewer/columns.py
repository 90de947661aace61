"""Dense columns of one sequence, from the report and the tape: what the token strip shows."""

from __future__ import annotations

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

#: States of a position: the report's, and the one of a position that no report covers.
STATES = (*TOKEN_STATES, "not_diffed")
_CODE = {name: code for code, name in enumerate(STATES)}
COMPARED, MASKED, NON_FINITE = _CODE["compared"], _CODE["masked"], _CODE["non_finite"]
NOT_SCORED, NOT_DIFFED = _CODE["not_scored"], _CODE["not_diffed"]

#: |delta| thresholds that the strip offers, nats.
PRESETS = (1e-3, 1e-2, 1e-1, 1.0)

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
    sequence = pair.sequences.get(name)
    row = pair.token_rows.get(name)
    found = pair.compared.get(name)
    if sequence is None and row is None and found is None:
        raise unknown("sequence", name, "the sequence list has all of them")
    cells = _report_cells(pair, row)
    n = len(cells["state"]) if row is not None else 0
    prompt_len = int((found or {}).get("prompt_len") or 0)
    ids = Masked.empty(n, np.uint32)
    state = np.full(n, NOT_DIFFED, np.uint8)
    if sequence is not None:
        n, prompt_len = max(n, sequence.length), sequence.prompt_len
        ids = sequence.tokens.resized(n)
        state = np.full(n, NOT_DIFFED, np.uint8)
        mask = sequence.loss_mask.resized(n)
        state[mask.valid & ~mask.values] = MASKED
    column = str(pair.summary["column"]) if pair.summary.get("column") else None
    a, b, delta = (cells[c].resized(n) for c in ("a_logprob", "b_logprob", "delta"))
    if row is None and sequence is not None:
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


def _report_cells(pair: Pair, row: int | None) -> dict[str, Masked]:
    dtypes: dict[str, Any] = {
        "state": np.uint8,
        "a_logprob": np.float32,
        "b_logprob": np.float32,
        "delta": np.float32,
        "flips": np.int32,
    }
    if row is None or pair.report is None:
        return {name: Masked.empty(0, dtype) for name, dtype in dtypes.items()}
    table = pair.report.table("tokens")
    return {name: _cell(table.column(name)[row], dtype) for name, dtype in dtypes.items()}


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
    pair: Pair, columns: Columns, *, start: int, end: int, names: list[str] | None = None
) -> bytes:
    """Positions [start, end) as safetensors bytes.

    Arrays: `ids` u32, `state` u8 (index into the metadata `states`), `flags` u8 (bits named by
    the metadata `flags`), `a`, `b`, `delta` f32 (see the flag bits for where they exist),
    `flips` u16 (65535: no route), `text_offsets` u32 [n + 1], `text_bytes` u8.

    Raises:
        Problem: 400, no such array.
    """
    span = slice(start, end)
    ids = columns.ids[span]
    offsets, text, known = _text(pair, ids)
    positions = np.arange(start, end)
    bits = (
        ids.valid,
        known,
        columns.a.valid[span],
        columns.b.valid[span],
        columns.delta.valid[span],
        columns.equal[span],
        positions < columns.prompt_len,
    )
    flags = np.zeros(end - start, np.uint8)
    for bit, where in enumerate(bits):
        flags |= where.astype(np.uint8) << bit
    arrays = {
        "ids": ids.fill(0).astype(np.uint32),
        "state": columns.state[span],
        "flags": flags,
        "a": columns.a[span].fill(np.nan).astype(np.float32),
        "b": columns.b[span].fill(np.nan).astype(np.float32),
        "delta": columns.delta[span].fill(np.nan).astype(np.float32),
        "flips": columns.flips[span].fill(NO_ROUTE).astype(np.uint16),
        "text_offsets": offsets,
        "text_bytes": text,
    }
    for name in names or []:
        if name not in arrays:
            raise bad_parameter("cols", f"{name!r} is not one of {', '.join(arrays)}")
    chosen = {name: arrays[name] for name in names or arrays}
    metadata = {
        "states": ",".join(STATES),
        "flags": ",".join(FLAGS),
        "start": str(start),
        "end": str(end),
    }
    return encode(chosen, metadata=metadata)


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
