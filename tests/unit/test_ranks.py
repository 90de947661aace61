"""Ranks that should do the same: a difference is found, with the step and the layer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolltape import store
from rolltape.recorder.serving.batch import Life, Roster, Step
from rolltape.recorder.serving.ranks import (
    Rank,
    compare_ranks,
    digest,
    digest_row,
    disagreements,
)
from rolltape.recorder.serving.scribe import Scribe
from rolltape.store.places import place_of

LAYERS = (1, 3, 4)


def steps(first: int = 0, n: int = 6) -> list[Step]:
    roster = Roster()
    lives = [roster.add(Life(name, 0, np.arange(3, dtype=np.uint32))) for name in "ab"]
    made = []
    for number in range(n):
        rng = np.random.default_rng(number)
        start, count = (0, 3) if number == 0 else (2 + number, 1)
        rows = roster.place(lives, np.full(2, start), np.full(2, count))
        values = {
            "token": rng.integers(0, 99, (2, 1)),
            "routes": rng.integers(0, 8, (2 * count, len(LAYERS), 2)).astype(np.int16),
        }
        made.append(Step(number=number, t_ns=number, rows=rows, version=0, values=values))
    return made[first:]


def events(rank: int, *blocks: list[Step]) -> list[dict[str, Any]]:
    return [digest_row("ab" * 16, Rank(rank=rank), LAYERS, block) for block in blocks]


def changed(step: Step, name: str, place: tuple[int, ...], by: int = 1) -> Step:
    values = {key: array.copy() for key, array in step.values.items()}
    values[name][place] += by
    return replace(step, values=values)


def test_ranks_that_agree_give_no_finding_however_their_blocks_are_cut() -> None:
    one, other = steps(), steps()
    found = disagreements([*events(0, one[:2], one[2:]), *events(1, other[:5], other[5:])])
    assert found == []


@pytest.mark.parametrize(("layer", "slot"), [(0, 0), (2, 1)])
def test_the_first_step_and_layer_that_differ_are_named(layer: int, slot: int) -> None:
    other = steps()
    other[3] = changed(other[3], "routes", (1, layer, slot))
    other[5] = changed(other[5], "token", (0, 0))
    ((engine, finding),) = disagreements([*events(1, other), *events(0, steps())])
    assert engine == "ab" * 16 and finding.code == "RT407"
    assert f"2 of 6 steps, first in step 3, layer {LAYERS[layer]}" in finding.message
    assert finding.detail == {
        "ranks": [0, 1],
        "step": 3,
        "layers": [LAYERS[layer]],
        "tokens": False,
        "steps": 2,
        "compared": 6,
    }


def test_a_difference_in_the_tokens_alone_is_said_to_be_one() -> None:
    other = steps()
    other[4] = changed(other[4], "token", (1, 0))
    ((_, finding),) = disagreements([*events(0, steps()), *events(1, other)])
    assert "first in step 4, the sampled tokens" in finding.message


def test_a_token_that_does_not_count_is_not_compared() -> None:
    roster = Roster()
    life = roster.add(Life("a", 0, np.arange(9, dtype=np.uint32)))
    rows = roster.place([life], np.zeros(1), np.full(1, 4))  # a chunk of its prompt
    chunk = Step(number=0, t_ns=0, rows=rows, version=0, values={"token": np.array([[7]])})
    other = changed(chunk, "token", (0, 0))
    assert disagreements([*events(0, [chunk]), *events(1, [other])]) == []


def test_ranks_without_a_common_step_are_not_a_pass() -> None:
    one = steps()
    ((_, finding),) = disagreements([*events(0, one[:2]), *events(1, one[2:])])
    assert finding.code == "RT408" and finding.detail["compared"] == 0


def test_the_end_of_a_recording_writes_what_was_found_once(tmp_path: Path) -> None:
    other = steps()
    other[2] = changed(other[2], "routes", (0, 1, 0))
    tape = store.create_tape(tmp_path / "tape", role="rollout")
    for rank, block in enumerate((steps(), other)):
        with store.TapeWriter(tape) as writer:
            for row in events(rank, block):
                writer.append("events", {**row, "writer": writer.id})
    for _ in range(2):
        compare_ranks(place_of(tape))
    found = [row for row in store.open(tape).rows("events") if row["kind"] == "finding"]
    assert [json.loads(row["detail"])["code"] for row in found] == ["RT407"]


def test_the_order_in_a_row_counts() -> None:
    a, b = digest(np.array([[1, 2, 3], [2, 1, 3]]))
    assert a != b
    assert digest(np.array([[-1, 0]])) != digest(np.array([[0, -1]]))


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_is_recorded(tmp_path: Path, rank: int) -> None:
    tape = store.create_tape(tmp_path / "tape", role="rollout")
    roster = Roster()
    life = roster.add(Life("a", 0, np.arange(3, dtype=np.uint32)))
    rows = roster.place([life], np.zeros(1), np.full(1, 3))
    values = {"token": np.array([[7]]), "routes": np.ones((3, len(LAYERS), 2), np.int16)}
    scribe = Scribe(
        engine="ab" * 16,
        layers=LAYERS,
        k=2,
        num_experts=8,
        rank=Rank(rank=rank),
        lives=roster.lives,
    )
    with store.TapeWriter(tape) as writer:
        scribe.write(writer, [Step(number=0, t_ns=0, rows=rows, version=0, values=values, vocab=9)])
    opened = store.open(tape)
    assert [row["kind"] for row in opened.rows("events")] == ["replica"]
    assert len(list(opened.rows("routes"))) == len(list(opened.rows("steps"))) == 1 - rank
