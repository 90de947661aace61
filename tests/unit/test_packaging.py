"""The tree, the package list in pyproject.toml and the wheel say the same."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("store", "recorder", "replay", "viewer")


def packages_in_tree() -> list[str]:
    """Every folder of Python files, by its import name."""
    names = {"rolltape"}
    for folder in FOLDERS:
        for file in (ROOT / folder).rglob("*.py"):
            parts = file.parent.relative_to(ROOT).parts
            if "static" not in parts:
                names.add(".".join(("rolltape", *parts)))
    return sorted(names)


def files_in_tree() -> list[str]:
    """Every file that belongs in the wheel, by its path there."""
    names = ["rolltape/py.typed"]
    names += [f"rolltape/{file.name}" for file in (ROOT / "rolltape").glob("*.py")]
    for folder in FOLDERS:
        for file in (ROOT / folder).rglob("*"):
            path = file.relative_to(ROOT)
            if file.is_file() and (file.suffix == ".py" or "static" in path.parts):
                names.append(f"rolltape/{path.as_posix()}")
    return sorted(names)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tree, so that no stale build folder leaks into it."""
    try:
        setuptools = version("setuptools")
    except PackageNotFoundError:
        pytest.skip("setuptools is not installed")
    if int(setuptools.split(".")[0]) < 77:
        pytest.skip(f"setuptools {setuptools} is older than 77")
    source = tmp_path_factory.mktemp("source") / "rolltape"
    ignore = shutil.ignore_patterns(".?*", "build", "dist", "*.egg-info", "runs", "__pycache__")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignore)
    out = tmp_path_factory.mktemp("wheel")
    build = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", source, "--no-deps", "--no-build-isolation"],
        cwd=out,
        capture_output=True,
        text=True,
    )
    assert build.returncode == 0, build.stdout + build.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.mark.parametrize("folder", FOLDERS)
def test_link_resolves_to_the_root_folder(folder: str) -> None:
    link = ROOT / "rolltape" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("..", folder)
    assert link.resolve() == (ROOT / folder).resolve()


def test_package_list_equals_the_tree() -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert sorted(setup["packages"]) == packages_in_tree()


def test_every_package_has_an_init() -> None:
    for name in packages_in_tree():
        assert (ROOT / name.replace(".", "/") / "__init__.py").is_file(), name


def test_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert sorted(names) == files_in_tree()


def test_wheel_states_its_licence_and_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        texts = {
            Path(name).name: archive.read(name).decode()
            for name in archive.namelist()
            if ".dist-info/" in name
        }
    assert "License-Expression: Apache-2.0" in texts["METADATA"]
    assert "Apache License" in texts["LICENSE"]
    assert "rolltape = rolltape.cli:main" in texts["entry_points.txt"]
