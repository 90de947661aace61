"""The recorded schedule of a transformers tape: its `generate()` calls, laid out again.

A call is what decides the bits of all its rows: who stood beside whom, how they were padded, what
ran in which step. What cannot be laid out exactly is refused with the reason, call by call.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.store import Tape, UsageError
from rolltape.store.keys import Key

ADAPTER = "transformers"
#: Settings that say how long a call may become; another composition has other limits.
_LIMITS = ("max_length", "max_new_tokens", "num_return_sequences")


class _RefusalError(Exception):
    """Why a call cannot be laid out."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a call.

    Args:
        key: of the sequence.
        pad_left: padding columns.
        padding: token ids of those columns, int64 [pad_left].
        prompt: token ids, int64.
        response: token ids that were drawn, int64.
    """

    key: Key
    pad_left: int
    padding: np.ndarray
    prompt: np.ndarray
    response: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Call:
    """One `generate()` call.

    Args:
        engine: uuid.
        number: of the call in its engine.
        first_step: number of its first step in its engine.
        rows: in batch order, samples of one prompt beside each other.
        samples: rows per prompt.
        settings: generation settings as they were applied.
        pad: token of a row that has finished; None where there is none.
        finished: what such a row goes on with: `pad` or `sampled`.
        attention: attention implementation.
        experts: experts implementation of the first forward.
        sdpa: SDPA backends allowed, joined by commas.
        threads: torch's threads.
        weight_version: of the engine.
    """

    engine: str
    number: int
    first_step: int
    rows: tuple[Row, ...]
    samples: int
    settings: Mapping[str, Any]
    pad: int | None
    finished: str
    attention: str | None
    experts: str | None
    sdpa: str | None
    threads: int | None
    weight_version: int | None

    @property
    def width(self) -> int:
        """Columns of the padded prompts."""
        return max(row.pad_left + len(row.prompt) for row in self.rows)

    @property
    def steps(self) -> int:
        """Sampling steps."""
        return max(len(row.response) for row in self.rows)


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A call that cannot be laid out again, and why."""

    engine: str
    number: int
    keys: tuple[Key, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Calls in the order in which they ran, engine by engine."""

    calls: tuple[Call, ...]
    refused: tuple[Refused, ...]


def read_schedule(tape: Tape) -> Schedule:
    """The schedule of all engines of a tape that the transformers adapter recorded.

    Raises:
        UsageError: the tape has no such engine.
    """
    engines = [
        engine
        for engine, row in tape.engines.items()
        if row["adapter"] == ADAPTER and row["role"] == "rollout"
    ]
    if not engines:
        found = sorted({str(row["adapter"]) for row in tape.engines.values()})
        raise UsageError(
            f"{tape.place} has no rollout of {ADAPTER}: it was recorded from "
            f"{', '.join(found) or 'no engine'}",
            hint="re-execution runs on the engine that recorded",
        )
    return _Reader(tape).schedule(engines)


@dataclass(frozen=True)
class Steps:
    """The steps of one call.

    Args:
        steps: its rows of `steps`, by step.
        forwards: its rows of `forwards`.
    """

    steps: list[dict[str, Any]]
    forwards: pa.Table

    def rows(self) -> dict[Key, list[dict[str, Any]]]:
        """Rows of `forwards` by sequence, in batch order, each list by step."""
        found: dict[Key, list[dict[str, Any]]] = {}
        for row in sorted(self.forwards.to_pylist(), key=lambda row: (row["step"], row["row"])):
            found.setdefault(_key(row), []).append(row)
        return found

    def first_rows(self) -> dict[Key, int]:
        """Batch row of each sequence in the first step, in batch order."""
        first = pc.equal(self.forwards.column("step"), self.steps[0]["step"])
        rows = self.forwards.filter(first).to_pylist()
        return {_key(row): row["row"] for row in sorted(rows, key=lambda row: row["row"])}


def _key(row: Mapping[str, Any]) -> Key:
    return Key(row["engine"], row["request"], row["sample"], row["pass"])


def steps_of_calls(tape: Tape) -> dict[tuple[str, int], Steps]:
    """The steps of every call of a tape by (engine, number of the call), in step order."""
    steps: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in sorted(tape.rows("steps"), key=lambda row: row["step"]):
        if row["call"] is not None:
            steps.setdefault((row["engine"], row["call"]), []).append(row)
    calls = list(steps)
    table = tape.table("forwards")
    owner = np.full(table.num_rows, -1, np.int64)
    names = np.array(table.column("engine").to_pylist(), object)
    numbers = table.column("step").to_numpy()
    for engine in {name for name, _ in calls}:
        mine = [(row["step"], i) for i, c in enumerate(calls) if c[0] == engine for row in steps[c]]
        known, call = np.array(sorted(mine), np.int64).T
        here = names == engine
        at = np.minimum(np.searchsorted(known, numbers[here]), len(known) - 1)
        owner[here] = np.where(known[at] == numbers[here], call[at], -1)
    order = np.argsort(owner, kind="stable")
    grouped = table.take(pa.array(order))
    edges = np.searchsorted(owner[order], np.arange(len(calls) + 1))
    return {
        call: Steps(steps[call], grouped.slice(edges[i], edges[i + 1] - edges[i]))
        for i, call in enumerate(calls)
    }


class _Reader:
    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._calls = steps_of_calls(tape)
        self._gaps = _gaps(tape)

    def schedule(self, engines: Iterable[str]) -> Schedule:
        calls: list[Call] = []
        refused: list[Refused] = []
        for engine in engines:
            placed: set[Key] = set()
            for (owner, number), found in self._calls.items():
                if owner != engine:
                    continue
                rows = found.rows()
                placed.update(rows)
                try:
                    calls.append(self._call(engine, number, found.steps, rows))
                except _RefusalError as error:
                    keys = tuple(rows)
                    refused.append(
                        Refused(engine=engine, number=number, keys=keys, reason=str(error))
                    )
            lost: dict[int, list[Key]] = defaultdict(list)
            for key in self._tape.keys():  # noqa: SIM118 - a tape is no mapping
                if key.engine == engine and key not in placed:
                    head = key.request.partition("-")[0]
                    lost[int(head) if head.isdecimal() else -1].append(key)
            refused += [
                Refused(
                    engine=engine, number=n, keys=tuple(keys), reason="its forwards are missing"
                )
                for n, keys in sorted(lost.items())
            ]
        return Schedule(calls=tuple(calls), refused=tuple(refused))

    def _call(
        self,
        engine: str,
        number: int,
        steps: list[dict[str, Any]],
        forwards: dict[Key, list[dict[str, Any]]],
    ) -> Call:
        first, keys = steps[0], list(forwards)
        self._check_call(engine, number, steps, forwards)
        infos = [self._tape.info(key)["sampling"] for key in keys]
        layout = infos[0].get("layout")
        rows = tuple(
            self._row(key, forwards[key], info) for key, info in zip(keys, infos, strict=True)
        )
        uneven = len({len(row.response) for row in rows}) > 1
        if layout is None:
            if uneven or any(row.pad_left for row in rows):
                raise _RefusalError("its pad token was not recorded (an older rolltape)")
            layout = {"pad": None, "finished": "pad", "inputs": []}
        if layout["inputs"]:
            raise _RefusalError(
                f"it got inputs that are not recorded: {', '.join(layout['inputs'])}"
            )
        if uneven and layout["finished"] != "pad":
            raise _RefusalError("rows that had finished went on with tokens that are not recorded")
        settings = {name: value for name, value in infos[0].items() if name != "layout"}
        samples = int(settings.get("num_return_sequences") or 1)
        if len(rows) % samples:
            raise _RefusalError(f"{len(rows)} rows are not {samples} samples a prompt")
        return Call(
            engine=engine,
            number=number,
            first_step=first["step"],
            rows=rows,
            samples=samples,
            settings=settings,
            pad=layout["pad"],
            finished=layout["finished"],
            attention=first["attention"],
            experts=first["experts"],
            sdpa=first["sdpa"],
            threads=first["threads"],
            weight_version=forwards[keys[0]][0]["weight_version"],
        )

    def _check_call(
        self,
        engine: str,
        number: int,
        steps: list[dict[str, Any]],
        forwards: dict[Key, list[dict[str, Any]]],
    ) -> None:
        row = self._tape.engine(engine)
        if any(size > 1 for _, size in (row["ranks"] or {}).values()):
            raise _RefusalError("its engine ran on several ranks")
        if row["effective"].get("autocast"):
            raise _RefusalError("it ran under autocast, whose dtype is not recorded")
        gaps = self._gaps.get((engine, number)) or self._gaps.get((engine, None))
        if gaps:
            raise _RefusalError(f"it has gaps: {gaps[0]}")
        whole = int(steps[0]["rows"])
        if not forwards or len(forwards) != whole:
            raise _RefusalError(f"{whole - len(forwards)} of its {whole} rows were not recorded")
        if any(f["kv_source"] != "own" for rows in forwards.values() for f in rows):
            raise _RefusalError("it went on with a cache that an earlier call had filled")
        if any(step["graph"] is not None for step in steps):
            raise _RefusalError("it ran a compiled model or graphs")

    def _row(self, key: Key, forwards: list[dict[str, Any]], info: Mapping[str, Any]) -> Row:
        sequence = self._tape.sequence(key)
        if not sequence.tokens.valid.all():
            at = int(np.flatnonzero(~sequence.tokens.valid)[0])
            raise _RefusalError(f"token {at} of {sequence.id} is not known")
        prompt, length = sequence.prompt_len, sequence.length
        if length <= prompt:
            raise _RefusalError(f"{sequence.id} has no response: its forwards are not known")
        if not sequence.step.valid[prompt:].all():
            at = prompt + int(np.flatnonzero(~sequence.step.valid[prompt:])[0])
            raise _RefusalError(f"the step that made token {at} of {sequence.id} is not known")
        tokens = sequence.tokens.values.astype(np.int64)
        pad = int(forwards[0]["pad_left"] or 0)
        return Row(
            key=key,
            pad_left=pad,
            padding=_padding(pad, info),
            prompt=tokens[:prompt],
            response=tokens[prompt:],
        )


def _gaps(tape: Tape) -> dict[tuple[str, int | None], list[str]]:
    """Reasons of the gaps of each call; under None those of an engine that name no call."""
    found: dict[tuple[str, int | None], list[str]] = defaultdict(list)
    for row in tape.rows("events"):
        if row["kind"] != "gap" or row["engine"] is None:
            continue
        detail = json.loads(row["detail"]) if row["detail"] else {}
        found[row["engine"], detail.get("call")].append(detail.get("reason") or "rows were dropped")
    return found


def _padding(pad: int, info: Mapping[str, Any]) -> np.ndarray:
    given = (info.get("layout") or {}).get("prompt_pad")
    if isinstance(given, list):
        if len(given) != pad:
            raise _RefusalError(f"{pad} columns of padding, the ids of {len(given)} are recorded")
        return np.array(given, np.int64)
    if pad and given is None:
        raise _RefusalError("the pad token of its prompts was not recorded (an older rolltape)")
    return np.full(pad, given or 0, np.int64)


def regrouped(calls: Iterable[Call], rows: int) -> list[Call]:
    """The same sequences in calls of another size: in order, only with alike settings.

    Args:
        calls: as recorded.
        rows: rows of a call, at most.

    Rows of one call keep their order; those of several calls are put together when settings and
    weights are alike. Each new call is as wide as its longest prompt.
    """
    alike: dict[str, list[tuple[Call, Row]]] = {}
    for call in calls:
        settings = {k: v for k, v in call.settings.items() if k not in _LIMITS}
        mark = (call.engine, call.weight_version, settings, call.pad, call.attention, call.experts,
                call.sdpa, call.threads)  # fmt: skip
        alike.setdefault(json.dumps(mark, sort_keys=True), []).extend((call, r) for r in call.rows)
    out: list[Call] = []
    for members in alike.values():
        for first in range(0, len(members), rows):
            out.append(_together(members[first : first + rows], number=len(out)))
    return out


def _together(members: list[tuple[Call, Row]], *, number: int) -> Call:
    call = members[0][0]
    width = max(len(row.prompt) for _, row in members)
    steps = max(len(row.response) for _, row in members)
    known = [row.padding for _, row in members if row.pad_left]
    pad = int(known[0][0]) if known else call.pad or 0
    rows = tuple(
        replace(
            row,
            pad_left=width - len(row.prompt),
            padding=np.full(width - len(row.prompt), pad, np.int64),
        )
        for _, row in members
    )
    limits = {"max_length": width + steps, "max_new_tokens": steps, "num_return_sequences": 1}
    return replace(
        call,
        number=number,
        rows=rows,
        samples=1,
        settings={**call.settings, **limits},
        pad=pad if call.pad is None else call.pad,
        finished="pad",
    )
