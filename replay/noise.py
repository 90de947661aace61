"""Measures the noise floor of a model: the same tokens in batches that should agree."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from rolltape.recorder.facts import model_facts
from rolltape.recorder.provenance import library_versions
from rolltape.replay.activation_diff import SiteTally
from rolltape.replay.front import Floor, floor_of
from rolltape.replay.taps import Taps
from rolltape.replay.token_batches import Laid, Tokens, lay_out
from rolltape.replay.torch_errors import row_errors_of
from rolltape.store.errors import UsageError


def measure_floor(
    model: nn.Module, sequences: Tokens, *, sites: str | Iterable[str] = "*", rows: int = 8
) -> Floor:
    """Run the same tokens in ways that should agree, and keep how far they do not.

    Two comparisons: every batch of `rows` sequences against the same batch run again, and against
    each of its sequences alone. The copies of all sites of one batch are held meanwhile.

    Args:
        model: a causal language model of transformers.
        sequences: name -> token ids; at least two.
        sites: patterns as in `rolltape.replay.sites.select_sites`.
        rows: sequences of a batch.

    Raises:
        UsageError: fewer than two sequences, or a model without a map of sites.
    """
    if len(sequences) < 2 or rows < 2:
        raise UsageError("a noise floor needs at least two sequences in a batch")
    again, alone = SiteTally(), SiteTally()
    with Taps(model, sites, device=None) as taps, torch.no_grad():
        for laid in lay_out(sequences, rows=rows):
            first = _run(model, taps, laid)
            _compare(again, first, _run(model, taps, laid))
            own = {str(span.key): sequences[str(span.key)] for span in laid.spans}
            for single in lay_out(own, rows=1):
                _compare(alone, first, _run(model, taps, single))
    facts: dict[str, Any] = {
        **model_facts(model),
        "host": socket.gethostname(),
        "versions": library_versions(),
    }
    names = {"the same batch again": again, f"batch of one against batches of {rows}": alone}
    return floor_of(names, [facts], sequences=len(sequences))


def _run(model: nn.Module, taps: Taps, laid: Laid) -> dict[tuple[str, str], torch.Tensor]:
    taps.watch(laid.spans, columns=laid.columns)
    model(**laid.inputs(next(model.parameters()).device))
    return {(taken.site, str(taken.span.key)): taken.values for taken in taps.taken()}


def _compare(
    tally: SiteTally,
    a: dict[tuple[str, str], torch.Tensor],
    b: dict[tuple[str, str], torch.Tensor],
) -> None:
    for site, name in a.keys() & b.keys():
        error = row_errors_of(a[site, name], b[site, name]).span(name, site, 0, slice(None))
        tally.spans.setdefault(site, []).append(error)
