"""Checks every byte and every join of a tape, and repairs what can be repaired.

Nothing that was written is ever thrown away: a damaged shard moves to `damaged/`, its intact
batches go into a new shard, and what is lost is said in the `events` table.
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

from rolltape.store.describe import orphans
from rolltape.store.errors import DamagedShardError, NotATapeError, RolltapeError
from rolltape.store.keys import token_digest
from rolltape.store.notices import notices
from rolltape.store.places import LocalPlace, ObjectPlace, place_of
from rolltape.store.readers import BrokenShard, FooterShard, SealedShard, Shard, finished_name
from rolltape.store.rollups import count
from rolltape.store.schema import DERIVED_TABLES, TAPE_TABLES
from rolltape.store.seal import (
    DAMAGED,
    exclusive,
    recover,
    seal_now,
    set_aside,
    write_shard,
)
from rolltape.store.sequences import LOGPROBS, Sequence, Tape
from rolltape.store.shards import (
    COMPACTING,
    LIVE,
    TEMPORARY,
    UNSEALED,
    format_version,
    is_locked,
    shard_names,
)
from rolltape.store.tape import SEAL, kind_of, read_seal, seal_problems
from rolltape.store.writer import TapeWriter

_SHOWN = 20
_DAMAGED, _MISSING = "damaged shard", "missing shard"  # reasons of gaps
#: A temporary file this old has no writer: nothing is under such a name for longer than a write.
STRAY_SECONDS = 60.0


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Args:
        code: damaged | missing | dead | stray | unsealed | content | index | seal | partial.
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
        notes: what is not wrong, but worth knowing.
        problems: what is missing although no byte is damaged; `rolltape info` says the same.
    """

    shards: int
    bytes: int
    sequences: int
    live: tuple[str, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def sound(self) -> bool:
        """Whether nothing is damaged, or no longer."""
        return all(finding.repaired for finding in self.findings)

    @property
    def clean(self) -> bool:
        """Whether it is sound and nothing is missing."""
        return self.sound and not self.problems


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
    kind = kind_of(place)
    if kind is None:
        Tape(place)  # says what is not there
    if kind == "report":
        raise NotATapeError(f"{place} is a report", hint="it can be made again from its tapes")
    if not repair:
        return _fsck(place, repair=False)
    with exclusive(place):
        return _fsck(place, repair=True)


def _fsck(place: LocalPlace | ObjectPlace, *, repair: bool) -> Checked:
    if place.exists(COMPACTING):  # sealed, it would pass for the whole recording
        text = "compacting was cut short: remove this copy and compact again"
        return Checked(0, 0, 0, (), (Finding("partial", COMPACTING, text),))
    findings = list(_seal_file(place, repair))
    if findings and not repair:  # no reader can open it like this
        return Checked(0, 0, 0, (), tuple(findings))
    Tape(place, skip_damaged=True)  # raises unless it is one
    findings += [*_strays(place, repair), *_dead(place, repair)]
    shards = size = 0
    live: list[str] = []
    broken: list[str] = []
    for table in TAPE_TABLES:
        files = place.files(table)
        for file in shard_names(files):
            if file.endswith(LIVE):
                if finished_name(list(files), file) is None and _is_written(place, table, file):
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
    if not broken or repair:  # else every sequence of a damaged shard would be said to be wrong
        findings += _contents(tape_now)
    findings += _sealing(place, live, repair, changed=repair and bool(findings))
    sealed = read_seal(place) is not None
    notes = notices(tape_now) if sealed and not live and (not broken or repair) else []
    problems = orphans(tape_now, sealed=sealed)
    return Checked(
        shards, size, sequences, tuple(live), tuple(findings), tuple(notes), tuple(problems)
    )


def _seal_file(place: LocalPlace | ObjectPlace, repair: bool) -> Iterator[Finding]:
    """A seal that cannot be read: it only lists what is there, and can be written anew."""
    try:
        read_seal(place)
    except NotATapeError as error:
        if repair:
            place.put(f"{DAMAGED}/{SEAL}", place.read(SEAL))
            place.remove(SEAL)
        yield Finding("seal", SEAL, str(error), f"set aside in {DAMAGED}/, sealed anew", repair)


def _strays(place: LocalPlace | ObjectPlace, repair: bool) -> Iterator[Finding]:
    """Files under a name that was to be temporary."""
    if not isinstance(place, LocalPlace):
        return
    for folder in ["", *TAPE_TABLES, DAMAGED]:
        for file in sorted(place.files(folder)):
            name = f"{folder}/{file}".lstrip("/")
            if not _is_stray(place, name, file):
                continue
            if repair:
                place.remove(name)
            yield Finding("stray", name, "left by a writer that died", "removed", repair)


def _is_stray(place: LocalPlace, name: str, file: str) -> bool:
    if TEMPORARY.fullmatch(file) is None or is_locked(place.path / name):
        return False
    try:
        written = (place.path / name).stat().st_mtime
    except FileNotFoundError:
        return False
    return time.time() - written > STRAY_SECONDS


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
    for table in TAPE_TABLES:
        for file in shard_names(place.files(table)):
            if UNSEALED.fullmatch(file) and not is_locked(place.path / table / file):
                yield Finding("dead", f"{table}/{file}", "its writer died", "finish it")


def _is_written(place: LocalPlace | ObjectPlace, table: str, file: str) -> bool:
    return isinstance(place, LocalPlace) and is_locked(place.path / table / file)


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
    others = "an unknown number of" if lost is None else lost or "no"
    text = f"{problem}; {len(intact)} batches with {rows} rows are intact, {others} others"
    where = f"{table}/{file}"
    if repair:
        # a kill in between leaves what is there already to be done again, with the same result
        set_aside(place, table, file)
        kept = None
        if table not in DERIVED_TABLES:
            if lost != 0:
                _note_gap(place, {"reason": _DAMAGED, "shard": where, "rows_kept": rows})
            if intact:
                kept = write_shard(place, table, file, intact)
        if kept != file:  # else it could be restored as it was
            place.remove(where)
    action = f"set aside in {DAMAGED}/, intact rows kept"
    return Finding("damaged", where, text, action, repair)


def _salvage(
    place: LocalPlace | ObjectPlace, table: str, file: str
) -> tuple[list[pa.RecordBatch], int | None]:
    """Batches of a damaged shard that are what was written, and how many are not."""
    best: tuple[list[pa.RecordBatch], int | None] = [], None
    for open_ in (_by_footer, _by_footer_alone, _by_messages):
        try:
            shard, known = open_(place, table, file)
        except (DamagedShardError, FileNotFoundError):
            continue
        intact = []
        for number in range(shard.batches):
            try:
                intact.append(shard.read(number, shard.schema))
            except DamagedShardError:
                continue
        shard.close()
        lost = shard.batches - len(intact) if known else None
        if len(intact) > len(best[0]) or (best[1] is None and known):
            best = intact, lost
    return best


def _by_footer(place: LocalPlace | ObjectPlace, table: str, file: str) -> tuple[Shard, bool]:
    return SealedShard(place, table, file, whole=False), True


def _by_footer_alone(place: LocalPlace | ObjectPlace, table: str, file: str) -> tuple[Shard, bool]:
    return FooterShard(place, table, file, whole=False), True


def _by_messages(place: LocalPlace | ObjectPlace, table: str, file: str) -> tuple[Shard, bool]:
    shard = BrokenShard(place, table, file)
    return shard, not shard.torn


def _note_gap(place: LocalPlace | ObjectPlace, detail: dict[str, Any]) -> None:
    """Record a loss, unless a repair that was cut short has done so."""
    known = [row["detail"] for row in Tape(place, skip_damaged=True).rows("events")]
    text = json.dumps(detail)
    if text in known:
        return
    with TapeWriter(place) as writer:
        row = {"writer": writer.id, "t_ns": time.time_ns(), "kind": "gap", "detail": text}
        writer.append("events", row)


def _missing(place: LocalPlace | ObjectPlace, broken: list[str], repair: bool) -> Iterator[Finding]:
    for problem in seal_problems(place, read_seal(place)):
        if any(name in problem for name in broken):
            continue
        name = problem.partition(": ")[0].removeprefix(f"{place}/")
        if name.partition("/")[0] in DERIVED_TABLES:
            yield Finding("index", name, problem, "written anew", repair)
            continue
        table, _, file = name.partition("/")
        known = file in place.files(table) or f"{table}-{file}" in place.files(DAMAGED)
        if repair and not known:  # else it is there, or an earlier repair has set it aside
            _note_gap(place, {"reason": _MISSING, "shard": name})
        action = "sealed without it, the loss is recorded"
        yield Finding("missing", name, problem, action, repair)


def _contents(tape: Tape) -> list[Finding]:
    """Joins of every sequence: fragments within it, digests, everything decodes."""
    found = []
    # what a repair could not save is said once, not again for every sequence
    known = {_reason(row["detail"]) for row in tape.rows("events") if row["kind"] == "gap"}
    for sequence in tape:
        try:
            problem = _join_problem(sequence, partial=bool(known & {_DAMAGED, _MISSING}))
        except RolltapeError as error:
            problem = str(error)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            found.append(Finding("content", sequence.id, problem))
            if len(found) == _SHOWN:
                text = f"only the first {_SHOWN} sequences with problems are listed"
                found.append(Finding("content", str(tape.place), text))
                break
    return found


def _reason(detail: str | None) -> str:
    try:
        return str(json.loads(detail or "{}")["reason"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""


def _join_problem(sequence: Sequence, *, partial: bool) -> str | None:
    tokens = sequence.tokens
    digest = sequence.info["digest"]
    if digest is not None and not (partial and not tokens.valid.all()):
        if not tokens.valid.all():
            return f"{int((~tokens.valid).sum())} of {len(tokens)} tokens are not there"
        if token_digest(sequence.prompt_len, tokens.values) != digest:
            return "its tokens do not have the recorded digest"
    for column in LOGPROBS:
        sequence.logprob(column)
    for role in ("used", "live"):
        sequence.routes(role)
        sequence.routes(role, again=1)
    supports = sequence.supports()
    if supports is not None:
        inside = np.diff(supports.ids.astype(np.int64)) > 0
        inside[supports.offsets[1:-1][supports.offsets[1:-1] < len(supports.ids)] - 1] = True
        if len(inside) and not inside.all():
            return "ids of a kept set do not ascend"
    sequence.distributions()
    sequence.activations()
    sequence.sketches()
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
        seal_now(place, "tape")


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
