"""Log-probabilities of recorded tokens from a model's logits, under the tape's sampling rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rolltape.recorder.facts import dtype_name
from rolltape.recorder.top import top_logprobs
from rolltape.replay.switches import Switches
from rolltape.store import Masked, Supports
from rolltape.store import Sequence as TapeSequence
from rolltape.store.distributions import Distributions
from rolltape.store.schema import SUPPORT_EXPLICIT, SUPPORT_FULL, SUPPORT_UNRECORDED

#: Elements of the float copy of the logits that is made at a time.
_CHUNK_ELEMENTS = 1 << 24

_REPETITION = "repetition_penalty"


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a span were drawn, and which of it is applied again.

    Args:
        temperature: that the logits are divided by; 1 for greedy and where it is unknown.
        repetition_penalty: applied before the temperature; 1 is none.
        edits: the edits applied, as `semantics.edits` names them. Empty when the tape has others
            than the repetition penalty: none of them is applied then, so that a diff sees that
            the two sides do not mean the same.
        truncation: recorded truncation, None when unknown.
        not_applied: recorded edits that were not applied.
    """

    temperature: float = 1.0
    repetition_penalty: float = 1.0
    edits: tuple[str, ...] = ()
    truncation: tuple[str, ...] | None = None
    not_applied: tuple[str, ...] = ()

    def semantics(self, *, width: int, dtype: str, switches: Switches) -> dict[str, Any]:
        """The `semantics` cell of logprobs that are computed under this sampling."""
        truncation = self.truncation
        if switches.support == "full":
            truncation = () if truncation == () else None
        return {
            "temperature": self.temperature,
            "edits": list(self.edits),
            "truncation": None if truncation is None else list(truncation),
            "vocab_size": width,
            "dtype": dtype,
            "source": "recomputed",
        }


@dataclass(frozen=True)
class Span:
    """Positions [start, start + n) that share a sampling; None for the prompt."""

    start: int
    n: int
    sampling: Sampling | None


@dataclass(frozen=True)
class Logprobs:
    """Logprobs of one sequence, float32 [T] each, valid on the positions that were scored.

    Args:
        raw: T = 1, full vocabulary, no edits.
        scaled: temperature and edits, full vocabulary.
        processed: the same, normalised over the kept set.
        width: of the logits, padding included.
        dtype: name of the dtype of the log-softmax.
        outside: how many tokens are not in their own recorded kept set.
        top: the most probable tokens under `raw`, None when they were not asked for.
    """

    raw: Masked
    scaled: Masked
    processed: Masked
    width: int
    dtype: str
    outside: int
    top: Distributions | None = None


def sampling_spans(sequence: TapeSequence, switches: Switches) -> list[Span]:
    """The prompt and the differently sampled parts of the response, in order, covering [0, T)."""
    head = min(max(sequence.prompt_len, 1), sequence.length)
    default = _from_settings(sequence.info["sampling"], switches)
    owner: list[Sampling] = [default] * (sequence.length - head)
    for start, n, semantics in reversed(sequence.semantics):  # the first one recorded counts
        found = _from_semantics(semantics, sequence.info["sampling"], default, switches)
        for position in range(max(start, head), min(start + n, sequence.length)):
            owner[position - head] = found
    spans = [Span(0, head, None)] if head else []
    for position, sampling in enumerate(owner, head):
        if spans and spans[-1].sampling == sampling:
            spans[-1] = Span(spans[-1].start, spans[-1].n + 1, sampling)
        else:
            spans.append(Span(position, 1, sampling))
    return spans


def score(
    logits: torch.Tensor,
    sequence: TapeSequence,
    spans: list[Span],
    supports: Supports | None,
    *,
    dtype: torch.dtype,
    top: int = 0,
) -> Logprobs:
    """Logprobs of the response tokens of one sequence.

    Args:
        logits: [T, V], row p predicts token p + 1; any float dtype.
        sequence: whose tokens.
        spans: of `sampling_spans`.
        supports: kept sets to normalise `processed` over; None: over the whole vocabulary.
        dtype: of the log-softmax.
        top: keep the so many most probable tokens of every position.
    """
    raw, scaled, processed = (Masked.empty(sequence.length, np.float32) for _ in range(3))
    ids = torch.from_numpy(sequence.tokens.values.astype(np.int64)).to(logits.device)
    first_seen = _first_seen(ids, logits.shape[-1])
    step = max(1, _CHUNK_ELEMENTS // logits.shape[-1])
    outside = 0
    best = Distributions.empty(sequence.length, top) if top else None
    for span in spans:
        if span.sampling is None:
            continue
        for start in range(span.start, span.start + span.n, step):
            stop = min(start + step, span.start + span.n)
            positions = torch.arange(start, stop, device=logits.device)
            chunk = logits[start - 1 : stop - 1].to(dtype)
            target = ids[start:stop, None]
            full = torch.log_softmax(chunk, dim=-1)
            _put(raw, start, stop, full.gather(-1, target)[:, 0])
            if best is not None:
                _put_top(best, start, stop, full)
            full = _rescaled(chunk, full, span.sampling, first_seen, positions)
            own = full.gather(-1, target)[:, 0]
            _put(scaled, start, stop, own)
            if supports is None:
                if span.sampling.truncation == ():
                    _put(processed, start, stop, own)
                continue
            values, known, lost = _kept(full, own, target[:, 0], supports, start, stop)
            _put(processed, start, stop, values, known)
            outside += lost
    return Logprobs(raw, scaled, processed, logits.shape[-1], dtype_name(dtype), outside, best)


def unrecorded_supports(length: int) -> Supports:
    """Supports of a sequence about whose kept sets nothing is known."""
    return Supports(
        state=np.full(length, SUPPORT_UNRECORDED, np.uint8),
        offsets=np.zeros(length + 1, np.int64),
        ids=np.zeros(0, np.uint32),
        derived=True,
    )


def _rescaled(
    logits: torch.Tensor,
    full: torch.Tensor,
    sampling: Sampling,
    first_seen: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    penalty, temperature = sampling.repetition_penalty, sampling.temperature
    if penalty == 1.0 and temperature == 1.0:
        return full
    if penalty != 1.0:
        penalised = torch.where(logits < 0, logits * penalty, logits / penalty)
        logits = torch.where(first_seen[None] < positions[:, None], penalised, logits)
    return torch.log_softmax(logits / temperature, dim=-1)


def _first_seen(ids: torch.Tensor, width: int) -> torch.Tensor:
    """Position of the first occurrence of every token id, T where there is none: int64 [V]."""
    first = torch.full((width,), len(ids), dtype=torch.int64, device=ids.device)
    places = torch.arange(len(ids), device=ids.device)
    return first.scatter_reduce_(0, ids, places, reduce="amin")


def _kept(
    full: torch.Tensor,
    own: torch.Tensor,
    target: torch.Tensor,
    supports: Supports,
    start: int,
    stop: int,
) -> tuple[torch.Tensor, np.ndarray, int]:
    """Renormalise over the kept sets: values, where they are known, tokens outside their set."""
    state = supports.state[start:stop]
    explicit = state == SUPPORT_EXPLICIT
    known = explicit | (state == SUPPORT_FULL)
    values = own.clone()
    if not explicit.any():
        return values, known, 0
    counts = np.where(explicit, np.diff(supports.offsets[start : stop + 1]), 0)
    flat = supports.ids[supports.offsets[start] : supports.offsets[stop]].astype(np.int64)
    inside = np.arange(max(1, int(counts.max())))[None] < counts[:, None]
    table = np.zeros(inside.shape, np.int64)
    table[inside] = flat
    device = full.device
    kept = torch.from_numpy(table).to(device)
    mask = torch.from_numpy(inside).to(device)
    mass = full.gather(-1, kept).masked_fill(~mask, -torch.inf).logsumexp(dim=-1)
    member = ((kept == target[:, None]) & mask).any(-1)
    rows = torch.from_numpy(explicit).to(device)
    values = torch.where(rows, torch.where(member, own - mass, -torch.inf), values)
    return values, known, int((rows & ~member).sum())


def _put(
    column: Masked, start: int, stop: int, values: torch.Tensor, valid: np.ndarray | None = None
) -> None:
    column.values[start:stop] = values.to(torch.float32).cpu().numpy()
    column.valid[start:stop] = True if valid is None else valid


def _put_top(best: Distributions, start: int, stop: int, logprobs: torch.Tensor) -> None:
    found = top_logprobs(logprobs, best.k)
    for column, values in zip((best.ids, best.logprobs, best.tail), found, strict=True):
        column[start:stop] = values.cpu().numpy()
    best.valid[start:stop] = True


def _from_settings(settings: Mapping[str, Any], switches: Switches) -> Sampling:
    """From the sampling parameters of a request, where no logprob says what was applied."""
    if not settings:
        return Sampling()
    temperature = settings.get("temperature")
    greedy = settings.get("do_sample") is False or temperature == 0
    edits = []
    if (settings.get(_REPETITION) or 1.0) != 1.0:
        edits.append(f"{_REPETITION}={settings[_REPETITION]}")
    truncation = [
        f"{name}={settings[name]}"
        for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
        if settings.get(name) not in (None, off, -1)
    ]
    if greedy:
        temperature, truncation = None, ["greedy"]
    return _sampling(temperature, edits, truncation, settings, switches)


def _from_semantics(
    semantics: Mapping[str, Any],
    settings: Mapping[str, Any],
    default: Sampling,
    switches: Switches,
) -> Sampling:
    edits, truncation = semantics["edits"], semantics["truncation"]
    return _sampling(
        semantics["temperature"],
        list(default.edits if edits is None else edits),
        default.truncation if truncation is None else truncation,
        settings,
        switches,
    )


def _sampling(
    temperature: float | None,
    edits: list[str],
    truncation: list[str] | tuple[str, ...] | None,
    settings: Mapping[str, Any],
    switches: Switches,
) -> Sampling:
    if not temperature or switches.temperature == "1":
        temperature = 1.0
    kept = None if truncation is None else tuple(truncation)
    if any(edit.partition("=")[0] != _REPETITION for edit in edits):
        return Sampling(float(temperature), truncation=kept, not_applied=tuple(edits))
    penalty = 1.0
    exact = settings.get(_REPETITION)
    for edit in edits:
        text = edit.partition("=")[2]
        # the text is rounded to six digits
        rounded = isinstance(exact, float) and f"{exact:g}" == text
        penalty *= exact if rounded and isinstance(exact, float) else float(text)
    return Sampling(float(temperature), penalty, tuple(edits), kept)
