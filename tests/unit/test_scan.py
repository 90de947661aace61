"""Rows of a tape for Arrow tools: lazy, exact, and the same in every tool that reads them."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltape.store import DamagedShardError, Tape, UsageError
from rolltape.store import open as open_tape
from rolltape.store.scan import Rows
from tests.builders import random_samples, write_tape

#: A signalling, a quiet and a negative NaN, each with a payload.
NANS = np.array([0x7F800001, 0x7FC12345, 0xFFC00001], np.uint32).view(np.float32)


class Source:
    """A table in batches of a few rows that keeps count of what was asked of it."""

    def __init__(self, table: pa.Table, rows: int = 2) -> None:
        self.table = table
        self.asked: list[list[str]] = []
        self.read = 0
        self._rows = rows

    def __call__(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        self.asked.append(columns)
        for batch in self.table.to_batches(max_chunksize=self._rows):
            self.read += 1
            yield batch.select(columns)


def rows_of(table: pa.Table, rows: int = 2, *, counted: bool = False) -> tuple[Rows, Source]:
    source = Source(table, rows)
    count = (lambda: table.num_rows) if counted else None
    return Rows(table.schema, source, count=count, name="tokens"), source


@pytest.fixture(scope="module")
def tape(tmp_path_factory: pytest.TempPathFactory) -> Tape:
    samples = random_samples(4)
    for p, nan in zip((7, 8, 9), NANS, strict=True):
        samples[0].processed.values[p] = nan
    samples[1].ids[3] = 2**32 - 1
    return write_tape(tmp_path_factory.mktemp("scan") / "tape", samples)


@pytest.fixture
def tokens(tape: Tape) -> pa.Table:
    """The `tokens` of a tape, with one fragment that recorded no logprobs."""
    table = tape.table("tokens")
    i = table.schema.get_field_index("raw")
    field = table.schema.field(i)
    cells = table.column("raw").to_pylist()
    return table.set_column(i, field, pa.array([None, *cells[1:]], field.type))


def bits(cells: pa.ChunkedArray) -> list[list[int | None] | None]:
    """A column of lists of floats as the bits of each, null as None."""
    return [None if not cell.is_valid else cell.values.view(pa.uint32()).to_pylist()
            for cell in cells]  # fmt: skip


def same(a: pa.Table, b: pa.Table) -> bool:
    """Equal in everything but chunks, NaNs by their bits."""
    exact = [f.name for f in b.schema if "float" not in str(f.type)]
    return (
        a.schema.equals(b.schema)
        and a.select(exact).to_pylist() == b.select(exact).to_pylist()
        and all(
            bits(a[name]) == bits(b[name])
            for name in ("raw", "scaled", "processed")
            if name in b.column_names
        )
    )


# -- laziness -------------------------------------------------------------------------------------


def test_nothing_is_read_until_it_is_asked_for(tokens: pa.Table) -> None:
    rows, source = rows_of(tokens)
    narrow = rows.select(["n", "start"])
    scan = rows.scanner(["ids"], pc.field("start") > 0)
    repr(rows), scan.projected_schema, narrow.schema, scan.to_reader(), rows.__arrow_c_stream__()
    assert source.asked == []


def test_only_columns_that_are_needed_are_read(tokens: pa.Table) -> None:
    rows, source = rows_of(tokens)
    rows.to_table(["ids", "n"])
    rows.to_table(["ids"], pc.field("start") + pc.field("n") > 10)
    rows.to_table(["n"], pc.field("n") > 10)
    rows.to_table(["n"], pc.field("semantics", "temperature") > 0)
    rows.count_rows(pc.is_in(pc.field("sample"), pa.array([1], pa.int32())))
    rows.take([1], ["start"])
    rows.head(1, ["ids"])
    list(rows.select(["raw"]).to_batches())
    assert source.asked == [
        ["ids", "n"],
        ["ids", "start", "n"],
        ["n"],
        ["n", "semantics"],
        ["sample"],
        ["start"],
        ["ids"],
        ["raw"],
    ]


def test_counting_reads_one_narrow_column_or_nothing(tokens: pa.Table) -> None:
    rows, source = rows_of(tokens)
    assert rows.count_rows() == rows.scanner().count_rows() == tokens.num_rows
    assert source.asked == [["sample"]] * 2
    rows, source = rows_of(tokens, counted=True)
    assert rows.count_rows() == rows.select(["ids"]).count_rows() == tokens.num_rows
    assert source.asked == []


def test_no_columns_still_have_rows(tokens: pa.Table) -> None:
    rows, source = rows_of(tokens)
    assert rows.to_table([]).num_rows == tokens.num_rows
    some = rows.to_table([], pc.field("start") == 0)
    assert (some.num_columns, some.num_rows) == (0, 4)
    assert source.asked == [["sample"], ["start"]]


def test_head_stops_at_the_batch_that_completes_it(tokens: pa.Table) -> None:
    rows, source = rows_of(tokens, 2)
    assert same(rows.head(3), tokens.slice(0, 3)) and source.read == 2
    assert same(rows.head(0), tokens.slice(0, 0)) and source.read == 2
    assert rows.head(10**6, ["n"]).num_rows == tokens.num_rows
    source.read = 0
    assert rows.scanner(["n"], pc.field("start") == 0).head(1).num_rows == 1
    assert source.read == 1


def test_take_stops_behind_the_last_row_wanted(tokens: pa.Table) -> None:
    rows, source = rows_of(tokens, 2)
    rows.take([1, 3, 0])
    assert source.read == 2


def test_take_reads_no_other_row_where_rows_can_be_found_by_number(tokens: pa.Table) -> None:
    source, asked = Source(tokens), []

    def take(columns: list[str], rows: np.ndarray) -> Iterator[pa.RecordBatch]:
        asked.append((columns, rows.tolist()))
        for row in rows.tolist():
            yield tokens.select(columns).slice(row, 1).combine_chunks().to_batches()[0]

    rows = Rows(tokens.schema, source, count=lambda: tokens.num_rows, take=take, name="tokens")
    wanted = [5, 1, 5]
    assert same(rows.take(wanted), tokens.take(wanted))
    narrow = rows.select(["n", "ids"])
    assert same(narrow.take(wanted, ["ids"]), tokens.select(["ids"]).take(wanted))
    assert narrow.take(wanted, []).num_columns == 0
    assert source.asked == []
    assert asked == [(tokens.schema.names, [1, 5]), (["ids"], [1, 5]), (["n"], [1, 5])]
    with pytest.raises(IndexError, match="row 12 of 12"):
        rows.take([0, 12])


def test_take_of_a_tape_joins_the_sequences_wanted_alone(
    tape: Tape, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, joined = tape.to_table(), []
    real = type(tape).sequence

    def counting(self: Tape, which: Any) -> Any:
        joined.append(which)
        return real(self, which)

    monkeypatch.setattr(type(tape), "sequence", counting)
    for wanted in ([3], [2, 0, 2], [0, 1, 2, 3]):
        joined.clear()
        assert same(tape.take(wanted), whole.take(wanted))
        assert joined == [tape.keys()[i] for i in sorted(set(wanted))]
    joined.clear()
    assert tape.take([1], ["length"]).to_pylist() == [{"length": whole["length"][1].as_py()}]
    assert joined == []


def test_batches_come_one_at_a_time(tokens: pa.Table) -> None:
    rows, source = rows_of(tokens, 2)
    for seen, batch in enumerate(rows.scanner(["ids"]).to_reader(), 1):
        assert source.read == seen and batch.num_rows == 2
    assert seen == tokens.num_rows // 2


def test_no_batch_is_empty(tokens: pa.Table) -> None:
    rows, source = rows_of(tokens, 1)
    sizes = [batch.num_rows for batch in rows.to_batches(filter=pc.field("start") == 0)]
    assert sizes == [1] * 4 and source.read == tokens.num_rows


def test_rows_can_be_read_again_and_in_turns(tokens: pa.Table) -> None:
    rows, _ = rows_of(tokens)
    pairs = list(zip(rows.to_batches(["n"]), rows.to_batches(["n"]), strict=True))
    assert pairs and all(a.equals(b) for a, b in pairs)
    assert same(rows.to_table(), rows.to_table())


def test_an_interpreter_that_stopped_early_can_exit() -> None:
    # threads that read ahead kept a process from ending, see rolltape.store.scan
    code = """
import pyarrow as pa
from rolltape.store.scan import Rows
batch = pa.record_batch({"a": list(range(10))})
rows = Rows(batch.schema, lambda columns: iter([batch] * 1000))
assert rows.head(5).num_rows == 5 and next(rows.to_batches()) and rows.scanner().to_reader()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# -- results --------------------------------------------------------------------------------------


def test_a_table_is_what_the_tape_holds_bit_for_bit(tokens: pa.Table) -> None:
    rows, _ = rows_of(tokens)
    assert same(rows.to_table(), tokens)
    stored = [b for cell in bits(rows.to_table(["processed"])["processed"]) for b in cell or ()]
    assert set(NANS.view(np.uint32).tolist()) <= set(stored)
    assert rows.to_table(["ids"]).column("ids").type == pa.list_(pa.uint32())
    assert rows.head(1, ["raw"]).column("raw").to_pylist() == [None]


def test_a_filter_keeps_order_types_and_what_cannot_be_null(tokens: pa.Table) -> None:
    rows, _ = rows_of(tokens)
    found = rows.to_table(filter=pc.field("start") == 0)
    assert same(found, tokens.filter(pc.equal(tokens["start"], 0)))
    assert not found.schema.field("start").nullable
    assert rows.count_rows(pc.field("start") == 0) == found.num_rows == 4


def test_a_filter_on_null_leaves_the_row_out(tokens: pa.Table) -> None:
    rows, _ = rows_of(tokens)
    assert rows.count_rows(pc.field("raw").is_null()) == 1
    assert rows.count_rows(pc.list_value_length(pc.field("raw")) >= 0) == tokens.num_rows - 1


def test_a_filter_by_column_number_means_the_number_in_the_schema(tokens: pa.Table) -> None:
    rows, _ = rows_of(tokens)
    number = tokens.schema.get_field_index("start")
    found = rows.to_table(["n"], (pc.field(number) == 20) & (pc.field("sample") == 1))
    both = pc.and_(pc.equal(tokens["start"], 20), pc.equal(tokens["sample"], 1))
    assert found.equals(tokens.select(["n"]).filter(both)) and found.num_rows


@pytest.mark.parametrize("kind", [list, np.array, pa.array])
def test_take_keeps_order_and_repeats(tokens: pa.Table, kind: Any) -> None:
    rows, _ = rows_of(tokens)
    wanted = [3, 0, 3, tokens.num_rows - 1, 4]
    assert same(rows.take(kind(wanted)), tokens.take(wanted))
    assert rows.take([], ["n"]).schema == tokens.select(["n"]).schema


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("row", [-1, 12, 2**40])
def test_a_row_that_is_not_there_is_an_index_error(
    tokens: pa.Table, row: int, counted: bool
) -> None:
    assert tokens.num_rows == 12
    rows, source = rows_of(tokens, counted=counted)
    with pytest.raises(IndexError, match=str(row)):
        rows.take([0, row])
    assert (source.asked == []) is (counted or row < 0)


def test_selected_rows_are_rows_of_that_schema(tokens: pa.Table) -> None:
    rows, _ = rows_of(tokens)
    narrow = rows.select(["n", "ids", "start"]).select(["ids", "n"])
    assert narrow.schema == tokens.select(["ids", "n"]).schema
    assert narrow.to_table().equals(tokens.select(["ids", "n"]))
    with pytest.raises(UsageError, match=r"no column 'start' \(ids \| n\)"):
        narrow.to_table(filter=None, columns=["start"])


def test_a_table_without_rows_keeps_its_columns(tape: Tape) -> None:
    empty = tape.table("distributions")
    rows = Rows(empty.schema, lambda columns: iter(()))
    assert rows.to_table().equals(empty) and rows.head(3).equals(empty)
    assert pa.table(rows).equals(empty) and rows.count_rows() == 0
    with pytest.raises(IndexError, match="row 0 of 0"):
        rows.take([0])


# -- errors ---------------------------------------------------------------------------------------


def test_an_unknown_column_is_named_with_the_known_ones(tokens: pa.Table) -> None:
    rows, source = rows_of(tokens)
    for read in (rows.to_table, rows.to_batches, rows.scanner, rows.select):
        with pytest.raises(UsageError, match=r"tokens: no column 'logprob' \(engine \| .*raw"):
            read(["ids", "logprob"])
    for search in (rows.to_table, rows.to_batches, rows.scanner, rows.count_rows):
        with pytest.raises(UsageError, match=r"filter \(logprob > 0\): No match .*engine \| "):
            search(filter=pc.field("logprob") > 0)
    assert source.asked == []


@pytest.mark.parametrize(
    ("filter", "message"),
    [
        ("n > 3", "a filter of type str .*pyarrow.compute"),
        (pc.field("n"), "must evaluate to bool"),
        (pc.field("n") > "x", "no kernel"),
        (pc.field("semantics", "t") > 0, "No match"),
    ],
)
def test_a_filter_that_does_not_fit_is_refused_in_one_line(
    tokens: pa.Table, filter: Any, message: str
) -> None:
    rows, source = rows_of(tokens)
    with pytest.raises(UsageError, match=message) as caught:
        rows.scanner(filter=filter)
    assert "\n" not in str(caught.value) and source.asked == []


@pytest.mark.parametrize("indices", [[0.5], ["a"], [True, False], [[0]], pa.array([0, None])])
def test_row_numbers_are_integers(tokens: pa.Table, indices: Any) -> None:
    with pytest.raises(UsageError, match="row numbers"):
        rows_of(tokens)[0].take(indices)


def test_a_column_given_as_text_or_twice_is_refused(tokens: pa.Table) -> None:
    rows, _ = rows_of(tokens)
    with pytest.raises(UsageError, match=r"\['ids'\]"):
        rows.to_table("ids")
    with pytest.raises(UsageError, match="'n' twice"):
        rows.select(["n", "ids", "n"])
    with pytest.raises(UsageError, match="head of -1"):
        rows.head(-1)


def test_damage_found_while_reading_is_raised_as_what_it_is(tokens: pa.Table) -> None:
    def batches(columns: list[str]) -> Iterator[pa.RecordBatch]:
        yield tokens.select(columns).to_batches()[0]
        raise DamagedShardError("tokens/0.arrow: hash differs")

    rows = Rows(tokens.schema, batches)
    assert rows.head(1).num_rows == 1
    for read in (rows.to_table, rows.count_rows, lambda: rows.head(10**6)):
        with pytest.raises(DamagedShardError, match="hash differs"):
            read()
    # a C stream carries the message only
    with pytest.raises(pa.ArrowException, match="hash differs"):
        pa.table(rows)


def test_batches_of_another_type_than_promised_are_never_passed_on(tokens: pa.Table) -> None:
    wide = tokens.cast(pa.schema([f.with_type(pa.int64()) if f.name == "n" else f
                                  for f in tokens.schema]))  # fmt: skip
    rows = Rows(tokens.schema, Source(wide))
    with pytest.raises(AssertionError, match="promised n: int32"):
        next(rows.to_batches(["n"]))


# -- other tools ----------------------------------------------------------------------------------


def test_pyarrow_reads_rows(tokens: pa.Table) -> None:
    rows, _ = rows_of(tokens)
    assert same(pa.table(rows), tokens)
    assert same(pa.RecordBatchReader.from_stream(rows).read_all(), tokens)
    assert same(pa.table(rows.scanner(["ids"], pc.field("n") < 10)),
                rows.to_table(["ids"], pc.field("n") < 10))  # fmt: skip
    wide = pa.schema([pa.field("n", pa.int64(), nullable=False)])
    assert pa.table(rows.select(["n"]), schema=wide)["n"].type == pa.int64()


def test_duckdb_reads_rows_as_often_as_a_query_needs(tokens: pa.Table) -> None:
    duckdb = pytest.importorskip("duckdb")
    rows, _ = rows_of(tokens)  # noqa: RUF059 - DuckDB finds it by its name
    base = duckdb.connect()
    query = "select count(*), sum(n), max(list_max(ids)) from rows where start >= 10"
    chosen = [r for r in tokens.to_pylist() if r["start"] >= 10]
    assert base.sql(query).fetchall() == [
        (len(chosen), sum(r["n"] for r in chosen), max(max(r["ids"]) for r in chosen))
    ]
    assert base.sql("select max(list_max(ids)) from rows").fetchall() == [(2**32 - 1,)]
    join = "select count(*) from rows a join rows b using (request, sample, start)"
    assert base.sql(join).fetchall() == [(tokens.num_rows,)]
    assert base.sql("select count(*) from rows where raw is null").fetchall() == [(1,)]
    back = pa.table(base.sql("select processed, raw from rows"))
    for name in ("processed", "raw"):
        assert bits(back[name]) == bits(tokens[name])


def test_duckdb_asks_for_every_column_so_select_first(tokens: pa.Table) -> None:
    # the documentation says so; when this fails, DuckDB has learnt to say what it needs
    duckdb = pytest.importorskip("duckdb")
    rows, source = rows_of(tokens)
    narrow = rows.select(["n"])  # noqa: F841
    duckdb.sql("select sum(n) from rows").fetchall()
    assert [c for c in source.asked if c] and all(c == tokens.column_names for c in source.asked)
    source.asked.clear()
    assert duckdb.sql("select sum(n) from narrow").fetchall()
    assert source.asked and all(c == ["n"] for c in source.asked)


def test_polars_reads_rows(tokens: pa.Table) -> None:
    polars = pytest.importorskip("polars")
    rows, _ = rows_of(tokens)
    frame = polars.DataFrame(rows)
    assert frame.schema["ids"] == polars.List(polars.UInt32)
    assert frame["ids"].to_list() == tokens["ids"].to_pylist()
    assert frame["raw"].null_count() == 1
    assert bits(pa.table(frame)["processed"]) == bits(tokens["processed"])
    less = polars.DataFrame(rows.scanner(["n"], pc.field("n") < 10))
    assert less["n"].to_list() == [n for n in tokens["n"].to_pylist() if n < 10]


def test_pandas_reads_rows(tokens: pa.Table) -> None:
    pandas = pytest.importorskip("pandas", minversion="3")
    rows, _ = rows_of(tokens)
    frame = pandas.DataFrame.from_arrow(rows)
    assert list(frame.columns) == tokens.column_names
    assert frame["start"].tolist() == tokens["start"].to_pylist()
    assert [list(cell) for cell in frame["ids"]] == tokens["ids"].to_pylist()
    assert frame["raw"][0] is None


def test_to_pandas_tells_null_from_nan_and_keeps_integers() -> None:
    pandas = pytest.importorskip("pandas")
    table = pa.table({
        "id": pa.array([2**32 - 1, None, 0], pa.uint32()),
        "x": pa.array([None, float("nan"), 1.0], pa.float32()),
    })  # fmt: skip
    rows, _ = rows_of(table)
    frame = rows.to_pandas()
    assert frame.dtypes.tolist() == [
        pandas.ArrowDtype(pa.uint32()),
        pandas.ArrowDtype(pa.float32()),
    ]
    back = pa.table(frame)
    assert back["id"].to_pylist() == [2**32 - 1, None, 0]
    assert back["x"].is_null().to_pylist() == [True, False, False]
    assert rows.to_pandas(["id"], pc.field("id") > 0)["id"].tolist() == [2**32 - 1]


#: Ray sets options of its own that it has deprecated.
RAY_WARNS = "ignore:.* is deprecated:DeprecationWarning:ray.data.context"


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if "RAY_ADDRESS" in os.environ:
        pytest.skip("RAY_ADDRESS names a cluster that is not the tests' own")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray = pytest.importorskip("ray")
        data = pytest.importorskip("ray.data")
        ray.init(
            num_cpus=1,
            include_dashboard=False,
            object_store_memory=80 * 2**20,
            log_to_driver=False,
            logging_level="ERROR",
            _node_ip_address="127.0.0.1",
        )
        data.DataContext.get_current().enable_progress_bars = False
        yield ray
        ray.shutdown()


@pytest.mark.engine
@pytest.mark.filterwarnings(RAY_WARNS)
def test_ray_streams_the_rows_in_blocks(ray: Any, tape: Tape) -> None:
    tokens = tape.table("tokens")

    path = tape.path

    def batches(columns: list[str]) -> Iterator[pa.RecordBatch]:  # opens the tape on the worker
        yield from open_tape(path).table("tokens").select(columns).to_batches(max_chunksize=4)

    dataset = Rows(tokens.schema, batches, name="tokens").select(["ids", "n", "processed"]).to_ray()
    assert dataset.count() == tokens.num_rows
    whole = pa.concat_tables(ray.get(ref) for ref in dataset.to_arrow_refs())
    assert whole.schema.types == [pa.list_(pa.uint32()), pa.int32(), pa.list_(pa.float32())]
    assert whole["ids"].to_pylist() == tokens["ids"].to_pylist()
    assert bits(whole["processed"]) == bits(tokens["processed"])
    sizes = [len(b["n"]) for b in dataset.iter_batches(batch_size=5, batch_format="numpy")]
    assert sum(sizes) == tokens.num_rows and max(sizes) == 5


@pytest.mark.engine
@pytest.mark.filterwarnings(RAY_WARNS)
def test_ray_knows_the_columns_of_no_rows(ray: Any, tape: Tape) -> None:
    schema = tape.table("distributions").select(["n", "ids"]).schema
    dataset = Rows(schema, lambda columns: iter(())).to_ray()
    assert dataset.count() == 0 and dataset.schema().names == ["n", "ids"]


@pytest.mark.parametrize(
    ("module", "method", "remedy"),
    [("ray", "to_ray", r"pip install 'rolltape\[ray\]'"), ("pandas", "to_pandas", "pip install")],
)
def test_a_missing_tool_is_named_with_its_remedy(
    tokens: pa.Table, monkeypatch: pytest.MonkeyPatch, module: str, method: str, remedy: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=f"needs {module} .*{remedy}"):
        getattr(rows_of(tokens)[0], method)()


def test_rows_travel_to_other_processes_with_their_source(tokens: pa.Table) -> None:
    rows = Rows(tokens.schema, Source(tokens), name="tokens")
    assert same(pickle.loads(pickle.dumps(rows)).to_table(), tokens)


@pytest.mark.skipif(not hasattr(Tape, "dataset"), reason="Tape.dataset is not there yet")
def test_the_page_on_reading_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("duckdb", "pandas", "polars"):
        pytest.importorskip(module)
    write_tape(tmp_path / "runs" / "step-40", random_samples(4))
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "reading.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 4
    exec(compile("\n".join(blocks), "docs/reading.md", "exec"), {})


# -- what people see ------------------------------------------------------------------------------


class Page(HTMLParser):
    """Elements and text of a page as a browser takes them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[Any] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text.append(data)


HOSTILE = ["<script>alert(1)</script>", "\"'><img src=x onerror=alert(1)>", "&lt;b&gt;", "</table>"]


def test_no_text_of_a_tape_becomes_markup() -> None:
    fields = {
        name: pa.array([name, *HOSTILE])
        for name in (*HOSTILE, "plain")
    } | {
        "list": pa.array([[t] for t in ["x", *HOSTILE]]),
        "struct": pa.array([{"<i>": t} for t in ["x", *HOSTILE]]),
    }  # fmt: skip
    table = pa.table(fields)
    page = Page(Rows(table.schema, Source(table), name=HOSTILE[0])._repr_html_())
    assert page.tags == {"table", "caption", "thead", "tbody", "tr", "th", "td", "br", "small"}
    assert page.attributes == []
    for text in HOSTILE:  # and nothing of it is lost
        assert page.text.count(text) >= 5 and f"[{text}]" in page.text


def test_a_notebook_shows_the_first_rows_and_reads_no_more(tape: Tape) -> None:
    tokens = tape.table("tokens")
    rows, source = rows_of(tokens, 5)
    page = Page(rows._repr_html_())
    assert source.read == 1
    ids = tokens["ids"][0].as_py()
    assert f"[{ids[0]}, {ids[1]}, {ids[2]}, {ids[3]}, ... 10 values]" in page.text
    assert (
        "list<item: uint32>" in page.text and "[null, null, null, null, ... 10 values]" in page.text
    )
    assert page.text.count(tokens["engine"][0].as_py()) == 5
    counted, _ = rows_of(tokens, counted=True)
    assert "tokens: 12 rows" in Page(counted._repr_html_()).text


def test_long_and_broken_texts_are_shown_short() -> None:
    broken = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(np.array([0, 2], np.int32)), pa.py_buffer(b"a\xff")]
    )
    table = pa.table({"long": ["x" * 10**6], "broken": broken, "bytes": [b"\x00" * 999]})
    page = Page(Rows(table.schema, Source(table))._repr_html_())
    assert {"x" * 60 + "...", "a\ufffd", "999 bytes"} <= set(page.text)


def test_repr_is_schema_and_count_without_reading(tokens: pa.Table) -> None:
    rows, source = rows_of(tokens)
    assert repr(rows).splitlines()[:2] == ["tokens: 12 columns", "  engine: string not null"]
    assert "  ids: list<item: uint32>" in repr(rows)
    assert repr(rows_of(tokens, counted=True)[0]).startswith("tokens: 12 rows, 12 columns\n")
    assert source.asked == [] and max(map(len, repr(rows).splitlines())) < 100


# -- the law --------------------------------------------------------------------------------------

SCHEMA = pa.schema([
    pa.field("a", pa.int32(), nullable=False),
    pa.field("u", pa.uint32()),
    pa.field("x", pa.float32()),
    pa.field("t", pa.string()),
    pa.field("l", pa.list_(pa.uint32())),
])  # fmt: skip
UINT32 = st.integers(0, 2**32 - 1)
ROW = st.tuples(
    st.integers(-4, 4),
    st.none() | st.sampled_from([0, 1, 2**32 - 1]),
    st.none() | UINT32,  # bits of x
    st.none() | st.text(max_size=3),
    st.none() | st.lists(st.none() | UINT32, max_size=3),
)
LEAF = st.one_of(
    st.builds(lambda v: pc.field("a") > v, st.integers(-4, 4)),
    st.builds(lambda v: pc.field("u") == v, st.sampled_from([0, 2**32 - 1])),
    st.builds(lambda v: pc.field("t") < v, st.text(max_size=2)),
    st.sampled_from([pc.field(n).is_null() for n in "uxtl"] + [pc.field("x") < 0]),
    st.just(pc.scalar(True)),
)  # fmt: skip
FILTER = st.recursive(
    LEAF,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
        st.builds(lambda a: ~a, inner),
    ),
    max_leaves=4,
)


def make_batch(rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) if rows else [[]] * 5
    types = [pa.int32(), pa.uint32(), pa.uint32(), pa.string(), pa.list_(pa.uint32())]
    arrays = [pa.array(list(c), t) for c, t in zip(columns, types, strict=True)]
    arrays[2] = arrays[2].view(pa.float32())
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def plain(table: pa.Table) -> list[dict[str, Any]]:
    """Rows with x as bits, so that NaNs compare."""
    if "x" in table.column_names:
        x = [c.view(pa.uint32()) for c in table["x"].chunks]
        i = table.schema.get_field_index("x")
        table = table.set_column(i, "x", pa.chunked_array(x, pa.uint32()))
    return table.to_pylist()


@given(
    batches=st.lists(st.lists(ROW, max_size=5).map(make_batch), max_size=4),
    columns=st.none() | st.permutations(SCHEMA.names).flatmap(
        lambda names: st.integers(1, 5).map(lambda n: list(names[:n]))
    ),
    filter=st.none() | FILTER,
    data=st.data(),
)  # fmt: skip
def test_rows_agree_with_the_table_of_the_same_batches(
    batches: list[pa.RecordBatch], columns: list[str] | None, filter: Any, data: st.DataObject
) -> None:
    def read(names: list[str]) -> Iterator[pa.RecordBatch]:
        return (batch.select(names) for batch in batches)

    rows = Rows(SCHEMA, read)
    table = pa.Table.from_batches(batches, SCHEMA)
    names = SCHEMA.names if columns is None else columns
    chosen = (table if filter is None else table.filter(filter)).select(names)
    found = rows.to_table(columns, filter)
    assert found.schema == table.select(names).schema
    assert plain(found) == plain(chosen)
    assert rows.count_rows(filter) == chosen.num_rows
    n = data.draw(st.integers(0, 12))
    assert plain(rows.scanner(columns, filter).head(n)) == plain(chosen.slice(0, n))
    assert plain(pa.table(rows.scanner(columns, filter))) == plain(chosen)
    if table.num_rows:
        picks = data.draw(st.lists(st.integers(0, table.num_rows - 1), max_size=8))
        expected = table.select(names).take(pa.array(picks, pa.int64()))
        assert plain(rows.take(picks, columns)) == plain(expected)
