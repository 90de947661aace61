"""Log-probabilities of recorded tokens from a model's logits, under the tape's sampling rules."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
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

#: Elements of the float copy of the logits that is made at a time, and how many of them are
#: normalised at a time on a CPU: what stays in its cache is faster, and never slower, than fresh
#: memory of the size of a sequence.
_CHUNK_ELEMENTS = 1 << 24
_CACHED_ELEMENTS = 1 << 20

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

    @property
    def is_plain(self) -> bool:
        """Whether `scaled` is `raw`."""
        return self.temperature == 1.0 and self.repetition_penalty == 1.0

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
    numbers = {_from_settings(sequence.info["sampling"], switches): 0}
    (default,) = numbers
    owner = np.zeros(sequence.length - head, np.int64)
    for start, n, semantics in reversed(sequence.semantics):  # the first one recorded counts
        found = _from_semantics(semantics, sequence.info["sampling"], default, switches)
        where = slice(max(start - head, 0), max(start + n - head, 0))
        owner[where] = numbers.setdefault(found, len(numbers))
    samplings = list(numbers)
    spans = [Span(0, head, None)] if head else []
    bounds = [0, *(np.flatnonzero(np.diff(owner)) + 1).tolist(), len(owner)]
    for start, stop in itertools.pairwise(bounds):
        if start < stop:
            spans.append(Span(head + start, stop - start, samplings[owner[start]]))
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
    device, width = logits.device, logits.shape[-1]
    # on the device until all are there: copying each chunk would wait for it
    values = torch.zeros(3, sequence.length, dtype=torch.float32, device=device)
    valid = np.zeros((3, sequence.length), bool)
    ids = torch.from_numpy(sequence.tokens.values.astype(np.int64)).to(device)
    penalised = any(s.sampling is not None and s.sampling.repetition_penalty != 1 for s in spans)
    first_seen = _first_seen(ids, width) if penalised else None
    chunk = max(1, _CHUNK_ELEMENTS // width)
    step = max(1, _CACHED_ELEMENTS // width) if device.type == "cpu" else chunk
    outside = torch.zeros((), dtype=torch.int64, device=device)
    best = Distributions.empty(sequence.length, top) if top else None
    for sampling, start, stop in _chunks(spans, chunk):
        scored = slice(start, stop)
        target = ids[scored, None]
        own = torch.empty(stop - start, 1, dtype=dtype, device=device)
        kept = None if supports is None else _kept(supports, start, stop, dtype, device)
        for low in range(start, stop, step):
            part = slice(low - start, min(low + step, stop) - start)
            positions = slice(low, start + part.stop)
            some = logits[low - 1 : positions.stop - 1].to(dtype)
            full = torch.log_softmax(some, dim=-1)
            own[part] = full.gather(-1, target[part])
            values[0, positions] = own[part, 0]
            if best is not None:
                _put_top(best, positions, full)
            if not sampling.is_plain:
                full = _rescaled(some, sampling, first_seen, low)
                own[part] = full.gather(-1, target[part])
            if kept is not None:
                kept.logprobs[part] = full.gather(-1, kept.ids[part])
        values[1, scored], valid[:2, scored] = own[:, 0], True
        if kept is not None:
            values[2, scored], lost = kept.renormalised(own, target)
            valid[2, scored] = kept.known
            outside += lost
        elif sampling.truncation == ():
            values[2, scored], valid[2, scored] = own[:, 0], True
    raw, scaled, processed = map(Masked, values.cpu().numpy(), valid)
    return Logprobs(raw, scaled, processed, width, dtype_name(dtype), int(outside), best)


def _chunks(spans: Iterable[Span], size: int) -> Iterator[tuple[Sampling, int, int]]:
    """(sampling, start, stop) of at most `size` positions each; without the prompt."""
    for span in spans:
        end = span.start + span.n
        if span.sampling is not None:
            for start in range(span.start, end, size):
                yield span.sampling, start, min(start + size, end)


def unrecorded_supports(length: int) -> Supports:
    """Supports of a sequence about whose kept sets nothing is known."""
    return Supports(
        state=np.full(length, SUPPORT_UNRECORDED, np.uint8),
        offsets=np.zeros(length + 1, np.int64),
        ids=np.zeros(0, np.uint32),
        derived=True,
    )


def _rescaled(
    logits: torch.Tensor, sampling: Sampling, first_seen: torch.Tensor | None, start: int
) -> torch.Tensor:
    """Log-softmax under the temperature and penalty of the positions from `start`."""
    penalty, temperature = sampling.repetition_penalty, sampling.temperature
    if penalty != 1.0 and first_seen is not None:
        positions = torch.arange(start, start + len(logits), device=logits.device)
        penalised = torch.where(logits < 0, logits * penalty, logits / penalty)
        logits = torch.where(first_seen[None] < positions[:, None], penalised, logits)
    return torch.log_softmax(logits / temperature, dim=-1)


def _first_seen(ids: torch.Tensor, width: int) -> torch.Tensor:
    """Position of the first occurrence of every token id, T where there is none: int64 [V]."""
    first = torch.full((width,), len(ids), dtype=torch.int64, device=ids.device)
    places = torch.arange(len(ids), device=ids.device)
    return first.scatter_reduce_(0, ids, places, reduce="amin")


@dataclass(frozen=True)
class _Kept:
    """The kept sets of n positions, as one table that is as wide as the largest of them.

    Args:
        ids: int64 [n, widest].
        inside: bool [n, widest]; what is no member is padding.
        explicit: bool [n], of those with a set; with the whole vocabulary there is none.
        known: bool [n] on the host, whether it is known what was kept.
        logprobs: [n, widest] of the members, to be filled.
    """

    ids: torch.Tensor
    inside: torch.Tensor
    explicit: torch.Tensor
    known: np.ndarray
    logprobs: torch.Tensor

    def renormalised(
        self, own: torch.Tensor, target: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[n] logprobs over the kept sets of [n, 1] over all, and how many are not in theirs."""
        mass = self.logprobs.masked_fill(~self.inside, -torch.inf).logsumexp(dim=-1)
        member = ((self.ids == target) & self.inside).any(-1)
        within = torch.where(member, own[:, 0] - mass, -torch.inf)
        return torch.where(self.explicit, within, own[:, 0]), (self.explicit & ~member).sum()


def _kept(
    supports: Supports, start: int, stop: int, dtype: torch.dtype, device: torch.device
) -> _Kept:
    state = supports.state[start:stop]
    explicit = state == SUPPORT_EXPLICIT
    counts = np.where(explicit, np.diff(supports.offsets[start : stop + 1]), 0)
    inside = np.arange(max(1, int(counts.max())))[None] < counts[:, None]
    ids = np.zeros(inside.shape, np.int64)
    ids[inside] = supports.ids[supports.offsets[start] : supports.offsets[stop]]
    return _Kept(
        torch.from_numpy(ids).to(device),
        torch.from_numpy(inside).to(device),
        torch.from_numpy(explicit).to(device),
        explicit | (state == SUPPORT_FULL),
        torch.empty(inside.shape, dtype=dtype, device=device),
    )


def _put_top(best: Distributions, positions: slice, logprobs: torch.Tensor) -> None:
    found = top_logprobs(logprobs, best.k)
    for column, values in zip((best.ids, best.logprobs, best.tail), found, strict=True):
        column[positions] = values.cpu().numpy()
    best.valid[positions] = True


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
