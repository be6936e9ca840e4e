"""Entry point: the commands, and how errors end them. It imports no heavy library, so that ``--help`` is instant."""

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
from streamrl.schemas.errors import DiskFull, StreamRLError, UserError, is_disk_full_error, is_interrupted
from streamrl.schemas.extras import missing_package
from streamrl.schemas.plain_text import plain_text


class Commands(TyperGroup):
    """All commands. Typer's errors about arguments are printed in one line, like every other error."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parse the arguments before a command's name."""
        with _typer_errors_in_one_line():
            # The name of the command and not of the calling script, so that users can run what a message names.
            return super().make_context(self.name or info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Parse a command's arguments and run it."""
        with _typer_errors_in_one_line():
            return super().invoke(ctx)


@contextmanager
def _typer_errors_in_one_line() -> Iterator[None]:
    try:
        yield
    except TyperException as error:
        context: typer.Context | None = getattr(error, "ctx", None)
        # For a group without a command, typer raises an error whose text is the group's help.
        if context is None or error.message == context.get_help():
            raise
        message = error.format_message().replace("Value error, ", "").rstrip(".")  # pydantic's prefix
        if message.startswith("Got unexpected extra argument") and _takes_a_run(context):
            message += "; a run is named with --run"
        raise UserError(f"{message[:1].lower()}{message[1:]}; see `{context.command_path} --help`") from error
    except KeyboardInterrupt as interrupt:
        # Handled here, because typer would always exit with Ctrl-C's code, also after another signal.
        stopping.report_stopped()
        raise typer.Exit(stopping.exit_code()) from interrupt


def _takes_a_run(context: typer.Context) -> bool:
    return any("--run" in parameter.opts for parameter in context.command.params)


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
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


for group in (run, inspect, operate, plan):
    group.register(app)


def main() -> None:
    """Run a command. A StreamRL error prints one line and sets the exit code; ``STREAMRL_DEBUG=1`` raises it."""
    # Modules are never freed: searching them for cycles took an eighth of a process's start.
    gc.set_threshold(FIRST_GENERATION, 10, 10)
    try:
        app()
    except StreamRLError as error:
        _exit_with(error)
    except ModuleNotFoundError as error:
        if (missing := missing_package(error)) is None:
            raise
        _exit_with(missing)
    except OSError as error:
        if not is_disk_full_error(error):
            raise
        _exit_with(_disk_full(error))
    except ExceptionGroup as group:
        known = _first_known_error(group)
        if known is None:
            raise
        _exit_with(known)


def _first_known_error(group: BaseExceptionGroup[BaseException]) -> StreamRLError | None:
    for error in group.exceptions:
        if isinstance(error, StreamRLError):
            return error
        if isinstance(error, OSError) and is_disk_full_error(error):
            return _disk_full(error)
        if isinstance(error, ModuleNotFoundError) and (missing := missing_package(error)) is not None:
            return missing
        if isinstance(error, BaseExceptionGroup) and (found := _first_known_error(error)) is not None:
            return found
    return None


def _disk_full(error: OSError) -> DiskFull:
    where = f"for {error.filename}" if error.filename else "on the disk that this process writes to"
    return DiskFull(f"expected free space {where}, got: {error.strerror}; free some, then run the same command again")


def _exit_with(error: StreamRLError) -> NoReturn:
    if is_interrupted(error):
        raise KeyboardInterrupt from error
    if os.environ.get("STREAMRL_DEBUG"):
        raise error
    text = plain_text(" ".join(str(error).split()))
    # Standard error itself may be redirected to the full disk.
    with suppress(OSError):
        print(f"error: {text}", file=sys.stderr)
    sys.exit(DiskFull.exit_code if is_disk_full_error(error) else error.exit_code)


if __name__ == "__main__":
    import runpy

    runpy.run_module("streamrl", run_name="__main__")
