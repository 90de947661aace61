"""Controls of the diff: a change is seen where it is, and equal is only said of equal."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltape.cli import main
from rolltape.replay import diff_tapes
from rolltape.replay.cli import diff as diff_command
from rolltape.replay.cli import replay as replay_command
from rolltape.replay.diff_text import print_diff
from rolltape.replay.semantics import kept_sets_equal
from rolltape.store import (
    Masked,
    Supports,
    Tape,
    TapeExistsError,
    TapeWriter,
    UsageError,
    open_report,
)
from rolltape.store import open as open_tape
from rolltape.store.schema import TOKEN_STATES
from tests.builders import Sample, random_routes, random_samples, write_tape


class Sides:
    """Two tapes of the same content; tests change the content of either side before the diff."""

    def __init__(self, tmp_path: Path, **options) -> None:
        self.a: list[Sample] = random_samples(**options)
        self.b: list[Sample] = copy.deepcopy(self.a)
        self.path = tmp_path
        self.options_a: dict = {}
        self.options_b: dict = {}

    def tapes(self) -> tuple[Tape, Tape]:
        a = write_tape(self.path / "a", self.a, **self.options_a)
        return a, write_tape(self.path / "b", self.b, replays=a, **self.options_b)

    def diff(self, **options) -> dict:
        return diff_tapes(*self.tapes(), **options)


@pytest.fixture
def sides(tmp_path):
    return Sides(tmp_path)


def kinds(report: dict, where: str = "identity") -> list[str]:
    return [p["kind"] for p in report[where]]


def flip_bit(values: np.ndarray, at: int) -> None:
    values.view(np.uint32)[at] ^= 1


# -- equal is only said of equal ----------------------------------------------------------


def test_a_tape_and_its_exact_replay_are_identical_and_the_report_says_what_was_compared(sides):
    report = sides.diff()
    assert report["verdict"] == "identical"
    assert report["identity"] == report["warnings"] == []
    assert report["compared"] == {
        "sequences": 4,
        "logprobs": 4 * 24,
        "routes": 4 * 29 * 3,
        "supports": 4 * 24,
        "activations": 0,
    }
    assert report["tokens"] == {**dict.fromkeys(TOKEN_STATES, 0), "compared": 96, "not_scored": 24}
    assert report["frac_bitwise"] == 1.0
    assert report["k1"] == report["k3"] == report["mean_abs"] == 0.0


def test_a_tape_with_itself_is_identical_even_where_it_does_not_know_its_own_semantics(sides):
    for sample in sides.a:
        sample.semantics = dict.fromkeys(sample.semantics)
    a, b = sides.tapes()
    assert diff_tapes(a, a)["verdict"] == "identical"
    # of another tape, unknown is not agreement
    blocked = diff_tapes(a, b)
    assert blocked["column"] == "raw"
    assert "semantics" in kinds(blocked)


def test_a_tape_without_anything_to_compare_is_not_identical_to_itself(tmp_path):
    samples = random_samples(2, layers=())
    for sample in samples:
        sample.raw = sample.scaled = sample.processed = Masked.empty(sample.length, np.float32)
        sample.kept = None
    tape = write_tape(tmp_path / "a", samples)
    report = diff_tapes(tape, tape)
    assert report["verdict"] == "not-run"
    assert report["routing"] is None
    assert report["not_compared"]["routes"] == "a: the model is dense; b: the model is dense"


def test_disjoint_tapes_are_not_run(tmp_path):
    a = write_tape(tmp_path / "a", random_samples(2))
    b = write_tape(tmp_path / "b", random_samples(2, seed=9), engine="e5" * 16)
    report = diff_tapes(a, b)
    assert (report["verdict"], report["tokens_compared"]) == ("not-run", 0)
    assert report["mean_abs"] is report["max_at"] is report["k3"] is None
    assert [(p["kind"], p["side"], p["count"]) for p in report["identity"]] == [
        ("unmatched", "a", 2),
        ("unmatched", "b", 2),
    ]


@given(seed=st.integers(0, 2**16), fragments=st.tuples(st.integers(1, 40), st.integers(1, 40)))
@settings(max_examples=15, deadline=None)
def test_how_a_tape_was_cut_into_fragments_makes_no_difference(tmp_path_factory, seed, fragments):
    path = tmp_path_factory.mktemp("cut")
    samples = random_samples(2, seed=seed, response=[7, 19])
    a = write_tape(path / "a", samples, fragment=fragments[0])
    b = write_tape(path / "b", samples, fragment=fragments[1], replays=a)
    assert diff_tapes(a, b)["verdict"] == "identical"


# -- logprobs -----------------------------------------------------------------------------


def test_one_flipped_bit_makes_them_divergent_and_is_located(sides):
    flip_bit(sides.b[2].processed.values, 17)
    report = sides.diff()
    assert report["verdict"] == "divergent"
    assert report["differences"] == {
        "logprobs": 1,
        "routes": 0,
        "route_order": 0,
        "route_weights": 0,
        "used_routes": 0,
        "supports": 0,
        "activations": 0,
    }
    assert report["max_at"] == {"sequence": "a1a1a1a1.0-1.0", "position": 17}
    exact = abs(float(sides.b[2].processed.values[17]) - float(sides.a[2].processed.values[17]))
    assert report["max_abs"] == exact > 0
    assert report["histogram"]["bitwise"] == 95


def test_the_sign_is_b_minus_a_and_exchanging_the_sides_exchanges_it(sides):
    sides.b[0].processed.values[10] -= 0.5
    a, b = sides.tapes()
    forth, back = diff_tapes(a, b), diff_tapes(b, a)
    assert forth["k1"] == pytest.approx(0.5 / 96)
    assert back["k1"] == pytest.approx(-0.5 / 96)
    assert back["max_at"] == {"sequence": "b2b2b2b2.0-0.0", "position": 10}


def test_a_difference_in_a_column_that_is_not_the_headline_is_a_difference(sides):
    flip_bit(sides.b[0].raw.values, 10)
    report = sides.diff()
    assert report["column"] == "processed"
    assert report["frac_bitwise"] == 1.0
    assert report["verdict"] == "divergent"
    assert report["by_semantics"]["raw"]["max_at"]["position"] == 10
    assert report["by_semantics"]["scaled"]["frac_bitwise"] == 1.0


def test_what_masked_tokens_hold_does_not_matter(sides):
    for sample in sides.b:
        sample.loss_mask.values[10:14] = False
        sample.processed.values[10:14] = [np.nan, -1e30, 0.0, np.inf]
    for sample in sides.a:
        sample.loss_mask.values[10:14] = False
    report = sides.diff()
    assert report["verdict"] == "identical"
    assert report["tokens"]["masked"] == 16
    assert report["non_finite"] == 0


def test_a_token_that_one_side_masks_is_not_compared_and_that_is_said(sides):
    sides.b[0].loss_mask.values[10] = False
    sides.b[0].processed.values[10] += 1
    report = sides.diff()
    assert report["verdict"] == "identical"
    assert [(w["kind"], w["tokens"]) for w in report["warnings"]] == [("loss_mask", 1)]


def test_a_token_whose_mask_nobody_recorded_counts(sides):
    for sample in sides.a + sides.b:
        sample.loss_mask = Masked.empty(sample.length, np.bool_)
    assert sides.diff()["tokens_compared"] == 96


@pytest.mark.parametrize(
    ("side", "value", "name"),
    [("b", np.nan, "NaN"), ("a", -np.inf, "-Infinity"), ("b", np.inf, "Infinity")],
)
def test_a_value_that_is_not_finite_is_counted_by_side_and_never_averaged(sides, side, value, name):
    getattr(sides, side)[1].processed.values[20] = value
    report = sides.diff()
    assert report["verdict"] == "divergent"
    assert report["non_finite"] == report["tokens"]["non_finite"] == 1
    assert report["non_finite_detail"][side][name] == 1
    assert sum(sum(report["non_finite_detail"][s].values()) for s in "ab") == 1
    place = report["non_finite_detail"]["where"][0]
    assert (place["sequence"], place["position"], place[side]) == ("a1a1a1a1.0-0.1", 20, name)
    assert (report["tokens_compared"], report["mean_abs"]) == (95, 0.0)


def test_the_same_nan_on_both_sides_is_no_difference_but_is_counted(sides):
    for sample in (sides.a[1], sides.b[1]):
        sample.processed.values[20] = np.nan
    report = sides.diff()
    assert (report["verdict"], report["non_finite"]) == ("identical", 1)


def test_nothing_but_nan_on_one_side_is_divergent_not_an_average_of_nothing(sides):
    for sample in sides.b:
        sample.processed.values[:] = np.nan
    report = sides.diff()
    assert report["verdict"] == "divergent"
    assert (report["tokens_compared"], report["mean_abs"], report["non_finite"]) == (0, None, 96)


def test_overflow_is_written_as_a_string(sides):
    sides.b[0].processed.values[10] = 800.0
    report = json.loads(json.dumps(sides.diff(), allow_nan=False))
    assert report["k3"] == "Infinity"
    assert math.isfinite(report["ess"])


def test_a_value_that_one_side_lacks_keeps_the_rest_from_being_identical(sides):
    sides.b[0].processed.valid[12:15] = False
    report = sides.diff()
    assert report["tokens"]["missing_b"] == 3
    assert report["verdict"] == "inconclusive"
    assert kinds(report) == ["missing"]


def test_the_slices_of_a_difference_show_who_carries_it(sides):
    sides.b[3].processed.values[6:] += 2.0
    sides.a[3].version[6:] = 5
    report = sides.diff()
    assert report["by_group"]["prompt-0"]["max_abs"] == 0.0
    assert report["by_group"]["prompt-1"]["max_abs"] == pytest.approx(2.0)
    assert report["by_version"]["5"]["tokens_compared"] == 24
    assert report["by_version"]["5"]["frac_ratio_gt_2"] == 1.0
    assert report["by_version"]["0"]["mean_abs"] == 0.0
    assert {k: v["tokens_compared"] for k, v in report["by_position"].items()} == {
        "0-15": 64,
        "16-63": 32,
    }
    rows = {row["a"]: row for row in report["by_sequence"]}
    assert rows["a1a1a1a1.0-1.1"]["first_over"] == 6
    assert rows["a1a1a1a1.0-0.0"]["first_over"] is None


# -- identity -----------------------------------------------------------------------------


def test_another_token_is_an_identity_problem_at_its_position_and_the_pair_is_not_compared(sides):
    sides.b[1].ids[11] += 1
    sides.b[1].processed.values[20] += 1
    report = sides.diff()
    problem = report["identity"][0]
    assert (problem["kind"], problem["sequence"], problem["position"]) == (
        "tokens",
        "a1a1a1a1.0-0.1",
        11,
    )
    assert report["verdict"] == "inconclusive"
    assert report["compared"]["sequences"] == 3


def test_if_no_pair_has_the_same_tokens_nothing_was_run(sides):
    for sample in sides.b:
        sample.ids[7] += 1
    report = sides.diff()
    assert report["verdict"] == "not-run"
    assert kinds(report) == ["tokens"] * 4


def test_another_prompt_length_is_an_identity_problem(sides):
    sides.b[0].prompt_len += 1
    report = sides.diff()
    assert kinds(report) == ["prompt_len"]
    assert report["identity"][0]["values"] == [6, 7]


def test_a_replay_that_stopped_early_is_compared_as_far_as_it_goes_and_never_identical(sides):
    b = sides.b[0]
    end = 20
    for name in ("ids", "version"):
        setattr(b, name, getattr(b, name)[:end])
    for name in ("loss_mask", "raw", "scaled", "processed"):
        setattr(b, name, getattr(b, name)[:end])
    b.kept = b.kept[:end]
    b.used.ids, b.used.valid = b.used.ids[:end], b.used.valid[:end]
    b.used.weights, b.used.margin, b.used.missing = b.used.weights[:end], b.used.margin[:end], []
    report = sides.diff()
    assert report["tokens"]["missing_b"] == 10
    assert kinds(report) == ["length", "missing"]
    assert report["identity"][0]["values"] == [30, 20]
    assert report["verdict"] == "inconclusive"


def test_an_empty_and_an_aborted_sequence_are_compared_like_any_other(tmp_path):
    sides = Sides(tmp_path, n=4, response=[24, 0, 1, 3])
    for sample, finish in zip(sides.a, ("stop", "abort", "length", "abort"), strict=True):
        sample.finish = finish
    report = sides.diff()
    assert (report["verdict"], report["compared"]["sequences"]) == ("identical", 4)
    assert report["tokens_compared"] == 28


def test_tapes_without_sequences_are_not_run(tmp_path):
    a = write_tape(tmp_path / "a", [])
    assert diff_tapes(a, a)["verdict"] == "not-run"


def test_other_weights_are_named_with_the_tokens_they_made(sides):
    sides.options_a, sides.options_b = {"digests": {0: 7}}, {"digests": {0: 8}}
    report = sides.diff()
    problem = report["identity"][0]
    assert (problem["kind"], problem["tokens"]) == ("weights", 96)
    assert problem["values"] == [f"{7:016x}", f"{8:016x}"]
    assert report["verdict"] == "inconclusive"


def test_weights_are_the_same_by_digest_whatever_their_version_is_called(sides):
    sides.options_a, sides.options_b = {"digests": {4: 7}}, {"digests": {0: 7}}
    for sample in sides.a:
        sample.version[:] = 4
    assert sides.diff()["verdict"] == "identical"


def test_weights_of_another_dtype_cannot_be_checked_and_that_is_said(sides):
    sides.options_a = {"digests": {0: 7}}
    sides.options_b = {"digests": {0: 8}, "facts": {"dtype": "float32"}}
    report = sides.diff()
    assert kinds(report, "warnings") == ["weights_unchecked"]
    assert report["settings"]["dtype"] == ["bfloat16", "float32"]


def test_adapters_belong_to_the_weights(sides):
    sides.options_a, sides.options_b = {"adapters": {0: 5}}, {"adapters": {0: 6}}
    problem = sides.diff()["identity"][0]
    assert problem["kind"] == "weights"
    assert problem["values"] == [f"{7:016x} with adapter {n:016x}" for n in (5, 6)]


@pytest.mark.parametrize(("theirs", "warned"), [({"adapters": {0: 5}}, False), ({}, True)])
def test_an_adapter_that_one_side_does_not_have_cannot_be_checked(sides, theirs, warned):
    sides.options_a, sides.options_b = {"adapters": {0: 5}}, theirs
    report = sides.diff()
    assert not kinds(report)
    assert kinds(report, "warnings") == ["weights_unchecked"] * warned


def test_another_architecture_is_an_identity_problem(sides):
    sides.options_b = {"facts": {"model_fingerprint": "0" * 32}}
    assert kinds(sides.diff()) == ["model"]


# -- semantics ----------------------------------------------------------------------------


def _change(samples: list[Sample], **semantics) -> None:
    for sample in samples:
        sample.semantics = {**sample.semantics, **semantics}


def test_another_temperature_blocks_what_it_touches_and_raw_is_compared(sides):
    _change(sides.b, temperature=1.0)
    report = sides.diff()
    assert report["column"] == "raw"
    problems = {p["column"]: p for p in report["identity"]}
    assert problems.keys() == {"scaled", "processed"}
    assert problems["scaled"]["values"] == [0.7, 1.0]
    assert problems["scaled"]["tokens"] == 96
    assert report["verdict"] == "inconclusive"


def test_a_temperature_that_an_engine_keeps_in_float32_is_the_same_temperature(sides):
    _change(sides.b, temperature=float(np.float32(0.7)))
    assert sides.diff()["verdict"] == "identical"


def test_other_edits_block_scaled_and_processed(sides):
    _change(sides.b, edits=["repetition_penalty=1.1"])
    report = sides.diff()
    assert report["column"] == "raw"
    assert {p["field"] for p in report["identity"]} == {"edits"}


def test_another_vocabulary_size_blocks_what_is_normalised_over_all_of_it(sides):
    _change(sides.b, vocab_size=1024)
    report = sides.diff()
    # truncated columns are normalised over the kept set, which padding does not reach
    assert report["column"] == "processed"
    assert {(p["column"], p["field"]) for p in report["identity"]} == {
        ("scaled", "vocab_size"),
        ("raw", "vocab_size"),
    }


def test_another_truncation_is_compared_where_the_kept_sets_are_equal(sides):
    _change(sides.b, truncation=["top_p=0.95"])
    for position in (8, 9):
        sides.b[0].kept[position] = np.append(sides.b[0].kept[position], np.uint32(9999))
    report = sides.diff()
    problem = report["identity"][0]
    assert (problem["column"], problem["field"]) == ("processed", "truncation")
    assert (problem["tokens"], problem["kept_differ"]) == (2, 2)
    assert report["supports"]["differ"] == 2
    assert report["supports"]["first_differing"] == {"sequence": "a1a1a1a1.0-0.0", "position": 8}
    assert report["column"] == "scaled"
    assert report["by_semantics"]["processed"]["tokens_compared"] == 94


def test_another_truncation_without_kept_sets_is_not_compared(sides):
    _change(sides.b, truncation=[])
    for sample in sides.b:
        sample.kept = None
    report = sides.diff()
    assert report["column"] == "scaled"
    assert report["identity"][0]["tokens"] == 96
    assert report["not_compared"]["supports"] == "b recorded none"


def test_a_kept_set_that_differs_under_the_same_truncation_is_a_difference(sides):
    sides.b[0].kept[9] = np.append(sides.b[0].kept[9], np.uint32(9999))
    report = sides.diff()
    assert (report["verdict"], report["differences"]["supports"]) == ("divergent", 1)
    assert report["column"] == "processed"


def test_without_truncation_edits_and_temperature_the_columns_stand_in_for_each_other(tmp_path):
    sides = Sides(tmp_path, temperature=1.0, truncation=())
    for a, b in zip(sides.a, sides.b, strict=True):
        a.scaled, b.processed = a.raw, b.raw
        a.processed = Masked(a.raw.values.copy(), a.raw.valid)
        a.raw = a.scaled = b.scaled = b.raw = Masked.empty(a.length, np.float32)
        a.kept = b.kept = None
    sides.b[0].processed.values[10] += 0.25
    for b in sides.b:  # this side has raw only
        b.raw, b.processed = b.processed, b.raw
    report = sides.diff()
    assert report["column"] == "processed"
    assert report["max_abs"] == pytest.approx(0.25)
    assert report["identity"] == []


def test_sides_without_a_common_column_are_not_compared_and_told_why(sides):
    for a, b in zip(sides.a, sides.b, strict=True):
        a.scaled = a.processed = Masked.empty(a.length, np.float32)
        b.raw = b.processed = Masked.empty(b.length, np.float32)
    report = sides.diff()
    assert report["column"] is None
    assert report["not_compared"]["logprobs"] == "no column in both: a has raw, b has scaled"
    assert kinds(report) == ["semantics"]
    assert report["verdict"] == "inconclusive"  # routes and kept sets are equal


def test_sources_that_differ_are_reported_but_do_not_forbid(sides):
    _change(sides.b, source="recomputed")
    report = sides.diff()
    assert report["verdict"] == "identical"
    assert report["semantics"]["differences"] == [
        {"field": "source", "a": "engine", "b": "recomputed", "tokens": 96}
    ]


def test_kept_sets_compare_by_content_and_full_is_the_whole_vocabulary():
    def sets(*ids: list[int] | None) -> Supports:
        counts = [0 if i is None else len(i) for i in ids]
        return Supports(
            state=np.array([0 if i is None else 1 for i in ids], np.uint8),
            offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            ids=np.concatenate([np.array(i or [], np.uint32) for i in ids]).astype(np.uint32),
            derived=False,
        )

    a = sets([1, 2], None, [3], [4, 5], [], None, [7])
    b = sets([1, 2], None, [4], [4], [], [0, 1, 2], [7])
    found = kept_sets_equal(a, b, 8, vocab_size=3)
    assert found.values[:7].tolist() == [True, True, False, False, True, True, True]
    assert found.valid.tolist() == [True] * 7 + [False]


# -- routes -------------------------------------------------------------------------------


def test_one_swapped_expert_makes_them_divergent_and_is_located(sides, tmp_path):
    row = sides.b[1].used.ids[13, 1]
    spare = next(e for e in range(16) if e not in row)
    row[3] = spare
    report = sides.diff(out=tmp_path / "report")
    assert report["verdict"] == "divergent"
    routing = report["routing"]
    assert (routing["disagree"], routing["tokens_any"], routing["order_only"]) == (1, 1, 0)
    assert routing["tokens"] == 4 * 29
    assert {r["layer"]: r["disagree"] for r in routing["per_layer"]} == {1: 0, 2: 1, 3: 0}
    assert routing["by_position"]["0-15"]["disagree"] == 1
    flipped = open_report(tmp_path / "report").rows("tokens")[1]["flips"]
    assert [i for i, n in enumerate(flipped) if n] == [13]


def test_the_margin_of_a_flip_is_told_apart_from_the_others(sides):
    sides.a[1].used.margin[:] = 2.0
    sides.a[1].used.margin[13, 1] = 1e-3
    row = sides.b[1].used.ids[13, 1]
    row[3] = next(e for e in range(16) if e not in row)
    report = sides.diff(sequences=["0-0.1"])
    layer = report["routing"]["per_layer"][1]
    assert layer["flip_margin_mean"] == layer["flip_margin_max"] == pytest.approx(1e-3)
    assert layer["agree_margin_mean"] == pytest.approx(2.0)
    assert report["routing"]["margin_side"] == "a"


def test_another_slot_order_is_a_difference_of_its_own(sides):
    for block in (sides.b[0].used.ids, sides.b[0].used.weights):
        block[9, 0] = block[9, 0][[0, 2, 1, 3]]
    report = sides.diff()
    routing = report["routing"]
    assert (routing["disagree"], routing["order_only"], routing["top1_disagree"]) == (0, 1, 0)
    assert routing["weights_equal"] == routing["weights_compared"]
    assert (report["differences"]["route_order"], report["differences"]["routes"]) == (1, 0)
    assert report["verdict"] == "divergent"


def test_combine_weights_are_compared_by_expert(sides):
    sides.b[0].used.weights[9, 0, 2] += 0.25
    report = sides.diff()
    layer = report["routing"]["per_layer"][0]
    assert layer["weight_l1"] == pytest.approx(0.25 / layer["weights_compared"], rel=1e-3)


def test_a_weight_that_is_nan_is_a_difference_and_not_averaged(sides):
    sides.b[0].used.weights[9, 0, 2] = np.nan
    report = sides.diff()
    assert report["verdict"] == "divergent"
    layer = next(r for r in report["routing"]["per_layer"] if r["weights_non_finite"])
    assert layer["weights_non_finite"] == 1
    assert layer["weight_l1"] == 0
    assert report["differences"]["route_weights"] == 1
    assert report["differences"]["route_weights"] == 1
    assert report["differences"]["routes"] == 0


def test_the_first_expert_is_that_of_the_largest_weight_not_of_the_first_slot(sides):
    for block in (sides.b[0].used.ids, sides.b[0].used.weights):
        block[9, 0] = block[9, 0][[3, 2, 1, 0]]
    assert sides.diff()["routing"]["top1_disagree"] == 0


@pytest.mark.parametrize("lacking", ["a", "b", "both"])
def test_without_weights_nobody_knows_the_first_expert(sides, lacking):
    """Slot order does not tell it: some engines sort their slots, others do not."""
    for name in ("a", "b"):
        for sample in getattr(sides, name):
            if lacking in (name, "both"):
                sample.used.weights = None
    for sample in sides.b:
        sample.used.ids = sample.used.ids[..., ::-1].copy()
        if sample.used.weights is not None:
            sample.used.weights = sample.used.weights[..., ::-1].copy()
    report = sides.diff(out=sides.path / "report")
    routing = report["routing"]
    assert (routing["disagree"], routing["order_only"]) == (0, routing["decisions"])
    assert (routing["top1_disagree"], routing["top1_compared"]) == (None, 0)
    assert [row["top1_disagree"] for row in routing["per_layer"]] == [None] * 3
    rows = open_report(sides.path / "report").rows("routing")
    assert {row["top1_disagree"] for row in rows} == {None}
    assert "top-1: not known (no weights)" in printed(sides, report)


def test_a_weight_that_is_not_finite_leaves_the_first_expert_unknown(sides):
    sides.b[0].used.weights[9, 0, 2] = np.nan
    report = sides.diff()
    routing = report["routing"]
    assert (routing["top1_disagree"], routing["top1_compared"]) == (0, routing["decisions"] - 1)
    assert f"top-1: of the {routing['decisions'] - 1:,} decisions" in printed(sides, report)


def test_the_only_expert_is_the_first(tmp_path):
    sides = Sides(tmp_path, k=1)
    for sample in (*sides.a, *sides.b):
        sample.used.weights = None
    row = sides.b[0].used.ids[9, 0]
    row[0] = (row[0] + 1) % 16
    routing = sides.diff()["routing"]
    assert (routing["top1_disagree"], routing["top1_compared"]) == (1, routing["decisions"])


# -- what is printed ----------------------------------------------------------------------


def printed(sides: Sides, report: dict, out: Path | None = None) -> str:
    """As `rolltape diff` prints it."""
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream):
        print_diff(report, sides.path / "a", sides.path / "b", out)
    return stream.getvalue()


def test_a_difference_is_said_of_its_columns(sides):
    flip_bit(sides.b[0].raw.values, 12)
    assert sides.diff()["reason"] == "different bits in 1 raw logprobs"


def test_columns_that_differ_in_other_numbers_are_counted_one_by_one(sides):
    for at in (12, 13):
        flip_bit(sides.b[0].raw.values, at)
    flip_bit(sides.b[0].processed.values, 12)
    assert sides.diff()["reason"] == "different bits in 2 logprobs (1 processed, 2 raw)"


def test_of_identical_tapes_only_the_verdict_and_what_was_compared_is_printed(sides):
    report = sides.diff()
    assert printed(sides, report).splitlines() == [
        "identical: every value compared is bitwise equal",
        "compared: 96 logprobs (processed, scaled, raw), 348 routes, 96 supports in 4 sequences",
        "tokens: 96 compared, 24 not scored",
    ]


def test_what_is_said_to_be_next_can_be_run(sides):
    flip_bit(sides.b[0].processed.values, 12)
    report = sides.diff()
    (sides.path / "b.report").mkdir()
    commands = [t[6:] for t in printed(sides, report).splitlines() if t.startswith("next: ")]
    assert commands[1].endswith("-o " + str(sides.path / "b.report-2"))
    for command in commands:
        with pytest.raises(SystemExit) as ended:
            main(shlex.split(command)[1:])
        assert ended.value.code in (None, 0, 1)  # 1: the two differ


def test_ids_of_a_forced_replay_do_not_count_as_agreement(sides):
    for sample in sides.b:
        sample.live = copy.deepcopy(sample.used)
    row = sides.b[2].live.ids[7, 0]
    row[0] = next(e for e in range(16) if e not in row)
    report = sides.diff()
    routing = report["routing"]
    assert (routing["a_role"], routing["b_role"]) == ("used", "live")
    assert routing["disagree"] == 1
    assert routing["used"] == {"decisions": 348, "equal": 348}
    assert report["verdict"] == "divergent"


def test_forced_routes_that_are_not_the_recorded_ones_are_a_problem(sides):
    for sample in sides.b:
        sample.live = copy.deepcopy(sample.used)
    sides.b[2].used.ids[7, 0] = sides.b[2].used.ids[7, 0][::-1]
    report = sides.diff()
    assert report["routing"]["used"]["equal"] == 347
    assert "used_routes" in kinds(report)
    assert report["verdict"] == "divergent"


def test_routes_off_by_one_position_are_recognised(sides):
    routes = sides.b[0].used
    for values in (routes.ids, routes.weights, routes.margin):
        values[1:] = values[:-1].copy()
    report = sides.diff()
    shifted = next(p for p in report["identity"] if p["kind"] == "shifted_routes")
    assert (shifted["sequence"], shifted["shift"]) == ("a1a1a1a1.0-0.0", 1)
    assert shifted["shifted_rate"] > 0.9
    assert report["verdict"] == "divergent"


def test_routes_off_by_the_padding_are_recognised(sides):
    routes = sides.b[0].used
    routes.ids = np.roll(routes.ids, -5, axis=0)
    report = sides.diff()
    assert [p["shift"] for p in report["identity"] if p["kind"] == "shifted_routes"] == [-5]


def test_the_routes_of_another_request_are_recognised(sides):
    for name in ("ids", "weights", "margin"):
        setattr(sides.b[0].used, name, getattr(sides.a[3].used, name).copy())
    report = sides.diff()
    found = next(p for p in report["identity"] if p["kind"] == "foreign_routes")
    assert (found["sequence"], found["other"]) == ("a1a1a1a1.0-0.0", "a1a1a1a1.0-1.1")


@pytest.mark.parametrize("shift", [1, -1])
def test_logprobs_off_by_one_position_are_recognised(sides, shift):
    for sample in sides.b:
        sample.processed.values[6:] = np.roll(sample.processed.values[6:], shift)
    report = sides.diff()
    found = [p for p in report["identity"] if p["kind"] == "shifted_logprobs"]
    assert [p["shift"] for p in found] == [shift] * 4
    assert report["verdict"] == "divergent"


def test_honest_disagreement_raises_no_suspicion(sides):
    rng = np.random.default_rng(3)
    for sample in sides.b:
        other = random_routes(rng, sample.length, (1, 2, 3), 16, 4)
        flips = rng.random(other.valid.shape) < 0.1
        sample.used.ids[flips] = other.ids[flips]
        sample.processed.values[6:] += rng.normal(0, 0.3, 24).astype(np.float32)
    report = sides.diff()
    assert report["routing"]["disagree"] > 10
    assert report["mean_abs"] > 0.1
    assert report["identity"] == []


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (lambda ids: ids.fill(0), "zero_routes"),
        (lambda ids: ids.__setitem__((9, 1, 0), ids[9, 1, 1]), "repeated_experts"),
        (lambda ids: ids.__setitem__(slice(None), ids[:1]), "constant_routes"),
    ],
)
def test_routes_of_the_right_shape_that_cannot_be_true_are_named(sides, damage, kind):
    for samples in (sides.a, sides.b):  # the same on both sides: agreement proves nothing
        damage(samples[0].used.ids)
    report = sides.diff()
    found = [p for p in report["identity"] if p["kind"] == kind]
    assert [(p["side"], p["sequence"]) for p in found] == [
        ("a", "a1a1a1a1.0-0.0"),
        ("b", "b2b2b2b2.0-0.0"),
    ]
    assert report["verdict"] == "inconclusive"


def test_routes_that_one_side_lacks_are_counted(sides):
    sides.b[0].used.valid[4:6] = False
    report = sides.diff()
    assert report["routing"]["missing_b"] == 6
    assert kinds(report) == ["routes_missing"]
    assert report["routing"]["tokens"] == 4 * 29 - 2


def test_routes_that_could_not_be_recorded_are_no_fault(sides):
    sides.a[0].used.valid[:4] = False
    sides.a[0].used.missing.append([0, 4, None, "cached"])
    assert sides.diff()["verdict"] == "identical"


def test_the_route_of_the_last_token_is_no_difference_in_length(sides):
    for sample in sides.b:
        sample.used.valid[:] = True
    report = sides.diff()
    assert report["verdict"] == "identical"
    assert report["compared"]["routes"] == 4 * 29 * 3


def test_layers_are_matched_by_their_number(sides):
    for sample in sides.b:
        block = sample.used
        block.layers = (2, 3, 4)
        for name in ("ids", "weights", "margin"):
            values = getattr(block, name)
            values[:, :2] = values[:, 1:].copy()
    report = sides.diff()
    assert [r["layer"] for r in report["routing"]["per_layer"]] == [2, 3]
    assert report["routing"]["disagree"] == 0
    assert set(kinds(report)) == {"route_layers"}
    assert report["identity"][0]["values"] == [[1], [4]]


def test_other_numbers_of_experts_are_not_compared(tmp_path):
    sides = Sides(tmp_path)
    rng = np.random.default_rng(0)
    for sample in sides.b:
        sample.used = random_routes(rng, sample.length, (1, 2, 3), 32, 4)
    report = sides.diff()
    assert report["routing"] is None
    assert kinds(report) == ["experts"] * 4
    assert report["verdict"] == "inconclusive"


def test_expert_ids_above_32767_stay_what_they_are(tmp_path):
    sides = Sides(tmp_path, n=1, group_size=1, experts=40_000, k=4, layers=(0,))
    sides.a[0].used.ids[10, 0] = [39_999, 32_768, 32_767, 5]
    sides.b[0].used.ids[10, 0] = [39_999, 32_768, 32_767, 6]
    report = sides.diff()
    assert report["routing"]["disagree"] == 1
    assert report["identity"] == []


# -- activations --------------------------------------------------------------------------


def test_activations_are_compared_on_request(tmp_path):
    sides = Sides(tmp_path, sites=("layers.2.out", "layers.10.out"))
    sides.b[0].activations["layers.10.out"][7] *= 1.5
    report = sides.diff(layers=True)
    assert report["compared"]["activations"] == 2 * 4 * 30
    assert report["activations"]["verdict"] == report["verdict"] == "divergent"
    first, second = report["activations"]["sites"]
    assert (first["site"], first["equal"], first["rel_l2_max"]) == ("layers.2.out", 120, 0.0)
    assert (second["site"], second["equal"]) == ("layers.10.out", 119)
    assert second["rel_l2_max"] == pytest.approx(0.5, rel=1e-5)
    assert second["cosine_min"] == pytest.approx(1.0)
    assert second["first_unequal"] == {"sequence": "a1a1a1a1.0-0.0", "position": 7}


def test_activations_that_are_not_there_are_not_run_and_say_how_to_get_them(sides):
    report = sides.diff(layers=True)
    assert report["activations"]["verdict"] == "not-run"
    assert "rolltape record --layers N" in report["activations"]["hint"]
    assert report["verdict"] == "inconclusive"


def test_a_nan_activation_is_counted_and_not_averaged(tmp_path):
    sides = Sides(tmp_path, n=1, sites=("layers.2.out",))
    sides.b[0].activations["layers.2.out"][7, 0] = np.nan
    site = sides.diff(layers=True)["activations"]["sites"][0]
    assert (site["non_finite"], site["max_abs"], site["rel_l2_max"]) == (1, 0.0, 0.0)


# -- selection, report, command line ------------------------------------------------------


def test_a_selection_leaves_the_others_out_of_everything(sides):
    flip_bit(sides.b[0].processed.values, 10)
    a, b = sides.tapes()
    assert diff_tapes(a, b, sequences=["0-0.1", "b2b2b2b2.0-1.0"])["verdict"] == "identical"
    assert diff_tapes(a, b, sequences=["0-0.0"])["verdict"] == "divergent"


def test_a_report_holds_what_the_summary_says(sides, tmp_path):
    sides.b[0].processed.values[10] = np.nan
    sides.b[0].processed.values[12] += 1
    sides.b[0].processed.valid[14] = False
    sides.a[0].loss_mask.values[16] = sides.b[0].loss_mask.values[16] = False
    summary = sides.diff(out=tmp_path / "report")
    report = open_report(tmp_path / "report")
    assert report.summary == summary
    row = report.rows("sequences")[0]
    assert (row["compared"], row["masked"], row["missing"], row["non_finite"]) == (21, 1, 1, 1)
    assert (row["max_at"], row["first_over"], row["paired_by"]) == (12, 12, "key")
    tokens = report.rows("tokens")[0]
    states = [TOKEN_STATES[s] for s in tokens["state"]]
    assert states[:6] == ["not_scored"] * 6
    assert {p: states[p] for p in (10, 12, 14, 16)} == {
        10: "non_finite",
        12: "compared",
        14: "missing_b",
        16: "masked",
    }
    assert tokens["delta"][12] == pytest.approx(1.0)
    assert tokens["delta"][10] is tokens["delta"][14] is tokens["delta"][16] is None
    assert tokens["b_logprob"][14] is None
    assert tokens["a_logprob"][14] == sides.a[0].processed.values[14]
    layers = [r for r in report.rows("routing") if r["slice"] == "all"]
    assert [r["layer"] for r in layers] == [1, 2, 3]
    assert sum(r["decisions"] for r in layers) == summary["routing"]["decisions"]
    assert {r["slice"] for r in report.rows("routing")} == {
        "all",
        "position:prompt",
        "position:0-15",
        "position:16-63",
        "version:0",
    }


def test_a_report_is_never_written_over_something(sides, tmp_path):
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "keep").write_text("")
    with pytest.raises(TapeExistsError):
        sides.diff(out=tmp_path / "report")


def run(command, *arguments: object):
    return CliRunner().invoke(command, [str(a) for a in arguments], standalone_mode=False)


def test_the_command_exits_with_the_verdict(sides, tmp_path):
    flip_bit(sides.b[0].processed.values, 10)
    a, b = sides.tapes()
    stranger = write_tape(tmp_path / "c", random_samples(2, seed=9), engine="e5" * 16)
    assert run(diff_command, a.path, a.path).return_value == 0
    assert run(diff_command, a.path, b.path).return_value == 1
    assert run(diff_command, a.path, stranger.path).return_value == 3


def test_the_command_names_the_verdict_first_and_the_next_step_last(sides, tmp_path):
    sides.b[0].processed.values[10] += 1
    sides.b[0].processed.values[11] = np.nan
    a, b = sides.tapes()
    lines = run(diff_command, a.path, b.path, "-o", tmp_path / "r").output.splitlines()
    assert lines[0].startswith("divergent: ")
    assert lines[-1] == f"next: rolltape view {a.path} {b.path} {tmp_path / 'r'}"
    text = "\n".join(lines)
    assert "worst token: a1a1a1a1.0-0.0 position 10" in text
    assert "1 NaN in b" in text


def test_json_is_one_object_with_non_finite_numbers_as_strings(sides):
    sides.b[0].processed.values[10] = -np.inf
    a, b = sides.tapes()
    report = json.loads(
        run(diff_command, a.path, b.path, "--json").output,
        parse_constant=lambda name: pytest.fail(f"{name} is not JSON"),
    )
    assert report["non_finite_detail"]["where"][0]["b"] == "-Infinity"
    assert report["routing"]["per_layer"][0]["layer"] == 1


def test_a_path_that_is_no_tape_exits_2_with_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "rolltape", "diff", str(tmp_path), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "is not a tape" in done.stderr


def test_a_diff_needs_no_torch():
    code = (
        "import sys; import rolltape.replay.diff, rolltape.replay.cli; rolltape.replay.diff_tapes;"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_shard_that_was_altered_stops_the_diff(sides):
    a, b = sides.tapes()
    shard = next((b.path / "tokens").iterdir())
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 0xFF
    shard.write_bytes(content)
    result = run(diff_command, a.path, b.path)
    assert "Damaged" in type(result.exception).__name__
    assert str(shard) in str(result.exception)


def test_gaps_that_the_recorder_counted_are_passed_on(sides):
    a, b = sides.tapes()
    with TapeWriter(b.path) as writer:
        writer.append("events", {"writer": writer.id, "t_ns": 1, "kind": "gap"})
    report = diff_tapes(a, open_tape(b.path))
    assert kinds(report, "warnings") == ["gap"]


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--on", "vllm"], "no such executor"), (["--mode", "dream"], "no such mode")],
)
def test_replay_says_which_executors_and_modes_exist(tmp_path, options, message):
    result = run(replay_command, tmp_path, "-o", tmp_path / "b", *options)
    assert isinstance(result.exception, UsageError)
    assert message in str(result.exception)


def test_replay_without_torch_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "rolltape.replay.score", raising=False)
    result = run(replay_command, tmp_path, "-o", tmp_path / "b")
    assert isinstance(result.exception, UsageError)
    assert "rolltape[replay]" in str(result.exception)
