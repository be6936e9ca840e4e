"""The whole loop with one command, and the demo."""

from typing import Annotated, Literal

import typer

from deploy.cli.arguments import OVERRIDES, USAGE, split


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command(context_settings=OVERRIDES, epilog=f"Arguments: {USAGE}")(run)
    app.command(context_settings=OVERRIDES, epilog="Arguments: [--section.key value]...")(demo)


def run(context: typer.Context) -> None:
    """Start broker, coordinator, relay, dispatcher, workers and trainer on this machine, and train."""
    config, overrides = split(context.args)
    from deploy.runs.local import run_locally
    from deploy.settings.loading import load_settings

    raise typer.Exit(run_locally(load_settings(config, overrides)))


def demo(
    context: typer.Context,
    engine: Annotated[Literal["transformers", "vllm"], typer.Option(help="Generation engine.")] = "transformers",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the whole demo.")] = 0,
) -> None:
    """Train a tiny character model to spell words backward: real Kafka, two workers, one trainer, minutes on a CPU."""
    _config, overrides = split(context.args)
    from deploy.demo.recipe import demo_settings
    from deploy.runs.local import run_locally

    raise typer.Exit(run_locally(demo_settings(engine, seed, overrides, progress=print)))
