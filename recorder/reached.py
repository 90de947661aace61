"""Workers that a recording did not reach: a front end recorded, and none of those it spoke to.

A front end alone knows tokens and logprobs. That a tape has no steps and no routes of an engine is
not to be taken for an engine without them.
"""

from __future__ import annotations

import json
import time

import pyarrow.compute as pc

from rolltape.recorder.settings import Finding
from rolltape.store import TapeWriter
from rolltape.store.places import Place
from rolltape.store.tape import open_folder

CODE = "RT410"
#: Adapters of which each engine that has generated has a row of a worker as well.
_ADAPTERS = frozenset({"tensorrt_llm", "vllm"})
_POLL_SECONDS = 0.1


def find_unreached(place: Place, *, wait_s: float = 0.0) -> list[str]:
    """Write an event of kind `finding` for each engine of which only the front end recorded.

    Args:
        place: a tape whose processes have ended, or have been told to.
        wait_s: so long a worker that is still at work is given to write its first rows.

    Returns:
        What the new findings say.
    """
    until = time.monotonic() + wait_s
    while (engines := _unreached(place)) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
    events = open_folder(place, skip_damaged=True).table("events")
    known = {r["engine"] for r in events.to_pylist() if CODE in (r["detail"] or "")}
    findings = {engine: _finding(engine) for engine in sorted(engines - known)}
    if not findings:
        return []
    with TapeWriter(place) as writer:
        for engine, finding in findings.items():
            row = {"engine": engine, "writer": writer.id, "t_ns": time.time_ns()}
            detail = json.dumps(finding.as_detail())
            writer.append("events", {**row, "kind": "finding", "detail": detail})
    return [f"{f.message} ({f.remedy})" for f in findings.values()]


def _unreached(place: Place) -> set[str]:
    folder = open_folder(place, skip_damaged=True)
    table = folder.table("engines").select(["engine", "adapter", "process"])
    rows = [row for row in table.to_pylist() if row["adapter"] in _ADAPTERS]
    fronts = {row["engine"] for row in rows if row["process"] == "frontend"}
    fronts -= {row["engine"] for row in rows if row["process"] != "frontend"}
    if not fronts:
        return fronts
    sequences = folder.table("sequences")
    longer = pc.greater(sequences.column("length"), sequences.column("prompt_len"))
    return fronts & set(sequences.filter(longer).column("engine").to_pylist())


def _finding(engine: str) -> Finding:
    return Finding(
        code=CODE,
        message=f"engine {engine[:8]}: only its front end was recorded, none of its workers: "
        "it has no steps and no routes",
        remedy="make the engine, and a pool that it is given, inside of the recording; workers of "
        "an MPI pool need a .pth of rolltape in their environment (--inject pth): "
        "docs/injection.md",
    )
