"""From "the run looks off" to a named cause, on a run made by the real pipeline."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from tests.e2e.accessibility import problems
from tests.e2e.conftest import Served
from tests.e2e.pipeline import MODEL, Folders, build
from tests.e2e.viewer_tab import Tab, shoot

pytestmark = [pytest.mark.browser, pytest.mark.engine]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    pytest.importorskip("transformers", reason="the bundled model needs transformers")
    return build(tmp_path_factory.mktemp("triage"), prompts=24, tokens=32)


@pytest.fixture
def tab(folders: Folders, serve: Callable[..., Served], tab_of: Callable[..., Tab]) -> Tab:
    served = serve(folders.folder, tokenizer=MODEL)
    return tab_of(served, permissions=["clipboard-read", "clipboard-write"])


def test_from_the_verdict_to_the_cause(tab: Tab) -> None:
    page = tab.open()

    # 1. the verdict, in words, with the worst token
    expect(page.locator("h1")).to_contain_text("divergent")
    expect(page.locator("h1")).to_contain_text("routing:")
    shoot(page, "triage-1-overview")
    page.locator("h1 a").click()

    # 2. that token: both logprobs to the last bit, and the experts that drew it
    expect(page.locator("#panel")).to_contain_text("0x")
    expect(page.locator("#panel")).to_contain_text("Experts that drew this token")
    shoot(page, "triage-2-token")

    # 3. layer by layer: where the two sides part
    page.get_by_role("link", name="Layers", exact=True).click()
    expect(page.locator("main")).to_contain_text("First site over")
    expect(page.locator("main")).to_contain_text("layers.0.out")
    shoot(page, "triage-3-layers")

    # 4. routing: near ties, or not
    page.get_by_role("link", name="Routing", exact=True).click()
    expect(page.locator("main")).to_contain_text("choices are of other experts")
    expect(page.locator("main")).to_contain_text("near a tie")
    shoot(page, "triage-4-routing")

    # 5. the experiment that was made: the recorded experts forced
    page.locator("#rail .here > a").click()
    page.locator("#tabs").get_by_role("link", name="Causes", exact=True).click()
    cause = page.locator("details, section").filter(has_text="Routing flip").first
    expect(cause).to_contain_text("supported")
    expect(cause).to_contain_text("of the gap goes")
    shoot(page, "triage-5-causes")
    page.get_by_role("link", name="The first one side by side").click()
    expect(page.locator("main")).to_contain_text("switch routing")
    shoot(page, "triage-6-sides")

    # 6. for the issue: starred, with links that open the same view
    page.keyboard.press("s")
    expect(page.locator("#status")).to_contain_text("starred")
    page.get_by_role("link", name="Basket", exact=True).click()
    expect(page.locator("main")).to_contain_text("rollout")
    shoot(page, "triage-7-basket")
    assert problems(page) == []
