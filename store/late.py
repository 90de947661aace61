"""Annotations by the id that the caller knows: which sequence they belong to.

An RL framework knows the request id that it gave the engine, not the engine's key. Such a row has
`engine` "" and as `request` that id; `sample` is -1 where the caller named none. It belongs to the
one sequence whose `external` is that id, else to none: a reader never guesses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from rolltape.store.index import KEY_COLUMNS, Index
from rolltape.store.keys import Key
from rolltape.store.tape import Folder

#: `sample` of an annotation whose caller named none.
ANY_SAMPLE = -1
#: What holds for all samples of a request; anything else must name one, if there are several.
OF_THE_REQUEST = ("group", "turn")

#: External id -> keys of the sequences that have it.
Externals = Mapping[str, Sequence[Key]]


@dataclass(frozen=True)
class Unresolved:
    """Annotations that belong to no sequence, or could belong to several.

    Args:
        request: the external id.
        sample: as the caller named it, -1 if not at all.
        rows: how many there are.
        reason: unmatched | ambiguous.
    """

    request: str
    sample: int
    rows: int
    reason: str


def by_external(keys: Sequence[Key], external: pa.ChunkedArray) -> dict[str, list[Key]]:
    """The sequences of each external id.

    Args:
        keys: of all sequences.
        external: their ids, null where there is none.
    """
    found: dict[str, list[Key]] = {}
    if external.null_count == len(external):
        return found
    for key, name in zip(keys, external.to_pylist(), strict=True):
        if name is not None:
            found.setdefault(name, []).append(key)
    return found


def meant_by(alias: Key, name: str, known: Externals) -> tuple[list[Key], str]:
    """The sequences that an annotation by external id belongs to.

    Args:
        alias: key columns of the row, `engine` "".
        name: of the fact.
        known: the sequences of each external id.

    Returns:
        Their keys, and if there are none why: unmatched | ambiguous.
    """
    found = [key for key in known.get(alias.request, ()) if key.scoring == alias.scoring]
    if alias.sample != ANY_SAMPLE:
        found = [key for key in found if key.sample == alias.sample]
    if len(found) == 1:
        return found, ""
    if not found:
        return [], "unmatched"
    one_request = len({(key.engine, key.request) for key in found}) == 1
    if one_request and alias.sample == ANY_SAMPLE and name in OF_THE_REQUEST:
        return found, ""
    return [], "ambiguous"


def aliases(key: Key, external: str | None) -> tuple[Key, ...]:
    """Keys of the rows by external id that may mean this sequence."""
    if external is None:
        return ()
    return tuple(Key("", external, sample, key.scoring) for sample in (ANY_SAMPLE, key.sample))


def overrides(folder: Folder, known: Externals) -> dict[Key, dict[str, str | int]]:
    """Groups and turns that annotations give; the last one written counts."""
    rows = []
    columns = [*KEY_COLUMNS, "name", "number", "text", "t_ns"]
    for _, _, batch in folder.batches("annotations", columns):
        wanted = pc.is_in(batch.column("name"), pa.array(OF_THE_REQUEST))
        rows += batch.filter(wanted).to_pylist()
    rows.sort(key=lambda row: int(row["t_ns"]))
    out: dict[Key, dict[str, str | int]] = {}
    for row in rows:
        key = Key(*(row[name] for name in KEY_COLUMNS))
        value = row["text"] if row["name"] == "group" else row["number"]
        if value is None or (row["name"] == "turn" and value != value // 1):
            continue
        keys = meant_by(key, row["name"], known)[0] if not key.engine else [key]
        for found in keys:
            out.setdefault(found, {})[row["name"]] = value if row["name"] == "group" else int(value)
    return out


def unresolved(folder: Folder, index: Index, known: Externals) -> Iterator[Unresolved]:
    """Annotations by external id that belong to nothing, by id and sample."""
    entries = index.entries("annotations")
    for alias, code in list(index.codes.items()):
        rows = int(entries.rows[entries.of(code)].sum())
        if alias.engine or not rows:
            continue
        reason = meant_by(alias, "", known)[1]
        if reason and meant_by(alias, OF_THE_REQUEST[0], known)[0]:
            rows -= _of_the_request(folder, index, alias)  # those hold for all samples
        if reason and rows:
            yield Unresolved(alias.request, alias.sample, rows, reason)


def _of_the_request(folder: Folder, index: Index, alias: Key) -> int:
    count = 0
    columns = [*KEY_COLUMNS, "name"]
    schema = pa.schema([folder.schemas["annotations"].field(name) for name in columns])
    for file, number in index.find("annotations", alias):
        for row in folder.shard("annotations", file).read(number, schema).to_pylist():
            mine = Key(*(row[name] for name in KEY_COLUMNS)) == alias
            count += mine and row["name"] in OF_THE_REQUEST
    return count
