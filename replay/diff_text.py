"""A diff and a replay as text for people: 80 columns, the verdict first, the next step last."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rolltape.store.places import unused

_STYLE = {"identical": "bold green", "within-noise": "bold green", "divergent": "bold red"}
_LAYERS_SHOWN = 16
_OF_A_KIND = 3


def print_diff(report: dict[str, Any], a: Path, b: Path, out: Path | None) -> None:
    """Print the summary of a diff.

    Args:
        report: what `diff_tapes` returns.
        a: path of the reference tape.
        b: path of the other.
        out: where the report was written, if it was.
    """
    console = Console(highlight=False, soft_wrap=True)
    verdict = report["verdict"]
    console.print(f"[{_STYLE.get(verdict, 'bold yellow')}]{verdict}[/]: {report['reason']}")
    console.print(_line_of_counts(report), markup=False)
    if verdict == "identical":  # no number of it would be anything but 0
        _print_identical(console, report)
        return
    if report["tokens_compared"]:
        console.print(_logprob_table(report))
        console.print(_worst(report), markup=False)
        groups = _groups(report)
        if groups:
            console.print(groups, markup=False)
    if report["non_finite"]:
        console.print(_non_finite(report["non_finite_detail"]), markup=False)
    if report["routing"]:
        _print_routing(console, report["routing"])
    if report["activations"]:
        _print_activations(console, report["activations"])
    if report["noise"] and report["noise"]["logprobs"]:
        console.print(_noise(report["noise"]), markup=False)
    _print_problems(console, "identity", report["identity"])
    _print_problems(console, "note", report["warnings"])
    for what, reason in report["not_compared"].items():
        console.print(f"not compared: {what}: {reason}", markup=False)
    if verdict != "within-noise" or out is not None:
        for command in _next(report, a, b, out):
            console.print(f"next: {command}", markup=False)


def _print_identical(console: Console, report: dict[str, Any]) -> None:
    """What a reader of `identical` has to know: what it does not cover."""
    if report["activations"]:
        for line in _front(report["activations"]):
            console.print(line, markup=False)
    _print_problems(console, "identity", report["identity"])
    _print_problems(console, "note", report["warnings"])
    for what, reason in report["not_compared"].items():
        if what != "activations":  # asked for they are there, else the verdict is another
            console.print(f"not compared: {what}: {reason}", markup=False)


def print_replay(summary: dict[str, Any], tape: Path, output: Path) -> None:
    """Print the summary of a replay."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{output}: {summary['tokens']:,} tokens of {summary['sequences']:,} sequences scored "
        f"in {summary['seconds']:.1f} s",
        markup=False,
    )
    changed = ", ".join(f"{key}={value}" for key, value in summary["switches"].items())
    console.print(f"model {summary['model']}; {changed}; {summary['layout']}", markup=False)
    for name in ("self_test", "forced"):
        if isinstance(summary.get(name), dict):
            text = ", ".join(f"{key} {value}" for key, value in summary[name].items())
            console.print(f"{name.replace('_', '-')}: {text}", markup=False)
    for warning in summary["warnings"]:
        console.print(f"warning: {warning}", markup=False)
    command = _command("diff", tape, output, "-o", _report_of(output))
    console.print(f"next: {command}", markup=False)


def _line_of_counts(report: dict[str, Any]) -> str:
    compared, tokens = report["compared"], report["tokens"]
    kinds = ("logprobs", "routes", "supports", "activations")
    parts = [f"{compared[k]:,} {k}" for k in kinds if compared[k]]
    if compared["logprobs"]:
        names = [report["column"], *report["by_semantics"]]
        parts[0] += f" ({', '.join(n for n in names if n)})"
    counts = [f"{n:,} {name.replace('_', ' ')}" for name, n in tokens.items() if n]
    what = ", ".join(parts) or "nothing"
    line = f"compared: {what} in {compared['sequences']:,} sequences"
    return f"{line}\ntokens: {', '.join(counts)}" if counts else line


def _logprob_table(report: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, title=_meaning(report), title_justify="left")
    table.add_column("d = b - a, nats")
    for name in ("tokens", "mean |d|", "p99 |d|", "max |d|", "k3", "ratio>2", "bitwise"):
        table.add_column(name, justify="right")
    rows = [(report["column"], report)]
    if len(report["by_position"]) > 1:
        rows += [(f"  pos {name}", row) for name, row in report["by_position"].items()]
    if len(report["by_version"]) > 1:
        rows += [(f"  version {name}", row) for name, row in report["by_version"].items()]
    for name, row in [*rows, *report["by_semantics"].items()]:
        table.add_row(
            name,
            f"{row['tokens_compared']:,}",
            *(_number(row[k]) for k in ("mean_abs", "p99_abs", "max_abs", "k3")),
            _percent(row["frac_ratio_gt_2"]),
            _percent(row["frac_bitwise"]),
        )
    return table


def _meaning(report: dict[str, Any]) -> str:
    spans = report["semantics"]["spans"]
    if len(spans) != 1 or report["column"] == "raw":
        return ""
    meaning = spans[0]["a"]
    parts = [f"T={meaning['temperature']:g}"] if meaning["temperature"] is not None else []
    parts += meaning["edits"] or []
    if report["column"] == "processed":
        parts += meaning["truncation"] or []
    return f"{report['column']}: {', '.join(parts)}"


def _worst(report: dict[str, Any]) -> str:
    sums = f"k1 {_number(report['k1'])}, ESS {_percent(report['ess'])}"
    if not report["max_abs"]:
        return sums
    at, size = report["max_at"], _number(report["max_abs"])
    return f"{sums}; worst token: {at['sequence']} position {at['position']}, |d| {size}"


def _groups(report: dict[str, Any]) -> str | None:
    """Whether few prompts carry the difference."""
    sums = {n: r["mean_abs"] * r["tokens_compared"] for n, r in report["by_group"].items()}
    total = sum(sums.values())
    if len(sums) < 2 or not total:
        return None
    carried, needed = 0.0, []
    for name in sorted(sums, key=lambda n: -sums[n]):
        needed.append(name)
        carried += sums[name]
        if carried >= 0.8 * total:
            break
    names = ", ".join(needed[:3]) + (", ..." if len(needed) > 3 else "")
    return f"{len(needed)} of {len(sums)} prompts carry 80% of sum |d|: {names}"


def _non_finite(detail: dict[str, Any]) -> str:
    parts = [
        f"{count:,} {name} in {side}"
        for side in ("a", "b")
        for name, count in detail[side].items()
        if count
    ]
    first = detail["where"][0]
    return (
        f"not finite: {', '.join(parts)}; first at {first['sequence']} position {first['position']}"
    )


def _print_routing(console: Console, routing: dict[str, Any]) -> None:
    console.print(
        f"routing: {routing['disagree']:,} of {routing['decisions']:,} decisions disagree "
        f"({_percent(routing['frac_disagree'])}), in {routing['tokens_any']:,} of "
        f"{routing['tokens']:,} tokens; a {routing['a_role']}, b {routing['b_role']}",
        markup=False,
    )
    if routing["used"]:
        used = routing["used"]
        console.print(
            f"routes used: {used['equal']:,} of {used['decisions']:,} equal", markup=False
        )
    table = Table(box=None, pad_edge=False)
    margins = ("margin: flips", "(max)", "others")
    for name in ("layer", "disagree", "", "order", "top-1", "weight L1", *margins):
        table.add_column(name, justify="right")
    rows = routing["per_layer"]
    shown = rows
    if len(rows) > _LAYERS_SHOWN:
        worst = sorted(rows, key=lambda r: -r["disagree"])[:_LAYERS_SHOWN]
        shown = sorted(worst, key=lambda r: r["layer"])
    for row in shown:
        table.add_row(
            str(row["layer"]),
            f"{row['disagree']:,}",
            _percent(row["frac_disagree"]),
            f"{row['order_only']:,}",
            "-" if row["top1_disagree"] is None else f"{row['top1_disagree']:,}",
            *(
                _number(row[k])
                for k in ("weight_l1", "flip_margin_mean", "flip_margin_max", "agree_margin_mean")
            ),
        )
    console.print(table)
    known, decisions = routing["top1_compared"], routing["decisions"]
    if not known:
        console.print("top-1: not known (no weights)")
    elif known < decisions:
        console.print(f"top-1: of the {known:,} decisions with weights on both sides")
    if len(shown) < len(rows):
        console.print(f"({len(rows) - len(shown)} layers that disagree less are not shown)")


def _print_activations(console: Console, activations: dict[str, Any]) -> None:
    if activations["verdict"] == "not-run":
        hint = activations["hint"]
        console.print(f"layers: not-run: {activations['reason']}; record with {hint}", markup=False)
        return
    for line in _front(activations):
        console.print(line, markup=False)
    table = Table(box=None, pad_edge=False)
    for name in ("site", "positions", "bitwise", "max |b-a|", "rel L2 mean", "(max)", "cosine min"):
        table.add_column(name, justify="left" if name == "site" else "right")
    for row in activations["sites"]:
        table.add_row(
            row["site"],
            f"{row['positions']:,}",
            _percent(row["equal"] / row["positions"]),
            *(_number(row[k]) for k in ("max_abs", "rel_l2_mean", "rel_l2_max")),
            "-" if row["cosine_min"] is None else f"{row['cosine_min']:.6f}",
        )
    console.print(table)


def _front(activations: dict[str, Any]) -> list[str]:
    """The verdict on the sites, and where they part first."""
    lines = [f"layers: {activations['verdict']}: {activations['reason']}"]
    front, earliest = activations["front"], activations["earliest"]
    if front is not None:
        lines.append(f"front: {_at(front)}")
        if earliest != front:
            lines.append(f"earliest position: {_at(earliest)}")
    floor = activations["floor"]
    if floor is not None:
        lines.append(
            f"noise floor: {'; '.join(floor['executions'])}; {floor['sequences']:,} sequences, "
            f"{floor['positions']:,} positions a site, times {floor['margin']:g}"
        )
    elif front is not None:
        lines.append("no noise floor (--floor): every bit counts")
    return lines


def _noise(noise: dict[str, Any]) -> str:
    columns = [
        f"{name} |d| {_number(found['max'])} over {found['tokens']:,} tokens"
        for name, found in noise["logprobs"].items()
    ]
    return f"noise floor: {', '.join(columns)}, times {noise['margin']:g}"


def _at(place: dict[str, Any]) -> str:
    numbers = [f"rel L2 {_number(place['rel_l2'])}"]
    if place["max_abs"] is not None:
        numbers.append(f"max |b-a| {_number(place['max_abs'])} in column {place['column']}")
    else:
        numbers.append("from sketches")
    if place["non_finite"]:
        numbers.append(f"{place['non_finite']:,} values not finite")
    if place["threshold"] is not None:
        numbers.append(f"noise up to {_number(place['threshold'])}")
    where = f"{place['site']} of {place['sequence']} at position {place['position']}"
    return f"{where}: {', '.join(numbers)}"


def _print_problems(console: Console, label: str, problems: list[dict[str, Any]]) -> None:
    kinds = dict.fromkeys(p["kind"] for p in problems)
    for kind in kinds:
        found = [p for p in problems if p["kind"] == kind]
        for problem in found[:_OF_A_KIND]:
            console.print(f"{label}: {problem['message']}", markup=False)
        if len(found) > _OF_A_KIND:
            more = sum(p.get("more", 1) for p in found[_OF_A_KIND:])
            console.print(f"{label}: {more} more of this kind, see --json", markup=False)


def _next(report: dict[str, Any], a: Path, b: Path, out: Path | None) -> list[str]:
    """Commands that can be run as they stand."""
    if out is not None:
        return [_command("view", a, b, out)]
    if report["verdict"] == "not-run":
        return [_command("info", a), _command("info", b)]
    scoring = ("--scoring", report["scoring"]) if report["scoring"] else ()
    whole = _command("diff", a, b, *scoring, "-o", _report_of(b))
    if report["verdict"] == "divergent" and report["max_at"] and report["max_abs"]:
        at = report["max_at"]
        span = f"{max(0, at['position'] - 5)}:{at['position'] + 6}"
        return [f"{_command('show', a, at['sequence'])} --tokens {span}", whole]
    return [whole]


def _report_of(tape: Path) -> Path:
    """Where a report on a tape can be written: nothing is there yet."""
    return unused(tape.with_name(tape.name + ".report"))


def _command(name: str, *arguments: object) -> str:
    return shlex.join(["rolltape", name, *map(str, arguments)])


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, str) else f"{value:.3g}"


def _percent(value: float | None) -> str:
    if value is None:
        return "-"
    text = f"{value:.1%}"
    # 0.0% and 100.0% are said only when they are exact
    if text == "0.0%" and value > 0:
        return "<0.1%"
    return ">99.9%" if text == "100.0%" and value < 1 else text
