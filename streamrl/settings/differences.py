"""Compares trees of values, such as the settings of several runs."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

ABSENT = "–"
PER_RUN_SETTINGS = ("run.name", "run.directory", "kafka.bootstrap_servers", "relay.port")
"""Settings that differ between any two runs."""


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The tree's values by dotted key."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def differing(trees: Sequence[Mapping[str, Any]], ignored: Sequence[str] = ()) -> list[tuple[str, tuple[str, ...]]]:
    """Keys whose values differ between the trees, each with its value in every tree as text.

    Keys keep the order in which the trees name them.
    """
    # A dict rather than a set, because it keeps that order.
    keys = list(dict.fromkeys(key for tree in trees for key in tree if key not in ignored))
    rows = [(key, tuple(value_text(tree[key]) if key in tree else ABSENT for tree in trees)) for key in keys]
    # An empty tree is a run whose settings are unknown, so it is not compared.
    known = [number for number, tree in enumerate(trees) if tree]
    return [(key, texts) for key, texts in rows if len({texts[number] for number in known}) > 1]


def value_text(value: Any) -> str:
    """A value as displays show it, cut after 200 characters."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 200 else text[:200] + "…"
