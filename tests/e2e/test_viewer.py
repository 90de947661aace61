"""The viewer in a real browser: links, keys, states, and how it looks."""

from __future__ import annotations

import json
import re
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolltape.store import TapeWriter
from tests.e2e import viewer_data
from tests.e2e.conftest import ARTIFACTS, Served
from tests.e2e.viewer_data import Case, Scene, build, diff_case, make_cases

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from playwright.sync_api import Browser, Page, expect

pytestmark = pytest.mark.browser

Serve = Callable[..., Served]


class Tab:
    """A page, the viewer behind it, and everything that went wrong in it."""

    def __init__(self, browser: Browser, served: Served, **options: Any) -> None:
        self.context = browser.new_context(
            viewport={"width": 1280, "height": 900}, reduced_motion="reduce", **options
        )
        self.page: Page = self.context.new_page()
        self.served = served
        self.trouble: list[str] = []
        self.page.on("pageerror", lambda e: self.trouble.append(str(e)))
        self.page.on("console", self._console)

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.trouble.append(message.text)

    @property
    def run(self) -> str:
        with urllib.request.urlopen(f"{self.served.base}api/runs", timeout=30) as answer:
            return str(json.load(answer)["runs"][0]["id"])

    def open(self, hash_: str = "") -> Page:
        """A fresh load, as somebody who was sent the link gets it."""
        self.page.goto("about:blank")
        self.page.goto(self.served.base + hash_)
        self.settle()
        return self.page

    def settle(self) -> None:
        self.page.wait_for_selector("main:not([aria-busy]) :is(h1, .notice)")
        self.page.wait_for_load_state("networkidle")

    def sequence(self, id_: str, query: str = "") -> Page:
        return self.open(f"#/run/{self.run}/seq/{id_}{query}")

    def param(self, name: str) -> str | None:
        value: str | None = self.page.evaluate(
            "(name) => new URLSearchParams(location.hash.split('?')[1]).get(name)", name
        )
        return value

    def pinned(self) -> str | None:
        found = self.page.locator("#strip [aria-selected=true]")
        return found.get_attribute("id") if found.count() else None


@pytest.fixture
def tab(browser: Browser, served: Served) -> Iterator[Tab]:
    it = Tab(browser, served)
    yield it
    it.context.close()
    assert it.trouble == []


@pytest.fixture
def tab_of(browser: Browser) -> Iterator[Callable[..., Tab]]:
    tabs: list[Tab] = []

    def make(served: Served, **options: Any) -> Tab:
        tabs.append(Tab(browser, served, **options))
        return tabs[-1]

    yield make
    for tab in tabs:
        tab.context.close()
        assert tab.trouble == []


def url(page: Page) -> re.Pattern[str]:
    """The page's address, as a pattern that matches it alone."""
    return re.compile(re.escape(page.url) + "$")


# ---- overview and list --------------------------------------------------------------------


def test_the_verdict_comes_first_and_links_to_the_worst_token(tab: Tab, scene: Scene) -> None:
    page = tab.open()
    expect(page.locator("h1")).to_contain_text("divergent: ")
    expect(page.locator("h1")).to_contain_text("worst is 1.29 nat in sequence")
    page.locator("h1 a").click()
    expect(page.locator("#panel")).to_contain_text("0xc0300000")
    assert tab.pinned() == "t71"
    assert page.url.endswith(f"/seq/{scene.id('0-0.1')}?tok=71")


def test_back_returns_to_the_overview_and_does_not_bounce(tab: Tab) -> None:
    page = tab.open()
    page.get_by_role("link", name="Sequences", exact=True).first.click()
    expect(page.locator("h1")).to_have_text("Sequences")
    page.go_back()
    expect(page.locator("h1")).to_contain_text("divergent")
    page.go_back()
    assert page.url == "about:blank"


def test_the_list_is_sorted_by_its_headers_worst_first(tab: Tab, scene: Scene) -> None:
    page = tab.open(f"#/run/{tab.run}/seqs")
    first = page.locator("#list tbody tr").first
    expect(first).to_contain_text(scene.id("0-0.1"))
    expect(page.locator("th[aria-sort]")).to_have_text(re.compile("max"))
    page.get_by_role("link", name="response").click()
    expect(page.locator("th[aria-sort=descending]")).to_contain_text("response")
    expect(first).to_contain_text(scene.id("0-2.1"))
    page.get_by_role("link", name="response").click()
    expect(page.locator("th[aria-sort=ascending]")).to_contain_text("response")
    expect(first).to_contain_text(scene.id("0-3.0"))
    page.go_back()
    expect(page.locator("th[aria-sort=descending]")).to_contain_text("response")


def test_the_filter_stands_in_the_address_and_an_empty_result_offers_a_way_out(tab: Tab) -> None:
    page = tab.open(f"#/run/{tab.run}/seqs?keep=this")
    page.keyboard.press("/")
    page.keyboard.type("finish=length max_abs>0.5")
    page.keyboard.press("Enter")
    expect(page.locator("#list tbody tr")).to_have_count(2)
    expect(page.locator("#status")).to_contain_text("8 rows hidden by the filter")
    assert tab.param("q") == "finish=length max_abs>0.5"
    assert tab.param("keep") == "this"
    page.locator("#filter").fill("max_abs>99")
    page.keyboard.press("Enter")
    expect(page.locator(".notice")).to_contain_text("The filter leaves no row")
    page.get_by_role("link", name="Drop the filter").click()
    expect(page.locator("#list tbody tr")).to_have_count(10)


def test_a_filter_that_cannot_be_read_says_why(tab: Tab) -> None:
    page = tab.open(f"#/run/{tab.run}/seqs?q=max_abs>big")
    expect(page.locator("#filter-help")).to_contain_text("needs a number")
    expect(page.locator("#filter")).to_have_value("max_abs>big")
    tab.trouble = [t for t in tab.trouble if "400" not in t]  # chromium logs failed requests
    page.get_by_role("link", name="Show the list without it").click()
    expect(page.locator("#list tbody tr")).to_have_count(10)


def test_rows_are_walked_with_j_and_k_and_opened_with_enter(tab: Tab, scene: Scene) -> None:
    page = tab.open(f"#/run/{tab.run}/seqs?sort=id")
    for key in "jjjk":
        page.keyboard.press(key)
    expect(page.locator("a[data-row]:focus")).to_have_text(scene.id("0-0.1"))
    page.keyboard.press("Shift+G")
    expect(page.locator("a[data-row]:focus")).to_have_text(scene.id("0-3.0"))
    page.keyboard.press("g")
    page.keyboard.press("g")
    expect(page.locator("a[data-row]:focus")).to_have_text(scene.id("0-0.0"))
    page.keyboard.press("Enter")
    expect(page.locator("#strip")).to_be_visible()
    page.go_back()
    expect(page.locator("a[data-row]:focus")).to_have_text(scene.id("0-0.0"))


def test_long_lists_come_in_pages(tmp_path: Path, serve: Serve, tab_of: Callable[..., Tab]) -> None:
    scene = build(tmp_path, cases=many(130))
    tab = tab_of(serve(scene.a, scene.b, scene.report))
    page = tab.open(f"#/run/{tab.run}/seqs?sort=order")
    expect(page.locator("#list tbody tr")).to_have_count(100)
    page.locator("#next").click()
    expect(page.locator("#list tbody tr")).to_have_count(30)
    expect(page.locator(".pager")).to_contain_text("101 to 130 of 130")
    page.reload()
    expect(page.locator("#list tbody tr")).to_have_count(30)
    page.get_by_role("link", name="First page").click()
    expect(page.locator("#list tbody tr")).to_have_count(100)


def many(count: int) -> list[Case]:
    template = make_cases(long=10)[0]
    n = template.prompt_len + 8
    cases = []
    for i in range(count):
        ids, mask = template.ids[:n].copy(), template.mask[:n]
        ids[-1] = 300 + i
        cases.append(Case(f"{i}-0.0", f"{i}-0", ids, n - 8, template.a[:n], template.b[:n], mask))
    return cases


# ---- token strip --------------------------------------------------------------------------


def test_a_deep_link_opens_exactly_the_view(tab: Tab, scene: Scene) -> None:
    page = tab.sequence(scene.id("0-2.1"), "?tok=5993&scale=1e-2&x=unknown")
    assert tab.pinned() == "t5993"
    expect(page.locator("#t5993")).to_be_in_viewport()
    expect(page.locator("#panel h2")).to_contain_text("Position 5,993")
    expect(page.locator("input[name=scale]:checked")).to_have_value("1e-2")
    assert page.locator("#strip .t").count() == 6033 - 4096
    expect(page.locator("#live")).to_contain_text("token 5993")
    page.locator("#t5990").click()
    expect(page.locator("#panel h2")).to_contain_text("Position 5,990")
    assert tab.param("tok") == "5990"
    assert tab.param("x") == "unknown"
    address = page.url
    page.go_back()
    expect(page.locator("#t5993")).to_have_attribute("aria-selected", "true")
    page.go_forward()
    assert page.url == address
    page.reload()
    tab.settle()
    assert tab.pinned() == "t5990"


def test_the_place_in_a_long_strip_is_kept_in_the_address(tab: Tab, scene: Scene) -> None:
    page = tab.sequence(scene.id("0-2.1"))
    page.evaluate("document.getElementById('t3000').scrollIntoView()")
    page.wait_for_function("() => location.hash.includes('at=')")
    at = int(tab.param("at") or -1)
    assert 2900 < at < 3200
    first = page.locator(f"#t{at}")
    top = first.evaluate("t => t.getBoundingClientRect().top")
    page.reload()
    tab.settle()
    assert first.evaluate("t => t.getBoundingClientRect().top") == pytest.approx(top, abs=40)
    assert not covered(page, first)


def test_a_position_outside_the_sequence_pins_the_nearest(tab: Tab, scene: Scene) -> None:
    page = tab.sequence(scene.id("0-0.1"), "?tok=99999")
    expect(page.locator(".notice.warn")).to_contain_text("There is no position 99,999")
    assert tab.pinned() == "t156"


def test_every_state_looks_like_itself(tab: Tab, scene: Scene) -> None:
    for name in ("0-1.0", "0-1.1", "0-1.2"):
        case = scene.cases[name]
        page = tab.sequence(case.key_a.id)
        shown = page.evaluate(
            "[...document.querySelectorAll('#strip .t')].map(t => t.classList.item(1))"
        )
        names = ("compared", "masked", "missing_a", "missing_b", "non_finite", "not_scored")
        assert shown == [names[s] for s in diff_case(case)["state"]]
    page = tab.sequence(scene.id("0-1.1"))
    patterns = {
        state: page.locator(f".strip .{state}").first.evaluate(
            "t => getComputedStyle(t).backgroundImage"
        )
        for state in ("masked", "missing_a", "missing_b")
    }
    assert len(set(patterns.values())) == 3
    assert "none" not in patterns.values()


def test_only_compared_tokens_that_differ_are_coloured(tab: Tab, scene: Scene) -> None:
    case = scene.cases["0-0.1"]
    page = tab.sequence(case.key_a.id)
    coloured = page.evaluate(
        "[...document.querySelectorAll('#strip .t')]"
        ".flatMap((t, i) => t.style.backgroundColor ? [i] : [])"
    )
    delta = diff_case(case)["delta"]
    assert coloured == np.flatnonzero(delta.valid & (delta.values != 0)).tolist()
    worst = page.locator("#t71")
    assert "clipped" in (worst.get_attribute("class") or "")
    assert worst.evaluate("t => getComputedStyle(t).borderBottomWidth") == "4px"
    expect(page.locator("#clipped")).to_have_text(
        re.compile("^over the scale: 1 in this window, 1 in")
    )


def test_the_scale_is_fixed_and_not_stretched_by_an_outlier(tab: Tab, scene: Scene) -> None:
    page = tab.sequence(scene.id("0-0.1"))
    delta = diff_case(scene.cases["0-0.1"])["delta"]
    middling = np.flatnonzero(delta.valid & (np.abs(delta.values - 0.02) < 0.02))
    token = page.locator(f"#t{middling[-1]}")
    colours = {}
    for key in "1234":
        page.keyboard.press(key)
        page.wait_for_function(
            "key => document.querySelectorAll('input[name=scale]')[key - 1].checked", arg=int(key)
        )
        colours[key] = token.evaluate("t => t.style.backgroundColor")
    assert len(set(colours.values())) >= 3
    assert tab.param("scale") == "1"


def test_text_of_the_model_is_only_text(tab: Tab, scene: Scene) -> None:
    page = tab.sequence(scene.id("0-1.0"))
    text = page.locator("#strip").inner_text()
    assert '<script>alert("no")</script>' in text.replace("\n", "")
    assert page.locator("#strip script, #strip b").count() == 0
    assert "\u202e" not in text
    assert page.locator("#strip .split").count() > 3
    assert re.search(r"\\xf0\\x9f", text)


def test_keys_walk_the_tokens(tab: Tab, scene: Scene) -> None:
    page = tab.sequence(scene.id("0-1.0"), "?tok=50&scale=1e-2")
    press = page.keyboard.press
    for keys, expected in (
        ("j", 51), ("k", 50), ("ArrowRight", 51), ("ArrowLeft", 50), ("G", 136), ("g g", 0),
    ):  # fmt: skip
        for key in keys.split():
            press(f"Shift+{key}" if key == "G" else key)
        expect(page.locator(f"#t{expected}")).to_have_attribute("aria-selected", "true")
    case = scene.cases["0-1.0"]
    found = diff_case(case)
    size = np.where(found["delta"].valid, np.abs(found["delta"].values), 0)
    over = np.flatnonzero((size > 0.01) | (found["state"] == 4)).tolist()
    for position in over[:3]:
        press("n")
        expect(page.locator(f"#t{position}")).to_have_attribute("aria-selected", "true")
    press("Shift+N")
    expect(page.locator(f"#t{over[1]}")).to_have_attribute("aria-selected", "true")
    press("Escape")
    expect(page.locator("#strip [aria-selected]")).to_have_count(0)
    assert tab.param("tok") is None
    press("Enter")
    assert tab.pinned() == "t0"


def test_walking_leaves_no_trail_and_choosing_does(tab: Tab, scene: Scene) -> None:
    page = tab.sequence(scene.id("0-0.1"), "?tok=71")
    page.locator("#t40").click()
    expect(page.locator("#t40")).to_have_attribute("aria-selected", "true")
    for _ in range(4):
        page.keyboard.press("j")
    expect(page.locator("#t44")).to_have_attribute("aria-selected", "true")
    page.go_back()
    expect(page.locator("#t71")).to_have_attribute("aria-selected", "true")


def test_n_crosses_windows_and_brackets_turn_them(tab: Tab, scene: Scene) -> None:
    page = tab.sequence(scene.id("0-2.1"), "?tok=4000&scale=1")
    page.keyboard.press("n")
    expect(page.locator("#status")).to_contain_text("no token over 1 nat")
    page.keyboard.press("3")
    expect(page.locator("input[name=scale]:checked")).to_have_value("1e-1")
    while (tab.pinned() or "t0") < "t4096" and not page.locator("#t4096").count():
        before = tab.param("tok")
        page.keyboard.press("n")
        page.wait_for_function(
            "b => new URLSearchParams(location.hash.split('?')[1]).get('tok') !== b", arg=before
        )
        tab.settle()
    expect(page.locator("#t4096")).to_have_count(1)
    page.keyboard.press("[")
    expect(page.locator("#t0")).to_have_count(1)
    assert tab.param("win") == "0"
    page.keyboard.press("]")
    expect(page.locator("#t6032")).to_have_count(1)
    page.keyboard.press("]")
    expect(page.locator("#status")).to_contain_text("this is the last window")


def test_the_minimap_shows_the_whole_sequence_and_jumps(tab: Tab, scene: Scene) -> None:
    page = tab.sequence(scene.id("0-2.1"))
    canvas = page.locator("canvas.minimap")
    box = canvas.bounding_box()
    assert box is not None
    canvas.click(position={"x": box["width"] * 0.99, "y": 10})
    page.wait_for_function("() => document.querySelector('#strip [aria-selected]') !== null")
    assert int((tab.pinned() or "t0")[1:]) == pytest.approx(6033 * 0.99, abs=8)
    canvas.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page.locator("#t5")).to_have_attribute("aria-selected", "true")


def test_masked_tokens_can_be_hidden(tab: Tab, scene: Scene) -> None:
    page = tab.sequence(scene.id("0-1.1"))
    expect(page.locator("#strip .masked").first).to_be_visible()
    page.keyboard.press("m")
    expect(page.locator("#strip .masked").first).to_be_hidden()
    assert tab.param("mask") == "hide"
    page.get_by_label("show masked").check()
    expect(page.locator("#strip .masked").first).to_be_visible()


def test_the_panel_shows_where_the_routes_differ(tab: Tab, scene: Scene) -> None:
    case = scene.cases["0-0.1"]
    flips = diff_case(case)["flips"]
    position = int(np.flatnonzero(flips.valid & (flips.values > 0))[0])
    page = tab.sequence(case.key_a.id, f"?tok={position}")
    differing = page.locator(".routes tr.differs")
    expect(differing).to_have_count(int(flips.values[position]))
    expect(differing.first).to_contain_text("differs")
    expect(differing.first.locator("mark")).to_have_count(2)
    expect(page.locator(f"#t{position}")).to_have_class(re.compile(r"\bflip\b"))


def test_the_panel_leads_to_what_ran_in_the_same_step(tab: Tab, scene: Scene) -> None:
    page = tab.sequence(scene.id("0-0.1"), "?tok=71")
    page.get_by_text("Ran together with, in A 7 other rows").click()
    page.locator("#panel").get_by_role("link", name=scene.id("0-2.0")).click()
    expect(page.locator("h1")).to_contain_text(scene.id("0-2.0"))


def test_next_and_previous_follow_the_order_of_the_list(tab: Tab, scene: Scene) -> None:
    page = tab.open(f"#/run/{tab.run}/seqs?sort=-max_abs&q=finish=length")
    page.locator("#list tbody a").first.click()
    expect(page.locator("h1")).to_contain_text("1 of 2")
    page.keyboard.press("Shift+J")
    expect(page.locator("h1")).to_contain_text(scene.id("0-2.1"))
    expect(page.locator("h1")).to_contain_text("2 of 2")
    page.keyboard.press("Shift+K")
    expect(page.locator("h1")).to_contain_text(scene.id("0-0.1"))


def test_copy_link_copies_exactly_this_address(tab: Tab, scene: Scene) -> None:
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = tab.sequence(scene.id("0-0.1"), "?tok=71")
    page.keyboard.press("c")
    expect(page.locator("#status")).to_contain_text("Link copied")
    assert page.evaluate("navigator.clipboard.readText()") == page.url


def test_no_key_acts_while_an_input_has_the_focus(tab: Tab) -> None:
    page = tab.open(f"#/run/{tab.run}/seqs")
    page.locator("#filter").focus()
    page.keyboard.type("jt?c")
    expect(page.locator("#filter")).to_have_value("jt?c")
    expect(page.locator("#dialog")).to_be_hidden()
    assert page.evaluate("document.documentElement.dataset.theme") == "light"


def test_single_keys_can_be_turned_off(tab: Tab) -> None:
    page = tab.open()
    page.keyboard.press("?")
    expect(page.locator("#dialog")).to_be_visible()
    expect(page.locator("#dialog")).to_contain_text("next, previous token over the scale")
    page.get_by_label("single keys act").uncheck()
    page.keyboard.press("Escape")
    expect(page.locator("#dialog")).to_be_hidden()
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"


def test_the_theme_can_be_chosen_and_stays(tab: Tab) -> None:
    page = tab.open()
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.reload()
    tab.settle()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


# ---- states -------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Scene:
    return build(tmp_path / "small", cases=make_cases()[:2])


def test_no_runs(tmp_path: Path, serve: Serve, tab_of: Callable[..., Tab]) -> None:
    page = tab_of(serve(tmp_path)).open()
    expect(page.locator(".notice")).to_contain_text("No runs")
    expect(page.locator(".command")).to_have_count(2)
    shoot(page, "state-no-runs")


def test_a_tape_without_a_report(small: Scene, serve: Serve, tab_of: Callable[..., Tab]) -> None:
    tab = tab_of(serve(small.a))
    page = tab.open()
    expect(page.locator("h1")).to_contain_text("not compared")
    expect(page.locator(".command code").nth(1)).to_contain_text("rolltape diff")
    shoot(page, "state-no-report")
    tab.sequence(small.id("0-0.1"), "?tok=71")
    expect(page.locator("#panel")).to_contain_text("no report")
    expect(page.locator("#panel")).to_contain_text("-2.75")


def test_a_report_whose_tape_is_not_open(
    small: Scene, serve: Serve, tab_of: Callable[..., Tab]
) -> None:
    tab = tab_of(serve(small.report))
    page = tab.open()
    expect(page.locator(".notice.warn").first).to_contain_text("tape of this report is not open")
    page.locator("h1 a").click()
    expect(page.locator("#panel")).to_contain_text("0xc0300000")
    expect(page.locator("#t71")).to_have_text("\u2205")
    tab.settle()
    shoot(page, "state-report-only")


def test_all_masked(tmp_path: Path, serve: Serve, tab_of: Callable[..., Tab]) -> None:
    scene = build(tmp_path, cases=[c for c in make_cases() if c.name == "0-1.2"])
    tab = tab_of(serve(scene.a, scene.b, scene.report))
    page = tab.open()
    expect(page.locator(".notice.warn").first).to_contain_text("All tokens are masked")
    expect(page.locator("h1")).to_contain_text("not-run")
    tab.sequence(scene.id("0-1.2"))
    expect(page.locator(".notice")).to_contain_text("All tokens are masked")


def test_tokenizer_absent(tmp_path: Path, serve: Serve, tab_of: Callable[..., Tab]) -> None:
    scene = build(tmp_path, cases=make_cases()[:2], model=tmp_path / "gone")
    tab = tab_of(serve(scene.a, scene.b, scene.report))
    page = tab.sequence(scene.id("0-0.1"), "?tok=71")
    expect(page.locator("#no-tokenizer")).to_contain_text("--tokenizer PATH")
    expect(page.locator("#t71")).to_have_text(str(scene.cases["0-0.1"].ids[71]))
    shoot(page, "state-no-tokenizer")


def test_a_damaged_shard(small: Scene, serve: Serve, tab_of: Callable[..., Tab]) -> None:
    (shard,) = (small.a / "tokens").iterdir()
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 0xFF
    shard.write_bytes(data)
    tab = tab_of(serve(small.a, small.b, small.report))
    page = tab.open()
    expect(page.locator(".notice.error")).to_contain_text(shard.name)
    expect(page.locator("h1")).to_contain_text("1.29 nat")
    shoot(page, "state-damaged")
    tab.sequence(small.id("0-0.1"), "?tok=71")
    expect(page.locator(".notice.error")).to_contain_text("Damaged shard")
    expect(page.locator("#panel")).to_contain_text("0xc0300000")


def test_a_newer_format(small: Scene, serve: Serve, tab_of: Callable[..., Tab]) -> None:
    header = json.loads((small.b / "tape.json").read_text())
    (small.b / "tape.json").write_text(json.dumps({**header, "format": "2.0"}))
    page = tab_of(serve(small.a, small.b, small.report)).open()
    expect(page.locator(".notice.error")).to_contain_text("upgrade rolltape")
    page.locator("main").get_by_role("link", name="a", exact=True).click()
    expect(page.locator("h1")).to_contain_text("divergent")


def test_identity_problems_are_a_banner(
    tmp_path: Path, serve: Serve, tab_of: Callable[..., Tab]
) -> None:
    problems = ["weights differ: version 3 has digest 1 in A and 2 in B", {"message": "<b>x</b>"}]
    scene = build(tmp_path, cases=make_cases()[:2], identity=problems, gaps=3)
    page = tab_of(serve(scene.a, scene.b, scene.report)).open()
    banner = page.locator(".notice.error").first
    expect(banner).to_contain_text("Identity: 2 problems")
    expect(banner.locator("li")).to_have_text([problems[0], "<b>x</b>"])
    expect(page.get_by_text("The recorder dropped data")).to_be_visible()
    shoot(page, "state-identity", full_page=True)


def test_a_recording_that_goes_on_is_followed(
    tmp_path: Path, serve: Serve, tab_of: Callable[..., Tab]
) -> None:
    scene = build(tmp_path, cases=make_cases()[:1], sealed=False)
    tab = tab_of(serve(scene.a))
    page = tab.open()
    expect(page.locator(".notice").nth(1)).to_contain_text("1 sequence so far")
    with page.expect_response(re.compile("/api/runs/[0-9a-f]+$")):
        pass  # the page has looked once at what is there
    case = make_cases()[1]
    with TapeWriter(scene.a) as writer:
        viewer_data._write_sequence(writer, case, case.key_a, "open")
    expect(page.locator(".notice").nth(1)).to_contain_text("2 sequences so far", timeout=20_000)
    shoot(page, "state-recording")


def test_the_server_is_gone_and_comes_back(
    small: Scene, serve: Serve, tab_of: Callable[..., Tab]
) -> None:
    served = serve(small.a, small.b, small.report)
    tab = tab_of(served)
    page = tab.open()
    served.stop()
    page.get_by_role("link", name="Sequences", exact=True).first.click()
    expect(page.locator("#gone")).to_contain_text("The server does not answer")
    shoot(page, "state-gone")
    served.start()
    page.get_by_role("button", name="Retry now").click()
    expect(page.locator("#list")).to_be_visible()
    expect(page.locator("#gone")).to_have_count(0)
    assert any("ERR_CONNECTION" in t for t in tab.trouble)
    tab.trouble = [t for t in tab.trouble if "ERR_CONNECTION" not in t]


def test_an_unknown_sequence_says_so_and_leads_back(tab: Tab) -> None:
    page = tab.sequence("1f0c29ab.9-9.9")
    expect(page.locator(".notice.error")).to_contain_text("no sequence '1f0c29ab.9-9.9'")
    page.get_by_role("link", name="Back").click()
    expect(page.locator("#list")).to_be_visible()
    tab.trouble = [t for t in tab.trouble if "404" not in t]


def test_an_empty_sequence(tab: Tab, scene: Scene) -> None:
    case = scene.cases["0-3.0"]
    page = tab.sequence(case.key_a.id)
    expect(page.locator("#strip .t")).to_have_count(case.prompt_len)
    expect(page.locator(".seqfacts")).to_contain_text("abort")


def test_the_token_of_the_address_is_taken_and_hidden(
    small: Scene, serve: Serve, tab_of: Callable[..., Tab]
) -> None:
    tab = tab_of(serve(small.a, small.report, token="a-long-secret"))
    seq = small.id("0-0.1")
    run = json.loads((small.a / "tape.json").read_text())["uuid"]
    page = tab.open(f"?token=a-long-secret#/run/{run}/seq/{seq}?tok=71")
    assert "secret" not in page.url
    assert tab.pinned() == "t71"


# ---- looks --------------------------------------------------------------------------------

SCREENS = ("overview", "list", "sequence", "holes", "odd", "long", "help")


def shoot(page: Page, name: str, *, full_page: bool = False) -> None:
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=ARTIFACTS / f"{name}.png", full_page=full_page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 640])
def test_screens_fit_and_are_kept_as_pictures(
    tab_of: Callable[..., Tab], served: Served, scene: Scene, scheme: str, width: int
) -> None:
    tab = tab_of(served, color_scheme=scheme)
    tab.page.set_viewport_size({"width": width, "height": 900 if width == 1280 else 640})
    run = tab.run
    where = {
        "overview": f"#/run/{run}",
        "list": f"#/run/{run}/seqs",
        "sequence": f"#/run/{run}/seq/{scene.id('0-0.1')}?tok=71",
        "holes": f"#/run/{run}/seq/{scene.id('0-1.1')}?tok=38",
        "odd": f"#/run/{run}/seq/{scene.id('0-1.0')}?tok=37&scale=1e-2",
        "long": f"#/run/{run}/seq/{scene.id('0-2.1')}?tok=5993",
        "help": f"#/run/{run}",
    }
    for name in SCREENS:
        page = tab.open(where[name])
        if name == "help":
            page.keyboard.press("?")
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, f"{name} is {wide} px too wide"
        if "tok=" in where[name]:
            pinned = page.locator("#strip [aria-selected=true]")
            assert covered(page, pinned) is False, f"the pinned token is covered in {name}"
        shoot(page, f"{name}-{scheme}-{width}", full_page=name == "overview")


def covered(page: Page, locator: Any) -> bool:
    """Whether something lies over the middle of an element, or it is outside the window."""
    return bool(
        locator.evaluate(
            """element => {
                const box = element.getBoundingClientRect();
                const at = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
                return at !== element;
            }"""
        )
    )


CONTRAST = """() => {
  const rgb = (text) => {
    const pen = document.createElement('canvas').getContext('2d');
    pen.fillStyle = text;
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (c) => {
    const [r, g, b] = c.map((x) => x / 255).map((x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const c = getComputedStyle(e).backgroundColor;
      if (c !== 'rgba(0, 0, 0, 0)') return c;
    }
    return 'rgb(255, 255, 255)';
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !e.checkVisibility() || e.closest('.sr, noscript, script, svg title')) continue;
    const style = getComputedStyle(e);
    const ink = e.closest('svg') ? style.fill : style.color;
    const [x, y] = [light(rgb(ink)), light(rgb(ground(e)))].sort((p, q) => q - p);
    const ratio = (x + 0.05) / (y + 0.05);
    if (ratio < 4.5) found.push(`${ratio.toFixed(2)} ${e.tagName}.${e.className} ${walker.currentNode.data.slice(0, 30)}`);
  }
  return found;
}"""  # noqa: E501


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_enough_contrast(
    tab_of: Callable[..., Tab], served: Served, scene: Scene, scheme: str
) -> None:
    tab = tab_of(served, color_scheme=scheme)
    run = tab.run
    for hash_ in (
        f"#/run/{run}",
        f"#/run/{run}/seqs",
        f"#/run/{run}/seq/{scene.id('0-1.1')}?tok=38",
        f"#/run/{run}/seq/{scene.id('0-1.0')}?tok=37",
    ):
        page = tab.open(hash_)
        assert page.evaluate(CONTRAST) == [], hash_


def test_everything_can_be_reached_with_the_keyboard_and_is_seen(tab: Tab, scene: Scene) -> None:
    page = tab.sequence(scene.id("0-0.1"), "?tok=71")
    seen = []
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.append(
            page.evaluate(
                "(() => { const e = document.activeElement; "
                "return [e.id || e.className || e.tagName, getComputedStyle(e).outlineStyle]; })()"
            )
        )
    names = {name for name, _ in seen}
    assert {"skip", "copy", "theme", "keys", "minimap", "mask", "strip"} <= names
    assert {outline for name, outline in seen if name not in ("BODY", "skip")} <= {"solid", "auto"}


def test_nothing_is_fetched_from_elsewhere(tab: Tab, scene: Scene) -> None:
    asked: list[str] = []
    tab.page.on("request", lambda r: asked.append(r.url))
    tab.open()
    tab.sequence(scene.id("0-0.1"), "?tok=71")
    assert asked
    assert [u for u in asked if not u.startswith((tab.served.base, "about:"))] == []


def test_tables_are_tables(tab: Tab) -> None:
    page = tab.open(f"#/run/{tab.run}/seqs")
    table = page.get_by_role("table")
    expect(table.get_by_role("columnheader")).to_have_count(13)
    expect(table.get_by_role("rowheader")).to_have_count(10)


@pytest.fixture(scope="module", autouse=True)
def _fresh_pictures() -> None:
    shutil.rmtree(ARTIFACTS, ignore_errors=True)
