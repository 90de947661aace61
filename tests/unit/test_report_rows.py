"""A report gives the rows of one sequence without the others, sealed or not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rolltape.replay.drift import first_divergent
from rolltape.replay.report import spark
from rolltape.store import TapeWriter, create_report, open_report, seal
from rolltape.store.columns import Masked
from rolltape.store.tape import Report

NAMES = [f"e.{i}.0" for i in range(7)]
SITES = ["layers.0.out", "layers.1.out", "norm"]


@pytest.fixture(params=["by sequence", "by site"])
def report(request: pytest.FixtureRequest, tmp_path: Path) -> Report:
    """Rows in several batches and two files; an older report has them by site."""
    path = create_report(tmp_path / "r", summary={"verdict": "divergent"})
    pairs = [(name, site) for name in NAMES for site in SITES if (name, site) != (NAMES[2], "norm")]
    if request.param == "by site":
        pairs.sort(key=lambda pair: SITES.index(pair[1]))
    for part in (0, 1):
        with TapeWriter(path) as writer:
            for i, (name, site) in enumerate(pairs):
                if i % 2 == part:
                    row = {"a": name, "site": site, "start": 0, "n": 1, "max_abs": [[float(i)]]}
                    writer.append("activations", row)
                    writer.flush()
            for i, name in enumerate(NAMES):
                if i % 2 == part:
                    writer.append("tokens", {"a": name, "n": 1, "delta": [[float(i)]]})
                    writer.append("sequences", {"a": name, "b": name, "compared": i})
                    if i % 3 == 0:
                        writer.flush()
    if request.param == "by sequence":
        seal(path)
    return open_report(path)


@pytest.mark.parametrize("table", ["tokens", "activations"])
def test_rows_of_a_sequence_are_those_of_the_whole_table(report: Report, table: str) -> None:
    whole = report.table(table)
    for name in [*NAMES, "nobody"]:
        expected = [row for row in whole.to_pylist() if row["a"] == name]
        assert report.of(table, name).to_pylist() == expected
        some = report.of(table, name, ["n", "a"]).to_pylist()
        assert some == [{"n": row["n"], "a": row["a"]} for row in expected]


def test_sites_of_a_sequence(report: Report) -> None:
    assert sorted(report.sites(NAMES[0])) == SITES
    assert "norm" not in report.sites(NAMES[2])
    assert report.sites("nobody") == []
    found = report.of("activations", NAMES[1], ["site"], sites=["norm", "layers.0.out"])
    assert sorted(found.column("site").to_pylist()) == ["layers.0.out", "norm"]


def test_rows_by_number_come_in_the_order_asked_for(report: Report) -> None:
    whole = report.table("sequences").to_pylist()
    wanted = [5, 0, 6, 5, 2]
    found = report.take("sequences", wanted)
    assert found.to_pylist() == [whole[i] for i in wanted]
    found = report.take("sequences", wanted, ["compared"])
    assert found.to_pylist() == [{"compared": whole[i]["compared"]} for i in wanted]
    assert len(report.take("sequences", [])) == 0
    assert report.columns("sequences", ["a"]).column("a").to_pylist() == [r["a"] for r in whole]


def test_a_shard_without_a_seal_is_hashed_once(tmp_path: Path) -> None:
    path = create_report(tmp_path / "r", summary={"verdict": "identical"})
    with TapeWriter(path) as writer:
        writer.append("tokens", {"a": "x", "n": 1})
    report = open_report(path)
    (file,) = report.files("tokens")
    report.shard("tokens", file)
    assert report._checked["tokens", file].batches == 1
    report._open.clear()
    assert len(report.of("tokens", "x")) == 1


def test_a_spark_is_the_largest_of_each_stretch() -> None:
    values = np.linspace(-1, 1, 100, dtype=np.float32)
    valid = np.arange(100) >= 50
    found = spark(Masked(values, valid))
    assert len(found) == 32 and not found.valid[:16].any() and found.valid[16:].all()
    assert found.values[-1] == 1.0
    assert spark(Masked.empty(0, np.float32)).values.tolist() == []
    assert len(spark(Masked.full(values[:5]))) == 5


def test_where_a_difference_begins() -> None:
    def layer(number: int, disagree: int) -> dict[str, object]:
        return {"layer": number, "slice": "all", "disagree": disagree}

    routing = [layer(0, 0), layer(4, 7), layer(3, 1), {**layer(1, 9), "slice": "version:3"}]
    assert first_divergent(None, routing) == {"layer": 3, "site": None, "by": "routing"}
    for site, expected in (
        ("embed", {"layer": None, "site": "embed", "by": "activations"}),
        ("layers.3.attn", {"layer": 3, "site": "layers.3.attn", "by": "activations"}),
        ("layers.3.out", {"layer": 3, "site": None, "by": "routing"}),
        ("logits", {"layer": 3, "site": None, "by": "routing"}),
    ):
        assert first_divergent({"front": {"site": site}}, routing) == expected, site
    front = {"front": {"site": "logits"}}
    found = {"layer": None, "site": "logits", "by": "activations"}
    assert first_divergent(front, []) == found
    assert first_divergent({"front": None}, []) is None
