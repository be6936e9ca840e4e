"""`streamrl audit`: whether every trajectory of a run was trained once, skipped for a reason, or is pending."""

from pathlib import Path
from typing import Annotated

import typer


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(audit)


def audit(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="The run's directory, its name under runs/, or its configuration file."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    export: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Audit exported segments instead of a broker's topics.")
    ] = None,
) -> None:
    """Prove produced = trained + skipped + pending, from topics and checkpoints alone; also while the run goes on.

    Exit code 4 if the books do not balance; the first line then names the first trajectory that breaks them.
    """
    _give_way_to(run)
    from deploy.inspection.accounts.commands import audit_run
    from deploy.inspection.logs import log_to_stderr

    log_to_stderr()
    raise typer.Exit(audit_run(run, export, as_json=as_json))


def _give_way_to(run: Path | None) -> None:
    """Before anything heavy is imported: half of a short audit's work is its imports.

    Not where a run's own broker has to be started first: it would inherit that, and be slow to come on a busy machine.
    """
    from deploy.inspection.living import directory_of, nodes_of, own_broker
    from deploy.runs.priority import give_way

    if run is None or (directory := directory_of(run)) is None:
        return
    if own_broker(directory) is not None or not nodes_of(directory):
        give_way()
