"""Counting what a tape holds of each sequence, batch by batch: the numbers of the roll-ups.

One pass, which also finds the offsets. Fragments of a sequence usually do not overlap, nor reach
beyond its end, and then sums over fragments are sums over the sequence. Where they do, the joined
sequence is counted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.store import codecs
from rolltape.store.errors import SchemaError
from rolltape.store.index import INDEXED, Grouping
from rolltape.store.keys import Key
from rolltape.store.schema import SUPPORT_EXPLICIT
from rolltape.store.sequences import LOGPROBS, Sequence, Tape

_MOST = np.iinfo(np.int64).max
_LEAST = np.iinfo(np.int64).min

#: What each count is before anything was seen; of some of them that means null, see `NULL`.
START: dict[str, Any] = {
    **dict.fromkeys(("loss_tokens", "routed", "route_rows", "live_rows"), 0),
    **dict.fromkeys(("explicit", "kept_sum", "kept_max", "gaps"), 0),
    **{f"{column}_{name}": 0 for column in LOGPROBS for name in ("count", "non_finite")},
    **{f"{column}_sum": 0.0 for column in LOGPROBS},
    **{f"{column}_min": np.float32(np.inf) for column in LOGPROBS},
    **{f"{column}_min_at": _MOST for column in LOGPROBS},
    "version_min": _MOST,
    "version_max": _LEAST,
}
#: Ends of the names of those.
NULL = ("_min", "_min_at", "version_min", "version_max")


class Totals:
    """The counts of all sequences, as arrays over their codes that grow with the codes."""

    def __init__(self) -> None:
        self._columns = {name: np.full(0, start) for name, start in START.items()}

    def column(self, name: str, size: int) -> np.ndarray:
        """The counts of the first `size` sequences, at least."""
        values = self._columns[name]
        if len(values) < size:
            more = np.full(max(size, 2 * len(values)), START[name])
            more[: len(values)] = values
            self._columns[name] = values = more
        return values

    def add(self, name: str, codes: np.ndarray, values: np.ndarray) -> None:
        """Add to some sequences, each of them once."""
        self._at(name, codes)[codes] += values.astype(self._columns[name].dtype)

    def lower(self, name: str, codes: np.ndarray, values: np.ndarray) -> None:
        """The lesser of what is known and new values of some sequences, each of them once."""
        column = self._at(name, codes)
        column[codes] = np.minimum(column[codes], values)

    def raise_(self, name: str, codes: np.ndarray, values: np.ndarray) -> None:
        """The greater of what is known and new values of some sequences, each of them once."""
        column = self._at(name, codes)
        column[codes] = np.maximum(column[codes], values)

    def reset(self, code: int, names: tuple[str, ...]) -> None:
        """Forget what was counted of one sequence in columns that begin with `names`."""
        for name, start in START.items():
            if name.startswith(names):
                self.column(name, code + 1)[code] = start

    def _at(self, name: str, codes: np.ndarray) -> np.ndarray:
        return self.column(name, int(codes.max(initial=-1)) + 1)


def totals_of(tape: Tape) -> Totals:
    """The counts of every key that the tape holds anything of, by code of `tape.index`."""
    index, totals = tape.index, Totals()
    for key in tape.sequence_rows:
        index.codes.setdefault(key, len(index.codes))
    joined = {
        "tokens": _count_tokens(tape, totals),
        "routes": _count_routes(tape, totals),
        "supports": _count_supports(tape, totals),
    }
    lengths = _lengths(tape)
    again = {table: spans.overlapping() | spans.beyond(lengths) for table, spans in joined.items()}
    again["forwards"] = set(_count_versions(tape, totals))
    for table in INDEXED:
        index.entries(table)
    _count_gaps(tape, totals)
    keys = list(index.codes)
    for table, codes in again.items():
        for code in sorted(codes):
            if keys[code] in tape.sequence_rows:
                _recount(tape, keys[code], code, table, totals)
    return totals


class _Spans:
    """The spans of all rows of a table, to find sequences whose fragments do not add up.

    They have a position in two of them, or one beyond their end.
    """

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []

    def add(self, batch: pa.RecordBatch, grouping: Grouping, kind: np.ndarray | int = 0) -> None:
        """Note the rows of a batch; only rows of one kind can overlap."""
        start = batch.column("start").to_numpy().astype(np.int64)
        end = np.minimum(start + batch.column("n").to_numpy(), np.iinfo(np.int32).max)
        part = np.zeros((3, len(start)), np.int32)
        part[0], part[1], part[2] = 2 * grouping.per_row() + kind, start, end
        self._parts.append(part)

    def overlapping(self) -> set[int]:
        """Codes of sequences with a position in two rows."""
        return {group // 2 for group in _overlapping(self._parts)}

    def beyond(self, lengths: np.ndarray) -> set[int]:
        """Codes of sequences with a row that reaches beyond their length (int64, by code)."""
        found: set[int] = set()
        for group, _, end in self._parts:
            codes = group // 2
            known = codes < len(lengths)
            found.update(np.unique(codes[known][end[known] > lengths[codes[known]]]).tolist())
        return found


def _count_tokens(tape: Tape, totals: Totals) -> _Spans:
    prompts = _prompts(tape)
    spans = _Spans()
    for batch, grouping in tape.index.walk("tokens", ["loss_mask", *LOGPROBS]):
        spans.add(batch, grouping)
        mask = batch.column("loss_mask")
        sizes = pc.list_value_length(mask).fill_null(0).to_numpy()
        flat = pc.list_flatten(mask).fill_null(False).to_numpy(zero_copy_only=False)
        per_row = _sums(flat, sizes)
        totals.add("loss_tokens", grouping.codes, _grouped_sum(grouping, per_row))
        if len(grouping.codes) and int(grouping.codes.max()) >= len(prompts):
            prompts = np.append(prompts, np.zeros(len(tape.index.codes) - len(prompts), np.int64))
        starts = batch.column("start").to_numpy()
        skip = prompts[grouping.per_row()] - starts
        for name in LOGPROBS:
            column = batch.column(name)
            sizes = pc.list_value_length(column).fill_null(0).to_numpy()
            flat = pc.list_flatten(column)
            if len(flat):
                valid = flat.is_valid().to_numpy(zero_copy_only=False)
                values = flat.fill_null(0).to_numpy() if flat.null_count else flat.to_numpy()
                _add_logprobs(totals, name, grouping, (starts, sizes, skip), values, valid)
    return spans


def _prompts(tape: Tape) -> np.ndarray:
    """Prompt tokens by code; 0 where they are not known."""
    out = np.zeros(len(tape.index.codes), np.int64)
    known = tape.facts.column("prompt_len").to_numpy()
    for key, row in tape.sequence_rows.items():
        out[tape.index.codes[key]] = known[row]
    return out


def _sums(values: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Sum of the values of each row; the rows follow each other."""
    ends = np.cumsum(sizes)
    total = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    sums: np.ndarray = total[ends] - total[ends - sizes]
    return sums


def _grouped_sum(grouping: Grouping, values: np.ndarray) -> np.ndarray:
    """Sum of a number of each row, by sequence of the grouping."""
    return np.bincount(grouping.of, weights=values, minlength=len(grouping.codes))


def _add_logprobs(
    totals: Totals,
    name: str,
    grouping: Grouping,
    rows: tuple[np.ndarray, np.ndarray, np.ndarray],
    values: np.ndarray,
    valid: np.ndarray,
) -> None:
    """Count a logprob column of a batch.

    Args:
        totals: where to.
        name: of the column.
        grouping: whose rows they are.
        rows: of each row the first position, its number of values, and how many of them belong to
            the prompt (may be negative, or more than there are).
        values: of all rows one after another.
        valid: where there are values.
    """
    starts, sizes, skip = rows
    begins = np.cumsum(sizes) - sizes
    keep = valid.copy()
    for row in np.flatnonzero((skip > 0) & (sizes > 0)).tolist():
        keep[begins[row] : begins[row] + min(skip[row], sizes[row])] = False
    finite = keep & np.isfinite(values)
    count_, finite_count = _sums(keep, sizes), _sums(finite, sizes)
    totals.add(f"{name}_count", grouping.codes, _grouped_sum(grouping, count_))
    non_finite = _grouped_sum(grouping, count_ - finite_count)
    totals.add(f"{name}_non_finite", grouping.codes, non_finite)
    some = np.flatnonzero(finite_count)
    if not len(some):
        return
    first = begins[
        np.flatnonzero(sizes)
    ]  # of rows that are not empty, which alone have finite ones
    at = np.searchsorted(first, begins[some])
    kept = np.where(finite, values, np.float32(0))
    sums = np.zeros(len(sizes), np.float64)
    sums[some] = np.add.reduceat(kept, first, dtype=np.float64)[at]
    totals.add(f"{name}_sum", grouping.codes, _grouped_sum(grouping, sums))
    low = np.where(finite, values, np.float32(np.inf))
    least = np.minimum.reduceat(low, first)
    # the first place in its row where each row has its minimum
    hits = np.flatnonzero(low == np.repeat(least, sizes[sizes > 0]))
    place = hits[np.searchsorted(hits, first)]
    position = starts[some].astype(np.int64) + place[at] - first[at]
    _lower_at(totals, name, grouping.codes[grouping.of[some]], least[at], position)


def _lower_at(
    totals: Totals, name: str, codes: np.ndarray, values: np.ndarray, positions: np.ndarray
) -> None:
    """Least value, and its first position, of sequences that may be there several times."""
    order = np.lexsort((positions, values, codes))
    codes, values, positions = codes[order], values[order], positions[order]
    head = np.flatnonzero(np.diff(codes, prepend=-1))
    codes, values, positions = codes[head], values[head], positions[head]
    size = int(codes.max()) + 1
    least, at = totals.column(f"{name}_min", size), totals.column(f"{name}_min_at", size)
    better = (values < least[codes]) | ((values == least[codes]) & (positions < at[codes]))
    least[codes[better]] = values[better]
    at[codes[better]] = positions[better]


def _count_routes(tape: Tape, totals: Totals) -> _Spans:
    spans = _Spans()
    for batch, grouping in tape.index.walk("routes", ["role", "layers", "valid"]):
        layers = pc.list_value_length(batch.column("layers")).to_numpy().astype(np.int64)
        n = batch.column("n").to_numpy().astype(np.int64)
        used = pc.equal(batch.column("role"), "used").to_numpy(zero_copy_only=False)
        spans.add(batch, grouping, used.astype(np.int64))
        positions, rows = n * (layers > 0), n * layers
        cells = batch.column("valid")
        for i in np.flatnonzero(cells.is_valid().to_numpy(zero_copy_only=False)).tolist():
            try:
                shape = (int(n[i]), int(layers[i]))
                valid = codecs.decode_bits(cells[i].as_buffer(), shape, field="routes.valid")
            except SchemaError:
                continue  # refused with its name by whoever reads the sequence
            positions[i], rows[i] = int(valid.any(axis=1).sum()), int(valid.sum())
        totals.add("routed", grouping.codes, _grouped_sum(grouping, positions * used))
        totals.add("route_rows", grouping.codes, _grouped_sum(grouping, rows * used))
        totals.add("live_rows", grouping.codes, _grouped_sum(grouping, rows * ~used))
    return spans


def _count_supports(tape: Tape, totals: Totals) -> _Spans:
    spans = _Spans()
    for batch, grouping in tape.index.walk("supports", ["state", "counts"]):
        spans.add(batch, grouping)
        sizes = pc.list_value_length(batch.column("state")).to_numpy()
        states = pc.list_flatten(batch.column("state")).to_numpy()
        counts = pc.list_flatten(batch.column("counts")).to_numpy().astype(np.int64)
        if len(states) != len(counts):
            continue  # refused with its name by whoever reads the sequence
        explicit = states == SUPPORT_EXPLICIT
        kept = np.where(explicit, counts, 0)
        totals.add("explicit", grouping.codes, _grouped_sum(grouping, _sums(explicit, sizes)))
        totals.add("kept_sum", grouping.codes, _grouped_sum(grouping, _sums(kept, sizes)))
        most = np.zeros(len(grouping.codes), np.int64)
        full = sizes > 0
        if full.any():
            most_of_row = np.maximum.reduceat(kept, (np.cumsum(sizes) - sizes)[full])
            np.maximum.at(most, grouping.of[full], most_of_row)
        totals.raise_("kept_max", grouping.codes, most)
    return spans


def _count_versions(tape: Tape, totals: Totals) -> list[int]:
    """Versions that produced a position, as `Sequence.weight_version` has them.

    Returns:
        Codes of sequences of several versions of which forwards produced a position again: there
        only the first forward counts.
    """
    columns = ["kind", "weight_version"]
    spans: list[np.ndarray] = []
    prompts, lengths = _prompts(tape), _lengths(tape)
    for batch, grouping in tape.index.walk("forwards", columns):
        more = len(tape.index.codes) - len(prompts)
        prompts = np.append(prompts, np.zeros(more, np.int64))
        lengths = np.append(lengths, np.zeros(more, np.int64))
        codes = grouping.per_row()
        first, end, keep = _produced(batch, prompts[codes], lengths[codes])
        values = batch.column("weight_version").fill_null(0).to_numpy()[keep]
        low = np.full(len(grouping.codes), _MOST)
        high = np.full(len(grouping.codes), _LEAST)
        np.minimum.at(low, grouping.of[keep], values)
        np.maximum.at(high, grouping.of[keep], values)
        totals.lower("version_min", grouping.codes, low)
        totals.raise_("version_max", grouping.codes, high)
        spans.append(_joined_spans(codes[keep], first[keep], end[keep]))
    size = len(tape.index.codes)
    low, high = totals.column("version_min", size), totals.column("version_max", size)
    return [code for code in _overlapping(spans) if low[code] < high[code]]


def _lengths(tape: Tape) -> np.ndarray:
    """Tokens by code; 0 where there is no sequence."""
    out = np.zeros(len(tape.index.codes), np.int64)
    for sequence in tape:
        out[tape.index.codes[sequence.key]] = sequence.length
    return out


def _produced(
    batch: pa.RecordBatch, prompts: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First position that each forward gave a logprob, one behind the last, and whether any."""
    start = batch.column("start").to_numpy().astype(np.int64)
    stop = start + batch.column("n").to_numpy()
    kind = batch.column("kind")

    def of_kind(name: str) -> np.ndarray:
        found: np.ndarray = pc.equal(kind, name).to_numpy(zero_copy_only=False)
        return found

    first = np.maximum(np.where(of_kind("score"), start + 1, stop), 0)
    end = np.minimum(stop + 1, lengths)
    keep = batch.column("weight_version").is_valid().to_numpy(zero_copy_only=False)
    keep &= ~of_kind("dummy") & (first < end)
    keep &= ~(of_kind("prefill") & (stop < prompts))  # an unfinished chunk gives no logprob
    return first, end, keep


def _joined_spans(codes: np.ndarray, first: np.ndarray, end: np.ndarray) -> np.ndarray:
    """int32 [3, m] code, first position and one behind the last: spans that meet become one."""
    order = np.lexsort((first, codes))
    codes, first, end = codes[order], first[order], end[order]
    meets = (codes[1:] == codes[:-1]) & (first[1:] == end[:-1])
    head = np.flatnonzero(np.append(True, ~meets)[: len(codes)])
    tail = np.append(head[1:], len(codes))[: len(head)] - 1
    return np.stack([codes[head], first[head], end[tail]]).astype(np.int32)


def _overlapping(spans: list[np.ndarray]) -> list[int]:
    """Codes of sequences with a position in two spans (code, first, one behind the last)."""
    if not spans:
        return []
    group, start, end = np.concatenate(spans, axis=1)
    order = np.lexsort((start, group))
    group, start, end = group[order], start[order], end[order]
    meets = (group[1:] == group[:-1]) & (start[1:] < end[:-1])
    return [int(code) for code in np.unique(group[1:][meets])]


def _count_gaps(tape: Tape, totals: Totals) -> None:
    codes = tape.index.codes
    requests = {(k.engine, k.request, k.sample): c for k, c in codes.items() if not k.scoring}
    for _, _, batch in tape.batches("events", ["kind", "engine", "request", "sample"]):
        for row in batch.filter(pc.equal(batch.column("kind"), "gap")).to_pylist():
            code = requests.get((row["engine"], row["request"], row["sample"]))
            if code is not None:
                totals.add("gaps", np.array([code]), np.ones(1))


def _recount(tape: Tape, key: Key, code: int, table: str, totals: Totals) -> None:
    """Count the joined sequence instead of its fragments."""
    sequence = tape.sequence(key)
    try:
        if table == "tokens":
            _recount_tokens(sequence, code, totals)
        elif table == "routes":
            _recount_routes(sequence, code, totals)
        elif table == "forwards":
            _recount_versions(sequence, code, totals)
        else:
            _recount_supports(sequence, code, totals)
    except SchemaError as error:
        # one bad sequence must not keep a tape from being sealed; its fragments stay counted
        tape.note(str(error))


def _recount_tokens(sequence: Sequence, code: int, totals: Totals) -> None:
    mask = sequence.loss_mask
    columns = {name: sequence.logprob(name) for name in LOGPROBS}
    totals.reset(code, ("loss_tokens", *LOGPROBS))
    mine = Grouping(np.array([code]), np.zeros(1, np.int64))
    totals.add("loss_tokens", mine.codes, np.array([(mask.values & mask.valid).sum()]))
    if not sequence.length:
        return
    rows = np.zeros(1, np.int64), np.array([sequence.length]), np.array([sequence.prompt_len])
    for name, column in columns.items():
        _add_logprobs(totals, name, mine, rows, column.values, column.valid)


def _recount_routes(sequence: Sequence, code: int, totals: Totals) -> None:
    used, live = (sequence.routes(role) for role in ("used", "live"))
    totals.reset(code, ("routed", "route_rows", "live_rows"))
    codes = np.array([code])
    if used is not None:
        totals.add("routed", codes, np.array([used.valid.any(axis=1).sum()]))
        totals.add("route_rows", codes, np.array([used.valid.sum()]))
    if live is not None:
        totals.add("live_rows", codes, np.array([live.valid.sum()]))


def _recount_supports(sequence: Sequence, code: int, totals: Totals) -> None:
    supports = sequence.supports()
    totals.reset(code, ("explicit", "kept_"))
    if supports is not None:
        sizes = np.diff(supports.offsets)[supports.state == SUPPORT_EXPLICIT]
        codes = np.array([code])
        totals.add("explicit", codes, np.array([len(sizes)]))
        totals.add("kept_sum", codes, np.array([sizes.sum()]))
        totals.raise_("kept_max", codes, np.array([sizes.max(initial=0)]))


def _recount_versions(sequence: Sequence, code: int, totals: Totals) -> None:
    versions = sequence.weight_version
    known = versions.values[versions.valid]
    totals.reset(code, ("version_",))
    if len(known):
        codes = np.array([code])
        totals.lower("version_min", codes, known.min(keepdims=True))
        totals.raise_("version_max", codes, known.max(keepdims=True))
