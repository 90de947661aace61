"""Live diff: two models run the same tokens in one process and are compared site by site.

Both walk in step. Each stands still at a site until the other one has come there too; the rows are
compared where they lie, and both go on. Nothing is stored but the errors of each row.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from rolltape.replay.activation_diff import SiteTally
from rolltape.replay.front import Floor, front_of
from rolltape.replay.sites import Place, select_sites, sites_of
from rolltape.replay.taps import attached
from rolltape.replay.token_batches import Laid, Tokens, lay_out
from rolltape.replay.torch_errors import TorchErrors, row_errors_of
from rolltape.store.errors import UsageError


def live_diff(
    a: nn.Module,
    b: nn.Module,
    sequences: Tokens,
    *,
    sites: str | Iterable[str] = "*",
    tokens_per_batch: int = 8192,
    floor: Floor | None = None,
) -> dict[str, Any]:
    """Compare two models at every site and position.

    Args:
        a: the reference side; a causal language model of transformers.
        b: the other side, maybe of another dtype, on the same device or another one.
        sequences: name -> token ids.
        sites: patterns as in `rolltape.replay.sites.select_sites`; sites that only one side has, or
            that neither passed by, are left out and named.
        tokens_per_batch: tokens of one forward, padding included.
        floor: measured noise floor, see `rolltape.replay.front`.

    Returns:
        JSON-able: verdict (identical, within-noise, divergent, not-run), reason, front, floor,
        sites (a summary each, in the order in which they run), missing (sites left out).

    Raises:
        UsageError: no map for a model, no such site, or modules that both sides share.
    """
    tally, missing = compare_live(a, b, sequences, sites=sites, tokens_per_batch=tokens_per_batch)
    return {**front_of(tally, floor), "sites": tally.summary(), "missing": missing}


def compare_live(
    a: nn.Module,
    b: nn.Module,
    sequences: Tokens,
    *,
    sites: str | Iterable[str] = "*",
    tokens_per_batch: int = 8192,
) -> tuple[SiteTally, list[str]]:
    """The errors of `live_diff` as they are, and the sites that could not be compared."""
    if not set(a.modules()).isdisjoint(b.modules()):
        raise UsageError(
            "both sides are one model, which cannot stand still for itself",
            hint="a copy of it; rolltape.replay.noise runs one model several times",
        )
    first, second = sites_of(a), sites_of(b)
    wanted = select_sites({**first, **second}, sites)
    common = [site for site in wanted if site in first and site in second]
    tally = SiteTally()
    for laid in lay_out(sequences, tokens=tokens_per_batch):
        found = _compare(a, b, laid, {s: first[s] for s in common}, {s: second[s] for s in common})
        for site, errors in found.items():
            for span in laid.spans:
                error = errors.span(str(span.key), site, span.start, span.rows(laid.columns))
                tally.spans.setdefault(site, []).append(error)
    return tally, [site for site in wanted if site not in tally.spans]


def _compare(
    a: nn.Module,
    b: nn.Module,
    laid: Laid,
    places_a: Mapping[str, Place],
    places_b: Mapping[str, Place],
) -> dict[str, TorchErrors]:
    found: dict[str, TorchErrors] = {}
    device = next(b.parameters()).device
    with InStep(a, places_a, laid.inputs(next(a.parameters()).device)) as other:

        def look(site: str, rows: torch.Tensor) -> None:
            theirs = other.reach(site).to(rows.device)
            if theirs.shape != rows.shape:
                raise UsageError(
                    f"{site} is {list(theirs.shape)} in a, {list(rows.shape)} in b",
                    hint="two models of one architecture",
                )
            found[site] = row_errors_of(theirs, rows)

        with attached(b, places_b, look), torch.no_grad():
            b(**laid.inputs(device))
    return found


class _StopError(Exception):
    """The other side is gone."""


class InStep:
    """A forward that runs in a thread of its own and stands still at every site.

    Only one of the two threads runs at any time, so that none waits for the other's cores.

    Args:
        model: whose forward.
        places: where it stands still.
        inputs: keyword arguments of the forward.
    """

    def __init__(
        self, model: nn.Module, places: Mapping[str, Place], inputs: Mapping[str, Any]
    ) -> None:
        self._model, self._places, self._inputs = model, places, inputs
        self._go, self._there = threading.Semaphore(0), threading.Semaphore(0)
        self._at: tuple[str, torch.Tensor] | None = None
        self._early: dict[str, torch.Tensor] = {}
        self._error: BaseException | None = None
        self._stopped = self._failed = False
        self._state = _thread_state(next(model.parameters()).device)
        self._thread = threading.Thread(target=self._run, name="rolltape-in-step", daemon=True)
        self._stack = ExitStack()

    def __enter__(self) -> InStep:
        self._stack.enter_context(attached(self._model, self._places, self._look))
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stopped, self._failed = True, kind is not None
        self._go.release()
        self._thread.join()
        self._stack.close()
        if kind is None and self._error is not None:
            raise self._error

    def reach(self, site: str) -> torch.Tensor:
        """Let it run to a site; its rows there, which stay as they are until the next call.

        Raises:
            UsageError: it ended without having passed that site.
        """
        if site in self._early:
            return self._early.pop(site)
        while True:
            self._go.release()
            self._there.acquire()
            if self._error is not None:
                raise self._error
            if self._at is None:
                raise UsageError(f"{site} was passed by one side only")
            name, rows = self._at
            if name == site:
                return rows
            self._early[name] = rows.clone()  # it comes in another order there

    def _run(self) -> None:
        try:
            self._go.acquire()
            if not self._stopped:
                with self._state():
                    self._model(**self._inputs)
        except _StopError:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._at = None
            self._there.release()

    def _look(self, site: str, rows: torch.Tensor) -> None:
        if not self._stopped:
            self._at = site, rows
            self._there.release()
            self._go.acquire()
        if self._failed:
            raise _StopError


def _thread_state(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """What of the caller's settings belongs to its thread, to be entered in another one."""
    kind, threads = device.type, torch.get_num_threads()
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    stream = torch.cuda.current_stream(device) if kind == "cuda" else None

    @contextmanager
    def entered() -> Iterator[None]:
        torch.set_num_threads(threads)
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            if stream is not None:
                stack.enter_context(torch.cuda.stream(stream))
            yield

    return entered
