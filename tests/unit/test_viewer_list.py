"""The list over many sequences: the filter's grammar, paging while rows come, facets, formats."""

from __future__ import annotations

import io
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
from fastapi import Request
from hypothesis import given
from hypothesis import strategies as st

from rolltape.replay.report import spark
from rolltape.store import TapeWriter, create_tape, seal
from rolltape.store.columns import Masked
from rolltape.store.tape import Report
from rolltape.viewer import library as library_module
from rolltape.viewer import predicate
from rolltape.viewer.answers import Problem
from rolltape.viewer.library import KEPT_PAIRS, LOOK_EVERY, Library
from rolltape.viewer.listing import COLUMNS, FACET_SECONDS, Listing
from rolltape.viewer.overview import run_summary
from rolltape.viewer.views import Views
from tests.e2e import viewer_data
from tests.e2e.viewer_client import Api, Json
from tests.e2e.viewer_data import Scene, build, make_cases

# ---- the filter ---------------------------------------------------------------------------

VALUES = {
    "x": np.array([0.0, 1.0, 2.0, np.nan, -np.inf]),
    "y": np.array([5.0, np.nan, 5.0, 1.0, 0.0]),
    "word": pa.array(["Alpha", "beta", None, "al pha", 'q"q']).dictionary_encode(),
    "id": pa.array(["a:1", "b", "c(d)", "and", "e"]),
    "g": pa.array(["", "null", None, "a", "null"]),
}
TEXTS = ("word", "id", "g")
FIELDS = predicate.Fields("q", ("x", "y"), TEXTS, ("word", "id"), VALUES.__getitem__)


def kept(text: str) -> list[int]:
    node = predicate.parse(text, "q")
    predicate.check(node, FIELDS)
    return np.flatnonzero(predicate.mask(node, FIELDS, 5)).tolist()


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("", [0, 1, 2, 3, 4]),
        ("x>0", [1, 2]),
        ("x > 0 and y = 5", [2]),
        ("x>0 y=5", [2]),
        ("x > 1 or y = 1", [2, 3]),
        ("x > 1 or y = 1 and x < 0", [2]),  # `and` binds more tightly
        ("(x > 1 or y = 1) and y > 2", [2]),
        ("not x > 0", [0, 3, 4]),
        ("not (x > 0 or y = 0)", [0, 3]),
        ("not not x > 0", [1, 2]),
        ("x != 1", [0, 2, 4]),  # what is absent meets no condition
        ("x = null", [3]),
        ("x != null y = null", [1]),
        ("x<=-inf", [4]),
        ("x == 1", [1]),
        ("word = Alpha", [0]),
        ('word = "al pha"', [3]),
        ("word != beta", [0, 3, 4]),
        ("not word = beta", [0, 2, 3, 4]),
        ("word != null", [0, 1, 3, 4]),
        ('word = ""', []),
        ('word:""', [0, 1, 3, 4]),
        ('g = ""', [0]),
        ('g != ""', [1, 3, 4]),
        ("g = null", [2]),
        ('g = "null"', [1, 4]),
        ('g != "null"', [0, 3]),
        ('not g = "null"', [0, 2, 3]),
        ("g != null", [0, 1, 3, 4]),
        ('g:""', [0, 1, 3, 4]),
        ("beta " * predicate.MAX_CONDITIONS, [1]),
        ("or ".join(["beta "] * predicate.MAX_CONDITIONS), [1]),
        ("word = null", [2]),
        ("word:AL", [0, 3]),
        ('word = "q\\"q"', [4]),
        ("alpha", [0]),
        ('"al pha"', [3]),
        ("a:1", [0]),
        ('"and"', [3]),
        ('"c(d)"', [2]),
        ("beta or id:e", [1, 4]),
        ("x>0(y=5)", [2]),
    ],
)
def test_a_filter_keeps_what_it_says(text: str, rows: list[int]) -> None:
    assert kept(text) == rows


@pytest.mark.parametrize(
    ("text", "at", "words"),
    [
        ("x > 0 and (y = 1", 10, "not closed"),
        ("x > 0 ) y = 1", 6, "')' was not expected"),
        ("x > 0 or", 8, "expected, not the end"),
        ("and x > 0", 0, "expected, not 'and'"),
        ("()", 1, "expected, not ')'"),
        ("y = 5 colour > 1", 6, "'colour' is not one of"),
        ("y > many", 0, "'y > many' needs a number after >"),
        ("y >", 0, "needs a value"),
        ("word > 1", 0, "word is text"),
        ('x = 1 "no end', 6, "does not end"),
        ("not " * 50 + "x > 1", 4 * predicate.MAX_DEPTH, "nested more than"),
        ("(" * 60 + "x > 1" + ")" * 60, predicate.MAX_DEPTH, "nested more than"),
        ("a " * 1500, 2 * predicate.MAX_CONDITIONS, "more than 256 words and conditions"),
        ("a or " * 800 + "a", 5 * predicate.MAX_CONDITIONS, "more than 256 words and conditions"),
        ("x>1 " * 1000, 4 * predicate.MAX_CONDITIONS, "more than 256 words and conditions"),
        ('x = "null"', 0, "needs a number"),
    ],
)
def test_what_is_wrong_with_a_filter_is_named_with_its_place(
    text: str, at: int, words: str
) -> None:
    with pytest.raises(Problem) as caught:
        kept(text)
    body = caught.value.body
    assert (body["status"], body["field"], body["position"]) == (400, "q", at)
    assert words in body["detail"] and body["detail"].startswith(f"q: at character {at + 1}: ")


@given(st.text(alphabet='xyword() "\\and:or<=>!not0123456789.e-', max_size=40))
def test_a_filter_is_answered_or_refused(text: str) -> None:
    problem = None
    try:
        assert all(0 <= row < 5 for row in kept(text))
    except Problem as error:
        problem = error.body
    if problem is not None:
        assert problem["status"] == 400 and 0 <= problem["position"] <= len(text)


def test_expressions_over_the_interface(api: Api, scene: Scene) -> None:
    query = 'max_abs > 0.5 and (wver_span > 1 or finish = "length")'
    rows = api.rows(q=query)
    assert {row["id"] for row in rows} == {scene.id("0-0.1"), scene.id("0-2.1")}
    problem = api.fails(400, api.at("seqs"), q="max_abs > 0.5 and (finish")
    assert (problem["field"], problem["position"]) == ("q", 18)
    matched = {q: api.get(api.at("seqs"), q=q)["matched"] for q in ("abort", "not abort")}
    assert sum(matched.values()) == 10


# ---- columns ------------------------------------------------------------------------------


def test_columns_of_a_row(api: Api, scene: Scene) -> None:
    rows = {row["id"]: row for row in api.rows()}
    straddles, masked, holes = (rows[scene.id(n)] for n in ("0-2.0", "0-1.2", "0-1.1"))
    assert straddles["wver_span"] == 2 and holes["wver_span"] == 1
    assert masked["masked_share"] == 1.0 and 0 < holes["masked_share"] < 1
    assert holes["routing_agreement"] == pytest.approx(1 - holes["disagree_share"])
    assert (holes["replay"], rows[scene.id("0-2.2")]["replay"]) == ("in-report", "not-in-report")
    assert holes["opened"] == 1_700_000_000.0
    assert holes["cause"] is None and holes["spark"] is None and holes["p99_abs"] is None
    assert set(holes) == {*COLUMNS, "in_report", "in_tape", "spark"}
    assert api.rows(sort="-wver_span")[0]["id"] == scene.id("0-2.0")
    assert {row["id"] for row in api.rows(q="replay=not-in-report")} == {
        scene.id("0-2.2"),
        scene.id("0-3.0"),
    }


def test_sparks_and_percentiles_of_a_report_that_has_them(small: Scene) -> None:
    case = small.cases["0-0.1"]
    drawn = spark(Masked(np.arange(case.length, dtype=np.float32), np.arange(case.length) > 33))
    shutil.rmtree(small.report / "sequences")
    with TapeWriter(small.report) as writer:
        writer.append("sequences", {"a": small.id("0-0.0"), "b": "y"})
        row = {"a": case.key_a.id, "b": "x", "max_abs": 9.0}
        writer.append("sequences", row)
        later = {"max_abs": 3.0, "p99_abs": 0.5, "spark": [drawn]}
        writer.append("sequences", row | later)  # of two rows the later one counts
    rows = {row["id"]: row for row in Api(small.a, small.report).rows()}
    found = rows[case.key_a.id]
    assert (found["max_abs"], found["p99_abs"]) == (3.0, 0.5)
    assert found["spark"] == [
        float(v) if ok else None for v, ok in zip(drawn.values, drawn.valid, strict=True)
    ]
    assert rows[small.id("0-0.0")]["spark"] is None


# ---- paging -------------------------------------------------------------------------------


def _pages(listing: Listing, **query: Any) -> list[str]:
    seen, after = [], None
    while True:
        page = listing.page(**{"sort": None, "query": None, "limit": 3, "after": after, **query})
        seen += [row["id"] for row in page["rows"]]
        if page["next"] is None:
            return seen
        after = page["next"]


@pytest.mark.parametrize("sort", ["order", "-prompt_len", "id", "-finish", "mean_abs", "-cause"])
@pytest.mark.parametrize("query", [None, "finish!=stop", "group:0-1 or group:0-2"])
def test_pages_hold_every_row_once(scene: Scene, sort: str, query: str | None) -> None:
    library = Library([scene.a, scene.report])
    listing = Listing(library.pair(library.runs()[0].id, None))
    ids = listing.table(listing.select(sort, query)).column("id").to_pylist()
    assert _pages(listing, sort=sort, query=query) == ids
    assert len(set(ids)) == len(ids) > 0


def test_a_cursor_stays_where_it_was_when_rows_come(tmp_path: Path) -> None:
    cases = make_cases()
    scene = build(tmp_path, cases=cases[:6], sealed=False)
    now = [0.0]
    library = Library([scene.a], clock=lambda: now[0])
    views = Views(library)
    run = library.runs()[0].id
    pages: dict[str, Json] = {}
    for sort in ("order", "-response_len", "id"):
        query = {"sort": sort, "query": None, "after": None}
        pages[sort] = views.page(views.pair(run, None), limit=4, **query)
    with TapeWriter(scene.a) as writer:
        for case in cases[6:]:
            viewer_data._write_sequence(writer, case, case.key_a, case.finish)
            viewer_data._write_tokens(writer, case, case.key_a, case.a)
    now[0] += LOOK_EVERY
    for sort, first in pages.items():
        query = {"sort": sort, "query": None}
        pair = views.pair(run, None)
        whole = [r["id"] for r in views.page(pair, limit=50, after=None, **query)["rows"]]
        assert len(whole) == 10
        last = first["rows"][-1]["id"]
        rest = views.page(pair, limit=50, after=first["next"], **query)
        assert [r["id"] for r in rest["rows"]] == whole[whole.index(last) + 1 :]
        assert rest["start"] == whole.index(last) + 1


def test_a_cursor_of_another_order_is_refused(api: Api) -> None:
    cursor = api.get(api.at("seqs"), limit=3, sort="id")["next"]
    assert api.fails(400, api.at("seqs"), after=cursor, sort="order")["field"] == "after"


# ---- facets and formats -------------------------------------------------------------------


def test_facets_count_the_rows_that_match(api: Api) -> None:
    page = api.get(api.at("seqs"), facets="finish,weight_version,group", q="group:0-0 or group:0-2")
    assert page["facets"]["finish"]["values"] == [["stop", 3], ["length", 2], ["open", 1]]
    assert sum(count for _, count in page["facets"]["group"]["values"]) == page["matched"]
    assert {value for value, _ in page["facets"]["weight_version"]["values"]} == {3, 4}
    assert page["facets_timed_out"] == [] and not page["facets"]["finish"]["timed_out"]
    assert api.fails(400, api.at("seqs"), facets="colour")["field"] == "facets"


def test_facets_that_were_not_counted_to_the_end_say_so(scene: Scene) -> None:
    library = Library([scene.a, scene.report])
    listing = Listing(library.pair(library.runs()[0].id, None))
    times = iter([0.0] + [FACET_SECONDS + i for i in range(20)])
    found = listing.facets("finish,group", None, clock=lambda: next(times))
    # the first block of the first one is always counted
    assert not found["facets"]["finish"]["timed_out"] and found["facets_timed_out"] == ["group"]
    assert found["facets"]["group"]["values"] == []


def test_the_list_as_arrow_and_as_csv(api: Api) -> None:
    rows = api.rows(sort="id")
    answer = api.raw(api.at("seqs"), sort="id", format="arrow")
    assert answer.headers["content-type"] == "application/vnd.apache.arrow.stream"
    table = pa.ipc.open_stream(answer.content).read_all()
    assert table.column("id").to_pylist() == [row["id"] for row in rows]
    assert table.column("mean_abs").to_pylist() == [row["mean_abs"] for row in rows]
    answer = api.raw(api.at("seqs"), sort="id", format="csv", limit=4)
    assert answer.headers["content-type"].startswith("text/csv")
    assert "attachment" in answer.headers["content-disposition"]
    found = pyarrow.csv.read_csv(io.BytesIO(answer.content))
    assert found.column("id").to_pylist() == [row["id"] for row in rows[:4]]
    rest = api.rows(sort="id", after=answer.headers["rolltape-next"])
    assert rest == rows[4:]
    assert api.fails(400, api.at("seqs"), format="xlsx")["field"] == "format"


def test_csv_of_the_list_gives_a_spreadsheet_no_formula(tmp_path: Path) -> None:
    cases = make_cases()[:2]
    cases[0].group, cases[1].group = "=HYPERLINK(1)", "@x"
    scene = build(tmp_path, cases=cases)
    api = Api(scene.a, scene.b, scene.report)
    answer = api.raw(api.at("seqs"), format="csv")
    found = pyarrow.csv.read_csv(io.BytesIO(answer.content))
    assert sorted(found.column("group").to_pylist()) == ["'=HYPERLINK(1)", "'@x"]
    assert sorted(row["group"] for row in api.rows()) == ["=HYPERLINK(1)", "@x"]
    numbers = [row["k1"] for row in api.rows()]
    assert found.column("k1").to_pylist() == pytest.approx(numbers)  # a negative number is one


# ---- what is kept -------------------------------------------------------------------------


def test_a_sealed_run_is_not_computed_for_a_client_that_has_it(
    small: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal(small.report)
    api = Api(small.a, small.b, small.report)
    seq = small.id("0-0.1")
    addresses: list[tuple[str, Json]] = [
        (api.at(), {}),
        (api.at("seqs"), {"sort": "id"}),
        (api.at("seqs", seq), {}),
        (api.at("seqs", seq, "tokens"), {"start": 0, "end": 9}),
        (api.at("seqs", seq, "tokens", "71"), {}),
    ]
    tags = [api.raw(path, **params).headers["etag"] for path, params in addresses]
    assert len(set(tags)) == len(tags)
    for name in ("overview", "page", "sequence", "columns"):
        monkeypatch.setattr(Views, name, lambda *_, **__: pytest.fail("computed"))
    for (path, params), tag in zip(addresses, tags, strict=True):
        again = api.client.get(path, params=params, headers={"if-none-match": tag})
        assert (again.status_code, again.headers["etag"]) == (304, tag)


def test_a_tag_changes_when_damage_is_found(small: Scene) -> None:
    seal(small.report)
    library = Library([small.a, small.b, small.report])
    views = Views(library)
    pair = views.pair(library.runs()[0].id, None)
    get = {"type": "http", "path": "/x", "query_string": b"", "headers": []}
    before = views.answer(Request(get), pair, dict).headers["etag"]
    assert views.answer(Request(get), pair, dict).headers["etag"] == before
    assert pair.tape is not None
    pair.tape.note("routes/x: damaged")
    assert views.answer(Request(get), pair, dict).headers["etag"] != before
    # what is found while an answer is made stands in that answer
    found = views.answer(Request(get), pair, lambda: pair.tape.note("tokens/y: damaged")).headers
    assert views.answer(Request(get), pair, dict).headers["etag"] == found["etag"]


def test_a_tag_changes_when_the_tape_becomes_side_b_of_a_report(small: Scene) -> None:
    for path in (small.a, small.b, small.report):
        seal(path)
    alone, both = Library([small.a, small.b]), Library([small.a, small.b, small.report])
    get = {"type": "http", "path": "/x", "query_string": b"", "headers": []}
    tags = []
    for library in (alone, both):
        views = Views(library)
        (run,) = (r.id for r in library.runs() if r.name == small.b.name)
        pair = views.pair(run, None)
        answer = views.answer(Request(get), pair, partial(run_summary, pair))
        tags.append(answer.headers["etag"])
        assert json.loads(answer.body)["as_b"] == len(tags) - 1
    assert tags[0] != tags[1]


def test_a_run_that_grows_has_the_tag_of_its_answer(tmp_path: Path) -> None:
    scene = build(tmp_path, cases=make_cases()[:2], sealed=False)
    api = Api(scene.a)
    path = api.at("seqs")
    tag = api.raw(path).headers["etag"]
    assert api.client.get(path, headers={"if-none-match": tag}).status_code == 304
    assert api.raw(path, sort="id").headers["etag"] != tag


def test_pairs_that_nobody_looks_at_are_let_go(tmp_path: Path) -> None:
    scenes = [build(tmp_path / str(i), cases=make_cases()[:2]) for i in range(KEPT_PAIRS + 2)]
    library = Library([path for s in scenes for path in (s.a, s.b, s.report)])
    views = Views(library)
    runs = [run.id for run in library.runs() if run.reports]
    assert len(runs) == KEPT_PAIRS + 2
    first = views.pair(runs[0], None)
    before = views.page(first, sort=None, query=None, limit=10, after=None)
    for run in runs[1:]:
        views.page(views.pair(run, None), sort=None, query=None, limit=10, after=None)
    again = views.pair(runs[0], None)
    assert again is not first and again.tape is not first.tape
    assert len(views._listings) <= KEPT_PAIRS
    assert views.page(again, sort=None, query=None, limit=10, after=None) == before


@pytest.mark.parametrize("gone", ["report", "b"])
def test_what_is_removed_while_served_is_told_and_the_others_are_served(
    tmp_path: Path, gone: str
) -> None:
    scenes = [build(tmp_path / str(i), cases=make_cases()[:2]) for i in range(KEPT_PAIRS + 1)]
    library = Library([path for s in scenes for path in (s.a, s.b, s.report)])
    views = Views(library)
    runs = [run.id for run in library.runs() if run.reports]
    first = views.pair(runs[0], None)
    views.page(first, sort=None, query=None, limit=10, after=None)
    removed = scenes[0].report if gone == "report" else scenes[0].b
    shutil.rmtree(removed)
    for run in (*runs[1:], *runs[1:]):  # the first is dropped on the way
        pair = views.pair(run, None)
        assert views.page(pair, sort=None, query=None, limit=10, after=None)["rows"]
    assert first not in views._listings
    assert [failure.path for failure in library.failures] == [str(removed)]
    assert views.runs()["failures"][0]["path"] == str(removed)
    again = views.pair(runs[0], None)
    assert (again.report is None) == (gone == "report")
    assert again.b is None  # a report says which tape it is


def test_a_tape_that_is_written_and_removed_is_told_and_opened_when_it_is_there_again(
    tmp_path: Path,
) -> None:
    live = build(tmp_path / "live", cases=make_cases()[:1], sealed=False)
    other = build(tmp_path / "other", cases=make_cases()[:2])
    now = [0.0]
    library = Library([live.a, other.a], clock=lambda: now[0])
    views = Views(library)
    runs = {run.tape.path: run.id for run in library.runs() if run.tape is not None}
    shutil.move(live.a, tmp_path / "away")
    now[0] += LOOK_EVERY
    assert views.pair(runs[other.a], None).run.id == runs[other.a]
    assert [run.id for run in library.runs()] == [runs[other.a]]
    assert [failure.path for failure in library.failures] == [str(live.a)]
    shutil.move(tmp_path / "away", live.a)
    now[0] += LOOK_EVERY
    assert views.pair(runs[live.a], None).tape is not None
    assert library.failures == []


def test_what_belongs_to_what_is_found_out_once(
    small: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = 30
    for i in range(many):
        create_tape(tmp_path / "many" / f"{i:02}", role="rollout")
    library = Library([small.a, small.b, small.report, tmp_path / "many"])
    views, side = Views(library), library_module._side
    asked: list[str] = []

    def counted(report: Report, name: str) -> str | None:
        asked.append(name)
        return side(report, name)

    monkeypatch.setattr(library_module, "_side", counted)
    assert len(views.runs()["runs"]) == many + 2
    assert len(asked) <= 3  # there is one report
    views.runs()
    assert len(asked) <= 4
