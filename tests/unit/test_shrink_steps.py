"""Which parts of a serving engine's run are tried, smallest first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import rolltape  # noqa: E402
from rolltape.replay.shrink_steps import parts_of_run  # noqa: E402
from rolltape.store import Tape, TapeWriter, create_tape, seal  # noqa: E402

ENGINE = "e" * 32
#: step -> (request, start, n)
STEPS: dict[int, list[tuple[str, int, int]]] = {
    0: [("a", 0, 4)],
    1: [("a", 4, 1), ("b", 0, 4)],
    2: [("b", 4, 1)],
    5: [("c", 0, 4), ("d", 0, 2)],  # the engine had no work before
    6: [("c", 4, 1), ("d", 2, 2)],  # the prompt of d comes in two chunks
    7: [("c", 5, 1), ("d", 4, 1)],
    8: [("d", 5, 1), ("f", 0, 4)],
}
LENGTHS = {"a": 6, "b": 6, "c": 7, "d": 7, "f": 5}


@pytest.fixture
def tape(tmp_path: Path) -> Tape:
    root = create_tape(tmp_path / "a", role="rollout")
    with TapeWriter(root) as writer:
        whole = {"engine": ENGINE, "writer": writer.id, "role": "rollout", "adapter": "vllm"}
        writer.append("engines", {**whole, "host": "here", "pid": 1, "started_ns": 1})
        for name, length in LENGTHS.items():
            key = {"engine": ENGINE, "request": name, "sample": 0, "pass": 0}
            facts = {"prompt_len": 4, "length": length, "finish": "length", "sampling": "{}"}
            writer.append("sequences", {k: [v] for k, v in {**key, **facts}.items()})
            ids = [np.arange(length, dtype=np.uint32)]
            writer.append("tokens", {**key, "start": 0, "n": length, "ids": ids})
        for step, parts in STEPS.items():
            writer.append("steps", {"engine": ENGINE, "step": [step], "kind": "mixed", "t_ns": 1})
            for row, (request, start, n) in enumerate(parts):
                key = {"engine": ENGINE, "request": request, "sample": 0, "pass": 0}
                place = {"step": [step], "row": row, "start": start, "n": n}
                writer.append("forwards", {**key, **place, "kind": "decode"})
    seal(root)
    return rolltape.open(root)


def found(tape: Tape, step: int, sequence: str | None) -> list[dict[str, int]]:
    name = next((s.id for s in tape if s.key.request == sequence), None)
    first: dict[str, Any] = {"step": step, "sequence": name, "what": "raw", "position": 1}
    return [{key.request: n for key, n in part.items()} for part in parts_of_run(tape, first)]


def test_a_run_is_cut_behind_the_step_and_begun_where_nothing_was_under_way(tape: Tape) -> None:
    recent, before, whole = found(tape, 6, "c")
    assert recent == {"c": 6, "d": 5}  # what ran, and the token that the step drew
    assert before == {"a": 6, "b": 6, "c": 6, "d": 5}
    assert whole == LENGTHS
    assert found(tape, 5, "c")[0] == {"c": 5, "d": 4}  # the prompt of d is kept whole
    assert found(tape, 8, "f")[0] == {"c": 7, "d": 7, "f": 5}


def test_parts_that_are_the_same_are_tried_once(tape: Tape) -> None:
    assert found(tape, 1, "b") == [{"a": 6, "b": 5}, LENGTHS]


def test_a_difference_of_no_sequence_is_of_the_only_engine(tape: Tape) -> None:
    assert found(tape, 6, None) == found(tape, 6, "c")
    assert found(tape, -1, None) == []
