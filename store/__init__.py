"""The tape: schema, codecs, shards, commit, read."""

from rolltape.store.columns import Masked
from rolltape.store.errors import (
    DamagedShardError,
    ForcingError,
    ModelMismatchError,
    NewerFormatError,
    NotATapeError,
    RolltapeError,
    SchemaError,
    TapeError,
    TapeExistsError,
    UsageError,
)
from rolltape.store.keys import Key, token_digest
from rolltape.store.sequences import Routes, Sequence, Supports, Tape
from rolltape.store.sequences import open_tape as open
from rolltape.store.tape import Report, kind_of, open_report
from rolltape.store.writer import TapeWriter, create_report, create_tape, new_uuid, recover, seal

__all__ = [
    "DamagedShardError",
    "ForcingError",
    "Key",
    "Masked",
    "ModelMismatchError",
    "NewerFormatError",
    "NotATapeError",
    "Report",
    "RolltapeError",
    "Routes",
    "SchemaError",
    "Sequence",
    "Supports",
    "Tape",
    "TapeError",
    "TapeExistsError",
    "TapeWriter",
    "UsageError",
    "create_report",
    "create_tape",
    "kind_of",
    "new_uuid",
    "open",
    "open_report",
    "recover",
    "seal",
    "token_digest",
]
