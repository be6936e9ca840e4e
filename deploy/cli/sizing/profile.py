"""Measures this machine."""

from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.configuration.arguments import OVERRIDES, USAGE, split


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command(context_settings=OVERRIDES, epilog=f"Arguments: {USAGE}")(profile)


def profile(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Where the profile is kept.")] = Path("profile.json"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer points, measured fewer times.")] = False,
) -> None:
    """Measure decoding, training and weight transfer of the configured engine and model on this machine."""
    config, overrides = split(context.args)
    from deploy.profiling.points import QUICK, THOROUGH
    from deploy.profiling.profiler import profile as measure
    from deploy.profiling.showing import lines
    from deploy.settings.loading import load_settings

    profiled = measure(load_settings(config, overrides), QUICK if quick else THOROUGH, print)
    print("\n".join(lines(profiled)))
    profiled.profile.write(out)
    print(f"profile: {out}")
