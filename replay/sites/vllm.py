"""Taps on a model inside of vLLM: plain functions of its module tree, run in the engine's process.

vLLM fuses: the residual stands beside the hidden state (`layers.N.out` is their sum), query, key
and value are one projection, gate and up are another. Modules are only called where the engine runs
eager; compiled code and CUDA graphs pass no hook (`enforce_eager=True`).

A forward's rows are the tokens that the engine scheduled, request by request, not padded. `logits`
are computed behind the forward and only for the rows that are sampled from: the last one of each
request in row order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rolltape.replay.sites.find import select_sites, sites_of
from rolltape.replay.taps import attached


@dataclass(frozen=True, kw_only=True)
class EngineForward:
    """One forward of the engine.

    Args:
        tokens: int64 [R] on the host.
        positions: int64 [R] on the host.
        sites: site -> copy [R, width] on the host; `logits` [requests, vocabulary].
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    sites: dict[str, torch.Tensor] = field(default_factory=dict)


class EngineTaps:
    """Copies the rows of chosen sites in every forward of a vLLM model.

    Args:
        model: what the model runner of the engine runs: `model_runner.get_model()`.
        sites: patterns as in `rolltape.replay.sites.select_sites`.
        tokens: keep only the rows of a prompt of these ids, where it runs whole in one forward; its
            logits are not kept.

    Raises:
        UsageError: no map for the model in vLLM, or no such site.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: str | Iterable[str] = "*",
        *,
        tokens: Sequence[int] | None = None,
    ) -> None:
        self._wanted = None if tokens is None else torch.tensor(list(tokens))
        self._rows: slice | None = slice(None)
        places = sites_of(model, "vllm")
        self.places = {site: places[site] for site in select_sites(places, sites)}
        self._forwards: list[EngineForward] = []
        self._stack = ExitStack()
        before = model.register_forward_pre_hook(self._begin, with_kwargs=True)
        self._stack.callback(before.remove)
        self._stack.enter_context(attached(model, self.places, self._look))

    def forwards(self) -> list[EngineForward]:
        """The forwards since the last call."""
        found, self._forwards = self._forwards, []
        return found

    def remove(self) -> None:
        """Take every hook away."""
        self._stack.close()

    def _begin(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        positions = kwargs["positions"] if "positions" in kwargs else args[1]
        own, at = _host(tokens), _host(positions)
        if self._wanted is not None:
            self._rows = _rows_of(self._wanted, own, at)
        if self._rows is not None:
            self._forwards.append(EngineForward(tokens=own[self._rows], positions=at[self._rows]))

    def _look(self, site: str, rows: torch.Tensor) -> None:
        if self._rows is None or (self._wanted is not None and site == "logits"):
            return
        # the logits of prompt logprobs come after those that are sampled from
        kept = rows[self._rows].detach().to("cpu", copy=True)
        self._forwards[-1].sites.setdefault(site, kept)


def _rows_of(wanted: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor) -> slice | None:
    """The rows of a prompt that runs whole; None if it does not."""
    n = len(wanted)
    for first in (positions == 0).nonzero().flatten().tolist():
        rows = slice(first, first + n)
        if torch.equal(tokens[rows], wanted) and torch.equal(positions[rows], torch.arange(n)):
            return rows
    return None


def _host(values: torch.Tensor) -> torch.Tensor:
    return values.detach().to("cpu", torch.int64, copy=True)
