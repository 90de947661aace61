"""Pictures of every screen, light and dark, of a run made by the real pipeline.

`make screenshots`, or `python -m tests.e2e.screenshots [FOLDER]`, writes tests/artifacts/screens
and the three pictures of the README into docs/images. FOLDER is what `tests/e2e/pipeline.py` made;
without one it is made first, which takes half a minute.
"""

from __future__ import annotations

import json
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from tests.e2e.conftest import CHROMIUM, serving
from tests.e2e.pipeline import MODEL, REPO, build

PICTURES = REPO / "tests" / "artifacts" / "screens"
README = REPO / "docs" / "images"
#: Screens that the README shows.
SHOWN = ("overview", "layers", "causes")


def screens(base: str) -> dict[str, str]:
    """The address of each screen, at the worst token of the run."""

    def get(path: str) -> Any:
        with urllib.request.urlopen(f"{base}api/{path}", timeout=60) as answer:
            return json.load(answer)

    run = next(r for r in get("runs")["runs"] if len(r["reports"]) > 1)
    reports = {report["name"]: report["id"] for report in run["reports"]}
    at = f"#/run/{run['id']}"
    rep = f"rep={reports['live-report']}"
    row = get(f"runs/{run['id']}/seqs?limit=1&rep={reports['live-report']}")["rows"][0]
    seq, tok = f"{at}/seq/{row['id']}", row["max_at"]
    both = f"a={reports['live-report']}&b={reports['ids-report']}"
    return {
        "home": "#/",
        "overview": f"{at}?{rep}",
        "sequences": f"{at}/seqs?{rep}",
        "timeline": f"{at}/timeline?{rep}",
        "weights": f"{at}/weights?{rep}",
        "causes": f"{at}/causes?{rep}",
        "tokens": f"{seq}?{rep}&tok={tok}",
        "layers": f"{seq}/layers?{rep}&tok={tok}&full=1e-1&thr=1e-2",
        "routing": f"{seq}/routing?{rep}&tok={tok}",
        "sides": f"{seq}/sides?{rep}&{both}&tok={tok}",
        "basket": "#/basket",
    }


def shoot(folder: Path) -> None:
    """Take them all."""
    from playwright.sync_api import sync_playwright

    PICTURES.mkdir(parents=True, exist_ok=True)
    README.mkdir(parents=True, exist_ok=True)
    with serving(folder, tokenizer=MODEL) as served, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        for theme in ("light", "dark"):
            context = browser.new_context(
                viewport={"width": 1280, "height": 860},
                color_scheme=theme,
                reduced_motion="reduce",
            )
            page = context.new_page()
            for name, address in screens(served.base).items():
                page.goto("about:blank")
                page.goto(served.base + address)
                page.wait_for_selector("main:not([aria-busy]) :is(h1, .notice)")
                page.wait_for_load_state("networkidle")
                page.screenshot(path=PICTURES / f"{name}-{theme}.png")
                if theme == "light" and name in SHOWN:
                    page.screenshot(path=README / f"{name}.png")
        browser.close()


def main() -> None:
    """Take them of a folder that is there, or of a new one."""
    if len(sys.argv) > 1:
        shoot(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            shoot(build(Path(folder) / "run").folder)
    print(f"{PICTURES}\n{README}")


if __name__ == "__main__":
    main()
