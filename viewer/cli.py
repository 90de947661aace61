"""`rolltape view`."""

from __future__ import annotations

import os
import shlex
import socket
import sys
import webbrowser
from importlib.abc import MetaPathFinder
from pathlib import Path

import click

from rolltape.store.errors import UsageError


@click.command(short_help="Look at tapes and reports in a browser.")
@click.argument(
    "paths", metavar="PATH...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    show_default="a free one",
    help="Port to listen on.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--token",
    envvar="ROLLTAPE_VIEW_TOKEN",
    help="Secret that every request must carry; needed for a --host that others can reach.",
)
@click.option("--no-open", is_flag=True, help="Do not open a browser.")
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path),
    help="tokenizer.json to read text with; otherwise the one in the model folder of the tape.",
)
@click.option(
    "--notes",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Keep what is starred, and the notes on it, in this JSON file instead of the browser.",
)
@click.option(
    "--follow",
    is_flag=True,
    help="Open tapes and reports that appear in the folders later. A tape that is being written is "
    "followed in any case.",
)
@click.option(
    "--export",
    "out",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Serve nothing: write a folder of static files that shows the --sequences.",
)
@click.option("--sequences", metavar="ID,ID", help="Sequences to export.")
def view(
    paths: tuple[Path, ...],
    port: int,
    host: str,
    token: str | None,
    no_open: bool,
    tokenizer: Path | None,
    notes: Path | None,
    follow: bool,
    out: Path | None,
    sequences: str | None,
) -> int:
    """Look at tapes and diff reports in a browser. Ctrl-C stops it.

    PATHs are tapes, reports, or folders that hold some. Give a tape, its replay and their report
    together: rolltape view a b report. They are never written to.
    """
    try:
        import uvicorn

        from rolltape.viewer.app import make_app
    except ModuleNotFoundError as error:
        raise UsageError(
            f"`rolltape view` needs {error.name}", hint="pip install 'rolltape[viewer]'"
        ) from error
    from rolltape.viewer.security import is_loopback

    if out is not None:
        _export(paths, out, sequences, tokenizer, serves=follow or notes is not None)
        return 0
    if sequences is not None:
        raise UsageError("--sequences says what --export writes", hint="--export DIR")
    if token is None and not is_loopback(host):
        raise UsageError(
            f"--host {host} can be reached from other machines",
            hint="give --token TOKEN as well, or forward a port: ssh -L 8000:127.0.0.1:8000 HOST",
        )
    _without_pandas()
    app = make_app(paths, token=token, tokenizer=tokenizer, notes=notes, follow=follow)
    with _listen(host, port) as listener:
        address = _address(host, listener.getsockname()[1], token)
        click.echo(f"rolltape view: {address}  (Ctrl-C stops it)")
        sys.stdout.flush()
        if not no_open and _has_browser():
            webbrowser.open(address)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
        try:
            server.run(sockets=[listener])
        except KeyboardInterrupt:
            return 0
    return 0 if server.started else 1


def _without_pandas() -> None:
    """Have Arrow believe that pandas is not installed.

    It imports pandas, to know its types, when it is first given a Python value: 0.3 s of the first
    page and 36 MB, for something that nothing here uses. This process is ours, so it may be told.
    """
    import pyarrow as pa

    class Hidden(MetaPathFinder):
        def find_spec(self, name: str, path: object, target: object = None) -> None:
            if name == "pandas":
                raise ModuleNotFoundError(name)

    hidden = Hidden()
    sys.meta_path.insert(0, hidden)
    try:
        pa.scalar(0)
    finally:
        sys.meta_path.remove(hidden)


def _export(
    paths: tuple[Path, ...],
    out: Path,
    sequences: str | None,
    tokenizer: Path | None,
    *,
    serves: bool,
) -> None:
    from rolltape.viewer.export import export

    names = [name.strip() for name in (sequences or "").split(",") if name.strip()]
    if not names:
        raise UsageError("--export needs to know which sequences", hint="--sequences ID,ID")
    if serves:
        raise UsageError("--notes and --follow need a server", hint="leave --export out")
    done = export(paths, out, names, tokenizer=tokenizer)
    count = sum(len(found) for found in done["sequences"].values())
    click.echo(f"{out}: {count} sequences, {done['files']} files, {done['bytes'] / 1e6:.1f} MB")
    sizes = ", ".join(f"{screen} {size / 1e6:.1f}" for screen, size in done["sizes"].items())
    click.echo(f"MB by screen: {sizes}")
    # modules are not loaded from file:// addresses
    click.echo(f"any file server shows it: python -m http.server -d {shlex.quote(str(out))}")


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
        # Connections inherit it. asyncio sets it only where the protocol was named, and without it
        # the body of an answer waits 40 ms for the client to acknowledge the head.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host} port {port}: {error}", hint="choose another --port or --host"
        ) from error


def _address(host: str, port: int, token: str | None) -> str:
    name = "127.0.0.1" if host == "0.0.0.0" else "[::1]" if host == "::" else host
    name = f"[{name}]" if ":" in name and not name.startswith("[") else name
    return f"http://{name}:{port}/" + (f"?token={token}" if token else "")


def _has_browser() -> bool:
    # without a display, webbrowser would start a text browser in this terminal
    if not sys.stdout.isatty():
        return False
    return sys.platform == "darwin" or any(
        os.environ.get(v) for v in ("DISPLAY", "WAYLAND_DISPLAY")
    )
