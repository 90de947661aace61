"""`rolltape fsck` and `rolltape compact`: checking, repairing and rewriting a tape."""

from __future__ import annotations

import dataclasses
import json
import shlex

import click

from rolltape.store.cli import storage_option
from rolltape.store.compact import ENCODINGS, compact
from rolltape.store.fsck import Checked, fsck
from rolltape.store.jsonable import jsonable


@click.command("fsck", short_help="Check every byte of a tape; repair it.")
@click.argument("tape", metavar="TAPE")
@click.option(
    "--repair",
    is_flag=True,
    help="Finish what dead writers left, set damaged shards aside and keep their intact rows, "
    "record what is lost as a gap, seal, write the index.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@storage_option
def fsck_command(
    tape: str, repair: bool, as_json: bool, storage_option: tuple[tuple[str, str], ...]
) -> int:
    """Check TAPE: every shard against its hash, every batch, every sequence.

    Exit status: 0 if nothing is damaged (any more), 1 if something is, 2 if it is not a tape.
    """
    checked = fsck(tape, repair=repair, storage_options=dict(storage_option))
    if as_json:
        facts = {**dataclasses.asdict(checked), "clean": checked.clean}
        click.echo(json.dumps(jsonable(facts), indent=1, allow_nan=False))
        return 0 if checked.sound else 1
    for finding in checked.findings:
        done = f" -- {finding.repair}" if finding.repaired else ""
        click.echo(f"{finding.code:<9} {finding.where}: {finding.text}{done}")
    for problem in checked.problems:
        click.echo(f"PROBLEM   {problem}")
    for note in checked.notes:
        click.echo(f"note      {note}")
    for name in checked.live:
        click.echo(f"live      {name}: a process is writing it")
    click.echo(
        f"{checked.shards} shards, {checked.bytes:,} bytes, {checked.sequences:,} sequences: "
        + _verdict(checked)
    )
    if any(f.repair and not f.repaired for f in checked.findings):
        click.echo(f"next: rolltape fsck --repair {shlex.quote(tape)}")
    return 0 if checked.sound else 1


def _verdict(checked: Checked) -> str:
    counts = ((len(checked.findings), "finding"), (len(checked.problems), "problem"))
    found = ", ".join(f"{n} {word}{'s' if n > 1 else ''}" for n, word in counts if n)
    if not checked.findings:
        return f"no damage, {found}" if found else "clean"
    return f"{found}, all repaired" if checked.sound else found


@click.command("compact", short_help="A compact copy of a sealed tape.")
@click.argument("tape", metavar="TAPE")
@click.option(
    "-o",
    "--output",
    "--out",
    "out",
    required=True,
    metavar="TAPE2",
    help="The copy; must not exist.",
)
@click.option(
    "--routes",
    type=click.Choice(ENCODINGS),
    default="packed",
    show_default=True,
    help="packed is smallest; plain decodes several times faster.",
)
@click.option(
    "--sets",
    is_flag=True,
    help="Give up the slot order of experts (and combine weights): the set is all that an R3 "
    "mask needs.",
)
@click.option("--no-check", is_flag=True, help="Do not read both tapes again to compare them.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@storage_option
def compact_command(
    tape: str,
    out: str,
    routes: str,
    sets: bool,
    no_check: bool,
    as_json: bool,
    storage_option: tuple[tuple[str, str], ...],
) -> int:
    """Write a compact copy of TAPE: a row a sequence, routes and kept sets packed.

    Every column of every sequence is compared with TAPE afterwards. TAPE stays as it is.
    """
    done = compact(
        tape,
        out,
        routes=routes,
        sets=sets,
        check=not no_check,
        storage_options=dict(storage_option),
    )
    if as_json:
        click.echo(json.dumps(jsonable(dataclasses.asdict(done)), indent=1, allow_nan=False))
        return 0
    ratio = done.after / done.before if done.before else 1.0
    click.echo(
        f"{done.sequences:,} sequences: {done.before:,} bytes before, {done.after:,} after "
        f"({ratio:.3f})"
    )
    if done.route_rows:
        each = done.route_bytes / done.route_rows
        click.echo(f"routes: {done.route_bytes:,} bytes, {each:.3f} per (position, layer)")
    if done.checked:
        but = " but the slot order of experts and combine weights" if sets else ""
        click.echo(f"compared: every column of every sequence{but} is the same")
    return 0
