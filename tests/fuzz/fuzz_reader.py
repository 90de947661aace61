"""Coverage-guided fuzzing of the reader of shards. Needs atheris; a run script, not a test.

    python tests/fuzz/fuzz_reader.py -max_total_time=300 CORPUS

The input is a list of edits to a real shard. Its checksums and its name are made to hold again, so
that what lies behind the checks is reached. Anything but a `RolltapeError` is a finding.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

try:
    import atheris
except ImportError:
    sys.exit("skipped: atheris is not installed (pip install atheris)")

with atheris.instrument_imports(include=["rolltape.store"]):
    from rolltape import store
    from rolltape.store.errors import RolltapeError
    from rolltape.store.places import LocalPlace
    from rolltape.store.readers import LiveShard, SealedShard
    from rolltape.store.schema import TAPE_TABLES

import xxhash

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.builders import random_samples, write_tape
from tests.fuzz import forge

TABLES = ("tokens", "routes", "supports", "sequences", "engines", "forwards")
WRITER = "c" * 32
FOLDER = Path(tempfile.mkdtemp(prefix="rolltape-fuzz-"))
TAPE = FOLDER / "tape"


def prepare() -> dict[str, bytes]:
    write_tape(TAPE, random_samples(2, response=12), sealed=False)
    return {table: next((TAPE / table).glob("*.arrow")).read_bytes() for table in TABLES}


WHOLE = prepare()


def one_input(data: bytes) -> None:
    source = atheris.FuzzedDataProvider(data)
    table = source.PickValueInList(list(TABLES))
    live, rehash = source.ConsumeBool(), source.ConsumeBool()
    whole = WHOLE[table]
    edits = []
    for _ in range(source.ConsumeIntInRange(1, 6)):
        # metadata stands at both ends of a small file; the middle is compressed bytes
        at = source.ConsumeIntInRange(0, len(whole) - 1)
        edits.append((at, source.ConsumeBytes(source.ConsumeIntInRange(1, 8))))
    forged = forge.mutate(whole, edits, rehash=rehash)
    forged = forged[: len(forged) - source.ConsumeIntInRange(0, 64) * source.ConsumeBool()]
    end = "0.arrow.live" if live else f"0-{xxhash.xxh3_128(forged).hexdigest()}.arrow"
    path = TAPE / table / f"{WRITER}-{end}"
    path.write_bytes(forged)
    place = LocalPlace(TAPE)
    try:
        shard = (
            LiveShard(place, table, path.name)
            if live
            else SealedShard(place, table, path.name, whole=True)
        )
        for number in range(shard.batches):
            shard.read(number, TAPE_TABLES[table])
        shard.close()
        opened = store.open(TAPE)
        for sequence in opened:
            for read in (sequence.routes, sequence.supports, lambda s=sequence: s.logprob("raw")):
                read()
    except RolltapeError as error:
        if "\n" in str(error):
            raise ValueError("not one line") from error
    finally:
        path.unlink()


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
