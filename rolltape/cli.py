"""The command line: `rolltape COMMAND`. Each command lives in the package that does the work."""

from __future__ import annotations

import importlib
import os
import sys

import click

from rolltape import __version__

#: command -> "module:function"; a module is imported when its command is run or documented.
COMMANDS = {
    "record": "rolltape.recorder.cli:record",
    "replay": "rolltape.replay.cli:replay",
    "diff": "rolltape.replay.cli:diff",
    "shrink": "rolltape.replay.shrink_cli:shrink",
    "verify": "rolltape.replay.verify.cli:verify",
    "info": "rolltape.store.cli:info",
    "show": "rolltape.store.cli:show",
    "fsck": "rolltape.store.care_cli:fsck_command",
    "compact": "rolltape.store.care_cli:compact_command",
    "export": "rolltape.store.exchange.cli:export",
    "import": "rolltape.store.exchange.cli:import_",
    "view": "rolltape.viewer.cli:view",
    "doctor": "rolltape.recorder.doctor_cli:doctor",
}

#: Exit statuses are 0, 1 and 3 by the verdict (`rolltape.replay.diff.EXIT_STATUS`), and:
EXIT_OK, EXIT_BAD_INPUT = 0, 2


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command


_EXAMPLE = """\b
In order:
  rolltape record -o a -- python rollout.py
  rolltape replay a -o b --on transformers --mode score --switch support=recorded
  rolltape diff a b -o report
  rolltape view a b report
"""


@click.group(
    cls=_LazyGroup,
    epilog=_EXAMPLE,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="rolltape")
def cli() -> None:
    """Record what a rollout engine did, score it as the trainer does, find where they differ."""


def main(args: list[str] | None = None) -> None:
    """Entry point of the `rolltape` script. Bad input is one line on stderr and exit status 2."""
    from rolltape.store.errors import RolltapeError

    try:
        status = cli.main(args, prog_name="rolltape", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        status = EXIT_BAD_INPUT
    except (click.Abort, KeyboardInterrupt):
        status = 130
    except RolltapeError as error:
        click.echo(f"rolltape: error: {error}", err=True)
        status = EXIT_BAD_INPUT
    except BrokenPipeError:
        # `rolltape show | head`: keep the interpreter from complaining while it shuts down
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    except Exception as error:
        if os.environ.get("ROLLTAPE_TRACEBACK"):
            raise
        # one line, and never the exit status of `divergent`
        words = str(error).splitlines()[0] if str(error) else ""
        click.echo(
            f"rolltape: error: {type(error).__name__}: {words} (a tape damaged in a way that no "
            "check knows, or a bug: ROLLTAPE_TRACEBACK=1 shows where)",
            err=True,
        )
        status = EXIT_BAD_INPUT
    sys.exit(status if isinstance(status, int) else EXIT_OK)


if __name__ == "__main__":
    main()
