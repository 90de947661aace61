"""The steps of a tape in memory: what ran when, as arrays in the order of time."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa

from rolltape.store.sequences import Tape

#: Integer columns that are kept; -1 in the arrays is null.
NUMBERS = ("rows", "tokens", "padded_tokens")
#: Text columns that are kept, as codes into `Steps.names`; -1 is null.
TEXTS = ("kind", "graph", "attention", "experts", "cache")

#: What a step did as a whole, in the order of the lanes. `verify` is a decode step with more tokens
#: than rows: it verified drafts.
KINDS = ("prefill", "mixed", "decode", "verify", "recompute", "score", "unknown")


@dataclass(frozen=True, kw_only=True, eq=False)
class Steps:
    """Every step of a tape; the engines one after the other, each in the order of time.

    Args:
        engines: engine ids; those of steps only.
        engine: int [n] index into `engines`.
        bounds: int64 [engines + 1], where the steps of each engine begin.
        axis: `time`, or `step` when some step has no time.
        untimed: steps without a time.
        step: int64 [n] its number, unique within the engine.
        t: int64 [n] start, ns since the epoch, or the number of the step.
        duration: int64 [n] until the next step of that engine begins; -1 for the last one.
        kind: int8 [n] index into `KINDS`.
        numbers: of `NUMBERS`, int [n].
        texts: of `TEXTS`, int32 [n].
        names: the texts that the codes stand for.
    """

    engines: list[str]
    engine: np.ndarray
    bounds: np.ndarray
    axis: str
    untimed: int
    step: np.ndarray
    t: np.ndarray
    duration: np.ndarray
    kind: np.ndarray
    numbers: dict[str, np.ndarray]
    texts: dict[str, np.ndarray]
    names: dict[str, list[str]]

    def __len__(self) -> int:
        return len(self.step)

    def of(self, engine: int) -> slice:
        """Where the steps of an engine stand."""
        return slice(int(self.bounds[engine]), int(self.bounds[engine + 1]))

    def find(self, engine: int, step: int) -> int | None:
        """Where a step of an engine stands."""
        where = self.of(engine)
        found = np.flatnonzero(self.step[where] == step)
        return where.start + int(found[0]) if len(found) else None

    def text(self, name: str, at: int) -> str | None:
        """A text column of one step."""
        code = int(self.texts[name][at])
        return self.names[name][code] if code >= 0 else None


_KEPT: WeakKeyDictionary[Tape, Steps] = WeakKeyDictionary()


def steps_of(tape: Tape) -> Steps:
    """The steps of a tape, read once."""
    if tape not in _KEPT:
        _KEPT[tape] = _load(tape)
    return _KEPT[tape]


def _load(tape: Tape) -> Steps:
    columns = ["engine", "step", "t_ns", *NUMBERS, *TEXTS]
    schema = pa.schema([tape.schemas["steps"].field(name) for name in columns])
    table = pa.Table.from_batches([b for _, _, b in tape.batches("steps", columns)], schema)
    found, names = {}, {}
    for name in columns:
        if name in ("engine", *TEXTS):
            found[name], names[name] = _coded(table.column(name))
        else:
            found[name] = np.asarray(table.column(name).fill_null(-1).to_numpy())
    untimed = int((found["t_ns"] < 0).sum())
    axis = "step" if untimed else "time"
    t = found["step"] if untimed else found["t_ns"]
    engines, found["engine"] = _by_start(names["engine"], found["engine"], t)
    order = np.lexsort((found["step"], t, found["engine"]))
    found = {name: values[order] for name, values in found.items()}
    t = t[order]
    bounds = np.searchsorted(found["engine"], np.arange(len(engines) + 1))
    duration = np.diff(t, append=0) if axis == "time" else np.ones(len(t), np.int64)
    if axis == "time":
        duration[bounds[1:] - 1] = -1
    return Steps(
        engines=engines,
        engine=found["engine"],
        bounds=bounds,
        axis=axis,
        untimed=untimed,
        step=found["step"],
        t=t,
        duration=duration,
        kind=_kinds(found, names["kind"]),
        numbers={name: found[name] for name in NUMBERS},
        texts={name: found[name] for name in TEXTS},
        names={name: names[name] for name in TEXTS},
    )


def _by_start(names: list[str], of: np.ndarray, t: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Engines in the order in which they began, and the codes of the rows in that order."""
    first = np.full(len(names), np.iinfo(np.int64).max)
    np.minimum.at(first, of, t)
    order = sorted(range(len(names)), key=lambda i: (int(first[i]), names[i]))
    place = np.empty(len(names), np.int64)
    place[order] = np.arange(len(names))
    return [names[i] for i in order], np.asarray(place[of] if len(of) else of)


def _coded(column: pa.ChunkedArray) -> tuple[np.ndarray, list[str]]:
    """int32 codes of a text column, -1 for null, and what they stand for."""
    coded = column.combine_chunks().dictionary_encode()
    return np.asarray(coded.indices.fill_null(-1).to_numpy()), coded.dictionary.to_pylist()


def _kinds(found: dict[str, np.ndarray], names: list[str]) -> np.ndarray:
    known = [KINDS.index(name) if name in KINDS else KINDS.index("unknown") for name in names]
    kinds = np.array([*known, KINDS.index("unknown")], np.int8)[found["kind"]]
    drafts = (kinds == KINDS.index("decode")) & (found["tokens"] > found["rows"])
    kinds[drafts & (found["rows"] > 0)] = KINDS.index("verify")
    return np.asarray(kinds)
