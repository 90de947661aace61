"""The experts that each token was sent to, seen where the routing method returns them.

A write into a buffer with a fixed address stands behind `routing_method.apply` of every MoE
layer, so CUDA graphs that are captured later contain it. Ids are logical ones: an expert-parallel
load balancer maps them to slots afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rolltape.recorder.serving.device import RouteBuffer
from rolltape.recorder.session import recording

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|$)")


@dataclass(frozen=True, kw_only=True)
class MoeLayer:
    """One MoE layer: its number with dense layers counted, and what chooses its experts."""

    layer: int
    routing: Any
    num_experts: int
    k: int


def find_moe_layers(model: Any) -> tuple[list[MoeLayer], str | None]:
    """The MoE layers of a model by number, and why they cannot be tapped, if so."""
    found: dict[int, MoeLayer] = {}
    owners: dict[int, set[int]] = {}
    for path, module in model.named_modules():
        routing = getattr(module, "routing_method", None)
        match = _LAYER.search(path)
        number: Any = getattr(module, "layer_idx", None)
        if routing is None or not hasattr(routing, "apply") or (number is None and match is None):
            continue
        layer = int(match[1]) if number is None and match is not None else int(number or 0)
        owners.setdefault(id(routing), set()).add(layer)
        k: Any = getattr(routing, "experts_per_token", None) or getattr(routing, "top_k", 0)
        experts = int(getattr(module, "num_experts", 0))
        found.setdefault(
            layer, MoeLayer(layer=layer, routing=routing, num_experts=experts, k=int(k))
        )
    layers = [found[layer] for layer in sorted(found)]
    if any(len(several) > 1 for several in owners.values()):
        return layers, "several layers share one routing method"
    if any(not layer.k or not layer.num_experts for layer in layers):
        return layers, "a routing method does not say how many experts it chooses"
    return layers, None


class RouteTap:
    """Keeps the routes of the forward that runs, in batch order.

    Args:
        model: loaded; not captured in graphs yet.
        layers: from `find_moe_layers`.
        tokens: most tokens of a forward, padding included.

    A layer may run its tokens in chunks; their rows follow each other. The offset is decided when
    Python runs, so a captured graph has it built in.
    """

    def __init__(self, model: Any, layers: list[MoeLayer], tokens: int) -> None:
        parameter = next(model.parameters())
        self.layers = layers
        self.k = max(layer.k for layer in layers)
        self.num_experts = max(layer.num_experts for layer in layers)
        self.buffer = RouteBuffer(tokens, len(layers), self.k, parameter.device)
        self._at = [0] * len(layers)
        self._undo: list[Callable[[], None]] = []
        self.overrun = False
        self._replace(model, "forward", self._around_forward(model.forward))
        for index, layer in enumerate(layers):
            self._replace(layer.routing, "apply", self._around_apply(index, layer.routing.apply))

    def take(self, tokens: int, kept: Any = None) -> torch.Tensor:
        """Routes [rows, layers, k] of a forward that has run; -1 where a layer showed none.

        Args:
            tokens: rows of the flat batch with padding.
            kept: int64 numpy array of the rows that are wanted; None for all.
        """
        taken = self.buffer.take(min(tokens, len(self.buffer.ids)))
        if kept is None:
            return taken
        return taken[torch.from_numpy(kept).to(taken.device)]

    def clear(self) -> None:
        """Forget what a forward wrote that nobody takes."""
        self.buffer.clear()

    def undo(self) -> None:
        """Take everything away again; graphs that are captured go on writing."""
        while self._undo:
            self._undo.pop()()

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        # on the instance: ModelCaller asks for `model.forward`, and hooks of the root never run
        object.__setattr__(owner, name, value)
        self._undo.append(lambda: object.__delattr__(owner, name))

    def _around_forward(self, forward: Any) -> Any:
        def tapped(*args: Any, **kwargs: Any) -> Any:
            self._at = [0] * len(self.layers)
            return forward(*args, **kwargs)

        return tapped

    def _around_apply(self, index: int, apply: Any) -> Any:
        def tapped(*args: Any, **kwargs: Any) -> Any:
            chosen = apply(*args, **kwargs)
            session = recording()
            if session is not None:
                at, self._at[index] = self._at[index], len(self.buffer.ids)
                rows = session.safely("tensorrt_llm.routes", self._write, index, at, chosen[0])
                if rows is not None:  # else the chunks behind it have no place of their own
                    self._at[index] = at + rows
            return chosen

        return tapped

    def _write(self, index: int, at: int, ids: torch.Tensor) -> int:
        rows, k = ids.shape
        end = len(self.buffer.ids)
        fits = max(min(rows, end - at), 0)
        self.overrun |= at < end and fits < rows
        # a normal tensor, so that in-place writes are legal inside and outside of inference mode
        with torch.inference_mode():
            self.buffer.ids[at : at + fits, index, :k].copy_(ids[:fits])
        return int(rows)
