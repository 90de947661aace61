"""Layer by layer: the error of every site at every position of one sequence, binned, as codes.

The numbers are those of the report's `activations` table, by site in the order in which sites run.
A cell of the map is a bin of positions: what must not be overlooked first stands in it, and of the
values the largest (of cosines the smallest). The front is `rolltape.viewer.front`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import pyarrow as pa

from rolltape.store.sites import site_order
from rolltape.viewer.answers import Problem, bad_parameter, unknown
from rolltape.viewer.arrays import encode
from rolltape.viewer.library import Pair

#: Codes below `FIRST` are states. Of what lies in a bin the last counts, and values come before
#: `not_finite`.
STATES = ("missing", "equal", "not_measured", "not_finite")
MISSING, EQUAL, NOT_MEASURED, NOT_FINITE = range(4)
FIRST = 4
_LEVELS = 256 - FIRST - 1

MAX_BINS = 4096
MAX_CELLS = 1 << 22
MAX_PATTERNS = 512
#: Sites of a tile without a wish; of a sequence without outputs there are none.
USUAL = "layers.*.out"


@dataclass(frozen=True)
class Metric:
    """A measure of the `activations` table on a fixed log scale, so that codes mean the same
    in every window and every run.

    Args:
        low: value of the first code; what is smaller gets it too.
        high: value of code 255; what is larger gets it too.
        blank: what code `equal` means.
        columns: of the table, besides `equal`.
    """

    low: float
    high: float
    blank: str = "bitwise equal"
    columns: tuple[str, ...] = ("non_finite",)

    @property
    def table(self) -> np.ndarray:
        """float32 [256], value of every code; NaN for states."""
        out = np.full(256, np.nan, np.float32)
        out[FIRST:] = self.low * (self.high / self.low) ** (np.arange(_LEVELS + 1) / _LEVELS)
        return out

    def codes(self, values: np.ndarray) -> np.ndarray:
        """uint8, the nearest code on the log axis; values are not negative."""
        with np.errstate(divide="ignore"):
            t = (np.log(values) - np.log(self.low)) / np.log(self.high / self.low)
        found: np.ndarray = (np.rint(np.clip(t, 0, 1) * _LEVELS) + FIRST).astype(np.uint8)
        return found


#: A relative error of a row of zeros is infinite. `cosine` is coded as 1 - cosine, `equal` as 1
#: where bits differ.
METRICS = {
    "rel_l2": Metric(1e-9, 1e3, columns=("rel_l2", "non_finite")),
    "max_abs": Metric(1e-9, 1e6, columns=("max_abs", "non_finite")),
    "cosine": Metric(1e-8, 2.0, columns=("cosine", "non_finite", "sketched")),
    "ulp": Metric(1.0, 2.0**63, columns=("ulp", "non_finite")),
    "equal": Metric(0.1, 1.0),
    "non_finite": Metric(1.0, 1e6, blank="every value is finite"),
}
# Keys sort as a bin prefers them; values are keys from 0 on.
_KEY = {MISSING: -3.0, EQUAL: -2.0, NOT_MEASURED: -1.0, NOT_FINITE: np.inf}


@dataclass(frozen=True)
class Span:
    """One row of the table: a site over positions [start, start + n)."""

    site: str
    start: int
    n: int
    chunk: int
    row: int


class SiteRows:
    """The rows of one sequence, their list columns read where they are asked for.

    Args:
        table: `a` is the same in all of them.
    """

    def __init__(self, table: pa.Table) -> None:
        self._batches = table.to_batches()
        self._offsets: dict[tuple[int, str], np.ndarray] = {}
        self.spans: dict[str, list[Span]] = {}
        found = []
        for chunk, batch in enumerate(self._batches):
            names = ("site", "start", "n")
            columns = (batch.column(name).to_pylist() for name in names)
            lengths = _lengths(batch)
            for row, (site, start, n) in enumerate(zip(*columns, strict=True)):
                n = n if lengths is None else min(n, int(lengths[row]))
                if start >= 0 and n > 0:
                    found.append(Span(str(site), start, n, chunk, row))
        for span in sorted(found, key=lambda s: site_order(s.site)):
            self.spans.setdefault(span.site, []).append(span)

    @property
    def sites(self) -> list[str]:
        """In the order in which they run."""
        return list(self.spans)

    def sketched(self, span: Span) -> bool:
        """Whether its errors are estimated from sketches."""
        return bool(self._batches[span.chunk].column("sketched")[span.row].as_py())

    def cells(
        self, site: str, start: int, end: int, columns: tuple[str, ...]
    ) -> Iterator[tuple[slice, dict[str, np.ndarray]]]:
        """What a site has in positions [start, end).

        Yields:
            Where it lies, counted from `start`, and per column its values: floats with NaN for
            null, -1 for a null of other types. `sketched` is one bool.
        """
        for span in self.spans.get(site, ()):
            low, high = max(start, span.start), min(end, span.start + span.n)
            if low >= high:
                continue
            got: dict[str, np.ndarray] = {}
            for name in columns:
                if name == "sketched":
                    got[name] = np.array(self.sketched(span))
                else:
                    got[name] = self._part(span, name, low - span.start, high - span.start)
            yield slice(low - start, high - start), got

    def _part(self, span: Span, name: str, low: int, high: int) -> np.ndarray:
        """Elements [low, high) of a list cell; what the list is too short for is null."""
        column = self._batches[span.chunk].column(name)
        key = span.chunk, name
        if key not in self._offsets:
            self._offsets[key] = column.offsets.to_numpy()
        begin, stop = self._offsets[key][span.row : span.row + 2].tolist()
        inner = column.values.slice(begin + low, max(0, min(high - low, stop - begin - low)))
        return _values(inner, high - low)


def _lengths(batch: pa.RecordBatch) -> np.ndarray | None:
    """Elements that each row really has, int [rows]; None if none of the lists was read."""
    if "equal" not in batch.schema.names:
        return None
    lengths: np.ndarray = np.diff(batch.column("equal").offsets.to_numpy())
    return lengths


def _values(cell: pa.Array, n: int) -> np.ndarray:
    """`n` elements with NaN, -1 or False for null; must not be written to."""
    filler: Any = np.nan if pa.types.is_floating(cell.type) else -1
    if pa.types.is_boolean(cell.type):
        filler = False
    if cell.null_count:
        cell = cell.fill_null(filler)
    values: np.ndarray = cell.to_numpy(zero_copy_only=False)
    if len(values) == n:
        return values
    out = np.full(n, filler, values.dtype)
    out[: len(values)] = values
    return out


def site_rows(
    pair: Pair, name: str, columns: tuple[str, ...] = (), sites: list[str] | None = None
) -> SiteRows:
    """The report's rows of a sequence, of some sites, with some columns."""
    names = ["site", "start", "n", *columns]
    return SiteRows(pair.report_rows("activations", name, names, sites))


def chosen_sites(pair: Pair, name: str, patterns: str) -> list[str]:
    """Sites of a sequence that fit one of some patterns, in the order in which they run.

    Args:
        pair: where it lies.
        name: sequence id on side A.
        patterns: names, `*` being any run of characters, separated by commas.

    Raises:
        Problem: 400, too many of them, or one that no site fits though the sequence has some.
    """
    wanted = dict.fromkeys(p.strip() for p in patterns.split(","))
    wild = [p for p in wanted if "*" in p]
    if len(wild) > MAX_PATTERNS:
        raise bad_parameter("sites", f"at most {MAX_PATTERNS} patterns with *")
    known = pair.report.sites(name) if pair.report is not None else []
    every = sorted(known, key=site_order)
    exact = wanted.keys() & set(every)
    for each in wanted if every else ():
        fits = any(fnmatchcase(s, each) for s in every) if "*" in each else each in exact
        if not fits and each != USUAL:
            text = f"no site fits {each!r}; the sequence has {every[0]} to {every[-1]}"
            raise bad_parameter("sites", f"{text}, see layers for all {len(every)}")
    return [s for s in every if s in exact or any(fnmatchcase(s, p) for p in wild)]


def extent(pair: Pair, name: str) -> tuple[int, int]:
    """Positions and prompt length of a sequence.

    Raises:
        Problem: 404, neither tape nor report has it.
    """
    sequence = pair.find(name)
    if sequence is not None:
        return sequence.length, sequence.prompt_len
    row = pair.compared.get(name)
    if row is None:
        raise unknown("sequence", name, "the sequence list has all of them")
    return int(row["length"] or 0), int(row["prompt_len"] or 0)


def bin_starts(n: int, bins: int) -> np.ndarray:
    """int64 [bins], first of `n` cells in each of as many bins of equal size as can be."""
    return np.arange(bins) * n // max(1, bins)


def keys(metric: str, got: dict[str, np.ndarray]) -> np.ndarray:
    """float64 [n], what a bin takes the largest of: states as in `_KEY`, values from 0 on.

    Args:
        metric: one of `METRICS`.
        got: `equal` and the columns of the metric, as `SiteRows.cells` gives them.
    """
    equal = got["equal"]
    if metric == "equal":
        return np.where(equal, _KEY[EQUAL], 1.0)
    if metric == "non_finite":
        values = got["non_finite"].astype(np.float64)
        values[values < 0] = _KEY[NOT_MEASURED]
        values[values == 0] = _KEY[EQUAL]
        return values
    values = got[metric].astype(np.float64)
    if metric == "cosine":
        values = np.maximum(1 - values, 0)
    absent = ~(values >= 0)
    if absent.any():
        # a sketch knows relative errors alone; else it is relative to a row of zeros
        of_sketch = metric in ("max_abs", "ulp") or bool(got.get("sketched", False))
        values[absent] = _KEY[NOT_MEASURED] if of_sketch else np.inf
    broken = got["non_finite"] > 0
    if broken.any():
        values[broken] = np.inf
    values[equal] = _KEY[EQUAL]
    return values


def heat(
    pair: Pair,
    name: str,
    *,
    metric: str,
    start: int,
    end: int,
    sites: str,
    bins: int | None,
    exact: bool,
) -> bytes:
    """A tile of the map as safetensors bytes.

    Args:
        pair: where it lies.
        name: sequence id on side A.
        metric: one of `METRICS`.
        start: first position.
        end: one behind the last.
        sites: patterns with `*`, separated by commas.
        bins: columns at most; None is one a position, as far as may be.
        exact: float32 values and states in place of codes.

    Returns:
        `codes` uint8 [rows, bins] and `scale` float32 [256]; or `values` float32 and `states`
        uint8 [rows, bins], state 4 being a value. `starts` uint32 [bins] is the first position of
        each bin. The metadata has `rows`, a JSON list of sites.

    Raises:
        Problem: 400 or 413.
    """
    scale = METRICS[metric]
    columns = ("equal", *scale.columns)
    chosen = chosen_sites(pair, name, sites)
    rows = site_rows(pair, name, columns, chosen)
    n = end - start
    bins = min(n, MAX_BINS if bins is None else bins)
    if len(chosen) * bins > MAX_CELLS:
        text = f"{len(chosen)} sites by {bins} bins; at most {MAX_CELLS} cells at a time"
        raise Problem(413, "tile too large", text, field="bins", limit=MAX_CELLS)
    starts = bin_starts(n, bins)
    best = np.full((len(chosen), bins), _KEY[MISSING])
    for i, site in enumerate(chosen):
        line = np.full(n, _KEY[MISSING])
        for where, got in rows.cells(site, start, end, columns):
            line[where] = keys(metric, got)
        if bins:
            best[i] = line if bins == n else np.maximum.reduceat(line, starts)
    metadata = {
        "metric": metric,
        "start": str(start),
        "end": str(end),
        "rows": json.dumps(chosen),
        "states": ",".join(STATES),
        "aggregate": "min" if metric == "cosine" else "max",
        "coded": "1 - cosine" if metric == "cosine" else metric,
        "blank": scale.blank,
    }
    positions = (starts + start).astype(np.uint32)
    states = np.full(best.shape, FIRST, np.uint8)
    for state, key in _KEY.items():
        states[best == key] = state
    value = states == FIRST
    if exact:
        numbers = np.full(best.shape, np.nan, np.float32)
        got_values = 1 - best[value] if metric == "cosine" else best[value]
        numbers[value] = got_values
        return encode({"values": numbers, "states": states, "starts": positions}, metadata=metadata)
    states[value] = scale.codes(best[value])
    arrays = {"codes": states, "scale": scale.table, "starts": positions}
    return encode(arrays, metadata=metadata)
