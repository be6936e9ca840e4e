"""Explains a setting for `streamrl config explain`: its meaning, its values, and where to set it.

All of it is derived from the types of the settings tree.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic_core import to_jsonable_python

from streamrl.schemas.errors import SettingsError
from streamrl.schemas.secrets import variable_of
from streamrl.settings.first import first_keys
from streamrl.settings.keys import REMOVED, RENAMED, Key, keys_in, known_keys, secret_keys, suggestion
from streamrl.settings.tree import Settings

_BOUNDS = {
    "minimum": ">=",
    "exclusiveMinimum": ">",
    "maximum": "<=",
    "exclusiveMaximum": "<",
    "minLength": "length >=",
    "minItems": "length >=",
    "pattern": "matching",
}


@cache
def schema() -> dict[str, Any]:
    """The whole tree as JSON schema."""
    return Settings.model_json_schema()


def explain(key: str, settings: Settings | None = None) -> list[str]:
    """Lines that explain a setting, or one line for each setting of a section or each field of a table.

    With ``settings``, the lines also show the value that the setting has there.

    Raises:
        SettingsError: there is no such key.
    """
    path = tuple(key.split("."))
    *sections, name = path
    if name not in keys_in(tuple(sections)):
        if now := RENAMED.get(key):
            raise SettingsError(f"setting {key} is now {now}")
        if instead := REMOVED.get(key) or REMOVED.get(path[0]):
            raise SettingsError(f"setting {key} was removed: {instead}")
        raise SettingsError(f"unknown setting {key}{suggestion(path)}")
    if inner := keys_in(path):
        fields = [f"  {one:<24} {description_of((*path, one))}" for one in inner]
        if key not in known_keys():
            return [f"[{key}]", *fields]
        how = f"  set its fields in [{key}], or as --{key}.FIELD"
        return [key, f"  {description_of(path)}", "  table", *_advanced(key), *fields, how]
    lines = [key, f"  {description_of(path)}", f"  {_shape(path)}", *_advanced(key)]
    if settings is not None:
        lines.append(f"  value here: {_shown(value_at(settings, path))}")
    if path in secret_keys():
        lines.append(
            f"  set it as {variable_of(path)}, or as {name} in [{'.'.join(sections)}]; its value is never displayed"
        )
    else:
        lines.append(f"  set it as {name} in [{'.'.join(sections)}], {variable_of(path)}, or --{key}")
    return lines


def _advanced(key: str) -> list[str]:
    return [] if key in first_keys() else ["  advanced: most runs keep the default"]


@cache
def defaults() -> dict[str, Any]:
    """The defaults of all settings that have one, by dotted key, in the form of a resolved file."""
    return dict(_defaults(Settings, ""))


def _defaults(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _defaults(field.annotation, f"{prefix}{name}.")
        elif not field.is_required():
            default = field.get_default(call_default_factory=True)
            # Validated as a given value would be: a whole number in a list of floats becomes a float.
            if isinstance(default, list | tuple) and field.annotation is not None:
                default = TypeAdapter(field.annotation).validate_python(default)
            yield prefix + name, to_jsonable_python(default)


def description_of(path: Key) -> str:
    """A setting's description in one line; empty if it has none."""
    field = _field(path)
    text = str(field.get("description") or "")
    return " ".join(text.split())


def value_at(settings: BaseModel, path: Key) -> Any:
    """The value of a setting."""
    value: Any = settings
    for part in path:
        value = getattr(value, part)
    return value


def _field(path: Key) -> dict[str, Any]:
    tree = schema()
    node: dict[str, Any] = tree
    for part in path:
        node = node["properties"][part]
        reference = node.get("$ref")
        # The last reference is not followed: a description next to it takes precedence over the section's own.
        if reference and part != path[-1]:
            node = tree["$defs"][reference.rpartition("/")[2]]
    if "description" not in node and "$ref" in node:
        return {**tree["$defs"][node["$ref"].rpartition("/")[2]], **node}
    return node


def _shape(path: Key) -> str:
    field = _field(path)
    default = f"default {_shown(field['default'])}" if "default" in field else "required"
    return f"{' or '.join(_kinds(field))}; {default}"


def _kinds(field: dict[str, Any]) -> Iterator[str]:
    if "anyOf" in field:
        for one in field["anyOf"]:
            yield from _kinds(one)
    elif "enum" in field or "const" in field:
        yield ", ".join(_shown(value) for value in field.get("enum", [field.get("const")]))
    else:
        kind = {"null": "none", "array": "list", "object": "table"}.get(field.get("type", ""), field.get("type", "any"))
        bounds = [f"{sign} {field[bound]}" for bound, sign in _BOUNDS.items() if bound in field]
        yield " ".join([kind, *bounds])


def _shown(value: Any) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case str():
            return f'"{value}"'
        case _:
            return str(value)
