"""Closing a tape: recover what dead writers left, list every shard, write the index."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from rolltape.store.errors import DamagedShardError, NotATapeError, StorageError
from rolltape.store.messages import CUT_OFF
from rolltape.store.places import LocalPlace, ObjectPlace, place_of
from rolltape.store.readers import LiveShard, SealedShard, finished_name
from rolltape.store.rollups import write_index
from rolltape.store.schema import DERIVED_TABLES, REPORT_TABLES, TAPE_TABLES
from rolltape.store.shards import (
    LIVE,
    UNSEALED,
    ObjectShardWriter,
    ShardWriter,
    format_version,
    is_locked,
    shard_names,
)
from rolltape.store.tape import REPORT_HEADER, SEAL, TAPE_HEADER, kind_of, read_seal
from rolltape.store.writer import put_json

#: Folder for what was damaged; readers do not look there.
DAMAGED = "damaged"
#: How long a second sealer waits for the first.
_LOCK_SECONDS = 60.0


def recover(root: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Finish the live shards whose writers are dead.

    The intact batches of each go into a sealed shard beside it; the live file is then removed. If
    it is damaged, and not only cut off, it goes to `damaged/`.

    Returns:
        One dict a recovered shard: `shard`, `rows`, `torn` bytes, `reason`.

    Raises:
        StorageError: no room. What is there stays.
    """
    place = LocalPlace(Path(root))
    found = []
    for table in sorted({*TAPE_TABLES, *REPORT_TABLES}):
        files = place.files(table)
        for file in shard_names(files):
            path = place.path / table / file
            if UNSEALED.fullmatch(file) is None or is_locked(path):
                continue
            shard = LiveShard(place, table, file)
            batches = [shard.read(i, shard.schema) for i in range(shard.batches)]
            if batches and finished_name(list(files), file) is None:
                write_shard(place, table, file, batches)
            shard.close()
            if shard.torn and shard.reason != CUT_OFF:
                set_aside(place, table, file)
            place.remove(f"{table}/{file}")
            rows = sum(b.num_rows for b in batches)
            name = f"{table}/{file}"
            found.append({"shard": name, "rows": rows, "torn": shard.torn, "reason": shard.reason})
    return found


def write_shard(
    place: LocalPlace | ObjectPlace, table: str, file: str, batches: list[pa.RecordBatch]
) -> str:
    """Write a finished shard under the writer and number of another; returns its name.

    The same batches give the same name, so that it may be done twice.

    Args:
        place: the tape.
        table: name of the table.
        file: name of the shard that it takes the place of.
        batches: at least one.
    """
    writer, number = file.partition(".")[0].split("-")[:2]
    schema = batches[0].schema
    if not isinstance(place, LocalPlace):
        remote = ObjectShardWriter(place, table, writer=writer, number=int(number), schema=schema)
        for batch in batches:
            remote.write(batch)
        return remote.close()
    shard = ShardWriter(
        place.path / table, writer=writer, number=int(number), schema=schema, hidden=True
    )
    try:
        for batch in batches:
            shard.write(batch)
        return shard.close()
    except StorageError:
        shard.abandon()
        shard.path.unlink(missing_ok=True)
        raise


def set_aside(place: LocalPlace | ObjectPlace, table: str, file: str) -> None:
    """Put a copy of a damaged file into `damaged/`."""
    place.put(f"{DAMAGED}/{table}-{file}", place.read(f"{table}/{file}"))


@contextlib.contextmanager
def exclusive(place: LocalPlace | ObjectPlace) -> Iterator[None]:
    """One sealer or repairer at a time, in a folder. An object store has no locks.

    Raises:
        StorageError: another one did not end.
    """
    if not isinstance(place, LocalPlace):
        yield
        return
    header = TAPE_HEADER if place.exists(TAPE_HEADER) else REPORT_HEADER
    end = time.monotonic() + _LOCK_SECONDS
    try:
        # for writing: over NFS an exclusive lock needs that
        file = open(place.path / header, "r+b")  # noqa: SIM115 - closed below
    except OSError as error:
        raise StorageError(f"{place}/{header}: {error.strerror}") from error
    with file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > end:
                    text = f"{place}: another process is sealing it and does not end"
                    raise StorageError(text) from error
                time.sleep(0.05)
            except OSError as error:
                raise StorageError(f"{place}/{header}: cannot be locked: {error}") from error
        yield


def seal(
    root: str | os.PathLike[str] | LocalPlace | ObjectPlace,
    *,
    status: Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    index: bool = True,
) -> dict[str, Any]:
    """Close a tape: recover what dead writers left, then list every shard in `seal.json`.

    Args:
        root: the tape, as a path, a URL or a place.
        status: JSON-able facts about the end of the run (exit status, drops); None keeps those of
            an earlier seal.
        storage_options: see `rolltape.store.places.place_of`.
        index: also write the roll-ups and offsets, which reads the tape once; see `add_index`.

    Returns:
        What was written. `live` names shards whose writers are still at work; they are not lost,
        readers see them, but they are not covered by this seal.
    """
    place = root if isinstance(root, LocalPlace | ObjectPlace) else place_of(root, storage_options)
    kind = kind_of(place)
    if kind is None:
        raise NotATapeError(f"{place}: neither {TAPE_HEADER} nor {REPORT_HEADER} there")
    with exclusive(place):
        return seal_now(place, kind, status=status, index=index)


def seal_now(
    place: LocalPlace | ObjectPlace,
    kind: str,
    *,
    status: Mapping[str, Any] | None = None,
    index: bool = True,
) -> dict[str, Any]:
    """`seal` for a caller that has `exclusive`; `kind` is tape or report."""
    recovered = recover(place.path) if isinstance(place, LocalPlace) else []
    former = read_seal(place) or {}
    known = {entry["shard"]: entry for entry in former.get("shards", [])}
    version = int(former.get("version", 1 if former else 0)) + 1
    tables = [*TAPE_TABLES] if kind == "tape" else [*REPORT_TABLES]
    shards: list[dict[str, Any]] = []
    live: list[str] = []
    for table in sorted(set(tables) - set(DERIVED_TABLES)):
        files = place.files(table)
        for file in shard_names(files):
            name = f"{table}/{file}"
            if file.endswith(LIVE):
                live.append(name)
            elif name in known and known[name]["bytes"] == files[file]:
                shards.append({"version": 1, **known[name]})
            else:
                entry = {"shard": name, "bytes": files[file], "version": version}
                shards.append(entry | _batches(place, table, file))
    content = {
        "format": format_version(),
        "version": version,
        "sealed": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "status": dict(former.get("status", {}) if status is None else status),
        "recovered": recovered,
        "live": live,
        "shards": shards,
        "index": None,
    }
    old = _derived(former)
    put_json(place, SEAL, content)
    if index and kind == "tape":
        content = _add_index(place, content, old)
    return content


def _batches(place: LocalPlace | ObjectPlace, table: str, file: str) -> dict[str, int]:
    # Only the footer is read: sealing must not take as long as reading. A shard that is damaged
    # already is listed without a count, so that every reader checks the whole file and says so.
    try:
        shard = SealedShard(place, table, file, whole=False)
    except DamagedShardError:
        return {}
    count = shard.batches
    shard.close()
    return {"batches": count}


def add_index(place: LocalPlace | ObjectPlace) -> dict[str, Any]:
    """Write roll-ups and offsets of a sealed tape, and its seal anew with their names.

    Returns:
        The seal. Its `index` is null if something was damaged: an index would vouch for it.
    """
    with exclusive(place):
        content = read_seal(place) or {}
        return _add_index(place, content, _derived(content))


def _add_index(
    place: LocalPlace | ObjectPlace, content: Mapping[str, Any], former: set[str]
) -> dict[str, Any]:
    seal = {**content, "index": write_index(place)}
    put_json(place, SEAL, seal)
    # Readers that opened the tape before still know the index before this one.
    keep = _derived(seal) | former
    for table in DERIVED_TABLES:
        for file in place.files(table):
            name = f"{table}/{file}"
            # in an object store somebody else may be writing one
            if name not in keep and isinstance(place, LocalPlace):
                place.remove(name)
    return seal


def _derived(seal: Mapping[str, Any] | None) -> set[str]:
    return {entry["shard"] for entry in ((seal or {}).get("index") or {}).get("shards", [])}
