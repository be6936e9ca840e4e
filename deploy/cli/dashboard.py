"""Shows a running run in a browser."""

from typing import Annotated

import typer

from deploy.cli.looking import Run, Servers, Where

DEFAULT_PORT = 8470


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(ui)


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
    from deploy.dashboard.command import serve
    from deploy.inspection.logs import log_to_stderr
    from deploy.surveys.attachment import attach

    log_to_stderr()
    raise typer.Exit(serve(attach(where, run, bootstrap_servers), where, host, port, open_browser=not no_open))
