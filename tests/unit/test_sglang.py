"""SGLang: the adapter on the double, and on the real source where ROLLTAPE_SGLANG_SOURCE names it.

That is a folder with the package `sglang` of a checkout or of an unpacked wheel. Its front end
needs msgspec, pybase64, orjson, psutil, pyzmq, uvloop, einops, openai, partial_json_parser, torch
and transformers; the rest is replaced by stubs, see tests/sglang_scenario.py.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rolltape import store
from rolltape.recorder import session
from rolltape.recorder.options import Options
from rolltape.recorder.sglang.facts import find_moe, read_sampling
from rolltape.recorder.sglang.targets import TARGETS
from rolltape.store import token_digest
from rolltape.store.schema import SUPPORT_FULL, SUPPORT_UNRECORDED
from tests import coroutines
from tests.manifests.check import double_problems, load, target_problems
from tests.sglang_scenario import PROMPT, Drive, logprobs, routes, scenario

ROOT = Path(__file__).parents[2]
SOURCE = "ROLLTAPE_SGLANG_SOURCE"
MOE = [1, 2, 3]


@pytest.fixture(scope="module")
def double() -> Iterator[None]:
    """`sglang` is the double while a test of this module runs."""
    path = str(ROOT / "tests" / "doubles")
    sys.path.insert(0, path)
    importlib.invalidate_caches()
    yield
    sys.path.remove(path)
    for name in [n for n in sys.modules if n.partition(".")[0] == "sglang"]:
        del sys.modules[name]


@pytest.fixture
def tape(double: None, tmp_path: Path) -> Iterator[Path]:
    """A tape into which this process records."""
    from rolltape.recorder.sglang import adapter

    path = tmp_path / "tape"
    store.create_tape(path, role="rollout", provenance={})
    session.start(path, Options(strict=True))
    adapter.bind()
    yield path
    adapter.unbind()
    session.stop()


def closed(path: Path) -> store.Tape:
    session.stop()
    store.seal(path)
    return store.open(path)


def recorded_by_double(folder: Path) -> tuple[Path, dict[str, Any]]:
    from rolltape.recorder.sglang import adapter

    plain = coroutines.run(scenario(Drive()))
    path = folder / "double"
    store.create_tape(path, role="rollout", provenance={})
    session.start(path, Options(strict=True))
    adapter.bind()
    try:
        recorded = coroutines.run(scenario(Drive()))
    finally:
        adapter.unbind()
        session.stop()
    store.seal(path)
    return path, {"plain": plain, "recorded": recorded}


def recorded_by_source(folder: Path) -> tuple[Path, dict[str, Any]]:
    source = os.environ.get(SOURCE)
    if not source:
        pytest.skip(f"{SOURCE} does not name a folder with the real package")
    path = folder / "source"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.sglang_scenario", source, str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return path, json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module", params=["double", "source"])
def job(request: Any, double: None, tmp_path_factory: Any) -> tuple[store.Tape, dict[str, Any]]:
    """The scenario as recorded, and what callers got."""
    run = recorded_by_double if request.param == "double" else recorded_by_source
    path, seen = run(tmp_path_factory.mktemp(request.param))
    return store.open(path), seen


def one(tape: store.Tape, external: str) -> Any:
    (found,) = [s for s in tape if s.info["external"] == external]
    return found


def events(tape: store.Tape, kind: str) -> list[dict[str, Any]]:
    rows = tape.table("events").to_pylist()
    return [{**r, "detail": json.loads(r["detail"])} for r in rows if r["kind"] == kind]


def values(masked: Any) -> list[Any]:
    pairs = zip(np.asarray(masked.values).tolist(), masked.valid.tolist(), strict=True)
    return [v if there else None for v, there in pairs]


# -- the manifest -------------------------------------------------------------------------


def test_targets_are_in_the_source() -> None:
    assert target_problems(load("sglang"), TARGETS) == []


def test_the_double_has_nothing_that_the_engine_has_not(double: None) -> None:
    assert double_problems(load("sglang"), "sglang") == []


# -- what is on the tape ------------------------------------------------------------------


def test_callers_get_what_they_get_without_recording(job: Any) -> None:
    _, seen = job
    assert seen["recorded"] == seen["plain"]
    assert len(seen["plain"]) == 7


def test_all_targets_bind_on_the_source(job: Any) -> None:
    _, seen = job
    if "bindings" not in seen:
        pytest.skip("the double is compared with the manifest instead")
    assert {state for _, state in seen["bindings"]} == {"bound"}


def test_tokens_logprobs_and_their_meaning(job: Any) -> None:
    sequence = one(job[0], "plain")
    ids = [*PROMPT, 7, 8, 9, 10, 11]
    assert values(sequence.tokens) == ids
    assert values(sequence.loss_mask) == [False] * 5 + [True] * 5
    expected = [None] * 5 + [pytest.approx(v, abs=0) for v in logprobs(1, 5)]
    assert values(sequence.logprob("scaled")) == expected
    assert values(sequence.logprob("processed")) == expected  # nothing is cut
    assert not sequence.logprob("raw").valid.any()  # the temperature is not 1
    meaning = sequence.semantics[-1][2]
    assert meaning["temperature"] == pytest.approx(0.7)
    assert (meaning["truncation"], meaning["vocab_size"], meaning["source"]) == ([], 50, "engine")
    info = sequence.info
    assert (info["finish"], info["length"], info["prompt_len"]) == ("length", 10, 5)
    assert info["digest"] == token_digest(5, np.array(ids))
    assert info["group_derived"] and info["request"] == "plain"


def test_greedy_is_certain_and_keeps_one_token(job: Any) -> None:
    sequence = one(job[0], "greedy")
    assert values(sequence.logprob("raw"))[-1] == pytest.approx(-0.2)
    assert values(sequence.logprob("processed"))[-1] == 0.0
    assert sequence.supports().at(5).tolist() == [1]
    assert sequence.semantics[-1][2]["truncation"] == ["greedy"]
    assert sequence.finish == "stop"


def test_kept_sets_are_those_of_the_mask(job: Any) -> None:
    sequence = one(job[0], "cut")
    assert sequence.supports().at(5).tolist() == [12, 25, 30]
    assert sequence.supports().at(6).tolist() == [31]
    assert values(sequence.logprob("processed"))[5:] == [-0.5, 0.0]
    assert values(sequence.logprob("scaled"))[5:] == [-1.0, -2.0]
    assert values(sequence.logprob("raw"))[5:] == [-1.0, -2.0]


def test_nothing_is_made_up_that_was_not_asked_for(job: Any) -> None:
    sequence = one(job[0], "silent")
    assert values(sequence.tokens)[5:] == [2, 2]
    assert not any(sequence.logprob(c).valid.any() for c in ("raw", "scaled", "processed"))
    assert set(sequence.supports().state[5:].tolist()) == {SUPPORT_FULL}
    assert sequence.routes() is None


def test_routes_hold_the_moe_layers_only(job: Any) -> None:
    found = one(job[0], "plain").routes()
    assert list(found.layers) == MOE and found.num_experts == 8
    assert found.valid[:9].all() and not found.valid[9].any()
    assert np.array_equal(found.ids[:9], routes(1, 9)[:, MOE])
    assert (9, 1, None, "last") in found.missing


def test_padded_and_unrequested_rows_are_missing(job: Any) -> None:
    sequence = one(job[0], "retracted")
    found = sequence.routes()
    assert found.valid.all(1).tolist() == [False, False, True, False, True, True, True, False]
    table = routes(2, 5)[:, MOE]
    assert np.array_equal(found.ids[[2, 4, 5, 6]], table[[0, 2, 3, 4]])
    reasons = {(start, n, reason) for start, n, _, reason in found.missing}
    assert reasons == {(0, 2, "not-requested"), (3, 1, "not-captured"), (7, 1, "last")}
    (row,) = job[0].fragments("routes", sequence.key)
    assert row["weight_version"] is None  # of the pass after the retract
    assert set(sequence.supports().state[5:].tolist()) == {SUPPORT_UNRECORDED}  # penalties
    assert sequence.finish == "abort"
    (preempted,) = events(job[0], "preempt")
    assert preempted["request"] == "retracted" and preempted["detail"] == {"retractions": 1}


def test_routes_of_another_shape_are_a_gap(job: Any) -> None:
    assert one(job[0], "short").routes() is None
    (gap,) = events(job[0], "gap")
    assert gap["request"] == "short" and gap["n"] == 5
    assert "do not fill [5, 4, 2]" in gap["detail"]["reason"]


def test_versions_by_token(job: Any) -> None:
    tape, _ = job
    assert values(one(tape, "plain").weight_version)[5:] == [0, 0, 0, 1, 1]
    assert values(one(tape, "greedy").weight_version)[5:] == [1]
    labels = {r["version"]: r["label"] for r in tape.table("weights").to_pylist()}
    assert labels == {0: "default", 1: "v1"}
    done, failed = (e["detail"] for e in events(tape, "update"))
    assert (done["version"], done["name"], done["how"]) == (1, "v1", "update_weights_from_disk")
    assert "failed" in failed and "version" not in failed


def test_a_request_that_never_ran_is_kept(job: Any) -> None:
    sequence = one(job[0], "waiting")
    assert (sequence.finish, sequence.info["length"]) == ("abort", 5)
    assert {e["request"] for e in events(job[0], "abort")} == {"waiting", "retracted"}


def test_the_engine_row_says_what_is_known(job: Any) -> None:
    (row,) = job[0].table("engines").to_pylist()
    assert (row["adapter"], row["process"], row["model"]) == ("sglang", "frontend", "models/m")
    assert (row["moe_layers"], row["num_layers"], row["experts_per_token"]) == (MOE, 4, 2)
    assert row["dtype"] == "bfloat16" and len(row["model_fingerprint"]) == 32
    assert json.loads(row["effective"])["attention_backend"] == "fa3"
    assert "secret" not in row["requested"] + row["effective"]


# -- what only the double shows -----------------------------------------------------------


def answer_with(ids: list[int], asked: list[Any]) -> Any:
    async def scheduler(manager: Any, rid: str) -> None:
        sent = next(r for r in manager._double_sent if r.rid == rid)
        if sent.sampling_params.max_new_tokens == 0:
            out: dict[str, Any] = {"ids": []}
        else:
            out = {"ids": ids, "logprobs": [-1.0] * len(ids) if sent.return_logprob else None}
            if sent.return_routed_experts:
                from tests.sglang_scenario import encoded

                out["routes"] = encoded(routes(9, len(PROMPT) + len(ids) - 1))
        asked.append(sent)
        await drives[id(manager)].output({"rid": rid, "reason": {"type": "length"}, **out})

    return scheduler


drives: dict[int, Drive] = {}


def generate(drive: Drive, ids: list[int], **fields: Any) -> tuple[Any, list[Any]]:
    asked: list[Any] = []
    drives[id(drive.manager)] = drive
    drive.manager._double_scheduler = answer_with(ids, asked)
    obj = drive.io.GenerateReqInput(input_ids=PROMPT, **fields)

    async def call() -> Any:
        return [out async for out in drive.manager.generate_request(obj)][-1]

    return coroutines.run(call()), asked


def test_samples_of_a_request_are_one_group(tape: Path) -> None:
    outs, asked = generate(Drive(), [4, 5], rid="mine", sampling_params={"n": 3})
    assert len(asked) == 4  # the first fills the prefix cache
    found = closed(tape)
    assert len(found.keys()) == 3
    assert [k.sample for k in sorted(found.keys())] == [0, 1, 2]
    infos = [s.info for s in found]
    assert len({i["group"] for i in infos}) == 1 and not any(i["group_derived"] for i in infos)
    assert {i["external"] for i in infos} == {o["meta_info"]["id"] for o in outs}


def test_an_id_that_comes_again_is_another_sequence(tape: Path) -> None:
    drive = Drive()
    for ids in ([4], [5]):
        generate(drive, ids, rid="again", sampling_params={})
    found = closed(tape)
    assert {s.info["request"]: values(s.tokens)[-1] for s in found} == {"again": 4, "again~1": 5}
    assert {s.info["external"] for s in found} == {"again"}


def test_what_the_recorder_asked_for_stays_between_it_and_the_engine(
    tape: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = Drive()
    drive.manager._double_config["enable_return_routed_experts"] = True
    plain, _ = generate(drive, [4, 5], rid="a", sampling_params={})
    monkeypatch.setenv("ROLLTAPE_SGLANG_ASK", "logprobs,routes")
    asking = Drive()
    asking.manager._double_config["enable_return_routed_experts"] = True
    out, asked = generate(asking, [4, 5], rid="b", sampling_params={})
    assert asked[0].return_logprob and asked[0].return_routed_experts
    assert {**out["meta_info"], "id": "a"} == plain["meta_info"]
    found = closed(tape)
    assert values(one(found, "b").logprob("raw"))[5:] == [-1.0, -1.0]
    assert np.array_equal(one(found, "b").routes().ids[:6], routes(9, 6)[:, MOE])
    assert one(found, "a").routes() is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"input_embeds": [[0.1]]}, "embeddings"),
        ({"mm_inputs": object()}, "multimodal"),
        ({"session_params": object()}, "session"),
    ],
)
def test_prompts_that_are_not_known_are_gaps(
    tape: Path, fields: dict[str, Any], reason: str
) -> None:
    coroutines.run(Drive().send("x", **fields))
    found = closed(tape)
    assert not found.keys()
    (gap,) = events(found, "gap")
    assert reason in gap["detail"]["reason"]


def test_logprobs_of_other_tokens_are_refused(tape: Path) -> None:
    drive = Drive()
    answer = {"rid": "x", "ids": [7, 8], "logprobs": [-1.0, -2.0], "logprob_ids": [8, 9]}

    async def run() -> None:
        await drive.send("x", return_logprob=True)
        await drive.output({**answer, "reason": {"type": "stop"}})

    coroutines.run(run())
    found = closed(tape)
    assert not one(found, "x").logprob("scaled").valid.any()
    assert events(found, "gap")[0]["detail"]["reason"].startswith("the engine's logprobs are not")


def test_a_running_request_is_open_and_what_it_has_is_kept(tape: Path) -> None:
    drive = Drive()

    async def run() -> None:
        await drive.send("x")
        await drive.output({"rid": "x", "ids": [7, 8]})

    coroutines.run(run())
    sequence = one(closed(tape), "x")
    assert sequence.finish == "open"
    assert values(sequence.tokens)[5:] == [7, 8]


def test_a_fault_of_the_recorder_does_not_reach_the_engine(double: None, tmp_path: Path) -> None:
    from rolltape.recorder.sglang import adapter

    store.create_tape(tmp_path / "t", role="rollout", provenance={})
    session.start(tmp_path / "t", Options())
    adapter.bind()
    try:
        drive = Drive()
        drive.manager.model_config.vocab_size = "many"
        out, _ = generate(drive, [4], rid="x", sampling_params={})
    finally:
        adapter.unbind()
    assert out["output_ids"] == [4]
    assert events(closed(tmp_path / "t"), "hook_error")


# -- configurations -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"num_experts": 8}, [0, 1, 2, 3]),
        ({"num_experts": 8, "mlp_only_layers": [0, 2]}, [1, 3]),
        ({"num_experts": 8, "decoder_sparse_step": 2}, [1, 3]),
        ({"n_routed_experts": 8, "first_k_dense_replace": 1, "moe_layer_freq": 1}, [1, 2, 3]),
        ({"n_routed_experts": 8, "moe_layer_freq": [0, 1, 1, 0]}, [1, 2]),
        ({"num_local_experts": 8}, [0, 1, 2, 3]),
        ({}, []),
    ],
)
def test_moe_layers_of_a_configuration(fields: dict[str, Any], layers: list[int]) -> None:
    text = SimpleNamespace(num_hidden_layers=4, num_experts_per_tok=2, **fields)
    assert list(find_moe(text).layers) == layers


@pytest.mark.parametrize(
    ("params", "original", "columns", "temperature"),
    [
        ({"temperature": 1.0}, "", ("processed", "raw", "scaled"), 1.0),
        ({"temperature": 0.7}, "", ("processed", "scaled"), 0.7),
        ({"temperature": 0.7, "top_k": 5}, "", ("scaled",), 0.7),
        ({"temperature": 0.7}, "1", ("raw",), 1.0),
        ({"temperature": 0.7}, "true", ("raw",), 1.0),
        ({"temperature": 0.7, "repetition_penalty": 1.1}, "1", ("scaled",), 1.0),
        ({"temperature": 1.0, "repetition_penalty": 1.1}, "", ("processed", "scaled"), 1.0),
        ({"temperature": 0.7, "top_k": 1}, "", ("scaled",), None),
    ],
)
def test_what_the_logprobs_are(
    double: None, params: Any, original: str, columns: Any, temperature: float | None
) -> None:
    from sglang.srt.sampling.sampling_params import SamplingParams

    env = {"SGLANG_RETURN_ORIGINAL_LOGPROB": original} if original else {}
    how = read_sampling(SamplingParams(**params), env=env)
    assert (how.columns, how.column_temperature) == (columns, temperature)
