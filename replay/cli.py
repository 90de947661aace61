"""`rolltape replay` and `rolltape diff`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rolltape.replay.switches import CHOICES
from rolltape.store.errors import UsageError

if TYPE_CHECKING:
    from rolltape.replay.batches import Layout

#: Executors and modes that exist; the grammar has more.
EXECUTORS = ("transformers",)
MODES = ("score",)

#: For the help: every switch with its values, the default first.
_SWITCHES = "; ".join(f"{key}={'|'.join(values)}" for key, values in CHOICES.items())

_TORCH_STACK = ("safetensors", "torch", "transformers")


@click.command(short_help="Score the tokens of a tape again, as a trainer does.")
@click.argument("tape", metavar="TAPE", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="TAPE2",
    type=click.Path(path_type=Path),
    help="Folder of the new tape; must not exist or be empty.",
)
@click.option("--on", "executor", default="transformers", show_default=True, metavar="EXECUTOR",
              help=f"What runs the tokens: {', '.join(EXECUTORS)}.")  # fmt: skip
@click.option("--mode", default="score", show_default=True, metavar="MODE",
              help="score: one teacher-forced forward, as a trainer does it.")  # fmt: skip
@click.option("--switch", "switches", multiple=True, metavar="KEY=VALUE",
              help=f"One controlled change; may be repeated. {_SWITCHES}")  # fmt: skip
@click.option("--model", metavar="PATH", help="Model to run; by default the one the tape names.")
@click.option("--device", metavar="D", help="torch device; by default CUDA if there is one.")
@click.option(
    "--tokens-per-batch",
    type=click.IntRange(min=1),
    default=8192,
    show_default=True,
    metavar="N",
    help="Tokens of one forward, padding included.",
)
@click.option("--layout", type=click.Choice(("padded", "packed")), default="padded",
              help="Rows padded to one length, or packed into one row.")  # fmt: skip
@click.option("--layers", type=click.IntRange(min=0), default=0, metavar="N",
              help="Record the output of every decoder layer for N sequences.")  # fmt: skip
@click.option("--sequences", metavar="ID,ID",
              help="Sequences to record layer outputs for, instead of the first N.")  # fmt: skip
@click.option("--top-logprobs", type=click.IntRange(min=0), default=0, metavar="K",
              help="Record the K most probable tokens of every position scored, with the mass of "
              "all others.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON object.")
def replay(
    tape: Path,
    output: Path,
    executor: str,
    mode: str,
    switches: tuple[str, ...],
    model: str | None,
    device: str | None,
    tokens_per_batch: int,
    layout: Layout,
    layers: int,
    sequences: str | None,
    top_logprobs: int,
    as_json: bool,
) -> int:
    """Run the tokens of TAPE again and record that as TAPE2, whose parent TAPE is."""
    if executor not in EXECUTORS:
        raise UsageError(f"--on {executor}: no such executor", hint=" | ".join(EXECUTORS))
    if mode not in MODES:
        raise UsageError(f"--mode {mode}: no such mode", hint=" | ".join(MODES))
    try:
        from rolltape.replay.score import replay as run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _TORCH_STACK:
            raise
        raise UsageError(
            f"--on {executor} needs {error.name}", hint="pip install 'rolltape[replay]'"
        ) from error
    summary = run(
        tape,
        output,
        switches=switches,
        model=model,
        device=device,
        tokens_per_batch=tokens_per_batch,
        layout=layout,
        layers=layers,
        sequences=_names(sequences),
        top_logprobs=top_logprobs,
    )
    if as_json:
        _print_json(summary)
    else:
        from rolltape.replay.diff_text import print_replay

        print_replay(summary, tape, output)
    return 0


@click.command(short_help="Compare two tapes token by token.")
@click.argument("a", metavar="TAPE", type=click.Path(path_type=Path))
@click.argument("b", metavar="TAPE2", type=click.Path(path_type=Path))
@click.option("-o", "--output", metavar="REPORT", type=click.Path(path_type=Path),
              help="Write a report folder too; must not exist or be empty.")  # fmt: skip
@click.option("--layers", is_flag=True, help="Compare recorded layer outputs too.")
@click.option("--sequences", metavar="ID,ID", help="Only these sequences, by their id in a tape.")
@click.option("--scoring", metavar="WORD",
              help="Of TAPE2 only what a trainer scored as WORD: old, current, reference. TAPE and "
                   "TAPE2 may be the same, which holds the rollouts and the trainer.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
def diff(
    a: Path,
    b: Path,
    output: Path | None,
    layers: bool,
    sequences: str | None,
    scoring: str | None,
    as_json: bool,
) -> int:
    """Compare two tapes token by token; d = log p of TAPE2 - log p of TAPE.

    Exit status: 0 identical, 1 divergent, 2 bad input, 3 inconclusive or not-run.
    """
    from rolltape.replay.diff import EXIT_STATUS, diff_tapes
    from rolltape.store.sequences import open_tape

    report = diff_tapes(
        open_tape(a),
        open_tape(b),
        layers=layers,
        sequences=_names(sequences),
        scoring=scoring,
        out=output,
    )
    if as_json:
        _print_json(report)
    else:
        from rolltape.replay.diff_text import print_diff

        print_diff(report, a, b, output)
    return EXIT_STATUS[report["verdict"]]


def _names(text: str | None) -> list[str] | None:
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UsageError("--sequences names no sequence", hint="--sequences ID,ID")
    return names


def _print_json(value: dict[str, Any]) -> None:
    from rolltape.store.jsonable import jsonable

    click.echo(json.dumps(jsonable(value), allow_nan=False, indent=1))
