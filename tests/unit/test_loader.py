"""Batches of a tape: what is in them, which sequences, and in which order."""

from __future__ import annotations

import functools
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.utils.data import DataLoader  # noqa: E402

from rolltape import store  # noqa: E402
from rolltape.store.columns import Masked  # noqa: E402
from rolltape.store.errors import SchemaError, UsageError  # noqa: E402
from rolltape.store.loader import Sequences, TapeDataset, collate  # noqa: E402
from rolltape.store.schema import SUPPORT_EXPLICIT, SUPPORT_UNRECORDED  # noqa: E402
from tests.builders import Sample, key_of, random_samples, write_tape  # noqa: E402

ALL = ("logprobs", "routes", "supports", "weight_version", "annotations")
LENGTHS = [5, 9, 24, 3, 7, 8, 10, 11]


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return random_samples(8, response=LENGTHS)


@pytest.fixture(scope="module")
def tape(samples: list[Sample], tmp_path_factory: Any) -> store.Tape:
    path = tmp_path_factory.mktemp("loader") / "a"
    tape = write_tape(path, samples, sealed=False)
    with store.TapeWriter(path) as writer:
        for i, key in enumerate(tape.keys()):
            row = {"engine": key.engine, "request": key.request, "sample": key.sample, "pass": 0}
            writer.append("annotations", {**row, "name": "reward", "number": i / 2, "t_ns": 1})
    store.seal(path)
    return store.open(path)


def batches(tape: Any, **options: Any) -> list[Any]:
    return list(TapeDataset(tape, **{"batch_size": 4, "columns": ALL, **options}))


def check_batch(batch: Any, samples: list[Sample]) -> None:
    """Every field of a batch against what was written."""
    for i, index in enumerate(batch.indexes):
        sample = samples[index]
        row, columns = batch.span(i)
        total = sample.length
        at = np.arange(total)
        assert batch.lengths[i] == total and batch.prompt_lens[i] == sample.prompt_len
        assert (batch.input_ids[row, columns].numpy() == sample.ids).all()
        assert (batch.position_ids[row, columns].numpy() == at).all()
        assert batch.attention_mask[row, columns].all()
        assert (batch.response_mask[row, columns].numpy() == (at >= sample.prompt_len)).all()
        assert (batch.loss_mask[row, columns].numpy() == sample.loss_mask.values).all()
        known = sample.processed.valid
        assert (batch.logprobs_valid[row, columns].numpy() == known).all()
        found = batch.logprobs[row, columns].numpy()
        assert (found[known] == sample.processed.values[known]).all()
        assert np.isnan(found[~known]).all()
        assert sample.used is not None and sample.kept is not None
        valid = sample.used.valid
        assert (batch.routes_valid[row, columns].numpy() == valid).all()
        assert (batch.routes[row, columns].numpy()[valid] == sample.used.ids[valid]).all()
        for p in range(total):
            flat = row * batch.input_ids.shape[1] + columns.start + p
            first, last = batch.supports.offsets[flat : flat + 2].tolist()
            kept = sample.kept[p] if p >= sample.prompt_len else None
            state = SUPPORT_UNRECORDED if p < sample.prompt_len else SUPPORT_EXPLICIT
            assert batch.supports.state[row, columns.start + p] == state
            assert batch.supports.ids[first:last].tolist() == ([] if kept is None else list(kept))
        versions = batch.weight_version_valid[row, columns].numpy()
        assert (versions == (at >= sample.prompt_len)).all()


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_holds_what_was_recorded(
    tape: store.Tape, samples: list[Sample], side: Any
) -> None:
    found = batches(tape, padding_side=side, pad_token=77)
    assert [b.indexes for b in found] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    for batch in found:
        check_batch(batch, samples)
        assert batch.input_ids.shape == (4, int(batch.lengths.max()))
        empty = ~batch.attention_mask
        assert empty.sum() == batch.input_ids.numel() - batch.tokens
        assert (batch.input_ids[empty] == 77).all()
        assert not (batch.loss_mask[empty].any() or batch.logprobs_valid[empty].any())
        assert not (batch.routes_valid[empty].any() or batch.response_mask[empty].any())
        assert (batch.supports.state[empty] == SUPPORT_UNRECORDED).all()
        edge = -1 if side == "left" else 0
        assert batch.attention_mask[:, edge].all()
        assert batch.cu_seqlens is None


def test_a_packed_batch_is_one_row_without_padding(tape: store.Tape, samples: list[Sample]) -> None:
    for batch in batches(tape, layout="packed"):
        check_batch(batch, samples)
        assert batch.input_ids.shape == (1, batch.tokens) and batch.attention_mask.all()
        assert batch.cu_seqlens.dtype == torch.int32
        assert (batch.cu_seqlens.diff() == batch.lengths).all()
        assert batch.max_seqlen == int(batch.lengths.max())


def test_routes_stay_narrow(tmp_path: Path, tape: store.Tape) -> None:
    assert batches(tape)[0].routes.dtype == torch.uint8
    wide = write_tape(tmp_path / "wide", random_samples(2, experts=300))
    assert batches(wide)[0].routes.dtype == torch.uint16


def test_a_pipeline_rank_reads_its_own_layers(tape: store.Tape, samples: list[Sample]) -> None:
    batch = batches(tape, layers=[3, 1])[0]
    assert batch.route_layers == (3, 1) and batch.num_experts == 16
    row, columns = batch.span(0)
    wanted = samples[0].used.ids[:, [2, 0]]
    assert (batch.routes[row, columns].numpy()[:-1] == wanted[:-1]).all()


def test_heavy_fields_are_only_there_when_asked_for(tape: store.Tape) -> None:
    batch = batches(tape, columns=())[0]
    absent = ("logprobs", "routes", "supports", "weight_version", "annotations")
    assert all(getattr(batch, name) is None for name in absent)
    with pytest.raises(UsageError, match="no column 'router'"):
        batches(tape, columns=("router",))


def test_the_logprob_column_comes_with_what_it_means(
    tape: store.Tape, samples: list[Sample]
) -> None:
    batch = batches(tape, logprob="raw")[0]
    row, columns = batch.span(1)
    known = samples[1].raw.valid
    assert (batch.logprobs[row, columns].numpy()[known] == samples[1].raw.values[known]).all()
    assert batch.semantics[1][0][2]["truncation"] == ["top_p=0.9"]
    assert batch.temperatures[row, columns].numpy() == pytest.approx(0.7)
    with pytest.raises(UsageError, match="no logprob column 'old'"):
        batches(tape, logprob="old")


def test_annotations_come_with_their_sequences(tape: store.Tape) -> None:
    second = batches(tape)[1]
    assert second.annotation("reward").tolist() == [2.0, 2.5, 3.0, 3.5]
    with pytest.raises(UsageError, match="annotation 'advantage' is not there"):
        second.annotation("advantage")


def test_values_a_sequence_spread_over_its_tokens(tape: store.Tape) -> None:
    batch = batches(tape, padding_side="left")[0]
    spread = batch.per_token(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert (spread[batch.attention_mask] > 0).all() and not spread[~batch.attention_mask].any()
    assert spread[2, -1] == 3.0


def test_groups_are_numbered_and_side_by_side(tape: store.Tape) -> None:
    assert [b.group_index.tolist() for b in batches(tape)] == [[0, 0, 1, 1], [2, 2, 3, 3]]


def test_max_tokens_counts_padding(tape: store.Tape) -> None:
    packed = batches(tape, batch_size=None, max_tokens=60, layout="packed")
    padded = batches(tape, batch_size=None, max_tokens=60)
    assert all(b.input_ids.numel() <= 60 for b in (*packed, *padded))
    assert sum(map(len, packed)) == sum(map(len, padded)) == 8
    assert len(packed) < len(padded)


def test_a_group_that_does_not_fit_a_batch_is_refused(tape: store.Tape) -> None:
    with pytest.raises(UsageError, match="has 2 sequences, batch_size is 1"):
        TapeDataset(tape, batch_size=1)
    with pytest.raises(UsageError, match=r"0-1\.0 has 60 tokens, max_tokens is 40"):
        TapeDataset(tape, max_tokens=40)
    with pytest.raises(UsageError, match="give one of them"):
        TapeDataset(tape, max_tokens=40, batch_size=2)


def test_missing_routes_are_marked_and_not_expert_zero(tmp_path: Path) -> None:
    samples = random_samples(2)
    samples[0].used.valid[3:9, 1] = False
    samples[1].used = None
    batch = batches(write_tape(tmp_path / "a", samples))[0]
    assert not batch.routes_valid[0, 3:9, 1].any() and batch.routes_valid[0, 3:9, 0].all()
    assert not batch.routes_valid[1].any()


def test_a_loss_mask_that_is_not_known_counts_nothing(tmp_path: Path) -> None:
    samples = random_samples(2)
    samples[0].loss_mask = Masked(samples[0].loss_mask.values, np.arange(30) < 20)
    batch = batches(write_tape(tmp_path / "a", samples))[0]
    assert batch.loss_mask[0, 6:20].all() and not batch.loss_mask[0, 20:].any()


def test_missing_tokens_are_an_error_that_names_the_place(tmp_path: Path) -> None:
    samples = random_samples(2)
    path = tmp_path / "a"
    write_tape(path, samples, sealed=False)
    with store.TapeWriter(path) as writer:
        row = {"engine": "a1" * 16, "request": "0-9", "sample": 0, "pass": 0}
        closing = {"prompt_len": 2, "length": 6, "finish": "stop", "closed_ns": 9, "opened_ns": 9}
        writer.append("sequences", {**row, **closing})
        writer.append("tokens", {**row, "start": 0, "n": 4, "ids": [np.arange(4)]})
    store.seal(path)
    with pytest.raises(SchemaError, match=r"0-9\.0: tokens\.ids has nothing at position 4 of 6"):
        batches(path)
    assert sum(map(len, batches(path, exclude=("a1a1a1a1.0-9.0",)))) == 2


def versioned(path: Path) -> store.Tape:
    """Four groups of two; sequence i has version i, the last two of no known version."""
    samples = random_samples(8, response=LENGTHS)
    for i, sample in enumerate(samples):
        sample.version = None if i >= 6 else np.full(sample.length, i)
    samples[2].finish = "abort"
    return write_tape(path, samples)


@pytest.mark.parametrize(
    ("filters", "given"),
    [
        ({}, [0, 1, 4, 5, 6, 7]),
        ({"finish": ("stop", "abort")}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"partial_groups": "pull"}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"min_version": 4}, [4, 5]),
        ({"max_version": 4}, [0, 1]),
        ({"max_version": 4, "partial_groups": "pull"}, [0, 1, 2, 3, 4, 5]),
        ({"max_staleness": 1}, [4, 5]),
        ({"max_staleness": 1, "current_version": 1}, [0, 1, 4, 5]),
        ({"max_length": 15}, [0, 1, 4, 5]),
        ({"max_length": 9, "partial_groups": "pull"}, [2, 3]),
        ({"exclude": "a1a1a1a1.0-0.1"}, [4, 5, 6, 7]),
    ],
)
def test_filters_keep_whole_groups(tmp_path: Path, filters: Any, given: list[int]) -> None:
    tape = versioned(tmp_path / "a")
    numbers = {key_of(tape, i).id: i for i in range(8)}
    found = Sequences(tape, columns=(), **filters)
    assert [numbers[found[i].id] for i in range(len(found))] == given
    assert sum(found.selection.dropped.values()) == 8 - len(given)


def test_what_was_left_out_is_counted_by_reason(tmp_path: Path) -> None:
    found = Sequences(versioned(tmp_path / "a"), max_version=4)
    assert found.selection.dropped == {
        "finish": 1,  # aborted
        "group": 2,  # its partner, and that of a too new one
        "version": 1,
        "version unknown": 2,
    }


def test_an_open_sequence_drops_its_group_even_when_pulling(tmp_path: Path) -> None:
    samples = random_samples(4)
    samples[1].finish = "open"
    tape = write_tape(tmp_path / "a", samples)
    for partial in ("drop", "pull"):
        assert len(Sequences(tape, partial_groups=partial)) == 2


def test_sequences_are_a_map_style_dataset(tape: store.Tape) -> None:
    found = Sequences(tape, columns=ALL)
    assert len(found) == 8 and found[-1].id == found[7].id
    with pytest.raises(IndexError):
        found[8]
    loader = DataLoader(found, batch_size=3, collate_fn=functools.partial(collate, layout="packed"))
    assert [b.indexes for b in loader] == [(0, 1, 2), (3, 4, 5), (6, 7)]


def test_an_unsealed_tape_is_refused_unless_it_is_followed(tmp_path: Path) -> None:
    tape = write_tape(tmp_path / "a", random_samples(2), sealed=False)
    with pytest.raises(UsageError, match="still being written"):
        TapeDataset(tape, batch_size=2)


def test_options_that_do_not_exist_are_refused(tape: store.Tape) -> None:
    with pytest.raises(UsageError, match="no option or filter 'shuffled'"):
        TapeDataset(tape, batch_size=2, shuffled=True)
    for wrong in (
        {"layout": "ragged"},
        {"uneven": "repeat"},
        {"rank": 1, "world_size": 1},
        {"group_size": 2},
    ):
        with pytest.raises(UsageError):
            TapeDataset(tape, batch_size=2, **wrong)


def order(tape: Any, **options: Any) -> list[str]:
    return [id_ for b in batches(tape, columns=(), batch_size=2, **options) for id_ in b.ids]


def test_the_order_is_a_function_of_seed_and_epoch(tape: store.Tape) -> None:
    data = TapeDataset(tape, batch_size=2, shuffle=True, seed=3)
    epochs = []
    for epoch in (*range(8), 0):
        data.set_epoch(epoch)
        epochs.append([id_ for b in data for id_ in b.ids])
    assert epochs[0] == epochs[-1] == order(tape.path, shuffle=True, seed=3)
    # of 24 orders, and the fingerprint is new in every run
    assert len({tuple(found) for found in epochs}) > 1
    assert len({tuple(order(tape, shuffle=True, seed=seed)) for seed in range(8)}) > 1
    assert order(tape) == [key_of(tape, i).id for i in range(8)]
    for found in epochs:
        assert sorted(found) == sorted(order(tape))
        partners = [id_.rpartition(".")[0] for id_ in found]
        assert partners[::2] == partners[1::2]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("uneven", ["drop", "pad"])
def test_every_rank_gets_the_same_number_of_batches(
    tape: store.Tape, world: int, uneven: Any
) -> None:
    ranks = [
        TapeDataset(tape, batch_size=2, rank=r, world_size=world, uneven=uneven, shuffle=True)
        for r in range(world)
    ]
    found = [list(rank) for rank in ranks]
    assert {len(f) for f in found} == {len(r) for r in ranks} == {len(found[0])}
    real = [id_ for f in found for b in f if not b.padding for id_ in b.ids]
    assert len(real) == len(set(real)) == (8 if uneven == "pad" else 4 // world * world * 2)
    for batch in (b for f in found for b in f):
        assert batch.padding == (not batch.loss_mask.any())
        assert batch.attention_mask.any()


def test_ranks_come_from_the_environment(tape: store.Tape, monkeypatch: Any) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    data = TapeDataset(tape, batch_size=2)
    assert (data.rank, data.world_size) == (1, 2)


def test_a_batch_moves_between_devices_with_all_its_tensors(tape: store.Tape) -> None:
    moved = batches(tape)[0].to("meta")
    tensors = [v for v in vars(moved).values() if isinstance(v, torch.Tensor)]
    assert len(tensors) > 10
    assert all(t.device.type == "meta" for t in (*tensors, *vars(moved.supports).values()))


def test_a_dataset_is_pickled_without_its_files(tape: store.Tape) -> None:
    data = TapeDataset(tape, batch_size=2, shuffle=True, columns=ALL)
    first = [b.ids for b in data]
    blob = pickle.dumps(data)
    assert len(blob) < 20_000
    assert [b.ids for b in pickle.loads(blob)] == first


def test_states_are_small_json(tape: store.Tape) -> None:
    data = TapeDataset(tape, batch_size=2)
    next(iter(data))
    assert len(json.dumps(data.state_dict())) < 500


def test_the_first_example_of_the_page_runs(
    tmp_path: Path, monkeypatch: Any, capsys: Any, samples: list[Sample]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "loader.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    write_tape(tmp_path / "runs" / "a", samples)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs/loader.md", "exec"), {})
    assert capsys.readouterr().out.count("torch.Size([8, 30, 3, 4])") == 2


def test_a_tape_in_an_object_store_is_read_by_its_url(
    tape: store.Tape, samples: list[Sample]
) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    for file in tape.path.rglob("*"):
        if file.is_file():
            memory.pipe(f"/loader/{file.relative_to(tape.path)}", file.read_bytes())
    found = batches("memory://loader")
    memory.rm("/loader", recursive=True)
    assert len(found) == 2
    for batch in found:
        check_batch(batch, samples)
