"""Where in a module tree the tensor of a site passes by, and how its rows are read and replaced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

Port = Literal["output", "sum", "input", "attention"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """One place of a module tree.

    Args:
        module: path of the module.
        port: `output` is what its forward returns; `sum` the sum of the first two tensors that it
            returns (an engine that carries the residual beside the hidden state); `input` a
            positional argument; `attention` an argument of the attention function that
            transformers calls for it, [B, heads, S, head size].
        index: which element of a returned tuple, or which argument.
        dims: trailing dimensions that make up the width of a row.
        part: columns [start, stop) of the row; None is all of it. The names of attributes of the
            module's parent, added up, until `resolve` made numbers of them.
        split: the columns lie spread over the ranks of tensor parallelism, in their order; else
            every rank holds the whole row.
        copies: neighbouring ranks that hold the same columns of what is split; the name of an
            attribute of the module's parent until `resolve` made a number of it.
        paired: trailing columns of each head in which the two halves of a rotation alternate; rows
            have the first halves in front of the second ones, as transformers rotates. A name
            until `resolve`, like `copies`.
    """

    module: str
    port: Port = "output"
    index: int = 0
    dims: int = 1
    part: tuple[Any, Any] | None = None
    split: bool = False
    copies: Any = 1
    paired: Any = 0

    def resolve(self, path: str, parent: Any) -> Place:
        """The same place at its full path, with numbers for the names of attributes."""

        def number(name: Any) -> int:
            return int(attrgetter(name)(parent) if isinstance(name, str) else name)

        part = self.part
        if part is not None:
            part = (sum(map(number, part[0])), sum(map(number, part[1])))
        copies, paired = number(self.copies), number(self.paired)
        return replace(self, module=path, part=part, copies=copies, paired=paired)

    def rows(self, value: torch.Tensor) -> torch.Tensor:
        """Rows [R, width] of the tensor that passes by; a view where that is possible."""
        if self.port == "attention":
            value = value.transpose(1, 2)
        if self.paired:
            value = _parted(value, self.paired)
        flat = value.reshape(-1, prod(value.shape[value.dim() - self.dims :]))
        return flat if self.part is None else flat[:, slice(*self.part)]

    def restored(self, value: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """A tensor like `value`, strides too, whose rows are `rows`.

        A kernel may be chosen by the strides: other ones would change more than the values.
        """
        if self.part is not None:
            whole = value.reshape(-1, prod(value.shape[value.dim() - self.dims :])).clone()
            whole[:, slice(*self.part)] = rows
            rows = whole
        if self.paired:
            rows = _alternating(rows.reshape(value.shape), self.paired)
        new = value.detach().clone()  # keeps the strides of a dense tensor
        if self.port == "attention":
            batch, heads, columns, size = value.shape
            return new.copy_(rows.reshape(batch, columns, heads, size).transpose(1, 2))
        return new.copy_(rows.reshape(value.shape))


def _parted(value: torch.Tensor, n: int) -> torch.Tensor:
    """The even ones of the last n columns, then the odd ones."""
    import torch

    last = value[..., -n:]
    return torch.cat([value[..., :-n], last[..., ::2], last[..., 1::2]], -1)


def _alternating(value: torch.Tensor, n: int) -> torch.Tensor:
    """What `_parted` was made of."""
    new = value.clone()
    new[..., value.shape[-1] - n :: 2] = value[..., -n : -n // 2]
    new[..., value.shape[-1] - n + 1 :: 2] = value[..., -n // 2 :]
    return new


@dataclass(frozen=True, kw_only=True)
class Family:
    """The sites of the models of one family in one engine, in the order in which they run.

    Args:
        types: `model_type` of the configurations that it is for.
        before: sites before the first layer; paths from the causal model.
        layers: path of the list of layers.
        layer: sites of a layer without `layers.N.`; paths from the layer. A tuple holds
            alternatives, the first whose module exists counts; a site with none is left out.
        after: sites behind the last layer.
        checked: whether the map was compared with the other engine in FP32, or why not.
    """

    types: tuple[str, ...]
    layer: Mapping[str, Place | tuple[Place, ...]]
    before: Mapping[str, Place] = field(
        default_factory=lambda: {"embed": Place(module="model.embed_tokens")}
    )
    layers: str = "model.layers"
    after: Mapping[str, Place] = field(
        default_factory=lambda: {
            "norm": Place(module="model.norm"),
            "logits": Place(module="lm_head"),
        }
    )
    checked: str = ""


def output(module: str, *, dims: int = 1) -> Place:
    """What a module returns, or the first tensor of it."""
    return Place(module=module, dims=dims)


def into(module: str, index: int = 0) -> Place:
    """A positional argument of a module."""
    return Place(module=module, port="input", index=index)


def attention(module: str, index: int) -> Place:
    """Query (0) or key (1) of the attention function that transformers calls for a module."""
    return Place(module=module, port="attention", index=index, dims=2)


def columns(module: str, start: tuple[str, ...], stop: tuple[str, ...]) -> Place:
    """Columns of a fused projection; both ends are sums of attributes of the module's parent."""
    return Place(module=module, part=(start, stop))


def sharded(place: Place, copies: str | int = 1) -> Place:
    """The same place, its columns spread over the ranks of tensor parallelism."""
    return replace(place, split=True, copies=copies)
