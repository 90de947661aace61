"""What the determinism suite prints: a table for people, JSON, and JUnit XML for CI."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rich.console import Console
from rich.text import Text

from rolltape.replay.verify.cases import CaseResult, Report

_STYLES = {"passed": "green", "failed": "bold red", "not-run": "yellow"}
#: Characters that XML 1.0 has no way to write.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def summary(case: CaseResult) -> str:
    """The first token and the first site of a case that failed; else the reason."""
    if case.first is None or case.first.first is None:
        return case.reason
    where, values = _parts_of(case.first.shown)
    lines = [f"{case.first.variant}: {where}", values, f"site: {site_of(case)}"]
    if case.repeatable is False:
        lines.append(f"{case.first.variant} twice differs, too")
    return "\n".join(lines)


def details(case: CaseResult) -> str:
    """How much differs, the first value, the first token and the first site, a line each."""
    if case.first is None or case.first.first is None:
        return case.reason
    lines = [case.reason, f"first value: {place_of(case.first.first)}"]
    if case.first.token is not None:
        lines.append(f"first token: {place_of(case.first.token)}")
    return "\n".join([*lines, f"first site: {site_of(case)}"])


def place_of(found: Mapping[str, Any]) -> str:
    """A difference: what, where, how far apart, and both values as hex digits."""
    return ", ".join(_parts_of(found))


def _parts_of(found: Mapping[str, Any]) -> tuple[str, str]:
    """Where a difference is, and its values."""
    what = "" if found["what"] == "raw" else f"{found['what']} of layer {found['layer']}, "
    sides = found["recorded"], found["found"]
    values = " -> ".join(
        "missing" if value is None else str(value["hex"] or value["decimal"]) for value in sides
    )
    ulp = f" ({found['ulp']:,} ulp)" if found["ulp"] is not None else ""
    place = f"{found['sequence']} position {found['position']} step {found['step']}"
    return f"{what}{place}", f"{_delta(found)}{values}{ulp}"


def _delta(found: Mapping[str, Any]) -> str:
    """How far two logprobs are apart; empty for anything else, or where one is not there."""
    sides = [(found[side] or {}).get("decimal") for side in ("recorded", "found")]
    if found["what"] != "raw" or None in sides:
        return ""
    recorded, other = (float(str(side)) for side in sides)
    return f"|delta| {abs(other - recorded):.3g} nats, "


def site_of(case: CaseResult) -> str:
    """The first differing site, or why it is not known; ranks whose replicas disagree."""
    site = case.site
    if site is None:
        return "not looked for"
    replicas = f"; {site['replicas']}" if site.get("replicas") else ""
    if "site" not in site:
        return f"{site['reason']}{replicas}"
    place = f"{site['sequence']} position {site['position']} step {site['step']}"
    return f"{site['site']}, {place}{replicas}"


def print_report(
    report: Report, console: Console | None = None, *, command: Sequence[str] = ()
) -> None:
    """Print a case a line, the first difference below it, and what to run next.

    Args:
        report: of the suite.
        console: where to; by default standard output. Lines are not wrapped.
        command: arguments that run the suite again, without cases and dtype.
    """
    console = console or Console(highlight=False, soft_wrap=True)
    facts = report.facts
    console.print(
        Text(
            f"{facts['engine']} {facts['model']}: {facts['dtype']} on {facts['device']}, "
            f"{facts['prompts']} prompts, {facts['tokens']} tokens each, seed {facts['seed']}"
        )
    )
    console.print(Text(f"{'case':<16}{'verdict':<9}first difference"))
    for case in report.cases:
        first, *more = summary(case).split("\n")
        word = case.verdict.upper() if case.verdict == "failed" else case.verdict
        line = Text(f"{case.case:<16}").append(f"{word:<9}", _STYLES[case.verdict]).append(first)
        console.print(line)
        for text in more:
            console.print(Text(f"{'':<25}{text}"))
    counts = [
        f"{sum(case.verdict == verdict for case in report.cases)} {verdict}" for verdict in _STYLES
    ]
    console.print(Text(", ".join(counts)))
    following = _next(report, command)
    if following is not None:
        console.print(Text(f"next: {following}"))


def _next(report: Report, command: Sequence[str]) -> str | None:
    """What tells more of the cases that failed; None if none did."""
    failed = [case.case for case in report.cases if case.verdict == "failed"]
    if not failed or not command:
        return None
    cases = [word for name in failed for word in ("--case", name)]
    dtype = report.facts.get("dtype")
    if report.facts["engine"] == "transformers" and dtype != "float64":
        # rounding is gone there: what still fails is a different computation
        return shlex.join([*command, "--dtype", "float64", *cases])
    same = ["--dtype", str(dtype)] if dtype else []
    return shlex.join([*command, *same, *cases, "--json"])


def write_junit(report: Report, path: Path) -> None:
    """Write the report as JUnit XML."""
    facts = report.facts
    failed, skipped = (
        str(sum(case.verdict == verdict for case in report.cases))
        for verdict in ("failed", "not-run")
    )
    name = f"rolltape.verify.{facts['engine']}"
    counts = {"tests": str(len(report.cases)), "failures": failed, "errors": "0"}
    counts |= {"skipped": skipped, "time": f"{sum(c.seconds for c in report.cases):.3f}"}
    root = ElementTree.Element("testsuites", _clean(counts))
    suite = ElementTree.SubElement(root, "testsuite", _clean({"name": name, **counts}))
    properties = ElementTree.SubElement(suite, "properties")
    for key, value in facts.items():
        pair = {"name": str(key), "value": str(value)}
        ElementTree.SubElement(properties, "property", _clean(pair))
    for case in report.cases:
        fields = {"classname": name, "name": case.case, "time": f"{case.seconds:.3f}"}
        element = ElementTree.SubElement(suite, "testcase", _clean(fields))
        if case.verdict == "failed":
            told = {"message": case.reason, "type": "not-deterministic"}
            failure = ElementTree.SubElement(element, "failure", _clean(told))
            failure.text = _NOT_XML.sub("?", details(case))
        elif case.verdict == "not-run":
            ElementTree.SubElement(element, "skipped", _clean({"message": case.reason}))
    ElementTree.indent(root)
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _clean(values: Mapping[str, str]) -> dict[str, str]:
    return {key: _NOT_XML.sub("?", value) for key, value in values.items()}
