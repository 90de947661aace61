"""The timeline and the weights in a real browser: keys, links, states, and how they look."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from rolltape.store import create_tape, seal
from tests.e2e.conftest import Served, serving
from tests.e2e.schedule_data import MS, ONE, START, TWO, Schedule, build, build_dense
from tests.e2e.viewer_data import Scene
from tests.e2e.viewer_tab import Tab, shoot

pytestmark = pytest.mark.browser

Serve = Callable[..., Served]
Tabs = Callable[..., Tab]


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Schedule:
    return build(tmp_path_factory.mktemp("schedule"))


@pytest.fixture(scope="module")
def scheduled(schedule: Schedule) -> Iterator[Served]:
    with serving(schedule.a, schedule.b, schedule.report) as it:
        yield it


def timeline(tab: Tab, query: str = "") -> Page:
    page = tab.open(f"#/run/{tab.run}/timeline{query}")
    expect(page.locator("canvas.lanes")).to_be_visible()
    return page


def weights(tab: Tab, query: str = "") -> Page:
    return tab.open(f"#/run/{tab.run}/weights{query}")


def view(tab: Tab) -> list[int]:
    """The window of the address, ms from the start."""
    return [(int(tab.param(name) or 0) - START) // MS for name in ("t0", "t1")]


# ---- timeline -----------------------------------------------------------------------------


def test_steps_are_walked_with_the_keys_and_the_address_keeps_the_step(
    scheduled: Served, tab_of: Tabs
) -> None:
    tab = tab_of(scheduled)
    page = timeline(tab)
    readout, live = page.locator("#readout"), page.locator("#live")
    page.keyboard.press(".")
    expect(readout).to_have_text("step 0, prefill, 2 rows, eager, 30 ms, unfinished prefill")
    page.keyboard.press(".")
    page.keyboard.press(".")
    expect(readout).to_have_text("step 2, decode, 2 rows, graph full:2, 210 ms")
    expect(live).to_have_text("step 2, decode, 2 rows, graph full:2, 210 ms")
    page.keyboard.press(",")
    expect(readout).to_contain_text("step 1, mixed")
    assert tab.param("step") == "1"
    page.reload()
    tab.settle()
    expect(page.locator("#readout")).to_contain_text("step 1, mixed")
    expect(page.locator("#panel h2")).to_contain_text("Step 1")
    page.keyboard.press("Escape")
    assert tab.param("step") is None


def test_arrows_on_the_lanes_move_between_steps_and_lanes(scheduled: Served, tab_of: Tabs) -> None:
    page = timeline(tab_of(scheduled))
    page.locator("canvas.lanes").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#readout")).to_contain_text("step 0, prefill")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#readout")).to_contain_text("step 1, mixed")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#readout")).to_contain_text("step 2, decode")
    for _ in range(3):
        page.keyboard.press("ArrowDown")
    expect(page.locator("#panel")).to_contain_text(TWO)
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    expect(page.locator("#panel")).to_contain_text(ONE)
    expect(page.locator("#readout")).to_contain_text("verify")


def test_the_panel_has_the_step_whole_with_links_to_its_sequences(
    scheduled: Served, tab_of: Tabs
) -> None:
    page = timeline(tab_of(scheduled), f"?step=5&lane={ONE}:verify")
    panel = page.locator("#panel")
    expect(panel.locator("h2")).to_contain_text("Step 5")
    expect(panel.locator("#batch tbody tr")).to_have_count(2)
    expect(panel.locator("#batch")).to_contain_text("1 of 3")
    expect(panel).to_contain_text("274 ms")
    panel.locator("#step-next").click()
    expect(panel.locator("h2")).to_contain_text("Step 6")
    expect(panel).to_contain_text("not known: the last step")
    panel.locator("#batch a").click()
    expect(page.locator("h1")).to_contain_text(f"{ONE[:8]}.2.0")
    page.go_back()
    expect(page.locator("#panel h2")).to_contain_text("Step 6")


def test_zoom_pan_and_fit_change_the_window_and_not_the_history(
    scheduled: Served, tab_of: Tabs
) -> None:
    tab = tab_of(scheduled)
    page = timeline(tab)
    length = page.evaluate("history.length")
    page.keyboard.press("w")
    assert view(tab) == [71, 214]
    page.keyboard.press("a")
    assert view(tab) == [35, 178]
    page.keyboard.press("d")
    page.keyboard.press("s")
    assert tab.param("t0") is None
    assert page.evaluate("history.length") == length
    page.keyboard.press(".")
    page.keyboard.press("f")
    assert view(tab) == [0, 90]
    page.keyboard.press("f")
    assert tab.param("t0") is None


@pytest.mark.parametrize(("key", "step"), [(".", 3), (",", 6)])
def test_after_panning_walking_goes_on_with_what_is_in_view(
    scheduled: Served, tab_of: Tabs, key: str, step: int
) -> None:
    tab = tab_of(scheduled)
    page = timeline(tab, f"?t0={START}&t1={START + 56 * MS}")
    page.keyboard.press(".")
    page.keyboard.press(".")
    assert tab.param("step") == "1"
    box = page.locator("canvas.tlmap").bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + box["width"] - 2, box["y"] + box["height"] / 2)  # the last 56 ms
    page.wait_for_load_state("networkidle")
    before = [tab.param(name) for name in ("t0", "t1")]
    page.keyboard.press(key)
    expect(page).to_have_url(re.compile(rf"step={step}(&|$)"))
    assert (tab.param("lane") or "").startswith(ONE)
    assert [tab.param(name) for name in ("t0", "t1")] == before  # it was in view
    page.keyboard.press(",")
    expect(page).to_have_url(re.compile(rf"step={step - 1}(&|$)"))


def test_dragging_zooms_and_the_wheel_needs_ctrl(scheduled: Served, tab_of: Tabs) -> None:
    tab = tab_of(scheduled)
    page = timeline(tab)
    box = page.locator("canvas.lanes").bounding_box()
    assert box is not None
    left, width, y = box["x"] + 118, box["width"] - 118, box["y"] + 80
    page.mouse.move(left + width * 0.5, y)
    page.mouse.wheel(0, -100)
    assert tab.param("t0") is None
    page.mouse.down()
    page.mouse.move(left + width * 0.75, y, steps=4)
    page.mouse.up()
    start, end = view(tab)
    assert abs(start - 143) <= 2
    assert abs(end - 214) <= 2
    page.keyboard.down("Control")
    page.mouse.wheel(0, -100)
    page.keyboard.up("Control")
    page.wait_for_function("() => !location.hash.includes('%')")
    assert view(tab)[1] - view(tab)[0] < 71


def test_a_click_chooses_the_step_under_it(scheduled: Served, tab_of: Tabs) -> None:
    tab = tab_of(scheduled)
    page = timeline(tab)
    box = page.locator("canvas.lanes").bounding_box()
    assert box is not None
    # the decode lane of the first engine: axis, heading, prefill, mixed, then it
    y = box["y"] + 46 + 18 + 26 * 2 + 13
    x = box["x"] + 118 + (box["width"] - 118) * (150 / 286)
    page.mouse.move(x, y)
    expect(page.locator("#readout")).to_contain_text("step 2, decode")
    page.mouse.click(x, y)
    expect(page.locator("#panel h2")).to_contain_text("Step 2")
    assert tab.param("lane") == f"{ONE}:decode"


def test_the_same_stands_in_a_table(scheduled: Served, tab_of: Tabs) -> None:
    page = timeline(tab_of(scheduled))
    page.locator("#as-table summary").click()
    rows = page.locator("#span-table tbody tr")
    expect(rows).to_have_count(10)
    expect(rows.nth(3)).to_contain_text("recomputed after a preemption")
    expect(rows.nth(2)).to_contain_text("full:2")
    rows.nth(2).locator("a").click()
    expect(page.locator("#panel h2")).to_contain_text("Step 2")
    page.locator("#events summary").click()
    expect(page.locator("#events")).to_contain_text("RT405 the update changed no weight")
    expect(page.locator("#events a")).to_have_text(f"{ONE[:8]}.0.0")


def test_the_window_can_be_saved(scheduled: Served, tab_of: Tabs, tmp_path: Path) -> None:
    page = timeline(tab_of(scheduled), f"?t0={START}&t1={START + 50 * MS}")
    with page.expect_download() as download:
        page.locator("#save-perfetto").click()
    download.value.save_as(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert sum(e["ph"] == "X" for e in trace["traceEvents"]) == 5
    with page.expect_download() as download:
        page.locator("#save-csv").click()
    download.value.save_as(tmp_path / "steps.csv")
    text = (tmp_path / "steps.csv").read_text()
    assert len(list(csv.DictReader(io.StringIO(text)))) == 5


def test_kernel_choices_are_filtered_and_say_where_a_and_b_differ(
    scheduled: Served, tab_of: Tabs
) -> None:
    page = timeline(tab_of(scheduled))
    expect(page.locator("#tactic-counts")).to_have_text("4 of 4 choices; A and B differ in 1")
    page.keyboard.press("/")
    page.keyboard.type("differs")
    page.keyboard.press("Enter")
    expect(page.locator("#tactics tr.differs")).to_contain_text("\u2260 differs")
    expect(page.locator("#tactics tbody tr:not(.group)")).to_have_count(1)
    page.locator("#tactic-filter").fill("nothing")
    page.keyboard.press("Enter")
    expect(page.locator("main .notice")).to_contain_text("The filter leaves no choice")
    page.get_by_text("What cannot be seen: 1").click()
    expect(page.locator("main")).to_contain_text("its heuristic has no interface")


def test_many_steps_are_bins_until_one_comes_close(
    tmp_path: Path, serve: Serve, tab_of: Tabs
) -> None:
    tab = tab_of(serve(build_dense(tmp_path, steps=30_000)))
    page = timeline(tab)
    expect(page.locator("#window-note")).to_contain_text("60,000 steps as bins")
    expect(page.locator("#explain")).to_contain_text("the share of time of that kind")
    page.locator("#as-table summary").click()
    expect(page.locator("#as-table tbody tr")).to_have_count(4)
    expect(page.locator("#as-table")).to_contain_text("29,400")
    page.keyboard.press(".")
    expect(page.locator("#status")).to_contain_text("zoom in until single steps are shown")
    shoot(page, "timeline-dense")
    for _ in range(8):
        page.keyboard.press("w")
    expect(page.locator("#window-note")).not_to_contain_text("bins")
    page.keyboard.press(".")
    expect(page.locator("#readout")).to_contain_text("eager")
    expect(page.locator("#panel h2")).to_contain_text("Step 1")
    expect(page.locator("#panel")).to_contain_text("No rows of this step were recorded")


def test_a_link_to_a_step_alone_comes_close_to_it(
    tmp_path: Path, serve: Serve, tab_of: Tabs
) -> None:
    tab = tab_of(serve(build_dense(tmp_path, steps=30_000)))
    page = timeline(tab, f"?step=150&lane={TWO}")
    expect(page.locator("#readout")).to_have_text("step 150, prefill, 23 rows, eager, 10 ms")
    expect(page.locator("#panel h2")).to_contain_text("Step 150")
    expect(page.locator("#window-note")).not_to_contain_text("bins")
    assert tab.param("t0") is not None


def test_a_link_outside_the_recording_shows_what_there_is(scheduled: Served, tab_of: Tabs) -> None:
    page = timeline(tab_of(scheduled), "?t0=5&t1=9")
    expect(page.locator(".notice.warn")).to_contain_text("outside the recording")
    tab = tab_of(scheduled)
    page = timeline(tab, f"?step=99&lane={ONE}:decode")
    expect(page.locator("#panel")).to_contain_text("No step 99")
    tab.trouble = [t for t in tab.trouble if "404" not in t]  # chromium logs failed requests


def test_without_times_the_axis_counts_steps(tmp_path: Path, serve: Serve, tab_of: Tabs) -> None:
    page = timeline(tab_of(serve(build_dense(tmp_path, steps=40, timed=False))))
    expect(page.locator(".notice.warn")).to_contain_text("No times")
    page.keyboard.press(".")
    expect(page.locator("#readout")).to_have_text("step 0, prefill, 1 row, eager")
    shoot(page, "timeline-no-times")


def test_no_steps_says_what_to_do(
    scene: Scene, schedule: Schedule, tmp_path: Path, serve: Serve, tab_of: Tabs
) -> None:
    path = create_tape(tmp_path / "t", role="rollout")
    seal(path, status={"exit": 0})
    tab = tab_of(serve(path))
    page = tab.open(f"#/run/{tab.run}/timeline")
    expect(page.locator(".notice").first).to_contain_text("No steps recorded")
    expect(page.locator(".notice").first).to_contain_text("no schedule")
    expect(page.locator(".command code").first).to_contain_text("rolltape record")
    expect(page.locator(".notice").nth(1)).to_contain_text("No kernel choices recorded")
    shoot(page, "timeline-no-steps")
    tab = tab_of(serve(schedule.b))
    page = tab.open(f"#/run/{tab.run}/timeline")
    expect(page.locator(".notice").first).to_contain_text("what each sequence went through")


def test_a_report_without_its_tape_has_no_timeline(
    schedule: Schedule, serve: Serve, tab_of: Tabs
) -> None:
    tab = tab_of(serve(schedule.report))
    for screen in ("timeline", "weights"):
        page = tab.open(f"#/run/{tab.run}/{screen}")
        expect(page.locator(".notice.error")).to_contain_text("opens both")
    tab.trouble = [t for t in tab.trouble if "404" not in t]


# ---- weights ------------------------------------------------------------------------------


def test_wrong_weights_come_first_and_every_digest_can_be_read(
    scheduled: Served, tab_of: Tabs
) -> None:
    page = weights(tab_of(scheduled))
    titles = page.locator(".notice h2")
    expect(titles.nth(0)).to_contain_text("Weights of A and B differ")
    expect(titles.nth(1)).to_contain_text("half-written")
    expect(page.locator("#digests thead th")).to_have_count(3)
    router = page.locator("#digests tbody tr", has_text="layers.0.router")
    expect(router.locator(".hex")).to_have_text([f"{20:016x}", f"{21:016x}"])
    expect(page.locator("#digests tbody tr", has_text="embed")).to_contain_text("same")
    wrong = page.locator("#against tr.differs")
    expect(wrong).to_have_count(2)
    expect(wrong.last).to_contain_text(f"{121:016x}")
    expect(page.locator("#against")).to_contain_text("not comparable: repacked for the MoE kernel")


def test_sequences_that_straddle_and_their_staleness(scheduled: Served, tab_of: Tabs) -> None:
    page = weights(tab_of(scheduled))
    expect(page.locator("#straddling tbody tr")).to_have_count(2)
    expect(page.locator("#staleness tbody tr")).to_have_count(2)
    expect(page.locator("#staleness tbody tr").last).to_contain_text("60 %")
    expect(page.locator("#updates tr.differs")).to_contain_text("asked for, never in place")
    page.locator("#straddling a").first.click()
    expect(page.locator("h1")).to_contain_text(f"{ONE[:8]}.0.0")


def test_versions_are_walked_with_the_keys(scheduled: Served, tab_of: Tabs) -> None:
    tab = tab_of(scheduled)
    page = weights(tab)
    page.keyboard.press("j")
    expect(page.locator("#live")).to_have_text("version 0")
    page.keyboard.press("j")
    expect(page.locator("#live")).to_have_text("version 1")
    assert tab.param("version") == "1"
    page.keyboard.press("j")
    expect(page.locator("#status")).to_contain_text("this is the last version")
    page.reload()
    tab.settle()
    expect(page.locator("#digests th.here")).to_have_text("v1 (step-1)")
    page.go_back()
    expect(page.locator("#digests th.here")).to_have_text("v0 (step-0)")
    page.locator("#as-table summary").click()
    expect(page.locator("#as-table tbody tr")).to_have_count(6)
    expect(page.locator("#as-table tr.differs").first).to_contain_text("update_weights")


def test_no_weights_recorded_says_what_is_known(tab: Tab) -> None:
    page = weights(tab)
    expect(page.locator(".notice")).to_contain_text("No weight versions recorded")
    expect(page.locator(".notice")).to_contain_text("versions that made the tokens are known")
    expect(page.locator("#straddling tbody tr")).to_have_count(1)
    shoot(page, "weights-none")


# ---- looks --------------------------------------------------------------------------------


@pytest.mark.parametrize("look", ["light", "dark", "zoomed"])
def test_nothing_overflows(look: str, scheduled: Served, tab_of: Tabs) -> None:
    options = {"color_scheme": "dark"} if look == "dark" else {}
    tab = tab_of(scheduled, **options)
    if look == "zoomed":  # 200 % of a window of 1280 by 900
        tab.page.set_viewport_size({"width": 640, "height": 450})
    page = timeline(tab, f"?step=3&lane={ONE}:mixed")
    expect(page.locator("#batch tbody tr")).to_have_count(3)
    shoot(page, f"timeline-{look}", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page = weights(tab, "?version=1")
    expect(page.locator("#digests")).to_be_visible()
    shoot(page, f"weights-{look}", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
