"""Which logprobs of two sides may be subtracted: those that mean the same at that position."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rolltape.replay.identity import Problem
from rolltape.store.columns import Masked
from rolltape.store.schema import SUPPORT_EXPLICIT, SUPPORT_FULL, SUPPORT_UNRECORDED
from rolltape.store.sequences import LOGPROBS, Sequence
from rolltape.store.supports import Supports

Meaning = Mapping[str, Any]

_UNKNOWN: Meaning = {
    name: None for name in ("temperature", "edits", "truncation", "vocab_size", "dtype", "source")
}


@dataclass(frozen=True)
class Scored:
    """The logprob columns of one side over positions 0..n-1.

    Args:
        columns: float32 [n] by column name. Where the meaning makes two columns coincide (no
            truncation; T = 1 and no edits), one stands in for the other if that was not recorded.
        code: int32 [n], index into `meanings`; -1 where nothing is said.
        meanings: the distinct semantics.
    """

    columns: dict[str, Masked]
    code: np.ndarray
    meanings: tuple[Meaning, ...]

    def meaning(self, code: int) -> Meaning:
        """The semantics with a code; all unknown for -1."""
        return self.meanings[code] if code >= 0 else _UNKNOWN


@dataclass(frozen=True)
class Clash:
    """Values of one column that both sides hold and that do not mean the same.

    Args:
        column: raw, scaled or processed.
        field: what differs.
        values: of a and of b.
        tokens: how many.
        kept_differ: of those, how many have other kept sets.
    """

    column: str
    field: str
    values: tuple[Any, Any]
    tokens: int
    kept_differ: int = 0

    @property
    def key(self) -> tuple[str, str, str]:
        """What makes two clashes the same."""
        return self.column, self.field, json.dumps(self.values)


def read_scored(sequence: Sequence, n: int) -> Scored:
    """The logprobs of a sequence with their meaning; unusable where the token is unknown."""
    known = sequence.tokens.resized(n).valid
    columns = {}
    for name in LOGPROBS:
        column = sequence.logprob(name).resized(n)
        columns[name] = Masked(column.values.copy(), column.valid & known)
    code = np.full(n, -1, np.int32)
    codes: dict[str, int] = {}
    meanings: list[Meaning] = []
    for start, length, meaning in sequence.semantics:
        text = json.dumps(meaning, sort_keys=True)
        if text not in codes:
            codes[text] = len(meanings)
            meanings.append(meaning)
        span = code[start : start + length]
        span[span < 0] = codes[text]
    scored = Scored(columns, code, tuple(meanings))
    _fill_coinciding(scored)
    return scored


def _fill_coinciding(scored: Scored) -> None:
    for index, meaning in enumerate(scored.meanings):
        where = scored.code == index
        steps = []
        if meaning["temperature"] == 1.0 and meaning["edits"] == []:
            steps.append(("scaled", "raw"))
        if meaning["truncation"] == []:
            steps.append(("processed", "scaled"))
        for target, source in [*steps, *((s, t) for t, s in reversed(steps))]:
            into, out = scored.columns[target], scored.columns[source]
            fresh = where & ~into.valid & out.valid
            into.values[fresh] = out.values[fresh]
            into.valid[fresh] = True


def disagreements(
    column: str, a: Meaning, b: Meaning, *, same_tape: bool = False
) -> list[tuple[str, Any, Any]]:
    """Fields in which a column of two sides does not mean the same: (name, of a, of b).

    What is unknown on either side does not agree, except a tape with itself. An unknown width of
    the vocabulary is only reported (`Comparison.differences`).
    """
    if same_tape and a == b:
        return []
    found = []
    if column != "raw":
        if not _equal_temperature(a["temperature"], b["temperature"]):
            found.append(("temperature", a["temperature"], b["temperature"]))
        if a["edits"] is None or a["edits"] != b["edits"]:
            found.append(("edits", a["edits"], b["edits"]))
    cut = column == "processed" and (a["truncation"] != [] or b["truncation"] != [])
    if cut and (a["truncation"] is None or a["truncation"] != b["truncation"]):
        found.append(("truncation", a["truncation"], b["truncation"]))
    widths = a["vocab_size"], b["vocab_size"]
    if not cut and None not in widths and widths[0] != widths[1]:
        found.append(("vocab_size", *widths))
    return found


def _equal_temperature(a: float | None, b: float | None) -> bool:
    # engines that keep it in float32 report 0.7 as 0.699999988
    return a is not None and b is not None and np.float32(a) == np.float32(b)


@dataclass(frozen=True)
class Comparison:
    """What of two sides may be compared.

    Args:
        usable: bool [n] by column: both hold it and it means the same.
        clashes: both hold it and it does not.
        differences: (field, of a, of b) -> tokens, of what is only reported: dtype, source, and
            a vocabulary size that one side does not know.
    """

    usable: dict[str, np.ndarray]
    clashes: list[Clash]
    differences: Counter[tuple[str, str, str]]


def compare_meanings(
    a: Scored, b: Scored, *, where: np.ndarray, kept: Masked | None, same_tape: bool
) -> Comparison:
    """Judge every column over the positions `where` (bool [n]).

    Args:
        a: one side.
        b: the other.
        where: positions that count; what lies outside is usable but not counted in clashes.
        kept: whether the kept sets are equal, bool [n]; None if a side has no supports.
        same_tape: whether both sides are one tape.
    """
    usable = {name: a.columns[name].valid & b.columns[name].valid for name in LOGPROBS}
    any_usable = np.logical_or.reduce(list(usable.values()))
    clashes: list[Clash] = []
    differences: Counter[tuple[str, str, str]] = Counter()
    both = np.stack([a.code, b.code], axis=1)
    for ca, cb in np.unique(both[any_usable], axis=0):
        here = (a.code == ca) & (b.code == cb)
        ma, mb = a.meaning(int(ca)), b.meaning(int(cb))
        for name in LOGPROBS:
            fields = disagreements(name, ma, mb, same_tape=same_tape)
            if not fields:
                continue
            rescued = np.zeros(len(here), bool)
            if kept is not None and [f[0] for f in fields] == ["truncation"]:
                rescued = kept.valid & kept.values
            bad = here & usable[name] & ~rescued
            usable[name] = usable[name] & ~bad
            counted = bad & where
            if counted.any():
                other = counted & kept.valid & ~kept.values if kept is not None else counted & False
                clashes += [
                    Clash(name, f, (x, y), int(counted.sum()), int(other.sum()))
                    for f, x, y in fields
                ]
        tokens = int((here & any_usable & where).sum())
        for name in ("dtype", "source", "vocab_size"):
            if ma[name] != mb[name] and tokens:
                differences[name, str(ma[name]), str(mb[name])] += tokens
    return Comparison(usable, clashes, differences)


def clash_problems(clashes: list[Clash]) -> list[Problem]:
    """Clashes of all pairs, summed over equal ones."""
    tokens: Counter[tuple[str, str, str]] = Counter()
    kept: Counter[tuple[str, str, str]] = Counter()
    sequences: Counter[tuple[str, str, str]] = Counter()
    values = {}
    for clash in clashes:
        tokens[clash.key] += clash.tokens
        kept[clash.key] += clash.kept_differ
        sequences[clash.key] += 1
        values[clash.key] = clash.values
    found = []
    for key, count in tokens.items():
        column, name, _ = key
        x, y = values[key]
        message = f"{column}: {name} {_say(x)} in a, {_say(y)} in b ({count:,} tokens)"
        fields = {"column": column, "field": name, "values": [x, y], "tokens": count}
        if name == "truncation":
            message += f"; kept sets differ for {kept[key]:,} of them"
            fields["kept_differ"] = kept[key]
        fields["sequences"] = sequences[key]
        found.append(Problem("semantics", message, fields=fields))
    return found


def _say(value: Any) -> str:
    if value is None:
        return "unknown"
    return "none" if value == [] else ", ".join(value) if isinstance(value, list) else f"{value}"


def kept_sets_equal(a: Supports, b: Supports, n: int, *, vocab_size: int | None) -> Masked:
    """Whether two sides kept the same token ids, bool [n]; missing where either is unrecorded.

    Args:
        a: one side.
        b: the other.
        n: positions to answer for; beyond the end of a side the answer is missing.
        vocab_size: an explicit set of this size is the full vocabulary.
    """
    out = Masked.empty(n, np.bool_)
    m = min(n, len(a.state), len(b.state))
    ca, cb = np.diff(a.offsets)[:m], np.diff(b.offsets)[:m]
    full_a = (a.state[:m] == SUPPORT_FULL) | (
        (a.state[:m] == SUPPORT_EXPLICIT) & (ca == vocab_size)
    )
    full_b = (b.state[:m] == SUPPORT_FULL) | (
        (b.state[:m] == SUPPORT_EXPLICIT) & (cb == vocab_size)
    )
    out.valid[:m] = (a.state[:m] != SUPPORT_UNRECORDED) & (b.state[:m] != SUPPORT_UNRECORDED)
    same_size = ~full_a & ~full_b & out.valid[:m] & (ca == cb)
    sizes = np.where(same_size, ca, 0)
    ids_a = _gather(a, same_size, sizes)
    ids_b = _gather(b, same_size, sizes)
    wrong = np.concatenate([[0], np.cumsum(ids_a != ids_b)])
    ends = np.cumsum(sizes)
    out.values[:m] = (full_a & full_b) | (same_size & (wrong[ends] == wrong[ends - sizes]))
    return out


def _gather(supports: Supports, where: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    m = len(where)
    keep = np.repeat(where, np.diff(supports.offsets[: m + 1]))
    ids: np.ndarray = supports.ids[supports.offsets[0] : supports.offsets[m]][keep]
    return ids
