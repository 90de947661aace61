"""Bitmaps of kept ids become lists exactly, and never all of them at once."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltape.recorder.bitmaps import IDS_AT_A_TIME, pieces, set_ids, set_sizes

torch = pytest.importorskip("torch")

from rolltape.recorder.blocks import Block, Call  # noqa: E402
from rolltape.recorder.generation import block_job  # noqa: E402
from rolltape.recorder.sampling import Sampling  # noqa: E402
from rolltape.store import TapeWriter, create_tape  # noqa: E402
from rolltape.store import open as open_tape  # noqa: E402
from rolltape.store.kept import decode_kept  # noqa: E402
from rolltape.store.schema import SUPPORT_EXPLICIT, SUPPORT_FULL  # noqa: E402


@given(
    st.integers(1, 70), st.integers(1, 5), st.sampled_from([0.0, 0.05, 0.5, 1.0]), st.integers(0)
)
def test_ids_and_sizes_are_those_of_the_bits(vocab: int, cells: int, share: float, seed: int):
    kept = np.random.default_rng(seed).random((cells, 3, vocab)) < share
    packed = np.packbits(kept, axis=-1, bitorder="little")
    np.testing.assert_array_equal(set_sizes(packed), kept.sum(-1).T)
    for row in range(3):
        ids = set_ids(packed[:, row])
        np.testing.assert_array_equal(ids, np.nonzero(kept[:, row])[1])
        assert ids.dtype == np.uint32


def test_an_older_numpy_counts_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = np.random.default_rng(0).integers(0, 256, (4, 5, 33), dtype=np.uint8)
    want = set_sizes(packed)
    monkeypatch.delattr(np, "bitwise_count", raising=False)
    np.testing.assert_array_equal(set_sizes(packed), want)
    np.testing.assert_array_equal(want, np.unpackbits(packed, axis=-1).sum(-1).T)


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=1, max_size=5),
    st.integers(1, 30),
    st.data(),
)
def test_pieces_cover_every_step_once_in_order_and_hold_no_more_than_the_limit(
    rows: list[list[int]], limit: int, data: Any
):
    sizes = np.array(rows, np.int64)
    counts = np.array([data.draw(st.integers(0, 4)) for _ in rows])
    found = list(pieces(sizes, counts, limit=limit))
    spans = [span for piece in found for span in piece]
    covered = [(row, step) for row, first, stop in spans for step in range(first, stop)]
    assert covered == [(row, step) for row, count in enumerate(counts) for step in range(count)]
    for piece in found:
        held = np.concatenate([sizes[row, first:stop] for row, first, stop in piece])
        assert len(held) and (held.sum() <= limit or (held > 0).sum() == 1)


def test_a_block_of_large_sets_takes_bounded_memory_and_loses_nothing(tmp_path: Path) -> None:
    rows, steps, vocab, kept = 3, 40, 150_000, 100_000
    rng = np.random.default_rng(0)
    bits = np.zeros((steps, rows, vocab), bool)
    first = rng.integers(0, vocab - kept, (steps, rows))
    for step, row in np.ndindex(steps, rows):
        bits[step, row, first[step, row] : first[step, row] + kept] = True
    bits[5, 1] = True  # everything was kept
    packed = np.packbits(bits, axis=-1, bitorder="little")
    del bits
    call = Call(
        engine="e" * 32,
        number=0,
        prompts=np.zeros((rows, 2), np.int64),
        pad_left=np.zeros(rows, np.int64),
        samples=1,
        sampling=Sampling(False, 1.0, (), ("top_k=100000",), 0, {}, (), None),
        layers=(),
        k=0,
        num_experts=0,
        weight_version=0,
        kept_rows=0,
        cached=0,
        route_gap="not-captured",
        cache=None,
        attention=None,
        sdpa="math",
        threads=1,
    )
    flat = torch.zeros(steps, rows)
    alive = torch.ones(steps, rows, dtype=torch.bool)
    alive[30:, 2] = False  # the last row ended before
    block = Block(
        first=0,
        small={
            "token": flat.long(),
            "raw": flat,
            "scaled": flat,
            "processed": flat,
            "support": torch.from_numpy(packed),
            "alive": alive,
            "done": ~alive,
        },
        forwards=[[] for _ in range(steps)],
        routes=[],
        layers=[],
        alive=alive[-1],
        vocab=vocab,
        finish=None,
        closing=True,
        ready=None,
    )
    largest = 0

    class Watched(TapeWriter):
        def append(self, table: str, columns: Any) -> None:
            nonlocal largest
            if table == "supports":
                largest = max(largest, int(columns["counts"].values.to_numpy().sum()))
            super().append(table, columns)

    create_tape(tmp_path / "a", role="rollout")
    job = block_job(call, block)
    with Watched(tmp_path / "a") as writer:
        tracemalloc.start()
        try:
            job(writer)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert 0 < largest <= IDS_AT_A_TIME
    assert peak < 64 << 20

    table = open_tape(tmp_path / "a").table("supports")
    cells = [(step, row) for row in range(rows) for step in range(40 if row < 2 else 30)]
    want = [first[cell] + np.arange(kept) for cell in cells if cell != (5, 1)]
    counts, state = (
        table.column(name).combine_chunks().flatten().to_numpy() for name in ("counts", "state")
    )
    assert set(table.column("encoding").to_pylist()) == {"kept"}  # as lists they would be large
    ids = np.concatenate(
        [
            decode_kept(row["data"], np.array(row["counts"], np.int64), field="data")
            for row in table.select(["data", "counts"]).to_pylist()
        ]
    )
    np.testing.assert_array_equal(ids, np.concatenate(want))
    assert counts.tolist() == [kept if cell != (5, 1) else 0 for cell in cells]
    assert [SUPPORT_EXPLICIT if count else SUPPORT_FULL for count in counts] == state.tolist()
    covered = [
        (start - 2 + i, int(request.split("-")[1]))
        for request, start, n in zip(
            *(table.column(name).to_pylist() for name in ("request", "start", "n")), strict=True
        )
        for i in range(n)
    ]
    assert covered == cells
