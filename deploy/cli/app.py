"""Entry point: the commands, and how errors end them. Imports no heavy library, so that ``--help`` is instant."""

import os
import sys
from typing import NoReturn

import typer

from deploy.cli import broker, control, dashboard, lengths, looking, processes, report, runs
from deploy.cli.inspection import audit, dlq, export, replay
from deploy.cli.sizing import plan, profile
from deploy.cli.starting import init, settings
from schemas.errors import StreamRLError

app = typer.Typer(
    name="streamrl",
    help="Asynchronous reinforcement learning for language models on Apache Kafka.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
init.add_to(app)
runs.add_to(app)
processes.add_to(app)
control.add_to(app)
looking.add_to(app)
dashboard.add_to(app)
report.add_to(app)
profile.add_to(app)
plan.add_to(app)
audit.add_to(app)
export.add_to(app)
replay.add_to(app)
app.add_typer(broker.kafka, name="kafka")
app.add_typer(broker.topics, name="topics")
app.add_typer(dlq.dlq, name="dlq")
app.add_typer(settings.config, name="config")
app.add_typer(lengths.lengths, name="lengths")


def main() -> None:
    """Run a command. An error of ours ends in one line and its exit code; ``STREAMRL_DEBUG=1`` shows the traceback."""
    try:
        app()
    except StreamRLError as error:
        _end(error, error.exit_code)
    except ExceptionGroup as group:
        ours = _first_of_ours(group)
        if ours is None:
            raise
        _end(ours, ours.exit_code)


def _first_of_ours(group: BaseExceptionGroup[BaseException]) -> StreamRLError | None:
    for error in group.exceptions:
        if isinstance(error, StreamRLError):
            return error
        if isinstance(error, BaseExceptionGroup) and (found := _first_of_ours(error)) is not None:
            return found
    return None


def _end(error: StreamRLError, code: int) -> NoReturn:
    if os.environ.get("STREAMRL_DEBUG"):
        raise error
    text = " ".join(str(error).split())
    print(f"error: {text}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
