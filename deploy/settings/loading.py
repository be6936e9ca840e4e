"""Layers → the validated tree, or one line that names the key, what was expected and the nearest right name."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError

from deploy.settings.layers import Tree, from_arguments, from_environment, from_toml, merged
from deploy.settings.tree import Settings
from schemas.errors import SettingsError
from schemas.settings import UNSET


def load_settings(config: Path | None, arguments: Sequence[str], defaults: Tree | None = None) -> Settings:
    """Settings from defaults, TOML file, environment and command line, later ones winning.

    Raises:
        SettingsError: an unknown key, a wrong value, or sections that contradict each other.
    """
    toml = from_toml(config) if config else {}
    return validated(merged(defaults or {}, toml, from_environment(), from_arguments(arguments)))


def validated(tree: Tree) -> Settings:
    """The typed tree.

    Raises:
        SettingsError: see ``load_settings``.
    """
    try:
        settings = Settings.model_validate(tree)
    except ValidationError as error:
        raise SettingsError(_line(error)) from error
    _agree(settings)
    return settings


def _agree(settings: Settings) -> None:
    if settings.loop.num_generations < 2:
        raise SettingsError(
            f"expected loop.num_generations >= 2 for group advantages, got {settings.loop.num_generations}"
        )
    _agree_on_emulation(settings)


def _agree_on_emulation(settings: Settings) -> None:
    engine_is, training_is = settings.generation.engine == "emulated", settings.training.backend == "emulated"
    if training_is and not engine_is:
        raise SettingsError(
            f'expected generation.engine = "emulated" with training.backend = "emulated", which exports no model, '
            f'got "{settings.generation.engine}"'
        )
    if engine_is and settings.algorithm.dynamic_sampling:
        raise SettingsError(
            'expected algorithm.dynamic_sampling = false with generation.engine = "emulated", whose rewards are all '
            "equal, got true: every group would be skipped"
        )
    if not training_is and not settings.model.path:
        raise SettingsError("expected a value for model.path, got none; set it in the file or with --model.path ...")


def _line(error: ValidationError) -> str:
    first, *others = error.errors(include_url=False)
    key = ".".join(str(part) for part in first["loc"])
    more = f" ({len(others)} more)" if others else ""
    if first["type"] == "extra_forbidden":
        return f"unknown setting {key}{_nearest(first['loc'])}{more}; `streamrl config show` lists all"
    if first["type"] == "missing":
        return f"expected a value for {key}, got none; set it in the file or with --{key} ...{more}"
    message = first["msg"].removeprefix("Value error, ")
    return f"setting {key}: {message[:1].lower()}{message[1:]}, got {first['input']!r:.200}{more}"


def _nearest(location: tuple[int | str, ...]) -> str:
    names = _names_beside(location)
    close = difflib.get_close_matches(str(location[-1]), names, n=1, cutoff=0.5)
    prefix = "".join(f"{part}." for part in location[:-1])
    return f"; did you mean {prefix}{close[0]}?" if close else f"; there are {', '.join(names)}"


def _names_beside(location: tuple[int | str, ...]) -> list[str]:
    model: Any = Settings
    for part in location[:-1]:
        field = model.model_fields.get(str(part)) if _is_model(model) else None
        model = field.annotation if field else None
    return sorted(model.model_fields) if _is_model(model) else []


def _is_model(model: Any) -> bool:
    return isinstance(model, type) and issubclass(model, BaseModel)


def as_toml(settings: Settings) -> str:
    """The resolved tree as TOML; reading it back gives equal settings. What is unset by default is left out."""
    return tomli_w.dumps(_with_words(settings, settings.model_dump(mode="json")))


def _with_words(model: BaseModel, values: Tree) -> Tree:
    tree: Tree = {}
    for name, value in values.items():
        part = getattr(model, name)
        if isinstance(part, BaseModel):
            tree[name] = _with_words(part, value)
        elif value is not None:
            tree[name] = value
        elif type(model).model_fields[name].default is not None:
            tree[name] = UNSET
    return tree
