"""A re-execution as text for people: the verdict, the first difference, counts, what is next."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from rich.console import Console

_STYLE = {"identical": "bold green", "divergent": "bold red", "not-reproduced": "bold red"}
_MOST_LINES = 4


def print_reexecution(summary: dict[str, Any], tape: Path, output: Path) -> None:
    """Print what `rolltape.replay.reexecute.reexecute` returns."""
    console = Console(highlight=False, soft_wrap=True)

    def say(text: str) -> None:
        console.print(text, markup=False)

    verdict = summary["verdict"]
    console.print(f"[{_STYLE.get(verdict, 'bold yellow')}]{verdict}[/]: ", end="")
    say(summary["reason"])
    if summary["first"]:
        for line in _first(summary["first"]):
            say(line)
    compared, differ = summary["compared"], summary["differ"]
    parts = [f"{n:,} of {compared.get(name, n):,} {name}" for name, n in differ.items()]
    if parts:
        say(f"differ: {', '.join(parts)}; in {summary['sequences_differ']:,} sequences")
    counts = ", ".join(f"{n:,} {name}" for name, n in compared.items() if n)
    say(f"compared: {counts or 'nothing'}; in {summary['sequences']:,} sequences")
    for entry in summary["not_compared"][:_MOST_LINES]:
        say(f"not compared: {entry['what']} of {entry['sequences']:,} sequences: {entry['reason']}")
    if len(summary["not_compared"]) > _MOST_LINES:
        say(f"not compared: {len(summary['not_compared']) - _MOST_LINES} more, see --json")
    for problem in summary["executed"][1:]:
        say(f"no evidence: {problem}")
    if summary["tape"] is None:
        say(f"next: {_next(summary, tape, output)}")
        return
    say(f"self-test: {_tested(summary['self_test'])}")
    for line in [*summary["conditions"], *summary["warnings"]]:
        say(f"note: {line}")
    switches = ", ".join(f"{key}={value}" for key, value in summary["switches"].items())
    say(
        f"{output}: {summary['forwards']:,} forwards of {summary['model']} in "
        f"{summary['seconds']:.1f} s; {switches}"
    )
    say(f"next: {_next(summary, tape, output)}")


def _first(first: dict[str, Any]) -> list[str]:
    where = [f"step {first['step']}"]
    if first["sequence"] is not None:
        where.append(first["sequence"])
    if first["position"] is not None:
        where.append(f"position {first['position']}")
    if first["layer"] is not None:
        where.append(f"layer {first['layer']}")
    ulp = f"  {first['ulp']:,} ulp" if first["ulp"] is not None else ""
    recorded, found = _value(first["recorded"]), _value(first["found"])
    return [
        f"first difference: {', '.join(where)}: {first['what']}",
        f"  recorded     {recorded}",
        f"  re-executed  {found}{ulp}",
    ]


def _value(value: dict[str, str] | None) -> str:
    if value is None:
        return "not there"
    return f"{value['decimal']:<16} {value['hex']}".rstrip()


def _tested(test: dict[str, Any]) -> str:
    size = f" ({test['steps']} steps of {test['rows']} rows)" if "steps" in test else ""
    if test.get("neutral") and test.get("control"):
        return f"forcing is neutral, a changed prompt changes the values{size}"
    return f"{test.get('reason', 'not run')}{size}"


def _next(summary: dict[str, Any], tape: Path, output: Path) -> str:
    first = summary["first"]
    if summary["verdict"] in ("inconclusive", "not-run"):
        return _command("info", tape)
    if first and first["sequence"] is not None and first["position"] is not None:
        at = first["position"]
        span = f"{max(0, at - 5)}:{at + 6}"
        show = _command("show", tape, first["sequence"], "--tokens", span)
        return f"{show}; {_command('diff', tape, output)}"
    return _command("diff", tape, output)


def _command(name: str, *arguments: object) -> str:
    return shlex.join(["rolltape", name, *map(str, arguments)])
