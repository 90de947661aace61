"""A browser tab with the viewer in it, and what went wrong there."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from playwright.sync_api import Browser, Page

from tests.e2e.conftest import Served

ARTIFACTS = Path(__file__).resolve().parents[1] / "artifacts" / "viewer"


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


def shoot(page: Page, name: str, *, full_page: bool = False) -> None:
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=ARTIFACTS / f"{name}.png", full_page=full_page)


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
