"""Off the device without making it wait: buffers that graphs write into, and copies beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

#: Pinned memory is taken in pieces of this size.
SLAB_BYTES = 4 << 20


class RouteBuffer:
    """Expert ids of one step, written by hooks that a graph may hold.

    Args:
        tokens: most tokens of a step, padding included.
        layers: MoE layers.
        k: experts a token.
        device: where the model is.

    The buffer has one address for ever, so what a CUDA graph or a compiled module has captured
    goes on writing to it. Between steps it holds -1: a layer that shows no route leaves that.
    """

    def __init__(self, tokens: int, layers: int, k: int, device: torch.device) -> None:
        # a tensor made in inference mode could not be written to outside of it
        with torch.inference_mode(False):
            self.ids = torch.full((tokens, layers, k), -1, dtype=torch.int16, device=device)

    @property
    def per_token(self) -> tuple[int, int]:
        """(layers, experts of each)."""
        return int(self.ids.shape[1]), int(self.ids.shape[2])

    def hook(self, index: int) -> Callable[[torch.Tensor], None]:
        """What is called with the ids [rows, k] of one layer; no host state is asked."""
        ids = self.ids

        def write(topk_ids: torch.Tensor) -> None:
            ids[: topk_ids.shape[0], index].copy_(topk_ids[:, : ids.shape[2]])

        return write

    def clear(self) -> None:
        """Forget what was written."""
        with torch.inference_mode():
            self.ids.fill_(-1)

    def take(self, tokens: int) -> torch.Tensor:
        """The first rows [tokens, layers, k] as a copy; the buffer is empty afterwards."""
        with torch.inference_mode():
            used = self.ids[:tokens]
            taken = used.clone()
            used.fill_(-1)
        return taken

    def leave(self, tokens: int, outlet: Outlet) -> torch.Tensor:
        """The same on the host, when the outlet is done."""
        used = self.ids[:tokens]
        host = outlet.copy(used)
        used.fill_(-1)
        return host


class Slabs:
    """Host memory in large pieces, and what each piece costs those that use it.

    It is asked for in large pieces: one for each tensor costs the engine's thread more than the
    copy does. A piece lives as long as any tensor in it.

    Args:
        pinned: page-locked, for copies that nobody waits for.
    """

    def __init__(self, *, pinned: bool = True) -> None:
        self._pinned = pinned
        self._slab: torch.Tensor | None = None
        self._used = 0
        #: Bytes taken since this was last set to 0, with what stays unused behind them: tensors are
        #: let go in the order in which they came, so those that live hold at most two pieces more.
        self.taken = 0

    def room(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes], aligned for any dtype."""
        if self._slab is None or self._used + nbytes > len(self._slab):
            size = max(nbytes, SLAB_BYTES)
            if self._slab is not None:  # nobody will use the rest of it
                self.taken += max(0, len(self._slab) - self._used)
            # a tensor made in inference mode could not be written to outside of it
            with torch.inference_mode(False):
                self._slab = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
            self._used = 0
        room = self._slab[self._used : self._used + nbytes]
        aligned = -(-nbytes // 64) * 64
        self.taken += min(aligned, len(self._slab) - self._used)
        self._used += aligned
        return room


class Outlet:
    """Copies device tensors to the host, in the stream of the engine.

    A stream of its own would let the copies run beside the next kernels, but what keeps the two in
    order costs the engine's thread more than these few microseconds of copying cost its device.

    Args:
        device: where they are; on a CPU they are only cloned.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._slabs = Slabs()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start a copy. What is written to the tensor afterwards, in that stream, is not in it."""
        if not self._cuda:
            return tensor.detach().clone()
        host = self._slabs.room(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        return host.copy_(tensor, non_blocking=True)

    def done(self) -> tuple[Any, int]:
        """Whether the copies since the last call are there.

        Returns:
            (event, nbytes): what to wait for before reading them, None if they are there; and the
            host memory that they hold, 0 for tensors with memory of their own.
        """
        held, self._slabs.taken = self._slabs.taken, 0
        if not self._cuda:
            return None, 0
        event = torch.cuda.Event()
        event.record()
        return event, held

    def send(self, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Any, int]:
        """`copy` of each, then `done`."""
        return {name: self.copy(tensor) for name, tensor in tensors.items()}, *self.done()
