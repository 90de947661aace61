"""Real vLLM on a CPU, in FP32, recorded from outside and compared with transformers.

Six engines are started: in process with a recording, without one and with faults in it, the engine
core in a process of its own, and an OpenAI server with and without a recording. The unrecorded
server answers everything twice, so that it is known what repeats.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")


import rolltape  # noqa: E402
from tests.integration import vllm_server  # noqa: E402
from tests.integration.teacher import check_positions, teacher  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples/models/tiny-moe"
PYTHON = os.environ.get("ROLLTAPE_VLLM_PYTHON", str(ROOT / ".venv-vllm" / "bin" / "python"))
RECORD = [PYTHON, "-m", "rolltape", "record", "-o"]
SERVER = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL)]

pytestmark = [
    pytest.mark.engine,
    pytest.mark.vllm,
    pytest.mark.skipif(not Path(PYTHON).exists(), reason=f"no {PYTHON}: `make venv-vllm`"),
]


def run(
    folder: Path, *flags: str, record: bool = True, script: str = "vllm_job.py"
) -> tuple[Any, dict[str, Any]]:
    tape, outputs = folder / "tape", folder / "outputs.json"
    job = [PYTHON, str(Path(__file__).with_name(script)), str(MODEL), str(outputs), *flags]
    prefix = [*RECORD, str(tape), "--"] if record else []
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*prefix, *job], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    return (rolltape.open(tape) if record else None), json.loads(outputs.read_text())


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any]]:
    return run(tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outputs of the same job without a recording."""
    return run(tmp_path_factory.mktemp("plain"), record=False)[1]


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any]]:
    """The engine core in a process of its own."""
    return run(tmp_path_factory.mktemp("mp"), "--mp")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, apart: Any) -> list[dict[str, Any]]:
    """What a server without a recording answers, twice: all that is greedy elsewhere.

    Of the request that a client gives up there is the whole answer as `gone`; the prompts of
    `apart` have numbers.
    """
    log = tmp_path_factory.mktemp("alone") / "log"
    both = []
    with vllm_server.serving(PYTHON, log, SERVER) as port:
        for _ in range(2):
            answers = vllm_server.greedy(port, MODEL)
            given = vllm_server.prompts()["gone"]
            answers["gone"] = vllm_server.complete(port, MODEL, given, max_tokens=400)[0]
            for i, out in enumerate(apart[1]["done"]):
                answers[str(i)] = vllm_server.complete(port, MODEL, out["prompt"])[0]
            both.append(answers)
    return both


@pytest.fixture(scope="module")
def repeats(alone: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Ids of the answers that an unrecorded server gives again: here all of them."""
    once, twice = alone
    assert [name for name in once if once[name]["ids"] != twice[name]["ids"]] == []
    return {name: answer["ids"] for name, answer in once.items()}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any]]:
    """(tape, answers) of a recorded server: greedy ones by name, `four` samples, one `gone`."""
    folder = tmp_path_factory.mktemp("served")
    tape, given = folder / "tape", vllm_server.prompts()
    with vllm_server.serving(PYTHON, folder / "log", SERVER, [*RECORD, str(tape), "--"]) as port:
        answers: dict[str, Any] = vllm_server.greedy(port, MODEL)
        with ThreadPoolExecutor(2) as pool:  # one client goes while another waits for its answer
            how = {"n": 4, "temperature": 1.0, "top_p": 0.9}
            four = pool.submit(vllm_server.complete, port, MODEL, given["four"], **how)
            gone = vllm_server.streamed(port, MODEL, given["gone"], most=3, max_tokens=400)
            answers |= {"four": four.result(), "gone": gone}
        # a server is killed where it stands: what is older than a second is on the tape by then
        wait_for(tape, {(answer["id"], answer["sample"]) for answer in flat(answers)})
    return rolltape.open(tape), answers


def flat(answers: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for a in answers.values() for one in (a if isinstance(a, list) else [a])]


def wait_for(tape: Path, keys: set[tuple[str, int]], seconds: float = 30.0) -> None:
    """Until the sequences of these answers are closed on the tape and all their tokens there."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        there = [s for s in rolltape.open(tape) if s.finish != "open" and s.tokens.valid.all()]
        if keys <= {(answer_of(s), s.key.sample) for s in there}:
            return
        time.sleep(0.2)
    raise AssertionError("the tape of a running server does not follow what it answered")


def answer_of(sequence: Any) -> str:
    """The id that the server gave its answer: completions number the prompts of a request."""
    return str(sequence.info["external"]).removesuffix("-0")


@pytest.fixture(scope="module")
def truth() -> Any:
    return teacher(MODEL)


# -- what is compared ---------------------------------------------------------------------


def check(tape: Any, truth: Any) -> None:
    """Every recorded position against transformers, and no gap."""
    assert not [row for row in tape.rows("events") if row["kind"] in ("gap", "hook_error")]
    for sequence in tape:
        assert sequence.tokens.valid.all()
        check_positions(sequence, truth)
        assert sequence.logprob("raw").valid[sequence.prompt_len :].all()
        assert sequence.routes().valid[: sequence.length - 1].all()
    done = subprocess.run([PYTHON, "-m", "rolltape", "fsck", str(tape.place)], capture_output=True)
    assert done.returncode == 0, done.stdout


def check_answers(tape: Any, answers: list[dict[str, Any]]) -> None:
    """What the engine returned against the tape; its own logprobs bit for bit."""
    by_key = {(answer_of(s), s.key.sample): s for s in tape}
    for answer in answers:
        name = answer.get("external") or answer["id"]
        sequence = by_key[name, answer["sample"]]
        first = len(answer["prompt"])
        ids = [*answer["prompt"], *answer["ids"]]
        assert sequence.tokens.values.tolist()[: len(ids)] == ids
        if sequence.finish != "abort":
            assert sequence.finish == "length" and sequence.length == len(ids)
        raw = sequence.logprob("raw")
        for start, own in ((first, answer["logprobs"]), (1, answer.get("prompt_logprobs", ())[1:])):
            if own:
                part = slice(start, start + len(own))
                assert raw.valid[part].all()
                assert (raw.values[part] == np.array(own, np.float32)).all()


# -- in process ---------------------------------------------------------------------------


def test_every_position_is_what_transformers_says(recorded: Any, truth: Any) -> None:
    tape, outputs = recorded
    assert len(list(tape)) == len(outputs["done"]) + 1
    check(tape, truth)
    assert sum(check_positions(sequence, truth) for sequence in tape) > 100


def test_the_tape_shows_what_the_engine_returned(recorded: Any) -> None:
    tape, outputs = recorded
    answers = [*outputs["done"], *outputs["aborted"]]
    assert sum(bool(a["logprobs"]) for a in answers) == 2
    assert sum(bool(a["prompt_logprobs"]) for a in answers) == 1
    check_answers(tape, answers)
    groups = [s.info["group"] for s in tape if s.key.sample == 3]
    assert sum(s.info["group"] == groups[0] for s in tape) == 4


def test_the_schedule_is_the_engines(recorded: Any) -> None:
    tape, outputs = recorded
    assert max(row["tokens"] for row in tape.rows("steps")) <= 256
    by_key = {(s.info["external"], s.key.sample): s for s in tape}
    rows = {key: s.forwards.to_pylist() for key, s in by_key.items()}
    hits = 0
    for out in outputs["done"]:
        mine = rows[out["external"], out["sample"]]
        cached = sum(row["n"] for row in mine if row["kind"] == "cached")
        assert cached == out["cached"]
        hits += cached > 0
        chunks = sorted((r["start"], r["n"]) for r in mine if r["kind"] == "prefill")
        assert sum(n for _, n in chunks) == len(out["prompt"]) - cached
        assert [start for start, _ in chunks] == [
            cached + sum(n for _, n in chunks[:i]) for i in range(len(chunks))
        ]
        assert len(chunks) > 1 or len(out["prompt"]) - cached <= 256
    assert hits >= 2
    # who lost its KV blocks, by the engine's own scheduler
    preempted = Counter(outputs["preempted"])
    assert preempted
    events = (row for row in tape.rows("events") if row["kind"] == "preempt")
    assert Counter(row["request"] for row in events) == preempted
    again = {s.key.request for s in tape if {"recompute"} & {r["kind"] for r in rows_of(s)}}
    assert again == set(preempted)


def test_what_was_asked_for_and_not_given_is_a_finding(recorded: Any) -> None:
    tape, _ = recorded
    asked = next(row["requested"] for row in tape.processes if row["requested"])
    assert asked["max_model_len"] == 512 and asked["dtype"] == "float32"
    (finding,) = (row["detail"] for row in events_of(tape, "finding"))
    assert (finding["code"], finding["name"]) == ("RT404", "async_scheduling")


def test_choices_that_nobody_sees_are_named(recorded: Any) -> None:
    tape, _ = recorded
    rows = list(tape.rows("tactics"))
    assert {row["engine"] for row in rows} == {row["engine"] for row in tape.processes}
    assert {row["tuner"] for row in rows if row["source"] == "unrecorded"} >= {"torch", "oneDNN"}


def rows_of(sequence: Any) -> list[dict[str, Any]]:
    return sequence.forwards.to_pylist()


def test_an_aborted_request_has_what_ran(recorded: Any, plain: dict[str, Any], truth: Any) -> None:
    tape, outputs = recorded
    (told,), (unrecorded,) = outputs["aborted"], plain["aborted"]
    gone = next(s for s in tape if s.info["external"] == "to-abort")
    assert gone.finish == "abort"
    ids = gone.tokens.values[gone.prompt_len :].tolist()
    assert ids == told["ids"] == unrecorded["ids"] and ids
    check_positions(gone, truth)


def test_recording_changes_no_token(recorded: Any, plain: dict[str, Any]) -> None:
    assert [o["ids"] for o in plain["done"]] == [o["ids"] for o in recorded[1]["done"]]


# -- faults -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("fault")
    return folder, run(folder, script="vllm_faulty_job.py")[1]


def test_no_fault_of_the_recorder_costs_a_token(faulty: Any, plain: dict[str, Any]) -> None:
    _, outputs = faulty
    for part in ("done", "aborted"):
        assert [o["ids"] for o in outputs[part]] == [o["ids"] for o in plain[part]]


def events_of(tape: Any, kind: str) -> list[dict[str, Any]]:
    found = [row for row in tape.rows("events") if row["kind"] == kind]
    return [{**row, "detail": json.loads(row["detail"])} for row in found]


def test_a_hook_that_raises_costs_steps(faulty: Any) -> None:
    tape = rolltape.open(faulty[0] / "tape")
    errors = events_of(tape, "hook_error")
    assert len(errors) == 3 and all("injected" in row["detail"]["error"] for row in errors)
    assert errors[-1]["detail"]["disabled"]
    lost = [row["detail"]["step"] for row in events_of(tape, "gap")]
    assert lost == [2, 5, 8]
    assert len(list(tape)) == 9


def test_a_slow_disk_costs_nothing(faulty: Any, truth: Any) -> None:
    tape = rolltape.open(faulty[0] / "cached")
    assert len(list(tape)) == 2
    assert not events_of(tape, "gap")
    for sequence in tape:
        assert sequence.tokens.valid.all()
        assert sequence.logprob("raw").valid[sequence.prompt_len :].all()
        check_positions(sequence, truth)


def test_a_full_disk_ends_the_recording(faulty: Any) -> None:
    tape = rolltape.open(faulty[0] / "preempted")
    gaps = events_of(tape, "gap")
    (end,) = [row for row in gaps if "reason" in row["detail"]]
    assert "File too large" in end["detail"]["reason"]
    named = {row["request"] for row in gaps if row["request"]}
    assert named and named <= {sequence.key.request for sequence in tape}
    assert 0 < sum(s.tokens.valid[s.prompt_len :].sum() for s in tape) < 6 * 120


def test_a_full_queue_drops_blocks_and_says_which(faulty: Any) -> None:
    folder, outputs = faulty
    tape, (told,) = rolltape.open(folder / "aborted"), outputs["aborted"]
    gaps = [row for row in events_of(tape, "gap") if row["request"]]
    assert len({row["request"] for row in gaps}) == 1
    dropped = [row for row in gaps if "steps" in row["detail"]]
    lost = {p for row in dropped for p in range(row["start"], row["start"] + row["n"])}
    # what waited for company when there was room again is there
    rows = list(tape.rows("tokens"))
    there = {p for row in rows for p in range(row["start"], row["start"] + row["n"])}
    first, end = len(told["prompt"]), len(told["prompt"]) + len(told["ids"])
    assert set(range(first)) <= lost  # its routes; the ids come with the first block that is kept
    assert not {p for p in lost & there if p >= first}
    assert lost | there >= set(range(end))
    assert any(row["detail"].get("table") == "sequences" for row in gaps)


# -- other processes ----------------------------------------------------------------------


def test_a_core_in_a_process_of_its_own(apart: Any, truth: Any, repeats: Any) -> None:
    tape, outputs = apart
    assert {row["process"] for row in tape.processes} == {"frontend", "worker"}
    check(tape, truth)
    check_greedy(tape)
    check_answers(tape, outputs["done"])
    assert {row["kind"] for row in tape.rows("forwards")} == {"prefill", "decode"}
    assert len(outputs["done"]) == 5
    for i, out in enumerate(outputs["done"]):
        assert out["ids"] == repeats[str(i)]


def check_greedy(tape: Any) -> None:
    for sequence in tape:  # no other token was more probable
        if sequence.info["sampling"]["temperature"]:
            continue
        sets = [sequence.supports().at(p) for p in range(sequence.prompt_len, sequence.length)]
        assert all(len(kept) == 1 for kept in sets)
        assert (sequence.logprob("processed").values[sequence.prompt_len :] == 0).all()


def test_a_server_is_recorded(served: Any, truth: Any) -> None:
    tape, answers = served
    assert {row["process"] for row in tape.processes} == {"frontend", "worker"}
    assert len(list(tape)) == len(flat(answers))
    check(tape, truth)
    check_greedy(tape)
    check_answers(tape, flat(answers))
    four = [s for s in tape if answer_of(s) == answers["four"][0]["id"]]
    assert [s.key.sample for s in four] == [0, 1, 2, 3]
    assert len({s.info["group"] for s in four}) == 1
    again = next(s for s in tape if answer_of(s) == answers["again"]["id"])
    assert [r["n"] for r in rows_of(again) if r["kind"] == "cached"] == [256]


def test_a_recorded_server_answers_the_same(served: Any, alone: Any, repeats: Any) -> None:
    answers = served[1]
    names = set(answers) - {"four", "gone"}
    assert len(names) == 8
    for name in names:
        assert answers[name]["ids"] == repeats[name], name
        assert answers[name]["logprobs"] == pytest.approx(alone[0][name]["logprobs"], abs=1e-5)


def test_a_client_that_is_gone_leaves_an_abort(served: Any, repeats: Any) -> None:
    tape, answers = served
    gone = next(s for s in tape if answer_of(s) == answers["gone"]["id"])
    assert gone.finish == "abort"
    ids = gone.tokens.values[gone.prompt_len :].tolist()
    assert len(answers["gone"]["ids"]) <= len(ids) < 400
    assert ids == repeats["gone"][: len(ids)]
