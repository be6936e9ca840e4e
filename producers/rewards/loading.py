"""Loads a reward function in its process, and turns a task into the arguments TRL would call it with.

A task is one completion with its prompt, as a plain map: ``prompt`` (text, or chat turns as maps), ``dataset``,
``columns``, ``text`` (the completion) and ``ids`` (its token ids as int32 bytes, little-endian).
"""
from producers.rewards.builtin import DATASET

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
import asyncio
import ctypes
import os
import signal
import sys
from queue import SimpleQueue
from threading import Thread
from typing import Any
import msgpack
from producers.rewards import loading as verdict
from schemas.errors import UserError

if TYPE_CHECKING:
    from producers.prompts.sources import GymDataset

# Judges what a reward function returned or raised. Pure; never raises.

MAX_REASON = 300
RewardResult = tuple[float | None, str | None]
"""A reward, or none with the reason; none without a reason: the function does not apply to this completion."""


def of_returned(returned: Any) -> RewardResult:
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


def _of_value(value: Any) -> RewardResult:
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


def of_raised(error: BaseException) -> RewardResult:
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
RewardTask = dict[str, Any]
_RESERVED = {"prompt", "completion", "completion_ids"}


@dataclass(frozen=True, slots=True)
class LoadedReward:
    """Scores one task; ``call`` returns what the function returned, or an awaitable of it if ``is_async``."""

    call: Callable[[RewardTask], Any]
    is_async: bool


def load_scorer(function: str, options: str = "{}") -> LoadedReward:
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
    return LoadedReward(bind(loaded, function), is_async)


def _dataset_scorer() -> LoadedReward:

    try:
        warm_up()
    except (ImportError, UserError) as error:
        raise RewardLoadError(f"expected to load the data set's own scorer, got: {error}") from error
    return LoadedReward(score, is_async=False)


def _built_in_scorer(name: str, options: BuiltInOptions) -> LoadedReward:
    from producers.rewards.builtin import built_in

    try:
        return LoadedReward(bind(built_in(name, options), name), is_async=False)
    except ImportError as error:
        raise RewardLoadError(f"expected the library of reward {name!r} to be installed, got: {error}") from error


def bind(function: Callable[..., Any], path: str) -> Callable[[RewardTask], Any]:
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

    def call(task: RewardTask) -> Any:
        offered = _arguments(task)
        if takes_all or "completion_ids" in wanted:
            offered["completion_ids"] = [array("i", task["ids"]).tolist()]
        return function(**(offered if takes_all else {name: offered[name] for name in offered.keys() & wanted}))

    return call


def _arguments(task: RewardTask) -> dict[str, Any]:
    """What TRL passes, for a batch of one. What a function logs is dropped: it runs outside the trainer."""
    columns = {name: [value] for name, value in task["columns"].items() if name not in _RESERVED}
    return columns | {
        "prompts": [task["prompt"]],
        "completions": [_completion(task)],
        "trainer_state": None,
        "log_extra": _drop,
        "log_metric": _drop,
    }


def _completion(task: RewardTask) -> Any:
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


def score(task: RewardTask) -> list[float]:
    """The score of one completion, 0 to 1, in a list as a reward function returns it.

    Raises:
        DataError: the prompt's data set is not one of reasoning-gym's.
        ValueError: the prompt lacks the columns that the scorer needs.
    """
    from producers.prompts.sources import scoring_entry

    dataset, columns = _dataset(task["dataset"]), task["columns"]
    if "answer" not in columns or "metadata" not in columns:
        raise ValueError(f"expected columns 'answer' and 'metadata', got {sorted(columns)}")
    return [dataset.score_answer(answer=task["text"], entry=scoring_entry(columns))]

Job = tuple[int, bytes]
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Pipes:
    """The protocol's own descriptors, out of reach of ``print`` and ``input``."""

    requests: int
    replies: int

    @classmethod
    def take_over(cls) -> "Pipes":
        """Move standard input and output aside; the function gets an empty input, and standard error as output."""
        pipes = cls(os.dup(0), os.dup(1))
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        return pipes

    def reply(self, *message: Any) -> None:
        """Write one message at once."""
        rest = memoryview(msgpack.packb(message))
        while rest:
            rest = rest[os.write(self.replies, rest) :]

    def follow(self, deliver: Callable[[Job], object]) -> None:
        """Hand over every job; ends this process, and all it started, when its owner is gone."""
        unpacker = msgpack.Unpacker(max_buffer_size=0)
        while data := os.read(self.requests, 1 << 16):
            unpacker.feed(data)
            for job_id, task in unpacker:
                deliver((job_id, task))
        os.killpg(0, signal.SIGKILL)


def main(function: str, timeout_s: float, options: str = "{}") -> None:
    """Load, greet, serve."""
    pipes = Pipes.take_over()
    _die_with_the_worker()
    try:
        scorer = load_scorer(function, options)
    except UserError as error:
        pipes.reply("failed", " ".join(str(error).split()))
        return
    pipes.reply("ready", scorer.is_async)
    if scorer.is_async:
        asyncio.run(_serve_async(scorer, pipes, timeout_s))
    else:
        _serve(scorer, pipes)


def _die_with_the_worker() -> None:
    """Ask Linux for SIGKILL at the worker's end: a function that never lets go of the interpreter would live on."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(scorer: LoadedReward, pipes: Pipes) -> None:
    inbox: SimpleQueue[Job] = SimpleQueue()
    Thread(target=pipes.follow, args=(inbox.put,), daemon=True).start()
    while True:
        job_id, task = inbox.get()
        pipes.reply(job_id, *_judged(scorer, task))


def _judged(scorer: LoadedReward, task: bytes) -> verdict.RewardResult:
    try:
        return verdict.of_returned(scorer.call(_unpacked(task)))
    except BaseException as error:
        return verdict.of_raised(error)


def _unpacked(task: bytes) -> Any:
    return msgpack.unpackb(task, unicode_errors="surrogatepass")


async def _serve_async(scorer: LoadedReward, pipes: Pipes, timeout_s: float) -> None:
    loop, running = asyncio.get_running_loop(), set()

    def start(job: Job) -> None:
        task = loop.create_task(_answer(scorer, pipes, timeout_s, *job))
        running.add(task)
        task.add_done_callback(running.discard)

    Thread(target=pipes.follow, args=(lambda job: loop.call_soon_threadsafe(start, job),), daemon=True).start()
    await loop.create_future()


async def _answer(scorer: LoadedReward, pipes: Pipes, timeout_s: float, job_id: int, task: bytes) -> None:
    call = asyncio.ensure_future(_judged_async(scorer, task))
    done, _ = await asyncio.wait({call}, timeout=timeout_s)
    if done:
        pipes.reply(job_id, *call.result())
    else:
        call.cancel()
        pipes.reply(job_id, None, verdict.timed_out(timeout_s))


async def _judged_async(scorer: LoadedReward, task: bytes) -> verdict.RewardResult:
    try:
        return verdict.of_returned(await scorer.call(_unpacked(task)))
    except BaseException as error:
        return verdict.of_raised(error)
