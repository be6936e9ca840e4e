"""Reads the layers that settings come from, as nested dictionaries: TOML file, environment, command line.

A later layer overrides an earlier one. The layer and the line that gave a key are kept for error messages. This module
knows no setting by name, only which keys are secrets: a secret's value is read as plain text, and no error shows it.
"""

import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from streamrl.schemas.errors import SettingsError
from streamrl.schemas.secrets import ENV_PREFIX, variable_of
from streamrl.settings.keys import Key, secret_keys, takes_only_text
from streamrl.settings.run_directory import CONFIG

Tree = dict[str, Any]

# A table's header and a key of a TOML line. tomllib keeps no line numbers, so errors find them in the text.
_HEADER = re.compile(r"\s*\[+\s*([^\]]+?)\s*\]+")
_KEY = re.compile(r"\s*([A-Za-z0-9_.\"'-]+)\s*=")


@dataclass(frozen=True)
class SettingsLayers:
    """The settings that the user gave in TOML file, environment and command line; later ones win."""

    config: Path | None
    toml: Tree
    environment: Tree
    arguments: Tree

    @classmethod
    def read(cls, config: Path | None, arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> Self:
        """Read all three.

        Raises:
            SettingsError: one of them cannot be read.
        """
        toml = _with_inputs_next_to(config, from_toml(config)) if config else {}
        return cls(config, toml, from_environment(environ), from_arguments(arguments))

    @property
    def layers(self) -> tuple[Tree, ...]:
        """The three layers; each overrides the ones before it."""
        return self.toml, self.environment, self.arguments

    def rank(self, key: Key) -> int:
        """The number of the last layer that gives a key, from 0; -1 if none does."""
        # A rank is an index into ``layers``: 0 the file, 1 the environment, 2 the command line.
        return max((rank for rank, tree in enumerate(self.layers) if _has(tree, key)), default=-1)

    def origin(self, key: Key) -> str:
        """The source of a key's value, in brackets and after a space; empty if it is not known."""
        match self.rank(key):
            case 2:
                return f" (--{'.'.join(key)})"
            case 1:
                return f" ({variable_of(key)})"
            case 0 if self.config is not None:
                # The file is read again, because only errors need lines and tomllib discards them.
                line = line_of(self.config.read_text(), key)
                return f" ({self.config}, line {line})" if line else f" ({self.config})"
            case _:
                return ""


def from_toml(path: Path) -> Tree:
    """Read a TOML file.

    Raises:
        SettingsError: there is no such file, or it is not TOML.
    """
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise SettingsError(f"expected a configuration file, got {path}, which does not exist") from error
    except IsADirectoryError as error:
        raise SettingsError(f"expected a configuration file, got {path}, a directory; name the file in it") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"expected TOML in {path}, got: {error}") from error


INPUTS: tuple[Key, ...] = (
    ("data", "path"),
    ("model", "path"),
    ("lengths", "base_model"),
    ("dispatch", "profile"),
    ("emulation", "profile"),
    ("emulation", "lengths", "path"),
    ("kafka", "ssl_cafile"),
    ("kafka", "ssl_certfile"),
    ("kafka", "ssl_keyfile"),
)
"""Settings that name files or directories to read; some may be names on a hub instead."""


def _with_inputs_next_to(config: Path, toml: Tree) -> Tree:
    """The same tree; inputs that exist in the file's folder get paths that work from the working directory.

    Outputs of a run are not changed: they go to the working directory. Nor are the paths of a resolved configuration,
    since they already hold from the directory where the run was started.
    """
    if config.parent == Path() or config.name == CONFIG:
        return toml
    held_out = toml.get("evaluation", {}).get("data", {}) if isinstance(toml.get("evaluation"), dict) else {}
    sets = [("evaluation", "data", name, "path") for name in held_out] if isinstance(held_out, dict) else []
    for *section, name in (*INPUTS, *sets):
        table: Any = toml
        for part in section:
            table = table.get(part) if isinstance(table, dict) else None
        value = table.get(name) if isinstance(table, dict) else None
        if isinstance(value, str) and value and (config.parent / value).exists():
            table[name] = str(config.parent / value)
    return toml


def from_environment(environ: Mapping[str, str] = os.environ) -> Tree:
    """Read ``STREAMRL_SECTION__KEY=value``; variables without a double underscore are not settings."""
    tree: Tree = {}
    for name, text in environ.items():
        if is_setting_variable(name):
            _put(tree, name.removeprefix(ENV_PREFIX).lower().split("__"), text)
    return tree


def is_setting_variable(name: str) -> bool:
    """Whether an environment variable is a setting; others with the prefix, such as STREAMRL_CACHE, are not."""
    return name.startswith(ENV_PREFIX) and "__" in name


def from_arguments(arguments: Iterable[str]) -> Tree:
    """Read ``--section.key value`` and ``--section.key=value``.

    Raises:
        SettingsError: an argument has another form, or a value is missing.
    """
    tree: Tree = {}
    rest, before = iter(arguments), ""
    for argument in rest:
        # Every key has a section, so an option without a dot is a misspelt option of the command itself.
        if not argument.startswith("--") or "." not in argument.split("=")[0]:
            got = f"a word (hidden) after {before}" if is_secret_option(before) else repr(argument)
            raise SettingsError(f"expected --section.key value, got {got}; see --help for the other options")
        before = argument.partition("=")[0]
        path, equals, text = argument.removeprefix("--").partition("=")
        if not equals:
            following = next(rest, None)
            if following is None:
                raise SettingsError(f"expected a value after {argument}, got the end of the command line")
            text = following
        _put(tree, _path(path), text)
    return tree


def is_secret_option(option: str) -> bool:
    """Whether ``--section.key`` or ``--section.key=value`` sets a secret."""
    return tuple(_path(option.removeprefix("--").partition("=")[0])) in secret_keys()


def _path(option: str) -> list[str]:
    # Options are often written with dashes; no key has one.
    return option.replace("-", "_").split(".")


def merged(*layers: Tree) -> Tree:
    """All layers in one tree; a later layer's value replaces an earlier one's, section by section."""
    result: Tree = {}
    for layer in layers:
        for key, value in layer.items():
            before = result.get(key)
            # Tables are merged. A list or a value replaces the earlier one, so that a list can be made shorter.
            result[key] = merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return result


def _put(tree: Tree, path: list[str], text: str) -> None:
    value = text if (key := tuple(path)) in secret_keys() else _value(text)
    if takes_only_text(key) and not isinstance(value, str):
        value = text
    for part in path[:-1]:
        node = tree.setdefault(part, {})
        # As in "--loop.mode=stream --loop.mode.x=1": a value is where a section should be.
        if not isinstance(node, dict):
            raise SettingsError(f"expected a section at {'.'.join(path)}, got a value")
        tree = node
    tree[path[-1]] = value


def _value(text: str) -> Any:
    """The text parsed as a TOML value, else the text itself: ``3``, ``true``, ``[1, 2]``, ``some/path``."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def line_of(text: str, key: Key) -> int | None:
    """The line of a TOML text, from 1, that sets a key or opens the table of that name; None if it is not found."""
    section: Key = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            section = _parts(header[1])
            if section == key:
                return number
        elif (found := _KEY.match(line)) and section + _parts(found[1]) == key:
            return number
    # The key has no line of its own, as in an inline table: the line that opens the table is the next best.
    return line_of(text, key[:-1]) if len(key) > 1 else None


def _parts(name: str) -> Key:
    return tuple(part.strip().strip("\"'") for part in name.split("."))


def _has(tree: Any, key: Key) -> bool:
    for part in key:
        if not isinstance(tree, dict) or part not in tree:
            return False
        tree = tree[part]
    return True
