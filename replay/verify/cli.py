"""`rolltape verify`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from rolltape.replay.verify.cases import CASES
from rolltape.store.errors import UsageError

_CASES = "\n".join(f"  {name:<15}{text}" for name, text in CASES.items())


@click.command(
    short_help="Check that an engine computes the same bits however it is run.",
    epilog=f"\b\nCases:\n{_CASES}",
)
@click.argument("model", metavar="MODEL")
@click.option("--engine", required=True, metavar="ENGINE", help="transformers | vllm")
@click.option("--case", "cases", multiple=True, metavar="NAME",
              help="Only this case, and run-to-run; may be repeated.")  # fmt: skip
@click.option("--prompts", type=click.IntRange(min=2), default=16, show_default=True, metavar="N",
              help="Sequences; the size of the whole batch.")  # fmt: skip
@click.option("--tokens", type=click.IntRange(min=2), default=32, show_default=True, metavar="N",
              help="Tokens sampled for each prompt.")  # fmt: skip
@click.option("--length", type=click.IntRange(min=2), metavar="N",
              help="Tokens of every prompt, for no padding; by default they differ.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, metavar="N",
              help="Of the prompts and of sampling.")  # fmt: skip
@click.option("--dtype", metavar="D", help="torch dtype; by default that of the checkpoint.")
@click.option("--device", metavar="D", help="torch device; by default CUDA if there is one.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE",
              help="An argument of the engine, or of from_pretrained, VALUE as JSON or a word: "
              "attn_implementation=eager; may be repeated.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
@click.option("--junit", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
              help="Write the report as JUnit XML, too.")  # fmt: skip
def verify(
    model: str,
    engine: str,
    cases: tuple[str, ...],
    prompts: int,
    tokens: int,
    length: int | None,
    seed: int,
    dtype: str | None,
    device: str | None,
    settings: tuple[str, ...],
    as_json: bool,
    junit: Path | None,
) -> int:
    """Record a rollout of MODEL, run it again in other ways with its tokens forced, and compare
    sampled-token logprobs and routes bit by bit.

    Exit status: 0 everything that applies to the engine passed, 1 a case failed, 2 bad usage,
    3 nothing failed, but a case that applies or was asked for by name could not be run.
    """
    from rolltape.replay.verify.output import print_report, write_junit
    from rolltape.replay.verify.suite import verify as run

    if junit is not None and not junit.absolute().parent.is_dir():
        raise UsageError(f"--junit {junit}: {junit.parent} is no folder")
    report = run(
        engine,
        model,
        cases=cases,
        prompts=prompts,
        tokens=tokens,
        length=length,
        seed=seed,
        dtype=dtype,
        device=device,
        arguments=_arguments(settings),
    )
    if junit is not None:
        write_junit(report, junit)
    if as_json:
        from rolltape.store.jsonable import jsonable

        click.echo(json.dumps(jsonable(report.as_dict()), allow_nan=False, indent=1))
    else:
        print_report(report, command=_again(engine, model, prompts, tokens, length, seed, device,
                                            settings))  # fmt: skip
    return report.exit_status


def _again(
    engine: str,
    model: str,
    prompts: int,
    tokens: int,
    length: int | None,
    seed: int,
    device: str | None,
    settings: tuple[str, ...],
) -> list[str]:
    """The command line without cases and dtype."""
    words = ["rolltape", "verify", "--engine", engine, model]
    words += ["--prompts", str(prompts), "--tokens", str(tokens), "--seed", str(seed)]
    words += ["--length", str(length)] if length is not None else []
    words += ["--device", device] if device is not None else []
    return words + [word for setting in settings for word in ("--set", setting)]


def _arguments(settings: tuple[str, ...]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not key.isidentifier() or not equals:
            raise UsageError(f"--set {setting}: not KEY=VALUE")
        try:
            out[key] = json.loads(value)
        except ValueError:
            out[key] = value
    return out
