"""Writes docs/cli.md from the commands themselves: `python docs/make_cli.py [--check]`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["COLUMNS"] = "88"

import click

from rolltape.cli import COMMANDS, cli

PAGE = Path(__file__).parent / "cli.md"
HEAD = "# Command line\n\nWritten by `make docs` from `--help`; do not edit.\n"
EXITS = """
Every command but `record` exits with 0 (identical, or nothing to say), 1 (divergent, or something
was found), 2 (bad usage or input: one line on stderr), 3 (inconclusive, or nothing could be
compared). `record` exits as its command did.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD, EXITS]
    for name in (None, *COMMANDS):
        context = click.Context(
            cli,
            info_name="rolltape",
            terminal_width=88,
            max_content_width=88,
            help_option_names=["-h", "--help"],
        )
        command: click.Command = cli
        if name is not None:
            found = cli.get_command(context, name)
            assert found is not None
            command = found
            context = click.Context(
                command,
                info_name=name,
                parent=context,
                terminal_width=88,
                max_content_width=88,
                help_option_names=["-h", "--help"],
            )
        title = "rolltape" if name is None else f"rolltape {name}"
        parts.append(f"\n## {title}\n\n```\n{command.get_help(context)}\n```\n")
    return "".join(parts)


if __name__ == "__main__":
    if "--check" in sys.argv:
        if PAGE.read_text() != page():
            sys.exit(f"{PAGE} is not what the commands say: run `make docs`")
    else:
        PAGE.write_text(page())
