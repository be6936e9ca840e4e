"""Writes a run's report again, or compares runs."""

from pathlib import Path
from typing import Annotated

import typer


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(report)


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="A run's directory or its name under runs/; several compare.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where the page goes; else the run's report.html, or comparison.html here."),
    ] = None,
    reward: Annotated[
        float | None,
        typer.Option(metavar="LEVEL", help="Say when this reward was reached; else the highest that all reached."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON; no page without --out.")] = False,
    from_topics: Annotated[
        bool, typer.Option("--from-topics", help="Read the run's topics again: its broker, or its kept Kafka data.")
    ] = False,
    export: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Read the run's topics again, from an export of one run.")
    ] = None,
) -> None:
    """Write a run as one self-contained page, or several side by side: curves, timelines, figures, settings."""
    from deploy.inspection.logs import log_to_stderr
    from deploy.reporting.commands.report import report as write

    log_to_stderr()
    raise typer.Exit(write(runs, out, reward, as_json=as_json, from_topics=from_topics, export=export))
