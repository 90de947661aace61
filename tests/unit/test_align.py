"""Which sequence is which: carried keys first, then tokens, and nothing silently left out."""

from __future__ import annotations

import copy
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltape import store
from rolltape.replay import diff_tapes
from rolltape.replay.align import Alignment, Entry, align, alignment_problems, entries, select
from rolltape.store import UsageError
from rolltape.store.keys import Key
from tests.builders import ENGINE_A, Sample, random_samples, write_tape

TRAINER = "e5" * 16


def _side(engine: str) -> st.SearchStrategy[list[Entry]]:
    """Sequences of one engine; few distinct names, so that they collide often."""
    one = st.tuples(
        st.integers(0, 2),  # pass
        st.sampled_from(["x", "y", "z", None]),  # carried by the other side too, or its own key
        st.sampled_from(["d1", "d2", "d3", None]),
        st.integers(0, 3),  # rank; ties are broken by the key
    )

    def build(rows: list[tuple[int, str | None, str | None, int]]) -> list[Entry]:
        return [
            Entry(key, carried or key.text, digest, rank)
            for i, (scoring, carried, digest, rank) in enumerate(rows)
            for key in [Key(engine, f"r{i}", 0, scoring)]
        ]

    return st.lists(one, max_size=7).map(build)


SIDES = st.tuples(_side("a" * 32), _side("b" * 32))


def _as_sets(found: Alignment) -> tuple[set, set, set]:
    return set(found.pairs), set(found.unmatched_a), set(found.unmatched_b)


@given(SIDES)
def test_every_sequence_is_paired_or_unmatched_exactly_once(sides):
    a, b = sides
    found = align(a, b)
    keys_a = [p.a for p in found.pairs] + [u.key for u in found.unmatched_a]
    keys_b = [p.b for p in found.pairs] + [u.key for u in found.unmatched_b]
    assert sorted(keys_a) == sorted(e.key for e in a)
    assert sorted(keys_b) == sorted(e.key for e in b)


@given(SIDES, st.randoms(use_true_random=False))
def test_the_order_in_which_sequences_are_given_changes_nothing(sides, random):
    a, b = sides
    before = align(a, b)
    random.shuffle(a)
    random.shuffle(b)
    assert align(a, b) == before


@given(SIDES)
def test_exchanging_the_sides_exchanges_the_answer(sides):
    a, b = sides
    pairs, only_a, only_b = _as_sets(align(a, b))
    mirrored, only_b_too, only_a_too = _as_sets(align(b, a))
    assert {p._replace(a=p.b, b=p.a) for p in mirrored} == pairs
    assert (only_a_too, only_b_too) == (only_a, only_b)


@given(SIDES)
def test_pairs_share_the_name_that_joined_them_and_only_shared_names_are_ambiguous(sides):
    a, b = sides
    by_key = {e.key: e for e in [*a, *b]}
    for pair in align(a, b).pairs:
        x, y = by_key[pair.a], by_key[pair.b]
        field = "carried" if pair.by == "key" else "digest"
        name = getattr(x, field)
        assert name is not None
        assert name == getattr(y, field)
        counts = [sum(getattr(e, field) == name for e in side) for side in (a, b)]
        if pair.by == "key":
            assert pair.ambiguous == (max(counts) > 1)
        elif pair.ambiguous:
            assert max(counts) > 1


@given(_side("a" * 32))
def test_a_side_aligned_with_itself_pairs_everything_with_itself(side):
    own = [Entry(e.key, e.key.text, e.digest, e.opened) for e in side]
    found = align(own, own)
    assert all(p.a == p.b and not p.ambiguous for p in found.pairs)
    assert len(found.pairs) == len(side)


def test_a_replay_is_joined_by_the_key_it_carries_even_if_its_order_is_another(tmp_path):
    samples = random_samples(4)
    a = write_tape(tmp_path / "a", samples)
    b = write_tape(tmp_path / "b", samples[::-1], replays=a)
    found = select(a, b)
    assert [p.by for p in found.pairs] == ["key"] * 4
    assert all((p.a.request, p.a.sample) == (p.b.request, p.b.sample) for p in found.pairs)


def test_two_replays_of_one_tape_are_joined_by_their_common_origin(tmp_path):
    samples = random_samples(2)
    a = write_tape(tmp_path / "a", samples)
    b = write_tape(tmp_path / "b", samples, replays=a)
    c = write_tape(tmp_path / "c", samples, replays=a, engine="c3" * 16)
    assert [p.by for p in select(b, c).pairs] == ["key", "key"]


def test_an_origin_counts_only_if_it_points_into_the_other_tape(tmp_path):
    samples = random_samples(2)
    a = write_tape(tmp_path / "a", samples)
    other = write_tape(tmp_path / "other", random_samples(2, seed=5), engine="d4" * 16)
    b = write_tape(tmp_path / "b", samples, replays=a)
    # b's origins name sequences of a, not of `other`, whose tokens are different ones
    assert select(other, b).pairs == ()


def test_unrelated_recordings_are_joined_by_their_tokens(tmp_path):
    samples = random_samples(3)
    a = write_tape(tmp_path / "a", samples)
    b = write_tape(tmp_path / "b", samples, engine="e5" * 16)
    assert [p.by for p in select(a, b).pairs] == ["digest"] * 3


def test_equal_tokens_several_times_are_paired_in_order_and_counted(tmp_path):
    one = random_samples(1)[0]
    twins = [one, copy.deepcopy(one), copy.deepcopy(one)]
    for number, sample in enumerate(twins):
        sample.sample = number
    a = write_tape(tmp_path / "a", twins)
    b = write_tape(tmp_path / "b", twins[:2], engine="e5" * 16)
    found = select(a, b)
    assert [(p.a.sample, p.b.sample, p.ambiguous) for p in found.pairs] == [
        (0, 0, True),
        (1, 1, True),
    ]
    assert [(u.key.sample, u.repeat) for u in found.unmatched_a] == [(2, True)]
    kinds = {p.kind: p for p in alignment_problems(a, b, found)}
    assert kinds["ambiguous"].fields["count"] == 2
    assert not kinds["ambiguous"].blocks
    assert kinds["repeat"].blocks


def test_later_passes_of_a_trainer_are_repeats_unless_they_are_asked_for(tmp_path):
    samples = random_samples(1)
    a = write_tape(tmp_path / "a", samples)
    first, second = copy.deepcopy(samples[0]), copy.deepcopy(samples[0])
    second.scoring = 1
    b = write_tape(tmp_path / "b", [first, second], replays=a)
    found = select(a, b)
    assert [p.b.scoring for p in found.pairs] == [0]
    assert [(u.key.scoring, u.repeat) for u in found.unmatched_b] == [(1, True)]
    chosen = select(a, b, ["0-0.0.p1"])
    assert [p.b.scoring for p in chosen.pairs] == [1]
    assert chosen.unmatched_b == ()


def trained(samples: list[Sample], purpose: str = "old", scoring: int = 0) -> list[Sample]:
    """Passes of a trainer over the samples."""
    mine = copy.deepcopy(samples)
    for sample in mine:
        sample.scored_for, sample.scoring = purpose, scoring
    return mine


def test_a_trainer_is_joined_by_the_keys_it_carries_though_it_is_no_replay(tmp_path):
    samples = random_samples(2)
    samples[1].ids = samples[0].ids.copy()  # the same tokens: only the key can tell them apart
    samples[1].prompt_len = samples[0].prompt_len
    a = write_tape(tmp_path / "a", samples)
    keys = [key.text for key in sorted(a.keys())]
    passes = trained(samples)
    for sample, key in zip(passes, keys[::-1], strict=True):
        sample.origin = key
    b = write_tape(tmp_path / "b", passes, engine=TRAINER, role="trainer")  # no replay of a
    found = select(a, b)
    assert [(p.by, p.ambiguous) for p in found.pairs] == [("key", False)] * 2
    assert {p.a.text: b.sequence(p.b).origin.text for p in found.pairs} == {k: k for k in keys}


def test_of_a_trainer_the_scorings_for_one_purpose_are_chosen(tmp_path):
    samples = random_samples(2)
    a = write_tape(tmp_path / "a", samples)
    passes = [*trained(samples), *trained(samples, "current", 1)]
    b = write_tape(tmp_path / "b", passes, engine=TRAINER, role="trainer")
    for purpose, number in (("old", 0), ("current", 1)):
        found = select(a, b, scoring=purpose)
        assert [p.b.scoring for p in found.pairs] == [number] * 2
        assert not found.unmatched_a and not found.unmatched_b
    with pytest.raises(UsageError, match="nothing was scored as 'reference'") as error:
        select(a, b, scoring="reference")
    assert "current, old" in str(error.value.hint)
    with pytest.raises(UsageError):
        select(b, a, scoring="old")


def with_trainer(folder, samples):
    """A tape of the samples and of a trainer's passes over them."""
    write_tape(folder / "a", samples, sealed=False)
    write_tape(folder / "b", trained(samples), engine=TRAINER, role="trainer", sealed=False)
    ours = shutil.ignore_patterns("*.json")
    shutil.copytree(folder / "b", folder / "a", dirs_exist_ok=True, ignore=ours)
    return store.open(folder / "a")


def test_passes_of_a_trainer_in_a_are_no_partners_of_another_ones(tmp_path):
    samples = random_samples(2)
    a = with_trainer(tmp_path, samples)
    other = trained(samples)
    for sample in other:  # its keys say nothing: they are joined by their tokens
        sample.request = f"again-{sample.request}"
    b = write_tape(tmp_path / "other", other, engine="c" * 32, role="trainer")
    found = select(a, b, scoring="old")
    assert [p.a.engine for p in found.pairs] == [ENGINE_A] * 2
    assert not any(p.ambiguous for p in found.pairs)
    assert not found.unmatched_a and not found.unmatched_b
    # two trainers may be compared as well, but no trainer with itself
    only = store.open(tmp_path / "b")
    assert {p.a.engine for p in select(only, b, scoring="old").pairs} == {TRAINER}
    assert not select(only, only, scoring="old").pairs


def test_a_tape_of_rollouts_and_trainer_is_compared_within(tmp_path):
    tape = with_trainer(tmp_path, random_samples(2))
    pairs = select(tape, tape, scoring="old").pairs
    assert {(p.a.engine, p.b.engine) for p in pairs} == {(ENGINE_A, TRAINER)}
    assert len(pairs) == 2 and not any(p.ambiguous for p in pairs)
    report = diff_tapes(tape, tape, scoring="old")
    assert report["verdict"] == "identical" and report["compared"]["sequences"] == 2
    assert report["settings"] == {"role": ["rollout", "trainer"]}


def test_open_and_empty_sequences_without_a_partner_are_named_but_are_no_fault(tmp_path):
    samples = random_samples(3, response=[24, 0, 24])
    samples[1].finish = "abort"
    samples[2].finish = "open"
    a = write_tape(tmp_path / "a", samples)
    b = write_tape(tmp_path / "b", samples[:1], replays=a)
    found = {p.kind: p for p in alignment_problems(a, b, select(a, b))}
    assert found.keys() == {"open", "empty"}
    assert not any(p.blocks for p in found.values())


def test_an_open_sequence_is_paired_by_key_but_never_by_its_unfinished_tokens(tmp_path):
    samples = random_samples(1)
    samples[0].finish = "open"
    a = write_tape(tmp_path / "a", samples)
    samples[0].finish = "stop"
    replay = write_tape(tmp_path / "b", samples, replays=a)
    stranger = write_tape(tmp_path / "c", samples, engine="e5" * 16)
    assert len(select(a, replay).pairs) == 1
    assert select(a, stranger).pairs == ()


def test_a_digest_that_was_not_written_is_computed_from_the_tokens(tmp_path):
    samples = random_samples(2)
    a = write_tape(tmp_path / "a", samples)
    written = {e.key: e.digest for e in entries(a, a)}
    for sequence in a:
        sequence.info["digest"] = None
    assert {e.key: e.digest for e in entries(a, a)} == written


def test_asking_for_a_sequence_that_neither_tape_has_is_an_error(tmp_path):
    a = write_tape(tmp_path / "a", random_samples(1))
    with pytest.raises(UsageError, match=r"no sequence 'nobody'"):
        select(a, a, ["nobody"])
