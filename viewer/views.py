"""Answers that need more than one module, and what is kept between requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from rolltape import __version__
from rolltape.viewer.columns import NON_FINITE, PRESETS, STATES, Columns, load_columns, minimap
from rolltape.viewer.detail import STATE_WORDS
from rolltape.viewer.library import Library, Pair
from rolltape.viewer.listing import Listing
from rolltape.viewer.notices import notices
from rolltape.viewer.overview import overview, run_summary

_KEPT = 8

K = TypeVar("K")
V = TypeVar("V")


class Views:
    """Per-pair listings and the columns of the last few sequences.

    Args:
        library: where the tapes are; its lock must be held around every call.
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        self._generation = library.generation
        self._overviews: OrderedDict[Pair, dict[str, Any]] = OrderedDict()
        self._listings: OrderedDict[Pair, Listing] = OrderedDict()
        self._columns: OrderedDict[tuple[Pair, str], Columns] = OrderedDict()

    def pair(self, run: str, report: str | None) -> Pair:
        """A run with a report, after a look at what has grown."""
        self.library.refresh()
        if self.library.generation != self._generation:
            # what is kept holds on to the tape as it was
            self._generation = self.library.generation
            for cache in (self._overviews, self._listings, self._columns):
                cache.clear()
        return self.library.pair(run, report or None)

    def listing(self, pair: Pair) -> Listing:
        """The sequence list of a pair."""
        return _kept(self._listings, pair, lambda: Listing(pair))

    def overview(self, pair: Pair) -> dict[str, Any]:
        """Answer of `GET /api/runs/{run}`."""
        answer = _kept(self._overviews, pair, lambda: overview(pair))
        return answer | self._around(pair)

    def page(self, pair: Pair, **query: Any) -> dict[str, Any]:
        """Answer of `GET /api/runs/{run}/seqs`."""
        return self.listing(pair).page(**query) | self._around(pair)

    def _around(self, pair: Pair) -> dict[str, Any]:
        # last of all: damage is found while the tables are read
        return {"run": run_summary(pair), "notices": notices(pair), "problems": pair.problems}

    def columns(self, pair: Pair, sequence: str) -> Columns:
        """The dense columns of a sequence."""
        return _kept(self._columns, (pair, sequence), lambda: load_columns(pair, sequence))

    def runs(self) -> dict[str, Any]:
        """Answer of `GET /api/runs`."""
        self.library.refresh()
        return {
            "version": __version__,
            "runs": [run_summary(self.library.pair(r.id, None)) for r in self.library.runs()],
            "failures": [{"path": f.path, "message": f.message} for f in self.library.failures],
        }

    def sequence(
        self, run: str, report: str | None, name: str, sort: str | None, query: str | None
    ) -> dict[str, Any]:
        """Answer of `GET /api/runs/{run}/seqs/{seq}`."""
        pair = self.pair(run, report)
        columns = self.columns(pair, name)
        listing = self.listing(pair)
        vocabulary, why = pair.tokenizer
        counts = np.bincount(columns.state, minlength=len(STATES)).tolist()
        size = np.abs(columns.delta.fill(0))
        found = pair.compared.get(name)
        partner = pair.partner(name)
        sequence = pair.sequences.get(name)
        answer = {
            "seq": listing.by_id.get(name, {"id": name}),
            "n": columns.n,
            "prompt_len": columns.prompt_len,
            "column": columns.column,
            "sampling": sequence.info["sampling"] if sequence is not None else None,
            "b": found["b"] if found else None,
            "b_run": partner.tape.uuid if partner is not None else None,
            "counts": dict(zip(STATES, counts, strict=True)),
            "state_words": STATE_WORDS,
            "equal": int(columns.equal.sum()),
            "clipped": [
                {"scale": p, "count": int((columns.delta.valid & (size > p)).sum())}
                for p in PRESETS
            ],
            "non_finite": int((columns.state == NON_FINITE).sum()),
            "minimap": minimap(columns),
            "tokenizer": {
                "path": str(vocabulary.path) if vocabulary is not None else None,
                "missing": why,
            },
            "neighbours": listing.neighbours(name, sort=sort, query=query),
        }
        return answer | self._around(pair)

    def over(self, columns: Columns, threshold: float, start: int, *, back: bool) -> dict[str, Any]:
        """The next position after `start`, or before it, that is over a threshold."""
        found = columns.over(threshold)
        at = int(np.searchsorted(found, start, side="left" if back else "right"))
        index = at - 1 if back else at
        there = 0 <= index < len(found)
        return {
            "position": int(found[index]) if there else None,
            "rank": index + 1 if there else None,
            "of": len(found),
        }


def _kept(cache: OrderedDict[K, V], key: K, make: Callable[[], V]) -> V:
    if key in cache:
        cache.move_to_end(key)
        return cache[key]
    value = make()
    cache[key] = value
    while len(cache) > _KEPT:
        cache.popitem(last=False)
    return value
