"""The tapes and reports that were named, and which belongs to which."""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from rolltape.store.errors import NotATapeError, RolltapeError, TapeError
from rolltape.store.facts import FACTS
from rolltape.store.places import LocalPlace
from rolltape.store.rollups import sequence_facts
from rolltape.store.routes import Routes
from rolltape.store.schema import REPORT_TABLES, TAPE_TABLES
from rolltape.store.sequences import Sequence, Tape, open_tape
from rolltape.store.shards import list_shards
from rolltape.store.tape import (
    REPORT_HEADER,
    TAPE_HEADER,
    Report,
    kind_of,
    open_report,
    seal_problems,
)
from rolltape.viewer.answers import unknown
from rolltape.viewer.vocabulary import Vocabulary, load_vocabulary

#: A tape up to this size is checked as a whole when it is opened; damage of a larger one shows when
#: what is damaged is asked for.
_VERIFIED_BYTES = 512 << 20
#: Of each tape so much of what was read last is kept.
_CACHE_BYTES = 16 << 20
#: Seconds between two looks at a tape that is still being written.
LOOK_EVERY = 1.0
#: Seconds that a report without any shard is waited for.
_PATIENCE = 10.0
#: Pairs whose indexes and caches are kept; of those not looked at lately they are dropped.
KEPT_PAIRS = 2


@dataclass(frozen=True)
class Failure:
    """A path that could not be opened; the others are served all the same."""

    path: str
    message: str


@dataclass(frozen=True)
class Run:
    """A tape with the reports whose side A it is; or such reports alone, without their tape.

    Args:
        id: uuid of the tape, whether it is open or not.
        name: folder name, for people.
        tape: None when only reports name it.
        reports: oldest first.
    """

    id: str
    name: str
    tape: Tape | None
    reports: tuple[Report, ...]

    @property
    def shown(self) -> Report | None:
        """The report that it opens with: the newest against another role, else the newest.

        A rollout against its own re-execution says how far the engine repeats itself. Whoever
        opens the run wants to know how far the trainer is from it.
        """
        if not self.reports:
            return None
        own = {_fact(report, "a", "role") for report in self.reports}
        other = [r for r in self.reports if _fact(r, "b", "role") not in own]
        return (other or self.reports)[-1]


class Pair:
    """What one page looks at: a tape, one report about it, and the report's other tape.

    Args:
        run: the run.
        report: None before a diff was made.
        b: the report's side B, if it is open.
        parent: the tape that this one replays, if it is open.
        as_b: reports whose side B this tape is, with the run that they belong to.
        vocabulary: overrides the tokenizer of the model's folder.
    """

    def __init__(
        self,
        run: Run,
        report: Report | None,
        *,
        b: Tape | None,
        parent: Tape | None,
        as_b: tuple[tuple[str, Report], ...],
        vocabulary: Vocabulary | None,
    ) -> None:
        self.run = run
        self.report = report
        self.b = b
        self.parent = parent
        self.as_b = as_b
        self._vocabulary = vocabulary
        self._routes: dict[tuple[str, str], Routes | None] = {}

    @property
    def tape(self) -> Tape | None:
        """Side A."""
        return self.run.tape

    @property
    def summary(self) -> dict[str, Any]:
        """Summary of the report; empty without one."""
        return self.report.summary if self.report is not None else {}

    def side(self, name: str) -> dict[str, Any]:
        """What the summary says of tape `a` or `b`."""
        side = self.summary.get(name)
        return side if isinstance(side, dict) else {}

    @cached_property
    def compared(self) -> Mapping[str, dict[str, Any]]:
        """The report's `sequences` rows by sequence id of A; each is read when asked for."""
        return _Compared(self.report)

    @cached_property
    def facts(self) -> pa.Table:
        """A row a sequence of the tape, in the order in which they were opened.

        Columns as `rolltape.store.rollups.sequence_facts` has them; empty if no tape is open.
        """
        if self.tape is None:
            schema = TAPE_TABLES["rollups"]
            return pa.schema([("id", pa.string()), *map(schema.field, FACTS)]).empty_table()
        return sequence_facts(self.tape)

    def report_columns(self, names: list[str]) -> pa.Table:
        """Some columns of the report's `sequences`, in written order; read anew each time."""
        return self.report.columns("sequences", names) if self.report else _empty(names)

    @cached_property
    def counts(self) -> dict[str, int]:
        """Tokens of the report by what became of them: compared, masked, missing, non_finite."""
        names = ["compared", "masked", "missing", "non_finite"]
        rows = self.report_columns(names)
        return {name: int(pc.sum(rows.column(name)).as_py() or 0) for name in names}

    @cached_property
    def events(self) -> dict[str, tuple[int, str | None]]:
        """Per kind of event of the tape how many there are, and the detail of the first one."""
        found: dict[str, tuple[int, str | None]] = {}
        if self.tape is None:
            return found
        names = ["kind", "detail"]
        schema = pa.schema([self.tape.schemas["events"].field(name) for name in names])
        batches = (batch for _, _, batch in self.tape.batches("events", names))
        # many at a time: recorders commit few rows together, and each look costs as much
        while some := list(itertools.islice(batches, 256)):
            table = pa.Table.from_batches(some, schema)
            kinds = table.column("kind")
            for row in pc.value_counts(kinds).to_pylist():
                kind, count = row["values"], row["counts"]
                if kind not in found:
                    found[kind] = 0, table.column("detail")[pc.index(kinds, kind).as_py()].as_py()
                found[kind] = found[kind][0] + count, found[kind][1]
        return found

    @cached_property
    def fingerprint(self) -> str | None:
        """Of all that an answer about this pair is made of; None as long as it may still grow."""
        folders = (self.tape, self.b, self.parent, self.report)
        if any(isinstance(f, Tape) and f.seal is None for f in folders):
            return None
        said = [f.fingerprint if f is not None else "none" for f in folders]
        said += [f"report {r.uuid}" for r in self.run.reports]
        said += [f"side B of {r.uuid} of {run}" for run, r in self.as_b]
        return xxhash.xxh3_128_hexdigest("\0".join(said).encode())

    def find(self, sequence: str) -> Sequence | None:
        """The tape's sequence with that id; None if the tape is not open or lacks it."""
        return self.tape.find(sequence) if self.tape is not None else None

    def report_rows(
        self,
        table: str,
        sequence: str,
        columns: list[str] | None = None,
        sites: Collection[str] | None = None,
    ) -> pa.Table:
        """The report's rows of one sequence of A, in written order.

        Args:
            table: `tokens` or `activations`.
            sequence: id on side A.
            columns: only these; None is all.
            sites: of `activations`: only these; None is all.
        """
        if self.report is None:
            names = REPORT_TABLES[table].names if columns is None else columns
            return REPORT_TABLES[table].empty_table().select(names)
        return self.report.of(table, sequence, columns, sites)

    def partner(self, sequence: str) -> Sequence | None:
        """Side B's sequence, if its tape is open."""
        row = self.compared.get(sequence) if self.b is not None else None
        return self.b.find(row["b"]) if self.b is not None and row else None

    def routes(self, sequence: Sequence, role: str) -> Routes | None:
        """Routes of one sequence; the last few are kept."""
        key = (f"{sequence.tape.uuid}/{sequence.id}", role)
        if key not in self._routes:
            while len(self._routes) >= 4:
                del self._routes[next(iter(self._routes))]
            self._routes[key] = sequence.routes(role)
        return self._routes[key]

    @cached_property
    def tokenizer(self) -> tuple[Vocabulary | None, str]:
        """Vocabulary, and why there is none."""
        if self._vocabulary is not None:
            return self._vocabulary, ""
        models = [m for t in (self.tape, self.b) if t is not None for m in _models(t)]
        for model in models:
            if (Path(model) / "tokenizer.json").is_file():
                try:
                    return load_vocabulary(Path(model)), ""
                except RolltapeError as error:
                    return None, str(error)
        where = f"no tokenizer.json in {models[0]}" if models else "the tape names no model"
        return None, f"{where}; start the viewer with --tokenizer PATH to read text"

    @cached_property
    def seal_problems(self) -> list[str]:
        """Shards that a seal lists and that are gone or cut."""
        tapes = [t for t in (self.tape, self.b) if t is not None]
        return [problem for t in tapes for problem in seal_problems(t.place, t.seal)]

    @property
    def problems(self) -> list[str]:
        """Damage found so far, in the order found; tables are read when they are needed."""
        found = list(self.seal_problems)
        for folder in (self.tape, self.b, self.report):
            found += folder.problems if folder is not None else []
        return list(dict.fromkeys(found))


class _Compared(Mapping[str, dict[str, Any]]):
    """Rows of a report's `sequences` by the id of side A; the last one of an id counts."""

    def __init__(self, report: Report | None) -> None:
        self._report = report
        self._kept: OrderedDict[str, dict[str, Any]] = OrderedDict()

    @cached_property
    def _ids(self) -> pa.Array:
        if self._report is None:
            return pa.array([], pa.string())
        return self._report.columns("sequences", ["a"]).column("a").combine_chunks()

    def __getitem__(self, sequence: str) -> dict[str, Any]:
        if sequence not in self._kept:
            rows = pc.indices_nonzero(pc.equal(self._ids, sequence))
            if not len(rows) or self._report is None:
                raise KeyError(sequence)
            found: list[dict[str, Any]] = []
            with self._report.damage():
                found = self._report.take("sequences", [rows[-1].as_py()]).to_pylist()
            if not found or found[0]["a"] != sequence:  # damaged
                raise KeyError(sequence)
            self._kept[sequence] = found[0]
            while len(self._kept) > 64:
                self._kept.popitem(last=False)
        return self._kept[sequence]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(self._ids.to_pylist()))

    def __len__(self) -> int:
        return len(pc.unique(self._ids))


def _empty(names: list[str]) -> pa.Table:
    return REPORT_TABLES["sequences"].empty_table().select(names)


@dataclass
class _Opened:
    path: Path
    folder: Tape | Report
    look: tuple[Any, ...] = ()
    looked: float = field(default=0.0)
    header: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Made:
    """The runs of the folders that are open, and by tape the reports whose side B it is."""

    runs: tuple[Run, ...]
    as_b: Mapping[str, list[tuple[str, Report]]]


class Library:
    """Everything that the viewer serves. Not thread-safe: hold `lock` around any use.

    Args:
        paths: tapes, reports, or folders that hold some.
        tokenizer: `tokenizer.json` for every run, or None.
        follow: open what appears in the folders later.
        clock: seconds, monotonic.

    Raises:
        NotATapeError: a path is none of these.
    """

    def __init__(
        self,
        paths: Iterable[Path],
        *,
        tokenizer: Path | None = None,
        follow: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Arrow imports pandas when it is first given a Python value, if it is installed: 0.3 s that
        # pass here while the browser starts. A request that comes sooner waits for it as ever.
        threading.Thread(target=pa.scalar, args=(0,), name="rolltape-imports").start()
        self.lock = threading.Lock()
        self.failures: list[Failure] = []
        self.generation = 0  # counts how often a tape was opened again
        self.follow = follow
        self._clock = clock
        self._paths = [Path(p) for p in paths]
        self._seen: set[Path] = set()
        self._lost: set[Path] = set()  # was open, and cannot be read any more
        self._looks: dict[Path, tuple[Any, ...]] = {}
        self._searched = clock()
        self._vocabulary = load_vocabulary(tokenizer) if tokenizer is not None else None
        self._opened: dict[str, _Opened] = {}
        self._pairs: OrderedDict[tuple[str, str], Pair] = OrderedDict()
        self._made: _Made | None = None  # as long as the same folders are open
        for path in self._paths:
            for folder in _find(path):
                self._open(folder)
        self._forget_failed()

    def refresh(self) -> None:
        """Open again what has grown since the last look; with `follow` what is new as well."""
        now = self._clock()
        if (self.follow or self._lost) and now - self._searched >= LOOK_EVERY:
            self._searched = now
            self._search()
        for uuid, opened in list(self._opened.items()):
            folder = opened.folder
            if not isinstance(folder, Tape) or folder.seal is not None:
                continue
            if now - opened.looked < LOOK_EVERY:
                continue
            opened.looked = now
            try:
                look = _look(opened.path)
                if look != opened.look:
                    opened.look = look
                    opened.folder = _open_tape(opened.path)
                    self._changed()
            except (RolltapeError, OSError) as error:
                self._lose(uuid, error)

    def _changed(self) -> None:
        """Other folders are open than before."""
        self._made = None
        self._pairs.clear()
        self.generation += 1

    def _lose(self, uuid: str, error: Exception) -> None:
        """A folder that cannot be read any more, say because it was removed: that is told."""
        path = self._opened.pop(uuid).path
        self._seen.discard(path)
        self._lost.add(path)
        self.failures.append(Failure(str(path), str(error)))
        self._changed()

    def _search(self) -> None:
        """Open what has appeared in the folders since they were last searched.

        Without `follow` only what was open before, and could not be read meanwhile.
        """
        before = len(self._opened)
        if self.follow:
            self._drop_replaced()
        for path in self._paths:
            for folder in _find(path) if path.is_dir() else ():
                if folder in self._seen or not (self.follow or folder in self._lost):
                    continue
                if self._is_there(folder):
                    self.failures = [f for f in self.failures if f.path != str(folder)]
                    self._open(folder)
        self._forget_failed()
        if len(self._opened) != before:
            self._changed()

    def _drop_replaced(self) -> None:
        """Another tape or report may stand where one stood: it is opened as what it is."""
        for uuid, opened in list(self._opened.items()):
            header = _header(opened.path)
            if header and header != opened.header:
                del self._opened[uuid]
                self._seen.discard(opened.path)
                self._changed()

    def _forget_failed(self) -> None:
        """What could not be opened may be whole next time."""
        self._seen -= {Path(f.path) for f in self.failures}

    def _is_there(self, folder: Path) -> bool:
        """A tape can be read while it is written; a report is waited for until it has settled."""
        if kind_of(folder) == "tape":
            return True
        look = _look(folder)
        before, self._looks[folder] = self._looks.get(folder), look
        if len(look) == 1:  # no shard: nothing was compared, or it is about to be written
            return time.time() - (folder / "report.json").stat().st_mtime > _PATIENCE
        return before == look and all(str(part[1]).endswith(".arrow") for part in look[1:])

    def runs(self) -> tuple[Run, ...]:
        """Tapes in the order named, replays of them after them, then reports without a tape."""
        return self._runs_and_sides().runs

    def _runs_and_sides(self) -> _Made:
        if self._made is None:
            runs = self._make_runs()
            as_b: dict[str, list[tuple[str, Report]]] = {}
            for run in runs:
                for report in run.reports:
                    as_b.setdefault(_side(report, "b") or "", []).append((run.id, report))
            self._made = _Made(runs, as_b)
        return self._made

    def _make_runs(self) -> tuple[Run, ...]:
        tapes = {u: o.folder for u, o in self._opened.items() if isinstance(o.folder, Tape)}
        reports: dict[str, list[Report]] = {}
        for opened in self._opened.values():
            if isinstance(opened.folder, Report):
                reports.setdefault(_side(opened.folder, "a") or opened.folder.uuid, []).append(
                    opened.folder
                )
        for found in reports.values():
            found.sort(key=lambda r: str(r.header.get("created", "")))
        runs = [
            Run(uuid, tape.path.name, tape, tuple(reports.pop(uuid, ())))
            for uuid, tape in tapes.items()
        ]
        runs.sort(key=lambda run: run.tape is not None and run.tape.parent in tapes)
        alone = (Run(uuid, r[0].path.name, None, tuple(r)) for uuid, r in reports.items())
        return (*runs, *alone)

    def pair(self, run_id: str, report_id: str | None) -> Pair:
        """The run with one of its reports, by default `Run.shown`.

        Raises:
            Problem: 404, no such run or report.
        """
        if (run_id, report_id or "") in self._pairs:
            self._pairs.move_to_end((run_id, report_id or ""))
            return self._pairs[run_id, report_id or ""]
        run = next((r for r in self.runs() if r.id == run_id), None)
        if run is None:
            raise unknown("run", run_id, "it is not among the paths that the viewer was given")
        report = run.shown
        if report_id is not None:
            report = next((r for r in run.reports if r.uuid == report_id), None)
            if report is None:
                raise unknown(
                    "report", report_id, "it is not among the paths given, or not of this tape"
                )
        pair = self._pair(run, report)
        self._pairs[run_id, report_id or ""] = pair
        return pair

    def shown(self, run: Run) -> Pair:
        """A run with the report it opens with, to say a word of it: that is not looking at it."""
        return self._pairs.get((run.id, "")) or self._pair(run, run.shown)

    def _pair(self, run: Run, report: Report | None) -> Pair:
        return Pair(
            run,
            report,
            b=self._tape(_side(report, "b") if report is not None else None),
            parent=self._tape(run.tape.parent if run.tape is not None else None),
            as_b=tuple(self._runs_and_sides().as_b.get(run.id, ())),
            vocabulary=self._vocabulary,
        )

    def forget(self) -> list[Pair]:
        """Drop the indexes and caches of pairs that were not looked at lately.

        Returns:
            The pairs that are dropped; whoever keeps something of theirs should drop it, too.
        """
        dropped = []
        while len(self._pairs) > KEPT_PAIRS:
            _, pair = self._pairs.popitem(last=False)
            dropped.append(pair)
        kept = {f.uuid for p in self._pairs.values() for f in _folders(p)}
        for folder in {f.uuid: f for p in dropped for f in _folders(p)}.values():
            opened = self._opened.get(folder.uuid)
            if folder.uuid not in kept and opened is not None and opened.folder is folder:
                try:
                    opened.folder = _reopened(folder)
                except (RolltapeError, OSError) as error:
                    self._lose(folder.uuid, error)
                    continue
                opened.folder.problems += folder.problems
                self._made = None  # it names the folder that was dropped
        return dropped

    def _tape(self, uuid: str | None) -> Tape | None:
        opened = self._opened.get(uuid) if uuid is not None else None
        return opened.folder if opened and isinstance(opened.folder, Tape) else None

    def _open(self, path: Path) -> None:
        self._seen.add(path)
        try:
            folder: Tape | Report = (
                _open_tape(path) if kind_of(path) == "tape" else _lean_report(path)
            )
        except TapeError as error:
            self.failures.append(Failure(str(path), str(error)))
            return
        if isinstance(folder, Report):
            if not isinstance(folder.header.get("summary"), dict):
                message = f"{path / 'report.json'}: no summary; write the report anew"
                self.failures.append(Failure(str(path), message))
                return
            # reports have had a row a sequence there, which the table has, too
            folder.header["summary"].pop("by_sequence", None)
        if folder.uuid in self._opened:
            first = self._opened[folder.uuid].path
            if first.resolve() != path.resolve():
                message = f"{path}: a copy of {first}, which is shown instead"
                self.failures.append(Failure(str(path), message))
            return
        look = _look(path) if isinstance(folder, Tape) and folder.seal is None else ()
        self._opened[folder.uuid] = _Opened(path, folder, look, self._clock(), _header(path))
        self._lost.discard(path)
        self._made = None


def _find(path: Path) -> list[Path]:
    if kind_of(path) is not None:
        return [path]
    if not path.is_dir():
        raise NotATapeError(
            f"{path} is not a tape or a report",
            hint="it is a file" if path.exists() else "no such file or folder",
        )
    found = (p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    return sorted(p for p in found if kind_of(p) is not None)


def _open_tape(path: Path) -> Tape:
    """A tape whose damage is known as far as looking for it takes no time that anyone notices."""
    tape = _lean(path)
    tape.verify(_VERIFIED_BYTES)
    return tape


def _lean(path: Path) -> Tape:
    """A tape that takes little memory: several are open at once, and pages read each part once."""
    place = LocalPlace(path, mapped=False)
    return open_tape(place, skip_damaged=True, cache_bytes=_CACHE_BYTES)


def _lean_report(path: Path) -> Report:
    return open_report(LocalPlace(path, mapped=False), skip_damaged=True)


def _folders(pair: Pair) -> list[Tape | Report]:
    return [f for f in (pair.tape, pair.b, pair.parent, pair.report) if f is not None]


def _reopened(folder: Tape | Report) -> Tape | Report:
    """The same, with nothing read yet."""
    if isinstance(folder, Tape):
        return _lean(folder.path)
    report = _lean_report(folder.path)
    report.header = folder.header
    return report


def _look(path: Path) -> tuple[Any, ...]:
    seen: list[Any] = [(path / "seal.json").exists()]
    for table in sorted(p for p in path.iterdir() if p.is_dir()):
        for shard in list_shards(table):
            with suppress(FileNotFoundError):  # a live shard is renamed when it is finished
                seen.append((table.name, shard.name, shard.stat().st_size))
    return tuple(seen)


def _header(path: Path) -> tuple[int, ...]:
    """Which file the header is; empty when there is none. A header is written once."""
    for name in (TAPE_HEADER, REPORT_HEADER):
        with suppress(FileNotFoundError):
            found = (path / name).stat()
            return found.st_ino, found.st_mtime_ns, found.st_size
    return ()


def _fact(report: Report, side: str, name: str) -> str | None:
    facts = report.summary.get(side)
    value = facts.get(name) if isinstance(facts, dict) else None
    return value if isinstance(value, str) else None


def _side(report: Report, name: str) -> str | None:
    side = report.summary.get(name)
    uuid = side.get("uuid") if isinstance(side, dict) else None
    return str(uuid) if uuid else None


def _models(tape: Tape) -> list[str]:
    return [str(row["model"]) for row in tape.engines.values() if row.get("model")]
