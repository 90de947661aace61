"""The viewer in a real browser: overview, list and token strip, links and keys."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import expect

from tests.e2e.conftest import Served
from tests.e2e.viewer_data import Case, Scene, build, diff_case, make_cases
from tests.e2e.viewer_tab import Tab, covered

pytestmark = pytest.mark.browser

Serve = Callable[..., Served]
Tabs = Callable[..., Tab]


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


def test_long_lists_come_in_pages(tmp_path: Path, serve: Serve, tab_of: Tabs) -> None:
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
    page.keyboard.press("-")
    page.keyboard.press("-")
    for step in range(4):
        page.wait_for_function(
            "step => document.querySelectorAll('input[name=scale]')[step].checked", arg=step
        )
        colours[step] = token.evaluate("t => t.style.backgroundColor")
        page.keyboard.press("=")
    assert len(set(colours.values())) >= 3
    assert tab.param("scale") == "1"


def test_the_strip_can_be_coloured_by_other_numbers(tab: Tab, scene: Scene) -> None:
    page = tab.sequence(scene.id("0-0.1"), "?tok=71&scale=1")
    page.keyboard.press("3")
    expect(page.locator("#stat")).to_have_value("dp")
    expect(page.locator("#readout")).to_contain_text("probability")
    assert tab.param("stat") == "dp"
    page.keyboard.press("1")
    expect(page.locator("#stat")).to_have_value("dlp")
    assert tab.param("stat") is None


def test_a_number_that_the_tapes_do_not_hold_says_how_to_record_it(tab: Tab, scene: Scene) -> None:
    page = tab.sequence(scene.id("0-0.1"), "?tok=71")
    page.keyboard.press("6")
    expect(page.locator("#status")).to_contain_text("--top-logprobs")
    assert page.locator("#stat option[value=kl]").is_disabled()


def test_g_and_a_number_goes_to_a_position(tab: Tab, scene: Scene) -> None:
    page = tab.sequence(scene.id("0-2.1"), "?tok=5")
    for key in ("g", "5", "0", "0", "0", "Enter"):
        page.keyboard.press(key)
    expect(page.locator("#t5000")).to_have_attribute("aria-selected", "true")
    assert tab.param("tok") == "5000"


def test_text_is_found_across_tokens_and_the_search_comes_round(tab: Tab, scene: Scene) -> None:
    page = tab.sequence(scene.id("0-0.1"))
    page.keyboard.press("f")
    page.keyboard.type("TRAIN LEAVES")
    page.keyboard.press("Enter")
    page.wait_for_function("location.hash.includes('tok=')")
    found = int(tab.param("tok") or 0)
    assert 0 < found < scene.cases["0-0.1"].prompt_len
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_contain_text("went on from the start")
    assert int(tab.param("tok") or 0) == found
    page.locator("#find").fill("no such text")
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_contain_text("is not in this sequence")


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
    last = scene.cases["0-1.0"].length - 1
    press = page.keyboard.press
    for keys, expected in (
        ("j", 51), ("k", 50), ("ArrowRight", 51), ("ArrowLeft", 50), ("G", last), ("g g", 0),
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
    page.keyboard.press("-")
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
    # the token after it was drawn by that forward: its routes stand first
    page = tab.sequence(case.key_a.id, f"?tok={position + 1}")
    expect(page.get_by_text(f"Experts that drew this token (input {position})")).to_be_visible()
    differing = page.locator("table.routes").first.locator("tr.differs")
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
