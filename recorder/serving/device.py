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
            self._slab = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
            self._used = 0
        room = self._slab[self._used : self._used + nbytes]
        aligned = -(-nbytes // 64) * 64
        self.taken += min(aligned, len(self._slab) - self._used)
        self._used += aligned
        return room


class Outlet:
    """Copies device tensors to the host on a stream of its own.

    Args:
        device: where they are; on a CPU they are only cloned.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._slabs = Slabs()

    @property
    def taken(self) -> int:
        """Bytes of host memory that the last `send` took; 0 for tensors with memory of their own.

        It may be more than its tensors: several of one storage come with all of that storage.
        """
        return self._slabs.taken

    def send(self, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Any]:
        """Start the copies.

        Args:
            tensors: nobody may write to them afterwards.

        Returns:
            Host tensors and an event to wait for before reading them, None if they are there.
        """
        self._slabs.taken = 0
        if self._stream is None:
            return {name: tensor.detach().clone() for name, tensor in tensors.items()}, None
        groups: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            groups.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
        out: dict[str, torch.Tensor] = {}
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for names in groups.values():
                out |= self._copied({name: tensors[name] for name in names}, self._stream)
            done = torch.cuda.Event()
            done.record(self._stream)
        return out, done

    def _copied(self, tensors: Mapping[str, torch.Tensor], stream: Any) -> dict[str, torch.Tensor]:
        """Host copies of tensors of one storage: of several the storage, in one copy."""
        first = next(iter(tensors.values()))
        first.record_stream(stream)
        if len(tensors) == 1:
            host = self._slabs.room(first.nbytes).view(first.dtype).view(first.shape)
            return {name: host.copy_(first, non_blocking=True) for name in tensors}
        storage = first.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage)
        host = self._slabs.room(len(whole))
        host.copy_(whole, non_blocking=True)
        pinned, at = host.untyped_storage(), host.storage_offset()
        return {
            name: torch.empty(0, dtype=t.dtype).set_(
                pinned, at // t.element_size() + t.storage_offset(), t.shape, t.stride()
            )
            for name, t in tensors.items()
        }
