"""Settings asked for and in force, and what is recorded where not all is wanted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rolltape import store
from rolltape.recorder.digest import GroupDigest
from rolltape.recorder.gating import in_steps, prompt_key, wants
from rolltape.recorder.options import Options
from rolltape.recorder.session import Session
from rolltape.recorder.settings import findings, launch_environment, launch_variables
from rolltape.recorder.weights import Versions
from rolltape.store import UsageError
from rolltape.store.describe import describe_tape


def codes(*args: object, **kwargs: object) -> list[str]:
    return [f.code for f in findings(*args, **kwargs)]


def test_a_flag_with_a_value_that_nothing_reads_is_a_finding() -> None:
    (found,) = findings({}, {}, {"FORCE_DETERMINISTIC": "true"})
    assert found.code == "RT401" and "1" in found.remedy
    assert found.as_detail()["name"] == "FORCE_DETERMINISTIC"
    assert not findings({}, {}, {"FORCE_DETERMINISTIC": "1", "NCCL_ALGO": "Ring"})


def test_flags_of_the_launcher_that_were_lost_or_changed() -> None:
    launched = {"FORCE_DETERMINISTIC": "1", "NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "2"}
    have = {"NCCL_ALGO": "Tree", "OMP_NUM_THREADS": "2"}
    assert codes({}, {}, have, launched=launched) == ["RT402", "RT403"]


def test_engine_arguments_that_were_not_honoured() -> None:
    requested = {"dtype": "bfloat16", "attention": "FLASH", "moe": "auto", "other": 1}
    effective = {"dtype": "torch.bfloat16", "attention": "TRITON", "moe": "CUTLASS"}
    (found,) = findings(requested, effective)
    assert found.code == "RT404" and found.detail["name"] == "attention"


def test_the_flags_of_the_launcher_travel() -> None:
    env = {"NCCL_ALGO": "Ring", "HOME": "/root"}
    assert launch_environment(launch_variables(env)) == {"NCCL_ALGO": "Ring"}
    assert launch_variables({"HOME": "/root"}) == {} and launch_environment({}) is None


def test_a_group_is_kept_as_a_whole_and_at_every_higher_rate() -> None:
    keys = [prompt_key([i, i + 1]) for i in range(4000)]
    kept = {r: {k for k in keys if wants(k, Options(sample_rate=r))} for r in (0.1, 0.5, 1.0)}
    assert kept[0.1] <= kept[0.5] <= kept[1.0] == set(keys)
    assert 300 < len(kept[0.1]) < 500 and 1850 < len(kept[0.5]) < 2150
    assert prompt_key((1, 2)) == prompt_key([1, 2]) != prompt_key([12])


def test_steps() -> None:
    for text, steps in (("", [0, 5, 9]), ("5:9", [5]), ("5:", [5, 9]), (":5", [0])):
        assert [s for s in (0, 5, 9) if in_steps(s, Options(steps=text))] == steps


@pytest.mark.parametrize(
    "bad", [{"sample_rate": 0.0}, {"sample_rate": 1.5}, {"steps": "7"}, {"steps": "9:9"}]
)
def test_gating_that_makes_no_sense_is_refused(bad: dict) -> None:
    with pytest.raises(UsageError):
        Options(**bad)


def test_gating_round_trips_through_the_environment() -> None:
    options = Options(sample_rate=0.25, steps="3:9")
    assert Options.from_environment(options.environment("/t")) == options


def test_versions_of_weights(tmp_path: Path) -> None:
    root = store.create_tape(tmp_path / "t", role="rollout", provenance={})
    session = Session(root, Options())
    versions = Versions(session, "e" * 32)

    def digests(value: int) -> list[GroupDigest]:
        return [GroupDigest(group=g, value=value, tensors=1, elements=2) for g in ("norm", "")]

    assert (versions.current, versions.complete("base", digests(1))) == (-1, 0)
    versions.requested("step-1")
    versions.dirty("bucket", "step-1")
    versions.dirty("bucket", "step-1")
    assert versions.is_dirty and versions.current == 0
    assert versions.complete("step-1", digests(2)) == 1 and not versions.is_dirty
    assert versions.complete("step-2", digests(2)) == 2
    assert versions.complete("step-3", digests(1)) == 3
    assert versions.complete("step-4", reason="cannot be read") == 4
    session.close()
    tape = store.open(root)
    rows = [(r["version"], r["state"], r["label"], r["digest"]) for r in tape.rows("weights")]
    assert len(rows) == 4 * 2 + 2 and len(set(rows)) == 4 + 2
    assert (0, "dirty", "step-1", None) in rows and (4, "complete", "step-4", None) in rows
    events = [(e["kind"], json.loads(e["detail"])) for e in tape.rows("events")]
    assert [d["code"] for kind, d in events if kind == "finding"] == ["RT405", "RT406"]
    updates = [d for kind, d in events if kind == "update"]
    assert updates[0] == {"requested": "step-1"}
    assert [d["version"] for d in updates[1:]] == [1, 2, 3, 4]
    described = "\n".join(d["message"] for d in describe_tape(tape)["events"]["findings"])
    assert "changed no weight" in described and "version 0 again" in described
