"""Layers → the validated tree, and the tree → TOML. Sections that contradict each other are refused here."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import tomli_w
from pydantic import BaseModel, ValidationError

from schemas.errors import SettingsError
from schemas.settings import UNSET
from settings.contradictions import meaningless_keys, refuse_contradictions
from settings.layers import ENV_PREFIX, Given, Tree, merged
from settings.tree import Settings
from settings.wording import known_keys, line_about


def load_settings(config: Path | None, arguments: Sequence[str], defaults: Tree | None = None) -> Settings:
    """Settings from defaults, TOML file, environment and command line, later ones winning.

    Raises:
        SettingsError: an unknown key, a wrong value, or sections that contradict each other.
    """
    given = Given.read(config, arguments)
    _refuse_lone_underscores(os.environ)
    settings = validated(merged(defaults or {}, *given.layers), given)
    refuse_contradictions(settings, given)
    return settings


def validated(tree: Tree, given: Given | None = None) -> Settings:
    """The typed tree; ``given`` tells an error where a key came from.

    Raises:
        SettingsError: see ``load_settings``.
    """
    try:
        settings = Settings.model_validate(tree)
    except ValidationError as error:
        raise SettingsError(line_about(error, given)) from error
    _agree(settings)
    return settings


def _refuse_lone_underscores(environ: Mapping[str, str]) -> None:
    """A variable such as STREAMRL_LOOP_MODE would be taken for none of ours, and its value be lost in silence."""
    names = {f"{ENV_PREFIX}{key.replace('.', '_')}".upper(): key for key in known_keys()}
    for name in environ.keys() & names.keys():
        right = ENV_PREFIX + names[name].replace(".", "__").upper()
        raise SettingsError(f"expected two underscores between section and key, got {name}; did you mean {right}?")


def _agree(settings: Settings) -> None:
    if settings.loop.num_generations < 2 and settings.training.backend != "emulated":
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


def as_toml(settings: Settings) -> str:
    """The resolved tree as TOML; reading it back gives the same run.

    What is unset by default is left out, and so is what other settings make meaningless.
    """
    return tomli_w.dumps(_with_words(settings, settings.model_dump(mode="json"), meaningless_keys(settings)))


def _with_words(model: BaseModel, values: Tree, meaningless: frozenset[str], prefix: str = "") -> Tree:
    tree: Tree = {}
    for name, value in values.items():
        part = getattr(model, name)
        if prefix + name in meaningless:
            continue
        if isinstance(part, BaseModel):
            tree[name] = _with_words(part, value, meaningless, f"{prefix}{name}.")
        elif value is not None:
            tree[name] = value
        elif type(model).model_fields[name].default is not None:
            tree[name] = UNSET
    return tree
