"""Loads a reward function in its process, and turns a task into the arguments TRL would call it with.

A task is one completion with its prompt, as a plain map: ``prompt`` (text, or chat turns as maps), ``dataset``,
``columns``, ``text`` (the completion) and ``ids`` (its token ids as int32 bytes, little-endian).
"""

import inspect
import json
import math
import warnings
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from producers.rewards.builtin import BUILT_IN, BuiltInOptions
from schemas.errors import RewardLoadError, UserError
from schemas.import_path import load_function

if TYPE_CHECKING:
    from producers.prompts.sources import GymDataset

# Judges what a reward function returned or raised. Pure; never raises.

MAX_REASON = 300
Verdict = tuple[float | None, str | None]
"""A reward, or none with the reason; none without a reason: the function does not apply to this completion."""


def of_returned(returned: Any) -> Verdict:
    """The reward in what a function returned for one completion: a list, tuple, array or tensor of one number."""
    try:
        values = returned.tolist() if hasattr(returned, "tolist") else returned
        if not isinstance(values, list | tuple):
            return None, f"expected a list of 1 reward, got {type(returned).__name__}"
        if len(values) != 1:
            return None, f"expected a list of 1 reward, got {len(values)}"
        return _of_value(values[0])
    except Exception as error:
        return of_raised(error)


def _of_value(value: Any) -> Verdict:
    if value is None:
        return None, None
    plain = value.item() if hasattr(value, "item") else value
    if not isinstance(plain, int | float):
        return None, f"expected a number or None, got {type(value).__name__}"
    try:
        number = float(plain)
    except OverflowError:
        number = math.inf
    return (number, None) if math.isfinite(number) else (None, f"expected a finite number, got {number}")


def of_raised(error: BaseException) -> Verdict:
    """One line that names what was raised."""
    try:
        text = " ".join(str(error)[: 4 * MAX_REASON].split())
    except Exception:
        text = ""
    name = type(error).__name__
    return None, (f"{name}: {text}" if text else name)[:MAX_REASON]


def timed_out(timeout_s: float) -> str:
    """The reason given to a completion whose call did not return in time."""
    return f"timed out after {timeout_s:g} s"


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

    try:
        warm_up()
    except (ImportError, UserError) as error:
        raise RewardLoadError(f"expected to load the data set's own scorer, got: {error}") from error
    return Scorer(score, is_async=False)


def _built_in_scorer(name: str, options: BuiltInOptions) -> Scorer:
    from producers.rewards.builtin import built_in

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


# The scorer that a reasoning-gym data set brings along; runs in the reward process only.


@cache
def _dataset(name: str) -> "GymDataset":
    from producers.prompts.sources import open_dataset  # heavy, and only this scorer needs it

    return open_dataset(name, {}, size=1)


def warm_up() -> None:
    """Import the library, which takes seconds, before the first completion waits for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym  # noqa: F401


def score(task: Task) -> list[float]:
    """The score of one completion, 0 to 1, in a list as a reward function returns it.

    Raises:
        DataError: the prompt's data set is not one of reasoning-gym's.
        ValueError: the prompt lacks the columns that the scorer needs.
    """
    from producers.prompts.entries import scoring_entry

    dataset, columns = _dataset(task["dataset"]), task["columns"]
    if "answer" not in columns or "metadata" not in columns:
        raise ValueError(f"expected columns 'answer' and 'metadata', got {sorted(columns)}")
    return [dataset.score_answer(answer=task["text"], entry=scoring_entry(columns))]
