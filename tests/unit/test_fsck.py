"""fsck: every kind of damage has a name, a repair loses nothing else, and may be cut short."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as fs
import pytest

from rolltape import store
from rolltape.cli import main
from rolltape.recorder.output import prepare_output
from rolltape.store.compact import compact
from rolltape.store.describe import describe_tape
from rolltape.store.fsck import Checked, fsck
from rolltape.store.places import LocalPlace, ObjectPlace
from rolltape.store.schema import DERIVED_TABLES
from rolltape.store.shards import COMPACTING, LIVE, list_shards
from rolltape.store.writer import put_json
from tests.builders import random_samples, write_tape

N = 4


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sealed tape with four sequences."""
    path = tmp_path_factory.mktemp("whole") / "tape"
    write_tape(path, random_samples(N, response=12))
    return path


@pytest.fixture
def tape(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "tape"))


def shard(tape: Path, table: str) -> Path:
    (path,) = list_shards(tape / table)
    return path


def batch_sizes(path: Path) -> list[int]:
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
        return [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def rows_of(tape: Path) -> dict[str, list[Any]]:
    """All rows of all tables that a recorder writes; events are what a repair adds."""
    opened = store.open(tape)
    return {
        name: opened.table(name).to_pylist()
        for name in opened.schemas
        if name not in (*DERIVED_TABLES, "events")
    }


def events_of(tape: Path) -> list[dict[str, Any]]:
    return [json.loads(e["detail"] or "{}") for e in store.open(tape).rows("events")]


def codes(checked: Checked) -> list[str]:
    return sorted({finding.code for finding in checked.findings})


def repair_twice(tape: Path) -> Checked:
    """Repair, and check that it is clean, and that a second repair changes no file."""
    first = fsck(tape, repair=True)
    assert fsck(tape).findings == ()
    before = {p: p.read_bytes() for p in tape.rglob("*") if p.is_file()}
    assert fsck(tape, repair=True).findings == ()
    assert {p: p.read_bytes() for p in tape.rglob("*") if p.is_file()} == before
    return first


def live_tape(path: Path) -> tuple[Path, store.TapeWriter]:
    """A tape whose writer lives."""
    write_tape(path, random_samples(N, response=12), sealed=False)
    writer = store.TapeWriter(path)
    row = {"engine": "e" * 32, "sample": 0, "pass": 0, "prompt_len": 1, "finish": "open"}
    for i in range(3):
        writer.append("sequences", {**row, "request": f"live-{i}"})
        writer.flush()
    return path, writer


def test_a_whole_tape_is_clean_and_a_repair_changes_nothing(tape: Path) -> None:
    checked = fsck(tape)
    assert checked.findings == () and checked.clean and checked.sequences == N
    sizes = [p.stat().st_size for p in tape.glob("*/*.arrow")]
    assert (checked.shards, checked.bytes) == (len(sizes), sum(sizes))
    assert repair_twice(tape).findings == ()


@pytest.mark.parametrize("part", ["first", "middle", "footer", "schema"])
@pytest.mark.parametrize("table", ["tokens", "events"])
def test_damaged(tmp_path: Path, table: str, part: str) -> None:
    tape = tmp_path / "tape"
    write_tape(tape, random_samples(N, response=12), sealed=False)
    with store.TapeWriter(tape) as writer:  # a shard of several batches
        for i in range(6):
            event = {"writer": writer.id, "t_ns": i, "kind": "notice", "detail": f'{{"i": {i}}}'}
            writer.append("events", event)
            for name in ("tokens", "routes", "sequences"):
                source = store.open(tape).table(name).slice(i, 1).to_batches()[0]
                writer.append_batch(name, source)
            writer.flush()
    store.seal(tape)
    path = max(list_shards(tape / table), key=lambda p: batch_sizes(p)[0] < 2)
    sizes = batch_sizes(path)
    before = rows_of(tape)
    data = path.read_bytes()
    place = {"first": data.index(b"xxh3") + 30, "middle": len(data) // 2, "footer": len(data) - 40}
    flip(path, place.get(part, 60))
    found = fsck(tape)
    assert codes(found) == ["damaged"] and not found.clean
    assert path.name in found.findings[0].text and f"{table}/{path.name}" == found.findings[0].where
    repaired = repair_twice(tape)
    assert "damaged" in codes(repaired) and repaired.clean
    assert (tape / "damaged" / f"{table}-{path.name}").stat().st_size == len(data)
    lost = {n: [r for r in rows if r not in rows_of(tape)[n]] for n, rows in before.items()}
    assert all(not rows for name, rows in lost.items() if name != table)
    after = rows_of(tape)
    if table != "events":
        missing = len(before[table]) - len(after[table])
        assert missing <= max(sizes), "one batch is all that one byte may cost"
        assert bool(missing) == any(e.get("reason") == "damaged shard" for e in events_of(tape))


def test_a_shard_that_is_gone(tape: Path) -> None:
    before = rows_of(tape)
    shard(tape, "supports").unlink()
    found = fsck(tape)
    assert "missing" in codes(found) and "supports/" in found.findings[0].where
    repair_twice(tape)
    after = rows_of(tape)
    assert after.pop("supports") == [] and before.pop("supports") and after == before
    assert [e["reason"] for e in events_of(tape)] == ["missing shard"]


def test_a_shard_that_the_seal_knows_with_another_size(tape: Path) -> None:
    seal = json.loads((tape / "seal.json").read_text())
    before = rows_of(tape)
    seal["shards"][0]["bytes"] += 1
    seal.pop("xxh3")
    (tape / "seal.json").write_text(json.dumps(seal))
    assert "missing" in codes(fsck(tape))
    repair_twice(tape)
    assert rows_of(tape) == before and events_of(tape) == []


def test_a_writer_that_died(tmp_path: Path) -> None:
    tape, writer = live_tape(tmp_path / "tape")
    before = rows_of(tape)
    writer.abandon()
    assert codes(fsck(tape)) == ["dead", "unsealed"]
    assert codes(repair_twice(tape)) == ["dead", "unsealed"]
    assert rows_of(tape) == before and not list(tape.glob(f"*/*{LIVE}"))


def test_a_dead_shard_that_is_damaged_and_not_only_cut_off_is_kept(tmp_path: Path) -> None:
    tape, writer = live_tape(tmp_path / "tape")
    writer.abandon()
    (path,) = tape.glob(f"sequences/*{LIVE}")
    data = path.read_bytes()
    flip(path, data.rindex(b"xxh3.columns") + 20)
    repair_twice(tape)
    assert (tape / "damaged" / f"sequences-{path.name}").stat().st_size == len(data)
    assert len(rows_of(tape)["sequences"]) >= N


def test_files_that_were_to_be_temporary(tape: Path) -> None:
    strays = [
        tape / f".seal.json.{'0' * 32}",
        tape / "tokens" / f".{'a' * 32}-0.{'b' * 32}",
    ]
    others = [tape / ".gitignore", tape / "tokens" / ".DS_Store", tape / ".seal.json.bak"]
    for path in [*strays, *others]:
        path.write_bytes(b"x")
    assert fsck(tape).findings == (), "somebody may be writing them just now"
    for path in [*strays, *others]:
        os.utime(path, (time.time() - 600,) * 2)
    assert [f.code for f in fsck(tape).findings] == ["stray", "stray"]
    repair_twice(tape)
    assert not any(path.exists() for path in strays) and all(path.exists() for path in others)


def test_a_tape_that_was_never_sealed_or_grew_since(tmp_path: Path) -> None:
    tape = tmp_path / "tape"
    write_tape(tape, random_samples(N, response=12), sealed=False)
    before = rows_of(tape)
    assert codes(fsck(tape)) == ["unsealed"]
    repair_twice(tape)
    assert rows_of(tape) == before
    with store.TapeWriter(tape) as writer:
        writer.append("events", {"writer": writer.id, "t_ns": 0, "kind": "notice"})
    assert codes(fsck(tape)) == ["unsealed"]
    repair_twice(tape)


@pytest.mark.parametrize("table", DERIVED_TABLES)
@pytest.mark.parametrize("how", ["gone", "flipped", "of another tape"])
def test_an_index_that_cannot_be_used_is_written_anew(tape: Path, table: str, how: str) -> None:
    before = rows_of(tape)
    path = shard(tape, table)
    if how == "gone":
        path.unlink()
    elif how == "flipped":
        flip(path, path.stat().st_size // 2)
    else:
        seal = json.loads((tape / "seal.json").read_text())
        seal["index"]["covers"] -= 1
        seal.pop("xxh3")
        (tape / "seal.json").write_text(json.dumps(seal))
    found = fsck(tape)
    assert set(codes(found)) & {"index", "damaged"} and not found.clean
    repair_twice(tape)
    assert rows_of(tape) == before and events_of(tape) == []
    assert store.open(tape).index.rollups is not None


def test_a_seal_that_is_not_json_is_set_aside_and_written_anew(tape: Path) -> None:
    before = rows_of(tape)
    flip(tape / "seal.json", 0, 3)
    assert codes(fsck(tape)) == ["seal"]
    assert "seal" in codes(repair_twice(tape))
    assert (tape / "damaged" / "seal.json").exists() and rows_of(tape) == before


def test_contents_that_do_not_join_are_named_and_left(tmp_path: Path) -> None:
    samples = random_samples(1, response=12)
    tape = tmp_path / "tape"
    write_tape(tape, samples)
    with store.TapeWriter(tape) as writer:
        key = store.open(tape).sequence("0-0.0").key
        writer.append(
            "tokens",
            {"engine": key.engine, "request": key.request, "sample": 0, "pass": 0, "start": -9}
            | {"n": 1, "ids": [[1]]},
        )
    checked = fsck(tape, repair=True)
    (finding,) = [f for f in checked.findings if f.code == "content"]
    assert finding.where == "a1a1a1a1.0-0.0" and not finding.repaired and not checked.clean
    assert codes(fsck(tape)) == ["content"]


def test_a_digest_that_is_not_that_of_the_tokens(tmp_path: Path) -> None:
    samples = random_samples(2, response=12)
    tape = tmp_path / "tape"
    write_tape(tape, samples, sealed=False)
    opened = store.open(tape)
    row = {**opened.table("sequences").slice(0, 1).to_pylist()[0], "digest": "0" * 32}
    with store.TapeWriter(tape) as writer:
        writer.id = "f" * 32  # shards are read in the order of their writers
        writer.append("sequences", {name: [value] for name, value in row.items()})
    store.seal(tape)
    found = [f for f in fsck(tape).findings if f.code == "content"]
    assert found and "digest" in found[0].text


def test_a_repair_touches_nothing_of_a_living_writer(tmp_path: Path) -> None:
    tape, writer = live_tape(tmp_path / "tape")
    (path,) = tape.glob(f"sequences/*{LIVE}")
    content = path.read_bytes()
    checked = fsck(tape, repair=True)
    assert checked.live == (f"sequences/{path.name}",)
    assert path.read_bytes() == content
    writer.append("events", {"writer": writer.id, "t_ns": 0, "kind": "notice"})
    writer.close()
    assert len(rows_of(tape)["sequences"]) == N + 3
    repair_twice(tape)


def _spoil(tape: Path) -> None:
    flip(shard(tape, "tokens"), 3000)
    shard(tape, "supports").unlink()
    writer = store.TapeWriter(tape)
    writer.append("events", {"writer": writer.id, "t_ns": 0, "kind": "notice"})
    writer.flush()
    writer.abandon()


def test_a_killed_repair_leaves_a_tape_that_repairs_fine(whole: Path, tmp_path: Path) -> None:
    expected = Path(shutil.copytree(whole, tmp_path / "expected"))
    _spoil(expected)
    begin = time.monotonic()
    fsck(expected, repair=True)
    took = time.monotonic() - begin
    rng = random.Random(0)
    killed = 0
    for run in range(10):
        tape = Path(shutil.copytree(whole, tmp_path / f"{run}"))
        _spoil(tape)
        pid = os.fork()
        if pid == 0:
            try:
                fsck(tape, repair=True)
            finally:
                os._exit(0)
        time.sleep(rng.uniform(0, took))
        os.kill(pid, signal.SIGKILL)
        killed += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        fsck(tape, repair=True)
        assert [f for f in fsck(tape).findings if f.code != "stray"] == []
        assert rows_of(tape) == rows_of(expected)
        reasons = [e.get("reason") for e in events_of(tape) if e]
        assert sorted(filter(None, reasons)) == ["damaged shard", "missing shard"]
        shutil.rmtree(tape)
    assert killed > 3


def test_one_damaged_block_of_a_compact_tape_costs_its_own_sequences(tmp_path: Path) -> None:
    source = tmp_path / "a"
    write_tape(source, random_samples(12, response=60))
    tape = tmp_path / "b"
    compact(source, tape)
    whole = {s.id: s.routes().ids.copy() for s in store.open(tape)}
    path = shard(tape, "routes")
    opened = store.open(tape)
    batches = opened.shard("routes", path.name).batches
    flip(path, path.stat().st_size // 2)
    lenient = store.open(tape, skip_damaged=True)
    right = wrong = 0
    for sequence in lenient:
        routes = sequence.routes()
        if routes is None or not routes.valid.any():
            wrong += 1
        else:
            assert (routes.ids == whole[sequence.id]).all()
            right += 1
    assert lenient.problems and path.name in lenient.problems[0]
    assert wrong >= 1 and (right >= 1) == (batches > 1)
    repair_twice(tape)


def test_the_command_line(tape: Path, capsys: Any) -> None:
    def run(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(["fsck", *args])
        said = capsys.readouterr()
        return int(caught.value.code or 0), said.out, said.err

    assert run(str(tape))[0] == 0
    flip(shard(tape, "tokens"), 3000)
    status, out, _ = run(str(tape))
    assert status == 1 and out.startswith("damaged") and "next: rolltape fsck --repair" in out
    status, out, _ = run(str(tape), "--json")
    assert status == 1 and json.loads(out)["clean"] is False
    assert run(str(tape), "--repair")[0] == 0
    assert run(str(tape))[0] == 0
    for arguments in ([], ["--repair"]):
        status, _, err = run(str(tape / "nothing"), *arguments)
        assert status == 2 and err.count("\n") == 1 and "is not a tape" in err


def test_a_report_is_refused(tmp_path: Path) -> None:
    report = store.create_report(tmp_path / "r", summary={})
    with pytest.raises(store.NotATapeError, match="is a report"):
        fsck(report)


def test_a_folder_that_is_a_link_is_refused(tape: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (tape / "tokens").rename(elsewhere)
    (tape / "tokens").symlink_to(elsewhere)
    before = sorted(elsewhere.iterdir())
    action: Callable[..., Any]
    for action in (store.open, store.seal, fsck, lambda t: fsck(t, repair=True)):
        with pytest.raises(store.StorageError, match="is a link to another folder"):
            action(tape)
    assert sorted(elsewhere.iterdir()) == before


def test_rows_without_a_sequence_are_a_problem_and_no_damage(tape: Path, capsys: Any) -> None:
    with store.TapeWriter(tape) as writer:
        row = {"engine": "e" * 32, "request": "lost", "sample": 0, "pass": 0, "start": 0, "n": 1}
        writer.append("tokens", {**row, "ids": [[1]]})
        writer.flush()
        assert fsck(tape).problems == (), "its sequence may follow"
        assert describe_tape(store.open(tape))["problems"] == []
    store.seal(tape)
    checked = fsck(tape)
    assert checked.sound and not checked.clean and checked.findings == ()
    (problem,) = checked.problems
    assert "1 sequences have no row in the sequences table" in problem
    assert describe_tape(store.open(tape))["problems"] == [problem]
    with pytest.raises(SystemExit) as caught:
        main(["fsck", str(tape)])
    assert not caught.value.code
    said = capsys.readouterr().out
    assert said.startswith(f"PROBLEM   {problem}\n") and "clean" not in said
    assert said.endswith(": no damage, 1 problem\n")
    with pytest.raises(SystemExit) as caught:
        main(["info", str(tape)])
    assert not caught.value.code
    assert f"PROBLEM     {problem}\n" in capsys.readouterr().out


def test_temporary_files_in_the_folder_of_the_damaged(tape: Path) -> None:
    (tape / "damaged").mkdir()
    name = shard(tape, "tokens").name
    strays = [f".tokens-{name}.{'b' * 32}", f".seal.json.{'b' * 32}"]
    for stray in strays:
        (tape / "damaged" / stray).write_bytes(b"x")
        os.utime(tape / "damaged" / stray, (time.time() - 600,) * 2)
    assert sorted(f.where for f in fsck(tape).findings) == sorted(f"damaged/{s}" for s in strays)
    repair_twice(tape)
    assert list((tape / "damaged").iterdir()) == []


def test_a_repaired_tape_can_be_recorded_over(tape: Path) -> None:
    flip(shard(tape, "tokens"), 3000)
    fsck(tape, repair=True)
    assert (tape / "damaged").is_dir()
    prepare_output(LocalPlace(tape), overwrite=True)
    assert not tape.exists()


def test_a_copy_that_was_cut_short_is_never_repaired_into_a_tape(tape: Path) -> None:
    (tape / "seal.json").unlink()
    put_json(LocalPlace(tape), COMPACTING, {})
    before = sorted(tape.rglob("*"))
    for repair in (False, True):
        checked = fsck(tape, repair=repair)
        (finding,) = checked.findings
        assert (finding.code, finding.where, finding.repaired) == ("partial", COMPACTING, False)
        assert "remove this copy" in finding.text and not checked.clean
    assert sorted(tape.rglob("*")) == before


class _Silent:
    """A file whose store fails to answer one call."""

    def __init__(self, file: Any, call: str) -> None:
        self._file, self._call = file, call

    def __getattr__(self, name: str) -> Any:
        if name == self._call:
            self._call = ""
            return self._fail
        return getattr(self._file, name)

    def _fail(self, *_: int) -> Any:
        raise OSError("no answer\nafter three attempts")


@pytest.mark.parametrize("call", ["read_at", "size"])
def test_a_store_that_does_not_answer_once_damages_nothing(
    tape: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    place = ObjectPlace(fs.LocalFileSystem(), str(tape), "x://tape")
    before = sorted(tape.rglob("*"))
    opened = ObjectPlace.open
    failed: list[str] = []

    def open_(self: ObjectPlace, name: str) -> Any:
        file = opened(self, name)
        if not name.startswith("tokens/") or failed:
            return file
        failed.append(name)
        return _Silent(file, call)

    monkeypatch.setattr(ObjectPlace, "open", open_)
    with pytest.raises(store.StorageError, match=r"x://tape/tokens/.*no answer"):
        fsck(place, repair=True)
    assert sorted(tape.rglob("*")) == before
