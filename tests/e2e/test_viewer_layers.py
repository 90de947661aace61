"""Layers and routing of a sequence in a real browser: maps, the front, links, keys, states."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from tests.e2e import viewer_data
from tests.e2e.conftest import Served
from tests.e2e.viewer_data import Scene, build, make_cases
from tests.e2e.viewer_layers_data import FRONT, SITES, layer_errors
from tests.e2e.viewer_tab import Tab, shoot

pytestmark = pytest.mark.browser

Serve = Callable[..., Served]
Tabs = Callable[..., Tab]
POSITION, SITE = FRONT["0-0.1"][0], SITES[FRONT["0-0.1"][1]]


def layers(tab: Tab, scene: Scene, name: str, query: str = "") -> Page:
    return tab.open(f"#/run/{tab.run}/seq/{scene.id(name)}/layers{query}")


def routing(tab: Tab, scene: Scene, name: str, query: str = "") -> Page:
    return tab.open(f"#/run/{tab.run}/seq/{scene.id(name)}/routing{query}")


def pixel(page: Page, share: float, row: float) -> list[int]:
    """Colour of the map at a share of its width and at a row of 20 px."""
    found: list[int] = page.evaluate(
        """([share, row]) => {
            const canvas = document.querySelector('canvas.grid');
            const ratio = canvas.width / canvas.clientWidth;
            const left = 132 + share * (canvas.clientWidth - 134);
            const at = [left * ratio, (7 + (row + 0.5) * 20) * ratio].map(Math.round);
            const copy = document.createElement('canvas');
            [copy.width, copy.height] = [1, 1];
            const pen = copy.getContext('2d', { willReadFrequently: true });
            pen.drawImage(canvas, ...at, 1, 1, 0, 0, 1, 1);
            return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
        }""",
        [share, row],
    )
    return found


# ---- layers -------------------------------------------------------------------------------


def test_the_front_is_said_drawn_and_linked(tab: Tab, scene: Scene) -> None:
    page = layers(tab, scene, "0-0.1")
    lead = page.locator("#front-line")
    expect(lead).to_contain_text(f"First site over the noise floor: {SITE} at position {POSITION}")
    expect(lead).to_contain_text("60 positions of 157 have one")
    lead.get_by_role("link").first.click()
    assert (tab.param("tok"), tab.param("layer")) == (str(POSITION), SITE)
    expect(page.locator("#heat-readout")).to_contain_text(f"first over the noise floor at {SITE}")
    expect(page.locator("#heat-readout")).to_contain_text(re.compile(r"token 71 .*“.+”"))
    row = page.locator("#front-table tr", has_text=SITE)
    expect(row.locator("td").nth(2)).to_have_text("60")
    n = scene.cases["0-0.1"].length
    inside, outside = ((POSITION + 0.5) / n, (POSITION - 30.5) / n)
    dark, light = pixel(page, inside, 5), pixel(page, outside, 5)  # layers.4.out
    assert sum(dark) + 150 < sum(light)


def test_the_address_opens_exactly_the_view(tab: Tab, scene: Scene) -> None:
    query = "?tok=71&layer=layers.3.router&metric=max_abs&full=1&thr=1e-5&open=3&from=60&to=90&x=1"
    page = layers(tab, scene, "0-0.1", query)
    expect(page.locator("#metric")).to_have_value("max_abs")
    expect(page.locator("#full")).to_have_value("1")
    expect(page.locator("#thr")).to_have_value("1e-5")
    expect(page.locator(".pager")).to_contain_text("positions 60 to 89 of 157")
    expect(page.locator("#heat-readout")).to_contain_text("max |b - a| ")
    expect(page.locator("#heat-readout")).to_contain_text(" at layers.3.router")
    page.locator("#metric").select_option("ulp")
    expect(page.locator("#heat-readout")).to_contain_text("ulp")
    assert tab.param("x") == "1" and tab.param("full") is None
    page.go_back()
    expect(page.locator("#metric")).to_have_value("max_abs")
    page.locator("#heat-all").click()
    expect(page.locator(".pager")).to_contain_text("positions 0 to 156 of 157")


def test_the_map_is_walked_with_arrows_and_enter_opens_the_token(tab: Tab, scene: Scene) -> None:
    page = layers(tab, scene, "0-0.1", "?tok=70&layer=2")
    page.locator("canvas.grid").focus()
    for key in ("ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
        page.wait_for_load_state("networkidle")
    assert (tab.param("tok"), tab.param("layer")) == ("71", "3")
    expect(page.locator("#live")).to_contain_text("token 71")
    expect(page.locator("#live")).to_contain_text(re.compile(r"rel L2 0\.\d+ at layers\.3\.out"))
    expect(page.locator("#live")).to_contain_text(f"first over the noise floor at {SITE}")
    page.keyboard.press("Enter")
    expect(page.locator("#panel")).to_contain_text("Position 71")
    assert tab.pinned() == "t71"
    page.get_by_role("link", name="Layers", exact=True).click()
    expect(page.locator("#heat-readout")).to_contain_text("token 71")
    assert tab.param("layer") == "3"


def test_keys_step_through_the_front_measures_and_thresholds(tab: Tab, scene: Scene) -> None:
    page = layers(tab, scene, "0-2.1")
    expect(page.locator("#front-line")).to_contain_text("layers.1.attn at position 4,000")
    page.keyboard.press("n")
    expect(page.locator("#heat-readout")).to_contain_text("4000")
    assert (tab.param("tok"), tab.param("layer")) == ("4000", "1")
    page.keyboard.press("n")
    expect(page.locator("#status")).to_contain_text("no later change of the front")
    page.keyboard.press("2")
    expect(page.locator("#metric")).to_have_value("max_abs")
    page.keyboard.press("=")
    expect(page.locator("#thr")).to_have_value("0")
    expect(page.locator("#front-line")).to_contain_text("First site over any other bit")
    page.keyboard.press("-")
    expect(page.locator("#thr")).to_have_value("floor")
    for _ in range(3):
        page.keyboard.press("z")
        page.wait_for_load_state("networkidle")
    low, high = (int(tab.param(p) or -1) for p in ("from", "to"))
    assert low <= 4000 < high and high - low < 1000
    page.keyboard.press("]")
    expect(page.locator(".pager")).not_to_contain_text(f"positions {low:,} ")
    assert int(tab.param("from") or 0) == high
    page.keyboard.press("0")
    expect(page.locator(".pager")).to_contain_text("positions 0 to 6,032 of 6,033")
    page.keyboard.press("Escape")
    expect(page.locator("#heat-readout")).not_to_contain_text("4000")


def test_after_a_choice_the_keys_are_those_of_the_map_again(tab: Tab, scene: Scene) -> None:
    page = layers(tab, scene, "0-0.1", "?tok=70&layer=2")
    metric, grid = page.locator("#metric"), page.locator("canvas.grid")
    metric.focus()
    metric.select_option("ulp")
    expect(grid).to_be_focused()
    page.keyboard.press("j")
    expect(page).to_have_url(re.compile("tok=71"))
    # by keyboard a list is walked to its end before it is left
    metric.focus()
    for chosen in ("equal", "non_finite"):
        page.keyboard.press("ArrowDown")
        expect(metric).to_have_value(chosen)
        page.wait_for_load_state("networkidle")
        expect(metric).to_be_focused()
    page.keyboard.press("Escape")
    expect(grid).to_be_focused()
    assert tab.param("tok") == "71"
    page.keyboard.press("j")
    expect(page).to_have_url(re.compile("tok=72"))


def test_after_a_choice_the_keys_are_those_of_the_strip_again(tab: Tab, scene: Scene) -> None:
    page = tab.sequence(scene.id("0-0.1"), "?tok=70")
    page.locator("#stat").focus()
    page.locator("#stat").select_option("ratio")
    page.keyboard.press("j")
    assert tab.pinned() == "t71"
    page.get_by_role("radio", name="1e-2").check()
    page.keyboard.press("j")
    assert tab.pinned() == "t72"


def test_layers_open_into_their_sites(tab: Tab, scene: Scene) -> None:
    page = layers(tab, scene, "0-0.1", "?tok=71&layer=3")
    height = page.locator("canvas.grid").evaluate("c => c.clientHeight")
    page.keyboard.press("e")
    page.wait_for_function(
        "h => document.querySelector('canvas.grid').clientHeight > h", arg=height
    )
    assert tab.param("open") == "3"
    page.locator("#expand").click()
    expect(page.locator("#expand")).to_have_text("Close all layers")
    assert tab.param("open") == "all"
    page.locator("canvas.grid").focus()
    page.keyboard.press("ArrowUp")
    expect(page.locator("#heat-readout")).to_contain_text("layers.3.experts")
    page.locator("canvas.grid").click(position={"x": 20, "y": 7 + 4 * 20 + 8})  # its own ▾
    assert "0" not in (tab.param("open") or "").split(",")


def test_a_drag_zooms_and_a_click_chooses(tab: Tab, scene: Scene) -> None:
    page = layers(tab, scene, "0-0.1")
    box = page.locator("canvas.grid").bounding_box()
    left, width, top = box["x"] + 132, box["width"] - 134, box["y"] + 60
    page.mouse.move(left + 0.25 * width, top)
    page.mouse.down()
    page.mouse.move(left + 0.4 * width, top)
    page.mouse.move(left + 0.5 * width, top)
    page.mouse.up()
    expect(page.locator(".pager")).to_contain_text("positions 39 to 78 of 157")
    top = page.locator("canvas.grid").bounding_box()["y"] + 7 + 2.5 * 20  # it has moved
    page.mouse.click(left + 0.5 * width, top)
    expect(page.locator("#heat-readout")).to_contain_text("token 59")
    assert (tab.param("tok"), tab.param("layer")) == ("59", "1")


def test_states_have_looks_of_their_own(tab: Tab, scene: Scene) -> None:
    page = layers(tab, scene, "0-1.1", "?tok=45&layer=2")
    expect(page.locator("#heat-readout")).to_contain_text("not recorded")
    page = layers(tab, scene, "0-1.0", "?tok=45&layer=3")
    expect(page.locator("#heat-readout")).to_contain_text("not finite")
    page = layers(tab, scene, "0-0.2", "?tok=45&layer=3")
    expect(page.locator("#heat-readout")).to_contain_text("bitwise equal")
    expect(page.locator("#front-line")).to_contain_text("No site is over")
    assert pixel(page, 0.3, 2) == [255, 255, 255]
    page = layers(tab, scene, "0-2.1", "?tok=45&layer=3&metric=ulp&from=40&to=60")
    expect(page.locator("#heat-readout")).to_contain_text(re.compile("sketches|bitwise equal"))


def test_numbers_of_a_token_and_lacking_sites_stand_in_tables(tab: Tab, scene: Scene) -> None:
    page = layers(tab, scene, "0-0.1", "?tok=71")
    page.locator("#token-sites summary").click()
    errors = layer_errors("0-0.1", scene.cases["0-0.1"].length)
    for site in ("layers.3.router", "layers.5.out"):
        row = page.locator("#token-sites tr", has_text=site)
        expect(row.locator("td").first).to_have_text(str(errors[site].rel_l2[71]))
        expect(row.locator("td").nth(3)).to_have_text(str(errors[site].ulp[71]))
    expect(page.locator("#lacking")).to_contain_text("Side A only: layers.2.q")
    expect(page.locator("#lacking")).to_contain_text("Side B only: layers.3.mlp")


@pytest.mark.parametrize("screen", [layers, routing])
def test_the_map_is_drawn_anew_in_the_other_theme(
    tab: Tab, scene: Scene, screen: Callable[..., Page]
) -> None:
    page = screen(tab, scene, "0-0.1", "?tok=71")
    picture = "() => document.querySelector('canvas.grid').toDataURL()"
    before = page.evaluate(picture)
    page.keyboard.press("t")
    page.wait_for_function(
        "before => document.querySelector('canvas.grid').toDataURL() !== before", arg=before
    )
    page.keyboard.press("t")
    page.wait_for_function(
        "before => document.querySelector('canvas.grid').toDataURL() === before", arg=before
    )


def test_no_layers_of_this_sequence(tab: Tab, scene: Scene) -> None:
    page = layers(tab, scene, "0-0.0")
    expect(page.locator(".notice")).to_contain_text("No layers of this sequence")
    expect(page.locator(".command code").first).to_contain_text("rolltape replay")
    shoot(page, "state-no-layers")


def test_a_report_whose_tapes_are_not_open(scene: Scene, serve: Serve, tab_of: Tabs) -> None:
    tab = tab_of(serve(scene.report))
    page = layers(tab, scene, "0-0.1", "?tok=71")
    expect(page.locator("#front-line")).to_contain_text(SITE)
    expect(page.locator("#lacking")).to_contain_text("not both tapes are open")
    page = routing(tab, scene, "0-0.1")
    expect(page.locator(".notice")).to_contain_text("The tape is not open")


def test_a_position_outside_the_sequence_is_said(tab: Tab, scene: Scene) -> None:
    page = layers(tab, scene, "0-0.1", "?tok=99999")
    expect(page.locator(".notice.warn")).to_contain_text("There is no position 99,999")
    page = routing(tab, scene, "0-0.1", "?tok=99999")
    expect(page.locator(".notice.warn")).to_contain_text("There is no position 99,999")


@pytest.mark.parametrize("screen", [layers, routing])
def test_a_layer_that_the_model_does_not_have_is_said(
    tab: Tab, scene: Scene, screen: Callable[..., Page]
) -> None:
    page = screen(tab, scene, "0-0.1", "?tok=71&layer=99")
    expect(page.locator(".notice.warn")).to_contain_text("There is no layer 99")
    page.locator("canvas.grid").focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator(".notice.warn")).to_have_count(0)


# ---- routing ------------------------------------------------------------------------------


def flips(scene: Scene, name: str) -> np.ndarray:
    case = scene.cases[name]
    return np.argwhere((np.sort(case.routes, -1) != np.sort(case.live, -1)).any(-1))


def test_flips_are_counted_walked_and_shown_with_both_lists(tab: Tab, scene: Scene) -> None:
    case, found = scene.cases["0-0.1"], flips(scene, "0-0.1")
    page = routing(tab, scene, "0-0.1")
    expect(page.locator("#routing-lead")).to_contain_text(
        f"{len(found)} of 936 choices are of other experts"
    )
    for position in np.unique(found[:, 0])[:3].tolist():
        page.keyboard.press("n")
        expect(page.locator("#routing-readout")).to_contain_text(f"token {position} ")
        expect(page.locator("#routing-token h2")).to_contain_text(f"token {position} as input")
    layer = int(found[found[:, 0] == position][0, 1])
    row = page.locator("#routing-token tr.differs").first
    expect(row.locator("th")).to_have_text(str(layer))
    for i, ids in enumerate((case.routes, case.live)):
        cells = row.locator("td").nth(i).locator(".expert")
        expect(cells).to_have_text([str(e) for e in ids[position, layer]])
    expect(row.locator("mark")).to_have_count(2)
    expect(page.locator("#routing-layer")).to_contain_text(f"Margins of layer {layer}")
    expect(page.locator("#routing-layer")).to_contain_text(f"Load of the experts of layer {layer}")
    page.keyboard.press("Enter")
    expect(page.locator("#panel h2")).to_contain_text(f"Position {position}")
    assert tab.pinned() == f"t{position}"


def test_eps_can_be_given_and_stands_in_the_address(tab: Tab, scene: Scene) -> None:
    case, found = scene.cases["0-0.1"], flips(scene, "0-0.1")
    page = routing(tab, scene, "0-0.1")
    expect(page.locator("#routing-rule")).to_contain_text("1st percentile")
    # by that rule it is not known how far scores move: no verdict, and nothing in red
    expect(page.locator("#routing-lead")).to_contain_text("above eps: not shown to be a tie")
    expect(page.locator(".cellstate.ink-link")).to_have_count(1)
    expect(page.locator("#routing-lead .bad, #routing-layers .bad")).to_have_count(0)
    page.locator("#eps").fill("0.02")
    page.keyboard.press("Enter")
    near = int(sum(case.margin[p, layer] < 0.02 for p, layer in found))
    expect(page.locator("#routing-lead")).to_contain_text(f"{near} near a tie")
    expect(page.locator("#routing-lead")).to_contain_text(f"{len(found) - near} not explained")
    expect(page.locator("#routing-rule")).to_contain_text("as given in the address (0.02)")
    assert tab.param("eps") == "0.02"
    page.reload()
    tab.settle()
    expect(page.locator("#eps")).to_have_value("0.02")


def test_a_long_sequence_comes_in_windows(tab: Tab, scene: Scene) -> None:
    page = routing(tab, scene, "0-2.1", "?tok=5993")
    expect(page.locator(".pager")).to_contain_text("positions 4,096 to 6,032 of 6,033")
    page.keyboard.press("[")
    expect(page.locator("#routing-next")).to_be_visible()
    expect(page.locator("#routing-readout")).to_contain_text("outside of this window")
    page.locator("#routing-layers a", has_text="4").click()
    assert tab.param("layer") == "4"
    expect(page.locator("#routing-layer")).to_contain_text("Margins of layer 4")


def test_no_routes_were_recorded(
    tmp_path: Path, serve: Serve, tab_of: Tabs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewer_data, "_write_routes", lambda *_, **__: None)
    scene = build(tmp_path, cases=make_cases()[:1])
    tab = tab_of(serve(scene.a, scene.b, scene.report))
    page = routing(tab, scene, "0-0.0")
    expect(page.locator(".notice")).to_contain_text("No routes were recorded")
    expect(page.locator(".command code").first).to_contain_text("rolltape show")
    shoot(page, "state-no-routes")


# ---- looks --------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 640])
def test_both_screens_fit_and_are_kept_as_pictures(
    tab_of: Tabs, served: Served, scene: Scene, scheme: str, width: int
) -> None:
    tab: Any = tab_of(served, color_scheme=scheme)
    tab.page.set_viewport_size({"width": width, "height": 900 if width == 1280 else 640})
    for name, show, seq, query in (
        ("layers", layers, "0-0.1", "?tok=71&layer=layers.3.router&open=3"),
        ("layers-long", layers, "0-2.1", "?tok=4000"),
        ("layers-holes", layers, "0-1.1", "?open=all"),
        ("routing", routing, "0-0.1", "?tok=83&layer=3"),
        ("routing-long", routing, "0-2.1", "?layer=5"),
    ):
        page = show(tab, scene, seq, query)
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, f"{name} is {wide} px too wide"
        shoot(page, f"{name}-{scheme}-{width}", full_page=True)
