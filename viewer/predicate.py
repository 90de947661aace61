"""Filters as text: words and conditions, `and`, `or`, `not`, parentheses; parsed here, never run.

    max_abs > 0.5 and (wver_span > 1 or not finish = "length")
    max_abs>0.1 finish=length group:0-3 1f0c

What stands side by side without a word between is joined by `and`. A word alone is looked for in
the text columns. `=` and `!=` also take `null`; `"null"` is that text. What is absent meets no
condition but `= null`, and so it meets `not` of any other.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.viewer.answers import Problem

#: Longest filter, how deep its parentheses go, and how many conditions it has: each of them is
#: looked for in all rows.
MAX_TEXT, MAX_DEPTH, MAX_CONDITIONS = 4096, 40, 256

_PIECE = re.compile(
    r"""\s*(?:
      (?P<paren>[()])
    | (?P<quoted>"(?:[^"\\]|\\.)*")
    | (?P<name>[A-Za-z0-9_]+)\s*(?P<op><=|>=|!=|==|=|<|>|:(?!\s))
      \s*(?P<value>"(?:[^"\\]|\\.)*"|[^\s()"]+)?
    | (?P<word>[^\s()"]+)
    )""",
    re.VERBOSE,
)
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "!=": operator.ne,
}


@dataclass(frozen=True)
class Word:
    """Text that one of the text columns must contain."""

    text: str
    at: int


@dataclass(frozen=True)
class Test:
    """A condition on one column.

    Args:
        name: of the column.
        op: as in the filter.
        value: without quotes.
        null: whether the value is the bare word `null`.
        raw: how it was written.
        at: where.
    """

    name: str
    op: str
    value: str
    null: bool
    raw: str
    at: int


@dataclass(frozen=True)
class Not:
    """The opposite."""

    of: Node


@dataclass(frozen=True)
class Several:
    """All at once, or one of them at least."""

    of: tuple[Node, ...]
    either: bool


Node = Word | Test | Not | Several


def parse(text: str, field: str) -> Node | None:
    """The tree of a filter; None for an empty one.

    Args:
        text: the filter.
        field: name of the parameter, for errors.

    Raises:
        Problem: 400 with `field` and `position`: it cannot be read.
    """
    if len(text) > MAX_TEXT:
        raise wrong(field, MAX_TEXT, f"longer than {MAX_TEXT} characters")
    pieces = _pieces(text, field)
    conditions = [piece for piece in pieces if piece.node is not None]
    if len(conditions) > MAX_CONDITIONS:
        at = conditions[MAX_CONDITIONS].at
        raise wrong(field, at, f"more than {MAX_CONDITIONS} words and conditions")
    return _Parser(pieces, len(text), field).whole()


def wrong(field: str, at: int, detail: str) -> Problem:
    """400 that says where in the filter it is."""
    text = f"{field}: at character {at + 1}: {detail}"
    return Problem(400, "bad parameter", text, field=field, position=at)


@dataclass(frozen=True)
class _Piece:
    kind: str  # ( ) and or not, or node
    at: int
    node: Node | None = None


def _pieces(text: str, field: str) -> list[_Piece]:
    found, at = [], 0
    end = len(text.rstrip())
    while at < end:
        match = _PIECE.match(text, at)
        if match is None:
            at += len(text[at:]) - len(text[at:].lstrip())
            raise wrong(field, at, "a quotation that does not end")
        kind = str(match.lastgroup)
        begin = match.start("name" if match["name"] else kind)
        at = match.end()
        if match["paren"]:
            found.append(_Piece(match["paren"], begin))
        elif match["name"]:
            if match["value"] is None:
                raise wrong(field, begin, f"{match['name']!r} needs a value after {match['op']}")
            op = "=" if match["op"] == "==" else match["op"]
            raw = text[begin:at]
            value = match["value"]
            test = Test(match["name"], op, _unquoted(value), value == "null", raw, begin)
            found.append(_Piece("node", begin, test))
        elif match["word"] in ("and", "or", "not"):
            found.append(_Piece(match["word"], begin))
        else:
            word = Word(_unquoted(match["quoted"] or match["word"]), begin)
            found.append(_Piece("node", begin, word))
    return found


def _unquoted(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text[1:-1]) if text.startswith('"') else text


class _Parser:
    """or < and < not < a condition, a word or parentheses."""

    def __init__(self, pieces: list[_Piece], end: int, field: str) -> None:
        self._pieces, self._end, self._field = pieces, end, field
        self._at = self._depth = 0

    @property
    def _next(self) -> _Piece:
        if self._at < len(self._pieces):
            return self._pieces[self._at]
        return _Piece("end", self._end)

    def whole(self) -> Node | None:
        if not self._pieces:
            return None
        node = self._either()
        if self._next.kind != "end":
            raise wrong(self._field, self._next.at, f"{self._next.kind!r} was not expected")
        return node

    def _either(self) -> Node:
        found = [self._all()]
        while self._next.kind == "or":
            self._at += 1
            found.append(self._all())
        return found[0] if len(found) == 1 else Several(tuple(found), either=True)

    def _all(self) -> Node:
        found = [self._one()]
        while self._next.kind in ("and", "not", "(", "node"):
            self._at += self._next.kind == "and"
            found.append(self._one())
        return found[0] if len(found) == 1 else Several(tuple(found), either=False)

    def _one(self) -> Node:
        piece = self._next
        self._at += 1
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise wrong(self._field, piece.at, f"nested more than {MAX_DEPTH} deep")
        if piece.kind == "not":
            node: Node = Not(self._one())
        elif piece.kind == "(":
            node = self._either()
            if self._next.kind != ")":
                raise wrong(self._field, piece.at, "this parenthesis is not closed")
            self._at += 1
        elif piece.node is not None:
            node = piece.node
        else:
            what = "the end" if piece.kind == "end" else repr(piece.kind)
            raise wrong(self._field, piece.at, f"a condition was expected, not {what}")
        self._depth -= 1
        return node


def names_of(node: Node | None) -> set[str]:
    """Names that stand in conditions."""
    if isinstance(node, Test):
        return {node.name}
    if isinstance(node, Not):
        return names_of(node.of)
    if isinstance(node, Several):
        return {name for part in node.of for name in names_of(part)}
    return set()


@dataclass(frozen=True)
class Fields:
    """What conditions are about.

    Args:
        field: name of the parameter, for errors.
        numbers: names of number columns.
        texts: names of text columns.
        words: text columns in which a word alone is looked for; empty if words are refused.
        column: the column of a name: for numbers float64 [n], NaN where absent, or any other
            numbers that are never absent; for texts an Arrow array of strings, plain or
            dictionary.
    """

    field: str
    numbers: Mapping[str, Any] | tuple[str, ...]
    texts: tuple[str, ...]
    words: tuple[str, ...]
    column: Callable[[str], Any]


def check(node: Node | None, fields: Fields) -> None:
    """Find out before any column is read whether a filter can be applied.

    Raises:
        Problem: 400 with `field` and `position`: no such column, or not a number.
    """
    if isinstance(node, Not):
        check(node.of, fields)
    elif isinstance(node, Several):
        for part in node.of:
            check(part, fields)
    elif isinstance(node, Test):
        _check_test(node, fields)
    elif isinstance(node, Word) and not fields.words:
        text = f"{node.text!r} is not a condition such as {next(iter(fields.numbers))} > 1"
        raise wrong(fields.field, node.at, text)


def _check_test(node: Test, fields: Fields) -> None:
    if node.op == ":" and node.name not in fields.texts and fields.words:
        return  # an id may have a colon
    if node.name in fields.texts:
        if node.op not in ("=", "!=", ":"):
            text = f"{node.name} is text: {node.name}=... {node.name}!=... or {node.name}:part"
            raise wrong(fields.field, node.at, text)
        return
    if node.name not in fields.numbers:
        known = ", ".join([*fields.texts, *fields.numbers])
        raise wrong(fields.field, node.at, f"{node.name!r} is not one of {known}")
    if node.op in ("=", "!=") and node.null:
        return
    try:
        float(node.value)
    except ValueError as error:
        text = f"{node.raw!r} needs a number after {node.op}"
        raise wrong(fields.field, node.at, text) from error
    if node.op == ":":
        raise wrong(fields.field, node.at, f"{node.name} is a number: use = or >=")


def mask(node: Node | None, fields: Fields, n: int) -> np.ndarray:
    """Where a filter that was checked holds, bool [n]."""
    if node is None:
        return np.ones(n, bool)
    if isinstance(node, Not):
        return ~mask(node.of, fields, n)
    if isinstance(node, Several):
        found = mask(node.of[0], fields, n)
        for part in node.of[1:]:
            other = mask(part, fields, n)
            found = found | other if node.either else found & other
        return found
    if isinstance(node, Word) or (node.op == ":" and node.name not in fields.texts):
        text = node.text if isinstance(node, Word) else node.raw
        each = [_contains(fields.column(name), text) for name in fields.words]
        return np.asarray(np.logical_or.reduce(each))
    column = fields.column(node.name)
    if node.name in fields.texts:
        if node.op == ":":
            return _contains(column, node.value)
        if node.null:
            return np.asarray(column.is_null() if node.op == "=" else column.is_valid())
        same = _same(column, node)
        return same if node.op == "=" else ~same & np.asarray(column.is_valid())
    if node.null:
        absent = np.isnan(column)
        return np.asarray(absent if node.op == "=" else ~absent)
    with np.errstate(invalid="ignore"):
        met = np.asarray(_COMPARE[node.op](column, float(node.value)))
    return np.asarray(met & ~np.isnan(column) if node.op == "!=" else met)


def _same(column: pa.Array, node: Test) -> np.ndarray:
    return _by_value(column, lambda values: pc.equal(values, node.value))


def _contains(column: pa.Array, text: str) -> np.ndarray:
    def found(values: pa.Array) -> pa.Array:
        return pc.match_substring(values, text, ignore_case=True)

    return _by_value(column, found)


def _by_value(column: pa.Array, test: Callable[[pa.Array], pa.Array]) -> np.ndarray:
    """A test of strings, of a dictionary made once a value; null does not meet it."""
    if pa.types.is_dictionary(column.type):
        each = _by_value(column.dictionary, test)
        codes = column.indices.fill_null(len(each)).to_numpy(zero_copy_only=False)
        return np.asarray(np.append(each, False)[codes])
    return np.asarray(test(column).fill_null(False).to_numpy(zero_copy_only=False))
