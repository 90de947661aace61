"""`rolltape replay` and `rolltape diff`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from rolltape.replay.switches import ALTERNATIVES, CHOICES, listed
from rolltape.store.errors import UsageError

if TYPE_CHECKING:
    from rolltape.replay.batches import Layout

#: Executors and modes that exist; the grammar has more.
EXECUTORS = ("transformers",)
REEXECUTORS = ("transformers", "vllm", "tensorrt_llm")
MODES = ("score", "re-execute")

#: For the help: every switch with its values, the default first.
_SWITCHES = "; ".join(f"{key}={listed(key)}" for key in CHOICES)
_OF_REEXECUTE = "; ".join(f"{key}={values}" for key, values in ALTERNATIVES.items())

#: Options of mode score alone.
_OF_SCORE = ("tokens_per_batch", "layout", "layers", "sequences", "sites", "top_logprobs")

_TORCH_STACK = ("safetensors", "torch", "transformers")


@click.command(short_help="Run the tokens of a tape again, as a trainer or as the engine did.")
@click.argument("tape", metavar="TAPE", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="TAPE2",
    type=click.Path(path_type=Path),
    help="Folder of the new tape; must not exist or be empty.",
)
@click.option("--on", "executor", default="transformers", metavar="EXECUTOR",
              help=f"What runs the tokens. score: {', '.join(EXECUTORS)} (default), or your model "
              f"as package.module:factory; re-execute: {', '.join(REEXECUTORS)}, by default what "
              "was recorded.")  # fmt: skip
@click.option("--mode", default="score", show_default=True, metavar="MODE",
              help="score: one teacher-forced forward, as a trainer does it. re-execute: the "
              "recorded batches again, step by step, and whether every bit agrees.")  # fmt: skip
@click.option("--switch", "switches", multiple=True, metavar="KEY=VALUE",
              help=f"One controlled change; may be repeated. score: {_SWITCHES}. "
              f"re-execute: {_OF_REEXECUTE}")  # fmt: skip
@click.option("--model", metavar="PATH", help="Model to run; by default the one the tape names.")
@click.option("--checkpoint", "checkpoints", multiple=True, metavar="VERSION=PATH",
              help="Where the weights of a version of the tape lie; may be repeated. They must "
              "have the digest that was recorded.")  # fmt: skip
@click.option("--foreign-pins", is_flag=True, help="re-execute on tensorrt_llm: take choices of "
              "kernels that another device or library made.")  # fmt: skip
@click.option("--device", metavar="D", help="torch device; by default CUDA if there is one, in "
              "re-execute what was recorded.")  # fmt: skip
@click.option(
    "--tokens-per-batch",
    type=click.IntRange(min=1),
    default=8192,
    show_default=True,
    metavar="N",
    help="score: tokens of one forward, padding included.",
)
@click.option("--layout", type=click.Choice(("padded", "packed")), default="padded",
              help="score: rows padded to one length, or packed into one row.")  # fmt: skip
@click.option("--layers", type=click.IntRange(min=0), default=0, metavar="N",
              help="score: record the output of every decoder layer for N sequences.")  # fmt: skip
@click.option("--sequences", metavar="ID,ID",
              help="Sequences to record layer outputs for, instead of the first N.")  # fmt: skip
@click.option("--sites", metavar="NAMES",
              help="score: record these tensors of those sequences instead of layer outputs: "
              "layers.*.out,logits.")  # fmt: skip
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
    checkpoints: tuple[str, ...],
    foreign_pins: bool,
    device: str | None,
    tokens_per_batch: int,
    layout: Layout,
    layers: int,
    sequences: str | None,
    sites: str | None,
    top_logprobs: int,
    as_json: bool,
) -> int:
    """Run the tokens of TAPE again and record that as TAPE2, whose parent TAPE is.

    Exit status of mode re-execute: 0 identical, 1 not-reproduced or (with a switch) divergent,
    2 bad input, 3 inconclusive or not-run.
    """
    if mode not in MODES:
        raise UsageError(f"--mode {mode}: no such mode", hint=" | ".join(MODES))
    if mode == "re-execute":
        options = {
            "switches": switches,
            "model": model,
            "checkpoints": checkpoints,
            "device": device,
            "foreign_pins": foreign_pins,
        }
        return _reexecute(tape, output, executor, options, as_json=as_json)
    if foreign_pins:
        raise UsageError("--foreign-pins is an option of mode re-execute", hint="leave it out")
    if executor not in EXECUTORS and ":" not in executor:
        hint = " | ".join((*EXECUTORS, "package.module:factory"))
        raise UsageError(f"--on {executor}: no such executor", hint=hint)
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
        on=executor,
        switches=switches,
        model=model,
        checkpoints=checkpoints,
        device=device,
        tokens_per_batch=tokens_per_batch,
        layout=layout,
        layers=layers,
        sequences=_names(sequences),
        sites=sites,
        top_logprobs=top_logprobs,
    )
    if summary["rank"]:
        return 0  # rank 0 writes the tape, and speaks
    if as_json:
        _print_json(summary)
    else:
        from rolltape.replay.diff_text import print_replay

        print_replay(summary, tape, output)
    return 0


def _reexecute(
    tape: Path,
    output: Path,
    executor: str,
    options: dict[str, Any],
    *,
    as_json: bool,
) -> int:
    context = click.get_current_context()
    given = context.get_parameter_source("executor") is not ParameterSource.DEFAULT
    for name in _OF_SCORE:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{option} is an option of mode score", hint="leave it out")
    try:
        from rolltape.replay.reexecute import reexecute
        from rolltape.replay.reproduction import EXIT_STATUS

        summary = reexecute(tape, output, on=executor if given else None, **options)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _TORCH_STACK:
            raise
        raise UsageError(
            f"--on {executor} needs {error.name}", hint="pip install 'rolltape[replay]'"
        ) from error
    if as_json:
        _print_json(summary)
    else:
        from rolltape.replay.reexecute_text import print_reexecution

        print_reexecution(summary, tape, output)
    return EXIT_STATUS[summary["verdict"]]


@click.command(short_help="Compare two tapes token by token.")
@click.argument("a", metavar="TAPE", type=click.Path(path_type=Path))
@click.argument("b", metavar="TAPE2", type=click.Path(path_type=Path))
@click.option("-o", "--output", metavar="REPORT", type=click.Path(path_type=Path),
              help="Write a report folder too; must not exist or be empty.")  # fmt: skip
@click.option("--layers", is_flag=True,
              help="Compare recorded tensors and sketches too: by site, and where they part "
              "first.")  # fmt: skip
@click.option("--floor", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
              help="Measured noise floor: differences up to it are within-noise.")  # fmt: skip
@click.option("--save-floor", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
              help="TAPE and TAPE2 should agree (the same model in other batches): write how far "
              "they do not as a noise floor.")  # fmt: skip
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
    floor: Path | None,
    save_floor: Path | None,
    sequences: str | None,
    scoring: str | None,
    as_json: bool,
) -> int:
    """Compare two tapes token by token; d = log p of TAPE2 - log p of TAPE.

    Exit status: 0 identical or within-noise, 1 divergent, 2 bad input, 3 inconclusive or not-run.
    """
    from rolltape.replay.diff import EXIT_STATUS, diff_tapes
    from rolltape.store.sequences import open_tape

    report = diff_tapes(
        open_tape(a),
        open_tape(b),
        layers=layers,
        floor=floor,
        save_floor=save_floor,
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
