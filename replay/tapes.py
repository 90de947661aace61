"""Rows of a scored tape, and the taps on the sites that are kept in it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from rolltape.recorder.digest import GroupDigest
from rolltape.recorder.facts import dtype_name, experts_implementation, sdpa_backends
from rolltape.recorder.moe import decoder_layers
from rolltape.recorder.rows import engine_job, weights_job
from rolltape.replay.batches import Batch, Placed
from rolltape.replay.forcing import BlockChoice
from rolltape.replay.logprobs import Logprobs, Span
from rolltape.replay.switches import Switches
from rolltape.replay.taps import Span as RowSpan
from rolltape.replay.taps import Taps
from rolltape.store import Masked, Supports, TapeWriter, codecs, token_digest
from rolltape.store import Sequence as TapeSequence

_CODEC = "plain"


class ScoreWriter:
    """Writes what a scoring found, under the keys of the sequences that it replays.

    Args:
        writer: of the new tape.
        engines: engine of the replayed tape -> engine of the new one.
        facts: `model_facts` of the model as it runs.
    """

    def __init__(
        self,
        writer: TapeWriter,
        engines: Mapping[str, str],
        facts: dict[str, Any],
    ) -> None:
        self._writer = writer
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

    def _span(self, sequence: TapeSequence, start: int, n: int) -> dict[str, Any]:
        return {**self._keys([sequence]), "start": [start], "n": [n]}

    def step(self, number: int, batch: Batch, model: nn.Module, *, t_ns: int) -> None:
        """The `steps` row of a batch and the `forwards` rows of its sequences."""
        config: Any = model.config
        sequences = [p.sequence for p in batch.placed]
        self._writer.append(
            "steps",
            {
                "engine": self._engines[sequences[0].key.engine],
                "step": [number],
                "call": number,
                "kind": "score",
                "t_ns": t_ns,
                "rows": batch.rows,
                "columns": batch.columns,
                "tokens": batch.tokens,
                "padded_tokens": batch.padded,
                "attention": getattr(config, "_attn_implementation", None),
                "experts": experts_implementation(model) if self._num_experts else None,
                "sdpa": sdpa_backends(),
                "cache": None,
                "threads": torch.get_num_threads(),
            },
        )
        self._writer.append(
            "forwards",
            {
                **self._keys(sequences),
                "step": number,
                "row": list(range(len(sequences))),
                "start": 0,
                "n": [s.length for s in sequences],
                "kind": "score",
                "pad_left": 0,
                "weight_version": [self._versions[s.key.engine] for s in sequences],
                "kv_source": "own",
            },
        )

    def tokens(
        self, sequence: TapeSequence, spans: Sequence[Span], found: Logprobs, switches: Switches
    ) -> None:
        """Token ids, loss mask and logprobs: one row per span."""
        mask = sequence.loss_mask
        for span in spans:
            semantics = span.sampling and span.sampling.semantics(
                width=found.width, dtype=found.dtype, switches=switches
            )
            where = slice(span.start, span.start + span.n)

            def cell(column: Masked, where: slice = where) -> Masked | None:
                part = column[where]
                return part if part.valid.any() else None

            self._writer.append(
                "tokens",
                {
                    **self._span(sequence, span.start, span.n),
                    "ids": [sequence.tokens.values[where]],
                    "loss_mask": [cell(mask)],
                    "raw": [cell(found.raw)],
                    "scaled": [cell(found.scaled)],
                    "processed": [cell(found.processed)],
                    "semantics": [semantics],
                },
            )

    def supports(self, sequence: TapeSequence, supports: Supports) -> None:
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

    def routes(
        self, number: int, batch: Batch, choices: Sequence[BlockChoice], *, forced: bool
    ) -> None:
        """What the experts got, and the live choice where another was forced."""
        if not choices or self._num_experts is None:
            return
        layers = [c.layer for c in choices]
        used = torch.stack([c.used_ids for c in choices], 1)
        live = torch.stack([c.live_ids for c in choices], 1) if forced else None
        weights = torch.stack([c.used_weights for c in choices], 1)
        margins = [c.margin for c in choices if c.margin is not None]
        margin = torch.stack(margins, 1) if len(margins) == len(choices) else None
        for p in batch.placed:
            start = p.row * batch.columns + p.column
            rows = slice(start, start + p.sequence.length)
            common = {
                **self._span(p.sequence, 0, p.sequence.length),
                "step": number,
                "weight_version": self._versions[p.sequence.key.engine],
                "layers": [layers],
                "k": int(used.shape[-1]),
                "num_experts": self._num_experts,
                "encoding": _CODEC,
            }
            lead = None if margin is None else codecs.encode_floats(margin[rows].numpy())
            self._writer.append(
                "routes",
                {
                    **common,
                    "role": "used",
                    "ids": [self._encode(used[rows])],
                    "weights": [codecs.encode_floats(weights[rows].numpy())],
                    "margin": [None if forced else lead],
                },
            )
            if live is not None:
                self._writer.append(
                    "routes",
                    {**common, "role": "live", "ids": [self._encode(live[rows])], "margin": [lead]},
                )

    def _encode(self, ids: torch.Tensor) -> bytes:
        return codecs.encode_plain(ids.numpy(), int(self._num_experts or 0))

    def activations(self, taken: Sequence[tuple[TapeSequence, str, torch.Tensor]]) -> None:
        """Hidden states [T, width] of (sequence, site)."""
        for sequence, site, hidden in taken:
            self._writer.append(
                "activations",
                {
                    **self._span(sequence, 0, len(hidden)),
                    "site": site,
                    "dtype": dtype_name(hidden.dtype),
                    "width": int(hidden.shape[-1]),
                    "data": [codecs.encode_floats(hidden.float().numpy())],
                },
            )


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
