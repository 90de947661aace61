"""What the hooks of one `generate()` call keep, and how a block of it is stacked.

Words used here: a *step* is one sampling step i = 0, 1, ...; a *column* is an index into the padded
batch; row b's position is column - pad_left[b]. The forwards of step i end at column S + i - 1,
where S is the padded prompt width, and token i of a row stands at column S + i.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rolltape.recorder.sampling import Sampling
from rolltape.store.keys import Key

if TYPE_CHECKING:
    import torch


@dataclass
class Forward:
    """One forward of the model: `columns` tokens for every row of the batch.

    `routes` maps the index of a MoE block to (ids, weights), each [rows * columns, k]; `layers`
    maps a site to hidden states [kept rows, columns, width].
    """

    step: int
    t_ns: int
    columns: int
    experts: str | None
    routes: dict[int, tuple[torch.Tensor, torch.Tensor]]
    layers: dict[str, torch.Tensor]


@dataclass
class StepData:
    """One sampling step; tensors [rows], `support` a bitmap [rows, ceil(V / 8)].

    `top_ids` and `top_logprobs` are [rows, k], `tail` is [rows]: see `rolltape.recorder.top`.
    """

    forwards: list[Forward]
    token: torch.Tensor
    raw: torch.Tensor | None
    scaled: torch.Tensor | None
    processed: torch.Tensor | None
    support: torch.Tensor | None
    alive: torch.Tensor  # before this step's token
    done: torch.Tensor  # the stopping criteria's answer after it
    top_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None
    tail: torch.Tensor | None = None


@dataclass(frozen=True)
class RoutePiece:
    """Routes of consecutive forwards of one width.

    Args:
        ids: [forwards, layers, rows * columns, k].
        weights: same shape.
        indexes: which MoE blocks they are of.
        column: first column of the first forward.
        columns: columns of each forward.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    indexes: tuple[int, ...]
    column: int
    columns: int


@dataclass(frozen=True)
class LayerPiece:
    """Output of one site in one forward: `hidden` is [rows, columns, width] of the first rows."""

    site: str
    hidden: torch.Tensor
    column: int
    step: int


@dataclass(frozen=True)
class Block:
    """Consecutive steps of one call, stacked; on the host, or on their way there.

    Args:
        first: number of the first step.
        small: tensors of `StepData` by name, each [steps, rows, ...]; absent ones were not kept.
        forwards: per step (step number, time, columns, experts implementation) of its forwards.
        routes: in column order.
        layers: in column order.
        alive: rows that had not ended after the last step; None before the first one.
        vocab: width of the logits.
        finish: why rows that have not ended do end with this block; None: they ran to the end.
        closing: whether this is the last block of the call.
        ready: something with `synchronize()` to wait for before reading, or None.
    """

    first: int
    small: dict[str, torch.Tensor]
    forwards: list[list[tuple[int, int, int, str | None]]]
    routes: list[RoutePiece]
    layers: list[LayerPiece]
    alive: torch.Tensor | None
    vocab: int
    finish: str | None
    closing: bool
    ready: Any

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.forwards)


_SMALL = tuple(f.name for f in fields(StepData) if f.name != "forwards")


def stack_block(
    call: Call,
    first: int,
    steps: list[StepData],
    *,
    alive: torch.Tensor | None,
    vocab: int,
    finish: str | None,
    closing: bool,
) -> Block:
    """Stack what the hooks kept: thousands of small tensors become a handful.

    On the device this is one kernel and one copy each; on the host it saves the writer thread
    from touching them one by one under the interpreter lock.
    """
    import torch

    small = {
        name: torch.stack([getattr(step, name) for step in steps])
        for name in _SMALL
        if steps and all(getattr(step, name) is not None for step in steps)
    }
    runs: list[tuple[int, list[Forward]]] = []
    layers: list[LayerPiece] = []
    for i, step in enumerate(steps):
        # without a cache every step starts over
        column = call.begin(first + i, [f.columns for f in step.forwards])
        for forward in step.forwards:
            for site, hidden in forward.layers.items():
                layers.append(LayerPiece(site, hidden, column, i))
            if (
                runs
                and runs[-1][1][-1].columns == forward.columns == 1
                and (runs[-1][1][-1].routes.keys() == forward.routes.keys())
            ):
                runs[-1][1].append(forward)
            else:
                runs.append((column, [forward]))
            column += forward.columns
    routes = [_route_piece(begin, run) for begin, run in runs if run[0].routes]
    forwards = [[(f.step, f.t_ns, f.columns, f.experts) for f in s.forwards] for s in steps]
    return Block(first, small, forwards, routes, layers, alive, vocab, finish, closing, ready=None)


def _route_piece(column: int, run: list[Forward]) -> RoutePiece:
    import torch

    pairs = [pair for forward in run for _, pair in sorted(forward.routes.items())]
    device = pairs[0][0].device  # the layers of a model may lie on several
    ids, weights = (torch.stack([pair[half].to(device) for pair in pairs]) for half in (0, 1))
    return RoutePiece(
        ids=ids.unflatten(0, (len(run), -1)),
        weights=weights.unflatten(0, (len(run), -1)),
        indexes=tuple(sorted(run[0].routes)),
        column=column,
        columns=run[0].columns,
    )


def to_host(block: Block) -> Block:
    """Start copying a block to the host; `ready` of the result is what to wait for."""
    import torch

    held = [
        *block.small.values(),
        *(p.ids for p in block.routes),
        *(p.hidden for p in block.layers),
    ]
    if block.alive is not None:  # all that a closing block may hold
        held.append(block.alive)
    if all(tensor.device.type == "cpu" for tensor in held):
        return block
    events = []

    def move(tensor: torch.Tensor) -> torch.Tensor:
        narrow = tensor.to(torch.int32) if tensor.dtype == torch.int64 else tensor
        if tensor.device.type != "cuda":
            return narrow.to("cpu")
        host = torch.empty(narrow.shape, dtype=narrow.dtype, pin_memory=True)
        host.copy_(narrow, non_blocking=True)
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(tensor.device))
        events.append(event)
        return host

    return replace(
        block,
        small={name: move(t) for name, t in block.small.items()},
        routes=[replace(p, ids=move(p.ids), weights=move(p.weights)) for p in block.routes],
        layers=[replace(p, hidden=move(p.hidden)) for p in block.layers],
        alive=None if block.alive is None else move(block.alive),
        ready=_All(events),
    )


class _All:
    """Waits for several events."""

    def __init__(self, events: list[Any]) -> None:
        self._events = events

    def synchronize(self) -> None:
        for event in self._events:
            event.synchronize()


@dataclass
class Call:
    """One `generate()` call. The fields after `wanted` are kept up by the writer thread.

    Args:
        prompts: token ids [rows, S], left padded.
        pad_left: padding columns of each row.
        samples: rows per prompt.
        layers: model layer number of each MoE block; empty when routes are not recorded.
        kept_rows: rows whose layer outputs are kept.
        sketched_rows: rows of whose layer outputs sketches are kept.
        cached: columns that the KV cache held already.
        route_gap: reason given where a MoE block showed no route.
        wanted: whether each row is recorded; by default all are.
        layout: what else a call needs to be laid out again, see `rolltape.recorder.layout`.
        origins: per row the key of the sequence that it replays.
    """

    engine: str
    number: int
    prompts: np.ndarray
    pad_left: np.ndarray
    samples: int
    sampling: Sampling
    layers: tuple[int, ...]
    k: int
    num_experts: int
    weight_version: int
    kept_rows: int
    cached: int
    route_gap: str
    cache: str | None
    attention: str | None
    sdpa: str
    threads: int
    wanted: np.ndarray | None = None
    sketched_rows: int = 0
    layout: dict[str, Any] = field(default_factory=dict)
    origins: tuple[str, ...] | None = None
    seen_columns: int = field(init=False)
    next_step: int = 0
    generated: list[np.ndarray] = field(default_factory=list)
    closed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.seen_columns = self.cached
        if self.wanted is not None:  # no end of theirs is written
            self.closed.update(np.flatnonzero(~self.wanted).tolist())

    @property
    def recorded(self) -> list[int]:
        """Rows that are recorded."""
        if self.wanted is None:
            return list(range(self.rows))
        return [int(row) for row in np.flatnonzero(self.wanted)]

    @property
    def rows(self) -> int:
        """Batch rows."""
        return len(self.prompts)

    @property
    def width(self) -> int:
        """Padded prompt width S."""
        return int(self.prompts.shape[1])

    def begin(self, step: int, columns: Iterable[int]) -> int:
        """First column of a step's forwards, from the columns of each."""
        return self.width + step - sum(columns)

    def prompt_len(self, row: int) -> int:
        """Prompt tokens of a row."""
        return self.width - int(self.pad_left[row])

    def settings(self, row: int) -> dict[str, Any]:
        """Generation settings of a row, and how it is laid out."""
        padding = np.unique(pads := self.prompts[row, : self.pad_left[row]]).tolist()
        one = padding[0] if len(padding) == 1 else pads.tolist() or None
        return {**self.sampling.settings, "layout": {**self.layout, "prompt_pad": one}}

    def request(self, row: int) -> str:
        """Request id: call and prompt number."""
        return f"{self.number}-{row // self.samples}"

    def key(self, row: int) -> dict[str, Any]:
        """Key columns of a row."""
        return {
            "engine": self.engine,
            "request": self.request(row),
            "sample": row % self.samples,
            "pass": 0,
        }

    def all_keys(self) -> list[Key]:
        """Keys of all rows, in batch order."""
        return [Key(self.engine, self.request(row), row % self.samples) for row in range(self.rows)]

    def keys(self, rows: list[int]) -> dict[str, list[Any]]:
        """Key columns of several rows."""
        keys = [self.key(row) for row in rows]
        return {
            name: [key[name] for key in keys] for name in ("engine", "request", "sample", "pass")
        }


def host_array(tensor: torch.Tensor) -> np.ndarray:
    """numpy view of a CPU tensor; bfloat16 becomes float32, exactly, without torch's threads."""
    if str(tensor.dtype) == "torch.bfloat16":
        import torch

        bits = tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
        return (bits.astype(np.uint32) << 16).view(np.float32)
    array: np.ndarray = tensor.numpy()
    return array
