"""TRL's real GRPO trainer on the bundled model: what it computes is on the tape.

ROLLTAPE_TRL_PYTHON names another Python that has TRL, PEFT and rolltape.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolltape import store
from rolltape.replay import diff_tapes

PYTHON = os.environ.get("ROLLTAPE_TRL_PYTHON", sys.executable)
JOB = Path(__file__).with_name("trl_job.py")

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        sys.executable == PYTHON and importlib.util.find_spec("trl") is None,
        reason="trl is not installed, and ROLLTAPE_TRL_PYTHON names no Python that has it",
    ),
]


class Recorded:
    """What the tape of a job says."""

    def __init__(self, path: Path) -> None:
        self.tape = store.open(path)
        self.roles = {e: row["role"] for e, row in self.tape.engines.items()}
        self.sequences = list(self.tape)

    def of(self, role: str) -> list[Any]:
        return [s for s in self.sequences if self.roles[s.key.engine] == role]

    def digests(self, role: str, group: str = "") -> dict[str, dict[int, int]]:
        """Of each engine of a role, version -> digest."""
        found: dict[str, dict[int, int]] = {e: {} for e, r in self.roles.items() if r == role}
        for row in self.tape.rows("weights"):
            if row["engine"] in found and row["group"] == group:
                assert row["state"] == "complete" and row["reason"] is None
                found[row["engine"]][row["version"]] = row["digest"]
        return found


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Recorded]:
    made: dict[tuple[str, ...], Recorded] = {}

    def record(*flags: str, processes: int = 1) -> Recorded:
        key = (*flags, str(processes))
        if key not in made:
            folder = tmp_path_factory.mktemp("trl")
            launch = [PYTHON]
            if processes > 1:
                launch += ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
                launch += ["--standalone"]
            command = [*launch, str(JOB), str(folder / "out"), *flags]
            done = subprocess.run(
                [PYTHON, "-m", "rolltape", "record", "-o", str(folder / "tape"), "--", *command],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                check=False,
            )
            if "No module named 'peft'" in done.stderr:
                pytest.skip("peft is not installed")
            assert done.returncode == 0, done.stderr[-4000:]
            made[key] = Recorded(folder / "tape")
        return made[key]

    return record


JOBS = {"one": ((), 1), "lora": (("--lora",), 1), "two": (("--samples", "8"), 2)}


@pytest.fixture(params=JOBS)
def recorded(request: Any, job: Callable[..., Recorded]) -> Recorded:
    flags, processes = JOBS[request.param]
    return job(*flags, processes=processes)


def test_every_scoring_is_a_pass_with_logprobs_and_routes(recorded: Recorded) -> None:
    kinds = {row["kind"] for row in recorded.tape.rows("events")}
    assert kinds <= {"update"}
    rollouts = {s.info["digest"] for s in recorded.of("rollout")}
    trained, references = recorded.of("trainer"), recorded.of("reference")
    assert {s.annotations["scoring"] for s in trained} == {"old", "current"}
    assert {s.annotations["scoring"] for s in references} == {"reference"}
    for sequence in [*trained, *references]:
        assert sequence.info["digest"] in rollouts
        assert sequence.logprob("scaled").valid[sequence.prompt_len :].all()
        assert sequence.routes().valid.all()
        assert sequence.annotations["autocast"] == "no"
        assert sequence.annotations["micro_batch"] == 0  # one in each optimizer step
    # each sequence is scored before training, by the reference, and in the loss
    count = len(recorded.of("rollout"))
    assert (len(trained), len(references)) == (2 * count, count)
    steps = {s.annotations["optimizer_step"] for s in trained}
    assert steps == {0, 1, 2, 3}


def test_where_weights_and_tokens_are_the_same_so_are_the_logprobs(recorded: Recorded) -> None:
    rollouts = {s.info["digest"]: s for s in recorded.of("rollout")}
    old = [s for s in recorded.of("trainer") if s.annotations["scoring"] == "old"]
    assert {s.annotations["optimizer_step"] for s in old} == {0, 2}
    for sequence in old:
        theirs = rollouts[sequence.info["digest"]].logprob("scaled")
        mine = sequence.logprob("scaled")
        both = mine.valid & theirs.valid
        assert both.sum() == 8
        np.testing.assert_allclose(mine.values[both], theirs.values[both], atol=1e-3)


def test_the_job_is_compared_with_itself(recorded: Recorded) -> None:
    tape, count = recorded.tape, len(recorded.of("rollout"))
    old = diff_tapes(tape, tape, scoring="old")
    assert old["compared"]["sequences"] == count and old["tokens_compared"] == 8 * count
    assert {p["kind"] for p in old["identity"]} <= {"ambiguous"}
    assert "weights_unchecked" not in {p["kind"] for p in old["warnings"]}
    assert old["max_abs"] < 1e-3
    # half of it is scored when the weights have moved on
    current = diff_tapes(tape, tape, scoring="current")
    moved = [p["tokens"] for p in current["identity"] if p["kind"] == "weights"]
    assert sum(moved) == 4 * count


def test_groups_rewards_and_advantages_stand_at_the_rollouts(recorded: Recorded) -> None:
    groups: dict[str, list[Any]] = {}
    for sequence in recorded.of("rollout"):
        assert not sequence.info["group_derived"]
        groups.setdefault(sequence.info["group"], []).append(sequence)
    engines = len({s.key.engine for s in recorded.of("rollout")})
    assert len(groups) == 2  # one prompt a generation
    for members in groups.values():
        assert len(members) == 4 * engines
        assert len({s.key.engine for s in members}) == engines
        assert len({s.tokens.values[: s.prompt_len].tobytes() for s in members}) == 1
        rewards = np.array([s.annotations["reward"] for s in members])
        np.testing.assert_array_equal(
            rewards, [s.annotations["reward.length_reward"] for s in members]
        )
        wanted = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
        found = [s.annotations["advantage"] for s in members]
        np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_the_rollout_ran_what_the_trainer_had_then(job: Callable[..., Recorded]) -> None:
    recorded = job()
    (trained,) = recorded.digests("trainer").values()
    (ran,) = recorded.digests("rollout").values()
    (reference,) = recorded.digests("reference").values()
    assert sorted(trained) == [0, 1, 2, 3] and len(set(trained.values())) == 4
    assert ran == {0: trained[0], 1: trained[2]}
    assert reference == {0: trained[0]}


def test_an_adapter_has_a_digest_of_its_own(job: Callable[..., Recorded]) -> None:
    recorded = job("--lora")
    (trained,), (base,) = (recorded.digests("trainer", g).values() for g in ("lora", ""))
    (ran,) = recorded.digests("rollout", "lora").values()
    assert sorted(trained) == [0, 1, 2, 3] and len(set(trained.values())) == 4
    assert ran == {0: trained[0], 1: trained[2]}
    assert len(set(base.values())) == 1
    # the reference is the same model with the adapter off: it has none, and does not move
    assert recorded.digests("reference", "lora") == {e: {} for e in recorded.digests("reference")}
    assert list(recorded.digests("reference").values()) == [{0: base[0]}]


def test_processes_have_engines_of_their_own_with_the_same_weights(
    job: Callable[..., Recorded],
) -> None:
    recorded = job("--samples", "8", processes=2)
    rows = [row for row in recorded.tape.engines.values() if row["role"] == "trainer"]
    ranks = [json.loads(r["ranks"]) if isinstance(r["ranks"], str) else r["ranks"] for r in rows]
    assert sorted(r["world"] for r in ranks) == [[0, 2], [1, 2]]
    one, other = recorded.digests("trainer").values()
    assert one == other and len(set(one.values())) == 4


def test_autocast_is_said(job: Callable[..., Recorded]) -> None:
    recorded = job("--bf16")
    scored = recorded.of("trainer")
    assert {s.annotations["autocast"] for s in scored} == {"bf16"}
