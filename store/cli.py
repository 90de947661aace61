"""`rolltape info` and `rolltape show`: read a tape without any engine, trainer or browser."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import click

from rolltape.store.describe import describe_report, describe_tape, position_rows
from rolltape.store.errors import UsageError
from rolltape.store.jsonable import jsonable
from rolltape.store.places import place_of
from rolltape.store.sequences import Sequence, Tape, open_tape
from rolltape.store.tape import kind_of, open_report

_SPAN = re.compile(r"(\d*):(\d*)")
_WIDTH = 80
_SEAL_ELSEWHERE = ("argv", "host", "started")  # said of the recording already, or of no use here


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
        rows = [_sequence_row(s) for s in opened]
        if as_json:
            _print_json({"path": str(tape), "uuid": opened.uuid, "sequences": rows})
        else:
            for line in _list_lines(opened, rows):
                click.echo(line)
        return 0
    found = opened.sequence(sequence)
    start, stop = _span(tokens, found.length)
    columns = position_rows(found, start, stop)
    if as_json:
        whole = {
            **_sequence_row(found),
            "sampling": found.info["sampling"],
            "semantics": found.semantics,
            "annotations": found.annotations,
            "positions": columns,
        }
        _print_json(whole, indent=None)  # one number a line would be no help
    else:
        for line in _position_lines(found, columns, routes or "fit"):
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
        yield f"command     {_cut(' '.join(map(str, argv)), _WIDTH - 12)}"
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
    before: dict[tuple[str, str], str | None] = {}
    groups: dict[tuple[str, int], list[bool]] = {}
    for row in facts["weights"]:  # by engine and version
        if row["group"] and row["state"] == "complete":
            place = row["engine"], row["group"]
            known = groups.setdefault((row["engine"], row["version"]), [])
            known.append(before.get(place) != row["digest"])
            before[place] = row["digest"]
    for row in facts["weights"]:
        if row["group"]:
            continue
        moves = groups.get((row["engine"], row["version"]), [])
        moved = f", {sum(moves)} of {len(moves)} groups moved" if moves and row["version"] else ""
        yield (
            f"weights     version {row['version']} of {row['engine'][:8]}: "
            f"{row['digest'] or 'no digest'}, {row['state']}{moved}"
            + (f", {row['label']}" if row["label"] else "")
            + (f" ({row['reason']})" if row["reason"] else "")
        )
    yield from _late_lines(facts)
    events = facts["events"]
    if events["by_kind"]:
        yield "events      " + ", ".join(f"{n:,} {k}" for k, n in events["by_kind"].items())
    for finding in events["findings"]:
        text = f"{finding.get('message')}: {finding.get('remedy')}"
        yield f"  {finding.get('code')}: {_cut(text, _WIDTH - 16)}"
    for fault in events["faults"]:
        yield f"  {fault['kind']}: {_cut(json.dumps(fault['detail']), _WIDTH - 16)}"
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
            f"in {len(moe)} layers ({_ranges(moe)})"
        )
    elif moe == []:
        yield "  experts   none: a dense model"
    for name in ("effective", "requested"):
        settings = engine.get(name) or {}
        text = ", ".join(f"{k}={v}" for k, v in settings.items())
        for i, line in enumerate(_wrap(text, _WIDTH - 12)):
            yield f"  {name if i == 0 else '':<9} {line}"


def _process_lines(engine: dict[str, Any], processes: list[dict[str, Any]]) -> Iterator[str]:
    mine = [row for row in processes if row["engine"] == engine["engine"]]
    if len(mine) > 1:
        names = Counter(str(row.get("process") or "process") for row in mine)
        text = ", ".join(f"{n} {name}" for name, n in names.items())
        yield f"  processes {len(mine)}: {text}"
    for name, said in engine.get("disagreements", {}).items():
        values = ", ".join(f"{who}: {value}" for who, value in said.items())
        for i, line in enumerate(_wrap(f"{name}: {values}", _WIDTH - 12)):
            yield f"  {'DISAGREE' if i == 0 else '':<9} {line}"


def _late_lines(facts: dict[str, Any]) -> Iterator[str]:
    tactics = facts["tactics"]
    for tuner, counts in tactics["by_tuner"].items():
        text = ", ".join(f"{n:,} {source}" for source, n in counts.items())
        yield f"tactics     {tuner}: {text}"
    notes = facts["annotations"]
    if notes["by_name"]:
        text = ", ".join(f"{n:,} {name}" for name, n in notes["by_name"].items())
        yield f"annotations {_cut(text, _WIDTH - 12)}"
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
        numbers = _ranges([int(layer) for layer in row["layers"]])
        low, high = _percent(min(shares)), _percent(max(shares))
        share = low if low == high else f"{low} to {high}"
        yield f"routes      {role}: {share} of positions in layers {numbers}"
        if low != high:
            worst = min(row["layers"].items(), key=lambda item: item[1]["share"])
            yield f"            least in layer {worst[0]}: {_percent(worst[1]['share'])}"
    missing = coverage["routes"].get("missing", {})
    if missing:
        yield "            missing: " + ", ".join(
            f"{n:,} {reason}" for reason, n in missing.items()
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
    yield f"tables      {_bytes(facts['bytes'])} on disk"
    for name, row in sorted(facts["tables"].items(), key=lambda item: -item[1]["bytes"]):
        live = f", {row['live']} live" if row["live"] else ""
        rows = "" if row["rows"] is None else f"{row['rows']:,} rows"
        yield (f"  {name:<13}{rows:>16} {_bytes(row['bytes']):>10}  {row['shards']} shards{live}")


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


# -- show ---------------------------------------------------------------------------------


def _sequence_row(sequence: Sequence) -> dict[str, Any]:
    versions = sequence.weight_version
    found = sorted({int(v) for v in versions.values[versions.valid]})
    return {
        "id": sequence.id,
        "key": sequence.key.text,
        "group": sequence.info["group"],
        "external": sequence.info["external"],
        "prompt_len": sequence.prompt_len,
        "length": sequence.length,
        "finish": sequence.finish,
        "origin": sequence.info["origin"],
        "weight_versions": found,
    }


def _list_lines(tape: Tape, rows: list[dict[str, Any]]) -> Iterator[str]:
    width = max([len(r["id"]) for r in rows] + [8])
    yield f"{'sequence':<{width}} {'finish':<7} {'prompt':>7} {'response':>8} {'version':>8}  group"
    for row in rows:
        yield (
            f"{row['id']:<{width}} {row['finish']:<7} {row['prompt_len']:>7,} "
            f"{max(0, row['length'] - row['prompt_len']):>8,} "
            f"{_ranges(row['weight_versions']) or '-':>8}  {row['group'] or '-'}"
        )
    yield f"{len(rows):,} sequences in {tape.place}"


def _position_lines(sequence: Sequence, columns: dict[str, Any], routes: str) -> Iterator[str]:
    row = _sequence_row(sequence)
    yield (
        f"{row['id']}: {row['prompt_len']:,} prompt + "
        f"{max(0, row['length'] - row['prompt_len']):,} response tokens, {row['finish']}"
    )
    if row["external"]:
        yield f"request {row['external']}"
    yield f"group {row['group'] or '-'}, weight version {_ranges(row['weight_versions']) or '-'}"
    if row["origin"]:
        yield f"replays {row['origin']}"
    spans = _merged(sequence.semantics)
    for start, end, text in spans[:4]:
        yield f"logprobs {start}:{end}: {text}"
    if len(spans) > 4:
        yield f"logprobs: {len(spans) - 4} more spans, see --json"
    names = [n for n in ("processed", "scaled", "raw") if n in columns]
    head = f"{'pos':>6} {'token':>7} m"
    head += "".join(f" {name:>10}" for name in names)
    yield head + (f" {'kept':>6}" if "support" in columns else "") + f" {'step':>6} {'ver':>3}"
    lines = _RouteLines(columns["routes"], routes)
    for i, position in enumerate(columns["position"]):
        line = f"{position:>6} {_cell(columns['token'], i):>7} {_mark(columns['loss_mask'], i)}"
        line += "".join(f" {_float(columns[name], i):>10}" for name in names)
        if "support" in columns:
            kept = columns["support"][i]
            line += f" {'-' if kept is None else kept:>6}"
        yield f"{line} {_cell(columns['step'], i):>6} {_cell(columns['weight_version'], i):>3}"
        yield from lines.at(i)


class _RouteLines:
    """The experts of a position as indented lines."""

    def __init__(self, routes: dict[str, Any], wanted: str) -> None:
        self._routes = routes if wanted != "none" else {}
        self._fit = wanted == "fit"
        self._layers: set[int] | None = None
        if wanted not in ("fit", "all", "none"):
            try:
                self._layers = {int(layer) for layer in wanted.split(",")}
            except ValueError:
                raise UsageError(
                    f"--routes {wanted}: no such layers", hint="3,7 or all or none"
                ) from None

    def at(self, index: int) -> Iterator[str]:
        """Lines of the position with an index."""
        for role, found in self._routes.items():
            parts = [
                f"{layer}:{','.join(map(str, ids))}" if ids is not None else f"{layer}:-"
                for layer, ids in zip(found["layers"], found["ids"][index], strict=True)
                if self._layers is None or layer in self._layers
            ]
            if all(part.endswith(":-") for part in parts):
                continue
            label = "       " if role == "used" else "  live "
            lines = _wrap("  ".join(parts), _WIDTH - len(label), separator="  ")
            if self._fit and len(lines) > 1:
                shown = _wrap("  ".join(parts), _WIDTH - len(label) - 14, separator="  ")[0]
                rest = len(parts) - len(shown.split("  "))
                lines = [f"{shown}  +{rest} layers"]
            for line in lines:
                yield label + line


def _merged(semantics: list[tuple[int, int, dict[str, Any]]]) -> list[tuple[int, int, str]]:
    """(start, end, text) with neighbours that mean the same in one."""
    out: list[tuple[int, int, str]] = []
    for start, n, meaning in semantics:
        text = _meaning(meaning)
        if out and out[-1][1] == start and out[-1][2] == text:
            out[-1] = out[-1][0], start + n, text
        else:
            out.append((start, start + n, text))
    return out


def _meaning(meaning: dict[str, Any]) -> str:
    temperature = meaning["temperature"]
    parts = [f"T={'unknown' if temperature is None else format(temperature, 'g')}"]
    for name in ("edits", "truncation"):
        parts += [f"{name} unknown"] if meaning[name] is None else meaning[name]
    parts += [f"{meaning['vocab_size']} logits"] if meaning["vocab_size"] else []
    parts += [str(meaning[name]) for name in ("dtype", "source") if meaning[name]]
    return ", ".join(parts)


def _cell(column: Any, i: int) -> str:
    return str(column.values[i]) if column.valid[i] else "-"


def _mark(column: Any, i: int) -> str:
    return ("x" if column.values[i] else ".") if column.valid[i] else "-"


def _float(column: Any, i: int) -> str:
    if not column.valid[i]:
        return "-"
    value = jsonable(column.values[i])
    return value if isinstance(value, str) else f"{value:.6f}"


def _ranges(numbers: list[int]) -> str:
    """1,2,3,7 as 1-3,7."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _wrap(text: str, width: int, *, separator: str = ", ") -> list[str]:
    lines: list[str] = []
    for part in text.split(separator) if text else []:
        if lines and len(lines[-1]) + len(separator) + len(part) <= width:
            lines[-1] += separator + part
        else:
            lines.append(part)
    return lines


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


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
