"""Jobs for the writer thread that write the small tables: engines, weights."""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any

from rolltape.recorder.digest import Digest
from rolltape.recorder.provenance import library_versions
from rolltape.recorder.session import Job
from rolltape.store import TapeWriter


def engine_job(
    engine: str, role: str, adapter: str, facts: dict[str, Any], requested: Any = None
) -> Job:
    """The `engines` row of this process.

    Args:
        engine: its uuid.
        role: rollout, trainer, reference or draft.
        adapter: name of the adapter that records it.
        facts: from `rolltape.recorder.facts.model_facts`.
        requested: JSON-able settings that were asked for.
    """
    started = time.time_ns()

    def job(writer: TapeWriter) -> None:
        row = {k: v for k, v in facts.items() if k not in ("effective", "moe_layers")}
        layers = facts.get("moe_layers")
        writer.append(
            "engines",
            {
                **row,
                "engine": engine,
                "writer": writer.id,
                "role": role,
                "adapter": adapter,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "started_ns": started,
                "moe_layers": [layers],
                "requested": json.dumps(requested or {}, default=str),
                "effective": json.dumps(facts.get("effective", {}), default=str),
                "versions": json.dumps(library_versions()),
            },
        )

    return job


def weights_job(engine: str, version: int, digest: Digest) -> Job:
    """The `weights` row of a version that is completely in place."""
    t_ns = time.time_ns()

    def job(writer: TapeWriter) -> None:
        writer.append(
            "weights",
            {
                "engine": engine,
                "version": version,
                "state": "complete",
                "t_ns": t_ns,
                "group": "",
                "digest": digest.value,
                "tensors": digest.tensors,
                "elements": digest.elements,
            },
        )

    return job
