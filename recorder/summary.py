"""What a recording left: read from the tables of the tape, never from what the job claimed."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rolltape.recorder.inject._rolltape_hook import HOOKS
from rolltape.recorder.reached import CODE
from rolltape.store import TapeWriter
from rolltape.store.places import Place
from rolltape.store.tape import open_folder

_IDLE_SHOWN = 2  # processes that recorded nothing and are named without -v
_HEARTBEAT = re.compile(r"\d+-\d+")


@dataclass(frozen=True, kw_only=True)
class Process:
    """A Python process of the job that loaded the import hook, by its heartbeat."""

    pid: int
    host: str
    executable: str
    argv0: str
    helper: bool


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a tape holds.

    Args:
        sequences: number of sequences by how they finished; `open` did not.
        tokens: positions with recorded token ids, prompts included.
        bytes: size of all files.
        supports: whether kept sets of truncated sampling were recorded.
        gaps: number of recorded gaps.
        gap_tokens: positions that they name; a gap may not know how many it lost.
        hook_errors: recorded faults of hooks.
        notices: other recorded remarks.
        messages: what the hook had to say before a recorder was there, one line each.
        unreached: what engines of which only the front end recorded are said to lack.
        seen: Python processes of this part of the job.
        recording: (host, pid) of those that recorded.
        live: shards that a process is still writing.
        recovered: shards that a dead process had left unfinished.
        problems: damage found on reading.
        before: what was on the tape before this part, for `--append`.
    """

    sequences: Mapping[str, int]
    tokens: int
    bytes: int
    supports: bool
    gaps: int
    gap_tokens: int
    hook_errors: int
    notices: int
    messages: tuple[str, ...]
    seen: tuple[Process, ...]
    recording: frozenset[tuple[str, int]]
    live: tuple[str, ...]
    recovered: tuple[Mapping[str, Any], ...]
    problems: tuple[str, ...]
    before: Summary | None = None
    unreached: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Number of sequences."""
        return sum(self.sequences.values())

    @property
    def added(self) -> int:
        """Number of sequences that this part added."""
        return self.total - (self.before.total if self.before else 0)

    @property
    def faults(self) -> int:
        """Gaps and hook errors that this part added, and damage."""
        former = self.before.gaps + self.before.hook_errors if self.before else 0
        return self.gaps + self.hook_errors - former + len(self.problems)

    @property
    def idle(self) -> tuple[Process, ...]:
        """Processes that loaded the hook and recorded nothing; helpers of Python left out."""
        return tuple(p for p in self.seen if not p.helper and (p.host, p.pid) not in self.recording)

    @property
    def processes(self) -> int:
        """Python processes seen, forked ones that recorded included."""
        return len({(p.host, p.pid) for p in self.seen if not p.helper} | self.recording)

    def as_json(self) -> dict[str, Any]:
        """For `--summary-json`."""
        return {
            "sequences": self.total,
            "by_finish": dict(self.sequences),
            "added": self.added,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "supports": self.supports,
            "gaps": self.gaps,
            "gap_tokens": self.gap_tokens,
            "hook_errors": self.hook_errors,
            "notices": self.notices,
            "messages": list(self.messages),
            "unreached": list(self.unreached),
            "processes": {
                "seen": self.processes,
                "recording": len(self.recording),
                "not_recording": [
                    {"pid": p.pid, "host": p.host, "executable": p.executable, "argv0": p.argv0}
                    for p in self.idle
                ],
            },
            "live_shards": list(self.live),
            "recovered_shards": [dict(r) for r in self.recovered],
            "problems": list(self.problems),
        }


def summarize(place: Place, procs: Path, *, before: Summary | None = None) -> Summary:
    """Count what a tape holds.

    Args:
        place: the tape; sealed or not.
        procs: folder with the heartbeats of its processes.
        before: its summary from before this part of the recording.
    """
    folder = open_folder(place, skip_damaged=True)
    events = folder.table("events")
    kinds = Counter(events.column("kind").to_pylist())
    gaps = events.filter(pc.equal(events.column("kind"), "gap"))
    sealed = folder.seal or {}
    processes, foreign = _heartbeats(procs)
    former = {(p.host, p.pid) for p in before.seen} | before.recording if before else set()
    recording = {
        (row["host"] or os.uname().nodename, row["pid"])
        for row in folder.table("engines").select(["host", "pid"]).to_pylist()
        if row["pid"] is not None
    }
    # only that column: the others may be gigabytes
    tokens = sum(pc.sum(b.column(0)).as_py() or 0 for _, _, b in folder.batches("tokens", ["n"]))
    return Summary(
        sequences=_by_finish(folder.table("sequences")),
        tokens=tokens,
        bytes=place.nbytes(),
        supports=bool(folder.files("supports")),
        gaps=kinds["gap"],
        gap_tokens=pc.sum(gaps.column("n")).as_py() or 0,
        hook_errors=kinds["hook_error"],
        notices=kinds["notice"],
        messages=tuple(m for m in _messages(events) if not before or m not in before.messages),
        seen=tuple(p for p in processes if (p.host, p.pid) not in former),
        recording=frozenset(recording - former),
        live=tuple(sealed.get("live", ())),
        recovered=tuple(sealed.get("recovered", ())),
        problems=(*folder.problems, *foreign),
        before=before,
        unreached=tuple(_unreached(events)),
    )


def _by_finish(sequences: pa.Table) -> dict[str, int]:
    # a key has a row when it opens and one when it closes; the closing one counts
    finish: dict[tuple[Any, ...], str] = {}
    columns = ("engine", "request", "sample", "pass", "finish")
    for *key, how in zip(*(sequences.column(c).to_pylist() for c in columns), strict=True):
        if how != "open" or tuple(key) not in finish:
            finish[tuple(key)] = how
    return dict(sorted(Counter(finish.values()).items()))


def _heartbeats(folder: Path) -> tuple[list[Process], list[str]]:
    found, problems = [], []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not _HEARTBEAT.fullmatch(path.name):
            continue
        try:
            facts = json.loads(path.read_text())
            found.append(
                Process(
                    pid=int(facts["pid"]),
                    host=str(facts["host"]),
                    executable=str(facts["executable"]),
                    argv0=str(facts["argv0"]),
                    helper=bool(facts["helper"]),
                )
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            problems.append(f"{path}: not a heartbeat: {type(error).__name__}: {error}")
    return found, problems


def notes_to_events(place: Place, procs: Path) -> None:
    """Move what the hook had to say, which knows no Arrow, into the `events` table."""
    notes = sorted(procs.glob("note-*"))
    if not notes:
        return
    with TapeWriter(place) as writer:
        for note in notes:
            facts = json.loads(note.read_text())
            detail = {"hook": facts["about"], "error": facts["text"], "pid": facts["pid"]}
            row = {"writer": writer.id, "t_ns": facts["t_ns"], "kind": "hook_error"}
            writer.append("events", {**row, "detail": json.dumps(detail)})
    for note in notes:
        note.unlink()


def _messages(events: pa.Table) -> Iterator[str]:
    errors = events.filter(pc.equal(events.column("kind"), "hook_error"))
    for text in errors.column("detail").to_pylist():
        detail = json.loads(text) if text else {}
        if isinstance(detail, dict) and "error" in detail:
            yield f"{detail.get('hook', 'hook')}: {detail['error']}"


def _unreached(events: pa.Table) -> Iterator[str]:
    for text in events.filter(pc.equal(events.column("kind"), "finding")).column("detail"):
        detail = json.loads(text.as_py() or "{}")
        if detail.get("code") == CODE:
            yield f"{detail['message']}; {detail['remedy']}"


# -- for people ---------------------------------------------------------------------------


def lines(summary: Summary, *, wall_s: float, every: bool = False) -> list[str]:
    """The summary of a recording in which something was recorded or lost.

    Args:
        summary: what the tape holds.
        wall_s: seconds that the command ran.
        every: name every process that recorded nothing, not only the first.
    """
    out = []
    if summary.total:
        how = ", ".join(f"{n:,} {finish}" for finish, n in summary.sequences.items())
        out.append(
            f"{_count(summary.total, 'sequence')} ({how}), {_count(summary.tokens, 'token')}, "
            f"{summary.bytes / 1e6:.1f} MB on disk; {wall_s:.1f} s"
        )
        if summary.before is not None:
            out.append(f"this part added {_count(summary.added, 'sequence')}")
    incomplete = summary.sequences.get("open", 0)
    gaps = _count(summary.gaps, "gap") if summary.gaps else "no gaps recorded"
    if incomplete:
        gaps = f"INCOMPLETE: {_count(incomplete, 'sequence')} never closed; {gaps}"
    if summary.gap_tokens:
        gaps += f" ({_count(summary.gap_tokens, 'token')} dropped)"
    if summary.hook_errors:
        gaps += f", {_count(summary.hook_errors, 'hook error')}"
    processes = _count(summary.processes, "Python process", "Python processes")
    recording = len(summary.recording)
    idle = summary.processes - recording
    out.append(f"{gaps}; {processes}: {recording} recording, {idle} not")
    out += idle_lines(summary)[: None if every else _IDLE_SHOWN]
    if len(summary.idle) > _IDLE_SHOWN and not every:
        out.append(f"not recording: {len(summary.idle) - _IDLE_SHOWN} more, see -v")
    if summary.recovered:
        rows = sum(int(r["rows"]) for r in summary.recovered)
        out.append(
            f"recovered {_count(rows, 'row')} from {_count(len(summary.recovered), 'shard')} "
            "that a dead process had left open"
        )
    return out


def idle_lines(summary: Summary) -> list[str]:
    """The processes that recorded nothing, a line each, and why."""
    return [
        f"not recording: no engine was seen to generate in process {p.pid}, "
        f"{p.executable} {p.argv0}"
        for p in summary.idle
    ]


#: Hooked, and generate nothing themselves.
_NO_ENGINES = {"flashinfer", "ray", "torch", "triton", "trl"}


def why_nothing(summary: Summary, *, inject: str) -> str:
    """The most likely reason why a recording is empty."""
    engines = ", ".join(sorted({name.partition(".")[0] for name in HOOKS} - _NO_ENGINES))
    if summary.messages:
        return "nothing was recorded: the recorder failed, see below"
    if summary.recording:
        return "nothing was recorded: an engine ran in a recorded process but made no sequence"
    if summary.seen:
        count = _count(summary.processes, "Python process", "Python processes")
        return (
            f"nothing was recorded: {count} loaded the recorder, "
            f"and none of them generated with a supported engine ({engines})"
        )
    why = "it is not a Python job, or its Python runs with -E, -I or -S or another PYTHONPATH"
    if inject == "pth":
        why = "it is not a Python job, or it runs another interpreter, or with -S"
    remedy = "" if inject == "pth" else "; --inject pth reaches -E and -I"
    return f"nothing was recorded: no Python process loaded the recorder ({why}{remedy})"


def _count(n: int, one: str, many: str | None = None) -> str:
    return f"{n:,} {one if n == 1 else many or one + 's'}"
