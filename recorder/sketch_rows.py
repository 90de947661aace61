"""Sketches of the layer outputs of a block of one `generate()` call; runs in the writer thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rolltape.recorder.blocks import Block, Call, LayerPiece, host_array
from rolltape.recorder.sketch import sketch
from rolltape.store import TapeWriter, codecs


def write_sketches(writer: TapeWriter, call: Call, block: Block, counts: np.ndarray) -> None:
    """A row of `activations` per (site, run of columns, batch row).

    Args:
        writer: of the tape.
        call: the call.
        block: its steps.
        counts: [rows], how many steps of the block are each row's own.
    """
    rows: list[int] = []
    cells: list[dict[str, Any]] = []
    for run in _runs(block) if call.sketched_rows else ():
        first = run[0]
        widths = [piece.hidden.shape[1] for piece in run]
        values = np.concatenate(
            [host_array(piece.hidden)[: call.sketched_rows] for piece in run], axis=1
        ).astype(np.float32, copy=False)
        for b in range(call.sketched_rows):
            skip = max(0, int(call.pad_left[b]) - first.column)
            own = (w for p, w in zip(run, widths, strict=True) if p.step < counts[b])
            n = sum(own) - skip
            if n <= 0:
                continue
            rows.append(b)
            cells.append(
                {
                    "start": first.column + skip - int(call.pad_left[b]),
                    "n": n,
                    "site": first.site,
                    "dtype": str(first.hidden.dtype).removeprefix("torch."),
                    "width": values.shape[-1],
                    "encoding": codecs.SKETCH,
                    "data": codecs.encode_sketch(*sketch(values[b, skip : skip + n])),
                }
            )
    if rows:
        columns = {name: [cell[name] for cell in cells] for name in cells[0]}
        writer.append("activations", {**call.keys(rows), **columns})


def _runs(block: Block) -> Iterator[list[LayerPiece]]:
    """Pieces of a site whose columns follow each other."""
    runs: dict[str, list[LayerPiece]] = {}
    for piece in block.layers:
        run = runs.get(piece.site)
        if run and run[-1].column + run[-1].hidden.shape[1] == piece.column:
            run.append(piece)
            continue
        if run:
            yield run
        runs[piece.site] = [piece]
    yield from runs.values()
