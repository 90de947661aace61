"""Every screen in both themes and zoomed: names, labels, headings, contrast, overflow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.e2e.accessibility import overflow, problems
from tests.e2e.conftest import Served
from tests.e2e.viewer_data import Scene
from tests.e2e.viewer_tab import Tab

pytestmark = pytest.mark.browser

SCREENS = {
    "home": "#/",
    "overview": "#/run/{run}",
    "list": "#/run/{run}/seqs",
    "timeline": "#/run/{run}/timeline",
    "weights": "#/run/{run}/weights",
    "causes": "#/run/{run}/causes",
    "tokens": "#/run/{run}/seq/{seq}?tok=71",
    "sides": "#/run/{run}/seq/{seq}/sides?tok=71",
    "basket": "#/basket",
    "layers": "#/run/{run}/seq/{seq}/layers?tok=71&open=3",
    "routing": "#/run/{run}/seq/{seq}/routing?tok=83&layer=3",
}


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("screen", SCREENS)
def test_a_screen_breaks_no_rule(
    tab_of: Callable[..., Tab], served: Served, scene: Scene, screen: str, theme: str
) -> None:
    tab = tab_of(served, color_scheme=theme)
    page = tab.open(SCREENS[screen].format(run=tab.run, seq=scene.id("0-0.1")))
    assert problems(page) == []


@pytest.mark.parametrize("screen", SCREENS)
def test_at_twice_the_size_nothing_is_cut_off(
    tab_of: Callable[..., Tab], served: Served, scene: Scene, screen: str
) -> None:
    tab = tab_of(served)
    tab.page.set_viewport_size({"width": 640, "height": 450})  # what 200 % leaves of 1280 x 900
    page = tab.open(SCREENS[screen].format(run=tab.run, seq=scene.id("0-0.1")))
    assert overflow(page) == []


def test_a_table_that_scrolls_says_so_and_is_scrolled_by_keyboard(
    tab_of: Callable[..., Tab], served: Served
) -> None:
    tab = tab_of(served, forced_colors="active")
    tab.page.set_viewport_size({"width": 420, "height": 900})
    page = tab.open(f"#/run/{tab.run}")
    table = page.get_by_role("region", name="Drift")
    before, after = (table.locator(f"xpath=../span[{n}]") for n in (1, 2))
    expect(after).to_be_visible()
    expect(before).to_be_hidden()
    table.focus()
    expect(table).to_be_focused()
    for _ in range(60):
        page.keyboard.press("ArrowRight")
    expect(after).to_be_hidden()
    expect(before).to_be_visible()
    tab.page.set_viewport_size({"width": 1280, "height": 900})
    expect(page.get_by_role("region", name="Drift")).to_have_count(0)  # it has room


def test_the_rules_find_what_is_wrong(tab: Tab) -> None:
    page = tab.open()
    wrong: list[Any] = [
        ("no label", "<input type=text>"),
        ("no name", "<button></button>"),
        ("contrast", "<p id=faint>cannot be read</p>"),
        ("id twice", "<i id=main></i>"),
        ("h1 on the page", "<h1>another</h1>"),
        ("table without headers", "<table><tr><td>1</td></tr></table>"),
        ("cannot be reached", "<canvas aria-label=x></canvas>"),
        ("scrolls and cannot be reached", f"<div class=scroll>{'x' * 3000}</div>"),
        ("scrolls without a name", f"<div class=scroll tabindex=0>{'x' * 3000}</div>"),
        ("scrolls sideways without a sign", f"<div class=scroll>{'x' * 3000}</div>"),
    ]
    for rule, markup in wrong:
        page.evaluate(
            """markup => {
                document.getElementById('probe')?.remove();
                const probe = document.createElement('div');
                probe.id = 'probe';
                probe.innerHTML = markup;
                const faint = probe.querySelector('#faint');
                if (faint) faint.style.color = 'rgb(200 200 200)';
                document.getElementById('main').append(probe);
            }""",
            markup,
        )
        assert any(rule in line for line in problems(page)), rule
