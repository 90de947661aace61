"""The answers of a diff, from the pairs that were read: headline, counts, meaning, verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rolltape.replay.identity import Problem
from rolltape.replay.measures import Deltas, histogram, measure, non_finite_reason, same_bits
from rolltape.replay.pair import PairResult, PairTokens
from rolltape.replay.value_floor import ColumnSeen
from rolltape.store.columns import Masked
from rolltape.store.schema import TOKEN_STATES
from rolltape.store.sequences import LOGPROBS, Sequence, Tape

#: Kinds of differences in a sentence, where that is not their name.
_WORDS = {
    "route_order": "slot orders of the same experts",
    "route_weights": "sets of combine weights",
    "used_routes": "used routes",
}
_SHOWN = 20  # places, spans and differences that a summary lists
_KINDS = (np.float64, np.bool_, np.int32, np.int32, np.int32, np.int64, np.bool_)


@dataclass(frozen=True)
class Answer:
    """What is said of one logprob column.

    Args:
        deltas: every compared token.
        plain: measures, worst token, token counts, non-finite counts, histogram.
    """

    deltas: Deltas
    plain: dict[str, Any]


def headline_column(pairs: list[PairTokens]) -> str | None:
    """The most processed column that both hold with equal semantics throughout.

    If every column that both hold clashes somewhere: the one that still reaches furthest. None if
    no column can be compared anywhere.
    """
    held = {c: sum(p.held(c) for p in pairs) for c in LOGPROBS}
    clashing = {clash.column for p in pairs for clash in p.comparison.clashes}
    candidates = [c for c in LOGPROBS if held[c]]
    clean = [c for c in candidates if c not in clashing]
    return clean[0] if clean else max(candidates, key=lambda c: held[c], default=None)


def answer_of(results: list[PairResult], column: str | None) -> Answer:
    """Measure a column over all pairs; with None the answer that nothing was compared."""
    found = _flat(results, column)
    out: dict[str, Any] = {
        "column": column,
        **measure(found.delta, found.bitwise),
        "max_at": None,
    }
    if len(found):
        worst = int(np.abs(found.delta).argmax())
        sequence = results[int(found.pair[worst])].a.id
        out["max_at"] = {"sequence": sequence, "position": int(found.position[worst])}
    out["tokens"] = _states([r.tokens for r in results if r.tokens is not None], column)
    out["non_finite"] = out["tokens"]["non_finite"]
    out["non_finite_detail"] = _non_finite(results, column)
    out["histogram"] = histogram(found.delta, found.bitwise)
    return Answer(found, out)


def seen_of(answer: Answer, unequal: int) -> ColumnSeen:
    """What is measured of noise in a column.

    Args:
        answer: of the column.
        unequal: its values with other bits, non-finite ones included.
    """
    finite = int((~answer.deltas.bitwise).sum())
    return ColumnSeen(
        max=answer.plain["max_abs"] or 0.0,
        tokens=len(answer.deltas),
        unequal=unequal,
        non_finite=unequal - finite,
    )


def _flat(results: list[PairResult], column: str | None) -> Deltas:
    parts: list[tuple[np.ndarray, ...]] = []
    for index, result in enumerate(results):
        tokens = result.tokens
        if tokens is None or column is None:
            continue
        at = np.flatnonzero(tokens.compared(column))
        x = tokens.scored_a.columns[column].values[at]
        y = tokens.scored_b.columns[column].values[at]
        parts.append(
            (
                y.astype(np.float64) - x.astype(np.float64),
                same_bits(x, y),
                np.full(len(at), index, np.int32),
                at.astype(np.int32),
                (at - tokens.a.prompt_len).astype(np.int32),
                tokens.version.values[at],
                tokens.version.valid[at],
            )
        )
    columns: list[np.ndarray] = [
        np.concatenate([p[i] for p in parts], dtype=kind) if parts else np.zeros(0, kind)
        for i, kind in enumerate(_KINDS)
    ]
    delta, bitwise, pair, position, response, version, known = columns
    return Deltas(delta, bitwise, pair, position, response, Masked(version, known))


def _states(pairs: list[PairTokens], column: str | None) -> dict[str, int]:
    total = np.zeros(len(TOKEN_STATES), np.int64)
    for pair in pairs:
        total += np.bincount(pair.states(column), minlength=len(TOKEN_STATES))
    return dict(zip(TOKEN_STATES, total.tolist(), strict=True))


def _non_finite(results: list[PairResult], column: str | None) -> dict[str, Any]:
    names = ("NaN", "Infinity", "-Infinity")
    counts = {side: dict.fromkeys(names, 0) for side in ("a", "b")}
    where: list[dict[str, Any]] = []
    for result in results:
        tokens = result.tokens
        if tokens is None or column is None:
            continue
        for at in np.flatnonzero(tokens.non_finite(column)):
            place: dict[str, Any] = {"sequence": result.a.id, "position": int(at)}
            for side, scored in (("a", tokens.scored_a), ("b", tokens.scored_b)):
                place[side] = scored.columns[column].values[at]
                reason = non_finite_reason(float(place[side]))
                if reason is not None:
                    counts[side][reason] += 1
            if len(where) < _SHOWN:
                where.append(place)
    return {**counts, "where": where}


def column_problems(pairs: list[PairTokens], column: str | None) -> list[Problem]:
    """Logprobs that one side lacks, and sides that have no column in common."""
    states = _states(pairs, column)
    found = []
    missing = {side: states[f"missing_{side}"] for side in ("a", "b")}
    if any(missing.values()):
        text = " and ".join(f"{side} lacks {n:,}" for side, n in missing.items() if n)
        what = f"{column} logprobs" if column else "logprobs"
        fields = {"column": column, **missing}
        found.append(Problem("missing", f"{text} {what} that the other has", fields=fields))
    held = _held_by_side(pairs)
    if column is None and all(held) and not set(held[0]) & set(held[1]):
        found.append(Problem("semantics", why_no_column(pairs), fields={"values": held}))
    return found


def _held_by_side(pairs: list[PairTokens]) -> list[list[str]]:
    return [
        [c for c in LOGPROBS if any((s.columns[c].valid & p.counted).any() for p, s in side)]
        for side in ([(p, p.scored_a) for p in pairs], [(p, p.scored_b) for p in pairs])
    ]


def kept_sets(pairs: list[PairTokens]) -> dict[str, Any]:
    """How many kept sets were compared, and how many are equal."""
    equal = differ = 0
    first: dict[str, Any] | None = None
    for pair in pairs:
        if pair.kept is None:
            continue
        wrong = pair.kept.valid & ~pair.kept.values
        equal += int((pair.kept.valid & pair.kept.values).sum())
        differ += int(wrong.sum())
        if first is None and wrong.any():
            first = {"sequence": pair.a.id, "position": int(wrong.argmax())}
    return {"compared": equal + differ, "equal": equal, "differ": differ, "first_differing": first}


def judge(
    compared: dict[str, int],
    differences: dict[str, int],
    *,
    blocking: int,
    layers_missing: bool,
    above: list[str] | None = None,
    columns: Mapping[str, int] | None = None,
) -> tuple[str, str]:
    """The verdict and why.

    Args:
        compared: values compared, by kind.
        differences: values that are not bitwise equal, by kind.
        blocking: identity problems.
        layers_missing: activations were asked for and there was nothing to compare.
        above: what is more than the measured noise; None if none was measured.
        columns: logprobs that are not bitwise equal, by column.
    """
    words = {**_WORDS, "logprobs": _logprobs(columns or {})}
    seen = ", ".join(f"{n:,} {words.get(what, what)}" for what, n in differences.items() if n)
    if seen and above is None:
        return "divergent", f"different bits in {seen}"
    if seen and above:
        return "divergent", f"different bits in {seen}; above the noise floor: {'; '.join(above)}"
    if not sum(n for what, n in compared.items() if what != "sequences"):
        return "not-run", "nothing could be compared"
    if blocking:
        text = "an identity problem remains" if blocking == 1 else f"{blocking} identity problems"
        what = "within the noise" if seen else "equal"
        return "inconclusive", f"all that was compared is {what}, but: {text}"
    if layers_missing:
        return "inconclusive", "layers were asked for and could not be compared"
    if seen:
        return "within-noise", f"different bits in {seen}, none above the noise floor"
    return "identical", "every value compared is bitwise equal"


def _logprobs(columns: Mapping[str, int]) -> str:
    """Which columns differ: `processed logprobs`, or with their counts where those are unlike."""
    counts = {name: n for name, n in columns.items() if n}
    if len(set(counts.values())) > 1:
        return f"logprobs ({', '.join(f'{n:,} {name}' for name, n in counts.items())})"
    return f"{' and '.join(counts)} logprobs".lstrip()


def meanings(pairs: list[PairTokens], column: str | None) -> dict[str, Any]:
    """What the headline's numbers mean on each side, and what differs without forbidding it."""
    spans: Counter[tuple[str, str]] = Counter()
    differences: Counter[tuple[str, str, str]] = Counter()
    plain: dict[tuple[str, str], tuple[Any, Any]] = {}
    for pair in pairs:
        differences.update(pair.comparison.differences)
        if column is None:
            continue
        where = pair.compared(column) | pair.non_finite(column)
        codes = np.stack([pair.scored_a.code, pair.scored_b.code], axis=1)[where]
        for (x, y), tokens in zip(*np.unique(codes, axis=0, return_counts=True), strict=True):
            of_a, of_b = pair.scored_a.meaning(int(x)), pair.scored_b.meaning(int(y))
            key = (repr(sorted(of_a.items())), repr(sorted(of_b.items())))
            plain[key] = dict(of_a), dict(of_b)
            spans[key] += int(tokens)
    return {
        "column": column,
        "spans": [
            {"a": plain[key][0], "b": plain[key][1], "tokens": tokens}
            for key, tokens in spans.most_common(_SHOWN)
        ],
        "differences": [
            {"field": name, "a": x, "b": y, "tokens": tokens}
            for (name, x, y), tokens in differences.most_common(_SHOWN)
        ],
    }


def sequence_row(
    result: PairResult, measures: dict[str, Any], column: str | None
) -> dict[str, Any]:
    """The entry of one pair under `by_sequence`."""
    row: dict[str, Any] = {
        "a": result.a.id,
        "b": result.b.id,
        "group": group_of(result.a, result.b),
        "prompt_len": result.a.prompt_len,
        "length": max(result.a.length, result.b.length),
        "finish": result.a.finish,
        "paired_by": result.pair.by,
        "ambiguous": result.pair.ambiguous,
        **measures,
        "tokens": None,
        "routing": None,
    }
    if result.tokens is not None:
        row["tokens"] = _states([result.tokens], column)
    if result.routing is not None:
        names = ("decisions", "disagree", "tokens", "tokens_any")
        row["routing"] = {name: getattr(result.routing, name) for name in names}
    return row


def group_of(a: Sequence, b: Sequence) -> str | None:
    """Prompt group of a pair."""
    group = a.info["group"] if a.info["group"] is not None else b.info["group"]
    return None if group is None else str(group)


def why_no_column(pairs: list[PairTokens]) -> str:
    """Why no logprob column could be compared."""
    held = _held_by_side(pairs)
    lacking = [side for side, columns in zip("ab", held, strict=True) if not columns]
    if lacking:
        return f"{' and '.join(lacking)} recorded none"
    if set(held[0]) & set(held[1]):
        return "the columns that both hold do not mean the same, or not at the same positions"
    return f"no column in both: a has {', '.join(held[0])}, b has {', '.join(held[1])}"


def why_no_routes(a: Tape, b: Tape) -> str:
    """Why no routes could be compared: dense, or not recorded."""
    reasons = []
    for side_name, tape in (("a", a), ("b", b)):
        if len(tape.table("routes")):
            continue
        layers = [row["moe_layers"] for row in tape.engines.values()]
        dense = bool(layers) and all(found == [] for found in layers)
        reasons.append(f"{side_name}: {'the model is dense' if dense else 'not recorded'}")
    return "; ".join(reasons) or "no position and layer with a route on both sides"


def describe_side(tape: Tape) -> dict[str, Any]:
    """Which tape it was."""
    names = ("engine", "adapter", "model", "model_type", "dtype", "device")
    return {
        "path": str(tape.place),
        "uuid": tape.uuid,
        "role": tape.role,
        "parent": tape.parent,
        "sequences": len(tape),
        "sealed": tape.seal is not None,
        "engines": [{name: row[name] for name in names} for row in tape.engines.values()],
    }
