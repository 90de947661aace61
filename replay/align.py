"""Which sequence of one tape is which of the other: by carried key, else by their tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rolltape.replay.identity import Problem
from rolltape.store.errors import UsageError
from rolltape.store.keys import Key, token_digest
from rolltape.store.sequences import Sequence, Tape

_UNKNOWN_TIME = (1 << 63) - 1

By = Literal["key", "digest"]


@dataclass(frozen=True)
class Entry:
    """What alignment needs to know of one sequence.

    Args:
        key: its key in its own tape.
        carried: key text that its partner has as well, if the partner is known by key.
        digest: of (prompt length, token ids); None while the sequence is open or has gaps.
        opened: rank in the order of occurrence; among equals it decides who is whose.
    """

    key: Key
    carried: str
    digest: str | None
    opened: int = 0


class Pair(NamedTuple):
    """Two scorings of the same tokens.

    Args:
        a: key in tape A.
        b: key in tape B.
        by: what joined them.
        ambiguous: there were several candidates; they were paired in order of occurrence.
    """

    a: Key
    b: Key
    by: By
    ambiguous: bool


class Unmatched(NamedTuple):
    """A sequence without a partner.

    Args:
        key: in its own tape.
        repeat: true if it is a further scoring of a sequence whose partner another one has.
    """

    key: Key
    repeat: bool


@dataclass(frozen=True)
class Alignment:
    """Every sequence of both sides once: in `pairs`, or unmatched on its side."""

    pairs: tuple[Pair, ...]
    unmatched_a: tuple[Unmatched, ...]
    unmatched_b: tuple[Unmatched, ...]


def align(a: Iterable[Entry], b: Iterable[Entry]) -> Alignment:
    """Pair the entries of two tapes; the order in which they are given does not matter."""
    left, right = sorted(a, key=_order), sorted(b, key=_order)
    pairs: list[Pair] = []
    repeats_a: list[Entry] = []
    repeats_b: list[Entry] = []
    left, right = _join(left, right, "key", pairs, repeats_a, repeats_b)
    left, right = _join(left, right, "digest", pairs, repeats_a, repeats_b)
    return Alignment(tuple(pairs), _unmatched(left, repeats_a), _unmatched(right, repeats_b))


def entries(tape: Tape, other: Tape) -> list[Entry]:
    """The sequences of `tape` as seen for an alignment with `other`.

    The carried key is the sequence's own key; it is its origin if that is a sequence of an engine
    of `other`, if `tape` replays `other`, or if both replay the same tape.
    """
    siblings = tape.parent is not None and tape.parent == other.parent
    replays = tape.uuid != other.uuid and (tape.parent == other.uuid or siblings)
    theirs = set(other.engines) if tape.uuid != other.uuid else set()

    def carried(sequence: Sequence) -> Key:
        origin = sequence.origin
        if origin is not None and (replays or origin.engine in theirs):
            return origin
        return sequence.key

    return [
        Entry(
            key=sequence.key,
            carried=carried(sequence).text,
            digest=_digest(sequence),
            opened=rank,
        )
        for rank, sequence in enumerate(sorted(tape, key=_opened))
    ]


def select(
    a: Tape, b: Tape, wanted: Iterable[str] | None = None, scoring: str | None = None
) -> Alignment:
    """Pair the sequences of two tapes, all or those that are wanted.

    Args:
        a: one tape.
        b: the other.
        wanted: sequence ids of either tape.
        scoring: of `b` only what a trainer scored for this purpose. `a` may hold a trainer too, or
            be the same tape: it is then the rollouts in it.

    Raises:
        UsageError: neither tape has such a sequence, or nothing was scored for that.
    """
    if scoring is not None:
        return align(*_scored(a, b, scoring))
    if wanted is None:
        return align(entries(a, b), entries(b, a))
    of_a: set[Key] = set()
    of_b: set[Key] = set()
    for name in wanted:
        try:
            of_a.add(a.sequence(name).key)
        except UsageError as error:
            try:
                of_b.add(b.sequence(name).key)
            except UsageError:
                raise error from None
    right = entries(b, a)
    # a scoring that is named goes before other scorings of the same sequence
    named = {e.carried for e in right if e.key in of_b}
    right = [e for e in right if e.key in of_b or e.carried not in named]
    found = align(entries(a, b), right)
    chosen = [p for p in found.pairs if p.a in of_a or p.b in of_b]
    return Alignment(
        tuple(chosen),
        tuple(u for u in found.unmatched_a if u.key in of_a),
        tuple(u for u in found.unmatched_b if u.key in of_b),
    )


def _scored(a: Tape, b: Tape, scoring: str) -> tuple[list[Entry], list[Entry]]:
    purposes = {s.key: s.annotations.get("scoring") for s in b}
    right = [e for e in entries(b, a) if purposes[e.key] == scoring]
    if not right:
        known = sorted({str(p) for p in purposes.values() if p is not None})
        hint = f"it has {', '.join(known)}" if known else "it is no recording of a trainer"
        raise UsageError(f"{b.place}: nothing was scored as {scoring!r}", hint=hint)
    scored = {s.key for s in a if s.annotations.get("scoring") is not None}
    left = entries(a, b)
    # what a trainer scored has the tokens of a rollout, and would take its partner
    rollouts = [e for e in left if e.key not in scored]
    alone = not rollouts and a.uuid != b.uuid  # of two trainers each is a side
    return (left if alone else rollouts), right


def alignment_problems(a: Tape, b: Tape, alignment: Alignment) -> list[Problem]:
    """Which sequences have no partner, and which pairs could be other pairs."""
    found = _unmatched_problems("a", a, alignment.unmatched_a)
    found += _unmatched_problems("b", b, alignment.unmatched_b)
    ambiguous = [p.a.id for p in alignment.pairs if p.ambiguous]
    if ambiguous:
        message = (
            f"{len(ambiguous)} pairs have several candidates with the same tokens or key; "
            "they are paired in order of occurrence"
        )
        fields = {"count": len(ambiguous), "sequences": ambiguous[:20]}
        found.append(Problem("ambiguous", message, False, fields))
    return found


def _unmatched_problems(side: str, tape: Tape, unmatched: Iterable[Unmatched]) -> list[Problem]:
    kinds: dict[str, list[str]] = {"unmatched": [], "repeat": [], "open": [], "empty": []}
    for item in unmatched:
        sequence = tape.sequence(item.key)
        if sequence.finish == "open":
            kinds["open"].append(sequence.id)
        elif sequence.length <= sequence.prompt_len:
            kinds["empty"].append(sequence.id)
        else:
            kinds["repeat" if item.repeat else "unmatched"].append(sequence.id)
    texts = {
        "unmatched": "have no partner with the same tokens",
        "repeat": "score a sequence again whose partner is taken; see --scoring and --sequences",
        "open": "are open and have no partner",
        "empty": "have no response and no partner",
    }
    return [
        Problem(
            kind,
            f"{len(ids)} sequences of {side} {texts[kind]}: {_few(ids)}",
            blocks=kind in ("unmatched", "repeat"),
            fields={"side": side, "count": len(ids), "sequences": ids[:20]},
        )
        for kind, ids in kinds.items()
        if ids
    ]


def _few(ids: list[str]) -> str:
    return ", ".join(ids[:3]) + (", ..." if len(ids) > 3 else "")


def _unmatched(alone: list[Entry], repeats: list[Entry]) -> tuple[Unmatched, ...]:
    marked = [(entry, False) for entry in alone] + [(entry, True) for entry in repeats]
    return tuple(Unmatched(entry.key, repeat) for entry, repeat in marked)


def _order(entry: Entry) -> tuple[int, int, Key]:
    return entry.key.scoring, entry.opened, entry.key


def _join(
    left: list[Entry],
    right: list[Entry],
    by: By,
    pairs: list[Pair],
    repeats_a: list[Entry],
    repeats_b: list[Entry],
) -> tuple[list[Entry], list[Entry]]:
    """Pair what shares a name; returns what shares none. Surplus of a shared name is a repeat."""
    name: Callable[[Entry], str | None] = (
        (lambda entry: entry.carried) if by == "key" else (lambda entry: entry.digest)
    )
    groups_a, groups_b = _grouped(left, name), _grouped(right, name)
    shared = groups_a.keys() & groups_b.keys()
    for text in sorted(shared, key=lambda t: _order(groups_a[t][0])):
        found_a, found_b = groups_a[text], groups_b[text]
        several = len(found_a) > 1 or len(found_b) > 1
        n = min(len(found_a), len(found_b))
        pairs += [
            Pair(x.key, y.key, by, several) for x, y in zip(found_a[:n], found_b[:n], strict=True)
        ]
        repeats_a += found_a[n:]
        repeats_b += found_b[n:]
    return (
        [e for e in left if name(e) not in shared],
        [e for e in right if name(e) not in shared],
    )


def _grouped(items: list[Entry], name: Callable[[Entry], str | None]) -> dict[str, list[Entry]]:
    groups: dict[str, list[Entry]] = defaultdict(list)
    for item in items:
        text = name(item)
        if text is not None:
            groups[text].append(item)
    return groups


def _opened(sequence: Sequence) -> int:
    opened = sequence.info["opened_ns"]
    return _UNKNOWN_TIME if opened is None else int(opened)


def _digest(sequence: Sequence) -> str | None:
    if sequence.finish == "open":
        return None
    if sequence.info["digest"]:
        return str(sequence.info["digest"])
    tokens = sequence.tokens
    return token_digest(sequence.prompt_len, tokens.values) if tokens.valid.all() else None
