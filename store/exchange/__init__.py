"""Tapes in and out: Parquet and JSONL for other tools, rollout dumps of other frameworks.

export_tape("runs/a", "a.parquet", to="parquet")
import_dumps(["rollout_3.pt"], "runs/b", framework="slime")
"""

from __future__ import annotations

from rolltape.store.exchange.export import (
    BLOCKS,
    DEFAULT_BLOCKS,
    EXPORT_SCHEMA,
    Exported,
    export_tape,
)
from rolltape.store.exchange.importing import FRAMEWORKS, Meaning, import_dumps
from rolltape.store.exchange.rows import Carried

__all__ = [
    "BLOCKS",
    "DEFAULT_BLOCKS",
    "EXPORT_SCHEMA",
    "FRAMEWORKS",
    "Carried",
    "Exported",
    "Meaning",
    "export_tape",
    "import_dumps",
]
