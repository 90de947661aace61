"""The exported folder, links made in Python, and following folders."""

from __future__ import annotations

import html
import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the viewer extra is not installed")

from click.testing import CliRunner

from rolltape.store import TapeWriter, UsageError, create_tape
from rolltape.store import open as open_tape
from rolltape.store.errors import TapeExistsError
from rolltape.viewer import export as viewer_export
from rolltape.viewer.answers import Problem
from rolltape.viewer.bundle import key_of
from rolltape.viewer.causes import Board
from rolltape.viewer.cli import view
from rolltape.viewer.export import ROUTING, THRESHOLDS, export, windows
from rolltape.viewer.heat import METRICS
from rolltape.viewer.library import LOOK_EVERY, Library
from tests.e2e import schedule_data
from tests.e2e.test_viewer_js import _node
from tests.e2e.viewer_client import Api, decode
from tests.e2e.viewer_data import Scene, add_replay, build, make_cases

JS = Path(__file__).resolve().parents[2] / "viewer" / "static" / "js"


def node(script: str, *arguments: str) -> Any:
    done = subprocess.run(
        [_node(), "--input-type=module", "-e", script, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# ---- the folder ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Scene, Path, dict[str, Any]]:
    """Two of the sequences of a tape with two reports."""
    cases = make_cases(long=150)
    scene = build(tmp_path_factory.mktemp("exported"), cases=cases)
    add_replay(scene, "second", cases, switches={"routing": "ids"})
    out = tmp_path_factory.mktemp("out") / "bundle"
    done = export([scene.a.parent], out, ["0-0.1", scene.id("0-2.1")])
    return scene, out, done


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> tuple[Scene, Path, Api]:
    """Sequences with layers, one of them longer than a tile and a window."""
    cases = [c for c in make_cases(long=2100) if c.name in ("0-0.1", "0-1.0", "0-2.1")]
    scene = build(tmp_path_factory.mktemp("long"), cases=cases)
    out = tmp_path_factory.mktemp("out") / "bundle"
    paths = [scene.a, scene.b, scene.report]
    export(paths, out, [case.name for case in cases])
    return scene, out, Api(*paths)


def saved(out: Path, path: str, **params: Any) -> Any:
    manifest = json.loads((out / "bundle.json").read_text())
    data = (out / manifest["files"][key_of(path, params)]).read_bytes()
    return data if data[:1] != b"{" and data[:1] != b"[" else json.loads(data)


def test_the_answers_are_those_of_the_interface(bundle: Any) -> None:
    scene, out, done = bundle
    api = Api(scene.a.parent)
    run, worst = api.run, scene.id("0-0.1")
    assert done["sequences"] == {run: [worst, scene.id("0-2.1")]}
    at = f"api/runs/{run}"
    for rep in [r["id"] for r in api.get("/api/runs")["runs"][0]["reports"]]:
        assert saved(out, at, rep=rep) == api.get(f"/{at}", rep=rep)
        assert saved(out, f"{at}/causes", rep=rep) == api.get(f"/{at}/causes", rep=rep)
        tokens = f"{at}/seqs/{worst}/tokens"
        n = api.get(f"/{at}/seqs/{worst}")["n"]
        want = api.raw(f"/{tokens}", start=0, end=n, rep=rep).content
        assert saved(out, tokens, start=0, end=n, rep=rep) == want
        details = saved(out, f"{tokens}/64", rep=rep)
        assert details["71"] == api.get(f"/{tokens}/71", rep=rep)
    # an address without a report means the newest one
    assert saved(out, at) == api.get(f"/{at}")
    assert saved(out, f"{tokens}/64") == details


def test_a_long_sequence_is_saved_in_the_windows_that_the_page_asks_for() -> None:
    assert windows(0) == []
    assert windows(4096) == [(0, 4096)]
    assert windows(9000) == [(0, 4096), (4096, 8192), (8192, 9000)]


def test_only_the_chosen_sequences_are_in_it(bundle: Any) -> None:
    scene, out, _ = bundle
    api = Api(scene.a.parent)
    page = saved(out, f"api/runs/{api.run}/seqs")
    assert [r["id"] for r in page["rows"]] == [scene.id("0-0.1"), scene.id("0-2.1")]
    assert (page["total"], page["matched"], page["next"]) == (2, 2, None)
    info = saved(out, f"api/runs/{api.run}/seqs/{scene.id('0-0.1')}")
    neighbours = {"previous": None, "next": scene.id("0-2.1"), "rank": 1, "of": 2}
    assert info["neighbours"] == neighbours
    manifest = json.loads((out / "bundle.json").read_text())
    named = {
        k.split("/seqs/")[1].split("/")[0].split("?")[0] for k in manifest["files"] if "/seqs/" in k
    }
    assert named == {scene.id("0-0.1"), scene.id("0-2.1")}
    assert not any(p.suffix == ".arrow" for p in out.rglob("*"))


def test_two_reports_are_put_side_by_side(bundle: Any) -> None:
    scene, out, _ = bundle
    api = Api(scene.a.parent)
    reports = [r["id"] for r in api.get("/api/runs")["runs"][0]["reports"]]
    path = f"api/runs/{api.run}/seqs/{scene.id('0-0.1')}/sides/info"
    a, b = reports
    assert saved(out, path, a=a, b=b) == api.get(f"/{path}", a=a, b=b)
    assert saved(out, path, a=b, b=a) == api.get(f"/{path}", a=b, b=a)


def test_the_page_carries_its_own_policy_and_no_other_address(bundle: Any) -> None:
    _, out, _ = bundle
    index = (out / "index.html").read_text()
    assert "default-src 'self'" in index
    assert index.index("static_api.js") < index.index("js/main.js")
    assert "http:" not in index
    assert "https:" not in index
    assert (out / "static" / "js" / "main.js").is_file()


def test_constants_are_those_of_the_page() -> None:
    script = """
        const { METRICS, THRESHOLDS } = await import(process.argv[1]);
        const { WINDOW } = await import(process.argv[2]);
        console.log(JSON.stringify([THRESHOLDS, METRICS.map((m) => m.id), WINDOW]));
    """
    found = node(script, str(JS / "heat_math.js"), str(JS / "routing_math.js"))
    assert found == [["floor", *THRESHOLDS], list(METRICS), ROUTING]


@pytest.mark.parametrize(
    "asked",
    [
        {"start": 0, "end": 157, "bins": 157, "sites": "*"},
        {"start": 3, "end": 150, "bins": 20, "sites": "layers.*.out,layers.3.*,embed"},
        {"start": 1000, "end": 2100, "bins": 77, "sites": "layers.*.out"},
        {"start": 1020, "end": 1030, "bins": None, "sites": "logits"},
    ],
)
def test_the_page_makes_the_same_map_of_layers_from_the_tiles(
    long: Any, asked: dict[str, Any]
) -> None:
    scene, out, api = long
    seq = scene.id("0-0.1" if asked["end"] < 1000 else "0-2.1")
    place = f"api/runs/{api.run}/seqs/{seq}"
    manifest = json.loads((out / "bundle.json").read_text())
    tile, n = manifest["tile"], manifest["lengths"][api.run][seq]
    low = asked["start"] - asked["start"] % tile
    script = """
        import { readFileSync } from 'node:fs';
        const [data, format, asked, ...files] = process.argv.slice(1);
        const { binned } = await import(data);
        const { decode, encode } = await import(format);
        const read = (file) => { const b = readFileSync(file); return decode(b.buffer.slice(b.byteOffset, b.byteOffset + b.length)); };
        const made = binned(files.map(read), JSON.parse(asked));
        const again = decode(await encode(made.arrays, made.metadata).arrayBuffer());
        const { codes, starts, scale } = again.arrays;
        console.log(JSON.stringify({ codes: [...codes], starts: [...starts], rows: JSON.parse(again.metadata.rows), high: scale[255] }));
    """  # noqa: E501
    for metric in METRICS:
        files = []
        for start in range(low, asked["end"], tile):
            params = {"metric": metric, "start": start, "end": min(start + tile, n), "sites": "*"}
            files.append(str(out / manifest["files"][key_of(f"{place}/heat", params)]))
        names = [str(JS / name) for name in ("folder_data.js", "safetensors.js")]
        found = node(script, *names, json.dumps(asked), *files)
        given = {k: v for k, v in asked.items() if v is not None}
        want, metadata = decode(api.raw(f"/{place}/heat", metric=metric, **given).content)
        assert found["codes"] == want["codes"].ravel().tolist()
        assert found["starts"] == want["starts"].tolist()
        assert found["rows"] == json.loads(metadata["rows"])
        assert found["high"] == want["scale"][255]


def test_the_page_reads_the_same_numbers_of_a_token_from_the_tiles(long: Any) -> None:
    scene, out, api = long
    manifest = json.loads((out / "bundle.json").read_text())
    script = """
        import { readFileSync } from 'node:fs';
        const [data, format, file, position] = process.argv.slice(1);
        const { siteRows } = await import(data);
        const { decode } = await import(format);
        const b = readFileSync(file);
        console.log(JSON.stringify(siteRows(decode(b.buffer.slice(b.byteOffset, b.byteOffset + b.length)), Number(position))));
    """  # noqa: E501
    for name, position in (("0-0.1", 71), ("0-0.1", 5), ("0-1.0", 45), ("0-2.1", 1500)):
        place = f"api/runs/{api.run}/seqs/{scene.id(name)}"
        start = position - position % manifest["tile"]
        end = min(start + manifest["tile"], manifest["lengths"][api.run][scene.id(name)])
        key = key_of(f"{place}/site-values", {"start": start, "end": end})
        names = [str(JS / x) for x in ("folder_data.js", "safetensors.js")]
        found = node(script, *names, str(out / manifest["files"][key]), str(position))
        want = api.get(f"/{place}/layers/{position}")
        assert [r["site"] for r in found["rows"]] == [r["site"] for r in want["rows"]]
        for mine, theirs in zip(found["rows"], want["rows"], strict=True):
            for flag in ("equal", "sketched"):
                assert mine[flag] == theirs[flag]
            for count in ("ulp", "non_finite"):
                assert mine[count] == (None if theirs[count] is None else str(theirs[count]))
            for value in ("rel_l2", "max_abs", "cosine"):
                x, y = mine[value], theirs[value]
                assert (x is None) == (y is None)
                assert x is None or np.float32(x) == np.float32(y)


def test_routing_is_there_in_windows_side_by_side(long: Any) -> None:
    scene, out, api = long
    path = f"api/runs/{api.run}/seqs/{scene.id('0-2.1')}/routing"
    n = json.loads((out / "bundle.json").read_text())["lengths"][api.run][scene.id("0-2.1")]
    assert n > ROUTING
    for start, end in windows(n, ROUTING):
        want = api.raw(f"/{path}", start=start, end=end).content
        assert saved(out, path, start=start, end=end) == want
        one = {"start": start, "end": end, "bins": 1, "layers": 3}
        arrays, _ = decode(saved(out, path, **one))
        assert arrays["load"].sum() > 0
    assert saved(out, f"{path}/64")["71"] == api.get(f"/{path}/71")


def test_sizes_by_screen_add_up(long: Any, bundle: Any) -> None:
    _, _, done = bundle
    assert sum(done["sizes"].values()) == done["bytes"]
    assert {"tokens", "layers", "routing", "timeline", "weights"} <= set(done["sizes"])


# ---- schedule and weights -----------------------------------------------------------------


def test_a_short_schedule_is_whole_and_the_steps_of_the_sequences_open(tmp_path: Path) -> None:
    scene = schedule_data.build(tmp_path / "s")
    api = Api(scene.a, scene.b, scene.report)
    export([scene.a, scene.b, scene.report], tmp_path / "out", ["0.0"])
    at = f"api/runs/{api.run}"
    out = tmp_path / "out"
    assert saved(out, f"{at}/timeline") == api.get(f"/{at}/timeline", max_spans=5000)
    steps = saved(out, f"{at}/steps/{schedule_data.ONE}/0")
    assert set(steps) >= {"2", "4"}
    assert "6" not in steps  # of another sequence
    assert steps["2"] == api.get(f"/{at}/steps/{schedule_data.ONE}/2")
    kernels = saved(out, f"{at}/tactics")
    assert kernels["rows"] == api.get(f"/{at}/tactics")["rows"]
    assert saved(out, f"{at}/weights") == api.get(f"/{at}/weights")
    (part,) = saved(out, f"{at}/weights/versions")
    assert part["digests"]["versions"] == [0, 1]


def test_of_a_long_schedule_there_are_the_windows_of_the_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewer_export, "_SPANS", 5)
    monkeypatch.setattr(viewer_export, "_MOST_SPANS", 4)
    scene = schedule_data.build(tmp_path / "s")
    api = Api(scene.a, scene.b, scene.report)
    out = tmp_path / "out"
    export([scene.a, scene.b, scene.report], out, ["0.0"])
    manifest = json.loads((out / "bundle.json").read_text())
    at = f"api/runs/{api.run}"
    assert saved(out, f"{at}/timeline")["spans"] is None
    found = manifest["timeline"][api.run]
    assert found
    drawn = set()
    for t0, t1 in found:
        part = saved(out, f"{at}/timeline", t0=t0, t1=t1)
        assert part["spans"] is not None
        drawn |= set(part["spans"]["step"])
    assert drawn >= {2, 4, 5}
    # the page takes the window that holds what it asks for, and else the bins of the whole
    script = """
        const { windowOf } = await import(process.argv[1]);
        const windows = JSON.parse(process.argv[2]);
        const [t0, t1] = windows[0];
        const asked = [[t0, t1], ['0', t1], []];
        console.log(JSON.stringify(asked.map((window) => windowOf(windows, ...window))));
    """
    answer = node(script, str(JS / "folder_data.js"), json.dumps(found))
    assert answer == [found[0], None, None]


def test_a_report_without_its_tape_keeps_what_the_interface_says(tmp_path: Path) -> None:
    scene = build(tmp_path / "s", cases=make_cases()[:2])
    out = tmp_path / "out"
    export([scene.report], out, ["0-0.1"])
    manifest = json.loads((out / "bundle.json").read_text())
    refusals = [name for name in manifest["files"].values() if name.endswith(".problem.json")]
    assert refusals
    assert "only its report is open" in (out / refusals[0]).read_text()


def test_kernel_choices_are_filtered_by_the_rule_of_the_interface(tmp_path: Path) -> None:
    scene = schedule_data.build(tmp_path / "s")
    api = Api(scene.a, scene.b, scene.report)
    whole = api.get(api.at("tactics"))
    script = """
        const { chosen } = await import(process.argv[1]);
        const [whole, queries] = process.argv.slice(2).map((text) => JSON.parse(text));
        console.log(JSON.stringify(queries.map((q) => chosen(whole, { q }))));
    """
    queries = ["differs", "fused_moe cached", "CUTLASS", "nothing of it", ""]
    for query, found in zip(
        queries,
        node(script, str(JS / "folder_data.js"), json.dumps(whole), json.dumps(queries)),
        strict=True,
    ):
        assert found == api.get(api.at("tactics"), q=query), query


def test_keys_are_made_the_same_way_on_both_sides() -> None:
    cases = [
        ["api/runs", {}],
        ["api/runs/ab/seqs/e.0-0.0/tokens", {"start": 0, "end": 4096, "rep": None}],
        ["api/runs/ab/seqs/e:1/sides", {"b": "y", "a": "x", "start": 4096, "end": 5000}],
    ]
    script = """
        globalThis.window = { fetch() {} };
        globalThis.document = { baseURI: 'http://x/' };
        const { keyOf } = await import(process.argv[1]);
        console.log(JSON.stringify(JSON.parse(process.argv[2]).map(([p, q]) => keyOf(p, q))));
    """
    found = node(script, str(JS / "static_api.js"), json.dumps(cases))
    assert found == [key_of(path, params) for path, params in cases]


def test_lists_are_sorted_and_filtered_without_a_server() -> None:
    rows = [
        {"id": "e.0", "max_abs": 0.1, "finish": "stop", "group": None},
        {"id": "e.1", "max_abs": None, "finish": "length", "group": "g"},
        {"id": "e.2", "max_abs": 0.3, "finish": "length", "group": "g"},
    ]
    script = """
        globalThis.window = { fetch() {} };
        globalThis.document = { baseURI: 'http://x/' };
        const { listed } = await import(process.argv[1]);
        const rows = JSON.parse(process.argv[2]);
        const sorted = [{}, { sort: '-max_abs' }, { sort: 'max_abs' }];
        const words = ['LENGTH', 'max_abs>0', 'length and g', 'not stop', 'NOT'];
        const asked = [...sorted, ...words.map((q) => ({ q }))];
        const found = asked.map((query) => listed(rows, query));
        console.log(JSON.stringify(found.map((some) => some && some.map((row) => row.id))));
    """
    found = node(script, str(JS / "folder_data.js"), json.dumps(rows))
    assert found == [
        ["e.0", "e.1", "e.2"],
        ["e.2", "e.0", "e.1"],
        ["e.0", "e.2", "e.1"],
        ["e.1", "e.2"],
        *(None, None, None),  # and, or, not are those of conditions, as in the viewer
        [],
    ]


def left(folder: Path) -> list[str]:
    """What stands beside the tapes and the report of a scene."""
    return sorted(p.name for p in folder.iterdir() if p.name not in ("a", "b", "report"))


def test_what_cannot_be_exported_is_said(small: Scene, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"nobody: no run has it; --sequences 9-9\.9: no run has it"
    ):
        export([small.a], tmp_path / "x", ["nobody", "0-0.0", "9-9.9"])
    assert not left(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(TapeExistsError, match="not empty"):
        export([small.a], tmp_path / "full", ["0-0.0"])
    for words, said in (
        (["--export", str(tmp_path / "y")], "--sequences ID,ID"),
        (["--sequences", "0-0.0"], "--export DIR"),
        (["--export", str(tmp_path / "y"), "--sequences", "0-0.0", "--follow"], "need a server"),
    ):
        done = CliRunner().invoke(view, [str(small.a), *words])
        error = done.exception
        assert isinstance(error, UsageError)
        assert said in f"{error} {error.hint}"


def test_the_command_says_how_to_open_the_folder(small: Scene, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [str(small.a), "--export", str(out), "--sequences", "0-0.0"]
    done = CliRunner().invoke(view, words, standalone_mode=False)
    assert done.exception is None, done.output
    assert f"python -m http.server -d {out}" in done.output
    assert "1 sequences" in done.output
    assert re.search(r"MB by screen: .*tokens \d+\.\d, .*weights", done.output)


# ---- links --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        ({}, {"screen": "overview", "seq": None, "tok": None, "layer": None}),
        ({"seq": 0}, {"screen": "seq", "tok": None, "layer": None}),
        ({"seq": 0, "tok": 71}, {"screen": "seq", "tok": "71", "layer": None}),
        ({"seq": 0, "tok": 71, "layer": 3}, {"screen": "layers", "tok": "71", "layer": "3"}),
        ({"seq": "odd id/%?#&\u00e9 (1)"}, {"screen": "seq", "tok": None, "layer": None}),
    ],
)
def test_links_made_in_python_are_read_by_the_page(
    scene: Scene, arguments: dict[str, Any], want: dict[str, Any]
) -> None:
    tape = open_tape(scene.a)
    first = next(iter(tape))
    given = {k: first if k == "seq" and v == 0 else v for k, v in arguments.items()}
    url = tape.url(**given, base="http://host:9/under/")
    base, mark, fragment = url.partition("#")
    assert (base, mark) == ("http://host:9/under/", "#")
    script = """
        const { parse, format } = await import(process.argv[1]);
        const state = parse(process.argv[2]);
        const { screen, run, seq, params } = state;
        const [tok, layer] = ['tok', 'layer'].map((name) => params.get(name));
        console.log(JSON.stringify({ screen, run, seq, tok, layer, again: format(state) }));
    """
    found = node(script, str(JS / "route.js"), mark + fragment)
    assert found.pop("run") == tape.uuid
    again = found.pop("again")
    named = given.get("seq")
    name = named if isinstance(named, str) or named is None else named.id
    assert found == {"seq": name, **want}
    assert again == mark + fragment  # the page writes the same address


def test_a_link_takes_a_sequence_its_key_or_its_id(scene: Scene) -> None:
    tape = open_tape(scene.a)
    first = next(iter(tape))
    urls = {tape.url(which, 5) for which in (first, first.key, first.id)}
    assert urls == {f"http://127.0.0.1:8000/#/run/{tape.uuid}/seq/{first.id}?tok=5"}
    with pytest.raises(UsageError, match="needs a sequence"):
        tape.url(tok=5)
    with pytest.raises(UsageError, match="negative"):
        tape.url(first, -1)


def test_a_sequence_is_found_whatever_its_name_means_in_a_filter(tmp_path: Path) -> None:
    cases = make_cases()[:3]
    for case, name in zip(cases, ["not", "finish:x", "or"], strict=True):
        case.key_a = case.key_a._replace(request=name)
    scene = build(tmp_path / "s", cases=cases)
    names = [case.key_a.id.partition(".")[2] for case in cases]
    names[2] = cases[2].key_a.id
    done = export([scene.a], tmp_path / "out", names)
    assert list(done["sequences"].values()) == [[case.key_a.id for case in cases]]


def test_a_sequence_is_found_behind_many_that_contain_its_name(tmp_path: Path) -> None:
    path = create_tape(tmp_path / "t", role="rollout")
    with TapeWriter(path) as writer:
        names = [f"{i:03}-9" for i in range(600)] + ["9"]
        for engine, request in [("a" * 32, n) for n in names[:-1]] + [("b" * 32, names[-1])]:
            key = {"engine": engine, "request": request, "sample": 0, "pass": 0}
            writer.append("sequences", {**key, "prompt_len": 1, "finish": "stop"})
            writer.append("tokens", {**key, "start": 0, "n": 1, "ids": [[5]]})
    (only,) = [s.id for s in open_tape(path) if s.key.request == "9"]
    done = export([path], tmp_path / "out", [only.partition(".")[2]])
    assert list(done["sequences"].values()) == [[only]]


def test_an_answer_that_cannot_be_had_ends_an_export(
    small: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise Problem(500, "unreadable table", "cannot be read")

    monkeypatch.setattr(Board, "plain", refused)
    with pytest.raises(UsageError, match="causes: cannot be read"):
        export([small.a, small.b, small.report], tmp_path / "out", ["0-0.1"])
    assert not left(tmp_path)  # so that it can be tried again


def test_an_id_that_cannot_be_asked_for_is_named_as_it_was_given(tmp_path: Path) -> None:
    cases = make_cases()[:3]
    odd = ["a:b", "x:y/../../z", "L" * 200]
    for case, name in zip(cases, odd, strict=True):
        case.key_a = case.key_a._replace(request=name)
    scene = build(tmp_path / "s", cases=cases)
    names = [case.key_a.id.partition(".")[2] for case in cases]
    paths = [scene.a, scene.b, scene.report]
    with pytest.raises(UsageError, match=re.escape(f"--sequences {names[1]}: seq: letters")):
        export(paths, tmp_path / "out", names)
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()  # a folder that is empty may be there
    done = export(paths, tmp_path / "out", [names[0], names[2]])
    assert list(done["sequences"].values()) == [[cases[0].key_a.id, cases[2].key_a.id]]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "s"]
    assert (tmp_path / "out" / "index.html").is_file()


def test_neighbours_are_those_of_the_list(long: Any) -> None:
    scene, out, api = long
    page = saved(out, f"api/runs/{api.run}/seqs")
    names = [scene.id(name) for name in ("0-0.1", "0-1.0", "0-2.1")]
    live = api.get(f"/api/runs/{api.run}/seqs")
    assert page["sort"] == live["sort"]
    shown = [row["id"] for row in page["rows"]]
    assert shown == [row["id"] for row in live["rows"] if row["id"] in names]
    for before, after in itertools.pairwise(shown):
        info = saved(out, f"api/runs/{api.run}/seqs/{before}")
        assert info["neighbours"]["next"] == after


def test_what_links_may_lead_to_stands_in_the_page(bundle: Any) -> None:
    scene, out, _ = bundle
    api = Api(scene.a.parent)
    text = re.search(r'name="rolltape-held" content="([^"]*)"', (out / "index.html").read_text())
    assert text is not None
    reports = [r["id"] for r in api.get("/api/runs")["runs"][0]["reports"]]
    seqs = [scene.id("0-0.1"), scene.id("0-2.1")]
    held = json.loads(html.unescape(text[1]))
    assert {k: sorted(v) for k, v in held.pop(api.run).items() if k != "steps"} == {
        "seqs": sorted(seqs),
        "sides": sorted(reports),
    }
    assert held == {}


# ---- following ----------------------------------------------------------------------------


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def names(library: Library) -> list[tuple[str, int]]:
    library.refresh()
    return [(run.name, len(run.reports)) for run in library.runs()]


def test_with_follow_new_tapes_and_reports_appear(small: Scene, tmp_path: Path) -> None:
    folder = tmp_path / "watched"
    folder.mkdir()
    clock = Clock()
    library = Library([folder], follow=True, clock=clock)
    still = Library([folder], clock=clock)
    assert names(library) == []
    shutil.copytree(small.a, folder / "a")
    assert names(library) == []  # not before a second has passed
    clock.now += LOOK_EVERY
    assert names(library) == [("a", 0)]
    generation = library.generation
    shutil.copytree(small.report, folder / "report")
    clock.now += LOOK_EVERY
    assert names(library) == [("a", 0)]  # a report is waited for until it no longer changes
    clock.now += LOOK_EVERY
    assert names(library) == [("a", 1)]
    assert library.generation > generation
    assert names(still) == []  # without follow nothing new is opened


def test_with_follow_another_tape_at_the_same_path_is_that_tape(
    small: Scene, tmp_path: Path
) -> None:
    folder = tmp_path / "watched"
    shutil.copytree(small.a, folder / "a")
    clock = Clock()
    library = Library([folder], follow=True, clock=clock)
    (first,) = library.runs()
    shutil.rmtree(folder / "a")
    shutil.copytree(small.b, folder / "a")
    clock.now += LOOK_EVERY
    library.refresh()
    (second,) = library.runs()
    assert second.id != first.id
    assert second.tape is not None and second.tape.role == "trainer"


def test_a_folder_that_cannot_be_opened_yet_is_tried_again(small: Scene, tmp_path: Path) -> None:
    folder = tmp_path / "watched"
    shutil.copytree(small.a, folder / "a")
    header = (folder / "a" / "tape.json").read_bytes()
    (folder / "a" / "tape.json").write_bytes(header[: len(header) // 2])
    clock = Clock()
    library = Library([folder], follow=True, clock=clock)
    assert names(library) == []
    for _ in range(3):
        clock.now += LOOK_EVERY
        assert names(library) == []
    assert len(library.failures) == 1
    (folder / "a" / "tape.json").write_bytes(header)
    clock.now += LOOK_EVERY
    assert names(library) == [("a", 0)]
    assert library.failures == []
