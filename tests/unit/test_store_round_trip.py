"""What is written comes back bit for bit: nulls, NaN payloads, infinities, wide ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolltape import store
from rolltape.store import Key, Masked, SchemaError, codecs
from rolltape.store.schema import SUPPORT_EXPLICIT, SUPPORT_FULL, SUPPORT_UNRECORDED
from tests import reference
from tests.random_tapes import Made, tapes

QUICK = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
#: Any 32 bits at all: every NaN payload, both zeros, denormals, infinities.
BITS = st.lists(st.integers(0, 2**32 - 1), min_size=0, max_size=40)
ENGINE = "0123456789abcdef" * 2


def key_columns(request: str = "0-0", sample: int = 0) -> dict[str, Any]:
    return {"engine": ENGINE, "request": request, "sample": sample, "pass": 0}


def write(path: Path, **tables: dict[str, Any]) -> store.Tape:
    root = store.create_tape(path, role="rollout")
    with store.TapeWriter(root) as writer:
        for table, columns in tables.items():
            writer.append(table, columns)
    return store.open(root)


def opened(prompt_len: int, length: int | None = None, finish: str = "stop") -> dict[str, Any]:
    return {**key_columns(), "prompt_len": prompt_len, "length": length, "finish": finish}


@QUICK
@given(bits=BITS, data=st.data())
def test_logprobs_keep_every_bit_and_every_null(
    tmp_path_factory: Any, bits: list[int], data: Any
) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    valid = np.array(
        data.draw(st.lists(st.booleans(), min_size=len(bits), max_size=len(bits))), bool
    )
    tape = write(
        tmp_path_factory.mktemp("t") / "a",
        sequences=opened(0, len(bits)),
        tokens={
            **key_columns(),
            "start": 0,
            "n": [len(bits)],
            "ids": [np.zeros(len(bits), np.uint32)],
            "raw": [Masked(values, valid)],
        },
    )
    back = tape.sequence("0-0.0").logprob("raw")
    np.testing.assert_array_equal(back.valid, valid)
    np.testing.assert_array_equal(back.values.view(np.uint32)[valid], values.view(np.uint32)[valid])
    assert not tape.sequence("0-0.0").logprob("processed").valid.any()


@QUICK
@given(
    n=st.integers(0, 9),
    layers=st.integers(1, 4),
    k=st.integers(1, 5),
    experts=st.sampled_from([1, 8, 256, 257, 512, 32_768, 65_535]),
    data=st.data(),
)
def test_routes_keep_ids_order_weights_and_gaps(
    tmp_path_factory: Any, n: int, layers: int, k: int, experts: int, data: Any
) -> None:
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, experts, (n, layers, k))
    if n:
        ids[0, 0, 0] = experts - 1
    weights = rng.integers(0, 2**32, (n, layers, k), np.uint32).view(np.float32)
    valid = rng.random((n, layers)) < 0.7
    tape = write(
        tmp_path_factory.mktemp("t") / "a",
        sequences=opened(n + 1, n + 1),
        routes={
            **key_columns(),
            "start": 0,
            "n": [n],
            "role": "used",
            "layers": [list(range(layers))],
            "k": k,
            "num_experts": experts,
            "encoding": "plain",
            "ids": [codecs.encode_plain(ids, experts)],
            "weights": [codecs.encode_floats(weights)],
            "valid": [codecs.encode_bits(valid)],
            "missing": f'[[{n}, 1, null, "last"]]',
        },
    )
    routes = tape.sequence("0-0.0").routes()
    assert routes is not None and routes.weights is not None
    assert routes.ids.dtype == (np.uint8 if experts <= 256 else np.uint16)
    np.testing.assert_array_equal(routes.valid[:n], valid)
    assert not routes.valid[n:].any()
    np.testing.assert_array_equal(routes.ids[:n][valid], ids[valid])
    np.testing.assert_array_equal(
        routes.weights[:n][valid].view(np.uint32), weights[valid].view(np.uint32)
    )
    assert routes.missing == ((n, 1, None, "last"),)


def test_supports_keep_the_three_states_apart(tmp_path: Path) -> None:
    state = [SUPPORT_FULL, SUPPORT_EXPLICIT, SUPPORT_EXPLICIT, SUPPORT_UNRECORDED]
    tape = write(
        tmp_path / "a",
        sequences=opened(1, 5),
        supports={
            **key_columns(),
            "start": 1,
            "n": [4],
            "derived": False,
            "state": [np.array(state, np.uint8)],
            "counts": [np.array([0, 2, 0, 0])],
            "ids": [np.array([7, 151_935], np.uint32)],
        },
    )
    supports = tape.sequence("0-0.0").supports()
    assert supports is not None
    np.testing.assert_array_equal(supports.state, [SUPPORT_UNRECORDED, *state])
    assert supports.at(1) is None and supports.at(4) is None
    np.testing.assert_array_equal(supports.at(2), [7, 151_935])
    np.testing.assert_array_equal(supports.at(3), np.zeros(0))  # nothing kept is not "all kept"


def test_activations_keep_every_bit(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    data = rng.integers(0, 2**32, (3, 5), np.uint32).view(np.float32)
    tape = write(
        tmp_path / "a",
        sequences=opened(3, 3),
        activations={
            **key_columns(),
            "start": 0,
            "n": 3,
            "site": "layers.0.out",
            "dtype": "bfloat16",
            "width": 5,
            "data": [codecs.encode_floats(data)],
        },
    )
    ((start, dtype, back),) = tape.sequence("0-0.0").activations()["layers.0.out"]
    assert (start, dtype) == (0, "bfloat16")
    np.testing.assert_array_equal(back.view(np.uint32), data.view(np.uint32))


def test_empty_and_aborted_sequences_are_sequences(tmp_path: Path) -> None:
    root = store.create_tape(tmp_path / "a", role="rollout")
    with store.TapeWriter(root) as writer:
        for request, length, finish in (
            ("empty", 0, "abort"),
            ("cut", 2, "abort"),
            ("live", None, "open"),
        ):
            writer.append(
                "sequences",
                {**key_columns(request), "prompt_len": 0, "length": length, "finish": finish},
            )
        writer.append("tokens", {**key_columns("cut"), "start": 0, "n": 2, "ids": [[4, 5]]})
    tape = store.open(root)
    assert [(s.key.request, s.finish, s.length) for s in tape] == [
        ("empty", "abort", 0),
        ("cut", "abort", 2),
        ("live", "open", 0),
    ]
    assert len(tape.sequence("empty.0").tokens) == 0
    assert tape.sequence("cut.0").routes() is None


def test_the_first_pass_over_a_position_is_the_record_of_it(tmp_path: Path) -> None:
    root = store.create_tape(tmp_path / "a", role="rollout")
    with store.TapeWriter(root) as writer:
        writer.append("sequences", opened(0, 4))
        for start, raw in ((0, [1.0, 2.0]), (1, [9.0, 3.0, 4.0])):
            writer.append(
                "tokens",
                {
                    **key_columns(),
                    "start": start,
                    "n": len(raw),
                    "ids": [np.arange(start, start + len(raw))],
                    "raw": [np.array(raw, np.float32)],
                },
            )
    np.testing.assert_array_equal(
        store.open(root).sequence("0-0.0").logprob("raw").values, [1, 2, 3, 4]
    )


def test_a_hole_in_the_middle_is_missing_not_zero(tmp_path: Path) -> None:
    root = store.create_tape(tmp_path / "a", role="rollout")
    with store.TapeWriter(root) as writer:
        writer.append("sequences", opened(0, 6))
        for start in (0, 4):
            writer.append(
                "tokens",
                {**key_columns(), "start": start, "n": 2, "ids": [[1, 2]], "raw": [[-1.0, -2.0]]},
            )
    sequence = store.open(root).sequence("0-0.0")
    hole = [True, True, False, False, True, True]
    np.testing.assert_array_equal(sequence.tokens.valid, hole)
    np.testing.assert_array_equal(sequence.logprob("raw").valid, hole)


def test_step_and_version_come_from_the_forward_that_drew_the_token(tmp_path: Path) -> None:
    rows = [  # two prefill chunks, decode, a preemption that runs everything again, decode
        (0, 0, 2, "prefill", 7),
        (1, 2, 1, "prefill", 7),
        (2, 3, 1, "decode", 7),
        (3, 0, 4, "recompute", 8),
        (4, 4, 1, "decode", 8),
        (5, 5, 1, "dummy", 8),
    ]
    tape = write(
        tmp_path / "a",
        sequences=opened(3, 6),
        forwards={
            "engine": ENGINE,
            "request": "0-0",
            "sample": 0,
            "pass": 0,
            "row": 0,
            "step": [r[0] for r in rows],
            "start": [r[1] for r in rows],
            "n": [r[2] for r in rows],
            "kind": [r[3] for r in rows],
            "weight_version": [r[4] for r in rows],
        },
    )
    sequence = tape.sequence("0-0.0")
    np.testing.assert_array_equal(sequence.step.valid, [False, False, False, True, True, True])
    np.testing.assert_array_equal(sequence.step.values[3:], [1, 2, 4])
    np.testing.assert_array_equal(sequence.weight_version.values[3:], [7, 7, 8])


@pytest.mark.parametrize(
    ("table", "columns", "says"),
    [
        ("tokens", {"nonsense": 1}, "no column 'nonsense'"),
        ("tokens", {"start": [0], "n": [1, 2], "ids": [[1]]}, "tokens.n has 2 rows"),
        ("tokens", {"start": 0, "n": 1, "ids": [np.array([-1])]}, "tokens.ids has values -1..-1"),
        ("tokens", {"start": 0, "n": 1, "ids": [np.array([2**32])]}, "the column is uint32"),
        ("tokens", {"start": None, "n": 1, "ids": [[1]]}, "tokens.start is null"),
        ("sequences", {"prompt_len": "x", "finish": "stop"}, "sequences.prompt_len"),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, table: str, columns: dict[str, Any], says: str
) -> None:
    root = store.create_tape(tmp_path / "a", role="rollout")
    with (
        store.TapeWriter(root) as writer,
        pytest.raises(SchemaError, match=says.replace(".", r"\.")),
    ):
        writer.append(table, {**key_columns(), **columns})


@pytest.mark.parametrize("experts", [0, 65_536])
def test_expert_counts_that_no_dtype_holds_are_refused(experts: int) -> None:
    with pytest.raises(SchemaError, match="num_experts"):
        codecs.route_dtype(experts)


@pytest.mark.parametrize("bad", [-1, 8])
def test_ids_out_of_range_are_refused_on_write(bad: int) -> None:
    with pytest.raises(SchemaError, match="validity bitmap"):
        codecs.encode_plain(np.full((1, 1, 1), bad), 8)


def test_ids_and_keys_read_back() -> None:
    key = Key(ENGINE, "0-3", 1, 2)
    assert Key.parse(key.text) == key
    odd = Key(ENGINE, "caller/4/0", 1, 2)  # a caller's own id
    assert Key.parse(odd.text) == odd
    assert key.id == "01234567.0-3.1.p2"
    assert store.token_digest(1, np.array([1, 2])) != store.token_digest(2, np.array([1, 2]))


def test_any_arrow_reader_opens_a_shard(tmp_path: Path) -> None:
    import pyarrow.dataset as ds

    tape = write(tmp_path / "a", sequences=opened(1, 1))
    table = ds.dataset(tape.path / "sequences", format="ipc").to_table()
    assert table.column("finish").to_pylist() == ["stop"]


@QUICK
@given(made=tapes(), sealed=st.booleans())
def test_whatever_was_written_is_read_back_joined(
    tmp_path_factory: Any, made: Made, sealed: bool
) -> None:
    tape = store.open(made.write(tmp_path_factory.mktemp("t") / "a", sealed=sealed))
    assert tape.keys() == made.keys
    for sequence in tape:
        found, wanted = reference.read(sequence), reference.expected(made, sequence.key)
        for name in wanted:
            assert found[name] == wanted[name], f"{name} of {sequence.id}"


@QUICK
@given(made=tapes())
def test_the_flat_table_is_the_sequences_side_by_side(tmp_path_factory: Any, made: Made) -> None:
    tape = store.open(made.write(tmp_path_factory.mktemp("t") / "a"))
    table = tape.to_table()
    assert table.column("id").to_pylist() == [key.id for key in made.keys]
    facts = tape.rollups()
    for name in facts.column_names:
        assert table.column(name).to_pylist() == facts.column(name).to_pylist()
    for row, key in enumerate(made.keys):
        wanted = reference.expected(made, key)
        for name in ("ids", "loss_mask"):
            assert table.column(name)[row].as_py() == wanted[name]
        for name in ("processed", "scaled", "raw"):
            cell = table.column(name)[row].values
            bits = cell.fill_null(0).to_numpy().view(np.uint32).tolist()
            valid = cell.is_valid().to_pylist()
            assert [b if ok else None for b, ok in zip(bits, valid, strict=True)] == wanted[name]


def test_gaps_and_orphans_are_said_and_not_mixed_with_others(tmp_path: Path) -> None:
    root = store.create_tape(tmp_path / "a", role="rollout")
    with store.TapeWriter(root) as writer:
        writer.append("sequences", opened(1, 1))
        writer.append("tokens", {**key_columns("lost"), "start": 0, "n": 1, "ids": [[7]]})
    tape = store.open(root)
    assert [s.key.request for s in tape] == ["0-0"]
    assert any("lost.0" in problem for problem in tape.problems)
    assert not next(iter(tape)).tokens.valid.any()
