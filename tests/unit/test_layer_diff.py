"""Errors of sites, sketches beside tensors, the front and the noise floor: without torch."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given

from rolltape.replay.activation_diff import SiteTally
from rolltape.replay.cli import diff as diff_command
from rolltape.replay.diff import diff_tapes
from rolltape.replay.front import Floor, SiteFloor, floor_of, front_of
from rolltape.replay.measures import coarser, ulp_distance
from rolltape.replay.site_errors import common_stretches, row_errors
from rolltape.store import SchemaError, UsageError, codecs, open_report
from rolltape.store.fsck import fsck
from rolltape.store.sites import site_order
from tests.builders import random_samples, write_tape

SITES = ("layers.0.out", "layers.1.out", "layers.10.out")
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
FLOATS = hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 9)), elements=FINITE)


def tapes(folder, change):
    samples = random_samples(3, sites=SITES)
    other = copy.deepcopy(samples)
    change(other)
    facts = {"host": "here", "device": "cuda:1"}
    a = write_tape(folder / "a", samples, facts=facts)
    return a, write_tape(folder / "b", other, replays=a, facts={**facts, "device": "cuda:0"})


def tally(**errors: float) -> SiteTally:
    """Four rows a site of norm 2, the third one off by so much, relatively."""
    found = SiteTally()
    for site, error in errors.items():
        a = np.ones((4, 4), np.float32)
        b = a.copy()
        b[2, 1] += np.float32(2 * error)
        name = site.replace("_", ".", 2)
        found.spans[name] = [row_errors("s", name, 5, a, b)]
    return found


# -- rows ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_neighbours_are_one_unit_apart(dtype):
    values = np.array([1.0, -1.0, 0.5, 3.0, -0.0078125, 0.0], np.float32)
    step = {"float32": 1, "float16": 1 << 13, "bfloat16": 1 << 16}[dtype]
    if dtype == "float16":
        up = np.nextafter(values.astype("<f2"), np.float16(np.inf)).astype(np.float32)
    else:
        bits = values.view("<i4")
        up = np.where(bits >= 0, bits + step, bits - step).astype("<i4").view("<f4")
    assert ulp_distance(values, up, dtype).tolist() == [1] * 6
    assert ulp_distance(values, values, dtype).tolist() == [0] * 6
    zero = np.zeros(1, np.float32)
    assert ulp_distance(zero, -zero, dtype).tolist() == [0]


@given(FLOATS)
def test_ulp_distance_counts_representable_numbers(rows):
    steps = 5
    other = rows
    with np.errstate(over="ignore"):  # beyond the largest number lies infinity
        for _ in range(steps):
            other = np.nextafter(other, np.float32(np.inf))
    finite = np.isfinite(other)
    assert (ulp_distance(rows, other, "float32")[finite] == steps).all()
    assert (ulp_distance(rows, rows, "bfloat16") == 0).all()


def test_the_coarser_dtype_counts():
    assert coarser("float32", "bfloat16") == coarser("bfloat16", "float16") == "bfloat16"
    assert coarser("float64", "float64") == coarser("float8_e4m3fn", "float32") == "float32"


@given(FLOATS)
def test_errors_of_a_row_with_itself_are_none(rows):
    error = row_errors("s", "norm", 0, rows, rows.copy())
    assert error.equal.all() and not error.max_abs.any() and not error.ulp.any()
    assert (error.rel_l2.values == 0).all() and not error.non_finite.any()


def test_a_row_that_is_not_finite_is_located():
    a = np.ones((3, 4), np.float32)
    b = a.copy()
    b[1, 2], b[1, 3] = np.inf, np.nan
    found = SiteTally(spans={"norm": [row_errors("s", "norm", 7, a, b)]})
    row = found.summary()[0]
    assert row["non_finite"] == 1
    assert row["non_finite_at"]["position"] == 8 and row["non_finite_at"]["column"] in (2, 3)
    assert row["max_abs"] == 0 and row["equal"] == 2 and row["rel_l2_max"] == 0


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=4),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=4),
)
def test_common_stretches_hold_every_common_position_once(a, b):
    found = list(common_stretches(a, b))
    positions = [p for start, stop, _, _ in found for p in range(start, stop)]
    held = [{p for start, n in side for p in range(start, start + n)} for side in (a, b)]
    assert len(positions) == len(set(positions))
    assert set(positions) == held[0] & held[1]
    for start, stop, i, j in found:
        for begin, n in (a[i], b[j]):
            assert begin <= start < stop <= begin + n


def test_sites_are_ordered_as_they_run():
    order = ["embed", "layers.2.attn_norm", "layers.2.q", "layers.2.q_rot", "layers.2.heads",
             "layers.2.attn", "layers.2.router", "layers.2.out", "layers.2.other",
             "layers.10.attn_norm", "norm", "logits"]  # fmt: skip
    assert sorted(order[::-1], key=site_order) == order


# -- front and floor ----------------------------------------------------------------------


def test_the_front_is_the_first_site_in_running_order():
    found = front_of(tally(logits=0.5, layers_1_out=0.1, layers_0_out=0, layers_10_out=0.3), None)
    assert found["verdict"] == "divergent"
    assert (found["front"]["site"], found["front"]["position"]) == ("layers.1.out", 7)
    assert list(found["above"]) == ["layers.1.out", "layers.10.out", "logits"]
    assert found["front"]["rel_l2"] == pytest.approx(0.1) and found["front"]["column"] == 1


def test_noise_below_the_floor_is_skipped_and_the_margin_counts():
    sites = {s: SiteFloor(max=0.1, positions=9, unequal=3) for s in ("layers.1.out", "logits")}
    floor = Floor(model_fingerprint="m", dtype="bfloat16", device="cpu", host="h", sites=sites,
                  executions=("x",), sequences=2)  # fmt: skip
    found = front_of(tally(layers_1_out=0.19, logits=0.21), floor)
    assert found["verdict"] == "divergent" and found["front"]["site"] == "logits"
    assert found["front"]["threshold"] == pytest.approx(0.2)
    found = front_of(tally(layers_1_out=0.19, logits=0.19), floor)
    assert found["verdict"] == "within-noise" and found["front"] is None
    assert front_of(tally(layers_1_out=0), floor)["verdict"] == "identical"
    # a site that nobody measured has no noise
    assert front_of(tally(norm=1e-7), floor)["front"]["site"] == "norm"
    assert front_of(SiteTally(), floor)["verdict"] == "not-run"
    not_measured = replace(floor, sites={s: replace(f, max=0.0) for s, f in sites.items()})
    assert front_of(tally(logits=1e-7), not_measured)["verdict"] == "divergent"


def test_a_row_that_is_not_finite_is_above_every_floor():
    a = np.ones((2, 2), np.float32)
    b = a.copy()
    b[1, 0] = np.nan
    sites = {"norm": SiteFloor(max=1e9, positions=1, unequal=1)}
    floor = Floor(model_fingerprint="m", dtype="d", device="cpu", host="h", sites=sites,
                  executions=("x",), sequences=2)  # fmt: skip
    found = SiteTally(spans={"norm": [row_errors("s", "norm", 0, a, b)]})
    assert front_of(found, floor)["front"]["position"] == 1
    with pytest.raises(UsageError, match="relative error"):
        floor_of({"x": found}, [], sequences=1)


def test_a_floor_of_other_models_or_of_nothing_is_refused():
    rows = [{"model_fingerprint": x, "dtype": "d", "device": "cpu", "host": "h"} for x in "ab"]
    with pytest.raises(UsageError, match="model_fingerprint differs"):
        floor_of({"x": tally(norm=0.1)}, rows, sequences=1)
    with pytest.raises(UsageError, match="no site"):
        floor_of({"x": SiteTally()}, rows[:1], sequences=1)
    floor = floor_of({"x": tally(norm=0.1), "y": tally(norm=0.3)}, rows[:1], sequences=4)
    assert floor.sites["norm"].max == pytest.approx(0.3)
    assert (floor.sites["norm"].positions, floor.sites["norm"].unequal) == (8, 2)


# -- tapes --------------------------------------------------------------------------------


def test_the_report_names_the_front(tmp_path):
    def change(samples):
        samples[1].activations["layers.10.out"][3] += 1
        samples[2].activations["layers.1.out"][9, 4] += 1

    a, b = tapes(tmp_path, change)
    found = diff_tapes(a, b, layers=True)["activations"]
    assert found["verdict"] == "divergent"
    assert found["front"]["site"] == "layers.1.out"
    assert (found["front"]["position"], found["front"]["column"]) == (9, 4)
    assert found["front"]["sequence"] == a.keys()[2].id
    assert found["earliest"]["site"] == "layers.10.out" and found["earliest"]["position"] == 3


@pytest.mark.parametrize("sides", ["a", "b", "both"])
def test_sketches_stand_in_for_tensors(tmp_path, sides):
    samples = random_samples(2, sites=SITES)
    other = copy.deepcopy(samples)
    other[1].activations["layers.1.out"][6] *= 1.5
    for side, those in (("a", samples), ("b", other)):
        if sides in (side, "both"):
            for sample in those:
                sample.sketched = frozenset(SITES[:2])
    a = write_tape(tmp_path / "a", samples)
    b = write_tape(tmp_path / "b", other, replays=a)
    report = diff_tapes(a, b, layers=True, out=tmp_path / "report")
    first, second, third = report["activations"]["sites"]
    assert (first["site"], first["equal"], first["sketched"]) == ("layers.0.out", 60, 60)
    assert first["max_abs"] is None
    assert (second["equal"], second["sketched"]) == (59, 60)
    assert 0.05 < second["rel_l2_max"] < 2  # 0.5, estimated
    assert (third["equal"], third["sketched"]) == (60, 0) and third["max_abs"] == 0
    front = report["activations"]["front"]
    assert (front["site"], front["position"], front["max_abs"]) == ("layers.1.out", 6, None)
    assert report["compared"]["activations"] == 180 and report["differences"]["activations"] == 1
    written = open_report(tmp_path / "report")
    assert {r["sketched"] for r in written.rows("activations")} == {True, False}


def test_sketches_are_read_checked_and_told_of(tmp_path):
    samples = random_samples(1, sites=SITES[:1])
    samples[0].sketched = frozenset(SITES)
    tape = write_tape(tmp_path / "a", samples)
    sequence = next(iter(tape))
    assert sequence.activations() == {}
    spans = sequence.sketches()["layers.0.out"]
    assert [(s.start, s.width, len(s.hashes)) for s in spans] == [(p, 8, 10) for p in (0, 10, 20)]
    assert not fsck(tape.path).findings


def test_an_encoding_that_is_not_known_is_said(tmp_path, monkeypatch):
    samples = random_samples(1, sites=SITES[:1])
    samples[0].sketched = frozenset(SITES)
    with monkeypatch.context() as patch:
        patch.setattr(codecs, "SKETCH", "sketch9")
        tape = write_tape(tmp_path / "a", samples)
    with pytest.raises(SchemaError, match="sketch9"):
        next(iter(tape)).sketches()
    assert any("sketch9" in f.text for f in fsck(tape.path).findings)


def test_a_floor_is_saved_and_used_on_the_command_line(tmp_path):
    def noise(samples):
        for sample in samples:
            sample.activations["layers.1.out"] *= np.float32(1.001)

    (tmp_path / "same").mkdir()
    a, b = tapes(tmp_path / "same", noise)
    floor = tmp_path / "floor.json"
    run = CliRunner().invoke
    found = run(diff_command, [str(a.path), str(b.path), "--save-floor", str(floor)],
                standalone_mode=False)  # fmt: skip
    assert found.exception is None and "no noise floor (--floor)" in found.output
    measured = json.loads(floor.read_text())
    assert measured["sites"]["layers.1.out"]["max"] == pytest.approx(0.001, rel=0.01)
    assert measured["sites"]["layers.0.out"] == {"max": 0.0, "positions": 90, "unequal": 0}
    assert measured["sequences"] == 3 and measured["executions"]
    found = run(diff_command, [str(a.path), str(b.path), "--floor", str(floor), "--json"],
                standalone_mode=False)  # fmt: skip
    layers = json.loads(found.output)["activations"]
    assert layers["verdict"] == "within-noise", layers["reason"]
    assert layers["floor"]["sequences"] == 3
    largest = {site: row["max"] for site, row in measured["sites"].items()}
    assert layers["floor"]["thresholds"] == {s: 2.0 * x for s, x in largest.items()}
    foreign = {**measured, "host": "elsewhere"}
    floor.write_text(json.dumps(foreign))
    found = run(diff_command, [str(a.path), str(b.path), "--floor", str(floor), "--json"],
                standalone_mode=False)  # fmt: skip
    layers = json.loads(found.output)["activations"]
    assert layers["verdict"] == "divergent" and "host" in layers["reason"]
    assert layers["floor"] is None
