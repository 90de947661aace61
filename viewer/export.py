"""A folder of static files that shows chosen sequences: the page, and the answers it asks for.

The answers are those of the interface itself, asked in this process. `js/static_api.js` gives them
to the page in place of a server. Lists hold the chosen sequences alone; numbers about the whole run
(overview, causes, weights) stay what they are. Of a long schedule the steps of the chosen sequences
are there one by one, the others as bins.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from itertools import permutations
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from rolltape.store.errors import TapeExistsError, UsageError
from rolltape.viewer.app import make_app
from rolltape.viewer.assets import assets
from rolltape.viewer.bundle import Asked, Bundle, quoted, write_file
from rolltape.viewer.columns import MAX_WINDOW
from rolltape.viewer.heat import METRICS
from rolltape.viewer.security import POLICY

#: Positions, or steps, whose details stand in one file.
CHUNK = 64
#: Positions of a tile of the map of layers, all sites of it.
TILE = 1024
#: Thresholds of the front that the page offers besides the noise floor, as it writes them;
#: `THRESHOLDS` in js/heat_math.js.
THRESHOLDS = ("0", "1e-7", "1e-6", "1e-5", "1e-4", "1e-3", "1e-2", "1e-1", "1")
#: Positions of a window of routing; `WINDOW` in js/routing_math.js.
ROUTING = 2048

_MOST_REPORTS = 6  # of which every two are put side by side
_SPANS = 5000  # that the page asks for at a time
_MOST_SPANS = 20_000
_MOST_WINDOWS = 16  # of the timeline, where the whole of it is bins
_MOST_ROWS = 64  # of a step


@dataclass
class _Seen:
    """What the chosen sequences of a run were made by.

    Args:
        lengths: positions by sequence.
        steps: by sequence and engine.
        windows: of the timeline in which there is every step, as in its address.
        sides: reports of which every two are put side by side.
        every_step: whether each step of the schedule can be opened.
    """

    lengths: dict[str, int] = field(default_factory=dict)
    steps: dict[str, dict[str, set[int]]] = field(default_factory=dict)
    windows: list[tuple[int, int]] = field(default_factory=list)
    sides: list[str] = field(default_factory=list)
    every_step: bool = True


def export(
    paths: Iterable[Path], out: Path, sequences: Iterable[str], *, tokenizer: Path | None = None
) -> dict[str, Any]:
    """Write the folder.

    Args:
        paths: tapes, reports or folders that hold some.
        out: folder that does not exist, or is empty.
        sequences: ids, whole or the part after the engine.
        tokenizer: as for `make_app`.

    Returns:
        `sequences`: ids by run, `files`, `bytes`, `sizes`: bytes by screen.

    Raises:
        TapeExistsError: `out` is not empty.
        UsageError: no run has such a sequence, or an answer cannot be had. Nothing is left behind.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TapeExistsError(f"{out} is not empty", hint="choose another --export, or remove it")
    given = list(paths)
    with _whole(out) as part, Asked(make_app(given, tokenizer=tokenizer)) as app:
        bundle = Bundle(part, app)
        chosen, seen = _write(bundle, list(dict.fromkeys(sequences)))
        _page(bundle, seen, shlex.join(["rolltape", "view", *map(str, given)]))
    return {
        "sequences": chosen,
        "files": len(bundle.written),
        "bytes": sum(bundle.written.values()),
        "sizes": bundle.sizes,
    }


@contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """A folder beside `out` that takes its place once it is complete."""
    out = out.resolve()
    part = out.with_name(f".{out.name}.{uuid4().hex[:8]}")
    try:
        yield part
        if out.exists():
            out.rmdir()
        part.rename(out)
    finally:
        if part.exists():
            shutil.rmtree(part)


def _write(bundle: Bundle, names: list[str]) -> tuple[dict[str, list[str]], dict[str, _Seen]]:
    runs = bundle.ask("api/runs")
    chosen = _choose(bundle, runs["runs"], names)
    kept = [run for run in runs["runs"] if run["id"] in chosen]
    bundle.put("api/runs", {**runs, "follow": False, "runs": kept})
    bundle.put("api/notes", {"file": None, "items": []})
    return chosen, {run["id"]: _run(bundle, run, chosen[run["id"]]) for run in kept}


def _choose(bundle: Bundle, runs: list[dict[str, Any]], names: list[str]) -> dict[str, list[str]]:
    """Ids by run, of which each can be asked for.

    Raises:
        UsageError: one cannot; it is named as it was given.
    """
    chosen: dict[str, dict[str, str]] = {}  # by run: id, and how it was given
    found: set[str] = set()
    for name in names:
        for run in runs:
            for there in _containing(bundle, f"api/runs/{run['id']}/seqs", name):
                if name in (there, there.partition(".")[2]):
                    found.add(name)
                    chosen.setdefault(run["id"], {}).setdefault(there, name)
    lost = [name for name in names if name not in found]
    if lost:
        text = "; ".join(f"--sequences {name}: no run has it" for name in lost)
        raise UsageError(text, hint="`rolltape show` lists ids")
    with_report = {r["id"] for r in runs if r["reports"]}
    # a replay carries the names of what it replays: it is side B there, no run to look at
    kept = {k: v for k, v in chosen.items() if k in with_report} or chosen
    for run_id, ids in kept.items():
        for there, name in ids.items():
            refusal = bundle.refusal(f"api/runs/{run_id}/seqs/{quoted(there)}")
            if refusal is not None:
                raise UsageError(f"--sequences {name}: {refusal}", hint="leave it out")
    return {run_id: list(ids) for run_id, ids in kept.items()}


def _containing(bundle: Bundle, path: str, text: str) -> Iterator[str]:
    """All ids of a run that contain a text, whatever it means in a filter."""
    quoted_text = re.sub(r'(["\\])', r"\\\1", text)
    after: str | None = ""
    while after is not None:
        page = bundle.ask(path, q=f'id:"{quoted_text}"', sort="id", limit=500, after=after or None)
        yield from (row["id"] for row in page["rows"])
        after = page["next"]


def _run(bundle: Bundle, run: dict[str, Any], names: list[str]) -> _Seen:
    at = f"api/runs/{run['id']}"
    reports: list[str | None] = [r["id"] for r in run["reports"]]
    seen = _Seen()
    for rep in reports or [None]:
        bundle.screen = "overview"
        bundle.keep(at, rep=rep)
        bundle.screen = "causes"
        bundle.keep(f"{at}/causes", rep=rep)
        bundle.screen = "list"
        first = bundle.ask(f"{at}/seqs", limit=1, rep=rep)
        listed = [bundle.ask(f"{at}/seqs/{quoted(name)}", rep=rep)["seq"] for name in names]
        listed = _ordered(listed, first["sort"])
        names = [row["id"] for row in listed]  # neighbours are those of the list
        counts = {"start": 0, "matched": len(listed), "total": len(listed), "next": None}
        bundle.put(f"{at}/seqs", {**first, **counts, "rows": listed}, rep=rep)
        for k, name in enumerate(names):
            _sequence(bundle, at, name, rep, names, k, seen)
            place = f"{at}/seqs/{quoted(name)}"
            _layers(bundle, place, rep)
            _routing(bundle, place, rep)
        _timeline(bundle, at, rep, seen)
        _weights(bundle, at, rep)
    if reports:
        bundle.stand_in(str(run["report"]))
    bundle.screen = "side by side"
    seen.sides = [str(rep) for rep in reports[-_MOST_REPORTS:]]
    for one, other in permutations(seen.sides, 2):
        for name in names:
            _sides(bundle, f"{at}/seqs/{quoted(name)}/sides", one, other)
    return seen


def _ordered(rows: list[dict[str, Any]], sort: str) -> list[dict[str, Any]]:
    """Rows in the order of the list, `listed` in js/folder_data.js; what is absent comes last."""
    name = sort.removeprefix("-")
    there = [row for row in rows if row[name] not in (None, "NaN")]
    absent = [row for row in rows if row[name] in (None, "NaN")]

    def value(row: dict[str, Any]) -> Any:
        # infinite numbers are text
        return float(row[name]) if row[name] in ("Infinity", "-Infinity") else row[name]

    return [*sorted(there, key=value, reverse=sort.startswith("-")), *absent]


def _sequence(
    bundle: Bundle,
    at: str,
    name: str,
    rep: str | None,
    names: list[str],
    k: int,
    seen: _Seen,
) -> None:
    bundle.screen = "tokens"
    place = f"{at}/seqs/{quoted(name)}"
    info = bundle.ask(place, rep=rep)
    info["neighbours"] = {
        "previous": names[k - 1] if k else None,
        "next": names[k + 1] if k + 1 < len(names) else None,
        "rank": k + 1,
        "of": len(names),
    }
    bundle.put(place, info, rep=rep)
    bundle.keep(f"{place}/causes", rep=rep)
    n = int(info["n"])
    seen.lengths[name] = max(n, seen.lengths.get(name, 0))
    for start, end in windows(n):
        bundle.keep(f"{place}/tokens", start=start, end=end, rep=rep)
    steps = seen.steps.setdefault(name, {})

    def note(detail: dict[str, Any]) -> None:
        step = (detail["sides"]["a"] or {}).get("step")
        if step is not None:
            steps.setdefault(step["engine"], set()).add(step["step"])

    _positions(bundle, f"{place}/tokens", n, rep, note)


def _positions(
    bundle: Bundle,
    path: str,
    n: int,
    rep: str | None,
    each: Callable[[dict[str, Any]], None] = lambda _: None,
) -> None:
    """Everything about every position, several in a file."""
    for start in range(0, n, CHUNK):
        details = {
            p: bundle.ask(f"{path}/{p}", rep=rep) for p in range(start, min(start + CHUNK, n))
        }
        for detail in details.values():
            each(detail)
        bundle.put(f"{path}/{start}", details, rep=rep)


def _layers(bundle: Bundle, place: str, rep: str | None) -> None:
    """The map by position, all sites of a measure in a tile; the page makes its bins itself."""
    bundle.screen = "layers"
    info = bundle.ask(f"{place}/layers", rep=rep)
    bundle.put(f"{place}/layers", info, rep=rep)
    if not info["sites"]:
        return
    n = int(info["n"])
    for metric in METRICS:
        for start, end in windows(n, TILE):
            bundle.keep(f"{place}/heat", metric=metric, start=start, end=end, sites="*", rep=rep)
    for start, end in windows(n, TILE):
        bundle.keep(f"{place}/site-values", start=start, end=end, rep=rep)
    floor = [None] if info["report"]["by_site"] else []
    for threshold in (*floor, *THRESHOLDS):
        bundle.keep(f"{place}/front", threshold=threshold, rep=rep)


def _routing(bundle: Bundle, place: str, rep: str | None) -> None:
    """Windows side by side, with eps by the rule: agreement and eps are those of a window."""
    bundle.screen = "routing"
    info = bundle.ask(f"{place}/routes", rep=rep)
    bundle.put(f"{place}/routes", info, rep=rep)
    if not info["comparable"]:
        return
    n = int(info["n"])
    for start, end in windows(n, ROUTING):
        window = bundle.keep(f"{place}/routing", start=start, end=end, rep=rep)
        for layer in _numbers(window, "layers"):
            one = {"start": start, "end": end, "bins": 1, "layers": layer}
            bundle.keep(f"{place}/routing", **one, rep=rep)
    _positions(bundle, f"{place}/routing", n, rep)


def _numbers(body: bytes, name: str) -> list[int]:
    """An array of uint32 of safetensors bytes."""
    size = int.from_bytes(body[:8], "little")
    begin, end = json.loads(body[8 : 8 + size])[name]["data_offsets"]
    found: list[int] = np.frombuffer(body[8 + size + begin : 8 + size + end], "<u4").tolist()
    return found


def _timeline(bundle: Bundle, at: str, rep: str | None, seen: _Seen) -> None:
    """The whole as the page asks for it first; where that is bins, windows with every step in which
    the chosen sequences ran. Of those steps everything."""
    bundle.screen = "timeline"
    _kernels(bundle, at, rep)
    whole = bundle.find(f"{at}/timeline", max_spans=_SPANS, rep=rep)
    if whole is None:
        bundle.keep(f"{at}/timeline", rep=rep)
        return
    bundle.put(f"{at}/timeline", whole, rep=rep)
    of_engine: dict[str, set[int]] = {}
    spans = []
    for engines in seen.steps.values():
        for engine, steps in engines.items():
            of_engine.setdefault(engine, set()).update(steps)
            first, last = (
                bundle.find(f"{at}/steps/{engine}/{step}", rep=rep)
                for step in (min(steps), max(steps))
            )
            if first is not None and last is not None:
                end = _time(last, whole["axis"]) + max(1, last["duration_ns"] or 1)
                spans.append((_time(first, whole["axis"]), end))
    opened = sum(len(steps) for steps in of_engine.values())
    seen.every_step = whole["bins"] is None and opened == whole["steps"]
    if whole["bins"] is not None:
        seen.windows = list(_windows(bundle, f"{at}/timeline", rep, _merged(spans)))
    for engine, steps in of_engine.items():
        for start in sorted({step - step % CHUNK for step in steps}):
            numbers = sorted(steps & set(range(start, start + CHUNK)))
            found = {s: bundle.find(f"{at}/steps/{engine}/{s}", rep=rep) for s in numbers}
            details = {s: _short(d, seen) for s, d in found.items() if d is not None}
            bundle.put(f"{at}/steps/{engine}/{start}", details, rep=rep)


def _short(step: dict[str, Any], seen: _Seen) -> dict[str, Any]:
    """Of its rows some, and those of the chosen sequences."""
    rows = step["batch"]["rows"]
    own = [row for row in rows[_MOST_ROWS:] if row["seq"] in seen.lengths]
    return {**step, "batch": {**step["batch"], "rows": [*rows[:_MOST_ROWS], *own]}}


def _time(step: dict[str, Any], axis: str) -> int:
    return int(step["t_ns"] if axis == "time" else step["step"])


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((start, end))
    return out


def _windows(
    bundle: Bundle, path: str, rep: str | None, wanted: list[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Windows in which there is every step: wanted ones, and parts of those with too many."""
    made = 0
    while wanted and made < _MOST_WINDOWS:
        t0, t1 = wanted.pop(0)
        answer = bundle.ask(path, t0=t0, t1=t1, max_spans=_MOST_SPANS, rep=rep)
        if answer["spans"] is not None:
            bundle.put(path, answer, t0=t0, t1=t1, rep=rep)
            made += 1
            yield t0, t1
        elif t1 - t0 > 1:
            wanted[:0] = [(t0, (t0 + t1) // 2), ((t0 + t1) // 2, t1)]


def _kernels(bundle: Bundle, at: str, rep: str | None) -> None:
    """Every choice of kernels in one answer."""
    page = bundle.ask(f"{at}/tactics", limit=500, rep=rep)
    rows, after = list(page["rows"]), page["next"]
    while after is not None:
        more = bundle.ask(f"{at}/tactics", limit=500, after=after, rep=rep)
        rows += more["rows"]
        after = more["next"]
    bundle.put(f"{at}/tactics", {**page, "rows": rows, "next": None}, rep=rep)


def _weights(bundle: Bundle, at: str, rep: str | None) -> None:
    """The last versions, and in one more file the digests of all."""
    bundle.screen = "weights"
    answer = bundle.find(f"{at}/weights", rep=rep)
    bundle.keep(f"{at}/weights", rep=rep)
    parts: list[dict[str, Any]] = []
    while answer is not None and answer["digests"]["versions"]:
        parts.append({name: answer[name] for name in ("digests", "against_b")})
        earliest = answer["digests"]["versions"][0]
        more = earliest > answer["digests"]["first"]
        answer = bundle.ask(f"{at}/weights", version=earliest - 1, rep=rep) if more else None
    bundle.put(f"{at}/weights/versions", parts, rep=rep)


def _sides(bundle: Bundle, place: str, a: str, b: str) -> None:
    answer = bundle.ask(f"{place}/info", a=a, b=b)
    bundle.put(f"{place}/info", answer, a=a, b=b)
    n = int(answer["n"])
    for start, end in windows(n):
        bundle.keep(place, a=a, b=b, start=start, end=end)


def windows(n: int, size: int = MAX_WINDOW) -> list[tuple[int, int]]:
    """The windows in which the page asks for n positions."""
    return [(start, min(start + size, n)) for start in range(0, n, size)]


def _held(seen: Mapping[str, _Seen]) -> dict[str, Any]:
    """What links may lead to, by run; js/held.js reads it before anything is asked for."""
    return {
        run: {"seqs": list(found.lengths), "sides": found.sides, "steps": found.every_step}
        for run, found in seen.items()
    }


def _page(bundle: Bundle, seen: Mapping[str, _Seen], command: str) -> None:
    for name, asset in assets().items():
        if name != "index.html":
            write_file(bundle.root / "static" / name, asset.content)
    # what a header says elsewhere; frame-ancestors has no meaning in a page
    policy = "; ".join(p for p in POLICY.split("; ") if not p.startswith("frame-ancestors"))
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="rolltape-folder" content="{escape(command)}">\n'
        f'<meta name="rolltape-held" content="{escape(json.dumps(_held(seen)))}">\n'
        '<script type="module" src="static/js/static_api.js"></script>\n'
    )
    index = assets()["index.html"].content.decode()
    before, script, after = index.partition('<script type="module"')
    write_file(bundle.root / "index.html", (before + head + script + after).encode())
    manifest = {
        "files": bundle.files,
        "lengths": {run: found.lengths for run, found in seen.items()},
        # as text: ns do not fit the numbers of a page
        "timeline": {run: [[str(t) for t in w] for w in f.windows] for run, f in seen.items()},
        "chunk": CHUNK,
        "window": MAX_WINDOW,
        "tile": TILE,
        "sizes": bundle.sizes,
    }
    write_file(bundle.root / "bundle.json", json.dumps(manifest, indent=0).encode())
