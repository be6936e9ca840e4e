"""`streamrl dlq`: the records that no decoder took."""

from pathlib import Path
from typing import Annotated

import typer

dlq = typer.Typer(help="Look at dead letters, and send them once more.", no_args_is_help=True)

Run = Annotated[
    Path, typer.Argument(metavar="RUN", help="The run's directory, its name under runs/, or its configuration file.")
]
Export = Annotated[Path | None, typer.Option(metavar="DIR", help="Read exported segments instead of a broker.")]


@dlq.command()
def ls(
    run: Run,
    error_class: Annotated[str | None, typer.Option(help="Only this class of error, such as MalformedFrame.")] = None,
    since: Annotated[str | None, typer.Option(help="Only those since: 30m, 2h, 1d, or an ISO date and time.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
    export: Export = None,
) -> None:
    """List dead letters: when, from where, why, how large."""
    from deploy.inspection.letters.commands import list_letters
    from deploy.inspection.logs import log_to_stderr

    log_to_stderr()
    raise typer.Exit(list_letters(run, export, error_class, since, json_lines=as_json))


@dlq.command()
def show(
    run: Run,
    offset: Annotated[int, typer.Argument(min=0, help="Of the letter, as `ls` shows it.")],
    export: Export = None,
) -> None:
    """Print a dead letter: headers, the first bytes, and what today's decoder makes of it."""
    from deploy.inspection.letters.commands import show_letter
    from deploy.inspection.logs import log_to_stderr

    log_to_stderr()
    raise typer.Exit(show_letter(run, export, offset))


@dlq.command()
def retry(
    run: Run,
    offsets: Annotated[list[int] | None, typer.Argument(min=0, help="Of the letters, as `ls` shows them.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be sent.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Send also what still does not decode.")] = False,
) -> None:
    """Publish refused records again where they came from; those sent before are left alone.

    Exit code 1 if some were refused.
    """
    from deploy.inspection.letters.commands import retry_letters
    from deploy.inspection.logs import log_to_stderr

    log_to_stderr()
    raise typer.Exit(retry_letters(run, offsets or [], everything=everything, dry_run=dry_run, force=force))
