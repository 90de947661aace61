"""Rollouts on the double of TensorRT-LLM, recorded from outside.

Every recorded value is compared with the double's own log, which is made of the tensors that its
model ran on and knows nothing of the recorder.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("pydantic", reason="pydantic is not installed")

import rolltape  # noqa: E402
from rolltape.recorder.doctor import bindings  # noqa: E402
from rolltape.recorder.gating import prompt_key, wants  # noqa: E402
from rolltape.recorder.injection import pth_file  # noqa: E402
from rolltape.recorder.options import Options  # noqa: E402
from rolltape.store.fsck import fsck  # noqa: E402
from rolltape.store.schema import SUPPORT_FULL, SUPPORT_UNRECORDED  # noqa: E402

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
DOUBLES = str(ROOT / "tests" / "doubles")
JOB = Path(__file__).with_name("tensorrt_llm_job.py")
VOCABULARY, EXPERTS, LAYERS = 97, 8, [1, 2, 3]  # layer 0 is dense
#: What arrives and what is drawn does not depend on timing.
STEADY = ("plain", "overlap", "graphs", "reuse", "preempt", "peers", "broken")
TIMED = ("inflight", "failed", "cancel", "routed")


@pytest.fixture(scope="module", autouse=True)
def double() -> Iterator[None]:
    """`tensorrt_llm` is the double while a test of this module runs: its log is unpickled."""
    sys.path.insert(0, DOUBLES)
    importlib.invalidate_caches()
    yield
    sys.path.remove(DOUBLES)
    for name in [n for n in sys.modules if n.partition(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([DOUBLES, str(ROOT)])
    env = {k: v for k, v in os.environ.items() if not k.startswith(("ROLLTAPE_", "TLLM_"))}
    return {**env, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}


def run(
    folder: Path,
    *scenarios: str,
    record: tuple[str, ...] | None = (),
    python: str = sys.executable,
    script: Path = JOB,
    **env: str,
) -> tuple[Any, dict[str, Any]]:
    """(tape, what the job wrote) of a job; without a recording if `record` is None."""
    tape, outputs = folder / "tape", folder / "outputs"
    command = [python, str(script), str(outputs), *scenarios]
    if record is not None:
        launcher = [python, "-m", "rolltape", "record", *record, "-o", str(tape), "--"]
        command = [*launcher, *command]
    done = subprocess.run(command, env=environment(**env), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    with outputs.open("rb") as file:
        return (None if record is None else rolltape.open(tape)), pickle.load(file)


@dataclass(frozen=True)
class Run:
    """One scenario: its engine on the tape, what callers got, what the double noted."""

    tape: Any
    engine: str
    answers: list[dict[str, Any]]
    truth: Any
    notes: dict[str, Any]

    @property
    def sequences(self) -> dict[tuple[int, int], Any]:
        """Those on the tape, by client id and sample."""
        mine = (s for s in self.tape if s.key.engine == self.engine)
        return {(int(s.key.request), s.key.sample): s for s in mine}

    def rows(self, table: str) -> list[dict[str, Any]]:
        return [row for row in self.tape.rows(table) if row["engine"] == self.engine]

    def events(self, kind: str) -> list[dict[str, Any]]:
        found = [row for row in self.rows("events") if row["kind"] == kind]
        return [{**row, "detail": json.loads(row["detail"])} for row in found]

    @property
    def served(self) -> list[Any]:
        """Forwards with something else than padding."""
        return [s for s in self.truth.served() if not all(row.dummy for row in s.rows)]


def runs(tape: Any, found: dict[str, Any]) -> dict[str, Run]:
    """By name; engines were started in the order of the scenarios."""
    front = [row for row in tape.rows("engines") if row["process"] == "frontend"]
    engines = [row["engine"] for row in sorted(front, key=lambda row: row["started_ns"])]
    assert len(engines) == len(set(engines)) == len(found["scenarios"])
    return {
        name: Run(tape, engine, part["answers"], part["truth"], found["notes"])
        for engine, (name, part) in zip(engines, found["scenarios"].items(), strict=True)
    }


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    return runs(*run(tmp_path_factory.mktemp("job"), *STEADY, *TIMED))


@pytest.fixture(scope="module")
def unrecorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What callers get without a recording."""
    found = run(tmp_path_factory.mktemp("plain"), *STEADY, record=None)[1]
    return {name: part["answers"] for name, part in found["scenarios"].items()}


# -- everything against the log -----------------------------------------------------------


def check_schedule(run: Run, versions: dict[int, int] | None = None) -> None:
    """Steps and their rows, padding, graphs, weight versions.

    Args:
        run: a scenario.
        versions: contents of the weights, as the log counts them -> version on the tape. By
            default they are versions in the order in which they first ran.
    """
    if versions is None:
        contents = list(dict.fromkeys(step.weights for step in run.served))
        versions = {content: version for version, content in enumerate(contents)}
    steps = sorted(run.rows("steps"), key=lambda row: row["step"])
    assert len(steps) == len(run.served) > 0
    forwards: dict[int, list[dict[str, Any]]] = {}
    for row in run.rows("forwards"):
        if row["kind"] != "cached":
            forwards.setdefault(row["step"], []).append(row)
    for step, truth in zip(steps, run.served, strict=True):
        real = [row for row in truth.rows if not row.dummy]
        assert step["tokens"] == sum(row.n for row in real)
        assert step["padded_tokens"] == truth.tokens - step["tokens"]
        assert step["graph"] == (None if truth.graph is None else str(truth.graph))
        rows = sorted(forwards[step["step"]], key=lambda row: row["row"])
        assert [(int(r["request"]), r["sample"], r["start"], r["n"]) for r in rows] == [
            (row.client, row.sample, row.start, row.n) for row in real
        ]
        assert {row["weight_version"] for row in rows} == {versions[truth.weights]}


def check_tokens(run: Run) -> int:
    """Tokens, logprobs and kept sets; the number of tokens."""
    count = 0
    assert run.sequences
    for (client, sample), sequence in run.sequences.items():
        drawn = run.truth.drawn(client, sample)
        first = sequence.prompt_len
        assert [d.position for d in drawn] == list(range(first, sequence.length))
        assert sequence.tokens.valid.all()
        assert sequence.tokens.values[first:].tolist() == [d.token for d in drawn]
        count += len(drawn)
        how, supports = sequence.info["sampling"], sequence.supports()
        kind = "processed" if how["logprobs_mode"] == "processed" else "raw"
        asked = "logprobs" in how
        for name in ("raw", "processed"):
            values = sequence.logprob(name)
            there = values.valid[first:]
            assert there.all() if asked and name == kind else not there.any()
            if asked and name == kind:
                expected = np.array([getattr(d, kind) for d in drawn], np.float32)
                assert (values.values[first:] == expected).all()
        cuts = {"top_k", "top_p", "min_p"} & set(how)
        for draw in drawn:
            state = supports.state[draw.position]
            if how["greedy"]:
                kept = supports.at(draw.position)
                assert tuple(kept) == draw.kept == (draw.token,)
            elif cuts:  # the engine does not tell
                assert state == SUPPORT_UNRECORDED
            else:
                assert (state, len(draw.kept)) == (SUPPORT_FULL, VOCABULARY)
    return count


def check_routes(run: Run) -> int:
    """Routes of every forward over every position; the number of rows."""
    count = 0
    for (client, sample), sequence in run.sequences.items():
        expected = run.truth.routes(client, sample)
        most = max((len(found) for found in expected.values()), default=0)
        for again in range(most):
            routes = sequence.routes(again=again)
            assert list(routes.layers) == LAYERS and routes.num_experts == EXPERTS
            for position in range(sequence.length):
                here = expected.get(position, ())
                assert bool(routes.valid[position].all()) == (len(here) > again)
                assert bool(routes.valid[position].any()) == (len(here) > again)
                if len(here) > again:
                    assert (routes.ids[position] == here[again][1].numpy()).all()
                    count += 1
    return count


@pytest.mark.parametrize(
    "name", ["plain", "overlap", "graphs", "reuse", "preempt", "peers", "inflight", "cancel"]
)
def test_everything_is_what_the_engine_did(recorded: dict[str, Run], name: str) -> None:
    run = recorded[name]
    check_schedule(run)
    assert check_tokens(run) > 10
    assert check_routes(run) > 20


def test_callers_get_what_they_get_without_recording(
    recorded: dict[str, Run], unrecorded: dict[str, Any]
) -> None:
    for name in STEADY:
        assert recorded[name].answers == unrecorded[name], name


def test_the_tape_is_whole(recorded: dict[str, Run]) -> None:
    tape = recorded["plain"].tape
    assert [f for f in fsck(tape.place).findings if f.severity == "error"] == []
    assert not [row for row in tape.rows("events") if row["kind"] == "hook_error"]
    assert {row["process"] for row in tape.rows("engines")} == {"frontend", "worker"}


# -- what each scenario is about ----------------------------------------------------------


def test_sequences_end_as_callers_were_told(recorded: dict[str, Run]) -> None:
    for name in STEADY[:-1]:
        run = recorded[name]
        for answer in run.answers:
            for sample, output in enumerate(answer["outputs"]):
                sequence = run.sequences[answer["client"], sample]
                ids = [*answer["prompt"], *output["ids"]]
                assert sequence.tokens.values.tolist() == ids
                assert output["finish"] in (sequence.finish, None)
                ended = "stop" if ids[-1] == 2 or len(output["ids"]) == 4 else "length"
                assert sequence.finish == ended
                kind = sequence.info["sampling"]["logprobs_mode"]
                values = sequence.logprob(kind).values[len(answer["prompt"]) :]
                told = np.array(output["logprobs"], np.float32)
                assert (values[: len(told)] == told).all()


def test_samples_of_one_request_are_a_group(recorded: dict[str, Run]) -> None:
    run = recorded["plain"]
    three = [s for s in run.sequences.values() if s.info["sampling"].get("n") == 3]
    assert [s.key.sample for s in three] == [0, 1, 2]
    assert len({s.info["group"] for s in three}) == 1 and not three[0].info["group_derived"]
    assert len({tuple(s.tokens.values) for s in three}) == 3


def test_chunks_and_surplus_forwards(recorded: dict[str, Run]) -> None:
    run = recorded["overlap"]
    chunks = [r for r in run.rows("forwards") if r["kind"] == "prefill" and r["start"] > 0]
    assert len(chunks) >= 3 and max(row["tokens"] for row in run.rows("steps")) > 6
    stopped = run.sequences[run.answers[-3]["client"], 0]
    assert (stopped.finish, stopped.length) == ("stop", 9 + 4)
    # its end was not foreseen: the forward over its last token was on its way already
    assert stopped.length - 1 in run.truth.routes(int(stopped.key.request))
    assert stopped.routes().valid[-1].all()


def test_graphs_pad_their_batches(recorded: dict[str, Run]) -> None:
    steps = recorded["graphs"].rows("steps")
    replayed = [row for row in steps if row["graph"]]
    assert {row["graph"] for row in replayed} >= {"(4, 0, False)", "(1, 0, False)"}
    assert {row["padded_tokens"] for row in replayed} >= {0, 1}
    assert all(row["kind"] == "decode" for row in replayed)


def test_tactics_of_eager_calls_and_of_captures(recorded: dict[str, Run]) -> None:
    run = recorded["graphs"]
    rows = [row for row in run.tape.rows("tactics") if row["tuner"] == "tensorrt_llm"]
    assert {row["op"] for row in rows} == {"trtllm::double_fused_moe"}
    captured = {row["graph"]: row for row in rows if row["graph"]}
    assert set(captured) == {f"({size}, 0, False)" for size in (1, 2, 4, 8)}
    tactics = run.notes["tactics"]
    assert set(tactics.values()) == {0, 1}
    for key, row in captured.items():
        tokens = json.loads(row["key"])["shapes"][0][0]
        assert key == f"({tokens}, 0, False)" and row["tactic"] == repr(tactics[tokens])
    eager = [row for row in rows if not row["graph"] and "shapes" in row["key"]]
    after = [row for row in eager if row["source"] != "fallback"]
    assert {row["implementation"] for row in after} == {"Experts"} and len(after) > 5
    for row in after:
        key = json.loads(row["key"])
        assert row["tactic"] == repr(tactics[key["profile"][0][0]])


def test_a_reused_prefix_has_no_routes_of_its_own(recorded: dict[str, Run]) -> None:
    run = recorded["reuse"]
    fresh, again, other = (run.sequences[a["client"], 0] for a in run.answers)
    cached = [r for r in run.rows("forwards") if r["kind"] == "cached"]
    lengths = {int(r["request"]): r["n"] for r in cached}
    assert lengths == {a["client"]: a["cached"] for a in run.answers[1:]}
    assert fresh.routes().valid[: fresh.length - 1].all()
    for sequence in (again, other):
        n = lengths[int(sequence.key.request)]
        assert not sequence.routes().valid[:n].any()
        assert {reason for *_, reason in sequence.routes().missing} == {"cached"}


def test_prompt_logprobs_only_where_they_can_be_placed(recorded: dict[str, Run]) -> None:
    run = recorded["reuse"]
    fresh, *reused = (run.sequences[a["client"], 0] for a in run.answers)
    raw, first = fresh.logprob("raw"), fresh.prompt_len
    assert not raw.valid[0] and raw.valid[1:first].all()
    told = run.answers[0]["prompt_logprobs"]
    expected = [told[p - 1][int(fresh.tokens.values[p])].logprob for p in range(1, first)]
    assert (raw.values[1:first] == np.array(expected, np.float32)).all()
    assert not any(s.logprob("raw").valid[: s.prompt_len].any() for s in reused)
    assert len([e for e in run.events("gap") if "not placed" in e["detail"]["reason"]]) == 2


def test_a_preempted_request_is_forwarded_again(recorded: dict[str, Run]) -> None:
    run = recorded["preempt"]
    paused = [name for kind, name in run.truth.events if kind == "pause"]
    assert len(run.events("preempt")) == len(paused) > 0
    assert "recompute" in {row["kind"] for row in run.rows("forwards")}


def test_a_dummy_of_another_rank_is_no_step(recorded: dict[str, Run]) -> None:
    run = recorded["peers"]
    alone = [s for s in run.truth.served() if all(row.dummy for row in s.rows)]
    assert len(alone) == 3


def test_weights_that_change_in_flight(recorded: dict[str, Run]) -> None:
    run = recorded["inflight"]
    versions = [
        {row["weight_version"] for row in s.forwards.to_pylist()} for s in run.sequences.values()
    ]
    assert versions == [{0, 1}, {2}, {2}]
    first, second = (event["detail"] for event in run.events("update"))
    assert (first["version"], first["loads"], first["in_flight"]) == (1, 1, 1)
    assert (second["version"], second["loads"], second["in_flight"]) == (2, 2, 0)
    assert first["prefix_cache_reset"] and second["prefix_cache_reset"]
    rows = run.rows("weights")
    digests = {row["version"]: row["digest"] for row in rows if row["state"] == "complete"}
    assert sorted(digests) == [0, 1, 2] and len(set(digests.values())) == 3
    assert all(row["reason"] for row in rows if row["state"] == "complete")


def test_weights_of_an_update_that_failed(recorded: dict[str, Run]) -> None:
    run = recorded["failed"]
    assert run.notes["failed"]
    first, mixed, last = dict.fromkeys(step.weights for step in run.served)
    # what served in between was neither of them: version 0, and said to be dirty
    check_schedule(run, {first: 0, mixed: 0, last: 1})
    assert check_tokens(run) and check_routes(run)
    found = {event["detail"]["code"]: event["detail"] for event in run.events("finding")}
    assert found["weights-mixed"]["version"] == 0
    dirty = next(i for i, step in enumerate(run.served) if step.weights == mixed)
    assert found["weights-dirty"]["step"] == dirty
    assert [event["detail"]["version"] for event in run.events("update")] == [1]


def test_a_cancelled_request_is_continued(recorded: dict[str, Run]) -> None:
    run = recorded["cancel"]
    _, gone, goes_on = (run.sequences[a["client"], 0] for a in run.answers)
    assert gone.finish == "abort" and goes_on.finish == "length"
    assert goes_on.info["continues"] == gone.key.text
    assert goes_on.tokens.values[: gone.length].tolist() == gone.tokens.values.tolist()
    (abort,) = run.events("abort")
    assert abort["detail"]["tokens"] == gone.length - gone.prompt_len


def test_routes_of_the_engines_own_capture(recorded: dict[str, Run]) -> None:
    run = recorded["routed"]
    check_schedule(run)
    assert check_tokens(run)
    *asked, silent = (run.sequences[a["client"], 0] for a in run.answers)
    assert silent.routes() is None
    for sequence in asked:
        routes, expected = sequence.routes(), run.truth.routes(int(sequence.key.request))
        assert list(routes.layers) == LAYERS
        for position in range(sequence.length - 1):
            assert (routes.ids[position] == expected[position][0][1].numpy()).all()
    (notice,) = run.events("notice")
    assert "own capture" in notice["detail"]["reason"]


def test_a_forward_that_fails(recorded: dict[str, Run]) -> None:
    run = recorded["broken"]
    assert run.notes["broken"] == "out of memory"
    failed, fine = (run.sequences[a["client"], 0] for a in run.answers)
    assert (failed.finish, failed.length) == ("error", 9)
    (gap,) = run.events("gap")
    assert (gap["request"], gap["start"], gap["n"]) == (failed.key.request, 0, 9)
    assert gap["detail"]["reason"] == "the forward failed"
    assert fine.finish == "length" and fine.routes().valid[:-1].all()


def test_settings_are_those_in_force(recorded: dict[str, Run]) -> None:
    rows = {row["process"]: row for row in recorded["graphs"].rows("engines")}
    asked, used = (
        json.loads(rows[p][c]) for p, c in (("frontend", "requested"), ("worker", "effective"))
    )
    assert asked["cuda_graph_config"]["enable_padding"] is True
    assert used["graphs"] and used["graph_padding"] and used["graph_batch_sizes"] == [1, 2, 4, 8]
    assert (used["experts"], used["sampler"]) == ("CutlassFusedMoE", "TorchSampler")
    assert rows["worker"]["moe_layers"] == LAYERS and rows["worker"]["num_experts"] == EXPERTS
    assert rows["frontend"]["adapter"] == rows["worker"]["adapter"] == "tensorrt_llm"


def test_all_targets_but_newer_ones_bind_on_the_double() -> None:
    found = bindings("tensorrt_llm", environment())
    lacking = {b.target.symbol: b.state for b in found if b.state != "bound"}
    assert set(lacking) <= {
        "CompletionOutput.routed_experts",
        "RayWorkerWrapper._inject_worker_extension",
    }


# -- where not everything is wanted -------------------------------------------------------


def test_front_end_and_loop_leave_out_the_same(tmp_path: Path) -> None:
    options = ("--sample-rate", "0.5", "--steps", "3:9")
    run_ = runs(*run(tmp_path, "overlap", record=options))["overlap"]
    rate = Options(sample_rate=0.5)
    wanted = {a["client"] for a in run_.answers if wants(prompt_key(a["prompt"]), rate)}
    assert 0 < len(wanted) < len(run_.answers)
    assert {client for client, _ in run_.sequences} == wanted
    assert check_tokens(run_) > 10  # of all steps: the front end knows none
    assert {row["step"] for row in run_.rows("steps")} == set(range(3, 9))
    rows = {(int(r["request"]), r["sample"], r["start"], r["n"]) for r in run_.rows("forwards")}
    seen = {
        (row.client, row.sample, row.start, row.n)
        for step in run_.served[3:9]
        for row in step.rows
        if row.client in wanted
    }
    assert rows == seen and rows
    for (client, sample), sequence in run_.sequences.items():
        routes, expected = sequence.routes(), run_.truth.routes(client, sample)
        spans = [range(start, start + n) for c, s, start, n in seen if (c, s) == (client, sample)]
        inside = {p for span in spans for p in span}
        assert (routes is None) == (not inside)
        for position in range(sequence.length) if routes else ():
            assert routes.valid[position].all() == (position in inside)
            if position in inside:
                assert (routes.ids[position] == expected[position][0][1].numpy()).all()
    left = {k: v for e in run_.events("notice") for k, v in e["detail"]["left_out"].items()}
    samples = sum(len(a["outputs"]) for a in run_.answers if a["client"] not in wanted)
    assert left == {"sequences": samples, "steps": len(run_.served) - 6}


# -- a worker in a process of a pool ------------------------------------------------------


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of its own for what goes into a `.pth`: none goes into that which runs the tests."""
    folder = tmp_path_factory.mktemp("interpreter")
    venv = [sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")]
    subprocess.run(venv, check=True)
    python = folder / "venv" / "bin" / "python"
    (site,) = (folder / "venv").glob("lib/*/site-packages")
    (site / "libraries.pth").write_text(os.path.dirname(os.path.dirname(np.__file__)) + "\n")
    return python


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, interpreter: Path) -> tuple[Run, Path]:
    """One that is started without our variables, and given prefixed ones before its first task."""
    folder, python = tmp_path_factory.mktemp("pool"), interpreter
    (site,) = python.parents[1].glob("lib/*/site-packages")
    log = folder / "truth"
    how = ("--inject", "pth")
    tape, found = run(folder, "spawned", record=how, python=str(python), TLLM_DOUBLE_TRUTH=str(log))
    with log.open("rb") as file:
        found["scenarios"]["spawned"]["truth"] = pickle.load(file)
    assert not list(site.glob("rolltape*"))
    return runs(tape, found)["spawned"], folder


def test_a_worker_that_is_told_late_is_recorded_whole(pool: Any) -> None:
    run, _ = pool
    assert not [row for row in run.tape.rows("events") if row["kind"] in ("hook_error", "gap")]
    check_schedule(run)
    assert check_tokens(run) > 50
    assert check_routes(run) > 100


def test_front_end_and_worker_are_one_engine(pool: Any) -> None:
    run, _ = pool
    rows = {row["process"]: row for row in run.tape.rows("engines")}
    assert set(rows) == {"frontend", "worker"}
    assert rows["frontend"]["engine"] == rows["worker"]["engine"]
    assert rows["frontend"]["pid"] != rows["worker"]["pid"]
    (tactics,) = {
        row["engine"] for row in run.tape.rows("tactics") if row["tuner"] == "tensorrt_llm"
    }
    assert tactics == run.engine


def test_a_variable_that_did_not_reach_the_worker_is_a_finding(pool: Any) -> None:
    run, _ = pool
    (found,) = run.events("finding")
    assert found["detail"]["code"] == "RT402" and found["detail"]["name"] == "FORCE_DETERMINISTIC"
    worker = next(row for row in run.tape.rows("engines") if row["process"] == "worker")
    assert json.loads(worker["requested"])["env.FORCE_DETERMINISTIC"] == "1"
    assert "env.FORCE_DETERMINISTIC" not in json.loads(worker["effective"])


#: Makes engines whose workers are in a pool; `sys.argv[1]` is a folder for tapes.
POOLED = """
import os, sys, rolltape
from tensorrt_llm import LLM, SamplingParams
def make(): return LLM(model="double", skip_tokenizer_init=True)
how = SamplingParams(max_tokens=4, end_id=2, pad_id=2)
def generate(llm): llm.generate([[5, 6, 7], [9, 10]], how); llm.shutdown()
"""


def pooled(python: Path, folder: Path, code: str) -> str:
    """What a script said that goes on with `code`; workers have the hook in a `.pth`."""
    with pth_file(str(python)):
        done = subprocess.run(
            [python, "-c", POOLED + code, folder],
            env=environment(TLLM_WORKER_USE_SINGLE_PROCESS="0"),
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


AFTERWARDS = """
for name in "ab":
    with rolltape.record(os.path.join(sys.argv[1], name)):
        generate(make())
print([name for name in os.environ if "ROLLTAPE" in name])
generate(make())
"""


def test_an_engine_after_the_recording_is_on_no_tape(interpreter: Path, tmp_path: Path) -> None:
    assert pooled(interpreter, tmp_path, AFTERWARDS) == "[]\n"
    for name in "ab":
        tape = rolltape.open(tmp_path / name)
        rows = tape.rows("engines")
        assert sorted(row["process"] for row in rows) == ["frontend", "worker"]
        assert len({row["engine"] for row in rows}) == 1 and len(list(tape)) == 2
        assert not [row for row in tape.rows("events") if row["kind"] == "finding"]
        sealed = {entry["shard"] for entry in tape.seal["shards"]}
        for table in ("engines", "steps", "weights", "events"):  # nobody has written since
            files = (tmp_path / name / table).glob("*")
            assert {f"{table}/{file.name}" for file in files} <= sealed


BEFORE = """
llm = make()
with rolltape.record(os.path.join(sys.argv[1], "a")):
    generate(llm)
"""


def test_a_pool_from_before_the_recording_is_said_not_to_be_in_it(
    interpreter: Path, tmp_path: Path
) -> None:
    said = pooled(interpreter, tmp_path, BEFORE)
    tape = rolltape.open(tmp_path / "a")
    assert len(list(tape)) == 2 and not list(tape.rows("steps"))
    (engine,) = tape.rows("engines")
    (found,) = [row for row in tape.rows("events") if row["kind"] == "finding"]
    assert json.loads(found["detail"])["code"] == "RT410"
    assert found["engine"] == engine["engine"] and engine["process"] == "frontend"
    (line,) = said.splitlines()
    assert line.startswith(f"rolltape: engine {engine['engine'][:8]}: only its front end")
    assert "--inject pth" in line


def test_the_summary_says_that_no_worker_was_reached(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rolltape", "record", "-o", str(tmp_path / "a"), "--"]
    command += [sys.executable, str(JOB), str(tmp_path / "outputs"), "spawned"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "none of its workers: it has no steps and no routes" in done.stderr
    assert "--inject pth" in done.stderr
    tape = rolltape.open(tmp_path / "a")
    assert len(list(tape)) and not list(tape.rows("steps"))


# -- faults of the recorder ---------------------------------------------------------------

FAULTY = Path(__file__).with_name("tensorrt_llm_faulty_job.py")
#: Hooks in the order of `tensorrt_llm_faulty_job.py`, without which the other parts are recorded.
HOOKS = (
    "tensorrt_llm.announce",
    "tensorrt_llm.engine",
    "tensorrt_llm.llm",
    "tensorrt_llm.open",
    "tensorrt_llm.tokens",
    "tensorrt_llm.close",
    "tensorrt_llm.extra",
    "tensorrt_llm.launch",
    "tensorrt_llm.step",
    "tensorrt_llm.graph",
    "tensorrt_llm.padding",
    "tensorrt_llm.end",
    "tensorrt_llm.child",
    "tensorrt_llm.load",
    "tensorrt_llm.weights",
    "tensorrt_llm.reset",
    "tensorrt_llm.digest",
    "tensorrt_llm.routes",
    "tensorrt_llm.shutdown",
    "tactics.autotuner",
)
SOMETIMES = ("second-launch", "second-tokens", "second-routes")
DISK = ("full-queue", "full-disk", "slow-disk")


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("faults")
    tapes = folder / "tapes"
    tapes.mkdir()
    found = run(folder, str(tapes), record=None, script=FAULTY)[1]
    made = {}
    for name, truth in found["truths"].items():
        tape = rolltape.open(tapes / name)
        engines = {row["engine"] for row in tape.rows("steps")}
        engines |= {row["engine"] for row in tape.rows("sequences")}
        assert len(engines) <= 1
        notes = {"answers": found["answers"]["none"]}
        made[name] = Run(tape, next(iter(engines), ""), found["answers"][name], truth, notes)
    assert tuple(made) == (*HOOKS, *SOMETIMES, *DISK)
    return made


def check_what_there_is(run: Run) -> None:
    """What is on the tape is what happened, even where some is missing."""
    truth = {
        (row.client, row.sample, row.start, row.n)
        for step in run.served
        for row in step.rows
        if not row.dummy
    }
    for row in run.rows("forwards"):
        assert (int(row["request"]), row["sample"], row["start"], row["n"]) in truth
    graphs = [None if step.graph is None else str(step.graph) for step in run.served]
    steps = sorted(run.rows("steps"), key=lambda row: row["step"])
    if len(steps) == len(graphs):
        told = zip(steps, graphs, strict=True)
        assert all(row["graph"] in (graph, "unknown") for row, graph in told)
    for (client, sample), sequence in run.sequences.items():
        drawn = {d.position: d for d in run.truth.drawn(client, sample)}
        routes, expected = sequence.routes(), run.truth.routes(client, sample)
        kinds = {kind: sequence.logprob(kind) for kind in ("raw", "processed")}
        for position in range(sequence.prompt_len, sequence.length):
            draw = drawn.get(position)
            if sequence.tokens.valid[position]:
                assert sequence.tokens.values[position] == draw.token
            for kind, values in kinds.items():
                if values.valid[position]:
                    assert values.values[position] == np.float32(getattr(draw, kind))
        for position in range(sequence.length if routes else 0):
            there = routes.valid[position]
            if there.any():
                ids = expected[position][0][1].numpy()
                assert (routes.ids[position][there] == ids[there]).all()
        if sequence.finish not in ("open", "abort"):
            assert sequence.info["length"] in (None, sequence.prompt_len + len(drawn))


@pytest.mark.parametrize("name", [*HOOKS, *SOMETIMES, *DISK])
def test_no_fault_costs_the_job_anything_or_puts_wrong_rows_on_tape(
    faulty: dict[str, Run], name: str
) -> None:
    run = faulty[name]
    assert run.answers == run.notes["answers"]
    check_what_there_is(run)


@pytest.mark.parametrize("name", [*HOOKS, *SOMETIMES])
def test_a_hook_that_raises_is_told_on_the_tape(faulty: dict[str, Run], name: str) -> None:
    run = faulty[name]
    rows = [row for row in run.tape.rows("events") if row["kind"] == "hook_error"]
    errors = [json.loads(row["detail"]) for row in rows]
    assert errors and all("injected" in error["error"] for error in errors)
    expected = name.replace("second-", "tensorrt_llm.").replace("announce", "engine")
    assert expected in {error["hook"] for error in errors}


def gaps(run: Run) -> list[dict[str, Any]]:
    found = [row for row in run.tape.rows("events") if row["kind"] == "gap"]
    return [{**row, "detail": json.loads(row["detail"])} for row in found]


def test_steps_that_were_not_seen_shift_nothing(faulty: dict[str, Run]) -> None:
    run = faulty["second-launch"]
    steps = {row["step"] for row in run.rows("steps")}
    assert 0 < len(steps) < len(run.served)
    lost = [row for row in gaps(run) if "not recorded" in row["detail"]["reason"]]
    assert {row["detail"]["step"] for row in lost} & steps == set() and lost
    unseen = [row for row in gaps(run) if "not seen" in row["detail"]["reason"]]
    assert {row["request"] for row in unseen} <= {str(a["client"]) for a in run.answers} and unseen


def test_tokens_that_were_not_seen_shift_nothing(faulty: dict[str, Run]) -> None:
    for name in ("second-tokens", "tensorrt_llm.tokens"):
        run = faulty[name]
        lost = {
            (row["request"], row["sample"], row["start"])
            for row in gaps(run)
            if row["detail"].get("table") == "tokens"
        }
        broken = {
            (s.key.request, s.key.sample, int(s.tokens.valid.sum()))
            for s in run.sequences.values()
            if s.info["length"] is None
        }
        assert lost == broken and lost
    streamed = faulty["second-tokens"].sequences[run.answers[0]["client"], 0]
    assert streamed.tokens.valid.sum() == streamed.prompt_len + 1  # the second answer was lost


def test_routes_that_were_not_written_are_missing(faulty: dict[str, Run]) -> None:
    run = faulty["second-routes"]
    missing = [hole for s in run.sequences.values() for hole in s.routes().missing]
    assert {reason for *_, reason in missing} == {"not-captured"}


def test_samples_without_a_number_are_left_out(faulty: dict[str, Run]) -> None:
    run = faulty["tensorrt_llm.child"]
    client = run.answers[-1]["client"]
    known = {r["sample"] for r in run.rows("forwards") if int(r["request"]) == client}
    assert known == {0}
    assert len([row for row in gaps(run) if "not known which" in row["detail"]["reason"]]) == 2


def test_a_slow_disk_costs_nothing(faulty: dict[str, Run]) -> None:
    run = faulty["slow-disk"]
    assert not gaps(run)
    check_schedule(run)
    assert check_tokens(run) and check_routes(run)


def test_a_full_queue_says_what_it_dropped(faulty: dict[str, Run]) -> None:
    run = faulty["full-queue"]
    assert not list(run.tape.rows("tokens")) and not list(run.tape.rows("sequences"))
    steps = {row["step"] for row in run.rows("steps")}
    blocks = [row["detail"]["steps"] for row in gaps(run) if "steps" in row["detail"]]
    dropped = {step for first, last in blocks for step in range(first, last + 1)}
    assert steps | dropped == set(range(len(run.served))) and dropped and not steps & dropped
    lost = {(row["request"], row["sample"]) for row in gaps(run) if row["request"]}
    assert lost >= {(str(a["client"]), 0) for a in run.answers}
    assert {row["detail"].get("table") for row in gaps(run)} >= {"sequences", "tokens", "engines"}


def test_a_full_disk_ends_the_recording(faulty: dict[str, Run]) -> None:
    (end,) = [row for row in gaps(faulty["full-disk"]) if "reason" in row["detail"]]
    assert "File too large" in end["detail"]["reason"]
