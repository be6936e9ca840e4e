"""The whole loop with one command, and the demo."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from deploy.cli.configuration.arguments import OVERRIDES, USAGE, split


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command(context_settings=OVERRIDES, epilog=f"Arguments: {USAGE}")(run)
    app.command(context_settings=OVERRIDES, epilog="Arguments: [--section.key value]...")(demo)


Top = Annotated[
    bool,
    typer.Option("--top/--no-top", help="On a terminal, show the view of `streamrl top`; q leaves it, not the run."),
]


def run(
    context: typer.Context,
    top: Top = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and start nothing; exit code 2 if a check fails.")
    ] = False,
) -> None:
    """Start broker, coordinator, relay, dispatcher, workers and trainer on this machine, and train."""
    config, overrides = split(context.args)
    if dry_run:
        raise typer.Exit(_dry_run(config, overrides))
    from deploy.runs.local import run_locally
    from deploy.settings.loading import load_settings

    raise typer.Exit(run_locally(load_settings(config, overrides), top=top))


def _dry_run(config: Path | None, overrides: list[str]) -> int:
    from deploy.settings.loading import load_settings
    from deploy.starting.dry_run import dry_run

    return dry_run(load_settings(config, overrides), print)


def demo(
    context: typer.Context,
    top: Top = False,
    engine: Annotated[Literal["transformers", "vllm"], typer.Option(help="Generation engine.")] = "transformers",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the whole demo.")] = 0,
) -> None:
    """Train a tiny character model to spell words backward: real Kafka, two workers, one trainer, minutes on a CPU."""
    _config, overrides = split(context.args)
    from deploy.demo.recipe import demo_settings
    from deploy.runs.local import run_locally

    raise typer.Exit(run_locally(demo_settings(engine, seed, overrides, progress=print), top=top))
