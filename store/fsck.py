"""Checks every byte and every join of a tape, and repairs what can be repaired.

Nothing that was written is ever thrown away: a damaged shard moves to `damaged/`, its intact batches
go into a new shard, and what is lost is said in the `events` table.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from rolltape.store.errors import DamagedShardError, RolltapeError
from rolltape.store.keys import token_digest
from rolltape.store.places import LocalPlace, ObjectPlace, place_of
from rolltape.store.readers import SealedShard, finished_name
from rolltape.store.rollups import count
from rolltape.store.schema import DERIVED_TABLES, TAPE_TABLES
from rolltape.store.seal import recover, seal
from rolltape.store.sequences import LOGPROBS, Sequence, Tape
from rolltape.store.shards import LIVE, format_version, is_locked, shard_names
from rolltape.store.tape import SEAL, read_seal, seal_problems
from rolltape.store.writer import TapeWriter

DAMAGED = "damaged"
_SHOWN = 20


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Args:
        code: damaged | missing | dead | stray | unsealed | content | index.
        where: file, or sequence.
        text: what is wrong.
        repair: what `--repair` does about it; empty if nothing can be done.
        repaired: whether it was done.
    """

    code: str
    where: str
    text: str
    repair: str = ""
    repaired: bool = False


@dataclass(frozen=True)
class Checked:
    """What `fsck` looked at and found.

    Args:
        shards: finished shards whose every byte was checked.
        bytes: their size.
        sequences: sequences whose joins were checked.
        live: shards that a living process is writing.
        findings: what is wrong.
    """

    shards: int
    bytes: int
    sequences: int
    live: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong, or no longer."""
        return all(finding.repaired for finding in self.findings)


def fsck(
    tape: str | os.PathLike[str] | LocalPlace | ObjectPlace,
    *,
    repair: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Checked:
    """Check a tape, all of it.

    Args:
        tape: path or URL.
        repair: recover what dead writers left, set damaged shards aside, seal, write the index.
        storage_options: see `rolltape.store.places.place_of`.

    Raises:
        NotATapeError: it is not a tape.
    """
    place = place_of(tape, storage_options)
    Tape(place, skip_damaged=True)  # raises unless it is one
    findings = [*_strays(place, repair), *_dead(place, repair)]
    shards = size = 0
    live: list[str] = []
    broken: list[str] = []
    for table in TAPE_TABLES:
        files = place.files(table)
        for file in shard_names(files):
            if file.endswith(LIVE):
                if finished_name(list(files), file) is None:
                    live.append(f"{table}/{file}")
                continue
            shards += 1
            size += files[file]
            problem = _check(place, table, file)
            if problem is not None:
                broken.append(f"{table}/{file}")
                findings.append(_damaged(place, table, file, problem, repair))
    findings += _missing(place, broken, repair)
    tape_now = Tape(place, skip_damaged=True)
    sequences = len(tape_now)
    findings += _contents(tape_now)
    findings += _sealing(place, live, repair, changed=repair and bool(findings))
    return Checked(shards, size, sequences, tuple(live), tuple(findings))


def _strays(place: LocalPlace | ObjectPlace, repair: bool) -> Iterator[Finding]:
    """Files under a name that was to be temporary."""
    for folder in ["", *place.folders()]:
        for file in place.files(folder):
            if not file.startswith("."):
                continue
            name = f"{folder}/{file}".lstrip("/")
            if isinstance(place, LocalPlace) and is_locked(place.path / name):
                continue
            if repair:
                place.remove(name)
            yield Finding("stray", name, "left by a writer that died", "removed", repair)


def _dead(place: LocalPlace | ObjectPlace, repair: bool) -> Iterator[Finding]:
    """Live shards of writers that are no longer there."""
    if not isinstance(place, LocalPlace):
        return
    if repair:
        for entry in recover(place.path):
            torn = f", {entry['torn']} torn bytes: {entry['reason']}" if entry["torn"] else ""
            text = f"its writer died: {entry['rows']} rows{torn}"
            yield Finding("dead", str(entry["shard"]), text, "finished", True)
        return
    for table in place.folders():
        for file in shard_names(place.files(table)):
            if file.endswith(LIVE) and not is_locked(place.path / table / file):
                yield Finding("dead", f"{table}/{file}", "its writer died", "finish it")


def _check(place: LocalPlace | ObjectPlace, table: str, file: str) -> str | None:
    """What is wrong with a finished shard; every byte of it is looked at."""
    try:
        shard = SealedShard(place, table, file, whole=True)
        for number in range(shard.batches):
            shard.read(number, TAPE_TABLES[table])
        shard.close()
    except DamagedShardError as error:
        return str(error)
    except FileNotFoundError:
        return "it is gone"
    return None


def _damaged(
    place: LocalPlace | ObjectPlace, table: str, file: str, problem: str, repair: bool
) -> Finding:
    intact, lost = _salvage(place, table, file)
    rows = sum(batch.num_rows for batch in intact)
    text = f"{problem}; {len(intact)} batches with {rows} rows are intact, {lost or 'no'} others"
    if repair:
        with TapeWriter(place) as writer:
            if table not in DERIVED_TABLES:
                for batch in intact:
                    writer.write_batch(table, batch)
            detail = {"reason": "damaged shard", "shard": f"{table}/{file}", "rows_kept": rows}
            row = {"writer": writer.id, "t_ns": time.time_ns(), "kind": "gap"}
            writer.append("events", {**row, "detail": json.dumps(detail)})
        place.put(f"{DAMAGED}/{table}-{file}", place.read(f"{table}/{file}"))
        place.remove(f"{table}/{file}")
    action = f"set aside in {DAMAGED}/, intact rows kept"
    return Finding("damaged", f"{table}/{file}", text, action, repair)


def _salvage(
    place: LocalPlace | ObjectPlace, table: str, file: str
) -> tuple[list[pa.RecordBatch], int | None]:
    """Batches of a damaged shard that are what was written, and how many are not."""
    intact: list[pa.RecordBatch] = []
    try:
        shard = SealedShard(place, table, file, whole=False)
    except (DamagedShardError, FileNotFoundError):
        return intact, None
    lost = 0
    for number in range(shard.batches):
        try:
            intact.append(shard.read(number, TAPE_TABLES[table]))
        except DamagedShardError:
            lost += 1
    shard.close()
    return intact, lost


def _missing(place: LocalPlace | ObjectPlace, broken: list[str], repair: bool) -> Iterator[Finding]:
    for problem in seal_problems(place, read_seal(place)):
        if any(name in problem for name in broken):
            continue
        if repair and "missing" in problem:
            with TapeWriter(place) as writer:
                detail = {"reason": "missing shard", "problem": problem.rpartition("/")[2]}
                row = {"writer": writer.id, "t_ns": time.time_ns(), "kind": "gap"}
                writer.append("events", {**row, "detail": json.dumps(detail)})
        action = "sealed without it, the loss is recorded"
        yield Finding("missing", problem.partition(":")[0], problem, action, repair)


def _contents(tape: Tape) -> list[Finding]:
    """Joins of every sequence: fragments within it, digests, everything decodes."""
    found = []
    for sequence in tape:
        try:
            problem = _join_problem(sequence)
        except RolltapeError as error:
            problem = str(error)
        except (ValueError, KeyError, TypeError) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            found.append(Finding("content", sequence.id, problem))
            if len(found) == _SHOWN:
                text = f"only the first {_SHOWN} sequences with problems are listed"
                found.append(Finding("content", str(tape.place), text))
                break
    return found


def _join_problem(sequence: Sequence) -> str | None:
    tokens = sequence.tokens
    digest = sequence.info["digest"]
    if digest is not None:
        if not tokens.valid.all():
            return f"{int((~tokens.valid).sum())} of {len(tokens)} tokens are not there"
        if token_digest(sequence.prompt_len, tokens.values) != digest:
            return "its tokens do not have the recorded digest"
    for column in LOGPROBS:
        sequence.logprob(column)
    for role in ("used", "live"):
        sequence.routes(role)
    supports = sequence.supports()
    if supports is not None:
        inside = np.diff(supports.ids.astype(np.int64)) > 0
        inside[supports.offsets[1:-1][supports.offsets[1:-1] < len(supports.ids)] - 1] = True
        if len(inside) and not inside.all():
            return "ids of a kept set do not ascend"
    sequence.distributions()
    sequence.activations()
    return None


def _sealing(
    place: LocalPlace | ObjectPlace, live: list[str], repair: bool, *, changed: bool
) -> Iterator[Finding]:
    known = read_seal(place)
    if known is None:
        text = "not sealed: still being written, or its launcher was killed"
        if live:
            return  # nothing is wrong with a tape that is being written
        yield Finding("unsealed", SEAL, text, "sealed", repair)
    listed = {str(entry["shard"]) for entry in (known or {}).get("shards", [])}
    present = {
        f"{table}/{file}"
        for table in TAPE_TABLES
        if table not in DERIVED_TABLES
        for file in place.files(table)
        if file.endswith(".arrow") and not file.startswith(".")
    }
    extra = sorted(present - listed) if known is not None and not changed else []
    if extra:
        text = f"{len(extra)} finished shards are not in the seal, the first is {extra[0]}"
        yield Finding("unsealed", SEAL, text, "sealed again", repair)
    stale = known is not None and not changed and not extra and _index_problem(place, known)
    if stale:
        yield Finding("index", SEAL, stale, "written anew", repair)
    if repair and (changed or known is None or extra or stale):
        seal(place)


def _index_problem(place: LocalPlace | ObjectPlace, known: dict[str, Any]) -> str:
    """Why the stored roll-ups are not those of the tape; empty if they are."""
    if not known.get("index"):
        if str(known.get("format")) != format_version():
            return ""  # sealed before there was an index
        return "no index: sealing was cut short"
    tape = Tape(place, skip_damaged=True)
    stored = tape.index.rollups
    if stored is None:
        return "the index does not cover the tape, or is damaged"
    fresh = Tape(place, skip_damaged=True)
    fresh.seal = {**known, "index": None}
    order = [(name, "ascending") for name in ("engine", "request", "sample", "pass")]
    if not count(fresh).sort_by(order).equals(stored.sort_by(order)):
        return "the roll-ups are not those of the tape"
    return ""
