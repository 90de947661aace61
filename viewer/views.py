"""Answers that need more than one module, and what is kept between requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
from fastapi import Request
from fastapi.responses import Response

from rolltape import __version__
from rolltape.viewer.answers import json_bytes, known, sealed_tag, tagged, with_tag
from rolltape.viewer.columns import NON_FINITE, PRESETS, STATES, Columns, load_columns, minimap
from rolltape.viewer.detail import STATE_WORDS
from rolltape.viewer.library import Library, Pair
from rolltape.viewer.listing import Listing
from rolltape.viewer.notices import notices
from rolltape.viewer.overview import Sizes, count_sizes, overview, run_summary
from rolltape.viewer.stats import stats_there

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
        self._sizes: dict[str, Sizes] = {}  # by report: counting them reads all of it

    def pair(self, run: str, report: str | None) -> Pair:
        """A run with a report, after a look at what has grown."""
        self.library.refresh()
        if self.library.generation != self._generation:
            # what is kept holds on to the tape as it was
            self._generation = self.library.generation
            for cache in (self._overviews, self._listings, self._columns):
                cache.clear()
        pair = self.library.pair(run, report or None)
        for dropped in self.library.forget():
            self._overviews.pop(dropped, None)
            self._listings.pop(dropped, None)
            for key in [key for key in self._columns if key[0] is dropped]:
                del self._columns[key]
        return pair

    def answer(self, request: Request, pair: Pair, make: Callable[[], Any]) -> Response:
        """JSON with an ETag; of a sealed pair nothing is computed for a client that has it."""
        return self.answer_bytes(
            request, pair, lambda: (json_bytes(make()), {}), "application/json"
        )

    def answer_bytes(
        self,
        request: Request,
        pair: Pair,
        make: Callable[[], tuple[bytes, Mapping[str, str]]],
        media_type: str,
    ) -> Response:
        """Bytes and more headers with an ETag, as `answer`.

        Args:
            request: the request.
            pair: all that the answer depends on besides the address.
            make: what is sent.
            media_type: of it.
        """
        print_ = pair.fingerprint
        if print_ is None:
            body, headers = make()
            return tagged(request, body, media_type, headers)
        # damage is found while tables are read, and pages say so
        tag = sealed_tag(request, print_, *pair.problems)
        if known(request, tag):
            return with_tag(request, tag, b"", media_type)
        body, headers = make()
        tag = sealed_tag(request, print_, *pair.problems)
        return with_tag(request, tag, body, media_type, headers)

    def listing(self, pair: Pair) -> Listing:
        """The sequence list of a pair."""
        return _kept(self._listings, pair, lambda: Listing(pair))

    def overview(self, pair: Pair) -> dict[str, Any]:
        """Answer of `GET /api/runs/{run}`."""
        answer = _kept(self._overviews, pair, lambda: overview(pair, lambda: self._count(pair)))
        return answer | self._around(pair)

    def _count(self, pair: Pair) -> Sizes:
        assert pair.report is not None  # nothing else is counted
        if pair.report.uuid not in self._sizes:
            self._sizes[pair.report.uuid] = count_sizes(pair.report)
        return self._sizes[pair.report.uuid]

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
            "follow": self.library.follow,
            "runs": [run_summary(self.library.shown(r)) for r in self.library.runs()],
            "failures": [{"path": f.path, "message": f.message} for f in self.library.failures],
        }

    def sequence(
        self, pair: Pair, name: str, sort: str | None, query: str | None
    ) -> dict[str, Any]:
        """Answer of `GET /api/runs/{run}/seqs/{seq}`."""
        columns = self.columns(pair, name)
        listing = self.listing(pair)
        vocabulary, why = pair.tokenizer
        counts = np.bincount(columns.state, minlength=len(STATES)).tolist()
        size = np.abs(columns.delta.fill(0))
        found = pair.compared.get(name)
        partner = pair.partner(name)
        sequence = pair.find(name)
        answer = {
            "seq": listing.row(name) or {"id": name},
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
            "stats": stats_there(pair, name),
            "tokenizer": {
                "path": str(vocabulary.path) if vocabulary is not None else None,
                "missing": why,
            },
            "neighbours": listing.neighbours(name, sort=sort, query=query),
        }
        return answer | self._around(pair)


def _kept(cache: OrderedDict[K, V], key: K, make: Callable[[], V]) -> V:
    if key in cache:
        cache.move_to_end(key)
        return cache[key]
    value = make()
    cache[key] = value
    while len(cache) > _KEPT:
        cache.popitem(last=False)
    return value
