"""Loads a reward function in its process, and turns a task into the arguments TRL would call it with.

A task is one completion with its prompt, as a plain map: ``prompt`` (text, or chat turns as maps), ``dataset``,
``columns``, ``text`` (the completion) and ``ids`` (its token ids as int32 bytes, little-endian).
"""

import inspect
import json
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from producers.rewards.builtin.names import BUILT_IN, BuiltInOptions
from schemas.errors import RewardLoadError, UserError
from schemas.import_path import load_function

DATASET = "dataset"
Task = dict[str, Any]
_RESERVED = {"prompt", "completion", "completion_ids"}


@dataclass(frozen=True, slots=True)
class Scorer:
    """Scores one task; ``call`` returns what the function returned, or an awaitable of it if ``is_async``."""

    call: Callable[[Task], Any]
    is_async: bool


def load_scorer(function: str, options: str = "{}") -> Scorer:
    """The data set's own scorer for ``dataset``, one that comes along, or the function behind the import path.

    ``options``: ``BuiltInOptions`` as JSON.

    Raises:
        RewardLoadError: it cannot be imported, or cannot be called with keyword arguments.
    """
    if function == DATASET:
        return _dataset_scorer()
    if function in BUILT_IN:
        return _built_in_scorer(function, BuiltInOptions(**json.loads(options)))
    loaded = load_function(function, RewardLoadError)
    is_async = inspect.iscoroutinefunction(loaded) or inspect.iscoroutinefunction(type(loaded).__call__)
    return Scorer(bind(loaded, function), is_async)


def _dataset_scorer() -> Scorer:
    from producers.rewards.dataset import score, warm_up

    try:
        warm_up()
    except (ImportError, UserError) as error:
        raise RewardLoadError(f"expected to load the data set's own scorer, got: {error}") from error
    return Scorer(score, is_async=False)


def _built_in_scorer(name: str, options: BuiltInOptions) -> Scorer:
    from producers.rewards.builtin.choice import built_in

    try:
        return Scorer(bind(built_in(name, options), name), is_async=False)
    except ImportError as error:
        raise RewardLoadError(f"expected the library of reward {name!r} to be installed, got: {error}") from error


def bind(function: Callable[..., Any], path: str) -> Callable[[Task], Any]:
    """A caller that passes the keyword arguments the function takes: all of them if it has ``**kwargs``.

    Raises:
        RewardLoadError: an argument can only be passed by position, or the signature cannot be read.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise RewardLoadError(f"expected a Python function as reward {path}, got {function!r}") from error
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise RewardLoadError(
                f"expected reward {path} to take keyword arguments, got {parameter.name!r} by position only"
            )
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    wanted = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}

    def call(task: Task) -> Any:
        offered = _arguments(task)
        if takes_all or "completion_ids" in wanted:
            offered["completion_ids"] = [array("i", task["ids"]).tolist()]
        return function(**(offered if takes_all else {name: offered[name] for name in offered.keys() & wanted}))

    return call


def _arguments(task: Task) -> dict[str, Any]:
    """What TRL passes, for a batch of one. What a function logs is dropped: it runs outside the trainer."""
    columns = {name: [value] for name, value in task["columns"].items() if name not in _RESERVED}
    return columns | {
        "prompts": [task["prompt"]],
        "completions": [_completion(task)],
        "trainer_state": None,
        "log_extra": _drop,
        "log_metric": _drop,
    }


def _completion(task: Task) -> Any:
    if isinstance(task["prompt"], str):
        return task["text"]
    return [{"role": "assistant", "content": task["text"]}]


def _drop(*_arguments: Any, **_named: Any) -> None:
    """Accepts what a function wants to log."""
