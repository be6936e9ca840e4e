"""Shows a running run in a browser, or in a terminal."""

from typing import Annotated

import typer

from deploy.cli.looking import Run, Servers, Where
from deploy.runs.priority import give_way

DEFAULT_PORT = 8470


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command()(ui)
    app.command()(top)


def ui(
    where: Where = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.")] = DEFAULT_PORT,
    host: Annotated[str, typer.Option(help="Address to listen at; others than loopback let the network in.")] = (
        "127.0.0.1"
    ),
    no_open: Annotated[bool, typer.Option("--no-open", help="Open no browser; only print the address.")] = False,
    run: Run = "",
    bootstrap_servers: Servers = None,
) -> None:
    """Show a run in the browser: the loop, curves, a timeline, trajectories, dead letters. Any number may look."""
    give_way()
    from deploy.dashboard.command import serve
    from deploy.inspection.logs import log_to_stderr
    from deploy.surveys.attachment import attach

    log_to_stderr()
    raise typer.Exit(serve(attach(where, run, bootstrap_servers), where, host, port, open_browser=not no_open))


def top(
    where: Where = None,
    interval: Annotated[float, typer.Option(min=0.2, max=3600, help="Seconds between two lines.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one line and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object an interval.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Print lines, also on a terminal.")] = False,
    run: Run = "",
    bootstrap_servers: Servers = None,
) -> None:
    """Show a run in the terminal: the loop, curves, lengths, workers, trajectories, events. Any number may look.

    Where there is no terminal, it prints a line an interval until the run is finished.
    """
    give_way()
    import sys

    from deploy.inspection.logs import log_to_stderr
    from deploy.surveys.attachment import attach
    from deploy.top.command import show
    from deploy.top.printing import Manner

    log_to_stderr()
    on_screen = sys.stdout.isatty() and sys.stdin.isatty() and not (once or as_json or plain)
    manner = Manner(interval, as_json, once)
    raise typer.Exit(show(attach(where, run, bootstrap_servers), where, manner, on_screen=on_screen))
