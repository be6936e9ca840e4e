"""What is wrong with a tree of settings, in one line: the key, where it came from, and the nearest right name."""

import difflib
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from settings.layers import Given, Key
from settings.renamed import RENAMED
from settings.tree import Settings

_ELSEWHERE = {
    "batch_size": "loop.groups_per_step",
    "rollout_batch_size": "loop.groups_per_step",
    "train_batch_size": "loop.groups_per_step",
    "n": "loop.num_generations",
    "n_samples_per_prompt": "loop.num_generations",
    "group_size": "loop.num_generations",
    "max_response_length": "loop.max_completion_length",
    "max_new_tokens": "loop.max_completion_length",
    "max_off_policy_steps": "loop.max_staleness",
    "lr": "training.learning_rate",
    "kl_coef": "algorithm.beta",
    "clip_ratio": "algorithm.epsilon",
    "model_name_or_path": "model.path",
    "reward_funcs": "rewards.functions",
    "reward_weights": "rewards.weights",
    "train_files": "data.path",
    "input_key": "data.prompt_column",
    "label_key": "data.answer_column",
}
"""What other libraries call it."""


def line_about(error: ValidationError, given: Given | None) -> str:
    """The first of the errors, wrong names before all others, and how many more there are."""
    first, *others = sorted(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    location = tuple(str(part) for part in first["loc"])
    key = ".".join(location)
    origin = given.origin(location) if given else ""
    more = f" ({len(others)} more)" if others else ""
    message = first["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    match first["type"]:
        case "extra_forbidden" if key in RENAMED:
            return f"setting {key}{origin} is now {RENAMED[key]}{more}"
        case "extra_forbidden":
            return f"unknown setting {key}{origin}{nearest(location)}{more}; `streamrl config show` lists all"
        case "missing" if len(location) == 1:
            return f"expected a section [{key}], got none; `streamrl init` writes a whole configuration{more}"
        case "missing":
            return f"expected a value for {key}, got none; set it in the file or with --{key} ...{more}"
        case "model_type":
            return f"expected a section [{key}], got {first['input']!r:.200}{origin}{more}"
        case "value_error":
            return f"setting {key}: {message}{origin}{more}"
        case "tuple_type" if isinstance(first["input"], str):
            said = f"expected a list such as '[\"{first['input']:.200}\"]', got {first['input']!r:.200}"
            return f"setting {key}: {said}{origin}{more}"
        case _:
            return f"setting {key}: {message}, got {first['input']!r:.200}{origin}{more}"


def nearest(location: Key) -> str:
    """The right name for a wrong one: the same name in another section, a similar one beside it, or all beside it."""
    *parents, wrong = location
    beside = names_in(tuple(parents))
    by_leaf = {key.rpartition(".")[2]: key for key in known_keys()} | _ELSEWHERE
    prefix = "".join(f"{part}." for part in parents)
    close = difflib.get_close_matches(wrong, beside, n=1, cutoff=0.5)
    if wrong in by_leaf:
        right: str | None = by_leaf[wrong]
    elif close:
        right = prefix + close[0]
    else:
        elsewhere = difflib.get_close_matches(wrong, by_leaf, n=1, cutoff=0.75)
        right = by_leaf[elsewhere[0]] if elsewhere else None
    return f"; did you mean {right}?" if right else f"; there are {', '.join(beside)}"


def known_keys(model: type[BaseModel] = Settings, prefix: str = "") -> Iterator[str]:
    """Every setting with its sections, such as ``loop.mode``; open tables such as ``data.options`` as one."""
    for name, field in model.model_fields.items():
        if section := _section(field.annotation):
            yield from known_keys(section, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def names_in(section: Key) -> list[str]:
    """The names that stand in a section; none if it is none."""
    model: type[BaseModel] | None = Settings
    for part in section:
        field = model.model_fields.get(part) if model else None
        model = _section(field.annotation) if field else None
    return sorted(model.model_fields) if model else []


def _section(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
