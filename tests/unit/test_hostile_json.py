"""Headers and seals made to do harm, or altered by one bit."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltape import store
from rolltape.store import RolltapeError
from rolltape.store.fsck import fsck
from tests.builders import random_samples, write_tape


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "tape"
    write_tape(path, random_samples(2, response=8))
    return path


@pytest.fixture
def tape(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "tape"))


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON file; its checksum goes, as a forger would leave it out."""
    content = json.loads(path.read_text())
    content.pop("xxh3", None)
    change(content)
    path.write_text(json.dumps(content))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", ["tape.json", "seal.json"])
def test_any_flipped_bit_of_a_header_or_a_seal_is_named_or_does_no_harm(
    whole: Path, name: str, data: st.DataObject
) -> None:
    path = whole / name
    content = path.read_bytes()
    before = store.open(whole)
    flipped = bytearray(content)
    flipped[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        path.write_bytes(flipped)
        try:
            after = store.open(whole)
        except RolltapeError as error:
            said = str(error)
        else:
            said = ""
            kept = {**after.header, "seal": after.seal}
            for key in list(before.header):
                assert kept[key] == before.header[key]
            assert {k: after.seal[k] for k in before.seal} == before.seal
        assert "\n" not in said and (not said or str(whole) in said)
    finally:
        path.write_bytes(content)


EVIL = ["../../etc/passwd", "/etc/passwd", "rollups/../../../etc/passwd", "tokens/", "tokens", ""]


@pytest.mark.parametrize("name", EVIL)
@pytest.mark.parametrize("where", ["shards", "index"])
def test_names_in_a_seal_that_lead_elsewhere_are_neither_opened_nor_removed(
    tape: Path, name: str, where: str
) -> None:
    outside = tape.parent / "etc"
    outside.mkdir()
    (outside / "passwd").write_text("precious")

    def change(seal: dict[str, Any]) -> None:
        shards = seal["shards"] if where == "shards" else seal["index"]["shards"]
        shards.append({"shard": name, "bytes": 8})

    edit(tape / "seal.json", change)
    with pytest.raises(RolltapeError, match=r"seal\.json"):
        store.open(tape)
    with pytest.raises(RolltapeError):
        store.seal(tape)
    assert [f.code for f in fsck(tape).findings] == ["seal"]
    assert fsck(tape, repair=True).clean and not fsck(tape).findings
    assert (outside / "passwd").read_text() == "precious"


BAD: list[Callable[[dict[str, Any]], Any]] = [
    lambda s: s.update(shards={}),
    lambda s: s.update(shards=[1]),
    lambda s: s.update(index=[1]),
    lambda s: s.update(index={"shards": 5}),
    lambda s: s["index"].update(covers="many"),
    lambda s: s["index"].update(covers=1 << 80),
    lambda s: s.update(version="x"),
    lambda s: s.update(version=1 << 80),
    lambda s: s.update(status=[1]),
    lambda s: s.update(live=[{}]),
    lambda s: s.update(recovered=["x"]),
    lambda s: s["shards"][0].update(bytes="12"),
    lambda s: s["shards"][0].update(batches=-1),
    lambda s: s["shards"][0].update(batches=1 << 70),
    lambda s: s["shards"][0].update(version=None),
]


@pytest.mark.parametrize("change", BAD, ids=map(str, range(len(BAD))))
def test_a_seal_of_wrong_types_is_refused_and_can_be_repaired(
    tape: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    edit(tape / "seal.json", change)
    for action in (store.open, store.seal):
        with pytest.raises(RolltapeError, match=r"seal\.json") as caught:
            action(tape)
        assert "\n" not in str(caught.value)
    assert fsck(tape, repair=True).clean and len(store.open(tape)) == 2


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"format": "1.0", "uuid": ["x"]}',
        '{"format": "1.0", "uuid": 5}',
        '{"format": 1e400, "uuid": "x"}',
        '{"format": "' + "9" * 5000 + '.0", "uuid": "x"}',
        '{"format": ' + "9" * 5000 + ', "uuid": "x"}',
        '{"format": {"a": 1}, "uuid": "x"}',
        '{"format": "-1.0", "uuid": "x"}',
        "\ud800",
        "null",
    ],
    ids=lambda text: text[:16],
)
def test_headers_that_are_none_are_one_line(tape: Path, text: str) -> None:
    (tape / "tape.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(RolltapeError) as caught:
        store.open(tape)
    assert "\n" not in str(caught.value)
    for command in ("info", "show", "fsck"):
        done = subprocess.run(
            [sys.executable, "-m", "rolltape", command, str(tape)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, (command, done.stderr)


@pytest.mark.parametrize("covers", [0, 3, 10_000])
def test_an_index_that_claims_to_cover_more_or_less_does_no_harm(tape: Path, covers: int) -> None:
    before = [(s.id, s.tokens.values.tolist()) for s in store.open(tape)]
    edit(tape / "seal.json", lambda s: s["index"].update(covers=covers))
    after = None
    with contextlib.suppress(RolltapeError):  # refused, or right
        after = [(s.id, s.tokens.values.tolist()) for s in store.open(tape)]
    assert after in (None, before)
    assert fsck(tape, repair=True).clean and not fsck(tape).findings
