"""Rows of the `tactics` table: from any thread of an engine to the writer thread.

Imports nothing heavy: it is loaded with the libraries that it watches, in any process of a job.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rolltape.recorder.session import Session
    from rolltape.store import TapeWriter

#: `graph` of a choice made in a capture that nobody gave a key, see `capturing`.
UNNAMED_GRAPH = "unnamed"

_SESSIONS = "rolltape.recorder.session"
_refused = False  # said once that there is no recording


@dataclass(frozen=True, kw_only=True)
class Tactic:
    """One choice: the columns of a `tactics` row that the tuner decides.

    Args:
        tuner: flashinfer, tensorrt_llm, triton, inductor or torch.
        op: what it was chosen for.
        key: JSON-able: shapes and what else decides.
        source: chosen, cached, fallback, profiled or unrecorded.
        implementation: runner class, kernel or library.
        tactic: what the tuner returned, as text.
        graph: key of the CUDA graph being captured; None: eager.
        time_ms: as measured by the tuner or the profiler; not finite counts as unknown.
        reason: of an unrecorded choice: why nobody can see it.
    """

    tuner: str
    op: str
    key: Mapping[str, Any]
    source: str
    implementation: str | None = None
    tactic: str | None = None
    graph: str | None = None
    time_ms: float | None = None
    reason: str | None = None


class _Engine:
    """The engine of this process; "" while there is none, and for good once there are two."""

    id = ""
    several = False
    session: object = None


def current_session() -> Session | None:
    """The active session, started if `rolltape record` asked for one; cheap when there is none."""
    module = sys.modules.get(_SESSIONS)
    if module is not None and module._active is not None:
        return module._active  # type: ignore[no-any-return]
    if _refused or not os.environ.get("ROLLTAPE_TAPE"):
        return None
    return _started()


def _started() -> Session | None:
    from rolltape.recorder.session import recording

    global _refused
    session = recording()
    _refused = session is None  # said already, and asking again on every call would cost
    return session


def set_engine(session: object, engine: str) -> None:
    """From now on rows of this process belong to an engine.

    A process with several engines gives its rows to none: tuners do not know for whom they tune.
    """
    if _Engine.session is not session:
        _Engine.session, _Engine.id, _Engine.several = session, "", False
    if engine and engine != _Engine.id and not _Engine.several:
        _Engine.several = bool(_Engine.id)
        _Engine.id = "" if _Engine.several else engine


def engine_of(session: object) -> str:
    """Engine id for rows of a session, "" if this process has none or several."""
    return _Engine.id if _Engine.session is session else ""


def put(session: Session, tactics: Sequence[Tactic]) -> None:
    """Hand rows to the writer thread."""
    if not tactics:
        return
    finish_at_end(session)
    engine, mark = engine_of(session), fingerprint()
    columns: dict[str, Any] = {
        name: [getattr(t, name) for t in tactics]
        for name in ("tuner", "op", "source", "implementation", "tactic", "graph", "reason")
    }
    columns["key"] = [json.dumps(t.key, default=str, sort_keys=True) for t in tactics]
    columns["time_ms"] = [
        t.time_ms if t.time_ms is not None and math.isfinite(t.time_ms) else None for t in tactics
    ]
    columns |= {"engine": engine, "t_ns": time.time_ns(), "fingerprint": mark}

    def job(writer: TapeWriter) -> None:
        writer.append("tactics", {**columns, "writer": writer.id})

    nbytes = sum(len(key) for key in columns["key"]) + (256 + len(mark)) * len(tactics)
    detail = {"table": "tactics", "rows": len(tactics)}
    session.put(job, nbytes=nbytes, gap={"engine": engine or None, "detail": detail})


_ending: object = None  # session that has been told to call `finish`


def finish_at_end(session: Session) -> None:
    """Have `rolltape.recorder.tactics.bind.finish` called before the session closes."""
    global _ending
    if _ending is not session:
        from rolltape.recorder.tactics.bind import finish

        _ending = session
        session.before_close.append(finish)


_graph: str | None = None


@contextmanager
def capturing(key: str) -> Iterator[None]:
    """Choices made while this is open and a CUDA graph is being captured carry `key`.

    For adapters: only the engine knows what it calls its graphs.
    """
    global _graph
    outer, _graph = _graph, key
    try:
        yield
    finally:
        _graph = outer


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    torch: Any = sys.modules.get("torch")
    # a build without CUDA raises when it is asked about a stream
    return bool(
        torch is not None
        and torch.cuda.is_initialized()
        and torch.cuda.is_current_stream_capturing()
    )


def graph_key(capturing_now: bool) -> str | None:
    """The `graph` column of a choice made now."""
    return (_graph or UNNAMED_GRAPH) if capturing_now else None


_fingerprints: dict[tuple[int, object], str] = {}


def fingerprint() -> str:
    """JSON of what a tactic is only valid for: device, capability, library versions.

    Never starts CUDA: a process that has not touched the device has no device in it.
    """
    torch: Any = sys.modules.get("torch")
    device = None
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        device = torch.cuda.current_device()
    at = (os.getpid(), device)
    if at not in _fingerprints:
        _fingerprints[at] = json.dumps(_machine(torch, device), sort_keys=True, default=str)
    return _fingerprints[at]


def _machine(torch: Any, device: int | None) -> dict[str, Any]:
    from rolltape.recorder.provenance import library_versions

    facts: dict[str, Any] = {"versions": library_versions()}
    if torch is None:
        return facts
    facts["cpu"] = torch.backends.cpu.get_cpu_capability()
    if device is not None:
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda or torch.version.hip,
            "cudnn": torch.backends.cudnn.version(),
        }
    return facts
