"""`rolltape info` and `rolltape show`: read a tape without any engine, trainer or browser."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from typing import Any

import click

from rolltape.store.describe import describe_report, describe_tape, position_rows
from rolltape.store.errors import UsageError
from rolltape.store.jsonable import jsonable
from rolltape.store.places import place_of
from rolltape.store.sequences import open_tape
from rolltape.store.show_text import (
    WIDTH,
    list_lines,
    position_lines,
    ranges,
    sequence_row,
    wrapped,
)
from rolltape.store.tape import kind_of, open_report

_SPAN = re.compile(r"(\d*):(\d*)")
_MOST_LINES = 4
_SEAL_ELSEWHERE = ("argv", "host", "started")  # said of the recording already, or of no use here
#: Why there is no route, where the word does not say it.
_MISSING = {"last": "of last tokens (no forward)"}
#: What a row of a table is.
_UNITS = {
    "engines": ("process", "processes"),
    "sequences": ("start or end", "starts and ends"),
    **dict.fromkeys(
        ("tokens", "routes", "supports", "distributions", "activations"),
        ("fragment", "fragments"),
    ),
    "forwards": ("row of a batch", "rows of batches"),
    "steps": ("step", "steps"),
    "tactics": ("kernel choice", "kernel choices"),
    "weights": ("group of tensors", "groups of tensors"),
    "events": ("event", "events"),
    "annotations": ("fact", "facts"),
}


#: For commands whose TAPE may be a URL.
storage_option = click.option(
    "--storage-option",
    metavar="KEY VALUE",
    type=(str, str),
    multiple=True,
    help="Option of the object store of a URL, for example endpoint_override.",
)


@click.command(short_help="What a tape holds, and what is wrong with it.")
@click.argument("tape", metavar="TAPE")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@storage_option
def info(tape: str, as_json: bool, storage_option: tuple[tuple[str, str], ...]) -> int:
    """Say what TAPE (a tape or a diff report) holds, how complete it is, and what is wrong.

    Exit status: 0, or 2 if something that was written can no longer be read.
    """
    place = place_of(tape, dict(storage_option))
    if kind_of(place) == "report":
        facts = describe_report(open_report(place, skip_damaged=True))
    else:
        facts = describe_tape(open_tape(place, skip_damaged=True))
    if as_json:
        _print_json(facts)
    else:
        lines = _report_lines(facts) if facts["kind"] == "report" else _tape_lines(facts)
        for line in lines:
            click.echo(line)
    if not facts["damaged"]:
        return 0
    click.echo(f"rolltape: error: {facts['problems'][0]}", err=True)
    return 2


@click.command(short_help="Sequences of a tape, or one position by position.")
@click.argument("tape", metavar="TAPE")
@click.argument("sequence", metavar="[SEQ]", required=False)
@click.option(
    "--tokens", metavar="START:END", help="Positions to show; either end may be left out."
)
@click.option(
    "--routes",
    metavar="LAYERS",
    help="Layers whose experts are shown: 3,7 or all or none; by default what fits on a line.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@storage_option
def show(
    tape: str,
    sequence: str | None,
    tokens: str | None,
    routes: str | None,
    as_json: bool,
    storage_option: tuple[tuple[str, str], ...],
) -> int:
    """List the sequences of TAPE, or show SEQ position by position.

    SEQ is an id from the list, or the part of it after the engine.
    """
    place = place_of(tape, dict(storage_option))
    if kind_of(place) == "report":
        raise UsageError(f"{tape} is a report", hint=f"`rolltape info {tape}`")
    opened = open_tape(place)
    if sequence is None:
        for option, value in (("--tokens", tokens), ("--routes", routes)):
            if value is not None:
                raise UsageError(f"{option} needs a sequence", hint=f"rolltape show {tape} SEQ")
        rows = [sequence_row(s) for s in opened]
        if as_json:
            _print_json({"path": str(tape), "uuid": opened.uuid, "sequences": rows})
        else:
            for line in list_lines(opened, rows):
                click.echo(line)
        return 0
    found = opened.sequence(sequence)
    start, stop = _span(tokens, found.length)
    columns = position_rows(found, start, stop)
    if as_json:
        whole = {
            **sequence_row(found),
            "sampling": found.info["sampling"],
            "semantics": found.semantics,
            "annotations": found.annotations,
            "positions": columns,
        }
        _print_json(whole, indent=None)  # one number a line would be no help
    else:
        for line in position_lines(found, columns, routes or "fit"):
            click.echo(line)
    return 0


def _print_json(value: Any, *, indent: int | None = 1) -> None:
    click.echo(json.dumps(jsonable(value), allow_nan=False, indent=indent))


def _span(text: str | None, length: int) -> tuple[int, int]:
    if text is None:
        return 0, length
    match = _SPAN.fullmatch(text)
    if match is None:
        raise UsageError(f"--tokens {text}: not START:END", hint="for example 100:120, 100: or :20")
    start = int(match[1] or 0)
    stop = min(int(match[2] or length), length)
    if start >= stop:
        raise UsageError(f"--tokens {text}: no position there", hint=f"0:{length} is all of them")
    return start, stop


# -- info ---------------------------------------------------------------------------------


def _tape_lines(facts: dict[str, Any]) -> Iterator[str]:
    yield f"{facts['path']}: {facts['role']} tape, format {facts['format']}, {facts['created']}"
    yield f"uuid        {facts['uuid']}"
    if facts["parent"]:
        yield f"replays     {facts['parent']}"
    argv = facts["provenance"].get("argv")
    if argv:
        yield from _labelled("command", shlex.join(map(str, argv)))
    for engine in facts["engines"]:
        yield from _engine_lines(engine)
        yield from _process_lines(engine, facts["processes"])
    counts = facts["sequences"]
    finish = ", ".join(f"{n:,} {name}" for name, n in counts["by_finish"].items())
    grouped = f" in {counts['groups']:,} groups" if counts["groups"] else ""
    yield f"sequences   {counts['total']:,}{grouped}{f': {finish}' if finish else ''}"
    tokens = facts["tokens"]
    yield (
        f"tokens      {tokens['prompt']:,} prompt, {tokens['response']:,} response, "
        f"{tokens['loss']:,} in the loss; longest sequence {counts['longest']:,}"
    )
    yield from _coverage_lines(facts["coverage"])
    yield from _weight_lines(facts["weights"])
    yield from _late_lines(facts)
    events = facts["events"]
    if events["by_kind"]:
        yield "events      " + ", ".join(f"{n:,} {k}" for k, n in events["by_kind"].items())
    for finding in events["findings"]:
        text = f"{finding.get('message')}: {finding.get('remedy')}"
        yield from _lines(f"  {finding.get('code')}: ", text)
    for fault in events["faults"]:
        yield from _lines(f"  {fault['kind']}: ", _fault(fault))
    yield from _table_lines(facts)
    seal = facts["seal"]
    if seal is None:
        yield "seal        not sealed: still being written, or its launcher was killed"
    else:
        status = [
            f"{name} {value}"
            for name, value in seal["status"].items()
            if isinstance(value, int | float | str) and name not in _SEAL_ELSEWHERE
        ]
        yield f"seal        {', '.join([str(seal['sealed']), *status])}"
        if seal["recovered"]:
            yield f"            {len(seal['recovered'])} shards recovered from dead writers"
        if seal["live"]:
            yield f"            {len(seal['live'])} shards were still being written"
    for problem in facts["problems"]:
        yield f"PROBLEM     {problem}"


def _weight_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A line a version: its digest or why there is none, and whether it is in place."""
    before: dict[tuple[str, str], str | None] = {}
    groups: dict[tuple[str, int], list[bool]] = {}
    for row in rows:  # by engine and version
        if row["group"] and row["state"] == "complete":
            place = row["engine"], row["group"]
            known = groups.setdefault((row["engine"], row["version"]), [])
            known.append(before.get(place) != row["digest"])
            before[place] = row["digest"]
    for row in rows:
        if row["group"]:
            continue
        parts = []
        if row["state"] != "complete":
            parts.append("an update began that is not known to have ended")
        elif row["digest"]:
            parts.append(f"in place, digest {row['digest']}")
        else:
            parts.append("in place, without a digest: nothing tells them from other weights")
        if row["reason"]:
            parts[-1] += f" ({row['reason']})"
        moves = groups.get((row["engine"], row["version"]), [])
        if moves and row["version"]:
            parts.append(f"{sum(moves)} of {len(moves)} groups moved")
        parts += [str(row["label"])] if row["label"] else []
        text = f"version {row['version']} of {row['engine'][:8]}: {', '.join(parts)}"
        yield from _labelled("weights", text)


def _fault(fault: dict[str, Any]) -> str:
    """A gap or an error in one line; where it was raised stands in the JSON."""
    detail = fault["detail"]
    if not isinstance(detail, dict):
        return str(detail)
    parts = [str(detail["reason"])] if "reason" in detail else []
    if "error" in detail:
        parts.append(f"{detail.get('hook', 'hook')}: {detail['error']}")
    where = {k: v for k, v in fault.items() if k in ("request", "start", "n")}
    rest = {k: v for k, v in detail.items() if k not in ("reason", "error", "hook", "trace")}
    parts += [f"{k} {v if isinstance(v, str) else json.dumps(v)}" for k, v in where.items()]
    parts += [f"{k} {v if isinstance(v, str) else json.dumps(v)}" for k, v in rest.items() if v]
    return ", ".join(parts)


def _labelled(label: str, text: str) -> Iterator[str]:
    """A labelled text, wrapped at spaces."""
    return _lines(f"{label:<12}", text)


def _lines(start: str, text: str) -> Iterator[str]:
    """A text behind `start`, wrapped at spaces; what has no room in `_MOST_LINES` is cut."""
    lines = wrapped(" ".join(text.split()), WIDTH - 12, separator=" ")
    if len(lines) > _MOST_LINES:
        lines = [*lines[: _MOST_LINES - 1], f"{lines[_MOST_LINES - 1]} ... (--json has all)"]
    for i, line in enumerate(lines or [""]):
        yield (start if i == 0 else " " * 12) + line


def _engine_lines(engine: dict[str, Any]) -> Iterator[str]:
    facts = [engine.get(k) for k in ("adapter", "model_type", "dtype", "device")]
    known = ", ".join(str(fact) for fact in facts if fact)
    yield f"engine      {engine['engine'][:8]} {engine['role']}: {known}"
    if engine.get("model"):
        yield f"  model     {engine['model']}"
    moe = engine.get("moe_layers")
    if moe:
        yield (
            f"  experts   {engine.get('experts_per_token')} of {engine.get('num_experts')} "
            f"in {len(moe)} layers ({ranges(moe)})"
        )
    elif moe == []:
        yield "  experts   none: a dense model"
    for name in ("effective", "requested"):
        settings = engine.get(name) or {}
        text = ", ".join(f"{k}={v}" for k, v in settings.items())
        for i, line in enumerate(wrapped(text, WIDTH - 12)):
            yield f"  {name if i == 0 else '':<9} {line}"


def _process_lines(engine: dict[str, Any], processes: list[dict[str, Any]]) -> Iterator[str]:
    mine = [row for row in processes if row["engine"] == engine["engine"]]
    if len(mine) > 1:
        names = Counter(str(row.get("process") or "process") for row in mine)
        text = ", ".join(f"{n} {name}" for name, n in names.items())
        yield f"  processes {len(mine)}: {text}"
    for name, said in engine.get("disagreements", {}).items():
        values = ", ".join(f"{who}: {value}" for who, value in said.items())
        for i, line in enumerate(wrapped(f"{name}: {values}", WIDTH - 12)):
            yield f"  {'DISAGREE' if i == 0 else '':<9} {line}"


def _late_lines(facts: dict[str, Any]) -> Iterator[str]:
    tactics = facts["tactics"]
    for tuner, counts in tactics["by_tuner"].items():
        text = ", ".join(f"{n:,} {how}" for how, n in counts.items() if how != "unrecorded")
        if text:
            yield f"tactics     kernels that {tuner} chose: {text}"
    hidden = [f"{row['op']} ({row['tuner']})" for row in tactics["unrecorded"]]
    if hidden:
        text = f"cannot be observed: {'; '.join(hidden)}; why: --json"
        yield from _labelled("tactics", text)
    notes = facts["annotations"]
    if notes["by_name"]:
        text = ", ".join(f"{n:,} {name}" for name, n in notes["by_name"].items())
        yield from _labelled("annotations", text)
    for reason in ("unmatched", "ambiguous"):
        if notes[reason]:
            found = next(u for u in notes["unresolved"] if u["reason"] == reason)
            yield f"            {notes[reason]:,} {reason}, for example of {found['request']}"
    for table, row in facts["surplus"].items():
        yield (
            f"surplus     {table}: {row['positions']:,} positions beyond the end of "
            f"{row['sequences']:,} sequences, cut"
        )


def _coverage_lines(coverage: dict[str, Any]) -> Iterator[str]:
    logprobs = coverage["logprobs"]
    parts = [f"{name} {_percent(row['share'])}" for name, row in logprobs.items()]
    yield f"logprobs    {', '.join(parts) + ' of response tokens' if parts else 'none'}"
    bad = {name: row["non_finite"] for name, row in logprobs.items() if row["non_finite"]}
    if bad:
        yield "            not finite: " + ", ".join(f"{n:,} {name}" for name, n in bad.items())
    roles = {role: row for role, row in coverage["routes"].items() if role != "missing"}
    if not roles:
        yield "routes      none"
    for role, row in roles.items():
        shares = [layer["share"] for layer in row["layers"].values()]
        numbers = ranges([int(layer) for layer in row["layers"]])
        low, high = _percent(min(shares)), _percent(max(shares))
        share = low if low == high else f"{low} to {high}"
        yield f"routes      {role}: {share} of positions in layers {numbers}"
        if low != high:
            worst = min(row["layers"].items(), key=lambda item: item[1]["share"])
            yield f"            least in layer {worst[0]}: {_percent(worst[1]['share'])}"
    missing = coverage["routes"].get("missing", {})
    if missing:
        yield "            missing: " + ", ".join(
            f"{n:,} {_MISSING.get(reason, reason)}" for reason, n in missing.items()
        )
    supports = coverage["supports"]
    if supports:
        counts = ", ".join(f"{supports[s]:,} {s}" for s in ("explicit", "full", "unrecorded"))
        size = f"; {supports['mean_size']:.1f} ids on average" if supports["mean_size"] else ""
        yield f"supports    {counts}{size}{', derived' if supports['derived'] else ''}"
    else:
        yield "supports    none"
    top = coverage["distributions"]
    if top:
        yield f"top logprobs {top['k']} a position, {top['positions']:,} positions"
    sketched = coverage.get("sketches")
    if sketched:
        yield f"sketches    {len(sketched)} sites, {sum(sketched.values()):,} positions"
    sites = coverage["activations"]
    if sites:
        yield f"activations {len(sites)} sites, {sum(sites.values()):,} positions"


def _table_lines(facts: dict[str, Any]) -> Iterator[str]:
    units = _UNITS if facts["kind"] == "tape" else {}
    yield f"tables      {_bytes(facts['bytes'])} on disk"
    for name, row in sorted(facts["tables"].items(), key=lambda item: -item[1]["bytes"]):
        live = f", {row['live']} still written" if row["live"] else ""
        shards = f"{row['shards']} shard{'' if row['shards'] == 1 else 's'}"
        rows = "index"
        if row["rows"] is not None:
            one, many = units.get(name, ("row", "rows"))
            rows = f"{row['rows']:,} {one if row['rows'] == 1 else many}"
        yield f"  {name:<13} {rows:<24}{_bytes(row['bytes']):>10}  {shards}{live}"


def _report_lines(facts: dict[str, Any]) -> Iterator[str]:
    summary = facts["summary"]
    yield f"{facts['path']}: diff report, format {facts['format']}, {facts['created']}"
    yield f"verdict     {summary.get('verdict')}: {summary.get('reason', '')}"
    for side in ("a", "b"):
        tape = summary.get(side) or {}
        yield f"{side}           {tape.get('path')} ({tape.get('role')}, {tape.get('uuid')})"
    compared = summary.get("compared") or {}
    kinds = [
        k for k in ("sequences", "logprobs", "routes", "supports", "activations") if k in compared
    ]
    yield "compared    " + ", ".join(f"{compared[kind]:,} {kind}" for kind in kinds)
    if summary.get("tokens_compared"):
        at = summary["max_at"]
        yield (
            f"logprobs    {summary['column']}: mean |d| {_number(summary['mean_abs'])}, "
            f"max {_number(summary['max_abs'])} at {at['sequence']} position {at['position']}"
        )
        yield f"            k1 {_number(summary['k1'])}, k3 {_number(summary['k3'])}"
    routing = summary.get("routing")
    if routing:
        yield (
            f"routing     {routing['disagree']:,} of {routing['decisions']:,} decisions disagree, "
            f"{routing['tokens_any']:,} tokens"
        )
    for problem in summary.get("identity") or []:
        yield f"identity    {problem['message']}"
    yield from _table_lines(facts)
    for text in facts["problems"]:
        yield f"PROBLEM     {text}"


def _number(value: Any) -> str:
    return value if isinstance(value, str) else "-" if value is None else f"{value:.3g}"


def _percent(value: float) -> str:
    text = f"{value:.1%}"
    if text == "0.0%" and value > 0:
        return "<0.1%"
    return ">99.9%" if text == "100.0%" and value < 1 else text


def _bytes(n: int) -> str:
    size = float(n)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{int(size)} B" if unit == "B" else f"{size:.1f} {unit}"
