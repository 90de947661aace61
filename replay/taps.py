"""Taps: look at the tensors of a model at their sites, or replace them, while it runs.

Nothing of the model is changed for good: hooks are taken away on exit, also after an error. What a
tap keeps is copied at the hook, so that an operation in place behind it does not reach the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from rolltape.recorder.patches import Patches
from rolltape.replay.sites import Place, select_sites, sites_of
from rolltape.store.errors import UsageError

#: Gets a site and its rows [R, width] as they pass by; a tensor that it returns takes their place.
Look = Callable[[str, torch.Tensor], torch.Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Span:
    """Tokens of one sequence in a forward; what no span names is padding.

    Args:
        key: name of the sequence.
        row: of the batch.
        column: of its first token.
        n: tokens.
        start: position of the first token in the sequence.
    """

    key: Hashable
    row: int
    column: int
    n: int
    start: int = 0

    def rows(self, columns: int) -> slice:
        """Its rows in a tensor [rows * columns, width]."""
        first = self.row * columns + self.column
        return slice(first, first + self.n)


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A copy of one site for one span: `values` is [n, width], in the dtype of the model."""

    site: str
    span: Span
    values: torch.Tensor


class Taps:
    """Copies the rows of chosen sites for the sequences that are watched.

        with Taps(model, "layers.*.out,logits") as taps:
            taps.watch([Span(key="a", row=0, column=0, n=7)], columns=7)
            model(**inputs)
            for taken in taps.taken(): ...

    Args:
        model: a causal language model of transformers.
        sites: patterns as in `select_sites`.
        device: where the copies are kept; None is where the model runs.

    Raises:
        UsageError: no map for the model, or no such site.
    """

    def __init__(
        self, model: nn.Module, sites: str | Iterable[str], *, device: str | None = "cpu"
    ) -> None:
        places = sites_of(model)
        self.places = {site: places[site] for site in select_sites(places, sites)}
        self._model, self._device = model, device
        self._spans: Sequence[Span] = ()
        self._columns = 0
        self._taken: list[Taken] = []
        self._stack = ExitStack()

    def __enter__(self) -> Taps:
        self._stack.enter_context(attached(self._model, self.places, self._look))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._spans, self._taken = (), []

    def watch(self, spans: Sequence[Span], *, columns: int) -> None:
        """What to copy of the next forwards, whose rows have so many columns; none to rest."""
        self._spans, self._columns = spans, columns

    def taken(self) -> list[Taken]:
        """The copies since the last call, in the order in which they were made."""
        taken, self._taken = self._taken, []
        return taken

    def _look(self, site: str, rows: torch.Tensor) -> None:
        for span in self._spans:
            where = span.rows(self._columns)
            if where.stop > len(rows) or len(rows) % self._columns:
                raise UsageError(
                    f"{site} has {len(rows)} rows, which are not rows of {self._columns} columns",
                    hint="logits of all positions, and the columns of this forward",
                )
            kept = rows[where].detach()
            values = kept.clone() if self._device is None else kept.to(self._device, copy=True)
            self._taken.append(Taken(site=site, span=span, values=values))


@contextmanager
def attached(model: nn.Module, places: Mapping[str, Place], look: Look) -> Iterator[None]:
    """Call `look` for every place of a model while the block runs.

    A place that is never passed calls nobody. Rows are those of the tensor that passes by: they
    change when it is changed in place.
    """
    modules = dict(model.named_modules())
    with ExitStack() as stack:
        for site, place in places.items():
            module = modules[place.module]
            if place.port == "attention":
                stack.enter_context(_attention(module, partial(_argument, site, place, look)))
            elif place.port == "input":
                hook = partial(_on_input, site, place, look)
                stack.callback(module.register_forward_pre_hook(hook).remove)
            else:
                after = partial(_on_output, site, place, look)
                stack.callback(module.register_forward_hook(after).remove)
        yield


def _on_output(site: str, place: Place, look: Look, _module: Any, _args: Any, output: Any) -> Any:
    if output is None:  # a rank that gathers no logits
        return None
    if not isinstance(output, tuple):
        new = look(site, place.rows(output))
        return None if new is None else place.restored(output, new)
    if place.port == "sum":
        first, second = output[:2]
        look(site, place.rows(first if second is None else first + second))
        return None
    value = output[place.index]
    new = look(site, place.rows(value))
    if new is None:
        return None
    return (*output[: place.index], place.restored(value, new), *output[place.index + 1 :])


def _on_input(site: str, place: Place, look: Look, _module: Any, args: Any) -> Any:
    return _argument(site, place, look, args)


def _argument(site: str, place: Place, look: Look, args: tuple[Any, ...]) -> Any:
    value = args[place.index]
    new = look(site, place.rows(value))
    if new is None:
        return None
    return (*args[: place.index], place.restored(value, new), *args[place.index + 1 :])


# -- the attention function of transformers -----------------------------------------------------

_Argument = Callable[[tuple[Any, ...]], Any]
_watched: dict[int, list[_Argument]] = {}


@contextmanager
def _attention(module: nn.Module, look: _Argument) -> Iterator[None]:
    """Call `look` with (query, key) whenever the attention function runs for a module.

    Query and key after RoPE are arguments of no module: transformers looks the function up by
    `AttentionInterface.get_interface`, which is wrapped as long as anybody is watching.
    """
    _watched.setdefault(id(module), []).append(look)
    try:
        if sum(map(len, _watched.values())) == 1:
            _wrap()
        yield
    finally:
        _watched[id(module)].remove(look)
        if not _watched[id(module)]:
            del _watched[id(module)]
        if not _watched:
            _patches.undo()


_patches = Patches()


def _wrap() -> None:
    from transformers.modeling_utils import AttentionInterface

    _patches.around(AttentionInterface, "get_interface", _around_lookup)


def _around_lookup(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
    return partial(_called, wrapped(*args, **kwargs))


def _called(function: Any, module: nn.Module, query: Any, key: Any, *args: Any, **kw: Any) -> Any:
    rows = query.shape[2]
    for look in _watched.get(id(module), ()):
        # behind a cache the key holds earlier positions too; those of this forward come last
        new = look((query, key[:, :, key.shape[2] - rows :]))
        if new is not None:
            query = new[0]
            if new[1].shape == key.shape:
                key = new[1]
            else:
                key = torch.cat([key[:, :, : key.shape[2] - rows], new[1]], 2)
    return function(module, query, key, *args, **kw)
