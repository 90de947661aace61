"""Identity before arithmetic: tokens, weights and model must be the same, or the diff says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rolltape.store.sequences import Sequence, Tape

#: Problems of one kind that a report names one by one; the rest are counted.
NAMED = 20


@dataclass(frozen=True)
class Problem:
    """Something that keeps two tapes from being the same thing measured twice.

    Args:
        kind: one word for programs: `tokens`, `semantics`, `unmatched`, ...
        message: one line for people.
        blocks: whether the verdict `identical` is impossible because of it.
        fields: the same facts for programs; `side` and `sequence` where they apply.
    """

    kind: str
    message: str
    blocks: bool = True
    fields: Mapping[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """As a report writes it."""
        return {"kind": self.kind, "message": self.message, "blocks": self.blocks, **self.fields}


def fold(problems: Iterable[Problem]) -> list[dict[str, Any]]:
    """Problems as a report lists them: at most `NAMED` of a kind, then how many more."""
    kept: list[dict[str, Any]] = []
    seen: Counter[tuple[str, bool]] = Counter()
    for problem in problems:
        seen[problem.kind, problem.blocks] += 1
        if seen[problem.kind, problem.blocks] <= NAMED:
            kept.append(problem.plain())
    for (kind, blocks), count in seen.items():
        if count > NAMED:
            more = count - NAMED
            message = f"{kind}: {more} more"
            kept.append({"kind": kind, "message": message, "blocks": blocks, "more": more})
    return kept


def token_problem(a: Sequence, b: Sequence) -> Problem | None:
    """Why the two are not the same tokens; None if they are, over the common range."""
    where = f"{a.id} against {b.id}"
    if a.prompt_len != b.prompt_len:
        return Problem(
            "prompt_len",
            f"{where}: a prompt of {a.prompt_len} tokens against {b.prompt_len}; not compared",
            fields={"sequence": a.id, "b": b.id, "values": [a.prompt_len, b.prompt_len]},
        )
    n = min(a.length, b.length)
    both = a.tokens.valid[:n] & b.tokens.valid[:n]
    differs = np.flatnonzero(both & (a.tokens.values[:n] != b.tokens.values[:n]))
    if not differs.size:
        return None
    at = int(differs[0])
    values = [int(a.tokens.values[at]), int(b.tokens.values[at])]
    return Problem(
        "tokens",
        f"{where}: token {values[0]} against {values[1]} at position {at}, "
        f"{differs.size} of {n} differ; not compared",
        fields={
            "sequence": a.id,
            "b": b.id,
            "position": at,
            "values": values,
            "differ": int(differs.size),
        },
    )


def range_problem(a: Sequence, b: Sequence) -> Problem | None:
    """What to say when the two are not equally long."""
    if a.length == b.length:
        return None
    n = min(a.length, b.length)
    is_open = [side for side, s in (("a", a), ("b", b)) if s.finish == "open"]
    why = f"; {' and '.join(is_open)} is open" if is_open else ""
    return Problem(
        "length",
        f"{a.id}: {a.length} tokens in a, {b.length} in b; the first {n} are compared{why}",
        blocks=not is_open,
        fields={"sequence": a.id, "b": b.id, "values": [a.length, b.length]},
    )


def gap_problem(a: Sequence, b: Sequence) -> Problem | None:
    """Token ids that a side does not know, in the common range."""
    n = min(a.length, b.length)
    unknown = [int((~s.tokens.valid[:n]).sum()) for s in (a, b)]
    if not any(unknown):
        return None
    message = f"{a.id}: token ids are missing for {unknown[0]} positions in a, {unknown[1]} in b"
    return Problem("token_gap", message, fields={"sequence": a.id, "values": unknown})


class WeightUse:
    """Counts the tokens that each pair of weight versions made, then judges the versions.

    Versions are counters of each tape, so they are compared by the digest of what they name.
    """

    def __init__(self, a: Tape, b: Tape) -> None:
        self._a, self._b = a, b
        self._tokens: Counter[tuple[str, int | None, str, int | None]] = Counter()

    def add(self, a: Sequence, b: Sequence, where: np.ndarray) -> None:
        """Count the tokens of a pair where `where` (bool [n]) is set."""
        n = len(where)
        va, vb = a.weight_version.resized(n), b.weight_version.resized(n)
        versions = np.stack([va.fill(-1)[where], vb.fill(-1)[where]], axis=1)
        for (x, y), tokens in zip(*np.unique(versions, axis=0, return_counts=True), strict=True):
            key = a.key.engine, _version(x), b.key.engine, _version(y)
            self._tokens[key] += int(tokens)

    def problems(self) -> list[Problem]:
        """Weights or models that differ, and what could not be checked."""
        found = _model_problems(self._a, self._b, self._tokens)
        digests_a, digests_b = _digests(self._a), _digests(self._b)
        unknown = 0
        for (ea, va, eb, vb), tokens in sorted(self._tokens.items(), key=str):
            if self._a.uuid == self._b.uuid and (ea, va) == (eb, vb):
                continue
            da, db = digests_a.get((ea, va)), digests_b.get((eb, vb))
            if da is None or db is None:
                unknown += tokens
            elif da["digest"] == db["digest"] and da["adapter"] == db["adapter"]:
                continue
            elif not _same_kind(self._a, ea, da, self._b, eb, db):
                unknown += tokens
            else:
                found.append(
                    Problem(
                        "weights",
                        f"other weights: a version {va} {_hex(da)}, b version {vb} {_hex(db)} "
                        f"({tokens:,} tokens)",
                        fields={
                            "values": [_hex(da), _hex(db)],
                            "versions": [va, vb],
                            "tokens": tokens,
                        },
                    )
                )
        if unknown:
            message = (
                f"weights not checked for {unknown:,} tokens: no comparable digest on both sides"
            )
            found.append(Problem("weights_unchecked", message, False, {"tokens": unknown}))
        return found


def _version(value: Any) -> int | None:
    return None if value < 0 else int(value)


def _digests(tape: Tape) -> dict[tuple[str, int | None], dict[str, Any]]:
    rows = [row for row in tape.rows("weights") if row["state"] == "complete"]
    grouped = {(row["engine"], row["version"]) for row in rows if row["group"]}
    # no part of the whole model's digest
    adapters = {(row["engine"], row["version"]): row for row in rows if row["group"] == "lora"}
    found = {}
    for row in rows:
        key = row["engine"], row["version"]
        adapter = adapters.get(key, {"digest": 0, "elements": 0, "reason": None})
        if row["group"] in ("", None) and None not in (row["digest"], adapter["digest"]):
            found[key] = {
                **row,
                "grouped": key in grouped,
                "adapter": adapter["digest"],
                "adapter_elements": adapter["elements"],
                "reason": row["reason"] or adapter["reason"],
            }
    return found


def _same_kind(
    a: Tape, engine_a: str, da: dict[str, Any], b: Tape, engine_b: str, db: dict[str, Any]
) -> bool:
    """Whether equal weights had equal digests: same tensors, elements, dtype, names."""
    dtypes = a.engine(engine_a).get("dtype"), b.engine(engine_b).get("dtype")
    return (
        da["tensors"] == db["tensors"]
        and da["elements"] == db["elements"]
        and da["adapter_elements"] == db["adapter_elements"]
        and da["grouped"] == db["grouped"]  # tapes before 1.2 name the tensors in another way
        and not (da["reason"] or db["reason"])  # repacked: nobody else has this digest
        and dtypes[0] == dtypes[1]
    )


def _hex(row: dict[str, Any]) -> str:
    adapter = f" with adapter {row['adapter']:016x}" if row["adapter_elements"] else ""
    return f"{row['digest']:016x}{adapter}"


def _model_problems(
    a: Tape, b: Tape, used: Mapping[tuple[str, int | None, str, int | None], int]
) -> list[Problem]:
    prints: Counter[tuple[str, str]] = Counter()
    for (engine_a, _, engine_b, _), tokens in used.items():
        fa = a.engine(engine_a).get("model_fingerprint")
        fb = b.engine(engine_b).get("model_fingerprint")
        if fa and fb and fa != fb:
            prints[fa, fb] += tokens
    return [
        Problem(
            "model",
            f"another architecture: a {fa[:12]}, b {fb[:12]} ({tokens:,} tokens)",
            fields={"values": [fa, fb], "tokens": tokens},
        )
        for (fa, fb), tokens in sorted(prints.items())
    ]


def settings_that_differ(
    a: Tape, b: Tape, of_a: Collection[str], of_b: Collection[str]
) -> dict[str, list[Any]]:
    """Effective settings and engine facts that are not the same: name -> [of a, of b].

    Args:
        a: one tape.
        b: the other.
        of_a: its engines that count; none for all. Where there are several, a setting is listed
            as it is in each.
        of_b: likewise.
    """
    sides = [_settings(a, of_a), _settings(b, of_b)]
    names = sorted(sides[0].keys() | sides[1].keys())
    return {
        name: [sides[0].get(name), sides[1].get(name)]
        for name in names
        if sides[0].get(name) != sides[1].get(name)
    }


def _settings(tape: Tape, engines: Collection[str]) -> dict[str, Any]:
    found: dict[str, list[Any]] = {}
    for name, row in tape.engines.items():
        if engines and name not in engines:
            continue
        facts = {
            k: row[k] for k in ("adapter", "role", "dtype", "device", "model_type", "vocab_size")
        }
        libraries = {f"versions.{k}": v for k, v in row["versions"].items()}
        for setting, value in {**facts, **row["effective"], **libraries}.items():
            values = found.setdefault(setting, [])
            if value not in values:
                values.append(value)
    return {k: v[0] if len(v) == 1 else v for k, v in found.items()}


def tape_warnings(tape: Tape, side: str) -> list[Problem]:
    """What a tape itself says is wrong with it: gaps, hook errors, shared caches, damage."""
    found = []
    counts = Counter(row["kind"] for row in tape.table("events").select(["kind"]).to_pylist())
    for kind, what in (("gap", "gaps"), ("hook_error", "hook errors")):
        if counts[kind]:
            message = (
                f"{side}: {counts[kind]} recorded {what}; `rolltape info {tape.place}` lists them"
            )
            found.append(Problem(kind, message, False, {"side": side, "count": counts[kind]}))
    sources = Counter(
        s for s in tape.table("forwards").column("kv_source").to_pylist() if s not in (None, "own")
    )
    if sources:
        text = ", ".join(f"{n:,} {kind}" for kind, n in sorted(sources.items()))
        message = f"{side}: forwards that read a cache made by others: {text}"
        found.append(Problem("cache", message, False, {"side": side, "forwards": dict(sources)}))
    found += [Problem("damage", f"{side}: {text}", True, {"side": side}) for text in tape.problems]
    return found
