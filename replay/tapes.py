"""Rows of a scored tape, and the taps on the sites that are kept in it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from rolltape.recorder.digest import GroupDigest
from rolltape.recorder.facts import experts_implementation, sdpa_backends
from rolltape.recorder.moe import decoder_layers
from rolltape.recorder.rows import engine_job, weights_job
from rolltape.replay.batches import Batch, Placed
from rolltape.replay.logprobs import Logprobs, Span
from rolltape.replay.switches import Switches
from rolltape.replay.taps import Span as RowSpan
from rolltape.replay.taps import Taps
from rolltape.store import Masked, Supports, TapeWriter, codecs, token_digest
from rolltape.store import Sequence as TapeSequence
from rolltape.store.distributions import distribution_columns, raw_semantics

_CODEC = "plain"

#: Rows of routes are put into one batch up to this size: a reader unpacks a batch as a whole.
_ROUTE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class BatchRoutes:
    """What the MoE layers of one forward did, for all R rows of it, padding included.

    Args:
        layers: their numbers.
        used: int32 [R, L, k] that the experts got.
        weights: float32 [R, L, k].
        live: int32 [R, L, k] that the routers chose, where others were forced.
        margin: float32 [R, L], None if some layer's is not known.
    """

    layers: Sequence[int]
    used: np.ndarray
    weights: np.ndarray
    live: np.ndarray | None
    margin: np.ndarray | None


@dataclass(frozen=True, kw_only=True)
class ScoredSequence:
    """The logprobs of one sequence, the kept sets that they were normalised over, its loss mask."""

    sequence: TapeSequence
    mask: Masked
    spans: Sequence[Span]
    logprobs: Logprobs
    supports: Supports | None


@dataclass(frozen=True, kw_only=True)
class ScoredBatch:
    """All that one forward found, in host memory: to write it nothing more is read of the tape.

    Args:
        batch: what ran.
        step: its row of `steps`.
        routes: None where they could not be seen.
        sequences: in the order of `batch.placed`.
        activations: (sequence, site, name of the dtype, float32 [T, width]).
    """

    batch: Batch
    step: Mapping[str, Any]
    routes: BatchRoutes | None
    sequences: Sequence[ScoredSequence]
    activations: Sequence[tuple[TapeSequence, str, str, np.ndarray]]


class ScoreWriter:
    """Writes what a scoring found, under the keys of the sequences that it replays.

    Args:
        writer: of the new tape.
        engines: engine of the replayed tape -> engine of the new one.
        facts: `model_facts` of the model as it runs.
        switches: of the scoring.
    """

    def __init__(
        self,
        writer: TapeWriter,
        engines: Mapping[str, str],
        facts: dict[str, Any],
        switches: Switches,
    ) -> None:
        self._writer = writer
        self._switches = switches
        self._engines = engines
        self._facts = facts
        self._num_experts: int | None = facts["num_experts"]
        self._versions: dict[str, int] = {}

    def engines(
        self,
        requested: dict[str, Any],
        weights: Mapping[str, tuple[Sequence[GroupDigest], int | None]],
    ) -> None:
        """The `engines` and `weights` rows. Without a version of the tape it is version 0."""
        for engine, new in self._engines.items():
            digests, version = weights[engine]
            self._versions[engine] = 0 if version is None else version
            engine_job(new, "trainer", "transformers", self._facts, requested)(self._writer)
            weights_job(new, self._versions[engine], digests)(self._writer)

    def opened(self, sequences: Sequence[TapeSequence]) -> None:
        """Rows of all sequences in the order of the tape, still open."""
        self._sequences(sequences, finish="open")

    def closed(self, sequences: Sequence[TapeSequence]) -> None:
        """Rows of sequences that have been scored."""
        self._sequences(sequences, finish="scored")

    def _sequences(self, sequences: Sequence[TapeSequence], *, finish: str) -> None:
        if not sequences:
            return
        done = finish == "scored"
        infos = [s.info for s in sequences]
        carried = ("group", "group_derived", "turn", "continues", "prompt_len")
        self._writer.append(
            "sequences",
            {
                **self._keys(sequences),
                **{name: [info[name] for info in infos] for name in carried},
                "origin": [s.key.text for s in sequences],
                "length": [s.length if done else None for s in sequences],
                "digest": [
                    token_digest(s.prompt_len, s.tokens.values) if done else None for s in sequences
                ],
                "finish": finish,
                "sampling": [json.dumps(info["sampling"]) for info in infos],
                "opened_ns": None if done else time.time_ns(),
                "closed_ns": time.time_ns() if done else None,
            },
        )

    def _keys(self, sequences: Sequence[TapeSequence]) -> dict[str, Any]:
        return {
            "engine": [self._engines[s.key.engine] for s in sequences],
            "request": [s.key.request for s in sequences],
            "sample": [s.key.sample for s in sequences],
            "pass": [s.key.scoring for s in sequences],
        }

    def write(self, found: ScoredBatch) -> None:
        """Add all rows of one forward; the rows that close its sequences come last."""
        sequences = [p.sequence for p in found.batch.placed]
        engine = self._engines[sequences[0].key.engine]
        experts = found.step["experts"] if self._num_experts else None
        self._writer.append("steps", {"engine": engine, **found.step, "experts": experts})
        self._writer.append(
            "forwards",
            {
                **self._keys(sequences),
                "step": found.step["step"][0],
                "row": list(range(len(sequences))),
                "start": 0,
                "n": [s.length for s in sequences],
                "kind": "score",
                "pad_left": 0,
                "weight_version": [self._versions[s.key.engine] for s in sequences],
                "kv_source": "own",
            },
        )
        if found.routes is not None and self._num_experts is not None:
            self._routes(found, found.routes)
        self._append("tokens", [row for each in found.sequences for row in self._tokens(each)])
        for each in found.sequences:
            self._distribution(each)
            if each.supports is not None:
                self._supports(each.sequence, each.supports)
        for sequence, site, dtype, hidden in found.activations:
            self._writer.append(
                "activations",
                {
                    **self._keys([sequence]),
                    "start": 0,
                    "n": len(hidden),
                    "site": site,
                    "dtype": dtype,
                    "width": hidden.shape[-1],
                    "data": [codecs.encode_floats(hidden)],
                },
            )
        self.closed(sequences)

    def _append(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows with the same columns, in one batch."""
        if rows:
            self._writer.append(table, {name: [row[name] for row in rows] for name in rows[0]})

    def _span(self, sequence: TapeSequence, start: int, n: int) -> dict[str, Any]:
        key = sequence.key
        return {
            "engine": self._engines[key.engine],
            "request": key.request,
            "sample": key.sample,
            "pass": key.scoring,
            "start": start,
            "n": n,
        }

    def _tokens(self, scored: ScoredSequence) -> Iterable[dict[str, Any]]:
        """Token ids, loss mask and logprobs: one row per span."""
        sequence, found = scored.sequence, scored.logprobs
        ids = sequence.tokens.values
        for span in scored.spans:
            where = slice(span.start, span.start + span.n)

            def cell(column: Masked, where: slice = where) -> Masked | None:
                part = column[where]
                return part if part.valid.any() else None

            yield {
                **self._span(sequence, span.start, span.n),
                "ids": ids[where],
                "loss_mask": cell(scored.mask),
                "raw": cell(found.raw),
                "scaled": cell(found.scaled),
                "processed": cell(found.processed),
                "semantics": span.sampling
                and span.sampling.semantics(
                    width=found.width, dtype=found.dtype, switches=self._switches
                ),
            }

    def _distribution(self, scored: ScoredSequence) -> None:
        """The most probable tokens of the positions that were scored, if they were asked for."""
        found, spans = scored.logprobs, [s for s in scored.spans if s.sampling is not None]
        if found.top is None or not spans:
            return
        # the spans differ in their sampling, which is no part of a raw distribution
        start, n = spans[0].start, sum(span.n for span in spans)
        where, best = slice(start, start + n), found.top
        columns = distribution_columns(
            best.ids[where], best.logprobs[where], best.tail[where], np.array([n])
        )
        semantics = raw_semantics(vocab_size=found.width, dtype=found.dtype, source="recomputed")
        row = self._span(scored.sequence, start, n)
        self._writer.append("distributions", {**row, **columns, "semantics": [semantics]})

    def _supports(self, sequence: TapeSequence, supports: Supports) -> None:
        """The kept sets that were normalised over."""
        self._writer.append(
            "supports",
            {
                **self._span(sequence, 0, sequence.length),
                "derived": True,
                "state": [supports.state],
                "counts": [np.diff(supports.offsets).astype(np.int32)],
                "ids": [supports.ids],
            },
        )

    def _routes(self, found: ScoredBatch, routes: BatchRoutes) -> None:
        """What the experts got, and the live choice where another was forced."""
        rows: list[dict[str, Any]] = []
        size = 0
        for p in found.batch.placed:
            first = p.row * found.batch.columns + p.column
            where = slice(first, first + p.sequence.length)
            common = {
                **self._span(p.sequence, 0, p.sequence.length),
                "step": found.step["step"][0],
                "weight_version": self._versions[p.sequence.key.engine],
                "layers": routes.layers,
                "k": routes.used.shape[-1],
                "num_experts": self._num_experts,
                "encoding": _CODEC,
            }
            lead = None if routes.margin is None else codecs.encode_floats(routes.margin[where])
            forced = routes.live is not None
            weights = codecs.encode_floats(routes.weights[where])
            ids = self._encode(routes.used[where])
            margin = None if forced else lead
            rows.append(
                {**common, "role": "used", "ids": ids, "weights": weights, "margin": margin}
            )
            if routes.live is not None:
                live = self._encode(routes.live[where])
                rows.append(
                    {**common, "role": "live", "ids": live, "weights": None, "margin": lead}
                )
            size += len(weights) + len(ids)
            if size >= _ROUTE_BYTES:
                self._append("routes", rows)
                rows, size = [], 0
        self._append("routes", rows)

    def _encode(self, ids: np.ndarray) -> bytes:
        return codecs.encode_plain(ids, int(self._num_experts or 0))


def step_row(number: int, batch: Batch, model: nn.Module, *, t_ns: int) -> dict[str, Any]:
    """The row of `steps` of a forward, without its engine; in the thread that runs it."""
    config: Any = model.config
    return {
        "step": [number],
        "call": number,
        "kind": "score",
        "t_ns": t_ns,
        "rows": batch.rows,
        "columns": batch.columns,
        "tokens": batch.tokens,
        "padded_tokens": batch.padded,
        "attention": getattr(config, "_attn_implementation", None),
        "experts": experts_implementation(model),
        "sdpa": sdpa_backends(),
        "cache": None,
        "threads": torch.get_num_threads(),
    }


class LayerTap:
    """Keeps the outputs of all decoder layers for the sequences that are watched.

    Layers are found by structure, so that it needs no map of sites.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = decoder_layers(model)
        self._watched: Sequence[Placed] = ()
        self._taken: list[tuple[TapeSequence, str, torch.Tensor]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> LayerTap:
        for number, layer in self._layers.items():

            def look(
                _module: nn.Module, _args: Any, output: Any, site: str = _site(number)
            ) -> None:
                hidden = output[0] if isinstance(output, tuple) else output
                for p in self._watched:
                    self._taken.append((p.sequence, site, hidden[p.span].to("cpu", copy=True)))

            self._handles.append(layer.register_forward_hook(look))
        return self

    def __exit__(self, *_: object) -> None:
        while self._handles:
            self._handles.pop().remove()

    def watch(self, placed: Sequence[Placed], *, columns: int) -> None:
        """Sequences of the next forward to keep."""
        self._watched = placed

    def taken(self) -> list[tuple[TapeSequence, str, torch.Tensor]]:
        """What was kept since the last call."""
        taken, self._taken = self._taken, []
        return taken

    def unseen(self) -> list[str]:
        """Nothing: which layers run is the model's."""
        return []


class SiteTap:
    """Keeps chosen sites for the sequences that are watched."""

    def __init__(self, model: nn.Module, sites: str) -> None:
        self._taps = Taps(model, sites)
        self._unseen = set(self._taps.places)
        self._sequences: dict[str, TapeSequence] = {}

    def __enter__(self) -> SiteTap:
        self._taps.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._taps.__exit__(*error)

    def watch(self, placed: Sequence[Placed], *, columns: int) -> None:
        """Sequences of the next forward to keep."""
        self._sequences = {p.sequence.key.text: p.sequence for p in placed}
        spans = [
            RowSpan(key=p.sequence.key.text, row=p.row, column=p.column, n=p.sequence.length)
            for p in placed
        ]
        self._taps.watch(spans, columns=columns)

    def taken(self) -> list[tuple[TapeSequence, str, torch.Tensor]]:
        """What was kept since the last call."""
        taken = self._taps.taken()
        self._unseen.difference_update(t.site for t in taken)
        return [(self._sequences[str(t.span.key)], t.site, t.values) for t in taken]

    def unseen(self) -> list[str]:
        """Sites that were asked for and never passed by."""
        return [site for site in self._taps.places if site in self._unseen]


def tap_of(model: nn.Module, sites: str | None) -> LayerTap | SiteTap:
    """The tap on these sites; None is the output of every layer."""
    return LayerTap(model) if sites is None else SiteTap(model, sites)


def _site(layer: int) -> str:
    return f"layers.{layer}.out"
