"""`streamrl export`: a run's topics as files that audit and replay read without a broker."""

from pathlib import Path
from typing import Annotated, Literal

import typer


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(export)


def export(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="The run's directory, its name under runs/, or its configuration file."),
    ],
    to: Annotated[
        Path | None, typer.Option(metavar="DIR", help="An empty directory; the run's own export/ if left out.")
    ] = None,
    encoding: Annotated[
        Literal["parquet", "jsonl"], typer.Option("--format", help="Parquet also shows texts and rewards as columns.")
    ] = "parquet",
    topics: Annotated[
        list[str] | None,
        typer.Option(metavar="TOPIC", help="Only this topic; may be repeated; 'all' adds heartbeats and tokens."),
    ] = None,
) -> None:
    """Write a run's topics into segment files, byte by byte, with a manifest of their checksums."""
    from deploy.inspection.accounts.commands import export_run
    from deploy.inspection.logs import log_to_stderr

    log_to_stderr()
    raise typer.Exit(export_run(run, to, encoding, topics or []))
