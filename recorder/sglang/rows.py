"""From answers of SGLang to rows of a tape; runs in the writer thread."""

from __future__ import annotations

import base64
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from rolltape.recorder.session import Job
from rolltape.recorder.sglang.facts import Moe, Sampling
from rolltape.store import TapeWriter, codecs, token_digest
from rolltape.store.schema import SEMANTICS, SUPPORT_EXPLICIT, SUPPORT_FULL, SUPPORT_UNRECORDED


@dataclass(eq=False, kw_only=True)
class Life:
    """One sample of one request.

    Args:
        request: id in the tape; `external` is the one that the caller knows.
        prompt: uint32 [prompt_len].
        group: of the samples of one prompt.
        derived: whether the group comes from the prompt alone.
        settings: JSON of its sampling parameters.
        routes_from: first position whose route is returned.
        asked: returned fields that only the recorder asked for.
    """

    request: str
    sample: int
    external: str
    prompt: np.ndarray
    group: str
    derived: bool
    sampling: Sampling
    settings: str
    opened_ns: int
    routes_from: int = 0
    asked: frozenset[str] = frozenset()
    retractions: int = 0
    written: list[np.ndarray] = field(default_factory=list)
    length: int = 0  # written so far
    lost: bool = False  # a block of it was dropped: the length is known, the tokens are not


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one output of the engine says of one request.

    Args:
        ids: new tokens.
        logprobs, logprob_ids: of them, if asked for.
        mask: `SamplingMaskChunk` of them, if asked for.
        finish: type of the finish reason; None while it runs.
        routes: base64 text, or a tensor, of int32 [rows, all layers, k], with the last answer.
        versions: (number or None, start, end) over all tokens of the response; None if not told.
        version: number in force, where `versions` are not told.
        cached: prompt tokens from a prefix cache.
    """

    ids: Sequence[int]
    logprobs: Sequence[float] | None = None
    logprob_ids: Sequence[int] | None = None
    mask: Any = None
    finish: str | None = None
    routes: Any = None
    versions: tuple[tuple[int | None, int, int], ...] | None = None
    version: int | None = None
    cached: int | None = None


@dataclass(eq=False, kw_only=True)
class Scribe:
    """Writes what one front end of an engine saw.

    Args:
        engine: its uuid.
        moe: of the model.
        vocab: width of the logits.
        dtype: of the log-softmax.
    """

    engine: str
    moe: Moe
    vocab: int
    dtype: str
    _steps: Any = field(default_factory=itertools.count)
    _said: set[str] = field(default_factory=set)

    def opening(self, lives: Sequence[Life]) -> Job:
        """Job: prompts and opening rows."""

        def job(writer: TapeWriter) -> None:
            rows = [{**self._sequence(life), "finish": "open"} for life in lives]
            writer.append("sequences", _columns(rows))
            writer.append(
                "tokens",
                {
                    **_columns([self._key(life) for life in lives]),
                    "start": 0,
                    "n": [len(life.prompt) for life in lives],
                    "ids": [life.prompt for life in lives],
                    "loss_mask": [np.zeros(len(life.prompt), bool) for life in lives],
                },
            )
            for life in lives:
                life.length = len(life.prompt)

        return job

    def answers(self, batch: Sequence[tuple[Life, Sequence[Answer]]], t_ns: int) -> Job:
        """Job: new tokens, and what comes with the last answer of a request."""

        def job(writer: TapeWriter) -> None:
            for life, some in batch:
                self._write(writer, life, some, t_ns)

        return job

    def gap(self, life: Life, some: Sequence[Answer]) -> dict[str, Any]:
        """What is missing if answers are dropped."""
        key = self._key(life)
        del key["pass"]
        return {**key, "n": sum(len(a.ids) for a in some), "detail": {"finish": some[-1].finish}}

    def _key(self, life: Life) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "request": life.request,
            "sample": life.sample,
            "pass": 0,
        }

    def _sequence(self, life: Life) -> dict[str, Any]:
        return {
            **self._key(life),
            "group": life.group,
            "group_derived": life.derived,
            "external": life.external,
            "prompt_len": len(life.prompt),
            "sampling": life.settings,
            "opened_ns": life.opened_ns,
        }

    def _write(self, writer: TapeWriter, life: Life, some: Sequence[Answer], t_ns: int) -> None:
        ids = np.concatenate([np.asarray(list(a.ids), np.uint32) for a in some])
        start, last = life.length, some[-1]
        if len(ids):
            life.written.append(ids)
            life.length += len(ids)
            self._write_tokens(writer, life, start, ids, some)
            self._write_supports(writer, life, start, ids, some)
        if last.finish is None:
            return
        self._write_versions(writer, life, last)
        if last.routes is not None:
            self._write_routes(writer, life, last)
        whole = np.concatenate([life.prompt, *life.written])
        finish = last.finish if last.finish in ("stop", "length", "abort") else "error"
        writer.append(
            "sequences",
            {
                **self._sequence(life),
                "finish": finish,
                "length": life.length,
                "digest": None if life.lost else token_digest(len(life.prompt), whole),
                "closed_ns": t_ns,
            },
        )

    def _write_tokens(
        self, writer: TapeWriter, life: Life, start: int, ids: np.ndarray, some: Sequence[Answer]
    ) -> None:
        how = life.sampling
        columns: dict[str, Any] = {}
        temperature: float | None = how.temperature
        values = self._logprobs(writer, life, start, ids, some)
        drawn = self._mask_logprobs(ids, some)
        if how.greedy:  # all mass on the argmax, at any temperature
            drawn = np.zeros(len(ids), np.float32)
        if values is not None and how.column == "scaled":
            temperature = how.column_temperature
            if drawn is not None and not how.greedy and temperature != how.temperature:
                # a row has one temperature, and what was sampled from is worth more
                values, temperature = None, how.temperature
        if values is not None:
            columns = {name: [values] for name in how.columns}
        if drawn is not None:
            columns["processed"] = [drawn]
        writer.append(
            "tokens",
            {
                **self._key(life),
                "start": start,
                "n": len(ids),
                "ids": [ids],
                "loss_mask": [np.ones(len(ids), bool)],
                **columns,
                "semantics": _struct(self._meaning(life, temperature)),
            },
        )

    def _meaning(self, life: Life, temperature: float | None) -> dict[str, Any]:
        return {
            "temperature": temperature,
            "edits": list(life.sampling.edits),
            "truncation": list(life.sampling.truncation),
            "vocab_size": self.vocab,
            "dtype": self.dtype,
            "source": "engine",
        }

    def _logprobs(
        self,
        writer: TapeWriter,
        life: Life,
        start: int,
        ids: np.ndarray,
        some: Sequence[Answer],
    ) -> np.ndarray | None:
        if any(a.logprobs is None for a in some if len(a.ids)):
            return None
        values = np.array([v for a in some for v in a.logprobs or ()], np.float32)
        of = np.array([i for a in some for i in a.logprob_ids or ()], np.int64)
        if len(values) == len(ids) and np.array_equal(of, ids):
            return values
        detail = {"reason": "the engine's logprobs are not those of its tokens", "n": len(values)}
        self._event(writer, "gap", detail, life, start=start, n=len(ids))
        return None

    def _mask_logprobs(self, ids: np.ndarray, some: Sequence[Answer]) -> np.ndarray | None:
        chunks = [a.mask for a in some if len(a.ids)]
        if not chunks or any(c is None for c in chunks):
            return None
        values: list[np.ndarray] = []
        begin = 0
        for chunk in chunks:
            found, end = np.asarray(chunk.logprobs, np.float32), begin + len(chunk.lengths)
            if len(found) != len(chunk.lengths):  # those of the whole set: pick the drawn token's
                drawn = np.repeat(ids[begin:end], chunk.lengths)
                found = found[np.asarray(chunk.token_ids) == drawn]
            values.append(found)
            begin = end
        joined = np.concatenate(values)
        return joined if len(joined) == len(ids) else None

    def _write_supports(
        self, writer: TapeWriter, life: Life, start: int, ids: np.ndarray, some: Sequence[Answer]
    ) -> None:
        how = life.sampling
        chunks = [a.mask for a in some if len(a.ids)]
        n = len(ids)
        counts, kept, state = np.zeros(n, np.int32), np.zeros(0, np.uint32), SUPPORT_UNRECORDED
        if how.greedy:
            counts, kept, state = np.ones(n, np.int32), ids, SUPPORT_EXPLICIT
        elif all(c is not None for c in chunks):
            lengths = np.concatenate([np.asarray(c.lengths, np.int32) for c in chunks])
            if len(lengths) == n:
                sets = [np.asarray(c.token_ids, np.uint32) for c in chunks]
                kept = _sorted_sets(np.concatenate(sets), lengths)
                counts, state = lengths, SUPPORT_EXPLICIT
        elif not how.truncation and not how.edits:
            state = SUPPORT_FULL
        writer.append(
            "supports",
            {
                **self._key(life),
                "start": start,
                "n": n,
                "derived": False,
                "state": [np.full(n, state, np.uint8)],
                "counts": [counts],
                "ids": [kept],
            },
        )

    def _write_versions(self, writer: TapeWriter, life: Life, last: Answer) -> None:
        """A `forwards` row a span of one version: the schedule itself is not known here."""
        begin, total = len(life.prompt) - 1, life.length - len(life.prompt)
        spans = last.versions
        if spans is None:
            spans = ((last.version, 0, total),)
        for number, start, stop in spans:
            end = min(stop, total)
            if number is None or end <= start:
                continue
            writer.append(
                "forwards",
                {
                    "engine": self.engine,
                    "step": next(self._steps),
                    "row": 0,
                    "request": life.request,
                    "sample": life.sample,
                    "pass": 0,
                    "start": begin + start,
                    "n": end - start,
                    "kind": "score",  # each of these inputs gave a logprob
                    "weight_version": number,
                },
            )

    def _write_routes(self, writer: TapeWriter, life: Life, last: Answer) -> None:
        moe, first = self.moe, life.routes_from
        if not moe.layers:
            return self._lost_routes(writer, life, "the configuration names no MoE layers")
        flat = _int32(last.routes)
        wanted = life.length - 1 - first
        row = moe.all_layers * moe.k
        if flat.size != wanted * row or wanted <= 0:
            shape = [max(wanted, 0), moe.all_layers, moe.k]
            return self._lost_routes(writer, life, f"{flat.size} route ids do not fill {shape}")
        table = flat.reshape(wanted, moe.all_layers, moe.k)
        dense = [i for i in range(moe.all_layers) if i not in moe.layers]
        if dense and table[:, dense].any():
            self._say(writer, f"layers {dense} are dense in the configuration and have routes")
        ids = table[:, list(moe.layers)]
        # padded rows are -1; a layer that was never captured is all zeros, which k > 1 different
        # experts cannot be
        wrong = (ids < 0) | (ids >= moe.num_experts)
        valid: np.ndarray = np.asarray(~wrong.any(2))
        if moe.k > 1:
            valid = valid & np.asarray((ids != 0).any(2))
        missing = [[life.length - 1, 1, None, "last"]]
        if first:
            missing.insert(0, [0, first, None, "not-requested"])
        for column, layer in enumerate(moe.layers):
            for at, n in _runs(~valid[:, column]):
                missing.append([first + at, n, layer, "not-captured"])
        # after a retract the routes are those of the second pass, maybe with newer weights
        used = {span[0] for span in last.versions} if last.versions else {last.version}
        version = used.pop() if len(used) == 1 and not life.retractions else None
        writer.append(
            "routes",
            {
                **self._key(life),
                "start": first,
                "n": wanted,
                "role": "used",
                "weight_version": version,
                "layers": [np.array(moe.layers)],
                "k": moe.k,
                "num_experts": moe.num_experts,
                "encoding": "plain",
                "ids": codecs.encode_plain(np.where(wrong, 0, ids), moe.num_experts),
                "valid": codecs.encode_bits(valid),
                "missing": json.dumps(missing),
            },
        )
        return None

    def _lost_routes(self, writer: TapeWriter, life: Life, why: str) -> None:
        span = {"start": life.routes_from, "n": max(0, life.length - 1 - life.routes_from)}
        detail = {"reason": f"routes: {why}", "table": "routes"}
        self._event(writer, "gap", detail, life, **span)

    def _say(self, writer: TapeWriter, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._event(writer, "finding", {"reason": what})

    def _event(
        self,
        writer: TapeWriter,
        kind: str,
        detail: dict[str, Any],
        life: Life | None = None,
        **columns: Any,
    ) -> None:
        # in this thread, and maybe at the end: the session takes no more events then
        where = {} if life is None else {"request": life.request, "sample": life.sample}
        row = {"engine": self.engine, "writer": writer.id, "t_ns": time.time_ns(), "kind": kind}
        writer.append("events", {**row, **where, **columns, "detail": json.dumps(detail)})


def _int32(value: Any) -> np.ndarray:
    """Flat int32 of base64 text or of a tensor."""
    if isinstance(value, str | bytes):
        return np.frombuffer(base64.b64decode(value), dtype="<i4")
    return np.asarray(value.numpy(), dtype="<i4").ravel()


def _sorted_sets(ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Ids ascending within each set; the engine has them by weight."""
    owner = np.repeat(np.arange(len(lengths)), lengths)
    ordered: np.ndarray = ids[np.lexsort((ids, owner))]
    return ordered


def _runs(flags: np.ndarray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]])))
    return [(int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _columns(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def _struct(meaning: dict[str, Any]) -> pa.Array:
    return pa.array([meaning], type=SEMANTICS)
