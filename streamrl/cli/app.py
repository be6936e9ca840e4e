"""Entry point: the commands, and how errors end them. Imports no heavy library, so that ``--help`` is instant."""

import gc
import os
import sys
from contextlib import suppress
from typing import NoReturn

import typer

from inspection.process import FIRST_GENERATION
from schemas.errors import DiskFull, StreamRLError, lacks_room
from schemas.plain_text import plain_text
from streamrl.cli import gateway, inspect, instances, operate, plan, run

app = typer.Typer(
    name="streamrl",
    help="Asynchronous reinforcement learning for language models on Apache Kafka.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for group in (run, instances, gateway, inspect, operate, plan):
    group.register(app)


def main() -> None:
    """Run a command. An error of ours ends in one line and its exit code; ``STREAMRL_DEBUG=1`` shows the traceback."""
    # Modules are objects that stay: looking for cycles among them took an eighth of a process's start.
    gc.set_threshold(FIRST_GENERATION, 10, 10)
    try:
        app()
    except StreamRLError as error:
        _end(error)
    except OSError as error:
        if not lacks_room(error):
            raise
        _end(_without_room(error))
    except ExceptionGroup as group:
        ours = _first_of_ours(group)
        if ours is None:
            raise
        _end(ours)


def _first_of_ours(group: BaseExceptionGroup[BaseException]) -> StreamRLError | None:
    for error in group.exceptions:
        if isinstance(error, StreamRLError):
            return error
        if isinstance(error, OSError) and lacks_room(error):
            return _without_room(error)
        if isinstance(error, BaseExceptionGroup) and (found := _first_of_ours(error)) is not None:
            return found
    return None


def _without_room(error: OSError) -> DiskFull:
    where = f"for {error.filename}" if error.filename else "on the disk that this process writes to"
    return DiskFull(f"expected room {where}, got: {error.strerror}; make room, then start the same command again")


def _end(error: StreamRLError) -> NoReturn:
    if os.environ.get("STREAMRL_DEBUG"):
        raise error
    text = plain_text(" ".join(str(error).split()))
    # What is full may be the disk that standard error is sent to.
    with suppress(OSError):
        print(f"error: {text}", file=sys.stderr)
    sys.exit(DiskFull.exit_code if lacks_room(error) else error.exit_code)


if __name__ == "__main__":
    main()
