"""The parts of the page that need no page: routes, colours, text, decoding, keys."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).with_name("js")


def _node() -> str:
    """A node that reads .js files with `import` in them as modules without being told."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    text = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    major, minor = (int(x) for x in re.findall(r"\d+", text)[:2])
    if (major, minor) < (20, 19) or (major, minor) in {(22, m) for m in range(7)}:
        pytest.skip(f"node {text.strip()} is too old, 20.19 or 22.7 are enough")
    return node


@pytest.mark.parametrize("name", sorted(p.name for p in TESTS.glob("*.test.mjs")))
def test_module(name: str) -> None:
    done = subprocess.run(
        [_node(), "--test", str(TESTS / name)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not re.search(r"\bpass 0\b", done.stdout), done.stdout
