"""Two recordings of one sequence compared bit by bit: what differs, how often, and where first.

First means first in execution order: by step, then the routes of the forward layer by layer, then
the logprobs that came out of it. Only what the first recording holds is compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rolltape.store import Sequence
from rolltape.store.columns import Masked
from rolltape.store.keys import Key
from rolltape.store.schema import SUPPORT_UNRECORDED
from rolltape.store.sequences import LOGPROBS

#: Order within a step: how it was composed, what its forward did, what came out.
COMPOSITION, FORWARD, OUTPUT, CHOICE = range(4)
_NO_LAYER = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One value that is not the same.

    Args:
        order: place in the execution order.
        what: name of the value.
        step: engine step of the recording.
        sequence: id in the recording; None for a whole step.
        position: in the sequence; None where there is none.
        layer: model layer number; None where there is none.
        recorded: the value, see `number` and `plain`.
        found: the same of the re-execution.
        ulp: distance of two finite logprobs in units of the last place.
    """

    order: tuple[int, ...]
    what: str
    step: int
    sequence: str | None = None
    position: int | None = None
    layer: int | None = None
    recorded: dict[str, str] | None = None
    found: dict[str, str] | None = None
    ulp: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; a value that is not there is null."""
        return {name: value for name, value in vars(self).items() if name != "order"}


@dataclass
class Findings:
    """What was compared so far, what of it differs, and the first difference."""

    compared: Counter[str] = field(default_factory=Counter)
    differ: Counter[str] = field(default_factory=Counter)
    sequences: set[str] = field(default_factory=set)
    first: Difference | None = None

    def count(self, what: str, n: int) -> None:
        """So many values were compared."""
        self.compared[what] += int(n)

    def add(self, what: str, n: int, first: Difference) -> None:
        """So many values differ, and which is the first."""
        self.differ[what] += int(n)
        if first.sequence is not None:
            self.sequences.add(first.sequence)
        if self.first is None or first.order < self.first.order:
            self.first = first


def number(value: Any) -> dict[str, str]:
    """A number as decimal and as the hex digits of its bits."""
    if isinstance(value, np.float32):
        return {"decimal": str(value), "hex": f"0x{int(value.view(np.uint32)):08x}"}
    return {"decimal": str(int(value)), "hex": f"{int(value):#x}"}


def plain(value: Any) -> dict[str, str]:
    """A value that is no number."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return number(value)
    return {"decimal": str(value), "hex": ""}


def composition_difference(
    engine: int, step: int, key: Key | None, what: str, values: tuple[Any, Any]
) -> Difference:
    """A step that was composed otherwise.

    Args:
        engine: number of the engine.
        step: of the recording.
        key: whose row it is; None for a whole step.
        what: is not the same.
        values: as recorded, and as found.
    """
    return Difference(
        order=(engine, step, COMPOSITION, 0, int(key is not None), 0, 0),
        what=f"composition: {what}",
        step=step,
        sequence=None if key is None else key.id,
        recorded=plain(values[0]),
        found=plain(values[1]),
    )


def bits_differ(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where two float32 arrays have other bits; NaNs are compared like anything else."""
    left, right = (np.ascontiguousarray(x, np.float32).view(np.uint32) for x in (a, b))
    differ: np.ndarray = left != right
    return differ


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a sequence stands in the execution.

    Args:
        engine: number of the engine.
        row: of the call.
        first_step: of the call.
    """

    engine: int
    row: int
    first_step: int


class PairComparison:
    """Compares one sequence with its re-execution, and adds to findings.

    Args:
        a: as recorded.
        b: as re-executed.
        place: of `a`.
        findings: to add to.
        skip: columns and tables that cannot be compared.
    """

    def __init__(
        self,
        a: Sequence,
        b: Sequence,
        *,
        place: Place,
        findings: Findings,
        skip: Mapping[str, str] | None = None,
    ) -> None:
        self._a, self._b, self._place, self._findings = a, b, place, findings
        self._skip = skip or {}
        made = a.step
        self._ran = _input_steps(a, place.first_step)
        # what is said of a prompt's token comes from the forward over the one before it
        before = np.concatenate([self._ran[:1], self._ran[:-1]])
        self._made = np.where(made.valid, made.values, before)

    def run(self) -> None:
        """Compare everything that `a` holds."""
        a, b = self._a, self._b
        self._column("tokens", a.tokens, b.tokens, CHOICE, np.not_equal)
        self._column("loss_mask", a.loss_mask, b.loss_mask, CHOICE, np.not_equal)
        for column in reversed(LOGPROBS):
            if column not in self._skip:
                self._column(column, a.logprob(column), b.logprob(column), OUTPUT, bits_differ)
        if "supports" not in self._skip:
            self._supports()
        self._distributions()
        self._routes()
        self._activations()
        self._sketches()

    def _difference(
        self,
        what: str,
        stage: int,
        steps: np.ndarray,
        position: int,
        *,
        layer: int | None = None,
        minor: int = 0,
        values: tuple[dict[str, str] | None, dict[str, str] | None],
        ulp: int | None = None,
    ) -> Difference:
        step = int(steps[position])
        place = self._place
        depth = _NO_LAYER if layer is None else layer
        return Difference(
            order=(place.engine, step, stage, depth, minor, place.row, position),
            what=what,
            step=step,
            sequence=self._a.id,
            position=position,
            layer=layer,
            recorded=values[0],
            found=values[1],
            ulp=ulp,
        )

    def _column(
        self,
        what: str,
        a: Masked,
        b: Masked,
        stage: int,
        differs: Callable[[np.ndarray, np.ndarray], np.ndarray],
    ) -> None:
        b = b.resized(len(a))
        self._findings.count(what, a.valid.sum())
        wrong = np.flatnonzero(a.valid & (~b.valid | differs(a.values, b.values)))
        if not wrong.size:
            return
        at = int(wrong[np.argmin(self._made[wrong])])
        values = number(a.values[at]), number(b.values[at]) if b.valid[at] else None
        minor = ("raw", "scaled", "processed").index(what) if what in LOGPROBS else 0
        distance = _ulp(a.values[at], b.values[at]) if b.valid[at] else None
        first = self._difference(
            what, stage, self._made, at, minor=minor, values=values, ulp=distance
        )
        self._findings.add(what, wrong.size, first)

    def _routes(self) -> None:
        a, b = self._a.routes(), self._b.routes()
        if a is None:
            return
        if not a.order:  # the recording was compacted to sets
            a = replace(a, ids=np.sort(a.ids, -1))
            b = b and replace(b, ids=np.sort(b.ids, -1))
        for column, layer in enumerate(a.layers):
            valid = a.valid[:, column]
            self._findings.count("routes.ids", valid.sum())
            weighted = valid & a.weighted[:, column] & (a.weights is not None)
            self._findings.count("routes.weights", weighted.sum())
            at = b.layers.index(layer) if b is not None and layer in b.layers else None
            there = np.zeros(len(valid), bool)
            ids = None
            if b is not None and at is not None:
                there = _resized(b.valid[:, at], len(valid))
                ids = _resized(b.ids[:, at].astype(np.int64), len(valid))
            self._slots("routes.ids", layer, valid, there, a.ids[:, column].astype(np.int64), ids)
            if a.weights is not None:
                found = None
                if b is not None and at is not None and b.weights is not None:
                    found = _resized(b.weights[:, at], len(valid))
                self._slots("routes.weights", layer, weighted, there, a.weights[:, column], found)

    def _slots(
        self,
        what: str,
        layer: int,
        valid: np.ndarray,
        there: np.ndarray,
        a: np.ndarray,
        b: np.ndarray | None,
    ) -> None:
        """Values [T, k] of one layer."""
        if b is None or b.shape != a.shape:
            b, there = a, np.zeros(len(a), bool)
        other = bits_differ(a, b) if a.dtype == np.float32 else a != b
        wrong = np.flatnonzero(valid & (~there | other.any(-1)))
        if not wrong.size:
            return
        p = int(wrong[np.argmin(self._ran[wrong])])
        slot = int(other[p].argmax()) if there[p] else 0
        first = self._difference(
            f"{what}[{slot}]",
            FORWARD,
            self._ran,
            p,
            layer=layer,
            minor=int(what == "routes.weights"),
            values=(number(a[p, slot]), number(b[p, slot]) if there[p] else None),
        )
        self._findings.add(what, wrong.size, first)

    def _supports(self) -> None:
        a, b = self._a.supports(), self._b.supports()
        if a is None:
            return
        known = a.state != SUPPORT_UNRECORDED
        self._findings.count("supports", known.sum())
        if b is not None and all(
            np.array_equal(getattr(a, name), getattr(b, name))
            for name in ("state", "offsets", "ids")
        ):
            return
        length = 0 if b is None else len(b.state)  # it may have been cut short
        wrong = [
            p
            for p in np.flatnonzero(known).tolist()
            if b is None
            or p >= length
            or a.state[p] != b.state[p]
            or not np.array_equal(_set(a, p), _set(b, p))
        ]
        if not wrong:
            return
        p = min(wrong, key=lambda position: (self._made[position], position))
        values = plain(_kept(a, p)), None if b is None or p >= length else plain(_kept(b, p))
        first = self._difference("supports", OUTPUT, self._made, p, minor=1, values=values)
        self._findings.add("supports", len(wrong), first)

    def _distributions(self) -> None:
        a, b = self._a.distributions(), self._b.distributions()
        if a is None:
            return
        self._findings.count("distributions", a.valid.sum())
        valid = np.zeros(len(a), bool)
        other = np.zeros(len(a), bool)
        if b is not None and a.ids.shape == b.ids.shape:
            valid = b.valid
            other = (a.ids != b.ids).any(-1) | bits_differ(a.logprobs, b.logprobs).any(-1)
            other |= bits_differ(a.tail, b.tail)
        wrong = np.flatnonzero(a.valid & (~valid | other))
        if not wrong.size:
            return
        p = int(wrong[np.argmin(self._made[wrong])])
        found = None if b is None or not valid[p] else number(b.logprobs[p, 0])
        values = number(a.logprobs[p, 0]), found
        first = self._difference("distributions", OUTPUT, self._made, p, minor=1, values=values)
        self._findings.add("distributions", wrong.size, first)

    def _activations(self) -> None:
        mine, other = self._a.activations(), self._b.activations()
        for site, spans in mine.items():
            found = _joined(other.get(site, []), self._a.length)
            layer = _layer_of(site)
            for start, _, data in spans:
                self._findings.count("activations", data.size)
                stop = start + len(data)
                there, values = found
                if values.shape[-1:] != data.shape[-1:]:
                    there, values = np.zeros(self._a.length, bool), np.zeros((stop, data.shape[-1]))
                wrong = bits_differ(data, values[start:stop]) | ~there[start:stop, None]
                if not wrong.any():
                    continue
                rows = np.flatnonzero(wrong.any(-1))
                p = int(rows[np.argmin(self._ran[start + rows])])
                at = int(wrong[p].argmax())
                have = there[start + p]
                first = self._difference(
                    f"activations {site}[{at}]",
                    FORWARD,
                    self._ran,
                    start + p,
                    layer=layer,
                    minor=2,
                    values=(
                        number(data[p, at]),
                        number(np.float32(values[start + p, at])) if have else None,
                    ),
                )
                self._findings.add("activations", int(wrong.sum()), first)

    def _sketches(self) -> None:
        other = self._b.sketches()
        for site, spans in self._a.sketches().items():
            hashes = np.zeros(self._a.length, np.uint64)
            there = np.zeros(self._a.length, bool)
            for span in other.get(site, []):
                part = slice(span.start, span.start + len(span.hashes))
                hashes[part], there[part] = span.hashes, True
            for span in spans:
                self._findings.count("sketches", len(span.hashes))
                part = slice(span.start, span.start + len(span.hashes))
                wrong = np.flatnonzero(~there[part] | (hashes[part] != span.hashes)) + span.start
                if not wrong.size:
                    continue
                p = int(wrong[np.argmin(self._ran[wrong])])
                recorded = number(span.hashes[p - span.start])
                first = self._difference(
                    f"sketch {site} (hash of the row)",
                    FORWARD,
                    self._ran,
                    p,
                    layer=_layer_of(site),
                    minor=2,
                    values=(recorded, number(hashes[p]) if there[p] else None),
                )
                self._findings.add("sketches", wrong.size, first)


def _layer_of(site: str) -> int | None:
    return int(site.split(".")[1]) if site.startswith("layers.") else None


def _resized(values: np.ndarray, length: int) -> np.ndarray:
    """The first rows, and zeros where a sequence was cut short."""
    found = np.zeros((length, *values.shape[1:]), values.dtype)
    found[: len(values)] = values[:length]
    return found


def _joined(spans: list[tuple[int, str, np.ndarray]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Where there are values, bool [T], and float32 [T, width]."""
    there = np.zeros(length, bool)
    if not spans:
        return there, np.zeros((length, 0), np.float32)
    values = np.zeros((length, spans[0][2].shape[-1]), np.float32)
    for start, _, data in spans:
        values[start : start + len(data)] = data
        there[start : start + len(data)] = True
    return there, values


def _input_steps(sequence: Sequence, default: int) -> np.ndarray:
    """The step in which each token was first an input, int64 [T]."""
    steps = np.full(sequence.length, -1, np.int64)
    table = sequence.forwards.select(["step", "start", "n", "kind"])
    for row in table.to_pylist():
        if row["kind"] != "dummy":
            span = steps[row["start"] : row["start"] + row["n"]]
            span[span < 0] = row["step"]
    steps[steps < 0] = default
    return steps


def _set(supports: Any, position: int) -> np.ndarray:
    ids: np.ndarray = supports.ids[supports.offsets[position] : supports.offsets[position + 1]]
    return ids


def _kept(supports: Any, position: int) -> str:
    ids = supports.at(position)
    if ids is None:
        return "unrecorded" if supports.state[position] == SUPPORT_UNRECORDED else "all ids"
    shown = ", ".join(map(str, ids[:8].tolist()))
    return f"{len(ids)} ids: {shown}{', ...' if len(ids) > 8 else ''}"


def _ulp(a: Any, b: Any) -> int | None:
    """Distance of two finite float32 in units of the last place."""
    if not isinstance(a, np.float32) or not np.isfinite(a) or not np.isfinite(b):
        return None

    def ordered(value: Any) -> int:
        bits = int(np.float32(value).view(np.int32))
        return bits if bits >= 0 else -(bits & 0x7FFFFFFF)

    return abs(ordered(a) - ordered(b))
