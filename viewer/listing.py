"""The sequence list: one row a sequence of the tape, joined with what the diff says of it.

Everything is a column. A sort is one argsort, a filter one mask, and only the rows of a page become
Python objects.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from rolltape.store.schema import REPORT_TABLES
from rolltape.viewer import predicate
from rolltape.viewer.answers import bad_parameter
from rolltape.viewer.library import Pair
from rolltape.viewer.spreadsheet import harmless_table

Row = dict[str, Any]

#: Rows of a page when nobody says, at most, and at most of a table for other programs.
LIMIT, MAX_LIMIT, MAX_TABLE = 100, 500, 100_000
#: Seconds spent on counting facets, and values that one of them shows.
FACET_SECONDS, FACET_VALUES = 0.05, 50

_TEXT = ("id", "group", "finish")
_FROM_REPORT = (
    "compared",
    "masked",
    "missing",
    "non_finite",
    "mean_abs",
    "max_abs",
    "p99_abs",
    "max_at",
    "k1",
    "k3",
    "first_over",
)
_SHARES = ("masked_share", "disagree_share", "tokens_any_share", "routing_agreement")
_NUMBERS = (
    "order",
    "opened",
    "prompt_len",
    "response_len",
    "weight_version",
    "weight_version_min",
    "wver_span",
    *_FROM_REPORT,
    *_SHARES,
)
_WORDS = (*_TEXT, "replay", "cause")

#: Columns that the list can be sorted and filtered by.
COLUMNS = (*_WORDS, *_NUMBERS)
#: Columns that facets count the values of.
FACETS = ("finish", "weight_version", "group", "replay", "cause", "wver_span")

_COUNTS = ("decisions", "disagree", "tokens_any", "routed_tokens")
_IDENTITY = ("a", "group", "finish", "prompt_len", "length", "weight_version")
_KEPT_ORDERS, _BLOCK = 6, 1 << 16


class Listing:
    """The rows of one pair and their orders. Orders are made once and kept.

    Args:
        pair: what is listed.
    """

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._columns, self._report_row = _columns(pair)
        self.total = len(self._report_row)
        self.default_sort = "-max_abs" if pair.report is not None else "order"
        self._orders: OrderedDict[str, _Order] = OrderedDict()
        self._masks: OrderedDict[str, np.ndarray] = OrderedDict()
        # what was only needed to join the two goes back to the system
        pa.default_memory_pool().release_unused()

    # -- columns ----------------------------------------------------------------------------

    def numbers(self, name: str) -> np.ndarray:
        """A number column, float64, NaN where absent."""
        column = self._columns[name]
        return np.asarray(column.cast(pa.float64()).fill_null(math.nan).to_numpy())

    def _field(self, name: str) -> Any:
        return self.numbers(name) if name in _NUMBERS else self._columns[name]

    @cached_property
    def _fields(self) -> predicate.Fields:
        return predicate.Fields("q", _NUMBERS, _WORDS, _TEXT, self._field)

    # -- rows -------------------------------------------------------------------------------

    def row(self, sequence: str) -> Row | None:
        """The row of a sequence."""
        at = self._at(sequence)
        return None if at is None else self.rows(np.array([at]))[0]

    def rows(self, at: np.ndarray) -> list[Row]:
        """Some rows, by their numbers."""
        return [dict(row) for row in self.table(at).to_pylist()]

    def table(self, at: np.ndarray) -> pa.Table:
        """Some rows as Arrow."""
        where = pa.array(at)
        found = {name: _plain(column.take(where)) for name, column in self._columns.items()}
        return pa.table({**found, "spark": self._sparks(self._report_row[at], found["id"])})

    def _sparks(self, rows: np.ndarray, ids: pa.Array) -> pa.Array:
        type_ = REPORT_TABLES["sequences"].field("spark").type
        there = np.flatnonzero(rows >= 0)
        report = self._pair.report
        if report is None or not len(there):
            return pa.nulls(len(rows), type_)
        with report.damage():
            taken = report.take("sequences", rows[there].tolist(), ["a", "spark"])
            same = pc.equal(taken.column("a"), ids.take(pa.array(there))).to_numpy()
            back = np.full(len(rows), -1)
            back[there[same]] = np.flatnonzero(same)  # else a damaged batch was left out
            return _taken(taken.column("spark").combine_chunks(), back)
        return pa.nulls(len(rows), type_)

    def _at(self, sequence: str) -> int | None:
        at = pc.index(self._columns["id"], sequence).as_py()
        return None if at < 0 else int(at)

    # -- order and filter -------------------------------------------------------------------

    def order(self, sort: str | None) -> _Order:
        """Row numbers by `sort`: a column, with `-` for descending; null and NaN come last.

        Raises:
            Problem: 400, no such column.
        """
        sort = sort or self.default_sort
        if sort not in self._orders:
            column = sort.removeprefix("-")
            if column not in COLUMNS:
                raise bad_parameter("sort", f"{column!r} is not one of {', '.join(COLUMNS)}")
            self._orders[sort] = self._make_order(column, down=sort.startswith("-"))
            while len(self._orders) > _KEPT_ORDERS:
                self._orders.popitem(last=False)
        self._orders.move_to_end(sort)
        return self._orders[sort]

    def _make_order(self, column: str, *, down: bool) -> _Order:
        if column in _NUMBERS:
            keys = self.numbers(column)
            keys = -keys if down else keys
        else:
            keys = _ranks(self._columns[column], down=down)
        rows = np.argsort(keys, kind="stable")  # NaN comes last; equal ones as they were opened
        return _Order(rows.astype(np.int32), keys[rows])

    def matching(self, query: str | None) -> np.ndarray | None:
        """Where a filter holds, bool [total]; None without one.

        Raises:
            Problem: 400, a filter that cannot be read.
        """
        text = (query or "").strip()
        if not text:
            return None
        if text not in self._masks:
            node = predicate.parse(text, "q")
            predicate.check(node, self._fields)
            self._masks[text] = predicate.mask(node, self._fields, self.total)
            while len(self._masks) > _KEPT_ORDERS:
                self._masks.popitem(last=False)
        self._masks.move_to_end(text)
        return self._masks[text]

    def select(self, sort: str | None, query: str | None) -> np.ndarray:
        """Ordered numbers of the rows that a filter keeps."""
        rows, keep = self.order(sort).rows, self.matching(query)
        return rows if keep is None else rows[keep[rows]]

    # -- answers ----------------------------------------------------------------------------

    def page(
        self,
        *,
        sort: str | None,
        query: str | None,
        limit: int,
        after: str | None,
        facets: str | None = None,
    ) -> dict[str, Any]:
        """One page of the list: rows, `next`, and the counts.

        Raises:
            Problem: 400, naming the parameter.
        """
        if not 1 <= limit <= MAX_LIMIT:
            raise bad_parameter("limit", f"1 to {MAX_LIMIT}")
        at, start, matched, cursor = self._cut(sort, query, limit, after)
        answer = {
            "sort": sort or self.default_sort,
            "rows": self.rows(at),
            "start": start,
            "matched": matched,
            "total": self.total,
            "next": cursor,
        }
        return answer | (self.facets(facets, query) if facets else {})

    def export(
        self, *, sort: str | None, query: str | None, limit: int, after: str | None, to: str
    ) -> tuple[bytes, str | None]:
        """Rows for another program, and the cursor behind them.

        Args:
            sort: as `page`.
            query: as `page`.
            limit: rows, at most `MAX_TABLE`.
            after: as `page`.
            to: `arrow` (an IPC stream) or `csv` (`spark` left out).

        Raises:
            Problem: 400, naming the parameter.
        """
        if not 1 <= limit <= MAX_TABLE:
            raise bad_parameter("limit", f"1 to {MAX_TABLE}")
        at, _, _, cursor = self._cut(sort, query, limit, after)
        table, sink = self.table(at), io.BytesIO()
        if to == "csv":
            pyarrow.csv.write_csv(harmless_table(table.drop_columns(["spark"])), sink)
        else:
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
        return sink.getvalue(), cursor

    def _cut(
        self, sort: str | None, query: str | None, limit: int, after: str | None
    ) -> tuple[np.ndarray, int, int, str | None]:
        """Rows of a page, how many stand before them, how many there are, cursor of the next."""
        sort = sort or self.default_sort
        order, keep = self.order(sort), self.matching(query)
        place = 0 if after is None else self._behind(sort, after)
        kept = order.rows if keep is None else order.rows[keep[order.rows]]
        start = place if keep is None else int(keep[order.rows[:place]].sum())
        at = kept[start : start + limit]
        more = start + limit < len(kept)
        return at, start, len(kept), self._cursor(sort, order, int(at[-1])) if more else None

    def _cursor(self, sort: str, order: _Order, row: int) -> str:
        key = float(order.keys[order.place(row)])
        number = key if math.isfinite(key) else str(key)
        text = json.dumps([sort, number, self._columns["id"][row].as_py()])
        return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")

    def _behind(self, sort: str, after: str) -> int:
        """Place behind the row of a cursor: by the value that it had then, so rows may be added."""
        try:
            raw = base64.b64decode(after + "=" * (-len(after) % 4), altchars=b"-_", validate=True)
            of, key, sequence = json.loads(raw)
            key = float(key)
        except (ValueError, TypeError, binascii.Error, RecursionError) as error:
            raise bad_parameter("after", "not a cursor of this list") from error
        order, row = self.order(sort), self._at(str(sequence))
        if row is None or of != sort:
            raise bad_parameter("after", "not a cursor of this list in this order")
        # ranks of texts change with their neighbours, and so does the order of opening
        if sort.removeprefix("-") in (*_WORDS, "order"):
            return order.place(row) + 1
        return order.behind(key, row)

    def neighbours(self, sequence: str, *, sort: str | None, query: str | None) -> dict[str, Any]:
        """Previous and next id in the list as sorted and filtered, and the rank."""
        rows, row = self.select(sort, query), self._at(sequence)
        places = np.flatnonzero(rows == (-1 if row is None else row))
        if not len(places):
            return {"previous": None, "next": None, "rank": None, "of": len(rows)}
        at, ids = int(places[0]), self._columns["id"]
        return {
            "previous": ids[int(rows[at - 1])].as_py() if at else None,
            "next": ids[int(rows[at + 1])].as_py() if at + 1 < len(rows) else None,
            "rank": at + 1,
            "of": len(rows),
        }

    def facets(
        self, names: str, query: str | None, clock: Callable[[], float] = time.perf_counter
    ) -> dict[str, Any]:
        """How many of the matching rows have each value of some columns.

        Args:
            names: of columns, with commas between.
            query: the filter.
            clock: seconds.

        Returns:
            `facets`: per column `values` (the most frequent ones with their count), `more` (values
            left out) and `timed_out`; `facets_timed_out`: columns that are not counted to the end.
        """
        wanted = [name.strip() for name in names.split(",") if name.strip()]
        for name in wanted:
            if name not in FACETS:
                raise bad_parameter("facets", f"{name!r} is not one of {', '.join(FACETS)}")
        keep, end = self.matching(query), clock() + FACET_SECONDS
        found: dict[str, Any] = {}
        for name in wanted:
            column = self._columns[name]
            counts: dict[Any, int] = {}
            done = 0
            while done < self.total and (clock() < end or not (done or found)):
                part = column.slice(done, _BLOCK)
                if keep is not None:
                    part = part.filter(pa.array(keep[done : done + _BLOCK]))
                for each in pc.value_counts(part).to_pylist():
                    counts[each["values"]] = counts.get(each["values"], 0) + each["counts"]
                done += _BLOCK
            top = sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))
            found[name] = {
                "values": [[value, count] for value, count in top[:FACET_VALUES]],
                "more": max(0, len(top) - FACET_VALUES),
                "timed_out": done < self.total,
            }
        late = [name for name in wanted if found[name]["timed_out"]]
        return {"facets": found, "facets_timed_out": late}


@dataclass(frozen=True)
class _Order:
    """Rows in order, and the keys they were sorted by, ascending, NaN last.

    Args:
        rows: int32 [n].
        keys: float64 [n].
    """

    rows: np.ndarray
    keys: np.ndarray

    def place(self, row: int) -> int:
        """Where a row stands."""
        return int(np.flatnonzero(self.rows == row)[0])

    def behind(self, key: float, row: int) -> int:
        """Place behind a row that has, or had, this key: equal keys stand in the order of rows."""
        if math.isnan(key):
            low, high = len(self.keys) - int(np.isnan(self.keys).sum()), len(self.keys)
        else:
            low, high = (int(np.searchsorted(self.keys, key, side)) for side in ("left", "right"))
        return low + int(np.searchsorted(self.rows[low:high], row, side="right"))


def _ranks(column: pa.Array, *, down: bool) -> np.ndarray:
    """float64, ranks of texts; NaN for null."""
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    order = pc.sort_indices(encoded.dictionary).to_numpy()
    rank = np.empty(len(order) + 1)
    rank[order] = np.arange(len(order), 0, -1) if down else np.arange(len(order))
    rank[-1] = math.nan
    return np.asarray(rank[encoded.indices.fill_null(len(order)).to_numpy()])


def _columns(pair: Pair) -> tuple[dict[str, Any], np.ndarray]:
    """Columns by name, without `spark`, and the row of each in the report's `sequences`, or -1."""
    facts = pair.facts
    report = pair.report_columns([*_IDENTITY, *_FROM_REPORT, *_COUNTS])
    ids, compared = _one(facts.column("id")), _one(report.column("a"))
    count = len(report)
    back = pc.index_in(ids, compared.take(pa.array(np.arange(count)[::-1])))  # the last one counts
    of_tape = count - 1 - back.fill_null(count).to_numpy()
    known = pc.index_in(compared, ids).is_valid().to_numpy(zero_copy_only=False)
    alone = _last(compared, ~known)
    in_report = np.concatenate([of_tape, alone])  # -1: not in the report
    in_tape = np.concatenate([np.arange(len(ids)), np.full(len(alone), -1)])
    n = len(in_report)

    def tape(name: str) -> Any:
        return _taken(_one(facts.column(name)), in_tape)

    def diff(name: str) -> Any:
        return _taken(_one(report.column(name)), in_report)

    def either(name: str, other: str) -> Any:
        return _either(_one(facts.column(name)), _one(report.column(other)), in_tape, in_report)

    prompt_len, length = either("prompt_len", "prompt_len"), either("length", "length")
    low, high = either("version_min", "weight_version"), either("version_max", "weight_version")
    counts = {name: diff(name) for name in _COUNTS}
    disagree = _share(counts["disagree"], counts["decisions"])
    from_report = {name: diff(name) for name in _FROM_REPORT}
    scored = [from_report[m].fill_null(0) for m in ("compared", "masked", "missing", "non_finite")]
    all_scored = pc.add(pc.add(scored[0], scored[1]), pc.add(scored[2], scored[3]))
    reported = pa.array(in_report >= 0)
    there = pa.array(in_tape >= 0)
    word = pc.if_else(reported, "in-report", "not-in-report")
    return {
        "id": pa.concat_arrays([ids, compared.take(pa.array(alone))]) if len(alone) else ids,
        "order": pa.array(np.arange(n, dtype=np.int32)),
        "opened": pc.divide(tape("opened_ns").cast(pa.float64(), safe=False), 1e9),
        "group": either("group", "group"),
        "finish": either("finish", "finish"),
        "prompt_len": prompt_len,
        "response_len": pc.max_element_wise(pc.subtract(length, prompt_len), 0, skip_nulls=False),
        "weight_version": high,
        "weight_version_min": low,
        "wver_span": pc.add(pc.subtract(high, low), 1).cast(pa.int32()),
        "in_report": reported,
        "in_tape": there,
        "replay": word if pair.report is not None else pa.nulls(n, pa.string()),
        "cause": pa.nulls(n, pa.string()),
        **from_report,
        "masked_share": _share(from_report["masked"], all_scored),
        "disagree_share": disagree,
        "tokens_any_share": _share(counts["tokens_any"], counts["routed_tokens"]),
        "routing_agreement": pc.subtract(1.0, disagree),
    }, in_report.astype(np.int32)


def _one(column: pa.ChunkedArray) -> Any:
    found = column.combine_chunks()
    return pa.concat_arrays(found.chunks) if isinstance(found, pa.ChunkedArray) else found


def _last(ids: pa.Array, keep: np.ndarray) -> np.ndarray:
    """Rows to keep, of those with the same id the last one, in the order of the first ones."""
    rows = np.flatnonzero(keep)
    if not len(rows):
        return rows
    codes = ids.take(pa.array(rows)).dictionary_encode().indices.to_numpy()
    last = np.zeros(int(codes.max()) + 1, np.int64)
    last[codes] = rows
    return last


def _taken(column: Any, rows: np.ndarray) -> Any:
    """Rows of a column; null where the row is -1."""
    if len(rows) == len(column) and (rows == np.arange(len(rows))).all():
        return column  # not a second one: of a million sequences that counts
    return column.take(pa.array(rows, mask=rows < 0))


def _either(tape: Any, report: Any, in_tape: np.ndarray, in_report: np.ndarray) -> Any:
    """A column from the tape, and from the report in rows that the tape does not have."""
    alone = in_tape < 0
    if not alone.any():
        return _taken(tape, in_tape)
    text = pa.types.is_dictionary(tape.type)
    if text:
        report = report.dictionary_encode()
    parts = [tape, _taken(report, in_report[alone]).cast(tape.type)]
    joined = pa.chunked_array(parts)
    return _one(joined.unify_dictionaries() if text else joined)


def _share(part: Any, whole: Any) -> Any:
    """float64; null where the whole is absent or 0."""
    whole = pc.if_else(pc.equal(whole, 0), None, whole)
    return pc.divide(part.cast(pa.float64()), whole.cast(pa.float64()))


def _plain(column: Any) -> Any:
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
