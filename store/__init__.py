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
    StorageError,
    TapeError,
    TapeExistsError,
    TapeFullError,
    UsageError,
)
from rolltape.store.keys import Key, token_digest
from rolltape.store.routes import Routes
from rolltape.store.seal import recover, seal
from rolltape.store.sequences import Sequence, Tape
from rolltape.store.sequences import open_tape as open
from rolltape.store.supports import Supports
from rolltape.store.tape import Report, kind_of, open_report
from rolltape.store.writer import TapeWriter, create_report, create_tape, new_uuid

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
    "StorageError",
    "Supports",
    "Tape",
    "TapeError",
    "TapeExistsError",
    "TapeFullError",
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
