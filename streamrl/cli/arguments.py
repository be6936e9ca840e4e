"""What commands share: how a run and its broker are named, and what follows a command as settings.

The latter is split into a configuration file and ``--section.key value`` overrides. A secret among them is taken off
this process's command line, which any user of the machine can read.
"""

import contextlib
import ctypes
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from streamrl.schemas.errors import SettingsError

# Commands that need a broker that runs, of which one can be looked for.
Where = Annotated[
    Path | None,
    typer.Argument(
        metavar="[RUN]",
        help="The run's directory, its name, or its configuration; left out: the newest run whose broker runs.",
    ),
]
RunName = Annotated[str, typer.Option("--run", help="Name of the run, if the broker has several.")]
Servers = Annotated[
    str | None,
    typer.Option(
        "--bootstrap-servers",
        "--kafka.bootstrap_servers",
        # The variable that settings have: who set it for runs looks at the same broker.
        envvar="STREAMRL_KAFKA__BOOTSTRAP_SERVERS",
        help="The broker; the run's own if left out. Security is set by STREAMRL_KAFKA__... or the configuration.",
    ),
]
OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
USAGE = "[CONFIG.TOML] [--section.key value]..."


def split(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The one configuration file, if any, and the overrides in order.

    Raises:
        SettingsError: two files, or an option where a value should stand.
    """
    config: Path | None = None
    overrides: list[str] = []
    secrets: list[str] = []
    rest, before_is_secret = iter(arguments), False
    for argument in rest:
        if argument.startswith("--"):
            overrides.append(argument)
            option, equals, value = argument.partition("=")
            before_is_secret = _is_secret(option)
            if not equals and (following := next(rest, None)) is not None:
                if following.startswith("--"):
                    got = "one that begins with dashes: write it with =" if before_is_secret else following
                    raise SettingsError(f"expected a value after {argument}, got {got}")
                overrides.append(value := following)
            if before_is_secret:
                secrets.append(value)
        elif before_is_secret and not (argument.endswith(".toml") or Path(argument).is_file()):
            # Half a password, or what the shell made of one.
            raise SettingsError(
                f"expected one word after {option}, got one more, which is not shown; put quotes around it, or set its "
                "environment variable"
            )
        elif config is None:
            config = Path(argument)
        else:
            raise SettingsError(f"expected one configuration file, got {config} and {argument}")
    _take_off_the_command_line(secrets)
    return config, overrides


def _is_secret(option: str) -> bool:
    from streamrl.settings.layers import (
        is_secret_option,  # takes long to import, and a command without options needs it not
    )

    return is_secret_option(option)


def _take_off_the_command_line(secrets: Iterable[str]) -> None:
    """Overwrite them in the memory from which Linux answers /proc/PID/cmdline, and so ps."""
    if not (texts := [secret.encode() for secret in secrets if secret]) or sys.platform != "linux":
        return
    with contextlib.suppress(OSError, ValueError, IndexError):
        # arg_start and arg_end, fields 48 and 49 of proc(5); the second, a name in brackets, may have spaces in it.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin, end = int(fields[45]), int(fields[46])
        line = ctypes.string_at(begin, end - begin)
        masked = b"\0".join(_masked(argument, texts) for argument in line.split(b"\0"))
        ctypes.memmove(begin, masked, len(line))


def _masked(argument: bytes, secrets: Iterable[bytes]) -> bytes:
    for secret in secrets:
        # As an argument of its own, or behind the option's equals sign: never a piece of another word.
        if argument == secret or (argument.startswith(b"--") and argument.endswith(b"=" + secret)):
            argument = argument[: len(argument) - len(secret)] + b"*" * len(secret)
    return argument
