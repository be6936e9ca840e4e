"""Splits what follows a command into a configuration file and ``--section.key value`` overrides."""

from collections.abc import Sequence
from pathlib import Path

from schemas.errors import SettingsError

OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
USAGE = "[CONFIG.TOML] [--section.key value]..."


def split(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The one configuration file, if any, and the overrides in order.

    Raises:
        SettingsError: two files, or an option where a value should stand.
    """
    config: Path | None = None
    overrides: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument.startswith("--"):
            overrides.append(argument)
            if "=" not in argument and (value := next(rest, None)) is not None:
                if value.startswith("--"):
                    raise SettingsError(f"expected a value after {argument}, got {value}")
                overrides.append(value)
        elif config is None:
            config = Path(argument)
        else:
            raise SettingsError(f"expected one configuration file, got {config} and {argument}")
    return config, overrides
