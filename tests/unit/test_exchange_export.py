"""Parquet and JSONL of a tape hold what the tape holds."""

from __future__ import annotations

import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from rolltape.store import TapeExistsError, TapeWriter, UsageError, seal
from rolltape.store import open as open_tape
from rolltape.store.exchange import BLOCKS, DEFAULT_BLOCKS, EXPORT_SCHEMA, export_tape
from rolltape.store.exchange import export as exchange_export
from rolltape.store.exchange.cli import export
from tests.builders import random_samples, write_tape


@pytest.fixture
def samples():
    made = random_samples(4, response=[24, 3, 17, 1], sites=("layers.1.out",))
    made[0].processed.values[9] = -np.inf
    made[0].raw.values[10] = np.nan
    made[1].used = None
    made[2].kept = None
    made[3].loss_mask.valid[:3] = False
    return made


@pytest.fixture
def tape(tmp_path, samples):
    tape = write_tape(tmp_path / "tape", samples, sealed=False)
    with TapeWriter(tmp_path / "tape") as writer:
        for name, number, text in (
            ("reward", 0.5, None),
            ("reward", 1.0, None),
            ("why", None, "x"),
        ):
            writer.append(
                "annotations",
                {**key_columns(next(iter(tape)).key), "name": name, "number": number, "text": text,
                 "t_ns": 1},
            )  # fmt: skip
    seal(tmp_path / "tape")
    return open_tape(tmp_path / "tape")


def key_columns(key):
    return {
        "engine": key.engine,
        "request": key.request,
        "sample": key.sample,
        "pass": key.scoring,
    }


def same_column(cell, column):
    """A Parquet list cell against a `Masked`: nulls where missing, else the same values."""
    assert [value is not None for value in cell] == column.valid.tolist()
    got = np.array([0 if value is None else value for value in cell], column.values.dtype)
    np.testing.assert_array_equal(got[column.valid], column.values[column.valid], strict=True)


def test_parquet_holds_every_column_of_every_sequence(tmp_path, tape):
    export_tape(tape, tmp_path / "out", to="parquet", columns=["all"])
    table = pq.read_table(tmp_path / "out" / "sequences.parquet")
    assert table.schema.remove_metadata() == EXPORT_SCHEMA
    rows = table.to_pylist()
    assert [row["id"] for row in rows] == [s.id for s in tape]
    for row, sequence in zip(rows, tape, strict=True):
        assert (row["prompt_len"], row["length"]) == (sequence.prompt_len, sequence.length)
        assert (row["finish"], row["group"]) == (sequence.finish, sequence.info["group"])
        assert row["digest"] == sequence.info["digest"]
        assert json.loads(row["sampling"]) == sequence.info["sampling"]
        same_column(row["ids"], sequence.tokens)
        same_column(row["loss_mask"], sequence.loss_mask)
        for name in ("raw", "scaled", "processed"):
            same_column(row[name], sequence.logprob(name))
        same_column(row["weight_version"], sequence.weight_version)
        assert (row["version_min"], row["version_max"]) == (0, 0)
        supports = sequence.supports()
        if supports is None:
            assert row["support_state"] is None
        else:
            assert row["support_state"] == supports.state.tolist()
            assert row["support_ids"] == supports.ids.tolist()
            assert np.cumsum([0, *row["support_counts"]]).tolist() == supports.offsets.tolist()


def test_routes_are_null_where_there_is_none_and_take_their_shape_back(tmp_path, tape):
    export_tape(
        tape, tmp_path / "out", to="parquet", columns=["routes", "route_weights", "route_margin"]
    )
    rows = pq.read_table(tmp_path / "out" / "sequences.parquet").to_pylist()
    for row, sequence in zip(rows, tape, strict=True):
        routes = sequence.routes()
        if routes is None:
            assert row["routes"] is None and row["route_weights"] is None
            continue
        assert row["route_layers"] == list(routes.layers)
        assert row["route_experts"] == routes.num_experts
        shape = (sequence.length, len(routes.layers), row["route_k"])
        assert np.array(row["route_valid"]).reshape(shape[:2]).tolist() == routes.valid.tolist()
        ids = np.array(row["routes"], object).reshape(shape)
        assert (ids[routes.valid] == routes.ids[routes.valid]).all()
        assert not routes.valid.all() and all(x is None for x in ids[~routes.valid].ravel())
        weights = np.array(row["route_weights"], np.float32).reshape(shape)
        assert (weights[routes.weighted] == routes.weights[routes.weighted]).all()
        margin = np.array(row["route_margin"], np.float32).reshape(shape[:2])
        assert (margin[routes.valid] == routes.margin[routes.valid]).all()


def test_other_tables_are_written_as_they_are(tmp_path, tape):
    done = export_tape(tape, tmp_path / "out", to="parquet")
    for name in ("engines", "steps", "forwards", "weights", "events", "activations"):
        written = pq.read_table(tmp_path / "out" / f"{name}.parquet")
        assert written.equals(tape.table(name)), name
        assert done.rows[f"{name}.parquet"] == len(written)
    assert done.rows["activations.parquet"] > 0 and done.rows["steps.parquet"] == 0
    assert pq.ParquetFile(tmp_path / "out" / "forwards.parquet").metadata.row_group(0).column(
        0
    ).compression == "ZSTD"  # fmt: skip


def test_the_last_annotation_of_a_name_counts(tmp_path, tape):
    export_tape(tape, tmp_path / "out", to="parquet")
    rows = pq.read_table(tmp_path / "out" / "sequences.parquet").to_pylist()
    assert json.loads(rows[0]["annotations"]) == {"reward": 1.0, "why": "x"}
    assert json.loads(rows[1]["annotations"]) == {}


def test_some_sequences_bring_only_their_own_rows(tmp_path, tape):
    chosen = [s.id for s in tape][1:3]
    export_tape(tape, tmp_path / "out", to="parquet", sequences=chosen)
    sequences = pq.read_table(tmp_path / "out" / "sequences.parquet")
    assert sequences.column("id").to_pylist() == chosen
    forwards = pq.read_table(tmp_path / "out" / "forwards.parquet")
    expected = [len(tape.select("forwards", tape.sequence(id_).key)) for id_ in chosen]
    assert len(forwards) == sum(expected) < len(tape.table("forwards"))
    assert len(pq.read_table(tmp_path / "out" / "engines.parquet")) == 1


def test_a_large_export_has_several_row_groups(tmp_path, tape, monkeypatch):
    monkeypatch.setattr(exchange_export, "GROUP_BYTES", 2000)
    export_tape(tape, tmp_path / "out", to="parquet")
    file = pq.ParquetFile(tmp_path / "out" / "sequences.parquet")
    assert file.metadata.num_row_groups > 1
    assert file.read().column("id").to_pylist() == [s.id for s in tape]
    forwards = pq.ParquetFile(tmp_path / "out" / "forwards.parquet")
    assert forwards.metadata.num_row_groups > 1
    assert forwards.read().equals(tape.table("forwards"))


def test_jsonl_holds_the_same_with_non_finite_numbers_as_text(tmp_path, tape):
    done = export_tape(tape, tmp_path / "out.jsonl", to="jsonl", columns=["all"])
    text = (tmp_path / "out.jsonl").read_text()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    export_tape(tape, tmp_path / "out", to="parquet", columns=["all"])
    rows = pq.read_table(tmp_path / "out" / "sequences.parquet").to_pylist()
    assert done.rows == {"out.jsonl": 4}
    assert set(lines[0]) == set(EXPORT_SCHEMA.names)
    assert (lines[0]["processed"][9], lines[0]["raw"][10]) == ("-Infinity", "NaN")
    for line, row in zip(lines, rows, strict=True):
        for name, value in row.items():
            if name in ("sampling", "semantics", "annotations"):
                assert line[name] == json.loads(value)
            elif name in ("raw", "scaled", "processed", "route_weights", "route_margin"):
                if value is None:
                    assert line[name] is None
                    continue
                assert [x is None for x in line[name]] == [x is None for x in value]
                pairs = [
                    (float(x), y) for x, y in zip(line[name], value, strict=True) if y is not None
                ]
                assert all(
                    np.float32(x) == y or (math.isnan(y) and math.isnan(x)) for x, y in pairs
                )
            else:
                assert line[name] == value, name


def test_what_was_not_written_is_said(tmp_path, tape):
    done = export_tape(tape, tmp_path / "out.jsonl", to="jsonl")
    assert {name for name in BLOCKS if name in done.left_out} == set(BLOCKS) - set(DEFAULT_BLOCKS)
    assert "table activations" in done.left_out
    done = export_tape(tape, tmp_path / "out", to="parquet", columns=["default", "route_weights"])
    assert "route_weights" not in done.left_out and "route_margin" in done.left_out
    assert not any(name.startswith("table") for name in done.left_out)


@pytest.mark.parametrize("to", ["parquet", "jsonl"])
def test_nothing_is_overwritten_and_nothing_is_left_behind(tmp_path, tape, to):
    out = tmp_path / "out"
    if to == "parquet":
        out.mkdir()
        (out / "precious").write_text("x")
    else:
        out.write_text("x")
    with pytest.raises(TapeExistsError, match="out"):
        export_tape(tape, out, to=to)
    assert (out / "precious" if to == "parquet" else out).read_text() == "x"
    with pytest.raises(UsageError, match="no sequence"):
        export_tape(tape, tmp_path / "new", to=to, sequences=["nope"])
    assert {path.name for path in tmp_path.iterdir()} == {"tape", "out"}


def test_an_export_that_fails_leaves_no_folder(tmp_path, samples):
    tape = write_tape(tmp_path / "tape", samples)
    shard = next((tmp_path / "tape" / "routes").iterdir())
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 0xFF
    shard.write_bytes(bytes(data))
    with pytest.raises(Exception, match="routes"):
        export_tape(tape.path, tmp_path / "out", to="parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["tape"]


def test_an_unknown_column_names_the_known_ones(tmp_path, tape):
    with pytest.raises(UsageError, match=r"'rotues'.*routes"):
        export_tape(tape, tmp_path / "out", to="parquet", columns=["rotues"])


def test_the_command_says_rows_and_what_is_missing(tmp_path, tape):
    ran = CliRunner().invoke(
        export, [str(tape.path), "-o", str(tmp_path / "out"), "--to", "parquet"]
    )
    assert ran.exit_code == 0, ran.output
    assert "sequences.parquet" in ran.output and "4 rows" in ran.output
    assert "route_weights" in ran.output.partition("not written")[2]
    ran = CliRunner().invoke(
        export,
        [str(tape.path), *f"-o {tmp_path}/o.jsonl --to jsonl --columns ids --json".split()],
    )
    said = json.loads(ran.output)
    assert said["rows"] == {"o.jsonl": 4} and "raw" in said["left_out"]


def test_an_empty_tape_gives_tables_with_their_schemas(tmp_path):
    tape = write_tape(tmp_path / "tape", [])
    export_tape(tape, tmp_path / "out", to="parquet")
    table = pq.read_table(tmp_path / "out" / "sequences.parquet")
    assert len(table) == 0 and table.schema.field("ids").type == pa.list_(pa.uint32())
