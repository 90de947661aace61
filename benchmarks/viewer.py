"""How fast the viewer answers, over a real socket, beside what it should reach.

`python benchmarks/viewer.py [FOLDER..] [--requests 200] [--check] [--json]`. A folder holds the
tape, its replay and their report, as `viewer_tape.py` makes them; without one a tape of a million
tokens is made for this run. `rolltape view` is started as a process of its own with its files out
of the page cache; the first request of each kind is the cold one. Then come other requests to warm
up and, of each kind, so many distinct random ones, of which p50 and p95 are printed.

`raw` is the time in which pyarrow reads the record batches that such an answer stands in, in this
process, in the same run; `ratio` is p50 to that. `cpu` is the server's processor time a request,
all threads: unlike the times it does not depend on what else the machine does. Memory is the
server's, as the kernel counts it: `rss_mb` is its peak, mapped pages of files included;
`anonymous_mb` the most without them.

An endpoint that does not exist is named as not measured. An answer that is an error fails the run;
with `--check` so does a goal that is missed or was not measured.
"""

import argparse
import http.client
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape import store

#: Goals in ms, of the 95th percentile, at 50 M tokens, 25 k sequences and 96 layers.
GOALS = {
    "overview": 50,
    "list": 40,
    "tokens": 30,
    "heat": 60,
    "routing": 60,
    "timeline": 80,
    "diff": 80,
    "scan": 1500,
}
#: Those that are about sequences with layers.
DENSE = ("heat", "layers_at", "layers", "front", "routing", "routing_zoomed", "routing_at")
GOAL_RSS_MB, COLD = 500, 5
WARMUP = 20

#: (path below /api, parameters)
Request = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Kind:
    """One kind of request.

    Args:
        name: of the figure.
        template: path in the interface's description.
        make: a random one.
        raw: reads the batches that such an answer stands in; None: nothing to compare with.
    """

    name: str
    template: str
    make: Callable[[random.Random], Request]
    raw: Callable[[random.Random], None] | None = None


class Server:
    """`rolltape view` in a process of its own.

    Args:
        paths: tapes and reports.
    """

    def __init__(self, paths: list[Path]) -> None:
        begin = time.perf_counter()
        command = [sys.executable, "-m", "rolltape", "view", *map(str, paths)]
        self.process = subprocess.Popen(
            [*command, "--no-open", "--port", "0"], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        match = re.search(r"http://\S+", line)
        if match is None:
            raise SystemExit(f"the viewer did not start: {line!r}")
        address = urlsplit(match[0])
        self.connection = http.client.HTTPConnection(
            str(address.hostname), address.port, timeout=120
        )
        self.start_ms = 1000 * (time.perf_counter() - begin)
        self.anonymous_mb = 0.0
        self.errors: list[str] = []

    def get(self, path: str, params: dict[str, Any]) -> tuple[float, bytes]:
        """(ms until the last byte, body). What is not 200 is noted."""
        query = urlencode({k: v for k, v in params.items() if v is not None})
        address = f"/api{path}" + (f"?{query}" if query else "")
        begin = time.perf_counter()
        try:
            self.connection.request("GET", address)
            answer = self.connection.getresponse()
            body = answer.read()
        except (http.client.HTTPException, OSError) as error:
            self.connection.close()  # opened again by the next request
            self.errors.append(f"{address}: {type(error).__name__}: {error}")
            return float("nan"), b""
        took = 1000 * (time.perf_counter() - begin)
        if answer.status != 200:
            self.errors.append(f"{answer.status} {address}: {body[:200].decode(errors='replace')}")
        return took, body

    def memory(self) -> dict[str, float]:
        """MB: `now`, `peak`, and what is not backed by files."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        found = {k: int(v) / 1024 for k, v in re.findall(r"(Vm\w+|Rss\w+):\s+(\d+) kB", text)}
        self.anonymous_mb = max(self.anonymous_mb, found["RssAnon"])
        return {"now": found["VmRSS"], "peak": found["VmHWM"], "anonymous": found["RssAnon"]}

    def cpu_ms(self) -> float:
        """Processor time so far, all threads."""
        stat = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return 1000 * (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        self.connection.close()
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Raw:
    """Reads record batches of a folder with pyarrow alone, files mapped.

    Args:
        folder: a tape or a report.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[tuple[str, str], pa.ipc.RecordBatchFileReader] = {}

    def shards(self, table: str) -> list[str]:
        return sorted(p.name for p in (self.folder / table).glob("*.arrow"))

    def batch(self, table: str, file: str, number: int) -> pa.RecordBatch:
        if (table, file) not in self._files:
            mapped = pa.memory_map(str(self.folder / table / file))
            self._files[table, file] = pa.ipc.open_file(mapped)
        return self._files[table, file].get_batch(number)

    def batches(self, table: str) -> Iterator[tuple[str, int, pa.RecordBatch]]:
        for file in self.shards(table):
            self.batch(table, file, 0)
            for number in range(self._files[table, file].num_record_batches):
                yield file, number, self.batch(table, file, number)

    def places(self, table: str, column: str) -> dict[Any, list[tuple[str, int]]]:
        """Batches by the values in a column."""
        found: dict[Any, list[tuple[str, int]]] = {}
        for file, number, batch in self.batches(table):
            for value in pc.unique(batch.column(column)).to_pylist():
                found.setdefault(value, []).append((file, number))
        return found

    def read(self, table: str, places: list[tuple[str, int]]) -> None:
        for file, number in places:
            self.batch(table, file, number)


class Kinds:
    """Random requests about the tapes of a folder.

    Args:
        folder: holds `a`, `b` and `report`.
    """

    def __init__(self, folder: Path) -> None:
        self.a, self.b, self.report = (Raw(folder / name) for name in ("a", "b", "report"))
        self.tape = store.open(folder / "a")
        self.other = store.open(folder / "b")
        self.run = self.tape.uuid
        self.rep = _uuid(folder / "report" / "report.json")
        self.again = _uuid(folder / "again" / "report.json")
        rows = list(self.report.batches("sequences"))
        length = np.concatenate([batch.column("length").to_numpy() for *_, batch in rows])
        ids = [name for *_, batch in rows for name in batch.column("a").to_pylist()]
        self.length = dict(zip(ids, length.tolist(), strict=True))
        self.ids = ids
        self.long = [i for i in ids if self.length[i] > 4096] or ids[:100]
        self.token_places = self.report.places("tokens", "a")
        self.site_places = self.report.places("activations", "a")
        self.dense = [i for i in ids if i in self.site_places]
        # a window of the full width, where there is one
        self.wide = [i for i in self.dense if self.length[i] >= 2048] or self.dense
        steps = [(f, n, b.column("t_ns").to_numpy()) for f, n, b in self.a.batches("steps")]
        self.step_places = [(f, n, int(t.min()), int(t.max())) for f, n, t in steps if len(t)]
        self.first = min(low for *_, low, _ in self.step_places)
        self.last = max(high for *_, high in self.step_places)
        self.steps = sum(len(t) for *_, t in steps)
        self._some = iter(())

    def all(self) -> list[Kind]:
        seq = "/api/runs/{run}/seqs/{seq}"
        return [
            Kind("runs", "/api/runs", lambda rng: ("/runs", {"n": rng.random()})),
            Kind("overview", "/api/runs/{run}", self.overview, self.raw_overview),
            Kind("list", "/api/runs/{run}/seqs", self.list, self.raw_list),
            Kind("sequence", seq, self.sequence, self.raw_tokens),
            Kind("tokens", f"{seq}/tokens", self.tokens, self.raw_tokens),
            Kind("one_token", f"{seq}/tokens/{{position}}", self.one_token),
            Kind("over", f"{seq}/over", self.over, self.raw_tokens),
            Kind("layers", f"{seq}/layers", self.of_dense("layers"), self.raw_heat),
            Kind("heat", f"{seq}/heat", self.heat, self.raw_heat),
            Kind("front", f"{seq}/front", self.of_dense("front"), self.raw_heat),
            Kind("layers_at", f"{seq}/layers/{{position}}", self.at("layers")),
            Kind("routing", f"{seq}/routing", self.routing, self.raw_routing),
            Kind("routing_zoomed", f"{seq}/routing", self.routing_zoomed, self.raw_routing),
            Kind("routing_at", f"{seq}/routing/{{position}}", self.at("routing")),
            Kind("timeline", "/api/runs/{run}/timeline", self.timeline, self.raw_timeline),
            Kind("step", "/api/runs/{run}/steps/{engine}/{step}", self.step),
            Kind("tactics", "/api/runs/{run}/tactics", self.of_run("tactics")),
            Kind("weights", "/api/runs/{run}/weights", self.of_run("weights")),
            Kind("causes", "/api/runs/{run}/causes", self.of_run("causes")),
            Kind("causes_of", f"{seq}/causes", self.of_any("causes")),
            Kind("diff", f"{seq}/sides", self.sides, self.raw_tokens),
            Kind("scan", "/api/runs/{run}/scan", self.scan, self.raw_scan),
        ]

    # -- requests -------------------------------------------------------------------------

    def overview(self, rng: random.Random) -> Request:
        # there are only so many runs and reports; `n` makes the addresses differ
        return f"/runs/{self.run}", {"rep": rng.choice((self.rep, None)), "n": rng.random()}

    def list(self, rng: random.Random) -> Request:
        columns = ("max_abs", "mean_abs", "k3", "prompt_len", "response_len", "disagree_share")
        sort = rng.choice(("", "-")) + rng.choice(columns)
        q = rng.choice((None, f"max_abs>{rng.random() / 10:.6f}", f"length>{rng.randrange(4000)}"))
        if q and q.startswith("length"):
            q = f"response_len{q[6:]}"
        return f"/runs/{self.run}/seqs", {"sort": sort, "q": q, "limit": 100, "n": rng.random()}

    def sequence(self, rng: random.Random) -> Request:
        return self._seq(rng.choice(self.ids)), {"sort": "-max_abs"}

    def tokens(self, rng: random.Random) -> Request:
        name = rng.choice(self.long if rng.random() < 0.8 else self.ids)
        start, end = self._window(rng, name, 4096)
        return self._seq(name, "tokens"), {"start": start, "end": end}

    def one_token(self, rng: random.Random) -> Request:
        name = rng.choice(self.ids)
        return self._seq(name, "tokens", rng.randrange(self.length[name])), {}

    def over(self, rng: random.Random) -> Request:
        name = rng.choice(self.ids)
        return self._seq(name, "over"), {"threshold": rng.random() / 10, "from": 0}

    def heat(self, rng: random.Random) -> Request:
        name = rng.choice(self.wide)
        start, end = self._window(rng, name, 1 << 20)
        metric = rng.choice(("rel_l2", "max_abs", "cosine", "ulp"))
        return self._seq(name, "heat"), {
            "metric": metric,
            "start": start,
            "end": end,
            "bins": 2048,
        }

    def routing(self, rng: random.Random) -> Request:
        # as the page asks: windows of 2,048 that lie side by side, as many bins as the map is wide
        name = rng.choice(self.wide)
        start = 2048 * rng.randrange(-(-self.length[name] // 2048))
        end = min(start + 2048, self.length[name])
        bins = rng.randrange(600, 1500)
        return self._seq(name, "routing"), {"start": start, "end": end, "bins": bins}

    def routing_zoomed(self, rng: random.Random) -> Request:
        # zoomed out by hand: twice that
        name = rng.choice(self.wide)
        start, end = self._window(rng, name, 4096)
        return self._seq(name, "routing"), {"start": start, "end": end, "bins": 1024}

    def timeline(self, rng: random.Random) -> Request:
        # windows that hold up to the 10,000 spans of the goal
        share = 10 ** rng.uniform(-3, 0) * min(1, 10_000 / self.steps)
        width = int((self.last - self.first) * share)
        t0 = rng.randrange(self.first, self.last - width + 1)
        return f"/runs/{self.run}/timeline", {"t0": t0, "t1": t0 + width, "max_spans": 10_000}

    def step(self, rng: random.Random) -> Request:
        file, number, *_ = rng.choice(self.step_places)
        batch = self.a.batch("steps", file, number)
        row = rng.randrange(batch.num_rows)
        engine, step = batch.column("engine")[row], batch.column("step")[row]
        return f"/runs/{self.run}/steps/{engine}/{step}", {}

    def sides(self, rng: random.Random) -> Request:
        path, window = self.tokens(rng)
        return path.removesuffix("tokens") + "sides", {**window, "a": self.rep, "b": self.again}

    def scan(self, rng: random.Random) -> Request:
        return f"/runs/{self.run}/scan", {"where": f"delta > {rng.uniform(0.09, 0.1):.7f}"}

    def of_run(self, what: str) -> Callable[[random.Random], Request]:
        return lambda rng: (f"/runs/{self.run}/{what}", {"n": rng.random()})

    def of_any(self, what: str) -> Callable[[random.Random], Request]:
        return lambda rng: (self._seq(rng.choice(self.ids), what), {})

    def of_dense(self, what: str) -> Callable[[random.Random], Request]:
        return lambda rng: (self._seq(rng.choice(self.dense), what), {"n": rng.random()})

    def at(self, what: str) -> Callable[[random.Random], Request]:
        def make(rng: random.Random) -> Request:
            name = rng.choice(self.dense)
            return self._seq(name, what, rng.randrange(self.length[name] - 1)), {}

        return make

    def _seq(self, name: str, *rest: object) -> str:
        return "/".join([f"/runs/{self.run}/seqs/{name}", *map(str, rest)])

    def _window(self, rng: random.Random, name: str, most: int) -> tuple[int, int]:
        width = min(self.length[name], most)
        start = rng.randrange(self.length[name] - width + 1)
        # distinct, and next to the full width
        return start, start + width - rng.randrange(min(64, width))

    # -- raw reads ------------------------------------------------------------------------

    def raw_overview(self, _: random.Random) -> None:
        json.loads((self.report.folder / "report.json").read_bytes())

    def raw_list(self, _: random.Random) -> None:
        for _file, _number, _batch in self.report.batches("sequences"):
            pass

    def raw_tokens(self, rng: random.Random) -> None:
        name = rng.choice(self.long)
        self.report.read("tokens", self.token_places[name])
        self.a.read("tokens", self.tape.index.find("tokens", self.tape.sequence(name).key))

    def raw_heat(self, rng: random.Random) -> None:
        self.report.read("activations", self.site_places[rng.choice(self.wide)])

    def raw_routing(self, rng: random.Random) -> None:
        key = self.tape.sequence(rng.choice(self.wide)).key
        self.a.read("routes", self.tape.index.find("routes", key))
        (engine,) = {k.engine for k in self.other.keys()}  # noqa: SIM118 - a method of the tape
        self.b.read("routes", self.other.index.find("routes", key._replace(engine=engine)))

    def raw_timeline(self, rng: random.Random) -> None:
        _, params = self.timeline(rng)
        reach = [
            (file, number)
            for file, number, low, high in self.step_places
            if low <= params["t1"] and high >= params["t0"]
        ]
        self.a.read("steps", reach)

    def raw_scan(self, _: random.Random) -> None:
        for _file, _number, _batch in self.report.batches("tokens"):
            pass


def _uuid(path: Path) -> str | None:
    return str(json.loads(path.read_text())["uuid"]) if path.exists() else None


def second_report(folder: Path) -> Path:
    """The report once more under another name and the same shards, to stand next to itself."""
    out = folder / "again"
    if out.exists():
        return out
    for file in sorted((folder / "report").rglob("*")):
        target = out / file.relative_to(folder / "report")
        if file.is_file() and file.name != "report.json":
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(file, target)
    header = json.loads((folder / "report" / "report.json").read_text())
    header = {k: v for k, v in header.items() if k != "xxh3"}
    header |= {"uuid": store.new_uuid(), "created": "2020-01-01T00:00:00Z"}
    (out / "report.json").write_text(json.dumps(header))
    return out


def forget(paths: list[Path]) -> None:
    """Take the files out of the page cache, as far as nobody else holds them."""
    for path in paths:
        for file in path.rglob("*"):
            if file.is_file():
                with open(file, "rb") as opened:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure(folder: Path, requests: int, only: set[str], *, quiet: bool) -> dict[str, Any]:
    again = second_report(folder)
    paths = [folder / "a", folder / "b", again, folder / "report"]
    forget(paths)
    server = Server(paths)
    try:
        found = _measure(server, Kinds(folder), requests, only, quiet=quiet)
        memory = server.memory()
    finally:
        server.stop()
    if not quiet:
        print(f"start {server.start_ms:.0f} ms, rss {memory['peak']:.0f} MB (goal {GOAL_RSS_MB})")
    return {
        **found,
        "start_ms": server.start_ms,
        "rss_mb": memory["peak"],
        "anonymous_mb": server.anonymous_mb,
        "goals": {f"{k}_p95_ms": v for k, v in GOALS.items()} | {"rss_mb": GOAL_RSS_MB},
        "errors": len(server.errors),
        "first_errors": server.errors[:10],
    }


def _measure(
    server: Server, kinds: Kinds, requests: int, only: set[str], *, quiet: bool
) -> dict[str, Any]:
    figures: dict[str, Any] = {"not_measured": {}, "cold_ms": {}, "raw_ms": {}, "ratio": {}}
    served = json.loads(server.get("/openapi.json", {})[1]).get("paths", {})
    there = []
    for kind in kinds.all():
        if kind.template not in served:
            figures["not_measured"][kind.name] = "no such endpoint"
        elif kind.name in DENSE and not kinds.dense:
            figures["not_measured"][kind.name] = "no layers in the report"
        elif only and kind.name not in only:
            figures["not_measured"][kind.name] = "not asked for"
        else:
            there.append(kind)
    for kind in there:
        figures["cold_ms"][kind.name] = server.get(*kind.make(random.Random(1)))[0]
    for kind in there:
        server.connection.close()  # the server drops one that was idle while raw reads were timed
        rng = random.Random(2)
        count = 5 if kind.name == "scan" else requests
        for _ in range(min(WARMUP, count)):
            server.get(*kind.make(rng))
        made = _distinct(kind, random.Random(3), count)
        before, errors = server.memory()["now"], len(server.errors)
        cpu = server.cpu_ms()
        times = [server.get(*request)[0] for request in made]
        cpu = (server.cpu_ms() - cpu) / len(made)
        memory, errors = server.memory(), len(server.errors) - errors
        p50, p95 = percentile(times, 0.5), percentile(times, 0.95)
        figures[f"{kind.name}_p50_ms"], figures[f"{kind.name}_p95_ms"] = p50, p95
        figures[f"{kind.name}_cpu_ms"] = cpu
        line = f"{kind.name:10} n {len(made):4} p50 {p50:8.2f} p95 {p95:8.2f} ms, cpu {cpu:7.2f}"
        if kind.name in GOALS:
            line += f"  goal {GOALS[kind.name]:5}{'' if p95 <= GOALS[kind.name] else '  MISSED'}"
        if kind.raw is not None:
            raw = _time_raw(kind.raw, min(len(made), 50))
            figures["raw_ms"][kind.name], figures["ratio"][kind.name] = raw, p50 / max(raw, 1e-3)
            line += f"  raw {raw:.2f} ratio {p50 / max(raw, 1e-3):.1f}"
        line += f"  cold {figures['cold_ms'][kind.name]:.0f}"
        line += f"  rss {memory['now']:.0f} MB ({memory['now'] - before:+.0f})"
        if errors:
            line += f"  {errors} ERRORS, not a measurement"
            figures["not_measured"][kind.name] = f"{errors} answers were errors"
        if not quiet:
            print(line, flush=True)
    for name, why in figures["not_measured"].items():
        if not quiet:
            print(f"{name:10} not measured: {why}")
    if "scan_p95_ms" in figures:
        figures["scan_s"] = figures["scan_p95_ms"] / 1000
    return figures


def _distinct(kind: Kind, rng: random.Random, count: int) -> list[Request]:
    """Distinct addresses; fewer where there are no more."""
    found: dict[str, Request] = {}
    for _ in range(20 * count):
        request = kind.make(rng)
        found[repr(request)] = request
        if len(found) == count:
            break
    return list(found.values())


def _time_raw(read: Callable[[random.Random], None], count: int) -> float:
    rng, times = random.Random(4), []
    read(rng)
    end = time.perf_counter() + 3
    while len(times) < count and time.perf_counter() < end:
        begin = time.perf_counter()
        read(rng)
        times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times)


def missed(found: dict[str, Any]) -> list[str]:
    """Goals that were not reached, and those that were not measured."""
    out = [f"{name}: {why}" for name, why in found["not_measured"].items() if name in GOALS]
    for name, goal in GOALS.items():
        p95 = found.get(f"{name}_p95_ms")
        if p95 is not None and p95 > goal:
            out.append(f"{name}: p95 {p95:.1f} ms, goal {goal}")
        cold = found["cold_ms"].get(name)
        if cold is not None and cold > COLD * goal:
            out.append(f"{name}: cold {cold:.0f} ms, goal {COLD * goal}")
    if found["rss_mb"] > GOAL_RSS_MB:
        out.append(f"memory: {found['rss_mb']:.0f} MB, goal {GOAL_RSS_MB}")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--requests", type=int, default=200, help="distinct ones of each kind")
    parser.add_argument("--only", nargs="+", default=(), metavar="KIND", help="of requests")
    parser.add_argument("--check", action="store_true", help="exit 1 if a goal is missed")
    parser.add_argument("--json", action="store_true", help="only the JSON object")
    args = parser.parse_args()
    status = 0
    with tempfile.TemporaryDirectory(prefix="viewer-") as temporary:
        folders = args.folders
        if not folders:
            from viewer_tape import write

            made = write(Path(temporary), tokens=10**6, sequences=500, layers=96, dense=20)
            if not args.json:
                print(f"made {made}", flush=True)
            folders = [Path(temporary)]
        for folder in folders:
            found = measure(folder, args.requests, set(args.only), quiet=args.json)
            late = missed(found)
            if not args.json:
                for text in [*late, *found["first_errors"]]:
                    print(text)
            print(json.dumps({"benchmark": "viewer", "tape": str(folder), "missed": late, **found}))
            status |= bool(found["errors"]) or (args.check and bool(late))
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
