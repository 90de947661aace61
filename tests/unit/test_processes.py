"""One engine in several processes: rows that meet only in the reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from rolltape import store
from rolltape.store import codecs, token_digest
from rolltape.store.cli import info
from rolltape.store.compact import compact
from rolltape.store.describe import describe_tape
from rolltape.store.equality import differences
from rolltape.store.fsck import fsck
from rolltape.store.keys import Key
from rolltape.store.sequences import Tape

ENGINE = "c3" * 16
KEY = {"engine": ENGINE, "request": "0", "sample": 0, "pass": 0}
IDS = np.arange(100, 110, dtype=np.uint32)


class Writers:
    """Writers of one tape with names in any order that a test wants."""

    def __init__(self, path: Path, names: str) -> None:
        self.path = store.create_tape(path, role="rollout")
        self._by_name: dict[str, store.TapeWriter] = {}
        for name in names:
            self._by_name[name] = writer = store.TapeWriter(self.path)
            writer.id = name * 32

    def __call__(self, name: str, table: str, /, **columns: Any) -> None:
        self._by_name[name].append(table, columns)

    def open(self, *, sealed: bool = True) -> Tape:
        for writer in self._by_name.values():
            writer.close()
        if sealed:
            store.seal(self.path)
        return store.open(self.path)


def closing(length: int = 6, prompt: int = 2, **more: Any) -> dict[str, Any]:
    return {
        **KEY,
        "prompt_len": prompt,
        "length": length,
        "finish": "stop",
        "digest": token_digest(prompt, IDS[:length]),
        "closed_ns": 20,
        **more,
    }


def tokens(start: int, n: int) -> dict[str, Any]:
    return {
        **KEY,
        "start": start,
        "n": n,
        "ids": [IDS[start : start + n]],
        "loss_mask": [np.arange(start, start + n) >= 2],
        "raw": [np.full(n, -1.0, np.float32)],
    }


def routes(
    start: int, n: int, value: int, *, step: int | None, layers: tuple[int, ...] = (0, 1)
) -> dict[str, Any]:
    ids = np.full((n, len(layers), 1), value)
    return {
        **KEY,
        "start": start,
        "n": n,
        "role": "used",
        "step": step,
        "layers": [list(layers)],
        "k": 1,
        "num_experts": 8,
        "encoding": "plain",
        "ids": [codecs.encode_plain(ids, 8)],
        "weights": [codecs.encode_floats(np.full(ids.shape, value / 8))],
    }


def same_after_compacting(tape: Tape, out: Path) -> Tape:
    for how in ("packed", "plain"):
        compact(tape.path, out / how, routes=how)
        assert list(differences(tape, store.open(out / how))) == []
    return store.open(out / "packed")


def clean(tape: Tape) -> tuple[str, ...]:
    checked = fsck(tape.path)
    assert checked.clean, checked.findings
    return checked.notes


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_an_opening_and_a_closing_row_of_two_writers_are_one(tmp_path: Path, names: str) -> None:
    front, core = list(names)
    write = Writers(tmp_path / "t", names)
    sampling = json.dumps({"top_k": 2})
    opening = {"prompt_len": 2, "finish": "open", "opened_ns": 7, "external": "chat-1"}
    write(core, "sequences", **KEY, **opening, sampling=sampling)
    write(front, "sequences", **closing(group="g"))
    write(front, "tokens", **tokens(0, 6))
    tape = write.open()
    (sequence,) = tape
    info = sequence.info
    assert (sequence.length, sequence.finish, info["opened_ns"]) == (6, "stop", 7)
    assert (info["external"], info["group"], info["sampling"]) == ("chat-1", "g", {"top_k": 2})
    assert tape.sequence("chat-1").key == sequence.key
    same_after_compacting(tape, tmp_path)


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_the_closing_row_that_was_written_last_counts(tmp_path: Path, names: str) -> None:
    front, core = list(names)
    write = Writers(tmp_path / "t", names)
    write(core, "sequences", **closing(5, finish="abort", closed_ns=10))
    write(front, "sequences", **closing(6, closed_ns=11))
    write(core, "tokens", **tokens(0, 6))
    (sequence,) = write.open()
    assert (sequence.length, sequence.finish) == (6, "stop")


def surplus_tape(path: Path) -> Tape:
    """Eight positions were run, six belong to the sequence."""
    write = Writers(path, "ab")
    write("a", "sequences", **closing(6))
    write("b", "tokens", **tokens(0, 4))
    write("b", "tokens", **tokens(4, 4))
    write("b", "tokens", **tokens(8, 1))
    write("b", "routes", **routes(0, 8, 3, step=0))
    write(
        "b",
        "supports",
        **KEY,
        start=2,
        n=6,
        derived=False,
        state=[[1] * 6],
        counts=[[1, 1, 1, 1, 1, 2]],
        ids=[[1, 2, 3, 4, 5, 6, 7]],
    )
    write(
        "b",
        "distributions",
        **KEY,
        start=2,
        n=6,
        k=1,
        ids=[[1] * 6],
        logprobs=[[-0.5] * 6],
        tail=[[-1.0] * 6],
    )
    values = codecs.encode_floats(np.ones((8, 2)))
    write(
        "b",
        "activations",
        **KEY,
        start=0,
        n=8,
        site="norm",
        dtype="float32",
        width=2,
        data=[values],
    )
    steps = range(7)
    write(
        "b",
        "forwards",
        **KEY,
        step=list(steps),
        row=0,
        start=[0, *range(2, 8)],
        n=[2, *[1] * 6],
        kind=["prefill", *["decode"] * 6],
        weight_version=[0, 0, 0, 0, 1, 1, 1],
    )
    return write.open()


def test_what_an_asynchronous_engine_ran_too_much_is_cut_and_said(tmp_path: Path) -> None:
    tape = surplus_tape(tmp_path / "t")
    (sequence,) = tape
    assert sequence.tokens.values.tolist() == IDS[:6].tolist() and sequence.tokens.valid.all()
    used, supports, top = sequence.routes(), sequence.supports(), sequence.distributions()
    assert used is not None and used.ids.shape == (6, 2, 1) and used.valid.all()
    assert supports is not None and supports.ids.tolist() == [1, 2, 3, 4]
    assert top is not None and top.valid.tolist() == [False] * 2 + [True] * 4
    ((start, _, data),) = sequence.activations()["norm"]
    assert (start, data.shape) == (0, (6, 2))
    assert sequence.weight_version.values[2:].tolist() == [0, 0, 0, 0]
    (facts,) = tape.rollups().to_pylist()
    wanted = {"length": 6, "loss_tokens": 4, "raw_count": 4, "raw_sum": -4.0, "routed": 6}
    wanted |= {"route_rows": 12, "explicit": 4, "kept_sum": 4, "kept_max": 1, "version_max": 0}
    assert {name: facts[name] for name in wanted} == wanted
    (row,) = tape.to_table(columns=["ids", "raw"]).to_pylist()
    assert row["ids"] == IDS[:6].tolist() and len(row["raw"]) == 6
    said = describe_tape(tape)
    assert said["surplus"]["tokens"] == {"sequences": 1, "positions": 3}
    assert said["surplus"]["routes"] == {"sequences": 1, "positions": 2}
    assert said["coverage"]["supports"]["explicit"] == 4 and not said["damaged"]
    notes = clean(tape)
    assert any("tokens: 1 sequences have fragments beyond their end, 3" in n for n in notes)
    compacted = same_after_compacting(tape, tmp_path)
    assert describe_tape(compacted)["surplus"].keys() <= {
        "forwards",
        "activations",
        "distributions",
    }


def test_a_tape_without_surplus_has_nothing_to_say(tmp_path: Path) -> None:
    write = Writers(tmp_path / "t", "a")
    write("a", "sequences", **closing(6))
    write("a", "tokens", **tokens(0, 6))
    tape = write.open()
    assert describe_tape(tape)["surplus"] == {} and clean(tape) == ()


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_the_first_forward_is_the_record_whoever_wrote_it(tmp_path: Path, names: str) -> None:
    one, other = list(names)
    write = Writers(tmp_path / "t", names)
    write(one, "sequences", **closing(6))
    write(one, "tokens", **tokens(0, 6))
    # preempted after step 4, run again in steps 9 and 12 by the other process
    write(other, "routes", **routes(0, 3, 5, step=9))
    write(other, "routes", **routes(2, 1, 6, step=12))
    write(one, "routes", **routes(0, 2, 1, step=1))
    write(one, "routes", **routes(2, 3, 2, step=3))
    tape = write.open()
    for opened in (tape, same_after_compacting(tape, tmp_path)):
        (sequence,) = opened
        passes = [sequence.routes(again=n) for n in range(4)]
        seen = []
        for found in passes:
            columns = [] if found is None else found.ids[:, 0, 0].tolist()
            valid = [] if found is None else found.valid[:, 0].tolist()
            seen.append([c if ok else None for c, ok in zip(columns, valid, strict=True)])
        assert seen == [
            [1, 1, 2, 2, 2, None],
            [5, 5, 5, None, None, None],
            [None, None, 6, None, None, None],
            [],
        ]
        again = passes[1]
        assert again is not None and again.weights is not None
        assert again.weights[0].tolist() == [[5 / 8], [5 / 8]]
    (facts,) = tape.rollups().to_pylist()
    assert facts["route_rows"] == 10
    clean(tape)


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_stages_of_a_pipeline_are_merged_by_layer(tmp_path: Path, names: str) -> None:
    first, last = list(names)
    write = Writers(tmp_path / "t", names)
    write(first, "sequences", **closing(6))
    write(first, "tokens", **tokens(0, 6))
    write(first, "routes", **routes(0, 5, 1, step=0, layers=(0, 1)))
    write(last, "routes", **routes(0, 4, 7, step=0, layers=(2, 3)))
    tape = write.open()
    for opened in (tape, same_after_compacting(tape, tmp_path)):
        (sequence,) = opened
        found = sequence.routes()
        assert found is not None and found.layers == (0, 1, 2, 3)
        assert found.valid.sum(0).tolist() == [5, 5, 4, 4]
        assert found.ids[0, :, 0].tolist() == [1, 1, 7, 7]
        assert found.weights is not None
        assert found.weights[3, :, 0].tolist() == [1 / 8, 1 / 8, 7 / 8, 7 / 8]
        chosen = sequence.routes(layers=[3, 0])
        assert chosen is not None and chosen.ids[0, :, 0].tolist() == [7, 1]
        assert sequence.routes(again=1) is None
    (facts,) = tape.rollups().to_pylist()
    assert (facts["routed"], facts["route_rows"]) == (5, 18)
    clean(tape)


def process(name: str | None, **more: Any) -> dict[str, Any]:
    row = {"engine": ENGINE, "role": "rollout", "adapter": "double", "process": name, **more}
    for column in ("ranks", "requested", "effective", "versions"):
        if column in row:
            row[column] = json.dumps(row[column])
    return row


def several(path: Path) -> Tape:
    write = Writers(path, "abc")
    front = {"tp": 2, "attention": "flash"}
    write("a", "engines", writer="a" * 32, **process("frontend", pid=1, requested=front))
    for rank, name in enumerate("bc"):
        write(
            name,
            "engines",
            writer=name * 32,
            **process(
                "worker",
                pid=2 + rank,
                ranks={"tp": [rank, 2]},
                vocab_size=70,
                moe_layers=[[1]],
                effective={"attention": "flash", "threads": rank},
                started_ns=50 - rank,
            ),
        )
    # what it knows only after it has loaded the weights
    write("b", "engines", writer="b" * 32, **process("worker", pid=2, dtype="bfloat16"))
    return write.open()


def test_the_rows_of_an_engine_are_one_and_differences_stay_visible(tmp_path: Path) -> None:
    tape = several(tmp_path / "t")
    assert sorted(row["pid"] for row in tape.processes) == [1, 2, 3]
    (engine,) = tape.engines.values()
    assert (engine["vocab_size"], engine["moe_layers"], engine["dtype"]) == (70, [1], "bfloat16")
    assert engine["requested"] == {"tp": 2, "attention": "flash"}
    assert engine["effective"] == {"attention": "flash", "threads": 0}
    assert (engine["started_ns"], engine["pid"], engine["ranks"]) == (49, None, {})
    threads = {"worker tp 0/2 (2)": 0, "worker tp 1/2 (3)": 1}
    assert engine["disagreements"] == {"effective.threads": threads}
    assert any("disagree on effective.threads" in note for note in clean(tape))
    said = said_by_info(tape)
    assert "processes 3: 1 frontend, 2 worker" in said
    assert "DISAGREE  effective.threads: worker tp 0/2 (2): 0" in said


def said_by_info(tape: Tape) -> str:
    result = CliRunner().invoke(info, [str(tape.path)], standalone_mode=False)
    assert result.exception is None, result.output
    return str(result.output)


# -- annotations by the id that the caller knows ------------------------------------------


def annotated(path: Path, *rows: tuple[str, int, str, float | str]) -> Tape:
    """Request r0 has one sample, r1 two, and two engines had a request r2."""
    write = Writers(path, "ab")
    one, other = ENGINE, "d4" * 16
    known = [("r0", "0", 0, one), ("r1", "1", 0, one), ("r1", "1", 1, one)]
    known += [("r2", "2", 0, one), ("r2", "2", 0, other)]
    for number, (external, request, sample, engine) in enumerate(known):
        row = closing(6, request=request, sample=sample, engine=engine, digest=None)
        row |= {"external": external, "opened_ns": number, "group": f"p{number}"}
        write("a", "sequences", **row)
    for t, (request, sample, name, value) in enumerate(rows):
        cell = {"text": value} if isinstance(value, str) else {"number": value}
        key = {"engine": "", "request": request, "sample": sample, "pass": 0}
        write("b", "annotations", **key, name=name, **cell, t_ns=t)
    return write.open()


def test_annotations_find_their_sequence(tmp_path: Path) -> None:
    tape = annotated(
        tmp_path / "t",
        ("r0", -1, "reward", 0.25),
        ("r0", 0, "reward", 0.5),
        ("r1", 1, "reward", 2.0),
        ("r1", -1, "group", "prompt-1"),
        ("r1", -1, "turn", 3.0),
    )
    r0, first, second, *others = tape
    assert r0.annotations == {"reward": 0.5}
    assert first.annotations == {"group": "prompt-1", "turn": 3.0}
    assert second.annotations == {"group": "prompt-1", "turn": 3.0, "reward": 2.0}
    assert [s.annotations for s in others] == [{}, {}]
    assert (second.info["group"], second.info["group_derived"]) == ("prompt-1", False)
    assert second.info["turn"] == 3
    groups = ["p0", "prompt-1", "prompt-1", "p3", "p4"]
    assert tape.rollups().column("group").to_pylist() == groups
    assert store.open(tape.path).index.rollups is not None  # stored ones have it, too
    same_after_compacting(tape, tmp_path)
    assert clean(tape) == ()


def test_annotations_that_could_mean_several_mean_none(tmp_path: Path) -> None:
    tape = annotated(
        tmp_path / "t",
        ("r1", -1, "reward", 1.0),
        ("r1", -1, "group", "prompt-1"),
        ("r1", 7, "reward", 1.0),
        ("r2", 0, "reward", 1.0),
        ("nobody", -1, "reward", 1.0),
    )
    assert all("reward" not in sequence.annotations for sequence in tape)
    said = describe_tape(tape)["annotations"]
    assert said["by_name"] == {"reward": 4, "group": 1}
    assert (said["unmatched"], said["ambiguous"]) == (2, 2)
    found = {(u["request"], u["sample"]): u["reason"] for u in said["unresolved"]}
    assert found == {
        ("r1", None): "ambiguous",
        ("r1", 7): "unmatched",
        ("r2", 0): "ambiguous",
        ("nobody", None): "unmatched",
    }
    notes = clean(tape)
    assert len(notes) == 2 and "2 belong to no sequence" in notes[0]
    text = said_by_info(tape)
    assert "2 unmatched" in text and "2 ambiguous" in text


def test_a_group_annotated_by_key_overrides_the_derived_one(tmp_path: Path) -> None:
    write = Writers(tmp_path / "t", "a")
    write("a", "sequences", **closing(6, group="pabc", group_derived=True))
    write("a", "annotations", **KEY, name="group", text="mine", t_ns=1)
    tape = write.open()
    (sequence,) = tape
    assert sequence.key == Key(ENGINE, "0")
    assert (sequence.info["group"], sequence.info["group_derived"]) == ("mine", False)


def test_tactics_are_counted_and_those_unseen_are_listed(tmp_path: Path) -> None:
    write = Writers(tmp_path / "t", "a")
    base = {"engine": ENGINE, "writer": "a" * 32, "t_ns": 1, "key": "{}"}
    write(
        "a",
        "tactics",
        **base,
        tuner=["triton", "triton", "cublaslt"],
        op=["mm", "mm", "gemm"],
        source=["chosen", "cached", "unrecorded"],
        reason=[None, None, "not said"],
    )
    tape = write.open()
    said = describe_tape(tape)["tactics"]
    assert said["rows"] == 3 and said["by_tuner"]["triton"] == {"cached": 1, "chosen": 1}
    assert said["unrecorded"] == [{"tuner": "cublaslt", "op": "gemm", "reason": "not said"}]
    same_after_compacting(tape, tmp_path)
