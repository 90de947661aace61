"""Blocks of steps on their way to the process that writes them.

The interpreter of an engine is the bottleneck of its host side, so the arrays of a block are never
touched here: they leave in one call, from where the device put them, and arrive in one buffer.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rolltape.recorder.serving.batch import Life, Rows, Step, Table
from rolltape.recorder.serving.scribe import Scribe
from rolltape.store import TapeWriter

_ROWS = ("life", "start", "n", "drafted", "samples", "prompt", "seen", "cached")
#: The kernel takes no more pieces in one call.
_MOST_PIECES = 1000
_SIZES = struct.Struct("<QQ")


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A block of steps as few objects; see `pack`."""

    steps: list[Step]
    rows: dict[str, np.ndarray]
    blocks: list[tuple[int, int, list[int]]]
    sizes: list[int]


def pack(steps: Sequence[Step]) -> Packed:
    """Steps whose tensors are there, as something that is cheap to pickle.

    Host tensors become numpy arrays over the same memory. The small arrays of all steps are joined
    by name: pickling takes its time by the object, not by the byte.
    """
    none = _no_rows()
    return Packed(
        steps=[
            replace(
                s,
                rows=none,
                ready=None,
                values={n: v.numpy() for n, v in s.values.items()},
                table=_bare(s.table),
            )
            for s in steps
        ],
        rows={name: np.concatenate([getattr(s.rows, name) for s in steps]) for name in _ROWS},
        blocks=[(i, row, table) for i, s in enumerate(steps) for row, table in s.rows.blocks],
        sizes=[len(s.rows) for s in steps],
    )


def unpack(packed: Packed) -> list[Step]:
    """Inverse of `pack`; values stay numpy arrays."""
    edges = np.cumsum(packed.sizes)[:-1]
    parts = {name: np.split(values, edges) for name, values in packed.rows.items()}
    blocks: dict[int, list[tuple[int, list[int]]]] = {}
    for i, row, table in packed.blocks:
        blocks.setdefault(i, []).append((row, table))
    return [
        replace(
            step,
            rows=Rows(**{name: parts[name][i] for name in _ROWS}, blocks=tuple(blocks.get(i, ()))),
            values=_values(step),
            table=None,
        )
        for i, step in enumerate(packed.steps)
    ]


def _values(step: Step) -> dict[str, Any]:
    values = dict(step.values) if step.table is None else {**step.table.arrays(), **step.values}
    if step.cut is not None:
        if "raw" in values:
            values.setdefault("scaled", values["raw"])
        if "scaled" in values and not step.cut:
            values.setdefault("processed", values["scaled"])
    return values


def _bare(table: Table | None) -> Table | None:
    return None if table is None else Table(data=table.data.numpy(), layout=table.layout)


def _no_rows() -> Rows:
    none: Any = np.zeros(0, np.int64)
    return Rows(**dict.fromkeys(_ROWS, none))


@dataclass(frozen=True, kw_only=True)
class Block:
    """What the process that writes the rows is told at a time.

    Args:
        steps: what ran; None if nothing did.
        new: lives that it does not know yet.
        ended: indices of lives that no later step speaks of.
        lost: whether steps before these are missing: then nobody knows who filled a KV block.
    """

    steps: Packed | None
    new: list[Life]
    ended: list[int]
    lost: bool = False

    def write(self, writer: TapeWriter, scribe: Scribe) -> None:
        """Write its rows; what is known of lives is brought up to date even if that fails."""
        scribe.meet(self.new)
        if self.lost:
            scribe.lose()
        try:
            if self.steps is not None:
                scribe.write(writer, unpack(self.steps))
        finally:
            scribe.forget(self.ended)


def travelling(lives: Sequence[Life]) -> list[Life]:
    """Lives as they are sent: their KV blocks come with each step that asks for them."""
    return [replace(life, blocks=[]) for life in lives]


def readable(source: socket.socket, seconds: float) -> bool:
    """Whether something can be received, or the other side is gone, within so many seconds."""
    poll = select.poll()  # `select` takes no descriptor above 1023
    poll.register(source, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def send(to: socket.socket, message: Any) -> None:
    """Send any picklable object; arrays in it are not copied.

    Raises:
        OSError: the other side is gone.
    """
    pieces: list[pickle.PickleBuffer] = []
    body = pickle.dumps(message, protocol=5, buffer_callback=pieces.append)
    views = [piece.raw() for piece in pieces]
    sizes = np.array([view.nbytes for view in views], np.uint64).tobytes()
    _send_all(to, [_SIZES.pack(len(body), len(views)), body, sizes, *views])


def _send_all(to: socket.socket, pieces: list[Any]) -> None:
    pieces = [view for piece in pieces if len(view := memoryview(piece).cast("B"))]
    at = 0
    while at < len(pieces):
        sent = to.sendmsg(pieces[at : at + _MOST_PIECES])
        while at < len(pieces) and sent >= len(pieces[at]):
            sent -= len(pieces[at])
            at += 1
        if sent:
            pieces[at] = pieces[at][sent:]


def receive(source: socket.socket) -> Any:
    """The next object. Arrays in it may be written to.

    Raises:
        EOFError: the other side is gone.
    """
    length, count = _SIZES.unpack(_receive(source, _SIZES.size))
    body = _receive(source, length)
    sizes = np.frombuffer(_receive(source, 8 * count), np.uint64).tolist()
    # each piece starts where any dtype may
    starts = np.cumsum([0, *[-(-size // 16) * 16 for size in sizes]]).tolist()
    whole = memoryview(bytearray(starts[-1]))
    pieces = [whole[start : start + size] for start, size in zip(starts, sizes, strict=False)]
    for piece in pieces:
        _fill(source, piece)
    return pickle.loads(body, buffers=pieces)


def _receive(source: socket.socket, size: int) -> bytearray:
    found = bytearray(size)
    _fill(source, memoryview(found))
    return found


def _fill(source: socket.socket, into: memoryview) -> None:
    while len(into):
        got = source.recv_into(into)
        if not got:
            raise EOFError
        into = into[got:]
