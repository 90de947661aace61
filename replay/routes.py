"""Routes as a model's forward takes them and gives them: what is forced, and what was seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from rolltape.recorder.moe import MoeBlock
from rolltape.store.errors import ForcingError

Mode = Literal["ids", "ids+weights"]


@dataclass(frozen=True)
class ForcedRoutes:
    """Routes of one forward, laid out as its input is. See `rolltape.replay.batches.place_routes`.

    Args:
        layers: model layer number of each column.
        ids: expert ids, any integer dtype, [rows, L, k] or [B, S, L, k], in slot order.
        valid: bool [rows, L] or [B, S, L]; elsewhere the live choice stays (padding, the last
            token, positions that were not recorded).
        weights: combine weights, same shape as `ids`, for mode `ids+weights`.
        num_experts: experts that the ids were chosen from, if known.

    Raises:
        ForcingError: the shapes do not belong together.
    """

    layers: tuple[int, ...]
    ids: torch.Tensor
    valid: torch.Tensor
    weights: torch.Tensor | None = None
    num_experts: int | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.ids.shape)
        if len(shape) not in (3, 4) or shape[-2] != len(self.layers):
            raise ForcingError(
                f"routes of {len(self.layers)} layers have ids of shape {list(shape)}",
                hint="expected [rows, layers, k] or [batch, columns, layers, k]",
            )
        if tuple(self.valid.shape) != shape[:-1] or self.valid.dtype != torch.bool:
            raise ForcingError(
                f"routes.valid is {self.valid.dtype} {list(self.valid.shape)}",
                hint=f"expected bool {list(shape[:-1])}",
            )
        if self.weights is not None and tuple(self.weights.shape) != shape:
            raise ForcingError(
                f"routes.weights has shape {list(self.weights.shape)}, ids has {list(shape)}"
            )
        if self.ids.is_floating_point() or self.ids.dtype == torch.bool:
            raise ForcingError(f"routes.ids is {self.ids.dtype}", hint="expected integers")

    @property
    def rows(self) -> int:
        """Tokens of the forward, padding included."""
        return self.valid.shape[:-1].numel()

    @property
    def k(self) -> int:
        """Experts a token."""
        return int(self.ids.shape[-1])


@dataclass(frozen=True)
class BlockChoice:
    """What one MoE block did in one forward; handed to the `capture` callback.

    The tensors are detached but not copied: copy what is to outlive the callback.

    Args:
        layer: its layer number.
        live_ids: int64 [rows, k] that the router chose.
        used_ids: int64 [rows, k] that the experts got.
        used_weights: [rows, k] that the experts got, in the model's dtype.
        margin: float32 [rows], k-th minus (k+1)-th live choice score; None if the family's choice
            scores could not be reproduced.
    """

    layer: int
    live_ids: torch.Tensor
    used_ids: torch.Tensor
    used_weights: torch.Tensor
    margin: torch.Tensor | None


@dataclass(frozen=True)
class ForcedLayer:
    """One layer of a `ForcedRoutes`, on the device of its block.

    Args:
        ids: int32 [rows, k]; 0 where not valid.
        valid: bool [rows].
        weights: [rows, k], None in mode `ids`.
    """

    ids: torch.Tensor
    valid: torch.Tensor
    weights: torch.Tensor | None


def by_layer(
    routes: ForcedRoutes, blocks: Mapping[int, MoeBlock], mode: Mode
) -> dict[int, ForcedLayer]:
    """Split routes by layer, after proving that they are routes of these blocks.

    Raises:
        ForcingError: other layers, k or experts, or no weights in mode `ids+weights`.
    """
    if not isinstance(routes, ForcedRoutes):
        raise ForcingError(
            f"routes to force are {type(routes).__name__}, expected ForcedRoutes",
            hint="rolltape.replay.batches.place_routes lays recorded routes out as the input is",
        )
    if sorted(routes.layers) != sorted(blocks):
        raise ForcingError(
            f"the routes are of layers {list(routes.layers)}, the model's MoE layers are "
            f"{list(blocks)}",
            hint="routes of another model",
        )
    ids = routes.ids.reshape(routes.rows, len(routes.layers), routes.k)
    valid = routes.valid.reshape(routes.rows, len(routes.layers))
    weights = _weights(routes, valid) if mode == "ids+weights" else None
    # torch has no reductions for uint16
    wide = ids.to(torch.int32).masked_fill(~valid.unsqueeze(-1), 0)
    low, high = (int(wide.min()), int(wide.max())) if wide.numel() else (0, 0)
    out = {}
    for column, layer in enumerate(routes.layers):
        block = blocks[layer]
        _check_block(routes, block, low, high)
        parameter = next(block.router.parameters(), None)
        device = wide.device if parameter is None else parameter.device
        out[layer] = ForcedLayer(
            wide[:, column].to(device),
            valid[:, column].to(device),
            None if weights is None else weights[:, column].to(device),
        )
    return out


def _weights(routes: ForcedRoutes, valid: torch.Tensor) -> torch.Tensor:
    if routes.weights is None:
        raise ForcingError("mode ids+weights, but the routes have no weights", hint="mode ids")
    weights = routes.weights.reshape(*valid.shape, routes.k)
    if bool((weights.isnan().any(-1) & valid).any()):
        raise ForcingError("some of the forced routes have no recorded weights", hint="mode ids")
    return weights


def _check_block(routes: ForcedRoutes, block: MoeBlock, low: int, high: int) -> None:
    if routes.k != block.k:
        raise ForcingError(
            f"the routes have {routes.k} experts a token, {block.name} has {block.k}"
        )
    if routes.num_experts not in (None, block.num_experts):
        raise ForcingError(
            f"the routes are over {routes.num_experts} experts, {block.name} has "
            f"{block.num_experts}"
        )
    if low < 0 or high >= block.num_experts:
        raise ForcingError(
            f"the routes have expert ids {low}..{high}, {block.name} has "
            f"{block.num_experts} experts"
        )
