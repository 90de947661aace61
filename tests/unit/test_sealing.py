"""Sealing again, beside readers and other sealers: what is open stays, nothing is hidden."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from rolltape import store
from rolltape.store import DamagedShardError, NotATapeError, SchemaError, UsageError
from rolltape.store.places import LocalPlace
from rolltape.store.seal import add_index
from rolltape.store.shards import row_checksum
from tests.builders import random_samples, write_tape


def shard(root: Path, table: str) -> Path:
    (path,) = (root / table).glob("*.arrow")
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_tape(tmp_path / "a", random_samples(4))
    return tmp_path / "a"


def test_the_fingerprint_is_that_of_what_was_recorded(root: Path) -> None:
    before = store.open(root).fingerprint
    store.seal(root)
    assert store.open(root).fingerprint == before
    with store.TapeWriter(root) as writer:
        row = {"writer": writer.id, "t_ns": 1, "kind": "notice", "detail": "{}"}
        writer.append("events", row)
    assert store.open(root).fingerprint != before


def test_a_tape_that_is_open_survives_that_it_is_sealed_again(root: Path) -> None:
    early = store.open(root)
    wanted = [s.tokens.values.tolist() for s in store.open(root)]
    for _ in range(3):  # the index that it knows is kept once, then it is gone
        store.seal(root)
    assert [s.tokens.values.tolist() for s in early] == wanted
    assert len(early.rollups()) == 4 and not early.problems


def test_two_who_write_the_index_at_once_leave_a_whole_one(root: Path) -> None:
    place = LocalPlace(root)
    threads = [threading.Thread(target=add_index, args=(place,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tape = store.open(root)
    assert tape.index.rollups is not None and len(list(tape)) == 4
    index = (tape.seal or {})["index"]["shards"]
    assert all((root / entry["shard"]).exists() for entry in index)


def test_an_index_vouches_for_nothing_that_is_damaged(root: Path) -> None:
    path = shard(root, "tokens")
    data = path.read_bytes()
    broken = bytearray(data)
    broken[len(data) // 2] ^= 1
    path.write_bytes(broken)
    assert store.seal(root)["index"] is None
    path.write_bytes(data)  # restored from a copy
    tape = store.open(root)
    assert not tape.problems and all(s.tokens.valid.all() for s in tape)


@pytest.mark.parametrize("table", ["tokens", "sequences"])
def test_what_is_gone_is_a_problem_also_when_damage_is_skipped(root: Path, table: str) -> None:
    name = shard(root, table).name
    shard(root, table).unlink()
    with pytest.raises(DamagedShardError, match=name):
        store.open(root)
    tape = store.open(root, skip_damaged=True)
    assert len(tape.problems) == 1 and name in tape.problems[0]


def test_every_seal_is_a_version(root: Path) -> None:
    store.seal(root)
    assert len(store.open(root, version=1)) == len(store.open(root, version=2)) == 4
    with pytest.raises(UsageError, match="it has 1 to 2"):
        store.open(root, version=3)
    store.create_tape(root.with_name("b"), role="rollout")
    with pytest.raises(UsageError, match="not sealed"):
        store.open(root.with_name("b"), version=1)


@pytest.mark.parametrize("value", [2**32 + 5, -1, 2**63 - 1])
def test_a_number_that_does_not_fit_is_refused_and_not_another_number(
    root: Path, value: int
) -> None:
    key = {"engine": "e" * 32, "request": "0", "sample": 0, "pass": 0}
    columns = {**key, "start": 0, "n": 1, "ids": [np.array([value])]}
    with store.TapeWriter(root) as writer, pytest.raises(SchemaError, match=r"tokens\.ids"):
        writer.append("tokens", columns)


def test_an_altered_report_is_refused(tmp_path: Path) -> None:
    store.create_report(tmp_path / "r", summary={"verdict": "divergent"})
    store.seal(tmp_path / "r")
    file = tmp_path / "r" / "report.json"
    file.write_text(file.read_text().replace("divergent", "identical"))
    with pytest.raises(NotATapeError, match="altered"):
        store.open_report(tmp_path / "r")


def test_json_of_1_0_has_no_checksum_and_is_read(root: Path) -> None:
    for name in ("tape.json", "seal.json"):
        content = json.loads((root / name).read_text())
        assert len(content.pop("xxh3")) == 16
        (root / name).write_text(json.dumps(content))
    assert len(store.open(root)) == 4


def test_a_commit_log_says_of_every_row_what_is_on_the_tape(tmp_path: Path) -> None:
    root = store.create_tape(tmp_path / "a", role="rollout")
    n = [11, 3, 8, 1, 16, 5, 2, 7]
    with store.TapeWriter(root, commit_log=tmp_path / "log") as writer:
        columns = {
            "engine": "e" * 32,
            "request": [str(i) for i in range(len(n))],
            "sample": 0,
            "pass": 0,
            "start": 0,
            "n": n,
            # bits of the rows beside it are not those of a row
            "loss_mask": [np.arange(k) % 3 == i % 3 for i, k in enumerate(n)],
            "raw": [store.Masked(np.ones(k, np.float32), np.arange(k) % 2 == 0) for k in n],
        }
        writer.append("tokens", columns)
    logged = [json.loads(line)["checksum"] for line in (tmp_path / "log").read_text().splitlines()]
    (batch,) = store.open(root).dataset("tokens").to_batches()
    assert [row_checksum(batch, i) for i in range(len(n))] == logged and len(set(logged)) == len(n)
