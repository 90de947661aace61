"""`rolltape shrink`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import click

from rolltape.replay.switches import CHOICES
from rolltape.store.errors import UsageError
from rolltape.store.places import unused

_TORCH_STACK = ("safetensors", "torch", "transformers")


@click.command(short_help="The smallest part of a tape whose replay still differs.")
@click.argument("a", metavar="TAPE", type=click.Path(path_type=Path))
@click.argument("b", metavar="TAPE2", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, metavar="TAPE3", type=click.Path(path_type=Path),
              help="Folder of the new tape; must not exist or be empty.")  # fmt: skip
@click.option("--bound", type=float, metavar="D",
              help="score: nats that |d| has to reach; by default half the largest.")  # fmt: skip
@click.option("--device", metavar="D", help="torch device; by default CUDA if there is one.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as one JSON object.")
def shrink(
    a: Path, b: Path, output: Path, bound: float | None, device: str | None, as_json: bool
) -> int:
    """Find the fewest sequences and positions of TAPE that still differ from their replay.

    TAPE2 is what `rolltape replay` made of TAPE. Parts of TAPE are replayed again with the same
    model, switches and layout; the smallest that still differs is written as TAPE3. Of a
    re-execution that is one call of transformers or a run of vLLM, cut behind the step of the
    first difference; a scoring may be of any recording.

    Exit status: 0 TAPE3 was written, 2 bad input, 3 nothing differs, or not again.
    """
    try:
        from rolltape.replay.shrink import EXIT_STATUS
        from rolltape.replay.shrink import shrink as run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _TORCH_STACK:
            raise
        raise UsageError(
            f"shrink needs {error.name}", hint="pip install 'rolltape[replay]'"
        ) from error
    found = run(a, b, output, bound=bound, device=device)
    if as_json:
        from rolltape.store.jsonable import jsonable

        click.echo(json.dumps(jsonable(found), allow_nan=False, indent=1))
    else:
        _print(found, device)
    return EXIT_STATUS[found["verdict"]]


def _print(found: dict[str, Any], device: str | None) -> None:
    click.echo(f"{found['verdict']}: {found['reason']}")
    if found["tape"] is None:
        return
    tape = Path(found["tape"])
    command = ["rolltape", "replay", str(tape)]
    command += ["-o", str(unused(tape.with_name(tape.name + ".replay")))]
    command += ["--device", device] if device is not None else []
    (sequences, kept), (tokens, left) = found["sequences"], found["tokens"]
    click.echo(
        f"{found['tape']}: {kept} of {sequences:,} sequences, {left:,} of {tokens:,} tokens, after "
        f"{found['scorings']} runs in {found['seconds']:.1f} s"
    )
    if found.get("mode") == "re-execute":
        first = found["first"]
        click.echo(
            f"first difference: {first['what']} of {first['sequence']}, step {first['step']}, "
            f"position {first['position']}"
        )
        command += ["--mode", "re-execute", "--on", found["on"]]
        if found["switches"]["weights"] != "recorded":
            command += ["--switch", f"weights={found['switches']['weights']}"]
        for checkpoint in found["checkpoints"]:
            command += ["--checkpoint", checkpoint]
        click.echo(f"next: {shlex.join(command)}")
        return
    click.echo(
        f"largest |d| of {found['column']}: {found['largest']:.4g} at {found['sequence']}, "
        f"position {found['position']}; {found['largest_before']:.4g} in the whole tape"
    )
    command += ["--on", found["on"]]
    command += ["--model", found["model"]] if found["model"] else []
    for key, value in found["switches"].items():
        if value != CHOICES[key][0]:
            command += ["--switch", f"{key}={value}"]
    if found["layout"] != "padded":
        command += ["--layout", found["layout"]]
    if found["tokens_per_batch"] != 8192:
        command += ["--tokens-per-batch", str(found["tokens_per_batch"])]
    click.echo(f"next: {shlex.join(command)}")
