"""Entry point: the commands, and how errors end them. Imports no heavy library, so that ``--help`` is instant."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from streamrl.cli import inspect, operate, plan, run
from streamrl.inspection.process import FIRST_GENERATION
from streamrl.schemas import stopping
from streamrl.schemas.errors import DiskFull, StreamRLError, UserError, is_interrupted, lacks_room
from streamrl.schemas.plain_text import plain_text


class Commands(TyperGroup):
    """All commands; what typer has to say of their arguments ends as every other error does, in one line."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Read what stands before a command's name."""
        with _as_one_of_ours():
            # Whatever script it was called by: what a line names has to be found.
            return super().make_context(self.name or info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Read a command's arguments, and carry it out."""
        with _as_one_of_ours():
            return super().invoke(ctx)


@contextmanager
def _as_one_of_ours() -> Iterator[None]:
    try:
        yield
    except TyperException as error:
        context: typer.Context | None = getattr(error, "ctx", None)
        # A group without a command is answered with its help, which is raised as well.
        if context is None or error.message == context.get_help():
            raise
        said = error.format_message().replace("Value error, ", "").rstrip(".")  # pydantic's words for a wrong choice
        raise UserError(f"{said[:1].lower()}{said[1:]}; see `{context.command_path} --help`") from error
    except KeyboardInterrupt as interrupt:
        # Here, for typer would end with Ctrl-C's exit code whatever it was.
        stopping.say_stopped()
        raise typer.Exit(stopping.exit_code()) from interrupt


app = typer.Typer(
    name="streamrl",
    cls=Commands,
    help="Asynchronous reinforcement learning for language models on Apache Kafka.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"streamrl {version('streamrl')}")
        raise typer.Exit


@app.callback()
def _before_a_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    pass


for group in (run, inspect, operate, plan):
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
    if is_interrupted(error):
        raise KeyboardInterrupt from error
    if os.environ.get("STREAMRL_DEBUG"):
        raise error
    text = plain_text(" ".join(str(error).split()))
    # What is full may be the disk that standard error is sent to.
    with suppress(OSError):
        print(f"error: {text}", file=sys.stderr)
    sys.exit(DiskFull.exit_code if lacks_room(error) else error.exit_code)


if __name__ == "__main__":
    import runpy

    runpy.run_module("streamrl", run_name="__main__")
