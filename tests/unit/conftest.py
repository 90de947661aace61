"""The viewer's scene, shared by its test modules, which skip where the viewer is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.viewer_client import Api
    from tests.e2e.viewer_data import Scene


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A tape, its replay and their report."""
    from tests.e2e.viewer_data import build

    return build(tmp_path_factory.mktemp("scene"))


@pytest.fixture(scope="module")
def api(scene: Scene) -> Api:
    """The viewer over them, asked without a socket."""
    from tests.e2e.viewer_client import Api

    return Api(scene.a, scene.b, scene.report)


@pytest.fixture
def small(tmp_path: Path) -> Scene:
    """Two short sequences, for tests that break things."""
    from tests.e2e.viewer_data import build, make_cases

    return build(tmp_path, cases=make_cases()[:2])
