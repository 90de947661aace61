"""Transplant: force a stored tensor of one side into the other at a site, and see what gap is left.

A site behind which the gap is gone lies behind the cause; one that changes nothing lies before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from rolltape.replay.sites import select_sites, sites_of
from rolltape.replay.taps import Span, Taps, attached
from rolltape.replay.token_batches import Laid, Tokens, lay_out
from rolltape.store.errors import ForcingError, UsageError
from rolltape.store.sequences import Sequence

#: Rows of one site by sequence: (first position, float [n, width]).
Rows = Mapping[str, tuple[int, np.ndarray | torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Transplanted:
    """What a transplant at one site did; gaps are mean |log p - log p of the donor| in nats.

    Args:
        site: where.
        rows: that were forced.
        tokens: whose logprobs are compared.
        before: gap without the transplant.
        after: gap with it.
    """

    site: str
    rows: int
    tokens: int
    before: float
    after: float

    @property
    def gone(self) -> float | None:
        """Share of the gap that went, at most 1; None where there was none."""
        return None if not self.before else 1 - self.after / self.before


def transplant(
    model: nn.Module,
    sequences: Tokens,
    donor: Mapping[str, Rows],
    logprobs: Mapping[str, np.ndarray],
    *,
    tokens_per_batch: int = 8192,
) -> list[Transplanted]:
    """Force the donor's rows into a model, one site at a time.

    Before that it is proven that forcing the model's own rows changes no bit of its logits.

    Args:
        model: that gets them; a causal language model of transformers.
        sequences: name -> token ids.
        donor: site -> rows of the other side, in its dtype or as float32; they are rounded to the
            dtype of the model. Positions without rows stay as they are.
        logprobs: name -> float [T] of the donor, log p of the token at each position at temperature
            1, NaN where there is none.

    Returns:
        One entry a site, in the order in which they run.

    Raises:
        UsageError: no such site, rows of another width, or no logprob to compare with.
        ForcingError: forcing the model's own rows changes its logits.
    """
    places = sites_of(model)
    sites = select_sites(places, donor)
    batches = lay_out(sequences, tokens=tokens_per_batch)
    if not any(np.isfinite(logprobs[str(s.key)]).any() for b in batches for s in b.spans):
        raise UsageError("no logprob of the donor to compare with")
    before = _Gap()
    for laid in batches:
        _self_test(model, laid, sites)
        before.add(laid, _logits(model, laid), sequences, logprobs)
    found = []
    for site in sites:
        after, rows = _Gap(), 0
        for laid in batches:
            force = _Force(site, laid, donor[site])
            with attached(model, {site: places[site]}, force):
                logits = _logits(model, laid)
            rows += force.rows
            after.add(laid, logits, sequences, logprobs)
        if not rows:
            raise UsageError(f"no row of {site} belongs to these sequences")
        found.append(
            Transplanted(
                site=site, rows=rows, tokens=before.n, before=before.mean, after=after.mean
            )
        )
    return found


def donor_of(
    sequences: Iterable[Sequence], sites: str | Iterable[str] | None = None
) -> tuple[dict[str, dict[str, tuple[int, np.ndarray]]], dict[str, np.ndarray]]:
    """What `transplant` wants of a donor, from a tape.

    Args:
        sequences: of the tape.
        sites: patterns; None is every site that was stored.

    Returns:
        The rows by site and sequence id, of each the longest span; the raw logprobs by sequence id.

    Raises:
        UsageError: the tape holds none of these sites.
    """
    rows: dict[str, dict[str, tuple[int, np.ndarray]]] = {}
    logprobs = {}
    for sequence in sequences:
        raw = sequence.logprob("raw")
        logprobs[sequence.id] = np.where(raw.valid, raw.values, np.nan).astype(np.float64)
        for site, spans in sequence.activations().items():
            start, _, values = max(spans, key=lambda span: len(span[2]))
            rows.setdefault(site, {})[sequence.id] = start, values
    if not rows:
        raise UsageError("no stored tensors", hint="rolltape replay --sites NAMES --sequences ID")
    if sites is not None:
        rows = {site: rows[site] for site in select_sites(rows, sites)}
    return rows, logprobs


class _Force:
    """Puts the donor's rows in the place of those that pass by."""

    def __init__(self, site: str, laid: Laid, donor: Rows) -> None:
        self.rows = 0
        self._site, self._laid, self._donor = site, laid, donor

    def __call__(self, _site: str, rows: torch.Tensor) -> torch.Tensor:
        forced = rows.clone()
        for span in self._laid.spans:
            if str(span.key) in self._donor:
                start, values = self._donor[str(span.key)]
                self._place(forced, span, start, torch.as_tensor(values))
        return forced

    def _place(self, forced: torch.Tensor, span: Span, start: int, values: torch.Tensor) -> None:
        if values.shape[1] != forced.shape[1]:
            widths = f"{values.shape[1]} wide in the donor, {forced.shape[1]} here"
            raise UsageError(f"{self._site} of {span.key} is {widths}")
        end = min(start + len(values), span.n)
        first = span.rows(self._laid.columns).start
        forced[first + start : first + end] = values[: end - start].to(forced)
        self.rows += end - start


def _self_test(model: nn.Module, laid: Laid, sites: Iterable[str]) -> None:
    with Taps(model, sites, device=None) as taps:
        taps.watch(laid.spans, columns=laid.columns)
        live = _logits(model, laid)
        own: dict[str, dict[str, tuple[int, torch.Tensor]]] = {}
        for taken in taps.taken():
            own.setdefault(taken.site, {})[str(taken.span.key)] = taken.span.start, taken.values
    places = sites_of(model)
    for site, rows in own.items():
        with attached(model, {site: places[site]}, _Force(site, laid, rows)):
            forced = _logits(model, laid)
        if not torch.equal(_bits(live), _bits(forced)):
            worst = float((live.float() - forced.float()).abs().max())
            raise ForcingError(
                f"self-test: forcing the model's own {site} changed logits by up to {worst:.3g}",
                hint="kernels that are not deterministic, or a site that cannot be forced here",
            )


def _bits(values: torch.Tensor) -> torch.Tensor:
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.contiguous().view(kinds[values.element_size()])


def _logits(model: nn.Module, laid: Laid) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(**laid.inputs(next(model.parameters()).device)).logits
    return logits


class _Gap:
    """Mean |log p - log p of the donor| over positions where the donor has one."""

    def __init__(self) -> None:
        self.n, self._sum = 0, 0.0

    @property
    def mean(self) -> float:
        return self._sum / self.n if self.n else float("nan")

    def add(
        self,
        laid: Laid,
        logits: torch.Tensor,
        sequences: Tokens,
        logprobs: Mapping[str, np.ndarray],
    ) -> None:
        for span in laid.spans:
            name = str(span.key)
            rows = logits.reshape(-1, logits.shape[-1])[span.rows(laid.columns)]
            own = torch.log_softmax(rows[:-1].float(), -1)
            ids = torch.as_tensor(np.asarray(sequences[name], np.int64)[1:], device=own.device)
            mine: Any = own.gather(-1, ids[:, None])[:, 0].double().cpu().numpy()
            theirs = np.asarray(logprobs[name], np.float64)[1 : span.n]
            known = np.isfinite(theirs) & np.isfinite(mine)
            self.n += int(known.sum())
            self._sum += float(np.abs(mine - theirs)[known].sum())
