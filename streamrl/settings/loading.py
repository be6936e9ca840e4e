"""Loads settings: layers → the validated tree, and the tree → TOML.

An error is one line with the key, its source (file and line, variable or option) and the expected value. Sections that
contradict each other are refused.

Invariant no_secret_is_written: the TOML has a mask instead of a secret, and no error shows a value that may be a
secret. Processes get secrets through their environment.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import tomli_w
from pydantic import BaseModel, ValidationError

from streamrl.consumers.algorithms.settings import PAIRWISE, WITHOUT_A_GROUP, is_import_path
from streamrl.schemas.errors import SettingsError
from streamrl.schemas.secrets import ENV_PREFIX, refuse_mask, variable_of
from streamrl.schemas.settings import UNSET
from streamrl.settings.contradictions import meaningless_keys, refuse_contradictions
from streamrl.settings.explaining import value_at
from streamrl.settings.features import features
from streamrl.settings.keys import REMOVED, RENAMED, Key, known_keys, secret_keys, suggestion
from streamrl.settings.layers import SettingsLayers, Tree, is_setting_variable, merged
from streamrl.settings.tree import Settings


def load_settings(
    config: Path | None, arguments: Sequence[str], defaults: Tree | None = None, *, to_look: bool = False
) -> Settings:
    """Settings from defaults, TOML file, environment and command line; later ones win.

    ``to_look``: the caller only reads a run's files and may need no secrets. A masked secret is then refused only when
    it is used, and not here.

    Raises:
        SettingsError: an unknown key, a wrong value, or sections that contradict each other.
    """
    given = SettingsLayers.read(config, arguments)
    # Before validation, which might otherwise report only that the key the variable was meant for is missing.
    _refuse_single_underscores(os.environ)
    settings = validated(merged(defaults or {}, *given.layers), given)
    # Rules read values with defaults filled in, hence the typed tree; but only given settings can contradict.
    refuse_contradictions(settings, given)
    if not to_look:
        for key in secret_keys():
            refuse_mask(value_at(settings, key), *key, origin=given.origin(key))
    return settings


def validated(tree: Tree, given: SettingsLayers | None = None) -> Settings:
    """The typed tree; with ``given``, errors name the source of a key.

    Raises:
        SettingsError: see ``load_settings``.
    """
    for feature in features():
        tree = feature.settings.complete(tree)
    try:
        settings = Settings.model_validate(tree)
    except ValidationError as error:
        raise SettingsError(_explain_error(error, given)) from error
    _check_sections_agree(settings)
    return settings


def secret_variables(settings: Settings) -> dict[str, str]:
    """Environment variables that pass the secrets to a process which reads the other settings from a file."""
    secrets = {key: value_at(settings, key) for key in secret_keys()}
    return {variable_of(key): secret.get_secret_value() for key, secret in secrets.items() if secret is not None}


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without settings, for a process that gets them from a file, or that runs foreign code.

    The variables are already part of the resolved file. A child that read them again would let them override that file,
    and with it the command line that had overridden them.
    """
    return {name: value for name, value in environ.items() if not is_setting_variable(name)}


def as_toml(settings: Settings) -> str:
    """The resolved tree as TOML; loading it, with the secrets in the environment, gives the same run.

    Settings that are unset by default are left out, and so are settings that others make meaningless.
    """
    return tomli_w.dumps(as_tree(settings))


def as_tree(settings: Settings) -> Tree:
    """What ``as_toml`` writes, as nested dictionaries."""
    return _without_meaningless(settings, settings.model_dump(mode="json"), meaningless_keys(settings))


def _without_meaningless(model: BaseModel, values: Tree, meaningless: frozenset[str], prefix: str = "") -> Tree:
    tree: Tree = {}
    for name, value in values.items():
        part = getattr(model, name)
        if prefix + name in meaningless:
            continue
        if isinstance(part, BaseModel):
            tree[name] = _without_meaningless(part, value, meaningless, f"{prefix}{name}.")
        elif isinstance(part, dict) and all(isinstance(each, BaseModel) for each in part.values()):
            # Whole: a setting that a held-out set leaves out would be that of [data].
            tree[name] = {key: _with_unset(value[key]) for key in part}
        elif value is not None:
            tree[name] = value
        elif type(model).model_fields[name].default is not None:  # TOML has no null, so a word means "unset"
            tree[name] = UNSET
    return tree


def _with_unset(section: Tree) -> Tree:
    return {key: UNSET if value is None else value for key, value in section.items()}


def _explain_error(error: ValidationError, given: SettingsLayers | None) -> str:
    """The first error, and the number of others. Wrong names rank before wrong values, missing values last."""
    # Wrong names come first, because the other errors may follow from them: their value is missing elsewhere.
    ranks = {"extra_forbidden": 0, "missing": 2}
    first, *others = sorted(error.errors(include_url=False), key=lambda one: ranks.get(one["type"], 1))
    location = tuple(str(part) for part in first["loc"])
    key = ".".join(_removed(location, first["input"]) or location)
    origin = given.origin(location) if given else ""
    more = f" ({len(others)} more)" if others else ""
    message = first["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]  # pydantic starts with a capital; here the text follows a colon
    match first["type"]:
        case "extra_forbidden" if key in RENAMED:
            return f"setting {key}{origin} is now {RENAMED[key]}{more}"
        case "extra_forbidden" if key in REMOVED:
            return f"setting {key}{origin} was removed: {REMOVED[key]}; remove it{more}"
        case "extra_forbidden":
            return f"unknown setting {key}{origin}{suggestion(location)}{more}; `streamrl config show` lists all"
        case "missing" if len(location) == 1:
            return f"expected a section [{key}], got none; `streamrl init` writes a whole configuration{more}"
        case "missing":
            return f"expected a value for {key}, got none; set it in the file or with --{key} ...{more}"
        case "model_type":
            return f"expected a section [{key}], got {_got(location, first['input'])}{origin}{more}"
        case "value_error":
            return f"setting {key}: {message}{origin}{more}"
        case "tuple_type" if isinstance(first["input"], str):
            message = f"expected a list such as '[\"{first['input']:.200}\"]', got {first['input']!r:.200}"
            return f"setting {key}: {message}{origin}{more}"
        case _:
            return f"setting {key}: {message}, got {_got(location, first['input'])}{origin}{more}"


def _removed(location: Key, value: object) -> Key | None:
    """The first removed setting in a section that is not known, for example of a feature that is not installed."""
    names = value if isinstance(value, dict) else ()
    return next(((*location, name) for name in names if ".".join((*location, name)) in REMOVED), None)


def _got(location: Key, value: object) -> str:
    """A value for an error's text, or only its type if the value is a secret or may contain one."""
    if any(location[: len(key)] == key or key[: len(location)] == location for key in secret_keys()):
        return f"a hidden value ({type(value).__name__})"
    return f"{value!r:.200}"


def _refuse_single_underscores(environ: Mapping[str, str]) -> None:
    """Refuse a variable such as STREAMRL_LOOP_MODE: it is no setting and would be ignored silently."""
    names = {f"{ENV_PREFIX}{key.replace('.', '_')}".upper(): key for key in known_keys(in_tables=True)}
    for name in environ.keys() & names.keys():
        right = variable_of(names[name].split("."))
        raise SettingsError(f"expected two underscores between section and key, got {name}; did you mean {right}?")


def _check_sections_agree(settings: Settings) -> None:
    # Most advantages are relative to the group's other samples; emulated training computes none.
    name = settings.algorithm.name
    is_alone = settings.loop.num_generations < 2 and settings.training.backend != "emulated"
    if is_alone and not (name in WITHOUT_A_GROUP or is_import_path(name)):
        raise SettingsError(
            f"expected loop.num_generations >= 2 for group advantages, got {settings.loop.num_generations}; "
            f"raise it, or choose one of {', '.join(sorted(WITHOUT_A_GROUP))} as algorithm.name"
        )
    if settings.loop.top_k == 1 and name not in WITHOUT_A_GROUP and settings.training.backend != "emulated":
        raise SettingsError(
            "expected loop.top_k above 1, or 0 for no limit, since all completions of a group would be equal and train "
            "nothing, got 1"
        )
    _check_lora(settings)
    for feature in features():
        feature.settings.check(settings)
    _check_emulation(settings)


def _check_lora(settings: Settings) -> None:
    training = settings.training
    if not (rank := training.lora.rank):
        return
    got = None
    if training.backend != "torch":
        got = f'training.backend = "{training.backend}", which has no layers'
    elif training.weight_transfer == "delta":
        got = 'training.weight_transfer = "delta" (a whole adapter is smaller than a delta)'
    elif training.ranks > 1:
        got = f"training.ranks = {training.ranks} (adapters are trained by one rank)"
    elif settings.generation.engine == "emulated":
        got = 'generation.engine = "emulated", which has no base model to add an adapter to'
    if got is not None:
        raise SettingsError(
            f"expected a setting that is compatible with training.lora.rank = {rank}, got {got}; change one of the two"
        )


def _check_emulation(settings: Settings) -> None:
    engine_is, training_is = settings.generation.engine == "emulated", settings.training.backend == "emulated"
    if training_is and not engine_is:
        raise SettingsError(
            f'expected generation.engine = "emulated" with training.backend = "emulated", which exports no model, '
            f'got "{settings.generation.engine}"; change one of the two'
        )
    algorithm = settings.algorithm
    if engine_is and (algorithm.dynamic_sampling or algorithm.name in PAIRWISE):
        got = f'algorithm.name = "{algorithm.name}"' if algorithm.name in PAIRWISE else "true"
        raise SettingsError(
            "expected algorithm.dynamic_sampling = false, and no algorithm that compares pairs, with "
            f'generation.engine = "emulated", got {got}: its rewards are all equal, so every group would be skipped'
        )
    if not training_is and not settings.model.path:
        raise SettingsError("expected a value for model.path, got none; set it in the file or with --model.path ...")
