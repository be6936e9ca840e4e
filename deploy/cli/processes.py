"""The processes of a run, each started by hand against a named broker."""

from typing import Annotated

import typer

from deploy.cli.configuration.arguments import OVERRIDES, USAGE, split


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    for command in (worker, trainer, coordinator, relay, dispatcher, ranker):
        app.command(context_settings=OVERRIDES, options_metavar="[OPTIONS]", epilog=f"Arguments: {USAGE}")(command)


def worker(
    context: typer.Context,
    worker_id: Annotated[str, typer.Option("--id", help="Name of this worker; made up if left out.")] = "",
) -> None:
    """A generation worker: takes work orders, publishes trajectories, adopts weights as they come."""
    _run("worker", context, worker_id)


def trainer(context: typer.Context) -> None:
    """The trainer: consumes trajectories, makes weights."""
    _run("trainer", context)


def coordinator(context: typer.Context) -> None:
    """The coordinator: turns trained steps into control messages."""
    _run("coordinator", context)


def relay(context: typer.Context) -> None:
    """A relay: serves the weights store over HTTP."""
    _run("relay", context)


def dispatcher(context: typer.Context) -> None:
    """The dispatcher: turns prompts into work orders, within the staleness bound."""
    _run("dispatcher", context)


def ranker(context: typer.Context) -> None:
    """The ranker: makes newer models of output length while the run goes on, for lengths.refit = "process"."""
    _run("ranker", context)


def _run(role: str, context: typer.Context, worker_id: str = "") -> None:
    config, overrides = split(context.args)
    from deploy.settings.loading import load_settings
    from deploy.wiring.process import run_role

    run_role(role, load_settings(config, overrides), worker_id)
