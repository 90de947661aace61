"""Sites inside of graphs: what buffers hold after a step belongs to the rows that the step had."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from rolltape.replay.verify.first_site import Trace, first_site  # noqa: E402
from rolltape.replay.verify.vllm_graphs import _look, uncompiled  # noqa: E402

WIDTH = 4


def traced(steps: list[list[tuple[str, int, int]]], wrong: Any = None) -> Trace:
    """A trace of rows whose values follow from name, position and site; one may be wrong."""
    trace: Trace = {}
    names = {"x-1": 1, "x-2": 2}
    for forward, spans in enumerate(steps):
        # a padded row behind, and what earlier steps left
        sites = {site: torch.full((16, WIDTH), float(forward + 9)) for site in ("a", "b", "logits")}
        at = 0
        for index, (name, start, n) in enumerate(spans):
            for position in range(start, start + n):
                for offset, site in enumerate(("a", "b")):
                    value = sum(map(ord, name)) + 50 * position + offset / 2
                    row = torch.full((WIDTH,), value)
                    if wrong == (site, name, position):
                        row[2] += 1
                    sites[site][at + position - start] = row
            sites["logits"][index] = sum(map(ord, name)) + 50 * (start + n - 1) + 0.25
            at += n
        _look(trace, SimpleNamespace(sites=sites), spans, names, forward)
    return trace


TOGETHER = [
    [("x-1", 0, 3), ("y", 0, 2), ("x-2", 0, 2)],
    [("y", 2, 1), ("x-2", 2, 1), ("x-1", 3, 1)],
]
ALONE = [[("x-1", 0, 3)], [("x-1", 3, 1)], [("x-2", 0, 2)], [("x-2", 2, 1)]]


def test_the_same_values_agree_however_the_rows_lie() -> None:
    assert first_site(traced(TOGETHER), traced(ALONE)) is None


def test_the_first_site_that_differs_is_named() -> None:
    found = first_site(traced(TOGETHER), traced(ALONE, wrong=("b", "x-2", 1)))
    assert found == {"site": "b", "sequence": "2", "position": 1, "forward": 0}
    found = first_site(traced(TOGETHER), traced(ALONE, wrong=("a", "x-1", 3)))
    assert found == {"site": "a", "sequence": "1", "position": 3, "forward": 1}


def test_only_what_is_watched_is_looked_at() -> None:
    assert {key for key, _, _ in traced(TOGETHER)} == {"1", "2"}


def test_an_engine_that_compiles_nothing_keeps_the_sizes_of_its_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    given = {"compilation_config": {"mode": 3, "cudagraph_capture_sizes": [1, 8]}}
    assert uncompiled(given)["compilation_config"] == {
        "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8],
    }  # fmt: skip
