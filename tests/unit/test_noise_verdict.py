"""The verdict of a whole diff with a measured noise floor."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from rolltape.replay.cli import diff as diff_command
from rolltape.replay.diff import diff_tapes
from rolltape.replay.front import Floor
from rolltape.store import UsageError
from tests.builders import Sample, random_samples, write_tape

FACTS = {"host": "here", "device": "cpu"}
Change = Callable[[list[Sample]], None]


def nudge(by: float, column: str = "processed") -> Change:
    """Move every third logprob of a column by so much."""

    def change(samples: list[Sample]) -> None:
        for sample in samples:
            getattr(sample, column).values[::3] += np.float32(by)

    return change


def weigh(by: float) -> Change:
    """Move the weight of one expert of one decision."""

    def change(samples: list[Sample]) -> None:
        samples[0].used.weights[3, 1, 0] += np.float32(by)

    return change


def swap(samples: list[Sample]) -> None:
    """The same experts in another slot order, each with its weight."""
    block = samples[0].used
    for values in (block.ids, block.weights):
        values[4, 0, [0, 1]] = values[4, 0, [1, 0]]


def flip(samples: list[Sample]) -> None:
    block = samples[0].used
    block.ids[5, 1, 0] = next(e for e in range(block.experts) if e not in block.ids[5, 1])


def drop(samples: list[Sample]) -> None:
    """Another kept set, of one token more."""
    kept = samples[0].kept
    at = next(i for i, found in enumerate(kept) if found is not None and len(found))
    kept[at] = np.append(kept[at], next(t for t in range(1000) if t not in kept[at]))


def noisy(samples: list[Sample]) -> None:
    """What executions that should agree differ by."""
    nudge(1e-3)(samples)
    nudge(2e-3, "raw")(samples)
    nudge(1e-3, "scaled")(samples)
    weigh(0.01)(samples)


@pytest.fixture
def make(tmp_path: Path) -> Any:
    samples = random_samples(3)
    a = write_tape(tmp_path / "a", samples, facts=FACTS)
    count = 0

    def other(*changes: Change, host: str = "here") -> tuple[Any, Any]:
        nonlocal count
        count += 1
        changed = copy.deepcopy(samples)
        for change in changes:
            change(changed)
        facts = {**FACTS, "host": host}
        return a, write_tape(tmp_path / f"b{count}", changed, replays=a, facts=facts)

    return other


@pytest.fixture
def floor(make: Any, tmp_path: Path) -> Path:
    path = tmp_path / "floor.json"
    found = diff_tapes(*make(noisy), save_floor=path)
    assert found["verdict"] == "divergent"  # a floor is no judge of itself
    return path


def test_the_floor_has_the_largest_differences_and_the_sample(floor: Path) -> None:
    measured = Floor.load(floor).values
    assert measured is not None and measured.routes is not None
    column = measured.logprobs["processed"]
    assert column.max == pytest.approx(1e-3, rel=1e-2)
    assert (column.tokens, column.unequal) == (72, 24)
    assert measured.logprobs["raw"].max == pytest.approx(2e-3, rel=1e-2)
    assert measured.routes.weight_max == pytest.approx(0.01, rel=1e-3)
    assert (measured.routes.disagree, measured.routes.order_only) == (0, 0)
    assert measured.routes.decisions == measured.routes.weights == 3 * 29 * 3


@pytest.mark.parametrize(
    ("change", "verdict", "reason"),
    [
        (noisy, "within-noise", "none above the noise floor"),
        (nudge(1.9e-3), "within-noise", "24 processed logprobs, none above"),
        (nudge(2.1e-3), "divergent", r"processed logprobs up to \|d\| 0.0021, noise up to 0.002"),
        (nudge(5e-3, "raw"), "divergent", "raw logprobs"),
        (nudge(np.nan), "divergent", "24 processed logprobs that are not finite"),
        (weigh(0.019), "within-noise", "weights, none above the noise floor"),
        (weigh(0.03), "divergent", "combine weights up to 0.03, noise up to 0.02"),
        (weigh(np.inf), "divergent", "1 combine weights that are not finite"),
        (swap, "divergent", "1 other slot orders, of which the floor has none"),
        (flip, "divergent", "1 other choices of experts"),
        (lambda _: None, "identical", "bitwise equal"),
    ],
)
def test_only_what_is_within_the_floor_is_noise(
    make: Any, floor: Path, change: Change, verdict: str, reason: str
) -> None:
    found = diff_tapes(*make(change), floor=floor)
    assert found["verdict"] == verdict, found["reason"]
    assert pytest.approx(2.0) == found["noise"]["margin"]
    assert bool(found["noise"]["above"]) == (verdict == "divergent")
    assert re.search(reason, found["reason"]), found["reason"]


def test_another_kept_set_is_never_noise(make: Any, floor: Path) -> None:
    found = diff_tapes(*make(drop), floor=floor)
    assert found["verdict"] == "divergent" and "1 other kept sets" in found["reason"]


def test_slot_order_is_noise_where_the_floor_has_seen_some(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "floor.json"
    diff_tapes(*make(swap), save_floor=path)
    assert diff_tapes(*make(swap), floor=path)["verdict"] == "within-noise"
    # flips that executions that should agree had do not make flips noise
    diff_tapes(*make(flip), save_floor=path)
    assert diff_tapes(*make(flip), floor=path)["verdict"] == "divergent"


def test_without_a_floor_or_with_a_foreign_one_every_bit_counts(make: Any, floor: Path) -> None:
    found = diff_tapes(*make(noisy))
    assert found["verdict"] == "divergent" and found["noise"] is None
    found = diff_tapes(*make(noisy, host="elsewhere"), floor=floor)
    assert found["verdict"] == "divergent" and "of another kind: host" in found["reason"]
    assert found["noise"]["unlike"]


def test_identity_comes_before_noise(make: Any, floor: Path) -> None:
    def shorter(samples: list[Sample]) -> None:
        noisy(samples)
        del samples[2:]

    found = diff_tapes(*make(shorter), floor=floor)
    assert found["verdict"] == "inconclusive" and "within the noise, but" in found["reason"]


def test_what_was_not_measured_has_no_noise(make: Any, floor: Path) -> None:
    content = json.loads(floor.read_text())
    del content["values"]  # of sites alone, as files were before
    floor.write_text(json.dumps({**content, "sites": {}}))
    found = diff_tapes(*make(nudge(1e-6)), floor=floor)
    assert found["verdict"] == "divergent"
    assert "processed logprobs, of which no noise was measured" in found["reason"]
    assert "combine weights, of which no" in diff_tapes(*make(weigh(1e-6)), floor=floor)["reason"]


def test_a_floor_of_equal_executions_has_no_noise(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "floor.json"
    assert diff_tapes(*make(lambda _: None), save_floor=path)["verdict"] == "identical"
    assert diff_tapes(*make(nudge(1e-6)), floor=path)["verdict"] == "divergent"


def test_values_that_are_not_finite_make_no_floor(make: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="24 processed logprobs that differ are not finite"):
        diff_tapes(*make(nudge(np.inf)), save_floor=tmp_path / "floor.json")
    assert not (tmp_path / "floor.json").exists()


def test_sites_above_their_floor_are_divergent_whatever_the_logprobs_are(tmp_path: Path) -> None:
    samples = random_samples(2, sites=("layers.0.out",))
    a = write_tape(tmp_path / "a", samples, facts=FACTS)
    for name, by in (("b", 1.001), ("c", 1.01)):
        changed = copy.deepcopy(samples)
        noisy(changed)
        for sample in changed:
            sample.activations["layers.0.out"] *= np.float32(by)
        write_tape(tmp_path / name, changed, replays=a, facts=FACTS)
    run, floor = CliRunner().invoke, str(tmp_path / "floor.json")
    paths = {name: str(tmp_path / name) for name in "abc"}

    def diff(*arguments: str) -> Any:
        return run(diff_command, list(arguments), standalone_mode=False)

    assert diff(paths["a"], paths["b"], "--save-floor", floor).return_value == 1
    found = diff(paths["a"], paths["b"], "--floor", floor)
    assert found.return_value == 0 and found.output.startswith("within-noise: "), found.output
    assert "noise floor: processed |d| 0.001 over 48 tokens" in found.output
    found = diff(paths["a"], paths["c"], "--floor", floor, "--json")
    report = json.loads(found.output)
    assert found.return_value == 1 and report["verdict"] == "divergent"
    assert report["noise"]["above"] == ["activations from layers.0.out on"]
