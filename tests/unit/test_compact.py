"""A compacted tape says what the tape said: every column, bit for bit, however it was cut."""

from __future__ import annotations

import importlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs as fs
import pytest
from hypothesis import HealthCheck, given, settings

from rolltape import store
from rolltape.store import DamagedShardError, TapeExistsError, UsageError
from rolltape.store.compact import compact
from rolltape.store.equality import differences
from rolltape.store.fsck import fsck
from rolltape.store.places import ObjectPlace
from rolltape.store.shards import COMPACTING
from tests import reference
from tests.builders import Sample, random_routes, random_samples, write_tape
from tests.random_tapes import Made, tapes

QUICK = settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def says(tape: store.Tape, made: Made) -> None:
    assert tape.keys() == made.keys
    for sequence in tape:
        found, wanted = reference.read(sequence), reference.expected(made, sequence.key)
        for name in wanted:
            assert found[name] == wanted[name], f"{name} of {sequence.id}"


@QUICK
@given(made=tapes())
def test_every_compacted_form_says_the_same(tmp_path_factory: Any, made: Made) -> None:
    folder = tmp_path_factory.mktemp("t")
    made.write(folder / "a")
    original = store.open(folder / "a")
    says(original, made)
    for source, routes, out in (
        ("a", "plain", "plain"),
        ("a", "packed", "packed"),
        ("plain", "packed", "plain-packed"),
        ("packed", "plain", "packed-plain"),
        ("packed", "packed", "packed-packed"),
    ):
        done = compact(folder / source, folder / out, routes=routes)
        copy = store.open(folder / out)
        assert done.checked and copy.uuid == original.uuid
        assert list(differences(original, copy)) == []
        says(copy, made)


def with_extras(path: Path, samples: list[Sample], **changes: Any) -> store.Tape:
    """A tape with rows in every table; `changes` are cells of the extra rows."""
    tape = write_tape(path, samples, sealed=False, facts={"writer": "f" * 32})
    key = tape.keys()[0]
    of = {"engine": key.engine, "request": key.request, "sample": key.sample, "pass": 0}
    with store.TapeWriter(path) as writer:
        writer.append("steps", {"engine": key.engine, "step": 0, "rows": changes.get("rows", 2)})
        event = {"writer": "f" * 32, "t_ns": 1, "kind": "notice"}
        writer.append("events", {**event, "detail": changes.get("detail", "{}")})
        number = changes.get("number", float("nan"))
        writer.append("annotations", {**of, "name": "reward", "number": number, "t_ns": 1})
        writer.append(
            "distributions",
            {
                **of,
                "start": 7,
                "n": 2,
                "k": 2,
                "ids": [[1, 2, 3, 4]],
                "logprobs": [[-0.5, -1.0, -0.5, -1.0]],
                "tail": [changes.get("tail", [-3.0, -np.inf])],
            },
        )
        orphan = {**of, "request": "orphan", "start": 0, "n": 1}
        writer.append("tokens", {**orphan, "ids": [[changes.get("orphan", 1)]]})
        if "kind" in changes:
            row = {"step": 99, "row": 0, "start": 0, "n": 1, "kind": changes["kind"]}
            writer.append("forwards", {**of, **row})
    store.seal(path)
    return store.open(path)


def everything() -> list[Sample]:
    samples = random_samples(2, sites=("norm",))
    for i, sample in enumerate(samples):
        rng = np.random.default_rng(i)
        sample.live = random_routes(rng, sample.length, (1, 2, 3), 16, 4)
        sample.raw.values[9] = np.nan
        sample.activations["norm"][4, 2] = 0.0
    return samples


def _flip(values: np.ndarray, *at: int) -> None:
    bits = values.view(np.uint32)
    bits[at] ^= 1


def _swap(ids: np.ndarray) -> None:
    ids[4, 1, :2] = ids[4, 1, 1::-1]


MUTATIONS: list[tuple[str, Callable[[Sample], object]]] = [
    ("tokens differs", lambda s: np.bitwise_xor(s.ids, 1, out=s.ids)),
    ("info differs", lambda s: setattr(s, "finish", "abort")),
    ("info differs", lambda s: setattr(s, "group", None)),
    ("loss_mask differs", lambda s: np.logical_not(s.loss_mask.values, out=s.loss_mask.values)),
    ("loss_mask differs", lambda s: s.loss_mask.valid.__setitem__(3, False)),
    ("raw differs", lambda s: _flip(s.raw.values, 9)),  # another NaN
    ("scaled differs", lambda s: _flip(s.scaled.values, 9)),
    ("processed differs", lambda s: s.processed.valid.__setitem__(9, False)),
    ("semantics differs", lambda s: s.semantics.update(temperature=0.8)),
    ("semantics differs", lambda s: s.semantics.update(temperature=None)),
    ("version differs", lambda s: s.version.__setitem__(9, 1)),
    ("used routes differs", lambda s: s.used.ids.__setitem__((4, 1, 2), 0)),
    ("used routes differs", lambda s: _swap(s.used.ids)),
    ("used routes differs", lambda s: s.used.valid.__setitem__((4, 1), False)),
    ("used routes differs", lambda s: _flip(s.used.weights, 4, 1, 2)),
    ("used routes differs", lambda s: setattr(s.used, "weights", None)),
    ("used routes differs", lambda s: _flip(s.used.margin, 4, 1)),
    ("used routes differs", lambda s: setattr(s.used, "margin", None)),
    ("used routes differs", lambda s: setattr(s.used, "missing", [])),
    ("live routes differs", lambda s: _flip(s.live.weights, 4, 1, 2)),
    ("live routes differs", lambda s: setattr(s, "live", None)),
    ("supports differs", lambda s: s.kept.__setitem__(8, np.array([5], np.uint32))),
    ("supports differs", lambda s: s.kept.__setitem__(8, None)),
    ("supports differs", lambda s: setattr(s, "kept", None)),
    ("activations differs", lambda s: s.activations["norm"].__setitem__((4, 2), -0.0)),
]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> store.Tape:
    return with_extras(tmp_path_factory.mktemp("original") / "a", everything())


def test_two_recordings_of_the_same_do_not_differ(tmp_path: Path, original: store.Tape) -> None:
    assert list(differences(original, with_extras(tmp_path / "b", everything()))) == []


@pytest.mark.parametrize(("says_", "change"), MUTATIONS)
def test_a_difference_is_named(
    tmp_path: Path, original: store.Tape, says_: str, change: Callable[[Sample], object]
) -> None:
    samples = everything()
    change(samples[1])
    found = list(differences(original, with_extras(tmp_path / "b", samples)))
    id_ = list(original)[1].id
    assert f"{id_}: {says_}" in found
    assert all(line.startswith(id_) for line in found)


@pytest.mark.parametrize(
    ("says_", "changes"),
    [
        ("table steps differs", {"rows": 3}),
        ("table events differs", {"detail": '{"a": 1}'}),
        ("a1a1a1a1.0-0.0: annotations differs", {"number": 1.0}),
        ("a1a1a1a1.0-0.0: distributions differs", {"tail": [-3.0, np.inf]}),
        ("a1a1a1a1.0-0.0: forwards differs", {"kind": "dummy"}),
        ("a1a1a1a1.orphan.0: tokens differs", {"orphan": 2}),
    ],
)
def test_a_difference_in_other_tables_is_named(
    tmp_path: Path, original: store.Tape, says_: str, changes: dict[str, Any]
) -> None:
    changed = with_extras(tmp_path / "b", everything(), **changes)
    assert list(differences(original, changed)) == [says_]


def test_a_sequence_that_is_gone_is_named(tmp_path: Path) -> None:
    a = write_tape(tmp_path / "a", random_samples(3))
    (line,) = differences(a, write_tape(tmp_path / "b", random_samples(2)))
    assert line.startswith("sequences: 3 and 2, 1 missing")


def test_sets_keep_the_sets_and_say_that_they_are_sets(tmp_path: Path) -> None:
    samples = everything()
    samples[0].used.valid[3, 1] = False
    a = with_extras(tmp_path / "a", samples)
    ordered = compact(tmp_path / "a", tmp_path / "b")
    sets = compact(tmp_path / "a", tmp_path / "c", sets=True)
    assert sets.checked and sets.route_bytes < ordered.route_bytes
    again = compact(tmp_path / "c", tmp_path / "d")  # packing again gives no order back
    assert again.checked
    for name in ("c", "d"):
        for one, other in zip(a, store.open(tmp_path / name), strict=True):
            for role in ("used", "live"):
                before, after = one.routes(role), other.routes(role)
                assert not after.order and after.weights is None
                np.testing.assert_array_equal(after.valid, before.valid)
                valid = before.valid
                np.testing.assert_array_equal(np.sort(before.ids, 2)[valid], after.ids[valid])
                np.testing.assert_array_equal(after.margin[valid], before.margin[valid])
    found = list(differences(a, store.open(tmp_path / "c")))
    assert "a1a1a1a1.0-0.0: used routes differs" in found
    with pytest.raises(UsageError, match="has sets of experts"):
        compact(tmp_path / "c", tmp_path / "e", routes="plain")
    assert not (tmp_path / "e").exists()


def group_of_two(*, floats: bool = False) -> list[Sample]:
    """Two samples of one long prompt, routed the same there."""
    samples = random_samples(2, prompt=400, response=4, layers=(0, 1), experts=64, k=4)
    first, second = (s.used for s in samples)
    for block in (first, second):
        if not floats:
            block.weights = block.margin = None
    second.ids[:400], second.valid[:400] = first.ids[:400], first.valid[:400]
    return samples


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("an expert", lambda s: s.used.ids.__setitem__((399, 1, 3), s.used.ids[399, 1, 3] ^ 1)),
        ("a validity", lambda s: s.used.valid.__setitem__((0, 0), False)),
        ("a token", lambda s: s.ids.__setitem__(0, s.ids[0] ^ 1)),
    ],
)
def test_routes_of_a_prompt_are_stored_once_only_if_they_are_the_same(
    tmp_path: Path, what: str, change: Callable[[Sample], object]
) -> None:
    samples = group_of_two()
    write_tape(tmp_path / "a", samples)
    shared = compact(tmp_path / "a", tmp_path / "shared")
    change(samples[1])
    write_tape(tmp_path / "b", samples)
    apart = compact(tmp_path / "b", tmp_path / "apart")
    assert (shared.shared, apart.shared) == (400, 0), what
    assert shared.route_bytes < apart.route_bytes
    for name, source in (("shared", "a"), ("apart", "b")):
        left, right = store.open(tmp_path / source), store.open(tmp_path / name)
        assert list(differences(left, right)) == []


def test_weights_and_margins_of_a_shared_prompt_are_each_sequences_own(tmp_path: Path) -> None:
    samples = group_of_two(floats=True)
    write_tape(tmp_path / "a", samples)
    assert compact(tmp_path / "a", tmp_path / "b").shared == 400
    for sample, sequence in zip(samples, store.open(tmp_path / "b"), strict=True):
        routes, valid = sequence.routes(), sample.used.valid
        np.testing.assert_array_equal(routes.weights[valid], sample.used.weights[valid])
        np.testing.assert_array_equal(routes.margin[valid], sample.used.margin[valid])


def test_sequences_with_weights_are_cut_into_batches_that_are_quickly_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolltape.store.compact_routes._FLOAT_BYTES", 1 << 14)
    samples = random_samples(4, response=[300, 20, 30, 500])
    a = write_tape(tmp_path / "a", samples, fragment=100)
    compact(tmp_path / "a", tmp_path / "b")
    tape = store.open(tmp_path / "b")
    sizes = [
        sum(len(cell.as_py() or b"") for name in ("weights", "margin") for cell in batch[name])
        for _, _, batch in tape.batches("routes")
    ]
    each = 4 * 3 * (4 + 1)  # bytes of one position
    assert max(sizes) <= 1 << 14 and sum(sizes) == each * sum(s.length for s in samples)
    assert list(differences(a, tape)) == []


def test_a_tape_that_was_added_to_after_it_was_sealed_is_compacted(tmp_path: Path) -> None:
    tape = write_tape(tmp_path / "a", random_samples(3, response=30), fragment=4)
    key = tape.keys()[0]
    with store.TapeWriter(tmp_path / "a") as writer:
        row = {"engine": key.engine, "request": key.request, "sample": key.sample}
        writer.append("events", {**row, "writer": "w", "t_ns": 1, "kind": "abort"})
    original = store.open(tmp_path / "a")
    assert all(sequence.tokens.valid.any() for sequence in original)
    assert compact(tmp_path / "a", tmp_path / "b").checked
    assert list(differences(original, store.open(tmp_path / "b"))) == []


def test_a_sequence_longer_than_a_block_is_the_same(tmp_path: Path) -> None:
    samples = random_samples(1, prompt=40_000, response=30_000, layers=(0,), experts=8, k=2)
    samples[0].used.weights = samples[0].used.margin = samples[0].version = None
    samples[0].used.missing = [[32_768, 1, None, "x"], [69_999, 2, None, "last"]]
    a = write_tape(tmp_path / "a", samples, fragment=5000)
    for routes in ("packed", "plain"):
        compact(tmp_path / "a", tmp_path / routes, routes=routes)
        copy = store.open(tmp_path / routes)
        assert list(differences(a, copy)) == []
        routes_there = next(iter(copy)).window(32_760, 32_770).routes()
        assert (32_768, 1, None, "x") in routes_there.missing


def test_a_copy_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tape(tmp_path / "a", random_samples(1))
    module = importlib.import_module("rolltape.store.compact")
    monkeypatch.setattr(module, "differences", lambda *_, **__: iter(["x: tokens differs"]))
    with pytest.raises(DamagedShardError, match="x: tokens differs"):
        compact(tmp_path / "a", tmp_path / "b")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def _killed_while_compacting(source: Path, out: Path | ObjectPlace, after: int) -> None:
    """Compact in a child that is killed at its n-th sequence, with all before on the disk."""
    module = importlib.import_module("rolltape.store.compact")
    pid = os.fork()
    if pid == 0:
        add, seen = module.RouteWriter.add, []

        def dying(self: Any, sequence: Any) -> None:
            seen.append(sequence)
            if len(seen) > after:
                self.flush()
                self._writer.flush()
                self._writer.close()
                os.kill(os.getpid(), signal.SIGKILL)
            add(self, sequence)

        module.RouteWriter.add = dying
        try:
            compact(source, out)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_a_killed_compaction_leaves_nothing_under_the_name(tmp_path: Path) -> None:
    write_tape(tmp_path / "a", random_samples(4, response=8))
    _killed_while_compacting(tmp_path / "a", tmp_path / "out" / "b", 2)
    (left,) = (tmp_path / "out").iterdir()
    assert re.fullmatch(r"\.b\.compact-[0-9a-f]{8}", left.name)
    assert [f.code for f in fsck(left, repair=True).findings] == ["partial"]
    compact(tmp_path / "a", tmp_path / "out" / "b")
    assert fsck(tmp_path / "out" / "b").findings == ()
    assert sorted((tmp_path / "out").iterdir()) == [left, tmp_path / "out" / "b"]


def test_a_killed_compaction_into_an_object_store_is_no_tape(tmp_path: Path) -> None:
    write_tape(tmp_path / "a", random_samples(4, response=8))
    place = ObjectPlace(fs.LocalFileSystem(), str(tmp_path / "b"), "x://b")
    _killed_while_compacting(tmp_path / "a", place, 2)
    assert place.files("routes"), "so half of it is there"
    checked = fsck(place, repair=True)
    assert [f.code for f in checked.findings] == ["partial"] and not checked.clean
    assert not place.exists("seal.json")
    other = ObjectPlace(fs.LocalFileSystem(), str(tmp_path / "c"), "x://c")
    compact(tmp_path / "a", other)
    assert fsck(other).findings == () and not other.exists(COMPACTING)


def test_a_copy_may_go_to_an_empty_folder(tmp_path: Path) -> None:
    write_tape(tmp_path / "a", random_samples(1))
    (tmp_path / "b").mkdir()
    compact(tmp_path / "a", tmp_path / "b")
    assert fsck(tmp_path / "b").clean and len(list(tmp_path.iterdir())) == 2


def test_what_appears_at_the_name_meanwhile_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tape(tmp_path / "a", random_samples(1))
    module = importlib.import_module("rolltape.store.compact")

    def meanwhile(*_: Any, **__: Any) -> Iterator[str]:
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "precious").write_text("x")
        return iter(())

    monkeypatch.setattr(module, "differences", meanwhile)
    with pytest.raises(TapeExistsError, match="b is not empty"):
        compact(tmp_path / "a", tmp_path / "b")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]
    assert (tmp_path / "b" / "precious").read_text() == "x"


def test_a_tape_that_is_being_written_or_a_taken_name_is_refused(tmp_path: Path) -> None:
    write_tape(tmp_path / "a", random_samples(1), sealed=False)
    with pytest.raises(UsageError, match="is not sealed"):
        compact(tmp_path / "a", tmp_path / "b")
    store.seal(tmp_path / "a")
    compact(tmp_path / "a", tmp_path / "b")
    with pytest.raises(TapeExistsError):
        compact(tmp_path / "a", tmp_path / "b")
    assert len(store.open(tmp_path / "b")) == 1


def test_sequences_opened_at_an_unknown_time_keep_their_order(tmp_path: Path) -> None:
    root = store.create_tape(tmp_path / "a", role="rollout")
    with store.TapeWriter(root) as writer:
        for request in ("9", "1", "5"):
            row = {"engine": "e", "request": request, "sample": 0, "pass": 0}
            writer.append("sequences", {**row, "prompt_len": 1, "length": 1, "finish": "stop"})
    store.seal(root)
    compact(root, tmp_path / "b")
    assert [k.request for k in store.open(tmp_path / "b").sequence_rows] == ["9", "1", "5"]
