"""Ranks of a tensor-parallel group run the same steps: each leaves a digest of what it chose.

The first rank is recorded. That the others chose the same experts and drew the same tokens is not
taken for granted: an `events` row of kind `replica` a block of steps holds their digests, four
bytes a step and layer, and the end of the recording compares them.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc

from rolltape.recorder.serving.batch import Step
from rolltape.recorder.settings import Finding
from rolltape.store import TapeWriter
from rolltape.store.places import Place
from rolltape.store.tape import open_folder

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Which of several processes that do the same this one is.

    Args:
        rank: number in its group; 0 is the one that is recorded.
        stage: what tells groups of one engine apart, such as the pipeline stage.
    """

    rank: int
    stage: int = 0


def digest_row(engine: str, rank: Rank, layers: Sequence[int], steps: Sequence[Step]) -> Any:
    """An `events` row, but for `writer`.

    Args:
        engine: its uuid.
        rank: of this process.
        layers: model layer numbers of the columns of `routes`.
        steps: with numpy arrays as `values`.
    """
    numbers = np.array([step.number for step in steps], np.int64)
    rows = np.zeros((len(steps), 1 + len(layers)), np.uint32)
    for row, step in zip(rows, steps, strict=True):
        token, routes = step.values.get("token"), step.values.get("routes")
        if token is not None:
            # rows whose token does not count may hold anything
            counts = step.rows.samples.reshape(-1, *[1] * (np.ndim(token) - 1))
            row[0] = digest(np.where(counts, token, -1).reshape(1, -1))[0]
        if routes is not None and layers:
            row[1:] = digest(np.asarray(routes).transpose(1, 0, 2).reshape(len(layers), -1))
    detail = {
        "rank": rank.rank,
        "stage": rank.stage,
        "layers": list(layers),
        "steps": base64.b64encode(numbers.tobytes()).decode(),
        "digests": base64.b64encode(rows.tobytes()).decode(),
    }
    return {
        "engine": engine,
        "t_ns": steps[-1].t_ns,
        "kind": "replica",
        "detail": json.dumps(detail),
    }


def digest(values: np.ndarray) -> np.ndarray:
    """uint32 [rows] of integers [rows, n]; the order within a row counts."""
    place = np.arange(1, values.shape[1] + 1, dtype=np.uint64) * _GOLDEN
    place ^= place >> np.uint64(29)
    weights = place * np.uint64(0xBF58476D1CE4E5B9) | np.uint64(1)
    summed = (values.astype(np.int64).view(np.uint64) * weights).sum(1, dtype=np.uint64)
    top: np.ndarray = (summed >> np.uint64(32)).astype(np.uint32)
    return top


def compare_ranks(place: Place) -> None:
    """Write an event of kind `finding` for each rank that did not do what the first one did.

    Args:
        place: a tape that is not being written any more.
    """
    events = open_folder(place, skip_damaged=True).table("events")
    replicas = events.filter(pc.equal(events.column("kind"), "replica"))
    if not len(replicas):
        return
    known = set(
        events.filter(pc.equal(events.column("kind"), "finding")).column("detail").to_pylist()
    )
    found = [(e, json.dumps(f.as_detail())) for e, f in disagreements(replicas.to_pylist())]
    new = [(engine, detail) for engine, detail in found if detail not in known]
    if new:
        with TapeWriter(place) as writer:
            for engine, detail in new:
                row = {"engine": engine, "writer": writer.id, "t_ns": time.time_ns()}
                writer.append("events", {**row, "kind": "finding", "detail": detail})


def disagreements(events: Iterable[Mapping[str, Any]]) -> list[tuple[str, Finding]]:
    """(engine, finding) of each rank that did not do what the first of its group did.

    Args:
        events: rows of `events`; those of another kind are ignored.
    """
    groups: dict[tuple[str, int], dict[int, dict[int, np.ndarray]]] = {}
    layers: dict[tuple[str, int], list[int]] = {}
    for event in events:
        if event["kind"] != "replica":
            continue
        detail = json.loads(event["detail"])
        key = (event["engine"], detail["stage"])
        layers.setdefault(key, detail["layers"])
        numbers = np.frombuffer(base64.b64decode(detail["steps"]), np.int64)
        rows = np.frombuffer(base64.b64decode(detail["digests"]), np.uint32)
        known = groups.setdefault(key, {}).setdefault(detail["rank"], {})
        known.update(zip(numbers.tolist(), rows.reshape(len(numbers), -1), strict=True))
    found = []
    for key, ranks in groups.items():
        first, *others = sorted(ranks)
        for other in others:
            finding = _compared(ranks[first], ranks[other], (first, other), layers[key])
            if finding is not None:
                found.append((key[0], finding))
    return found


def _compared(
    a: dict[int, np.ndarray], b: dict[int, np.ndarray], ranks: tuple[int, int], layers: list[int]
) -> Finding | None:
    steps = sorted(a.keys() & b.keys())
    who = f"ranks {ranks[0]} and {ranks[1]}"
    if not steps:
        return Finding(
            code="RT408",
            message=f"{who} have no step in common: whether they agree is not known",
            remedy="see the gaps and hook errors of the two processes",
            detail={"ranks": list(ranks), "compared": 0},
        )
    differ = [step for step in steps if (a[step] != b[step]).any()]
    if not differ:
        return None
    columns = np.flatnonzero(a[differ[0]] != b[differ[0]]).tolist()
    where = [layers[column - 1] for column in columns if column]
    # the tokens follow from the last layer, each layer from those before it
    what = f"layer {where[0]}" if where else "the sampled tokens"
    often = f"{len(differ)} of {len(steps)} steps"
    return Finding(
        code="RT407",
        message=f"{who} disagree in {often}, first in step {differ[0]}, {what}",
        remedy="they should do the same bit for bit: compare their rows of `engines` and `tactics`,"
        " and look for a reduction whose order is not fixed",
        detail={
            "ranks": list(ranks),
            "step": differ[0],
            "layers": where,
            "tokens": 0 in columns,
            "steps": len(differ),
            "compared": len(steps),
        },
    )
