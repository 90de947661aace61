"""What a report and its tapes say by themselves about possible causes, as pieces of evidence.

Nothing here is an experiment. A piece is `decisive` where it settles its hypothesis (digests that
differ, one rank on both sides); everything else is only shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.store.keys import Key
from rolltape.store.schema import TOKEN_STATES
from rolltape.store.sequences import Tape
from rolltape.store.tape import seal_problems
from rolltape.viewer.happenings import detail_words, members
from rolltape.viewer.library import Pair
from rolltape.viewer.paired import last_of_each, whole_digests
from rolltape.viewer.versions import made_by

FOR, AGAINST, NOTE = "for", "against", "note"

#: Kinds of events that say something, and how many of each are looked at.
_EVENTS = {"gap": 3, "hook_error": 3, "finding": 100}
_SAMPLED = 32  # sequences in which flips are looked for
_SHOWN = 5  # problems of one kind that are shown

#: Identity problems and warnings of a diff, by the hypothesis that they are about.
_KINDS = {
    "tokens": "tokenizer",
    "prompt_len": "tokenizer",
    "length": "tokenizer",
    "semantics": "support",
    "loss_mask": "support",
    "weights": "weights",
    "weights_unchecked": "weights",
    "model": "weights",
    "cache": "attention",
    "experts": "routing",
    "route_layers": "routing",
    "gap": "recording",
    "hook_error": "recording",
    "token_gap": "recording",
    "missing": "recording",
    "routes_missing": "recording",
    "supports_missing": "recording",
    "used_routes": "recording",
    "zero_routes": "recording",
    "repeated_experts": "recording",
    "constant_routes": "recording",
    "shifted_routes": "recording",
    "shifted_logprobs": "recording",
    "foreign_routes": "recording",
    "damage": "recording",
    "open": "recording",
}
#: Of those, what settles its hypothesis.
_SETTLES = frozenset(
    (
        *("tokens", "prompt_len", "semantics", "weights", "model", "gap", "hook_error", "damage"),
        *("token_gap", "used_routes", "zero_routes", "repeated_experts", "constant_routes"),
        *("shifted_routes", "shifted_logprobs", "foreign_routes"),
    )
)
#: Findings of a recording, by hypothesis.
_FINDINGS = {
    "RT405": "weights",
    "RT406": "weights",
    "RT407": "parallel",
    "RT408": "parallel",
    "RT409": "batch",
    "RT410": "recording",
}
#: Words in the name of a setting, by hypothesis; the first that fits.
_SETTINGS = (
    ("quant", ("quant", "kv_cache_dtype", "calculate_kv_scales")),
    ("parallel", ("parallel", "tp_size", "ep_size", "dp_size", "pp_size", "all_reduce", "nccl")),
    ("batch", ("batch", "max_num_seqs", "chunk", "graph", "cudagraph", "deterministic")),
    ("attention", ("attention", "sdpa", "prefix_cach", "kv_cache", "block_size", "cascade")),
    ("kernels", ("experts", "moe_backend", "matmul", "tf32", "reduced_precision", "autotune")),
    ("precision", ("dtype",)),
    ("support", ("top_k", "top_p", "min_p", "temperature", "logprobs_mode")),
)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One piece of evidence.

    Args:
        cause: hypothesis that it is about.
        says: for, against, or note: neither.
        text: in words.
        source: where it comes from.
        decisive: whether it settles the hypothesis.
        links: {text, seq, tok, rep}, what is absent left out.
        sequence: it is about this sequence alone.
    """

    cause: str
    says: str
    text: str
    source: str
    decisive: bool = False
    links: tuple[Mapping[str, Any], ...] = ()
    sequence: str | None = None

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "says": self.says,
            "text": self.text,
            "source": self.source,
            "decisive": self.decisive,
            "links": [dict(link) for link in self.links],
        }


def facts(pair: Pair) -> Iterator[Evidence]:
    """Everything that the pair says, in no particular order."""
    faults: list[Evidence] = []
    for tape, source in ((pair.tape, "tape A"), (pair.b, "tape B")):
        if tape is not None and not (source == "tape B" and tape is pair.tape):
            faults += [*_events(tape, source), *_damage(tape, source)]
    if pair.report is not None:
        faults += _problems(pair)
    yield from faults
    # one fault on either side is enough, whatever is whole beside it
    if not any(e.cause == "recording" and e.decisive and e.says == FOR for e in faults):
        yield from _whole(pair)
    if pair.tape is not None:
        yield from _straddling(pair, pair.tape)
    yield from _ranks(pair)
    if pair.report is None:
        return
    yield from _settings(pair)
    yield from _semantics(pair)
    yield from _identity(pair)
    yield from _routing(pair)


def _events(tape: Tape, source: str) -> Iterator[Evidence]:
    counts: dict[str, int] = {}
    first: dict[str, list[dict[str, Any]]] = {}
    for _, _, batch in tape.batches("events"):
        kinds = batch.column("kind")
        for kind, most in _EVENTS.items():
            rows = batch.filter(pc.equal(kinds, kind))
            counts[kind] = counts.get(kind, 0) + rows.num_rows
            shown = first.setdefault(kind, [])
            shown += rows.slice(0, most - len(shown)).to_pylist()
    for kind, what in (("gap", "recorded gaps"), ("hook_error", "failed hooks")):
        if counts.get(kind):
            yield Evidence(
                cause="recording",
                says=FOR,
                text=f"{counts[kind]:,} {what}; the first: {_words(first[kind][0]['detail'])}",
                source=source,
                decisive=True,
                links=tuple(_event_links(first[kind])),
            )
    for row in first.get("finding", []):
        detail = members(row["detail"])
        code = str(detail.get("code", ""))
        message = str(detail.get("message") or detail.get("reason") or _words(row["detail"]))
        cause = _FINDINGS.get(code) or _by_name(str(detail.get("name", ""))) or "kernels"
        settles = code in ("RT407", "RT405", "RT406", "RT410")
        yield Evidence(
            cause=cause,
            says=FOR if settles else NOTE,
            text=f"finding {code}: {message}" if code else f"finding: {message}",
            source=source,
            decisive=settles,
        )


def _event_links(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        if row["request"] is not None and row["engine"] is not None:
            key = Key(row["engine"], row["request"], row["sample"] or 0)
            yield {"text": key.id, "seq": key.id, "tok": row["start"]}


def _damage(tape: Tape, source: str) -> Iterator[Evidence]:
    problems = [*seal_problems(tape.place, tape.seal), *tape.problems]
    if problems:
        text = f"damage: {problems[0]}"
        yield Evidence(cause="recording", says=FOR, text=text, source=source, decisive=True)


def _whole(pair: Pair) -> Iterator[Evidence]:
    """What speaks against a fault of the recording, where none was found on either side."""
    if pair.tape is None:
        return
    sides = {"tape A": pair.tape} | ({"tape B": pair.b} if pair.b is not None else {})
    lacks = {source: _lacks(tape) for source, tape in sides.items()}
    if pair.report is not None and pair.b is None:
        lacks["tape B"] = "it is not open: nothing is known of its recording"
    for source, text in lacks.items():
        if text:
            yield Evidence(cause="recording", says=NOTE, text=text, source=source)
    text = "sealed, every shard is there, no gap and no failed hook was recorded"
    whole = [source for source in sides if not lacks[source]]
    if whole:
        all_of_it = not any(lacks.values())
        yield Evidence(
            cause="recording",
            says=AGAINST if all_of_it else NOTE,
            text=text if len(whole) < 2 else f"both tapes: {text}",
            source=" and ".join(whole),
            decisive=all_of_it,
        )


def _lacks(tape: Tape) -> str:
    """Why the seal of a tape without faults does not say that everything is there; empty if so."""
    if tape.seal is None:
        return "the tape is not sealed: it is still being written, or the job was killed"
    found = []
    for name, what in (
        ("live", "still being written when the tape was sealed"),
        ("recovered", "recovered from dead writers, whose last rows may be lost"),
    ):
        shards = tape.seal.get(name) or []
        if shards:
            found.append(f"{len(shards):,} shard{'s' if len(shards) > 1 else ''} {what}")
    ends = made_by(tape).column("finish")
    count = int(pc.sum(pc.fill_null(pc.equal(ends, "open"), False)).as_py() or 0)
    if count:
        found.append(f"{count:,} sequence{'s' if count > 1 else ''} never finished")
    return "; ".join(found)


def _straddling(pair: Pair, tape: Tape) -> Iterator[Evidence]:
    if tape.seal is None:
        return  # its roll-ups would have to be counted
    low, high = pair.facts.column("version_min"), pair.facts.column("version_max")
    first, last = pc.min(low).as_py(), pc.max(high).as_py()
    if first is None:
        text = "the tape does not say which weight version made which token"
        yield Evidence(cause="weights", says=NOTE, text=text, source="tape A")
        return
    there = pc.fill_null(pc.not_equal(low, high), False)
    ids = pair.facts.column("id").filter(there)
    if not len(ids):
        text = "no sequence was made by more than one weight version"
        if first == last:
            text = f"all tokens were made by weight version {first}"
        yield Evidence(cause="weights", says=NOTE, text=text, source="tape A")
        return
    text = f"{len(ids):,} of {len(low):,} sequences were made by more than one weight version"
    text += _contrast_of(pair, ids)
    links = tuple({"text": name, "seq": name} for name in ids.slice(0, 3).to_pylist())
    yield Evidence(cause="weights", says=NOTE, text=text, source="tape A", links=links)


def _contrast_of(pair: Pair, ids: pa.ChunkedArray) -> str:
    table = pair.report_columns(["a", "compared", "mean_abs"])
    table = table.filter(pa.array(last_of_each(table.column("a"))))
    there = pc.is_in(table.column("a"), value_set=ids.combine_chunks()).to_numpy()
    tokens = table.column("compared").fill_null(0).to_numpy()
    sums = np.nan_to_num(table.column("mean_abs").fill_null(0).to_numpy()) * tokens
    if not tokens[there].sum() or not tokens[~there].sum():
        return ""
    means = [sums[w].sum() / tokens[w].sum() for w in (there, ~there)]
    return f"; mean |d| {means[0]:.3g} nat in them, {means[1]:.3g} in the others"


def _ranks(pair: Pair) -> Iterator[Evidence]:
    sides = [(name, t) for name, t in (("A", pair.tape), ("B", pair.b)) if t is not None]
    words, known, alone = [], True, True
    for name, tape in sides:
        ranks = [e.get("ranks") or {} for e in tape.engines.values()]
        sizes: dict[str, int] = {}
        silent = 0  # engines that say nothing of it and may be several processes
        for one, engine in zip(ranks, tape.engines.values(), strict=True):
            told = engine.get("adapter") == "transformers"
            for kind, value in one.items() if isinstance(one, dict) else ():
                size = value[1] if isinstance(value, list) and len(value) == 2 else None
                if isinstance(size, int):
                    sizes[str(kind)] = max(size, sizes.get(str(kind), 0))
                    told = True
            silent += not told
        # an adapter that runs one process says nothing of ranks
        single = all(e.get("adapter") == "transformers" for e in tape.engines.values())
        known = known and bool(ranks) and not silent
        alone = alone and all(size == 1 for size in sizes.values())
        said = ", ".join(f"{k} {v}" for k, v in sorted(sizes.items()))
        unsaid = f", {silent} of {len(ranks)} engines do not say" if said and silent else ""
        words.append(f"{name}: {said or ('one process' if single else 'not recorded')}{unsaid}")
    if not words:
        return
    settled = known and alone and len(sides) == 2
    yield Evidence(
        cause="parallel",
        says=AGAINST if settled else NOTE,
        text="ranks of " + "; ".join(words),
        source="tapes",
        decisive=settled,
    )


def _problems(pair: Pair) -> Iterator[Evidence]:
    for place in ("identity", "warnings"):
        shown: dict[str, int] = {}
        for item in _dicts(pair.summary.get(place)):
            kind = str(item.get("kind", ""))
            cause = _KINDS.get(kind)
            shown[kind] = shown.get(kind, 0) + 1
            if cause is None or shown[kind] > _SHOWN:
                continue
            sequence = item.get("sequence")
            links = []
            if isinstance(sequence, str):
                at = item.get("position")
                links.append({"text": sequence, "seq": sequence, "tok": at})
            settles = kind in _SETTLES and (place == "identity" or kind in ("gap", "hook_error"))
            yield Evidence(
                cause=cause,
                says=FOR if settles else NOTE,
                text=str(item.get("message", kind)),
                source=f"report, {place}",
                decisive=settles,
                links=tuple(links),
                sequence=sequence if isinstance(sequence, str) else None,
            )


def _by_name(setting: str) -> str | None:
    low = setting.lower()
    return next((c for c, words in _SETTINGS if any(w in low for w in words)), None)


def _settings(pair: Pair) -> Iterator[Evidence]:
    settings = pair.summary.get("settings")
    grouped: dict[str, list[str]] = {}
    for name, values in settings.items() if isinstance(settings, dict) else ():
        if name.startswith(("switch.", "versions.")) or not isinstance(values, list):
            continue
        cause = _by_name(name)
        if cause is not None and len(values) == 2 and None not in values:
            grouped.setdefault(cause, []).append(f"{name}: A {values[0]}, B {values[1]}")
    for cause, lines in grouped.items():
        text = "settings that differ: " + "; ".join(lines)
        yield Evidence(cause=cause, says=NOTE, text=text, source="report, settings")


def _semantics(pair: Pair) -> Iterator[Evidence]:
    summary = pair.summary
    column = summary.get("column")
    meaning = summary.get("semantics")
    rows = meaning.get("differences") if isinstance(meaning, dict) else None
    for row in _dicts(rows)[:_SHOWN]:
        cause = "precision" if row.get("field") == "dtype" else "support"
        text = (
            f"{row.get('field')} of the logprobs: A {row.get('a')}, B {row.get('b')} "
            f"({_count(row.get('tokens'))} tokens)"
        )
        if row.get("field") != "source":
            yield Evidence(cause=cause, says=NOTE, text=text, source="report, semantics")
    kept = summary.get("supports")
    kept = kept if isinstance(kept, dict) else {}
    if kept.get("differ"):
        first, links = kept.get("first_differing"), []
        if isinstance(first, dict) and isinstance(first.get("sequence"), str):
            at = first.get("position")
            links.append({"text": "the first", "seq": first["sequence"], "tok": at})
        yield Evidence(
            cause="support",
            says=NOTE,  # a set that is cut from other logits differs as a consequence
            text=f"{_count(kept['differ'])} of {_count(kept.get('compared'))} kept sets differ; "
            "where both sides cut their own logits that follows from any difference",
            source="report, supports",
            links=tuple(links),
        )
    elif kept.get("compared"):
        text = f"all {_count(kept['compared'])} kept sets compared are equal"
        yield Evidence(
            cause="support", says=AGAINST, text=text, source="report, supports", decisive=True
        )
    if column == "raw" and summary.get("tokens_compared"):
        text = "the headline is of raw logprobs: temperature 1, full vocabulary on both sides"
        yield Evidence(
            cause="support", says=AGAINST, text=text, source="report, semantics", decisive=True
        )


def _identity(pair: Pair) -> Iterator[Evidence]:
    summary = pair.summary
    identity, warnings = (
        {str(p.get("kind")) for p in _dicts(summary.get(name))} for name in ("identity", "warnings")
    )
    compared = summary.get("compared")
    pairs = compared.get("sequences") if isinstance(compared, dict) else None
    if not pairs or not isinstance(pairs, int):
        pairs = pair.report_columns(["a"]).num_rows
    if pairs and not identity & {"tokens", "prompt_len", "length", "unmatched"}:
        text = f"{pairs:,} pairs of sequences have the same token ids and prompt lengths"
        yield Evidence(
            cause="tokenizer", says=AGAINST, text=text, source="report, identity", decisive=True
        )
    checked = all(t is not None and whole_digests(t) for t in (pair.tape, pair.b))
    checked = checked and pair.counts["compared"] > 0
    if checked and not (identity | warnings) & {"weights", "weights_unchecked", "model"}:
        text = "the weights of both sides have the same digest wherever a token was compared"
        yield Evidence(
            cause="weights", says=AGAINST, text=text, source="report, identity", decisive=True
        )
        yield Evidence(
            cause="quant",
            says=NOTE,
            text="the weights of both sides have the same digest: neither side quantised them",
            source="report, identity",
        )


def _routing(pair: Pair) -> Iterator[Evidence]:
    report = pair.report
    assert report is not None
    rows = [r for r in report.rows("routing") if r["slice"] == "all"]
    decisions = sum(r["decisions"] or 0 for r in rows)
    if not decisions:
        reason = pair.summary.get("not_compared")
        reason = reason.get("routes") if isinstance(reason, dict) else None
        text = f"no routes were compared: {reason or 'neither side has any'}"
        yield Evidence(cause="routing", says=NOTE, text=text, source="report, routing")
        return
    flips = sum(r["disagree"] or 0 for r in rows)
    if not flips:
        text = f"all {decisions:,} routing decisions agree"
        yield Evidence(
            cause="routing", says=AGAINST, text=text, source="report, routing", decisive=True
        )
        return
    worst = max(rows, key=lambda r: (r["disagree"] or 0) / (r["decisions"] or 1))
    text = (
        f"{flips:,} of {decisions:,} routing decisions disagree, most of them in layer "
        f"{worst['layer']} ({_count(worst['disagree'])} of {_count(worst['decisions'])})"
    )
    yield Evidence(cause="routing", says=NOTE, text=text, source="report, routing")
    margin = _weighted(rows, "flip_margin_mean", "disagree")
    other = _weighted(rows, "agree_margin_mean", "decisions")
    if margin is not None:
        text = f"margin of the choice where it disagrees: {margin:.3g} on average"
        if other is not None:
            text += f", {other:.3g} where it agrees"
            text += ": smaller" if margin < other else ": not smaller"
            text += " than where it agrees"
        for cause in ("routing", "router"):
            yield Evidence(cause=cause, says=NOTE, text=text, source="report, routing")


def _weighted(rows: list[dict[str, Any]], name: str, by: str) -> float | None:
    known = [(r[name], r[by]) for r in rows if r[name] is not None and r[by]]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


def flip_contrast(pair: Pair, sequence: str | None = None) -> Evidence | None:
    """Mean |d| of tokens drawn by an input whose routing disagrees, against all others.

    Args:
        pair: with a report.
        sequence: this one alone; None is up to 32 sequences of the report, evenly spaced.
    """
    if pair.report is None:
        return None
    if sequence is None:
        table = pair.report_columns(["a", "disagree"])
        table = table.filter(pa.array(last_of_each(table.column("a"))))
        every = table.column("a").filter(pc.greater(pc.fill_null(table.column("disagree"), 0), 0))
        every = every.to_pylist()
        chosen = [every[k * len(every) // _SAMPLED] for k in range(min(_SAMPLED, len(every)))]
        if len(every) <= _SAMPLED:
            chosen = every
    else:
        chosen = [sequence]
    sums, counts = np.zeros(2), np.zeros(2, np.int64)
    best: tuple[float, str, int] | None = None
    compared = TOKEN_STATES.index("compared")
    for name in chosen:
        found = pair.report_rows("tokens", name, ["state", "delta", "flips"])
        if not found.num_rows:
            continue
        last = found.num_rows - 1  # of several rows of a sequence the last one counts
        state, delta, flips = (_array(found.column(c)[last]) for c in ("state", "delta", "flips"))
        if not len(state) == len(delta) == len(flips):
            continue
        # the input at p - 1 drew the token at p
        at = np.flatnonzero((state[1:] == compared) & np.isfinite(delta[1:]) & (flips[:-1] >= 0))
        size = np.abs(delta[1:][at])
        flipped = (flips[:-1][at] > 0).astype(int)
        counts += np.bincount(flipped, minlength=2)
        sums += np.bincount(flipped, size, minlength=2)
        if flipped.any():
            k = int(np.where(flipped, size, -1).argmax())
            if best is None or size[k] > best[0]:
                best = float(size[k]), name, int(at[k]) + 1
    if best is None or not counts[0]:
        return None
    where = "" if sequence is not None else f" ({len(chosen):,} sequences looked at)"
    text = (
        f"mean |d| {sums[1] / counts[1]:.3g} nat at {counts[1]:,} tokens drawn by an input whose "
        f"routing disagrees in some layer, {sums[0] / counts[0]:.3g} at the {counts[0]:,} "
        f"others{where}: a correlation, not a cause"
    )
    link = {"text": f"largest: {best[0]:.3g} nat", "seq": best[1], "tok": best[2]}
    return Evidence(cause="routing", says=NOTE, text=text, source="report, tokens", links=(link,))


def _array(scalar: Any) -> np.ndarray:
    if not scalar.is_valid:
        return np.zeros(0)
    return np.asarray(scalar.values.cast(pa.float64()).fill_null(-1.0).to_numpy())


def _dicts(value: Any) -> list[dict[str, Any]]:
    """The objects in a list of the summary, which anybody may have written."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "an unknown number"


def _words(detail: str | None) -> str:
    return detail_words(detail) or "no detail"
