"""A folder of static files that shows chosen sequences: the page, and the answers it asks for.

The answers are those of the interface itself, asked in this process. `js/static_api.js` gives them
to the page in place of a server. Lists hold the chosen sequences alone; numbers about the whole run
(overview, causes) stay what they are.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from rolltape.store.errors import TapeExistsError, UsageError
from rolltape.viewer.app import make_app
from rolltape.viewer.assets import assets
from rolltape.viewer.columns import MAX_WINDOW
from rolltape.viewer.security import POLICY

#: Screens that a bundle has.
SCREENS = ("home", "overview", "seqs", "seq", "causes", "sides", "basket")
#: Positions whose details stand in one file.
CHUNK = 64

_MOST_REPORTS = 6  # of which every two are put side by side
_SUFFIX = {"application/json": "json", "application/x-safetensors": "safetensors"}


@dataclass(frozen=True)
class Answer:
    """An answer of the interface."""

    status: int
    media: str
    body: bytes


class Asked:
    """An ASGI application that is asked in this process, without a socket.

    Its event loop has a thread of its own: the caller may be in one already.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._thread = ThreadPoolExecutor(1, "export")
        self._runner = asyncio.Runner()

    def __enter__(self) -> Asked:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.submit(self._runner.close).result()
        self._thread.shutdown()

    def get(self, path: str, query: str) -> Answer:
        """One GET."""
        return self._thread.submit(lambda: self._runner.run(_get(self._app, path, query))).result()


@dataclass
class Bundle:
    """What has been written.

    Args:
        root: the folder.
        app: what is asked.
        files: key of a request -> file relative to the folder.
        written: file -> bytes.
    """

    root: Path
    app: Asked
    files: dict[str, str] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)

    def ask(self, path: str, **params: Any) -> Any:
        """The JSON answer.

        Raises:
            UsageError: it is not one.
        """
        return json.loads(self._answer(path, params).body)

    def keep(self, path: str, **params: Any) -> None:
        """Write an answer as it is.

        Raises:
            UsageError: there is none.
        """
        answer = self._answer(path, params)
        self._write(_key(path, params), answer.media, answer.body)

    def put(self, path: str, value: Any, **params: Any) -> None:
        """Write a JSON answer that was changed."""
        body = json.dumps(value, separators=(",", ":")).encode()
        self._write(_key(path, params), "application/json", body)

    def stand_in(self, rep: str) -> None:
        """An address without `rep` means this one: the newest report."""
        for key, name in list(self.files.items()):
            path, _, query = key.partition("?")
            rest = [part for part in query.split("&") if part != f"rep={rep}"]
            if query and len(rest) < len(query.split("&")):
                self.files[path + (f"?{'&'.join(rest)}" if rest else "")] = name

    def _answer(self, path: str, params: Mapping[str, Any]) -> Answer:
        given = {k: v for k, v in params.items() if v is not None}
        answer = self.app.get("/" + path, urlencode(given))
        if answer.status != 200:
            raise UsageError(f"{path}: {json.loads(answer.body).get('detail')}")
        return answer

    def _write(self, key: str, media: str, body: bytes) -> None:
        digest = hashlib.sha256(body).hexdigest()[:16]
        stem = re.sub(r"[^A-Za-z0-9._/-]", "_", key.partition("?")[0])
        name = f"{stem}-{digest}.{_SUFFIX[media]}"
        self.files[key] = name
        if name not in self.written:
            write_file(self.root / name, body)
            self.written[name] = len(body)


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
        `sequences`: ids by run, `files`, `bytes`.

    Raises:
        TapeExistsError: `out` is not empty.
        UsageError: no run has such a sequence.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TapeExistsError(f"{out} is not empty", hint="choose another --export, or remove it")
    with Asked(make_app(paths, tokenizer=tokenizer)) as app:
        bundle = Bundle(out, app)
        chosen = _write(bundle, list(dict.fromkeys(sequences)))
    return {
        "sequences": chosen,
        "files": len(bundle.written),
        "bytes": sum(bundle.written.values()),
    }


def _write(bundle: Bundle, names: list[str]) -> dict[str, list[str]]:
    runs = bundle.ask("api/runs")
    chosen = _choose(bundle, runs["runs"], names)
    kept = [run for run in runs["runs"] if run["id"] in chosen]
    bundle.put("api/runs", {**runs, "follow": False, "runs": kept})
    bundle.put("api/notes", {"file": None, "items": []})
    lengths = {run["id"]: _run(bundle, run, chosen[run["id"]]) for run in kept}
    _page(bundle, lengths)
    return chosen


def _choose(bundle: Bundle, runs: list[dict[str, Any]], names: list[str]) -> dict[str, list[str]]:
    """Ids by run."""
    chosen: dict[str, list[str]] = {}
    for name in names:
        found = False
        for run in runs:
            for there in _containing(bundle, f"api/runs/{run['id']}/seqs", name):
                if name in (there, there.partition(".")[2]):
                    found = True
                    ids = chosen.setdefault(run["id"], [])
                    if there not in ids:
                        ids.append(there)
        if not found:
            raise UsageError(f"--sequences {name}: no run has it", hint="`rolltape show` lists ids")
    with_report = {r["id"] for r in runs if r["reports"]}
    # a replay carries the names of what it replays: it is side B there, no run to look at
    return {k: v for k, v in chosen.items() if k in with_report} or chosen


def _containing(bundle: Bundle, path: str, text: str) -> Iterator[str]:
    """All ids of a run that contain a text, whatever it means in a filter."""
    quoted = re.sub(r'(["\\])', r"\\\1", text)
    after: str | None = ""
    while after is not None:
        page = bundle.ask(path, q=f'id:"{quoted}"', sort="id", limit=500, after=after or None)
        yield from (row["id"] for row in page["rows"])
        after = page["next"]


def _run(bundle: Bundle, run: dict[str, Any], names: list[str]) -> dict[str, int]:
    at = f"api/runs/{run['id']}"
    reports: list[str | None] = [r["id"] for r in run["reports"]]
    lengths: dict[str, int] = {}
    for rep in reports or [None]:
        bundle.keep(at, rep=rep)
        bundle.keep(f"{at}/causes", rep=rep)
        listed = [bundle.ask(f"{at}/seqs/{_quoted(name)}", rep=rep)["seq"] for name in names]
        first = bundle.ask(f"{at}/seqs", limit=1, rep=rep)
        counts = {"start": 0, "matched": len(listed), "total": len(listed), "next": None}
        bundle.put(f"{at}/seqs", {**first, **counts, "rows": listed}, rep=rep)
        for k, name in enumerate(names):
            _sequence(bundle, at, name, rep, names, k, lengths)
    if reports:
        bundle.stand_in(str(run["report"]))
    for one, other in permutations(reports[-_MOST_REPORTS:], 2):
        for name in names:
            _sides(bundle, f"{at}/seqs/{_quoted(name)}/sides", str(one), str(other))
    return lengths


def _sequence(
    bundle: Bundle,
    at: str,
    name: str,
    rep: str | None,
    names: list[str],
    k: int,
    lengths: dict[str, int],
) -> None:
    place = f"{at}/seqs/{_quoted(name)}"
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
    lengths[name] = max(n, lengths.get(name, 0))
    for start, end in windows(n):
        bundle.keep(f"{place}/tokens", start=start, end=end, rep=rep)
    for start in range(0, n, CHUNK):
        details = {
            position: bundle.ask(f"{place}/tokens/{position}", rep=rep)
            for position in range(start, min(start + CHUNK, n))
        }
        bundle.put(f"{place}/tokens/{start}", details, rep=rep)


def _sides(bundle: Bundle, place: str, a: str, b: str) -> None:
    answer = bundle.ask(f"{place}/info", a=a, b=b)
    bundle.put(f"{place}/info", answer, a=a, b=b)
    n = int(answer["n"])
    for start, end in windows(n):
        bundle.keep(place, a=a, b=b, start=start, end=end)


def windows(n: int) -> list[tuple[int, int]]:
    """The windows in which the page asks for n positions."""
    return [(start, min(start + MAX_WINDOW, n)) for start in range(0, n, MAX_WINDOW)]


def _page(bundle: Bundle, lengths: Mapping[str, Mapping[str, int]]) -> None:
    for name, asset in assets().items():
        if name != "index.html":
            write_file(bundle.root / "static" / name, asset.content)
    # what a header says elsewhere; frame-ancestors has no meaning in a page
    policy = "; ".join(p for p in POLICY.split("; ") if not p.startswith("frame-ancestors"))
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="rolltape-screens" content="{" ".join(SCREENS)}">\n'
        '<script type="module" src="static/js/static_api.js"></script>\n'
    )
    index = assets()["index.html"].content.decode()
    before, script, after = index.partition('<script type="module"')
    write_file(bundle.root / "index.html", (before + head + script + after).encode())
    manifest = {
        "files": bundle.files,
        "lengths": lengths,
        "chunk": CHUNK,
        "window": MAX_WINDOW,
    }
    write_file(bundle.root / "bundle.json", json.dumps(manifest, indent=0).encode())


def write_file(path: Path, body: bytes) -> None:
    """Write a file, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)


def _quoted(name: str) -> str:
    return quote(name, safe="!*'()")


def _key(path: str, params: Mapping[str, Any]) -> str:
    """What the page looks an answer up by; `keyOf` in js/static_api.js makes the same."""
    given = sorted((k, str(v)) for k, v in params.items() if v is not None)
    return path + (f"?{'&'.join(f'{k}={v}' for k, v in given)}" if given else "")


async def _get(app: Any, path: str, query: str) -> Answer:
    status, media, body = 500, "", b""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Mapping[str, Any]) -> None:
        nonlocal status, media, body
        if message["type"] == "http.response.start":
            status = int(message["status"])
            headers = {bytes(k).lower(): bytes(v).decode() for k, v in message["headers"]}
            media = headers.get(b"content-type", "").partition(";")[0]
        else:
            body += message.get("body", b"")

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path.replace("%3A", ":"),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(b"host", b"127.0.0.1")],
        "client": None,
        "server": ("127.0.0.1", 80),
    }
    await app(scope, receive, send)
    return Answer(status, media, body)
