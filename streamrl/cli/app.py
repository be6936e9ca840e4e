"""Entry point: the commands, and how errors end them. Imports no heavy library, so that ``--help`` is instant."""

import os
import sys
from typing import NoReturn

import typer

from schemas.errors import StreamRLError
from streamrl.cli import inspect, operate, plan, run

app = typer.Typer(
    name="streamrl",
    help="Asynchronous reinforcement learning for language models on Apache Kafka.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for group in (run, inspect, operate, plan):
    group.register(app)


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
