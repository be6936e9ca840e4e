"""The layers that settings come from, as nested dictionaries: TOML file, environment, command line. Later ones win.

Which layer gave a key, and on which line, is kept for error messages. Knows no setting by name, but which are secrets:
those are text as it stands, and no error shows what was given for one.
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
from streamrl.settings.keys import Key, secret_keys
from streamrl.settings.run_directory import CONFIG

Tree = dict[str, Any]

# A table's header and a key of a TOML line. tomllib keeps no line numbers, so they are looked for in the text.
_HEADER = re.compile(r"\s*\[+\s*([^\]]+?)\s*\]+")
_KEY = re.compile(r"\s*([A-Za-z0-9_.\"'-]+)\s*=")


@dataclass(frozen=True)
class SettingsLayers:
    """What the user gave: TOML file, environment and command line; later ones win."""

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
        toml = _found_beside(config, from_toml(config)) if config else {}
        return cls(config, toml, from_environment(environ), from_arguments(arguments))

    @property
    def layers(self) -> tuple[Tree, ...]:
        """In the order in which they replace each other."""
        return self.toml, self.environment, self.arguments

    def rank(self, key: Key) -> int:
        """The number of the last layer that gives a key, from 0; -1: none does."""
        # A rank is an index into ``layers``: 0 the file, 1 the environment, 2 the command line.
        return max((rank for rank, tree in enumerate(self.layers) if _has(tree, key)), default=-1)

    def origin(self, key: Key) -> str:
        """Where a key's value came from, in brackets and with a space in front; empty where that is not known."""
        match self.rank(key):
            case 2:
                return f" (--{'.'.join(key)})"
            case 1:
                return f" ({variable_of(key)})"
            case 0 if self.config is not None:
                # Read once more: lines are wanted only for an error, and tomllib has thrown them away.
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
"""Files and directories that are read; some may be names on a hub instead."""


def _found_beside(config: Path, toml: Tree) -> Tree:
    """The same, with inputs that lie beside the file found from here; what a run writes goes to the working directory.

    A resolved configuration was written into the run's directory and names things as they were seen from where the run
    was started.
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
        if is_variable(name):
            _put(tree, name.removeprefix(ENV_PREFIX).lower().split("__"), text)
    return tree


def is_variable(name: str) -> bool:
    """Whether a variable of the environment is a setting; others with our prefix, such as STREAMRL_CACHE, are none."""
    return name.startswith(ENV_PREFIX) and "__" in name


def from_arguments(arguments: Iterable[str]) -> Tree:
    """Read ``--section.key value`` and ``--section.key=value``.

    Raises:
        SettingsError: something else stands there, or a value is missing.
    """
    tree: Tree = {}
    rest, before = iter(arguments), ""
    for argument in rest:
        # Every key has a section, so an option without a dot is a misspelt one of the command's own.
        if not argument.startswith("--") or "." not in argument.split("=")[0]:
            got = f"a word that is not shown, after {before}" if is_secret_option(before) else repr(argument)
            raise SettingsError(f"expected --section.key value, got {got}; see --help for the other options")
        before = argument.partition("=")[0]
        path, equals, text = argument.removeprefix("--").partition("=")
        if not equals:
            following = next(rest, None)
            if following is None:
                raise SettingsError(f"expected a value after {argument}, got the end of the line")
            text = following
        _put(tree, _path(path), text)
    return tree


def is_secret_option(option: str) -> bool:
    """Whether ``--section.key`` or ``--section.key=value`` gives a secret."""
    return tuple(_path(option.removeprefix("--").partition("=")[0])) in secret_keys()


def _path(option: str) -> list[str]:
    # Dashes are usual in options; no key of ours has one.
    return option.replace("-", "_").split(".")


def merged(*layers: Tree) -> Tree:
    """All layers in one tree; a later layer's value replaces an earlier one's, section by section."""
    result: Tree = {}
    for layer in layers:
        for key, value in layer.items():
            before = result.get(key)
            # A table joins a table; a list or a value replaces what was there, so that it can be made shorter.
            result[key] = merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return result


def _put(tree: Tree, path: list[str], text: str) -> None:
    value = text if tuple(path) in secret_keys() else _value(text)
    for part in path[:-1]:
        node = tree.setdefault(part, {})
        # As in "--loop.mode=stream --loop.mode.x=1": a value stands where the section should be.
        if not isinstance(node, dict):
            raise SettingsError(f"expected a section at {'.'.join(path)}, got a value")
        tree = node
    tree[path[-1]] = value


def _value(text: str) -> Any:
    """A TOML value if it reads as one, else the text itself: ``3``, ``true``, ``[1, 2]``, ``some/path``."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def line_of(text: str, key: Key) -> int | None:
    """The line of a TOML text, from 1, that sets a key or opens the table of that name; None: not found so simply."""
    section: Key = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            section = _parts(header[1])
            if section == key:
                return number
        elif (found := _KEY.match(line)) and section + _parts(found[1]) == key:
            return number
    # Not found in a line of its own, as in an inline table: the line that opens the table is the next best.
    return line_of(text, key[:-1]) if len(key) > 1 else None


def _parts(name: str) -> Key:
    return tuple(part.strip().strip("\"'") for part in name.split("."))


def _has(tree: Any, key: Key) -> bool:
    for part in key:
        if not isinstance(tree, dict) or part not in tree:
            return False
        tree = tree[part]
    return True
