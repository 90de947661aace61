"""What the determinism suite prints: a table for people, JSON, and JUnit XML for CI."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rolltape.replay.verify.cases import CaseResult, Report

_STYLES = {"passed": "green", "failed": "bold red", "not-run": "yellow"}
#: Characters that XML 1.0 has no way to write.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def summary(case: CaseResult) -> str:
    """The first token and the first site of a case that failed; else the reason."""
    if case.first is None or case.first.first is None:
        return case.reason
    lines = [f"{case.first.variant}: {place_of(case.first.shown)}", f"site: {site_of(case)}"]
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
    """A difference: what, where, and both values as hex digits."""
    what = "" if found["what"] == "raw" else f"{found['what']} of layer {found['layer']}, "
    values = " -> ".join(
        "missing" if value is None else str(value["hex"] or value["decimal"])
        for value in (found["recorded"], found["found"])
    )
    ulp = f" ({found['ulp']:,} ulp)" if found["ulp"] is not None else ""
    place = f"{found['sequence']} position {found['position']} step {found['step']}"
    return f"{what}{place}, {values}{ulp}"


def site_of(case: CaseResult) -> str:
    """The first differing site, or why it is not known."""
    site = case.site
    if site is None:
        return "not looked for"
    if "site" not in site:
        return str(site["reason"])
    place = f"{site['sequence']} position {site['position']} step {site['step']}"
    return f"{site['site']}, {place}"


def print_report(report: Report, console: Console | None = None) -> None:
    """Print the table."""
    console = console or Console(highlight=False)
    facts = report.facts
    console.print(
        Text(
            f"{facts['engine']} {facts['model']}: {facts['dtype']} on {facts['device']}, "
            f"{facts['prompts']} prompts, {facts['tokens']} tokens each, seed {facts['seed']}"
        )
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("case", "verdict", "first difference"):
        table.add_column(name, no_wrap=name != "first difference")
    for case in report.cases:
        verdict = Text(case.verdict.upper() if case.verdict == "failed" else case.verdict)
        verdict.stylize(_STYLES[case.verdict])
        table.add_row(Text(case.case), verdict, Text(summary(case)))
    console.print(table)
    counts = [
        f"{sum(case.verdict == verdict for case in report.cases)} {verdict}" for verdict in _STYLES
    ]
    console.print(Text(", ".join(counts)))


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
