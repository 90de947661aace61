"""`rolltape record`: run a command and record what its engine does."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from rolltape.recorder.launch import (
    STRICT_FAULT,
    Job,
    Recorded,
    end_like,
    refusal,
    run,
    signal_name,
    start_tape,
    with_python,
)
from rolltape.recorder.options import (
    LEVELS,
    ON_FULL,
    STORAGE_VARIABLE,
    TAPE_VARIABLE,
    Options,
)
from rolltape.recorder.output import default_output, expand, prepare_output
from rolltape.recorder.summary import idle_lines, lines, why_nothing
from rolltape.store import UsageError
from rolltape.store.places import LocalPlace, unused
from rolltape.store.writer import check_commit_log

#: Variables that carry to our hook what is the same in every recording.
_OUR_OWN = {"ROLLTAPE_LAUNCH_ENV", "ROLLTAPE_PACKAGE", "ROLLTAPE_PROCS"}


@click.command(
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}
)
@click.option(
    "-o",
    "--output",
    metavar="TAPE",
    help="Folder of the tape, or URL in an object store; {host} {pid} {time} {env:VAR} and "
    "%h %p %q{VAR} are filled in. Default: runs/<UTC time>-<command>-<6 hex>.",
)
@click.option("--append", is_flag=True, help="Record another part into an existing tape.")
@click.option("--overwrite", is_flag=True, help="Remove the tape that is there first.")
@click.option(
    "--level",
    type=click.Choice(LEVELS),
    envvar="ROLLTAPE_LEVEL",
    help=f"How much to record; each level includes those before it. Default: {Options.level}.",
)
@click.option(
    "--layers",
    type=click.IntRange(min=0),
    envvar="ROLLTAPE_LAYERS",
    metavar="N",
    help="Record the output of every decoder layer for the first N sequences of the job; "
    "implies --level layers.",
)
@click.option(
    "--sketches",
    type=click.IntRange(min=0),
    envvar="ROLLTAPE_SKETCHES",
    default=Options.sketches,
    metavar="N",
    help="Record sketches (72 bytes) of the output of every decoder layer for the first N "
    "sequences of the job, to compare a replay with; transformers only.",
)
@click.option(
    "--top-logprobs",
    type=click.IntRange(min=0),
    envvar="ROLLTAPE_TOP_LOGPROBS",
    default=Options.top_logprobs,
    metavar="K",
    help="Record the K most probable tokens of every position, with the mass of all others.",
)
@click.option(
    "--profile-kernels",
    type=click.IntRange(min=0),
    envvar="ROLLTAPE_PROFILE_KERNELS",
    default=Options.profile_kernels,
    metavar="N",
    help="Profile one forward of each of the first N batch shapes, for the names of its kernels; "
    "transformers only.",
)
@click.option(
    "--sample-rate",
    type=click.FloatRange(0, 1, min_open=True),
    envvar="ROLLTAPE_SAMPLE_RATE",
    default=Options.sample_rate,
    metavar="R",
    help="Record a share R of the prompts, each with all its samples or none.",
)
@click.option(
    "--steps",
    envvar="ROLLTAPE_STEPS",
    default=Options.steps,
    metavar="A:B",
    help="Record what the engine steps A to B - 1 do; either may be left out.",
)
@click.option(
    "--on-full",
    type=click.Choice(ON_FULL),
    envvar="ROLLTAPE_ON_FULL",
    default=Options.on_full,
    show_default=True,
    help="When the queue is full: drop and record the gap, or hold the job up.",
)
@click.option(
    "--queue-mb",
    type=click.IntRange(min=1),
    envvar="ROLLTAPE_QUEUE_MB",
    default=Options.queue_mb,
    show_default=True,
    metavar="MB",
    help="Bound of the queue in each process.",
)
@click.option(
    "--max-bytes",
    type=click.IntRange(min=0),
    envvar="ROLLTAPE_MAX_BYTES",
    default=Options.max_bytes,
    metavar="BYTES",
    help="Stop recording, with a gap, when the tape has this size. The job goes on.",
)
@click.option(
    "--commit-log",
    metavar="FILE",
    envvar="ROLLTAPE_COMMIT_LOG",
    help="Append a line of JSON for each row with positions, after it is committed.",
)
@click.option(
    "--storage-option",
    metavar="KEY VALUE",
    type=(str, str),
    multiple=True,
    help="Option of the object store of an -o URL, for example endpoint_override.",
)
@click.option("--fsync", is_flag=True, envvar="ROLLTAPE_FSYNC", help="Survive power loss too.")
@click.option(
    "--inject",
    type=click.Choice(["sitecustomize", "pth"]),
    default="sitecustomize",
    show_default=True,
    help="How to get into Python processes: an entry in PYTHONPATH, or a .pth file in "
    "site-packages for the time of the run (reaches python -E and -I).",
)
@click.option(
    "--strict",
    is_flag=True,
    envvar="ROLLTAPE_STRICT",
    help=f"Faults of the recorder fail the job; exit with {STRICT_FAULT} if the recording has "
    "faults or is empty.",
)
@click.option("--print-env", is_flag=True, help="Print the variables that would be set, and stop.")
@click.option(
    "--env",
    "shell_env",
    is_flag=True,
    help='Start a tape and print `export` lines, for `eval "$(rolltape record --env -o TAPE)"`.',
)
@click.option(
    "--summary-json", type=click.Path(path_type=Path), metavar="FILE", help="Write the summary."
)
@click.option("-q", "--quiet", is_flag=True, help="Only say what went wrong.")
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Also say which variables are set beside defaults, and every process.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- CMD [ARGS]...")
def record(
    *,
    output: str | None,
    append: bool,
    overwrite: bool,
    level: str | None,
    layers: int | None,
    sketches: int,
    top_logprobs: int,
    profile_kernels: int,
    sample_rate: float,
    steps: str,
    on_full: str,
    queue_mb: int,
    max_bytes: int,
    commit_log: str | None,
    storage_option: tuple[tuple[str, str], ...],
    fsync: bool,
    inject: str,
    strict: bool,
    print_env: bool,
    shell_env: bool,
    summary_json: Path | None,
    quiet: bool,
    verbose: bool,
    command: tuple[str, ...],
) -> int:
    """Run CMD and record what its engine does; exit as CMD does.

    CMD is untouched: same input, output, terminal, signals, exit status. `script.py` and
    `-- -m module` are run with Python. The tape is sealed whatever happens to CMD.
    """
    if quiet and verbose:
        raise UsageError("-q and -v exclude each other")
    if shell_env and (command or inject == "pth" or print_env):
        raise UsageError("--env takes no command, and neither --inject pth nor --print-env")
    if not (command or shell_env or print_env):
        raise UsageError("no command", hint="rolltape record [-o TAPE] -- CMD ARGS...")
    command = with_python(command)
    if output is None and append:
        raise UsageError("--append needs -o TAPE")
    target = expand(output, os.environ) if output is not None else default_output(command)
    level, layers = _level(level, layers)
    job = Job(
        command=command,
        tape=target if "://" in target else os.path.abspath(target),
        options=Options(
            level=level,
            layers=layers,
            sketches=sketches,
            top_logprobs=top_logprobs,
            profile_kernels=profile_kernels,
            sample_rate=sample_rate,
            steps=steps,
            on_full=on_full,
            queue_mb=queue_mb,
            fsync=fsync,
            strict=strict,
            commit_log=os.path.abspath(commit_log) if commit_log else "",
            max_bytes=max_bytes,
            storage_options=dict(storage_option),
        ),
        inject=inject,
    )
    if print_env:
        for name, value in sorted(job.variables.items()):
            click.echo(f"{name}={value}")
        return 0
    voice = _Voice(quiet=quiet, verbose=verbose)
    if shell_env:
        prepare_output(job.place, append=append, overwrite=overwrite)
        start_tape(job, append=append)
        for name, value in sorted(job.variables.items()):
            click.echo(f"export {name}={shlex.quote(value)}")
        place = shlex.quote(job.tape)
        voice.say(f"recording to {job.place}")
        voice.say(f"seal it after the job: rolltape record --append -o {place} -- true")
        return 0
    refused = refusal(command, job.env)
    if refused is not None:
        voice.warn(refused.words)
        return refused.status
    if job.tape.startswith("memory://"):
        raise UsageError(f"-o {job.tape}: no other process can see that")
    if job.options.commit_log:
        check_commit_log(job.options.commit_log)
    prepare_output(job.place, append=append, overwrite=overwrite)
    voice.say(f"recording to {_shown(job.tape)}")
    for name, value in chosen(job).items():
        voice.detail(f"set {name}={'...' if name.endswith(STORAGE_VARIABLE) else value}")
    recorded = run(job, append=append)
    _report(voice, job, recorded)
    status = recorded.ended.status
    faults = _faults(recorded) if strict else []
    if faults:
        voice.warn(f"--strict: {'; '.join(faults)}")
        status = status or STRICT_FAULT
    if summary_json is not None:
        _write_summary(voice, summary_json, job, recorded, status)
    return end_like(recorded.ended, status=status, hung=recorded.hung)


def _level(level: str | None, layers: int | None) -> tuple[str, int]:
    # on the command line each of the two says enough; a variable does not contradict it
    given = click.get_current_context().get_parameter_source
    if layers and given("layers") is not ParameterSource.ENVIRONMENT:
        if level != "layers" and given("level") is ParameterSource.COMMANDLINE:
            raise UsageError(f"--layers {layers} needs --level layers, not {level}")
        level = "layers"
    elif layers and level in (None, "layers"):
        level = "layers"
    elif level == "layers":
        raise UsageError("--level layers needs --layers N", hint="the first N sequences")
    else:
        layers = 0
    return level or Options.level, layers or 0


class _Voice:
    """Lines on stderr, apart from the job's by their prefix."""

    def __init__(self, *, quiet: bool, verbose: bool) -> None:
        self._quiet = quiet
        self.verbose = verbose
        self._colour = (
            sys.stderr is not None
            and sys.stderr.isatty()
            and not os.environ.get("NO_COLOR")
            and os.environ.get("TERM") != "dumb"
        )

    def say(self, text: str) -> None:
        if not self._quiet:
            self._write(text, "cyan")

    def detail(self, text: str) -> None:
        if self.verbose:
            self._write(text, "cyan")

    def warn(self, text: str) -> None:
        self._write(text, "yellow")

    def _write(self, text: str, colour: str) -> None:
        prefix = click.style("rolltape:", fg=colour) if self._colour else "rolltape:"
        # a closed stderr must not cost the command its exit status
        with contextlib.suppress(OSError, ValueError):
            click.echo(f"{prefix} {text}", err=True, color=self._colour)


def _report(voice: _Voice, job: Job, recorded: Recorded) -> None:
    ended, summary = recorded.ended, recorded.summary
    if summary is not None:
        if not summary.total:
            voice.warn(why_nothing(summary, inject=job.inject))
        if summary.total or summary.gaps or summary.hook_errors:
            for line in lines(summary, wall_s=ended.wall_s, every=voice.verbose):
                voice.say(line)
        else:
            for line in idle_lines(summary):
                voice.detail(line)
        for message in summary.messages:
            voice.warn(message)
        for text in summary.unreached:
            voice.warn(text)
        for problem in summary.problems:
            voice.warn(problem)
        for process in summary.seen:
            if (process.host, process.pid) in summary.recording:
                where = f"{process.pid}, {process.executable} {process.argv0}"
                voice.detail(f"recorded: process {where}")
        if summary.live:
            voice.warn(
                f"processes that outlived the command still write {len(summary.live)} shards: "
                "readers see them, the seal does not cover them; when they are done: "
                f"rolltape record --append -o {_shown(job.tape)} -- true"
            )
    for problem in recorded.problems:
        voice.warn(problem)
    (voice.say if ended.error is None else voice.warn)(ended.words)
    for command in next_commands(job, recorded):
        voice.say(f"next: {command}")


def chosen(job: Job) -> dict[str, str]:
    """The variables of a job that say something: not defaults, nor those for our own processes."""
    usual = Options().environment(job.tape)
    usual.pop(TAPE_VARIABLE)
    return {
        name: value
        for name, value in sorted(job.variables.items())
        if usual.get(name) != value
        and not name.startswith(("TLLM_", "TRTLLM_"))
        and name not in _OUR_OWN
    }


def next_commands(job: Job, recorded: Recorded) -> list[str]:
    """What to do with the tape; nothing when it is empty."""
    if recorded.summary is None or not recorded.summary.total:
        return []
    local = isinstance(job.place, LocalPlace)
    tape = _shown(job.tape)
    target = Path(f"{job.tape.rstrip('/')}.replay" if local else f"{job.place.name}.replay")
    replay = _shown(str(unused(target)))
    # kept sets, where there are any, are what makes the trainer's numbers comparable
    support = " --switch support=recorded" if recorded.summary.supports else ""
    commands = [f"rolltape replay {tape} -o {replay} --on transformers --mode score{support}"]
    return [*commands, f"rolltape view {tape}"] if local else commands


def _shown(tape: str) -> str:
    """Relative if below the working folder, quoted for a shell."""
    if "://" in tape:
        return shlex.quote(tape.partition("?")[0])  # the query may hold keys
    here, path = Path.cwd(), Path(tape)
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def _faults(recorded: Recorded) -> list[str]:
    summary = recorded.summary
    found = [] if recorded.sealed else ["the tape is not sealed"]
    if summary is None:
        return [*found, "what was recorded is unknown"]
    if not summary.added:
        found.append("nothing was recorded")
    if summary.faults:
        found.append(f"gaps and faults in the recording: {summary.faults}")
    return found


def _write_summary(voice: _Voice, file: Path, job: Job, recorded: Recorded, status: int) -> None:
    ended = recorded.ended
    content: dict[str, Any] = {
        "tape": str(job.place),
        "command": {
            "exit": ended.exit,
            "signal": None if ended.signal is None else signal_name(ended.signal),
            "wall_s": ended.wall_s,
            "error": ended.error,
        },
        "status": status,
        "sealed": recorded.sealed,
        "recorded": recorded.summary.as_json() if recorded.summary else None,
        "problems": list(recorded.problems),
        "next": next_commands(job, recorded),
    }
    try:
        file.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:  # the command is what matters, and it has ended
        voice.warn(f"--summary-json {file}: {error.strerror}")
