"""Closing a tape: recover what dead writers left, list every shard, write the index."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from rolltape.store.errors import DamagedShardError, NotATapeError
from rolltape.store.places import LocalPlace, ObjectPlace, place_of
from rolltape.store.readers import LiveShard, SealedShard, finished_name
from rolltape.store.rollups import write_index
from rolltape.store.schema import DERIVED_TABLES, REPORT_TABLES, TAPE_TABLES
from rolltape.store.shards import LIVE, ShardWriter, format_version, is_locked, shard_names
from rolltape.store.tape import REPORT_HEADER, SEAL, TAPE_HEADER, kind_of, read_seal
from rolltape.store.writer import put_json


def recover(root: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Finish the live shards whose writers are dead.

    The intact batches of each go into a sealed shard beside it; the live file is then removed.

    Returns:
        One dict a recovered shard: `shard`, `rows`, `torn` bytes, `reason`.
    """
    place = LocalPlace(Path(root))
    found = []
    for table in place.folders():
        files = place.files(table)
        for file in shard_names(files):
            path = place.path / table / file
            if not file.endswith(LIVE) or is_locked(path):
                continue
            shard = LiveShard(place, table, file)
            batches = [shard.read(i, shard.schema) for i in range(shard.batches)]
            if batches and finished_name(list(files), file) is None:
                _finish_for(path, batches)
            shard.close()
            path.unlink(missing_ok=True)
            rows = sum(b.num_rows for b in batches)
            name = f"{table}/{file}"
            found.append({"shard": name, "rows": rows, "torn": shard.torn, "reason": shard.reason})
    return found


def _finish_for(path: Path, batches: list[pa.RecordBatch]) -> None:
    """Write the finished shard of a live one, under its name and number."""
    writer, number = path.name.removesuffix(LIVE).split("-")
    shard = ShardWriter(
        path.parent, writer=writer, number=int(number), schema=batches[0].schema, hidden=True
    )
    for batch in batches:
        shard.write(batch)
    shard.close()


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
    kind = kind_of("", place)
    if kind is None:
        raise NotATapeError(f"{place}: neither {TAPE_HEADER} nor {REPORT_HEADER} there")
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
            elif name in known:
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
    put_json(place, SEAL, content)
    if index and kind == "tape":
        content = add_index(place, content)
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


def add_index(
    place: LocalPlace | ObjectPlace, content: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write roll-ups and offsets of a sealed tape, and its seal anew with their names.

    Args:
        place: the tape.
        content: its seal, None to read it.
    """
    seal = dict(content if content is not None else read_seal(place) or {})
    seal["index"] = write_index(place)
    put_json(place, SEAL, seal)
    for table in DERIVED_TABLES:
        keep = {entry["shard"] for entry in seal["index"]["shards"]}
        for file in place.files(table):
            if f"{table}/{file}" not in keep:
                place.remove(f"{table}/{file}")
    return seal
