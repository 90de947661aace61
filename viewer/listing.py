"""The sequence list: one row a sequence of the tape, joined with what the diff says of it."""

from __future__ import annotations

import base64
import binascii
import json
import math
import operator
import re
from collections.abc import Callable
from typing import Any

from rolltape.store.keys import Key
from rolltape.store.sequences import Tape
from rolltape.viewer.answers import bad_parameter
from rolltape.viewer.library import Pair

Row = dict[str, Any]

MAX_LIMIT = 500

_TEXT = ("id", "group", "finish")
_FROM_REPORT = (
    "compared",
    "masked",
    "missing",
    "non_finite",
    "mean_abs",
    "max_abs",
    "max_at",
    "k1",
    "k3",
    "first_over",
)
_NUMBERS = (
    "order",
    "prompt_len",
    "response_len",
    "weight_version",
    *_FROM_REPORT,
    "disagree_share",
    "tokens_any_share",
)

#: Columns that the list can be sorted and filtered by.
COLUMNS = (*_TEXT, *_NUMBERS)

_TERM = re.compile(r"([A-Za-z0-9_]+)(<=|>=|!=|=|<|>|:)(.*)")
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "!=": operator.ne,
}


class Listing:
    """The rows of one pair and their orders. Orders are made once and kept.

    Args:
        pair: what is listed.
    """

    def __init__(self, pair: Pair) -> None:
        self.rows = _rows(pair)
        self.by_id = {row["id"]: row for row in self.rows}
        self.default_sort = "-max_abs" if pair.report is not None else "order"
        self._orders: dict[str, list[str]] = {}

    def order(self, sort: str | None) -> list[str]:
        """Sequence ids by `sort`: a column, with `-` for descending; null and NaN come last.

        Raises:
            Problem: 400, no such column.
        """
        sort = sort or self.default_sort
        if sort not in self._orders:
            column = sort.removeprefix("-")
            if column not in COLUMNS:
                raise bad_parameter("sort", f"{column!r} is not one of {', '.join(COLUMNS)}")
            rows = sorted(self.rows, key=lambda r: r["id"])
            there = [r for r in rows if not _is_absent(r[column])]
            there.sort(key=lambda r: r[column], reverse=sort.startswith("-"))
            absent = [r for r in rows if _is_absent(r[column])]
            self._orders[sort] = [r["id"] for r in there + absent]
        return self._orders[sort]

    def select(self, sort: str | None, query: str | None) -> list[str]:
        """Ordered ids of the rows that a filter keeps.

        Raises:
            Problem: 400, a filter that cannot be read.
        """
        order = self.order(sort)
        tests = _parse_filter(query or "")
        if not tests:
            return order
        return [i for i in order if all(test(self.by_id[i]) for test in tests)]

    def page(
        self, *, sort: str | None, query: str | None, limit: int, after: str | None
    ) -> dict[str, Any]:
        """One page of the list: rows, `next`, and the counts.

        Raises:
            Problem: 400, naming the parameter.
        """
        if not 1 <= limit <= MAX_LIMIT:
            raise bad_parameter("limit", f"1 to {MAX_LIMIT}")
        ids = self.select(sort, query)
        start = 0
        if after is not None:
            last = _read_cursor(after)
            if last not in self.by_id:
                raise bad_parameter("after", "not a cursor of this list")
            # the last row may have left the filter since: go on from its place in the order
            rank = {i: k for k, i in enumerate(self.order(sort))}
            start = next((k for k, i in enumerate(ids) if rank[i] > rank[last]), len(ids))
        page = ids[start : start + limit]
        more = start + limit < len(ids)
        return {
            "sort": sort or self.default_sort,
            "rows": [self.by_id[i] for i in page],
            "start": start,
            "matched": len(ids),
            "total": len(self.rows),
            "next": _make_cursor(page[-1]) if more else None,
        }

    def neighbours(self, sequence: str, *, sort: str | None, query: str | None) -> dict[str, Any]:
        """Previous and next id in the list as sorted and filtered, and the rank."""
        ids = self.select(sort, query)
        if sequence not in ids:
            return {"previous": None, "next": None, "rank": None, "of": len(ids)}
        at = ids.index(sequence)
        return {
            "previous": ids[at - 1] if at else None,
            "next": ids[at + 1] if at + 1 < len(ids) else None,
            "rank": at + 1,
            "of": len(ids),
        }


def _rows(pair: Pair) -> list[Row]:
    rows = []
    versions = _weight_versions(pair.tape) if pair.tape is not None else {}
    for order, (name, sequence) in enumerate(pair.sequences.items()):
        found = pair.compared.get(name)
        low, high = versions.get(sequence.key, (None, None))
        row: Row = {
            "id": name,
            "order": order,
            "group": sequence.info["group"],
            "finish": sequence.finish,
            "prompt_len": sequence.prompt_len,
            "response_len": max(0, sequence.length - sequence.prompt_len),
            "weight_version": high,
            "weight_version_min": low,
            "in_report": found is not None,
            "in_tape": True,
        }
        rows.append(row | _from_report(found))
    for name, found in pair.compared.items():
        if name in pair.sequences:
            continue
        length, prompt = found["length"], found["prompt_len"]
        known = length is not None and prompt is not None
        row = {
            "id": name,
            "order": len(rows),
            "group": found["group"],
            "finish": found["finish"],
            "prompt_len": prompt,
            "response_len": length - prompt if known else None,
            "weight_version": found["weight_version"],
            "weight_version_min": found["weight_version"],
            "in_report": True,
            "in_tape": False,
        }
        rows.append(row | _from_report(found))
    return rows


def _from_report(found: Row | None) -> Row:
    row: Row = {name: found[name] if found else None for name in _FROM_REPORT}
    row["disagree_share"] = _share(found, "disagree", "decisions")
    row["tokens_any_share"] = _share(found, "tokens_any", "routed_tokens")
    return row


def _share(found: Row | None, part: str, whole: str) -> float | None:
    if found is None or not found[whole] or found[part] is None:
        return None
    return float(found[part] / found[whole])


def _weight_versions(tape: Tape) -> dict[Key, tuple[int | None, int | None]]:
    columns = ("engine", "request", "sample", "pass", "version_min", "version_max")
    rows = zip(*(tape.rollups().column(name).to_pylist() for name in columns), strict=True)
    return {Key(*key): (low, high) for *key, low, high in rows}


def _is_absent(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _parse_filter(query: str) -> list[Callable[[Row], bool]]:
    return [_term(word) for word in query.split()]


def _term(word: str) -> Callable[[Row], bool]:
    match = _TERM.fullmatch(word)
    if match is None or (match[2] == ":" and match[1] not in _TEXT):
        needle = word.lower()
        return lambda row: any(needle in str(row[c] or "").lower() for c in _TEXT)
    column, op, text = match[1], match[2], match[3]
    if column not in COLUMNS:
        raise bad_parameter("q", f"{column!r} is not one of {', '.join(COLUMNS)}")
    if column in _TEXT:
        if op == ":":
            return lambda row: text.lower() in str(row[column] or "").lower()
        if op not in ("=", "!="):
            raise bad_parameter(
                "q", f"{column} is text: {column}=... {column}!=... or {column}:part"
            )
        return lambda row: _COMPARE[op](str(row[column] or ""), text)
    try:
        value = float(text)
    except ValueError as error:
        raise bad_parameter("q", f"{word!r} needs a number after {op}") from error
    return lambda row: not _is_absent(row[column]) and _COMPARE[op](row[column], value)


def _make_cursor(sequence: str) -> str:
    return base64.urlsafe_b64encode(json.dumps([sequence]).encode()).decode().rstrip("=")


def _read_cursor(text: str) -> str:
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        (sequence,) = json.loads(raw)
    except (ValueError, TypeError, binascii.Error, RecursionError) as error:
        raise bad_parameter("after", "not a cursor of this list") from error
    return str(sequence)
