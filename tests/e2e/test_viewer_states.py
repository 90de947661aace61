"""The viewer in a real browser: every state says what to do, and how it all looks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import expect

from rolltape.store import TapeWriter
from tests.e2e import viewer_data
from tests.e2e.conftest import Served
from tests.e2e.viewer_data import Scene, build, make_cases
from tests.e2e.viewer_tab import Tab, covered, shoot

pytestmark = pytest.mark.browser

Serve = Callable[..., Served]
Tabs = Callable[..., Tab]


# ---- states -------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Scene:
    return build(tmp_path / "small", cases=make_cases()[:2])


def test_no_runs(tmp_path: Path, serve: Serve, tab_of: Tabs) -> None:
    page = tab_of(serve(tmp_path)).open()
    expect(page.locator(".notice")).to_contain_text("No runs")
    expect(page.locator(".command")).to_have_count(2)
    shoot(page, "state-no-runs")


def test_a_tape_without_a_report(small: Scene, serve: Serve, tab_of: Tabs) -> None:
    tab = tab_of(serve(small.a))
    page = tab.open()
    expect(page.locator("h1")).to_contain_text("not compared")
    expect(page.locator(".command code").nth(1)).to_contain_text("rolltape diff")
    shoot(page, "state-no-report")
    tab.sequence(small.id("0-0.1"), "?tok=71")
    expect(page.locator("#panel")).to_contain_text("no report")
    expect(page.locator("#panel")).to_contain_text("-2.75")


def test_a_report_whose_tape_is_not_open(small: Scene, serve: Serve, tab_of: Tabs) -> None:
    tab = tab_of(serve(small.report))
    page = tab.open()
    expect(page.locator(".notice.warn").first).to_contain_text("tape of this report is not open")
    page.locator("h1 a").click()
    expect(page.locator("#panel")).to_contain_text("0xc0300000")
    expect(page.locator("#t71")).to_have_text("\u2205")
    tab.settle()
    shoot(page, "state-report-only")


def test_all_masked(tmp_path: Path, serve: Serve, tab_of: Tabs) -> None:
    scene = build(tmp_path, cases=[c for c in make_cases() if c.name == "0-1.2"])
    tab = tab_of(serve(scene.a, scene.b, scene.report))
    page = tab.open()
    expect(page.locator(".notice.warn").first).to_contain_text("All tokens are masked")
    expect(page.locator("h1")).to_contain_text("not-run")
    tab.sequence(scene.id("0-1.2"))
    expect(page.locator(".notice")).to_contain_text("All tokens are masked")


def test_tokenizer_absent(tmp_path: Path, serve: Serve, tab_of: Tabs) -> None:
    scene = build(tmp_path, cases=make_cases()[:2], model=tmp_path / "gone")
    tab = tab_of(serve(scene.a, scene.b, scene.report))
    page = tab.sequence(scene.id("0-0.1"), "?tok=71")
    expect(page.locator("#no-tokenizer")).to_contain_text("--tokenizer PATH")
    expect(page.locator("#t71")).to_have_text(str(scene.cases["0-0.1"].ids[71]))
    shoot(page, "state-no-tokenizer")


def test_a_damaged_shard(small: Scene, serve: Serve, tab_of: Tabs) -> None:
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


def test_a_newer_format(small: Scene, serve: Serve, tab_of: Tabs) -> None:
    header = json.loads((small.b / "tape.json").read_text())
    (small.b / "tape.json").write_text(json.dumps({**header, "format": "2.0"}))
    page = tab_of(serve(small.a, small.b, small.report)).open()
    expect(page.locator(".notice.error")).to_contain_text("upgrade rolltape")
    page.locator("main").get_by_role("link", name="a", exact=True).click()
    expect(page.locator("h1")).to_contain_text("divergent")


def test_identity_problems_are_a_banner(tmp_path: Path, serve: Serve, tab_of: Tabs) -> None:
    problems = ["weights differ: version 3 has digest 1 in A and 2 in B", {"message": "<b>x</b>"}]
    scene = build(tmp_path, cases=make_cases()[:2], identity=problems, gaps=3)
    page = tab_of(serve(scene.a, scene.b, scene.report)).open()
    banner = page.locator(".notice.error").first
    expect(banner).to_contain_text("Identity: 2 problems")
    expect(banner.locator("li")).to_have_text([problems[0], "<b>x</b>"])
    expect(page.get_by_text("The recorder dropped data")).to_be_visible()
    shoot(page, "state-identity", full_page=True)


def test_a_recording_that_goes_on_is_followed(tmp_path: Path, serve: Serve, tab_of: Tabs) -> None:
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


def test_the_server_is_gone_and_comes_back(small: Scene, serve: Serve, tab_of: Tabs) -> None:
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
    small: Scene, serve: Serve, tab_of: Tabs
) -> None:
    tab = tab_of(serve(small.a, small.report, token="a-long-secret"))
    seq = small.id("0-0.1")
    run = json.loads((small.a / "tape.json").read_text())["uuid"]
    page = tab.open(f"?token=a-long-secret#/run/{run}/seq/{seq}?tok=71")
    assert "secret" not in page.url
    assert tab.pinned() == "t71"


# ---- looks --------------------------------------------------------------------------------

SCREENS = ("overview", "list", "sequence", "holes", "odd", "long", "help")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 640])
def test_screens_fit_and_are_kept_as_pictures(
    tab_of: Tabs, served: Served, scene: Scene, scheme: str, width: int
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
    tab_of: Tabs, served: Served, scene: Scene, scheme: str
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
    expect(table.get_by_role("columnheader")).to_have_count(14)
    expect(table.get_by_role("rowheader")).to_have_count(10)
