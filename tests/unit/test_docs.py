"""The documentation says what the code does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def test_the_command_line_page_is_what_the_commands_say() -> None:
    command = [sys.executable, str(ROOT / "docs" / "make_cli.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere_and_nothing_is_left_to_fill_in(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert "://" in target or (page.parent / target).exists(), target
    cells = [cell.strip() for line in text.splitlines() for cell in line.split("|")]
    assert not [cell for cell in cells if re.fullmatch(r"[A-Z]{2,}_[A-Z_]{2,}", cell)]
