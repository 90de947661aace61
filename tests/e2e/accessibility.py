"""What can be checked of accessibility without eyes, on a page as it is drawn.

The rules are those that tools such as axe apply: names of controls and canvases, labels, headings,
table headers, unique ids, contrast of text (WCAG 2.2: 4.5:1, large text 3:1), no overflow at 200 %.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

_RULES = (Path(__file__).parent / "js" / "accessibility.js").read_text()


def problems(page: Any) -> list[str]:
    """What is wrong with the page as it is drawn now, a line a problem."""
    return _run(page, "problems")


def overflow(page: Any) -> list[str]:
    """Elements that make the whole page scroll sideways: at 200 % zoom there must be none."""
    return _run(page, "overflow")


def _run(page: Any, rules: str) -> list[str]:
    found: list[str] = page.evaluate(f"{_RULES.strip()}.{rules}()")
    return found
