"""Rows of tensor-parallel ranks put together: plain functions."""

from __future__ import annotations

import pytest
import torch

from rolltape.replay.sites.places import into, output, sharded
from rolltape.replay.sites.shards import Layout, merge_rows, merge_sites
from rolltape.replay.sites.vllm import _rows_of
from rolltape.replay.verify.rank_sites import part_at
from rolltape.store.errors import UsageError

pytestmark = pytest.mark.engine

WHOLE = torch.arange(24, dtype=torch.float32).reshape(3, 8)
SPLIT = Layout(split=True)


def nudged(rows: torch.Tensor, row: int, column: int) -> torch.Tensor:
    other = rows.clone()
    other[row, column] = torch.nextafter(other[row, column], other[row, column] + 1)
    return other


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_split_columns_are_put_together_in_the_order_of_the_ranks(ranks: int) -> None:
    merged, problems = merge_rows("q", WHOLE.chunk(ranks, 1), SPLIT)
    assert torch.equal(merged, WHOLE) and not problems


def test_copies_of_a_head_are_one_and_must_agree() -> None:
    left, right = WHOLE.chunk(2, 1)
    layout = Layout(split=True, copies=2)
    merged, problems = merge_rows("k", [left, left.clone(), right, right.clone()], layout)
    assert torch.equal(merged, WHOLE) and not problems
    merged, (problem,) = merge_rows("k", [left, left, right, nudged(right, 1, 2)], layout)
    assert torch.equal(merged, WHOLE)  # of the first rank that holds them
    assert (problem.site, problem.rank, problem.against) == ("k", 3, 2)
    assert (problem.row, problem.rows) == (1, 1) and problem.max_abs > 0


def test_a_replica_with_one_other_bit_is_named() -> None:
    shards = [WHOLE, WHOLE.clone(), nudged(nudged(WHOLE, 2, 0), 1, 7)]
    merged, (problem,) = merge_rows("layers.0.out", shards, Layout())
    assert torch.equal(merged, WHOLE)
    assert (problem.rank, problem.against, problem.row, problem.rows) == (2, 0, 1, 2)
    # 0.0 and -0.0 are other bits, the same NaN is not
    zero, nan = torch.zeros(1, 2), torch.full((1, 2), float("nan"))
    assert merge_rows("norm", [zero, -zero], Layout())[1][0].max_abs == 0
    assert not merge_rows("norm", [nan, nan.clone()], Layout())[1]


def test_bf16_is_compared_by_its_bits() -> None:
    rows = WHOLE.to(torch.bfloat16)
    other = rows.clone()
    other.view(torch.int16)[0, 1] += 1
    assert [p.row for p in merge_rows("norm", [rows, other], Layout())[1]] == [0]


@pytest.mark.parametrize(
    ("shards", "layout", "what"),
    [
        ([WHOLE, WHOLE[:2]], Layout(), "3, 2 rows"),
        ([WHOLE, WHOLE[:, :4]], Layout(), "which hold the same"),
        ([WHOLE, WHOLE.double()], Layout(), "float64"),
        ([WHOLE] * 3, Layout(split=True, copies=2), "3 ranks are no copies of 2"),
        ([], Layout(), "0 ranks"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(
    shards: list[torch.Tensor], layout: Layout, what: str
) -> None:
    with pytest.raises(UsageError, match=what):
        merge_rows("q", shards, layout)


def test_logits_that_one_rank_gathers_are_those_of_that_rank() -> None:
    layouts = {"q": SPLIT, "logits": Layout()}
    left, right = WHOLE.chunk(2, 1)
    merged, problems = merge_sites([{"q": left, "logits": WHOLE}, {"q": right}], layouts)
    assert list(merged) == ["q", "logits"] and not problems
    assert torch.equal(merged["logits"], WHOLE) and torch.equal(merged["q"], WHOLE)
    with pytest.raises(UsageError, match=r"q is split, and only ranks \[1\]"):
        merge_sites([{}, {"q": right}], layouts)
    sites = [{"logits": WHOLE}, {}, {"logits": nudged(WHOLE, 0, 0)}]
    _, (problem,) = merge_sites(sites, layouts)
    assert (problem.rank, problem.against) == (2, 0)


def test_the_first_site_is_that_of_the_order_in_which_one_rank_ran() -> None:
    one = {"embed": WHOLE, "layers.0.attn": WHOLE, "norm": WHOLE}
    two = {"norm": nudged(WHOLE, 0, 0), "layers.0.attn": nudged(WHOLE, 2, 1), "embed": WHOLE}
    found = part_at(one, two)
    assert (found["site"], found["position"], found["replicas"]) == ("layers.0.attn", 2, None)
    replica = {"site": "norm", "position": 4, "rank": 1, "against": 0}
    found = part_at(one, one, [replica])
    assert "site" not in found and "3 sites of one forward agreed" in found["reason"]
    assert found["replicas"] == "rank 1 has not the bits of rank 0 at norm position 4"
    assert "is [3, 8] on one rank, [3, 4]" in part_at(one, {"norm": WHOLE[:, :4]})["reason"]


def test_the_rows_of_a_prompt_that_runs_whole_are_found() -> None:
    tokens = torch.tensor([7, 5, 6, 5, 6, 9, 5, 6])
    positions = torch.tensor([3, 0, 1, 0, 1, 2, 0, 1])  # a decode, three prompts
    wanted = torch.tensor([5, 6, 9])
    assert _rows_of(wanted, tokens, positions) == slice(3, 6)
    assert _rows_of(torch.tensor([5, 6, 8]), tokens, positions) is None
    assert _rows_of(torch.tensor([7, 5]), tokens, positions) is None


def test_alternating_halves_are_read_apart_and_put_back() -> None:
    class Parent:
        size = 4
        copies = 3

    place = sharded(into("attn"), "copies").resolve("layers.0.attn", Parent())
    assert (place.split, place.copies, place.paired) == (True, 3, 0)
    value = torch.arange(2 * 2 * 6.0).reshape(2, 2, 6)
    place = output("attn", dims=2)
    place = type(place)(module="attn", dims=2, paired="size").resolve("attn", Parent())
    rows = place.rows(value)
    assert rows[0].tolist() == [0, 1, 2, 4, 3, 5, 6, 7, 8, 10, 9, 11]
    assert torch.equal(place.restored(value, rows), value)
