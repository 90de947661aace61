"""`rolltape doctor`: what a recording will hold in this environment."""

from __future__ import annotations

import json

import click

from rolltape.recorder.doctor import ADAPTERS, examine, lines


@click.command()
@click.option(
    "--engine",
    "engines",
    type=click.Choice(sorted(ADAPTERS)),
    multiple=True,
    help="Look only at this library; may be given several times.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(*, engines: tuple[str, ...], as_json: bool) -> int:
    """Say what would be recorded here, and what not and why.

    For every engine that is installed: its version, the hook targets that it has and what is
    missing without the others; and whether the recorder gets into the processes of a job. Each
    engine is imported in a process of its own. Nothing is run or changed.

    Exits with 0 if all targets bind, 1 if some do not, 3 if no engine is installed.
    """
    report = examine(engines)
    if as_json:
        click.echo(json.dumps(report.as_json(), indent=1))
    else:
        for line in lines(report):
            click.echo(line)
    return report.status
