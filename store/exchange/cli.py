"""`rolltape export` and `rolltape import`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import click

from rolltape.store.exchange import (
    BLOCKS,
    DEFAULT_BLOCKS,
    FRAMEWORKS,
    Carried,
    Exported,
    Meaning,
    export_tape,
    import_dumps,
)
from rolltape.store.jsonable import jsonable

_OTHERS = [name for name in BLOCKS if name not in DEFAULT_BLOCKS]


@click.command("export", short_help="A tape as Parquet or JSONL.")
@click.argument("tape", metavar="TAPE")
@click.option(
    "-o",
    "--output",
    "--out",
    "out",
    required=True,
    type=click.Path(path_type=Path),
    help="New folder or file.",
)
@click.option(
    "--to",
    type=click.Choice(["parquet", "jsonl"]),
    required=True,
    help="A folder of Parquet files with all tables, or one file with a line a sequence.",
)
@click.option(
    "--sequences", metavar="ID,...", help="Only these, as `rolltape show TAPE` lists them."
)
@click.option(
    "--columns",
    metavar="NAME,...",
    help=f"Default: {','.join(DEFAULT_BLOCKS)}. Others: {','.join(_OTHERS)}; "
    "`default` and `all` stand for several.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def export(
    tape: str, out: Path, to: str, sequences: str | None, columns: str | None, as_json: bool
) -> int:
    """Write TAPE as Parquet or JSONL, one row a sequence, and say what was left out.

    Nothing is overwritten. Null is missing; NaN and infinities stay what they are (in JSON, text).
    """
    done = export_tape(
        tape,
        out,
        to=to,
        sequences=_split(sequences),
        columns=_split(columns),
    )
    if as_json:
        click.echo(json.dumps(jsonable({**dataclasses.asdict(done), "path": str(done.path)})))
    else:
        for line in _exported_lines(done):
            click.echo(line)
    return 0


@click.command("import", short_help="Rollout dumps of other frameworks as a tape.")
@click.argument(
    "files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "-o",
    "--output",
    "--out",
    "out",
    required=True,
    type=click.Path(path_type=Path),
    help="New folder.",
)
@click.option(
    "--from",
    "framework",
    type=click.Choice(FRAMEWORKS),
    required=True,
    help="What wrote the files.",
)
@click.option(
    "--semantics",
    type=click.Choice(["raw", "scaled", "processed"]),
    help="What the rollout logprobs are; no dump says it. Without it they stand in `processed` "
    "with everything about them unknown, and a diff refuses to compare them.",
)
@click.option("--temperature", type=float, help="That was applied to them.")
@click.option(
    "--edit", "edits", multiple=True, help="A logit edit, repetition_penalty=1.1; again for more."
)
@click.option("--truncation", multiple=True, help="A truncation, top_p=0.9; again for more.")
@click.option("--layers", help="Model layers that the columns of the routes are, 3:61 or 0,2,4.")
@click.option("--experts", type=click.IntRange(min=1), help="Experts a layer.")
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path),
    help="tokenizer.json to make ids of text (verl); they are marked as derived.",
)
@click.option("--model", help="Path or name of the model, noted in the tape.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def import_(
    files: tuple[Path, ...],
    out: Path,
    framework: str,
    semantics: str | None,
    temperature: float | None,
    edits: tuple[str, ...],
    truncation: tuple[str, ...],
    layers: str | None,
    experts: int | None,
    tokenizer: Path | None,
    model: str | None,
    as_json: bool,
) -> int:
    """Make a sealed tape of rollout dumps, and say exactly what was carried and what was not.

    Nothing in the files is run: a pickle that refers to anything but tensors, numpy arrays and
    plain values is refused.
    """
    carried = import_dumps(
        files,
        out,
        framework=framework,
        meaning=Meaning(semantics, temperature, edits, truncation),
        layers=layers,
        experts=experts,
        tokenizer=tokenizer,
        model=model,
    )
    if as_json:
        click.echo(json.dumps(jsonable({"path": str(out), **dataclasses.asdict(carried)})))
    else:
        for line in _carried_lines(out, carried):
            click.echo(line)
    return 0


def _split(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _exported_lines(done: Exported) -> Iterator[str]:
    yield f"{done.path}: {done.to}, {done.bytes:,} bytes"
    width = max(len(name) for name in done.rows)
    for name, rows in done.rows.items():
        yield f"  {name:<{width}}  {rows:,} rows"
    yield "not written"
    width = max(len(name) for name in done.left_out)
    for name, why in done.left_out.items():
        yield f"  {name:<{width}}  {why}"


def _carried_lines(out: Path, carried: Carried) -> Iterator[str]:
    yield f"{out}: sealed"
    width = max(len(name) for name in [*carried.kept, *carried.dropped])
    yield "carried"
    for name, entry in carried.kept.items():
        counts = f"{entry['sequences']:,} sequences, {entry['values']:,} values"
        yield f"  {name:<{width}}  {counts} -> {entry['into']}"
    if carried.dropped:
        yield "not carried"
    for name, reasons in carried.dropped.items():
        for why, count in reasons.items():
            yield f"  {name:<{width}}  {count:,} {why}"
    for note in carried.notes:
        yield f"note: {note}"
