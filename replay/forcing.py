"""Route forcing: the experts get recorded ids, the combine weights come from the live router.

The one implementation, for replay and for training:

    with RouteForcing(model) as forcing:
        for micro in micro_batches:
            with forcing.routes(micro.routes):
                loss = loss_of(model(**micro.inputs))
            loss.backward()

Ids recorded by the engine replace the live choice just before `experts` is called. In mode `ids`
the weights are recomputed from the full live router logits by the family's own recipe, so that
gradients reach the router; in mode `ids+weights` the recorded weights are used as they are.

Backward may come later, also after other micro-batches went forward: a layer under gradient
checkpointing carries its micro-batch into the recompute. Where that cannot be known, a
`ForcingError` is raised rather than the routes of another micro-batch used.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from rolltape.recorder.moe import MoeBlock, find_moe_blocks
from rolltape.replay.recipes import Recipe, margin, recipe_for
from rolltape.replay.routes import BlockChoice, ForcedLayer, ForcedRoutes, Mode, by_layer
from rolltape.store.errors import ForcingError, UsageError

__all__ = ["BlockChoice", "ForcedRoutes", "Mode", "RouteForcing", "same_bits", "self_test"]

P = ParamSpec("P")
R = TypeVar("R")

_CHECKPOINT = "_gradient_checkpointing_func"
_attached: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@dataclass
class _Site:
    """A block, and what its first forward proved about the recipe."""

    block: MoeBlock
    recipe: Recipe
    parameters: tuple[str, ...]  # names of the ids and weights arguments of `experts`
    checked: bool = False
    weights_hold: bool = False
    scores_hold: bool = False


@dataclass(frozen=True)
class _Binding:
    """The routes in force in a thread. `layers` is None for a live forward."""

    layers: dict[int, ForcedLayer] | None
    seen: set[int] = field(default_factory=set)
    carried: bool = False


class _Local(threading.local):
    binding: _Binding | None = None

    def __init__(self) -> None:
        self.logits: dict[int, torch.Tensor] = {}


class RouteForcing:
    """Forces routes on the MoE blocks of a transformers model while it is entered.

    Args:
        model: the model, maybe wrapped (DDP, FSDP).
        mode: `ids`: weights from the live router logits; `ids+weights`: recorded weights, no
            gradient to the router through them.
        capture: called once per block and forward (not in a recompute), forced or live.

    Raises:
        ForcingError: the model has no MoE block that can be forced.

    Enable gradient checkpointing before entering. A function that goes through your own
    `torch.utils.checkpoint.checkpoint` has to be wrapped by `carry`.
    """

    def __init__(
        self,
        model: nn.Module,
        mode: Mode = "ids",
        *,
        capture: Callable[[BlockChoice], None] | None = None,
    ) -> None:
        if mode not in ("ids", "ids+weights"):
            raise UsageError(f"no forcing mode {mode!r}", hint="ids | ids+weights")
        blocks = find_moe_blocks(model)
        if not blocks:
            raise ForcingError(
                f"{type(model).__name__} has no MoE block whose routes could be forced",
                hint="a dense model, or a transformers version older than 5.10",
            )
        self.model = model
        self.mode = mode
        self._capture = capture
        self._blocks = {block.layer: block for block in blocks}
        self._sites = {block.layer: _site(block) for block in blocks}
        self._local = _Local()
        self._session: object | None = None
        self._undo: list[Callable[[], None]] = []

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers that are forced."""
        return tuple(self._sites)

    def __enter__(self) -> RouteForcing:
        routers = [site.block.router for site in self._sites.values()]
        if self._session is not None or any(router in _attached for router in routers):
            raise ForcingError(
                "route forcing is attached to this model already",
                hint="leave the other `with RouteForcing(...)` block first",
            )
        _attached.update(routers)
        self._session = object()
        for site in self._sites.values():
            site.checked = False
            keep = site.block.router.register_forward_hook(functools.partial(self._keep, site))
            swap = site.block.experts.register_forward_pre_hook(
                functools.partial(self._swap, site), with_kwargs=True
            )
            self._undo += [keep.remove, swap.remove]
        for module in self.model.modules():
            if _CHECKPOINT in vars(module):
                self._undo.append(self._wrap_checkpoint(module))
        return self

    def __exit__(self, *_: object) -> None:
        self._session = None
        for undo in self._undo:
            undo()
        self._undo = []
        self._local = _Local()
        for site in self._sites.values():
            _attached.discard(site.block.router)

    @contextmanager
    def routes(self, batch: ForcedRoutes) -> Iterator[None]:
        """Force `batch` on the forwards of this thread inside the block.

        Raises:
            ForcingError: not entered, nested, or the routes are not of this model; at the end of
                the block if some MoE layer never ran, since then nothing was forced there.
        """
        if self._session is None:
            raise ForcingError("routes() outside of `with RouteForcing(model)`")
        if self._local.binding is not None:
            raise ForcingError("routes() inside of routes()", hint="one micro-batch at a time")
        binding = _Binding(by_layer(batch, self._blocks, self.mode))
        with self._bound(binding):
            yield
        unforced = sorted(set(self._sites) - binding.seen)
        if unforced:
            raise ForcingError(
                f"{self._sites[unforced[0]].block.name} did not run while routes were forced",
                hint="no forward inside the block, or a fused kernel replaced the MoE block",
            )

    def carry(self, function: Callable[P, R]) -> Callable[P, R]:
        """Tie a function to the routes in force now, whenever and in whichever thread it runs.

        `checkpoint(forcing.carry(layer), hidden)` is how a recompute finds its own micro-batch.
        Layers that transformers checkpoints are carried without this.
        """
        session = self._session
        binding = replace(self._local.binding or _Binding(None), carried=True)

        @functools.wraps(function, updated=())
        def carried(*args: P.args, **kwargs: P.kwargs) -> R:
            if session is None or session is not self._session:
                raise ForcingError(
                    "a checkpointed layer is recomputed after `with RouteForcing(...)` was left",
                    hint="call backward inside of it",
                )
            with self._bound(binding):
                return function(*args, **kwargs)

        return carried

    @contextmanager
    def _bound(self, binding: _Binding) -> Iterator[None]:
        local = self._local
        before, local.binding = local.binding, binding
        try:
            yield
        finally:
            local.binding = before
            if before is None:
                local.logits.clear()  # a recompute may have stopped between router and experts

    def _wrap_checkpoint(self, module: nn.Module) -> Callable[[], None]:
        original = vars(module)[_CHECKPOINT]

        def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return original(self.carry(function), *args, **kwargs)

        def undo() -> None:
            # checkpointing may have been switched anew meanwhile
            if vars(module).get(_CHECKPOINT) is checkpoint:
                setattr(module, _CHECKPOINT, original)

        setattr(module, _CHECKPOINT, checkpoint)
        return undo

    def _current(self, site: _Site) -> tuple[_Binding | None, bool]:
        """The binding that holds for a block now, and whether this is a recompute."""
        binding = self._local.binding
        recompute = torch._C._current_graph_task_id() != -1
        if recompute and (binding is None or not binding.carried):
            raise ForcingError(
                f"{site.block.name} runs inside a backward and its micro-batch is not known",
                hint="enable gradient checkpointing before `with RouteForcing(...)`; wrap what you "
                "checkpoint yourself by `forcing.carry`",
            )
        return binding, recompute

    def _keep(self, site: _Site, _module: nn.Module, _args: Any, output: Any) -> None:
        logits = output[0] if isinstance(output, tuple) else output
        self._local.logits[site.block.layer] = logits.reshape(-1, logits.shape[-1])

    def _swap(
        self, site: _Site, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        binding, recompute = self._current(site)
        block = site.block
        forced = None if binding is None or binding.layers is None else binding.layers[block.layer]
        capture = None if recompute else self._capture
        kept = self._local.logits.pop(block.layer, None)
        if forced is None and capture is None:
            return None
        found = _arguments(site, args, kwargs, kept)
        if found is None:
            if forced is None:
                return None  # a live forward of a model that could not be forced
            raise ForcingError(
                f"{block.name}: no router logits [rows, {block.num_experts}] followed by "
                f"experts(hidden, ids [rows, {block.k}], weights)",
                hint="this model or version of transformers is not supported",
            )
        logits, ids, weights = found
        if not site.checked:
            _check(site, logits, ids, weights)
        used_ids, used_weights = ids, weights
        if forced is not None and binding is not None:
            used_ids, used_weights = _force(site, forced, logits, ids, weights)
            binding.seen.add(block.layer)
        if capture is not None:
            with torch.no_grad():
                scores = site.recipe.scores(logits.detach()) if site.scores_hold else None
                lead = None if scores is None else margin(scores, ids.to(torch.int64))
            capture(BlockChoice(block.layer, ids, used_ids, used_weights.detach(), lead))
        return None if forced is None else _replaced(site, args, kwargs, used_ids, used_weights)


def self_test(model: nn.Module, inputs: Mapping[str, Any], *, mode: Mode = "ids") -> dict[str, Any]:
    """Force a run's own routes on it: its logits must not change in any bit.

    Args:
        model: in the state in which it will be forced.
        inputs: keyword arguments of one forward.
        mode: the mode that will be used.

    Returns:
        `blocks` and `rows` that were forced and `bitwise`: True.

    Raises:
        ForcingError: some bit changed, or a block's recipe does not reproduce its weights.
    """
    own: list[BlockChoice] = []
    with torch.no_grad():
        with RouteForcing(model, mode, capture=lambda choice: own.append(_copied(choice))):
            live = model(**inputs).logits
        if not own:
            raise ForcingError(
                f"self-test: no MoE block of {type(model).__name__} could be seen",
                hint="this model or version of transformers is not supported",
            )
        ids = torch.stack([choice.used_ids for choice in own], 1)
        routes = ForcedRoutes(
            layers=tuple(choice.layer for choice in own),
            ids=ids,
            valid=torch.ones(ids.shape[:2], dtype=torch.bool),
            weights=torch.stack([choice.used_weights for choice in own], 1),
        )
        with RouteForcing(model, mode) as forcing, forcing.routes(routes):
            forced = model(**inputs).logits
        if not same_bits(live, forced):
            again = model(**inputs).logits
            if not same_bits(live, again):
                raise ForcingError(
                    "self-test: two live forwards of the same batch differ, so forcing cannot be "
                    "verified",
                    hint="dropout, or kernels that are not deterministic on this device",
                )
            worst = (live.float() - forced.float()).abs().max()
            raise ForcingError(
                f"self-test: forcing the model's own routes changed its logits by up to "
                f"{float(worst):.3g}",
                hint="this model cannot be forced faithfully",
            )
    return {"blocks": len(own), "rows": int(ids.shape[0]), "bitwise": True}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality of dtype, shape and every bit, NaN included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.detach().contiguous().view(bits), b.detach().contiguous().view(bits))


def _site(block: MoeBlock) -> _Site:
    names = list(inspect.signature(block.experts.forward).parameters)
    return _Site(block, recipe_for(block), (*names, "", "")[1:3])


def _arguments(
    site: _Site, args: tuple[Any, ...], kwargs: dict[str, Any], logits: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Router logits, ids and weights; None if the block is not built as we know it."""
    ids, weights = (
        args[place] if len(args) > place else kwargs.get(name)
        for place, name in enumerate(site.parameters, 1)
    )
    if not isinstance(ids, torch.Tensor) or not isinstance(weights, torch.Tensor):
        return None
    if logits is None or ids.is_floating_point() or not weights.is_floating_point():
        return None
    rows, block = len(ids), site.block
    expected = (rows, block.num_experts), (rows, block.k), (rows, block.k)
    return (logits, ids, weights) if (logits.shape, ids.shape, weights.shape) == expected else None


def _replaced(
    site: _Site,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    positional, named = list(args), dict(kwargs)
    for place, (name, value) in enumerate(zip(site.parameters, (ids, weights), strict=True), 1):
        if len(args) > place:
            positional[place] = value
        else:
            named[name] = value
    return tuple(positional), named


def _check(site: _Site, logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    # without gradients: a recompute must save as many tensors as the forward did
    with torch.no_grad():
        own = ids.to(torch.int64)
        recomputed = site.recipe.weights(logits.detach(), own).to(weights.dtype)
        site.weights_hold = same_bits(recomputed, weights)
        scores = site.recipe.scores(logits.detach())
        best = torch.topk(scores, site.block.k, dim=-1).values
        site.scores_hold = same_bits(
            scores.gather(-1, own).sort(dim=-1, descending=True).values, best
        )
    site.checked = True


def _force(
    site: _Site,
    forced: ForcedLayer,
    logits: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    if not site.weights_hold:
        raise ForcingError(
            f"{site.block.name}: {site.recipe.name}, applied to the block's own choice, does not "
            "give its own combine weights",
            hint="this router is not one that can be forced",
        )
    if len(forced.ids) != len(ids):
        raise ForcingError(
            f"{site.block.name}: routes of {len(forced.ids)} rows forced on a forward of "
            f"{len(ids)} rows",
            hint="lay the routes out as the input is, padding included",
        )
    valid = forced.valid.unsqueeze(-1)
    used = torch.where(valid, forced.ids.to(ids.dtype), ids)
    if forced.weights is not None:
        return used, torch.where(valid, forced.weights.to(weights.dtype), weights)
    return used, site.recipe.weights(logits, used.to(torch.int64)).to(weights.dtype)


def _copied(choice: BlockChoice) -> BlockChoice:
    return replace(
        choice,
        used_ids=choice.used_ids.to("cpu", copy=True),
        used_weights=choice.used_weights.float().to("cpu", copy=True),
    )
