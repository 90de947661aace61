"""Jobs for the writer thread that write the small tables: engines, weights."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from rolltape.recorder.digest import Digest, GroupDigest
from rolltape.recorder.provenance import library_versions, mask_settings
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
                "requested": _settings(requested or {}),
                "effective": _settings(facts.get("effective", {})),
                "versions": json.dumps(library_versions()),
            },
        )

    return job


def _settings(values: Any) -> str:
    # plain first: what JSON does not know is masked as the text that it becomes
    return json.dumps(mask_settings(json.loads(json.dumps(values, default=str))))


def weights_job(
    engine: str,
    version: int,
    digest: Digest | Sequence[GroupDigest],
    *,
    state: str = "complete",
    label: str | None = None,
    t_ns: int | None = None,
) -> Job:
    """The `weights` rows of a version, one a tensor group.

    Args:
        engine: its uuid.
        version: number of the version.
        digest: of every group, or of the whole model under the names that its modules have.
        state: `complete`, or `dirty` while it is being written.
        label: the job's name of the version.
        t_ns: when that was so; by default now.
    """
    t_ns = time.time_ns() if t_ns is None else t_ns
    rows: Sequence[Digest | GroupDigest] = [digest] if isinstance(digest, Digest) else digest

    def job(writer: TapeWriter) -> None:
        writer.append(
            "weights",
            {
                "engine": engine,
                "version": [version] * len(rows),
                "state": state,
                "t_ns": t_ns,
                "group": [getattr(row, "group", "") for row in rows],
                "digest": [row.value for row in rows],
                "tensors": [row.tensors for row in rows],
                "elements": [row.elements for row in rows],
                "label": label,
                "reason": [getattr(row, "reason", None) for row in rows],
            },
        )

    return job
