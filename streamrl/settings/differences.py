"""How trees of values, such as the settings of runs, differ."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

ABSENT = "–"
OWN_TO_A_RUN = ("run.name", "run.directory", "kafka.bootstrap_servers", "relay.port")
"""Settings that are another's in every run."""


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def differing(trees: Sequence[Mapping[str, Any]], ignored: Sequence[str] = ()) -> list[tuple[str, tuple[str, ...]]]:
    """Keys whose values are not the same in all trees, in the order of the trees; with each, its values as text."""
    # A dict rather than a set, for the order of the files.
    keys = list(dict.fromkeys(key for tree in trees for key in tree if key not in ignored))
    rows = [(key, tuple(value_text(tree[key]) if key in tree else ABSENT for tree in trees)) for key in keys]
    # A run that kept no settings differs in nothing that is known.
    telling = [number for number, tree in enumerate(trees) if tree]
    return [(key, texts) for key, texts in rows if len({texts[number] for number in telling}) > 1]


def value_text(value: Any) -> str:
    """A value as it is shown."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 200 else text[:200] + "…"
