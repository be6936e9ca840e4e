"""Arguments that commands share: those that name a run and its broker, and the settings after a command.

The settings are split into a configuration file and ``--section.key value`` overrides. A secret among them is masked on
this process's command line, which every user of the machine can read.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from streamrl.schemas.command_line import change_shown_command_line
from streamrl.schemas.errors import SettingsError

if TYPE_CHECKING:
    from streamrl.settings.tree import Settings

# One option names a run in every command. Without it, each command has its own default.
A_RUN = "The run's directory, its name below runs/, or its configuration file"
GivenRun = Annotated[Path, typer.Option("--run", metavar="RUN", help=f"{A_RUN}.")]
GivenRuns = Annotated[list[Path], typer.Option("--run", metavar="RUN", help=f"{A_RUN}; may be repeated.")]
LiveRun = Annotated[
    Path | None,
    typer.Option(
        "--run",
        metavar="RUN",
        help="The run's directory, name or configuration; default: the newest run whose broker is running.",
    ),
]
JoinedRun = Annotated[
    Path | None,
    typer.Option("--run", metavar="RUN", help=f"{A_RUN}; joins it with its settings, at its broker."),
]
Servers = Annotated[
    str | None,
    typer.Option(
        "--bootstrap-servers",
        "--kafka.bootstrap_servers",
        # The same variable as the setting's, so that commands find the broker that runs use.
        envvar="STREAMRL_KAFKA__BOOTSTRAP_SERVERS",
        help="The broker; default: the run's own. STREAMRL_KAFKA__... or the configuration set its security.",
    ),
]
OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
USAGE = "[CONFIG.TOML] [--section.key value]..."


def split(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The configuration file, if there is one, and the overrides in order.

    Raises:
        SettingsError: there are two files, or an option where a value is expected.
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
                    got = "a word that starts with dashes: write it after =" if before_is_secret else following
                    raise SettingsError(f"expected a value after {argument}, got {got}")
                overrides.append(value := following)
            if before_is_secret:
                secrets.append(value)
        elif before_is_secret and not (argument.endswith(".toml") or Path(argument).is_file()):
            # Probably a part of a password that the shell split.
            raise SettingsError(
                f"expected one word after {option}, got another one (hidden); put quotes around the value, or set its "
                "environment variable"
            )
        elif config is None:
            config = Path(argument)
        else:
            raise SettingsError(f"expected one configuration file, got {config} and {argument}")
    _mask_on_the_command_line(secrets)
    return config, overrides


def role_settings(run: Path | None, arguments: Sequence[str]) -> "Settings":
    """Settings of a process that joins a run: those of ``run``, else of the configuration among the arguments.

    Raises:
        SettingsError: both are given, or a setting is wrong.
        UserError: there is no such run on this machine.
    """
    config, overrides = split(arguments)
    # Here and below, imports stand inside functions, so that ``--help``, which loads this module, stays instant.
    from streamrl.settings.loading import load_settings

    if run is None:
        return load_settings(config, overrides)
    if config is not None:
        raise SettingsError(f"expected either --run or a configuration file, got --run {run} and {config}")
    from streamrl.inspection.source import settings_to_join

    return settings_to_join(run, overrides)


def _is_secret(option: str) -> bool:
    from streamrl.settings.layers import is_secret_option

    return is_secret_option(option)


def _mask_on_the_command_line(secrets: Iterable[str]) -> None:
    """Overwrite the secrets in the command line that other users can see."""
    if texts := [secret.encode() for secret in secrets if secret]:
        change_shown_command_line(lambda line: b"\0".join(_masked(argument, texts) for argument in line.split(b"\0")))


def _masked(argument: bytes, secrets: Iterable[bytes]) -> bytes:
    for secret in secrets:
        # Only a whole argument, or the part after an option's equals sign, and never a part of another word.
        if argument == secret or (argument.startswith(b"--") and argument.endswith(b"=" + secret)):
            argument = argument[: len(argument) - len(secret)] + b"*" * len(secret)
    return argument
