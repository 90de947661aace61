"""A look at every token of a report that meets a condition, told batch by batch.

abs_delta > 0.5 and flips > 0
state = missing_b or (position < 64 and not equal = 1)
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pyarrow as pa

from rolltape.store.errors import SchemaError, TapeError
from rolltape.store.schema import TOKEN_STATES
from rolltape.store.tape import Report
from rolltape.viewer import predicate
from rolltape.viewer.answers import plain

#: Rows that one scan sends: at most, and when nobody says.
MAX_ROWS, ROWS = 10_000, 200
#: Seconds between two progress lines.
TELL_EVERY = 0.1

#: Names in conditions, and the columns that they are made of. `equal` is 1 or 0, where it was
#: compared. `position` is that in the sequence.
NUMBERS: dict[str, tuple[str, ...]] = {
    "delta": ("delta",),
    "abs_delta": ("delta",),
    "a": ("a_logprob",),
    "b": ("b_logprob",),
    "flips": ("flips",),
    "position": (),
    "equal": ("a_logprob", "b_logprob", "delta"),
}
TEXTS = ("state",)
#: The file that a problem begins with.
_OF_TOKENS = re.compile(r"(?:^|/)tokens/[^/:]+: ")
_ROW = ("state", "a_logprob", "b_logprob", "delta", "flips")


def read_condition(where: str) -> predicate.Node:
    """The tree of a condition.

    Raises:
        Problem: 400, it cannot be read or there is none.
    """
    node = predicate.parse(where, "where")
    if node is None:
        raise predicate.wrong("where", 0, f"a condition on {', '.join([*TEXTS, *NUMBERS])}")
    predicate.check(node, _fields(lambda _: None))
    return node


def scan(
    report: Report,
    node: predicate.Node,
    *,
    limit: int,
    lock: AbstractContextManager[Any],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[bytes]:
    """Lines of JSON: rows as they are found, progress, and at the end a summary.

    Rows have `kind` token, `seq`, `tok`, `state`, `a`, `b`, `delta`, `flips`. The first `limit`
    rows in written order are sent, all are counted; the summary says whether some were not sent.

    Args:
        report: what is scanned.
        node: from `read_condition`.
        limit: rows.
        lock: held while a batch is read, and not in between.
        clock: seconds.
    """
    wanted = {column for name in predicate.names_of(node) for column in _columns_of(name)}
    names = [name for name in _ROW if name in wanted]
    began = told = clock()
    scanned = matched = sent = 0
    damaged: list[str] = []
    with lock:
        total = sum(_batches(report, file) for file in report.files("tokens"))
        batches = report.batches("tokens", ["a", "n", *names])
    for done in range(1, total + 1):
        with lock:
            found = next(batches, None)
            if found is None:
                break
            file, number, batch = found
            rows: list[dict[str, Any]] = []
            hits, size = np.zeros(0, np.int64), 0
            try:
                tokens = _Tokens(batch)
                hits = np.flatnonzero(predicate.mask(node, _fields(tokens.column), len(tokens)))
                size = len(tokens)
                if len(hits) and sent < limit:
                    whole = report.shard("tokens", file).read(number, _schema(report))
                    rows = _Tokens(whole).rows(hits[: limit - sent])
            except TapeError as error:  # the answer has begun, and it can only be said in it
                damaged.append(str(error))
        scanned += size
        matched += len(hits)
        sent += len(rows)
        if rows:
            yield b"".join(_line({"kind": "token", **row}) for row in rows)
        if clock() - told >= TELL_EVERY:
            told = clock()
            yield _line(
                {"kind": "progress", "done": done / total, "scanned": scanned, "matched": matched}
            )
    # a report keeps what it found in earlier scans, too: this one has left out the same
    damaged += [problem for problem in report.problems if _OF_TOKENS.search(problem)]
    yield _line(
        {
            "kind": "summary",
            "scanned": scanned,
            "matched": matched,
            "sent": sent,
            "limit": limit,
            "limited": matched > sent,
            "damaged": damaged,
            "seconds": round(clock() - began, 3),
        }
    )


def _batches(report: Report, file: str) -> int:
    with report.damage():
        return report.shard("tokens", file).batches
    return 0


def _schema(report: Report) -> pa.Schema:
    return pa.schema([report.schemas["tokens"].field(name) for name in ("a", "n", *_ROW)])


def _columns_of(name: str) -> tuple[str, ...]:
    return NUMBERS.get(name, (name,))


def _fields(column: Callable[[str], Any]) -> predicate.Fields:
    return predicate.Fields("where", tuple(NUMBERS), TEXTS, (), column)


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(plain(value), allow_nan=False, separators=(",", ":")).encode() + b"\n"


class _Tokens:
    """All tokens of a batch of rows, flat."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._batch = batch
        self._sizes = np.maximum(batch.column("n").to_numpy(), 0).astype(np.int64)
        self._ends = np.cumsum(self._sizes)
        self._made: dict[str, Any] = {}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def _flat(self, name: str) -> pa.Array:
        column = self._batch.column(name)
        there = np.asarray(column.is_valid())
        sizes = column.value_lengths().fill_null(0).to_numpy()
        if (sizes != np.where(there, self._sizes, 0)).any():
            raise SchemaError(f"tokens.{name} does not have a value for each position")
        if there.all():
            return column.flatten()
        known = np.repeat(there, self._sizes)
        return column.flatten().take(pa.array(np.cumsum(known) - 1, mask=~known))

    def _floats(self, name: str) -> np.ndarray:
        values = self._flat(name).cast(pa.float64())
        return np.asarray(values.fill_null(np.nan).to_numpy(zero_copy_only=False))

    def column(self, name: str) -> Any:
        """What conditions call by that name, see `predicate.Fields`."""
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> Any:
        if name == "delta":
            return self._floats("delta")
        if name == "abs_delta":
            return np.abs(self.column("delta"))
        if name in ("a", "b"):
            return self._floats(f"{name}_logprob")
        if name == "flips":
            return self._floats("flips")
        if name == "position":
            starts = np.repeat(self._ends - self._sizes, self._sizes)
            return (np.arange(len(self)) - starts).astype(np.float64)
        if name == "equal":
            same = self.column("a") == self.column("b")
            return np.where(np.isnan(self.column("delta")), np.nan, same.astype(np.float64))
        codes = self._flat("state").cast(pa.int32())
        known = pa.array((*TOKEN_STATES, "unknown"))
        at = codes.fill_null(len(TOKEN_STATES)).to_numpy(zero_copy_only=False)
        at = np.minimum(at, len(TOKEN_STATES)).astype(np.int32)
        return pa.DictionaryArray.from_arrays(pa.array(at), known)

    def rows(self, at: np.ndarray) -> list[dict[str, Any]]:
        """Some tokens, by their place in the batch."""
        where = pa.array(at)
        row = np.searchsorted(self._ends, at, side="right")
        columns = {
            "seq": self._batch.column("a").take(pa.array(row)),
            "tok": pa.array(at - (self._ends - self._sizes)[row]),
            "state": self.column("state").take(where).dictionary_decode(),
            "a": self._flat("a_logprob").take(where),
            "b": self._flat("b_logprob").take(where),
            "delta": self._flat("delta").take(where),
            "flips": self._flat("flips").take(where),
        }
        found: list[dict[str, Any]] = pa.table(columns).to_pylist()
        return found
