"""Causes, side by side, basket, palette and exported folders, in a real browser."""

from __future__ import annotations

import copy
import functools
import http.server
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from playwright.sync_api import Page, expect

from tests.e2e.accessibility import overflow, problems
from tests.e2e.conftest import Served, serving
from tests.e2e.viewer_data import Case, Scene, add_replay, build, make_cases
from tests.e2e.viewer_tab import Tab, shoot

pytestmark = pytest.mark.browser

SWITCHES = {"routing": "live", "lm_head": "model"}


@pytest.fixture(scope="module")
def replays(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A tape with a base replay, one with its routes, one with another head."""
    cases = make_cases() + _more()
    scene = build(tmp_path_factory.mktemp("replays"), cases=cases)
    for name, factor, switches in (
        ("base", 1.0, SWITCHES),
        ("ids", 0.3, {**SWITCHES, "routing": "ids"}),
        ("head", 1.0, {**SWITCHES, "lm_head": "float32"}),
    ):
        left = [c for c in _scaled(cases, factor) if name != "ids" or c.name != "0-1.0"]
        add_replay(scene, name, left, switches=switches)
    return scene


def _more() -> list[Case]:
    out = []
    for k in range(6):
        case = copy.deepcopy(make_cases(long=200)[k % 2])
        case.name, case.group = f"0-{k + 4}.0", f"0-{k + 4}"
        case.__post_init__()
        out.append(case)
    return out


def _scaled(cases: list[Case], factor: float) -> list[Case]:
    out = copy.deepcopy(cases)
    for case in out:
        with np.errstate(invalid="ignore"):
            moved = case.a.values + (case.b.values - case.a.values) * np.float32(factor)
        early = np.arange(case.length) < 50  # the same bits in every replay
        case.b.values[:] = np.where(early, case.b.values, moved)
    return out


@pytest.fixture(scope="module")
def viewer(replays: Scene) -> Iterator[Served]:
    with serving(replays.a.parent) as it:
        yield it


@pytest.fixture
def page_of(tab_of: Callable[..., Tab], viewer: Served) -> Callable[..., Tab]:
    return lambda **options: tab_of(viewer, **options)


def reports(tab: Tab) -> dict[str, str]:
    answer = tab.context.request.get(f"{tab.served.base}api/runs").json()
    return {r["name"]: r["id"] for r in answer["runs"][0]["reports"]}


def causes(tab: Tab, query: str = "") -> Page:
    base = reports(tab)["base-report"]
    return tab.open(f"#/run/{tab.run}/causes?rep={base}{query}")


def sides(tab: Tab, seq: str, query: str = "", a: str = "base", b: str = "ids") -> Page:
    found = reports(tab)
    pair = f"a={found[f'{a}-report']}&b={found[f'{b}-report']}"
    page = tab.open(f"#/run/{tab.run}/seq/{seq}/sides?{pair}{query}")
    return page


def assert_fine(page: Page, name: str) -> None:
    """Accessible as it is drawn, and at 200 % zoom nothing sticks out; with pictures of each."""
    assert problems(page) == []
    shoot(page, name)
    page.emulate_media(color_scheme="dark")
    shoot(page, f"{name}-dark")
    assert problems(page) == []
    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": 640, "height": 450})
    assert overflow(page) == []
    shoot(page, f"{name}-zoom", full_page=True)
    page.set_viewport_size({"width": 1280, "height": 900})


# ---- causes -------------------------------------------------------------------------------


def test_each_hypothesis_has_a_state_and_a_reason(page_of: Any) -> None:
    tab = page_of()
    page = causes(tab)
    rows = page.locator("details.cause")
    states = {row.get_attribute("id"): row.locator(".badge").inner_text() for row in rows.all()}
    assert "supported" in states["cause-routing"]
    assert "refuted" in states["cause-lm_head"]
    assert "not tested" in states["cause-router"]
    assert "not testable here" in states["cause-quant"]
    routing = page.locator("#cause-routing")
    expect(routing).to_have_attribute("open", "")
    expect(routing.locator("summary")).to_contain_text("of the gap goes (95 %:")
    expect(routing.locator(".effects")).to_contain_text("base-report")
    page.locator("#method > summary").click()
    expect(page.locator("#method")).to_contain_text("percentile bootstrap over sequences")
    assert_fine(page, "causes")


def test_evidence_leads_to_its_token_and_back(page_of: Any) -> None:
    tab = page_of()
    page = causes(tab)
    page.locator("#cause-routing .evidence a").first.click()
    page.wait_for_selector("#strip [aria-selected=true]")
    assert tab.pinned() == f"t{tab.param('tok')}"
    page.go_back()
    page.wait_for_selector("#cause-routing")


def test_an_address_opens_one_hypothesis_with_its_commands(page_of: Any, replays: Scene) -> None:
    tab = page_of(permissions=["clipboard-read", "clipboard-write"])
    page = causes(tab, "&cause=router")
    router = page.locator("#cause-router")
    expect(router).to_have_attribute("open", "")
    expect(router.locator(".command code").first).to_contain_text(
        f"rolltape replay {replays.a} -o {replays.a}.router-float32"
    )
    router.get_by_role("button", name="Copy all").click()
    expect(page.locator("#status")).to_contain_text("Commands copied")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert [line.split()[1] for line in copied.split("\n")] == ["replay", "diff", "view"]
    # closing it takes it out of the address, opening another puts that in
    router.locator("summary").click()
    expect(page).not_to_have_url(re.compile("cause="))
    page.locator("#cause-precision summary").click()
    expect(page).to_have_url(re.compile("cause=precision"))


def test_keys_walk_the_hypotheses(page_of: Any) -> None:
    page = causes(page_of())
    page.keyboard.press("j")
    page.keyboard.press("j")
    summaries = page.locator("details.cause > summary")
    expect(summaries.nth(1)).to_be_focused()
    page.keyboard.press("k")
    expect(summaries.nth(0)).to_be_focused()


def test_without_a_report_the_page_says_what_makes_one(
    tab_of: Callable[..., Tab], serve: Callable[..., Served], replays: Scene
) -> None:
    tab = tab_of(serve(replays.a))
    page = tab.open(f"#/run/{tab.run}/causes")
    expect(page.locator(".notices")).to_be_attached()
    expect(page.locator("main")).to_contain_text("Nothing was compared yet")
    page.locator("#cause-routing summary").click()
    expect(page.locator("#cause-routing .command")).to_have_count(5)


# ---- side by side -------------------------------------------------------------------------


def test_two_strips_have_one_cursor(page_of: Any, replays: Scene) -> None:
    tab = page_of()
    page = sides(tab, replays.id("0-0.1"))
    expect(page.locator("#strip-a .t")).to_have_count(replays.cases["0-0.1"].length)
    expect(page.locator("#strip-b .t")).to_have_count(replays.cases["0-0.1"].length)
    expect(page.locator("main")).to_contain_text("switch routing")
    page.locator("#ta-71").click()
    expect(page.locator("#ta-71")).to_have_attribute("aria-selected", "true")
    expect(page.locator("#tb-71")).to_have_attribute("aria-selected", "true")
    expect(page.locator("#readout")).to_contain_text("R1: \u0394 +1.29 nat")
    expect(page.locator("#readout")).to_contain_text("R1 \u2212 R2 +0.903 nat")
    page.keyboard.press("j")
    expect(page.locator("#tb-72")).to_have_attribute("aria-selected", "true")
    assert tab.param("tok") == "72"
    assert_fine(page, "sides")


def test_x_blinks_in_place(page_of: Any, replays: Scene) -> None:
    tab = page_of()
    page = sides(tab, replays.id("0-2.1"))
    page.locator("#strip-a").evaluate("element => { element.scrollTop = 900; }")
    expect(page.locator("#strip-b")).to_have_js_property("scrollTop", 900)
    page.keyboard.press("x")
    expect(page.locator("#strip-a")).to_be_visible()
    expect(page.locator("#strip-b")).to_be_hidden()
    assert tab.param("show") == "a"
    colour = "getComputedStyle(document.getElementById('{}')).backgroundColor"
    before = page.evaluate(colour.format("ta-100"))
    top = page.locator("#strip-a").evaluate("element => element.scrollTop")
    page.keyboard.press("x")
    expect(page.locator("#strip-a")).to_be_hidden()
    expect(page.locator("#strip-b")).to_be_visible()
    assert page.locator("#strip-b").evaluate("element => element.scrollTop") == top
    page.keyboard.press("x")
    assert page.evaluate(colour.format("ta-100")) == before
    page.get_by_role("radio", name="R1 \u2212 R2").check()
    expect(page.locator("#strip-diff")).to_be_visible()
    assert tab.param("show") == "diff"


def test_the_first_difference_and_the_next_ones(page_of: Any, replays: Scene) -> None:
    tab = page_of()
    page = sides(tab, replays.id("0-0.1"), "&show=diff")
    page.locator("#first-difference").click()
    first = int(tab.param("tok") or 0)
    assert first >= 50
    expect(page.locator(f"#tdiff-{first}")).to_have_attribute("aria-selected", "true")
    page.keyboard.press("Escape")
    page.keyboard.press("n")
    expect(page.locator("#status")).to_contain_text("R1 \u2212 R2 over 0.1 nat")
    expect(page).to_have_url(re.compile("tok="))
    over = int(tab.param("tok") or 0)
    page.keyboard.press("N")
    expect(page.locator("#status")).to_contain_text("no earlier token")
    page.reload()
    tab.settle()
    expect(page.locator(f"#tdiff-{over}")).to_have_attribute("aria-selected", "true")


def test_windows_of_a_long_sequence(page_of: Any, replays: Scene) -> None:
    tab = page_of()
    page = sides(tab, replays.id("0-2.1"))
    expect(page.locator("#strip-a .t")).to_have_count(4096)
    page.keyboard.press("]")
    expect(page.locator("#ta-4096")).to_be_attached()
    expect(page.locator("#ta-0")).to_have_count(0)
    page.keyboard.press("]")
    expect(page.locator("#status")).to_contain_text("this is the last window")


def test_another_report_is_chosen_and_both_are_swapped(page_of: Any, replays: Scene) -> None:
    tab = page_of()
    page = sides(tab, replays.id("0-0.1"))
    found = reports(tab)
    page.locator("#pick-b").select_option(label="head-report")
    page.wait_for_selector("text=switch lm_head")
    assert tab.param("b") == found["head-report"]
    page.get_by_role("link", name="Swap").click()
    expect(page).to_have_url(re.compile(f"[?&]a={found['head-report']}"))
    page.locator("#pick-b").select_option(label="head-report")
    expect(page.locator("main")).to_contain_text("R1 and R2 are the same report")
    # with the keys: the list keeps the focus, and choosing another pair leads on
    page.locator("#pick-a").focus()
    page.keyboard.press("ArrowUp")
    page.wait_for_selector("#strip-a")
    expect(page.locator("#pick-a")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#strip-a")).to_be_focused()


def test_a_sequence_that_one_side_lacks(page_of: Any, replays: Scene) -> None:
    page = sides(page_of(), replays.id("0-1.0"))
    lacks = page.locator(".notice", has_text="R2 does not have this sequence")
    expect(lacks).to_contain_text("Report ids-report did not compare it")
    expect(page.locator("#strip-a .t.compared").first).to_be_attached()
    expect(page.locator("#strip-b .t.compared")).to_have_count(0)


def test_one_report_is_not_enough_and_the_page_says_what_makes_another(
    tab_of: Callable[..., Tab], served: Served, scene: Scene
) -> None:
    tab = tab_of(served)
    page = tab.open(f"#/run/{tab.run}/seq/{scene.id('0-0.1')}/sides")
    expect(page.locator(".notice h2")).to_contain_text("Only one report of this tape is open")
    expect(page.locator(".command code").first).to_contain_text("rolltape replay")
    shoot(page, "sides-one")


# ---- basket -------------------------------------------------------------------------------


def star(tab: Tab, scene: Scene, name: str, tok: int | None = None) -> None:
    page = tab.sequence(scene.id(name), "" if tok is None else f"?tok={tok}")
    page.keyboard.press("s")
    expect(page.locator("#status")).to_contain_text("starred:")


def test_what_is_starred_is_kept_noted_ordered_and_exported(page_of: Any, replays: Scene) -> None:
    tab = page_of(permissions=["clipboard-read", "clipboard-write"])
    page = tab.open("#/basket")
    expect(page.locator("main")).to_contain_text("Nothing is starred")
    star(tab, replays, "0-0.1", 71)
    star(tab, replays, "0-2.1")
    page = tab.open("#/basket")
    items = page.locator("#basket > li")
    expect(items).to_have_count(2)
    expect(items.nth(0)).to_contain_text("position 71")
    items.nth(0).locator("textarea").fill("worst of all\nlook at layer 3")
    items.nth(1).locator("textarea").click()
    items.nth(1).get_by_role("button", name="Move up").click()
    expect(items.nth(0)).to_contain_text("0-2.1")
    page.reload()
    tab.settle()
    expect(items.nth(1).locator("textarea")).to_have_value("worst of all\nlook at layer 3")
    page.locator("#copy-markdown").click()
    expect(page.locator("#status")).to_contain_text("Markdown copied")
    text = page.evaluate("navigator.clipboard.readText()")
    assert f"({tab.served.base}#/run/{tab.run}/seq/{replays.id('0-0.1')}?tok=71" in text
    assert "   look at layer 3" in text
    with page.expect_download() as saved:
        page.locator("#save-markdown").click()
    assert Path(saved.value.path()).read_text() == text
    assert saved.value.suggested_filename == "triage.md"
    assert_fine(page, "basket")
    # its link reopens the view
    items.nth(1).get_by_role("link").click()
    page.wait_for_selector("#strip [aria-selected=true]")
    assert tab.pinned() == "t71"
    # into an empty one
    other = page_of()
    page = other.open("#/basket")
    page.locator("summary", has_text="Import").click()
    page.locator("#import").fill(text)
    page.locator("#do-import").click()
    expect(page.locator("#basket > li")).to_have_count(2)
    expect(page.locator("#basket textarea").nth(1)).to_have_value("worst of all\nlook at layer 3")


def test_s_again_takes_the_star_away(page_of: Any, replays: Scene) -> None:
    tab = page_of()
    star(tab, replays, "0-0.1", 71)
    tab.page.keyboard.press("s")
    expect(tab.page.locator("#status")).to_contain_text("no longer starred")
    page = tab.open("#/basket")
    expect(page.locator("main")).to_contain_text("Nothing is starred")


def test_notes_are_kept_in_the_file_and_two_pages_merge(
    tab_of: Callable[..., Tab], serve: Callable[..., Served], scene: Scene, tmp_path: Path
) -> None:
    file = tmp_path / "notes.json"
    served = serve(scene.a, scene.b, scene.report, notes=file)
    one, other = tab_of(served), tab_of(served)
    star(one, scene, "0-0.1", 71)
    assert [i["tok"] for i in json.loads(file.read_text())["items"]] == [71]
    page = other.open("#/basket")
    expect(page.locator("main")).to_contain_text("notes.json")
    expect(page.locator("#basket > li")).to_have_count(1)
    star(one, scene, "0-2.1")  # the other page does not know of it
    page.locator("#basket textarea").fill("from the other page")
    page.locator("h1").click()
    expect(page.locator("#basket > li")).to_have_count(2)
    expect(page.locator("#status")).to_contain_text("both are merged")
    items = json.loads(file.read_text())["items"]
    assert [(i.get("tok"), i.get("note")) for i in items] == [
        (71, "from the other page"),
        (None, None),
    ]
    other.trouble[:] = [t for t in other.trouble if "409" not in t]  # the refusal is the point


# ---- palette ------------------------------------------------------------------------------


def palette(page: Page, typed: str) -> None:
    page.keyboard.press("Control+k")
    page.wait_for_selector("#palette-input")
    page.locator("#palette-input").fill(typed)


def test_the_palette_goes_to_screens_sequences_and_tokens(page_of: Any, replays: Scene) -> None:
    tab = page_of()
    page = tab.open(f"#/run/{tab.run}")
    palette(page, "causes")
    box = page.locator("#palette-input")
    expect(box).to_have_attribute("aria-activedescendant", "palette-0")
    expect(page.locator("#palette-0")).to_have_attribute("aria-selected", "true")
    page.keyboard.press("Enter")
    page.wait_for_selector("#cause-routing")
    expect(page.locator("#dialog")).to_be_hidden()
    palette(page, "0-2.1")
    expect(page.locator("#palette-0")).to_contain_text(replays.id("0-2.1"))
    assert problems(page) == []
    shoot(page, "palette")
    page.keyboard.press("Enter")
    page.wait_for_selector("#strip .t")
    palette(page, "5000")
    expect(page.locator("#palette-0")).to_contain_text("Go to token 5000")
    page.keyboard.press("Enter")
    page.wait_for_selector("#t5000[aria-selected=true]")
    palette(page, "")
    page.keyboard.press("ArrowDown")
    expect(box).to_have_attribute("aria-activedescendant", "palette-1")
    page.keyboard.press("Escape")
    expect(page.locator("#dialog")).to_be_hidden()
    palette(page, "zzzz")
    expect(page.locator("#palette-list")).to_contain_text("Nothing has that name")
    page.locator("#palette-input").fill("light")
    before = page.evaluate("document.documentElement.dataset.theme")
    page.keyboard.press("Enter")
    expect(page.locator("html")).not_to_have_attribute("data-theme", before)


# ---- an exported folder -------------------------------------------------------------------


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


class Folder:
    """A folder behind any file server."""

    def __init__(self, folder: Path) -> None:
        handler = functools.partial(_Quiet, directory=str(folder))
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.base = f"http://127.0.0.1:{self._server.server_address[1]}/"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


@pytest.fixture(scope="module")
def folder(replays: Scene, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    from rolltape.viewer.export import export

    out = tmp_path_factory.mktemp("bundle") / "out" / "deep"
    export([replays.a.parent], out, ["0-0.1", "0-0.0"])
    it = Folder(out.parent)  # under a prefix, as on a page of a project
    it.base += "deep/"
    yield it
    it.close()


def test_an_exported_folder_shows_the_same_screens(
    browser: Any, folder: Folder, replays: Scene, viewer: Served
) -> None:
    tab = Tab(browser, viewer)
    run, found = tab.run, reports(tab)
    tab.served = folder  # type: ignore[assignment]
    page = tab.open(f"#/run/{run}")
    expect(page.locator("h1")).to_contain_text("divergent")
    page.get_by_role("link", name="Sequences").first.click()
    page.wait_for_selector(".list tbody tr")
    expect(page.locator(".list tbody tr")).to_have_count(2)
    page = tab.open(f"#/run/{run}/seq/{replays.id('0-0.1')}?tok=71&rep={found['base-report']}")
    expect(page.locator("#panel")).to_contain_text("-2.75")
    page.keyboard.press("Escape")
    page.keyboard.press("n")
    expect(page).to_have_url(re.compile("tok="))
    page = tab.open(f"#/run/{run}/causes?rep={found['base-report']}")
    expect(page.locator("#cause-routing .badge")).to_contain_text("supported")
    pair = f"a={found['base-report']}&b={found['ids-report']}"
    page = tab.open(f"#/run/{run}/seq/{replays.id('0-0.1')}/sides?{pair}&tok=71")
    expect(page.locator("#readout")).to_contain_text("R1 \u2212 R2 +0.903 nat")
    tabs = ["Tokens", "Layers", "Routing", "Side by side"]
    assert page.locator("#tabs a").all_inner_texts() == tabs
    shoot(page, "exported")
    page = tab.open(f"#/run/{run}/seq/{replays.id('0-2.1')}")
    expect(page.locator(".notice.info")).to_contain_text("Not in this folder")
    expect(page.locator(".notice code")).to_have_text(f"rolltape view {replays.a.parent}")
    expect(page.locator("#status")).not_to_contain_text("last error")
    page = tab.open("#/basket")
    expect(page.locator("main")).to_contain_text("Nothing is starred")
    tab.context.close()
    assert tab.trouble == []


def test_layers_routing_timeline_and_weights_of_a_folder_are_those_of_the_viewer(
    browser: Any, folder: Folder, replays: Scene, viewer: Served
) -> None:
    live, tab = Tab(browser, viewer), Tab(browser, viewer)
    run, rep = tab.run, reports(tab)["base-report"]
    step = live.context.request.get(f"{viewer.base}api/runs/{run}/timeline").json()
    lane = step["lanes"][0]["id"]
    tab.served = folder  # type: ignore[assignment]
    seq = f"#/run/{run}/seq/{replays.id('0-0.1')}"
    same = {
        f"{seq}/layers?tok=71&open=3&rep={rep}": ["#front-line", "#heat-readout", "#front-table"],
        f"{seq}/layers?tok=70&metric=ulp&thr=1e-5&from=40&to=90&open=all&rep={rep}": [
            *("#front-line", "#heat-readout", "#heat-clipped")
        ],
        f"{seq}/routing?tok=83&layer=3&rep={rep}": [
            *("#routing-lead", "#routing-readout", "#routing-layers", "#routing-token")
        ],
        f"#/run/{run}/timeline?rep={rep}": ["#window-note"],
        f"#/run/{run}/timeline?rep={rep}&step=51&lane={lane}": ["#readout", "#batch"],
        f"#/run/{run}/weights?rep={rep}": ["main"],
        f"#/run/{run}/weights?rep={rep}&version=3": ["main"],
    }
    for hash_, parts in same.items():
        pages = [it.open(hash_) for it in (live, tab)]
        for part in parts:
            texts = []
            for page in pages:
                expect(page.locator(part).first).to_be_visible()
                texts.append(page.locator(part).first.inner_text())
            assert texts[0] == texts[1], (hash_, part)
    page = tab.open(f"{seq}/layers?tok=71&rep={rep}")
    page.locator("#token-sites summary").click()
    expect(page.locator("#token-sites tbody tr").first).to_be_visible()
    assert live.trouble == tab.trouble == []
    live.context.close()
    tab.context.close()


def test_what_a_folder_leaves_out_is_said_with_the_command_that_shows_it(
    browser: Any, folder: Folder, replays: Scene, viewer: Served
) -> None:
    tab = Tab(browser, viewer)
    run = tab.run
    runs = tab.context.request.get(f"{viewer.base}api/runs").json()["runs"]
    command = f"rolltape view {replays.a.parent}"
    tab.served = folder  # type: ignore[assignment]
    page = tab.open(f"#/run/{run}/seq/{replays.id('0-0.1')}/routing?tok=83&from=10&to=40&eps=0.5")
    expect(page.locator(".notice.info")).to_contain_text("Windows and eps are fixed")
    expect(page.locator(".notice.info code")).to_have_text(command)
    expect(page.locator(".pager")).to_contain_text("positions 0 to 156 of 157")
    expect(page.locator("#eps")).to_have_count(0)
    page.keyboard.press("z")
    expect(page.locator("#status")).to_contain_text("windows are fixed in an exported folder")
    assert_fine(page, "exported-routing")
    page = tab.open(f"#/run/{run}/timeline")
    expect(page.locator(".notice.info code").first).to_have_text(command)
    expect(page.locator("#save-csv")).to_have_count(0)
    assert_fine(page, "exported-timeline")
    files = page.evaluate("fetch('bundle.json').then((b) => b.json()).then((b) => b.files)")
    engine = next(key.split("/steps/")[1].split("/")[0] for key in files if "/steps/" in key)
    page = tab.open(f"#/run/{run}/timeline?step=999999&lane={engine}:decode")
    expect(page.locator("#panel .notice")).to_contain_text("is not in this folder")
    expect(page.locator("#panel .notice")).to_contain_text(command)
    page = tab.open(f"#/run/{run}/seqs")
    expect(page.locator("#filter-help")).to_contain_text("Words match")
    expect(page.locator(".filter code")).to_have_text(command)
    page.locator("#filter").fill("not stop")
    page.keyboard.press("Enter")
    expect(page.locator("main .notice.info")).to_contain_text("filters by words alone")
    expect(page.locator("main .notice code")).to_have_text(command)
    rep = next(r["id"] for r in runs[0]["reports"])
    page = tab.open(f"#/run/{run}/seq/{replays.id('0-0.1')}/sides?a={rep}&b={rep}")
    expect(page.locator("main .notice.info")).to_contain_text("R1 and R2 are the same report")
    page.locator("#pick-b").select_option(index=1)
    page.wait_for_selector("#strip-b .t")
    tab.context.close()
    assert tab.trouble == []


def test_no_link_of_a_folder_leads_out_of_it(
    browser: Any, folder: Folder, replays: Scene, viewer: Served
) -> None:
    tab = Tab(browser, viewer)
    run, found = tab.run, reports(tab)
    tab.served = folder  # type: ignore[assignment]
    seq = f"#/run/{run}/seq/{replays.id('0-0.1')}"
    pair = f"a={found['base-report']}&b={found['ids-report']}"
    links: set[str] = set()
    lacking = 0
    for address in (
        *(f"#/run/{run}", f"#/run/{run}/seqs", f"#/run/{run}/timeline?step=51", f"{seq}?tok=71"),
        *(f"#/run/{run}/causes?rep={rep}" for rep in found.values()),
        *(f"#/run/{run}/weights", f"{seq}/layers?tok=71", f"{seq}/routing?tok=83"),
        f"{seq}/sides?{pair}",
    ):
        page = tab.open(address)
        page.evaluate(
            "document.querySelectorAll('main details').forEach((d) => { d.open = true; })"
        )
        tab.settle()
        links |= set(page.evaluate("[...document.links].map((a) => a.getAttribute('href'))"))
        lacking += page.locator("a:not([href])").count()
    assert lacking > 0
    seen = set()
    for link in sorted(links):
        kind = re.sub(r"(tok|step|win)=\d+", r"\1", link)
        # steps and steps beside a step are on a schedule that the page says is not all here
        if not link.startswith("#/") or kind in seen or "step=" in link:
            continue
        seen.add(kind)
        page = tab.open(link)
        titles = page.locator("main .notice h2").all_inner_texts()
        assert not any("Not in this folder" in title for title in titles), link
        expect(page.locator("#status")).not_to_contain_text("last error")
    assert len(seen) > 20
    tab.context.close()
    assert tab.trouble == []


# ---- following ----------------------------------------------------------------------------


def test_a_report_that_appears_is_shown(
    tab_of: Callable[..., Tab],
    serve: Callable[..., Served],
    scene: Scene,
    tmp_path: Path,
) -> None:
    watched = tmp_path / "watched"
    watched.mkdir()
    shutil.copytree(scene.a, watched / "a")
    tab = tab_of(serve(watched, follow=True))
    page = tab.open(f"#/run/{tab.run}")
    expect(page.locator("#rail")).to_contain_text("no report")
    shutil.copytree(scene.report, watched / "report")
    expect(page.locator("#rail")).to_contain_text("divergent", timeout=20_000)
