"""The reward process: loads one function, calls it as TRL would, and answers until its worker exits.

``producers.rewards.runner`` starts it as ``python -m producers.rewards.child FUNCTION TIMEOUT_S OPTIONS CONFINEMENT``.
The pipes carry msgpack. Requests are ``[call number, packed task]``. Replies are one greeting (``["ready", is async]``
or ``["failed", reason]``), then ``[call number, reward, reason]``.

Invariants:
- a_call_is_answered_before_the_next_starts, for a synchronous function: so the worker knows which call is running. An
  async function runs all its calls at the same time.
- user_code_cannot_reach_the_pipes: its standard input is empty, and its standard output is standard error.
- nothing_outlives_the_worker: the process dies with the worker, even in C code that never returns to the interpreter.
"""

import asyncio
import inspect
import json
import math
import os
import signal
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

import msgpack

from streamrl.bus.embedded.process import die_with_parent
from streamrl.producers.rewards.builtin import BUILT_IN, DATASET, BuiltInOptions
from streamrl.producers.rewards.sandbox import RewardConfinement, confine
from streamrl.schemas.errors import RewardLoadError, UserError
from streamrl.schemas.extras import missing_package
from streamrl.schemas.import_path import load_function

if TYPE_CHECKING:
    from streamrl.producers.prompts.gym import GymDataset

RewardTask = dict[str, Any]
"""One completion with its prompt: ``prompt`` (text, or chat turns as maps), ``dataset``, ``columns``, ``text`` (the
completion) and ``ids`` (its token ids as int32 bytes, little-endian)."""
RewardResult = tuple[float | None, str | None]
"""A reward, or None with the reason. None without a reason: the function does not apply to this completion."""

_RESERVED = {"prompt", "completion", "completion_ids"}  # names that TRL passes itself, so no column may have them
MAX_REASON = 300
"""Most characters of a reason: the trajectory carries it, and an exception's text may be a whole model output."""


def main(function: str, timeout_s: float, options: str = "{}", confinement: str = "{}") -> None:
    """Confine the process, load the function, greet, serve calls. ``confinement``: a ``RewardConfinement`` as JSON."""
    # Before any user code is imported, so that nothing a module prints gets into the protocol.
    pipes = Pipes.take_over()
    try:
        confine(RewardConfinement(**json.loads(confinement)))
        # After confine(): the kernel resets this request when a process changes its user.
        _die_with_the_worker()
        reward = load_reward(function, options)
    except UserError as error:
        pipes.reply("failed", " ".join(str(error).split()))
        return
    pipes.reply("ready", reward.is_async)
    if reward.is_async:
        asyncio.run(_serve_async(reward, pipes, timeout_s))
    else:
        _serve(reward, pipes)


# The protocol


@dataclass(frozen=True)
class Pipes:
    """The protocol's file descriptors, which ``print`` and ``input`` do not reach."""

    requests: int
    replies: int

    @classmethod
    def take_over(cls) -> "Pipes":
        """Move standard input and output to new descriptors, and replace them by an empty input and standard error."""
        pipes = cls(os.dup(0), os.dup(1))
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        return pipes

    def reply(self, *message: Any) -> None:
        """Write one message, unbuffered."""
        rest = memoryview(msgpack.packb(message))
        while rest:
            rest = rest[os.write(self.replies, rest) :]

    def read_calls(self, deliver: Callable[[int, bytes], object]) -> None:
        """Pass every call to ``deliver``. When the worker exits, kill this process and all that it started."""
        unpacker = msgpack.Unpacker(max_buffer_size=0)
        while data := os.read(self.requests, 1 << 16):
            unpacker.feed(data)
            for number, task in unpacker:
                deliver(number, task)
        os.killpg(0, signal.SIGKILL)


def _die_with_the_worker() -> None:
    """Ask Linux for SIGKILL when the worker exits: without it an endless regular expression would run for ever."""
    if sys.platform == "linux":
        die_with_parent()


def _serve(reward: "LoadedReward", pipes: Pipes) -> None:
    """Call the function in the main thread, where alarm signals arrive; a second thread reads requests."""
    calls: SimpleQueue[tuple[int, bytes]] = SimpleQueue()
    Thread(target=pipes.read_calls, args=(lambda *call: calls.put(call),), daemon=True).start()
    while True:
        number, task = calls.get()
        try:
            try:
                result = reward_in(reward.call(_unpacked(task)))
            finally:
                # An alarm that the function left running would hit a later call, or end the process between two calls.
                signal.setitimer(signal.ITIMER_REAL, 0)
        except BaseException as error:  # also SystemExit, so that only os._exit ends the process
            result = None, reason_of(error)
        pipes.reply(number, *result)


async def _serve_async(reward: "LoadedReward", pipes: Pipes, timeout_s: float) -> None:
    loop, running = asyncio.get_running_loop(), set()

    def start(number: int, task: bytes) -> None:
        answering = loop.create_task(_answer(reward, pipes, timeout_s, number, task))
        running.add(answering)  # the loop has only weak references to its tasks
        answering.add_done_callback(running.discard)

    def deliver(number: int, task: bytes) -> None:
        loop.call_soon_threadsafe(start, number, task)

    Thread(target=pipes.read_calls, args=(deliver,), daemon=True).start()
    # Wait for ever: the reading thread ends the process when the worker exits.
    await loop.create_future()


async def _answer(reward: "LoadedReward", pipes: Pipes, timeout_s: float, number: int, task: bytes) -> None:
    """Answer in time, even if the function ignores its cancellation: after the time-out it is not awaited again."""

    async def call() -> RewardResult:
        try:
            return reward_in(await reward.call(_unpacked(task)))
        except BaseException as error:
            return None, reason_of(error)

    calling = asyncio.ensure_future(call())
    done, _ = await asyncio.wait({calling}, timeout=timeout_s)
    if done:
        pipes.reply(number, *calling.result())
    else:
        calling.cancel()
        pipes.reply(number, None, timeout_reason(timeout_s))


def _unpacked(task: bytes) -> RewardTask:
    # A tokenizer may produce half a surrogate pair, which strict UTF-8 refuses.
    unpacked: RewardTask = msgpack.unpackb(task, unicode_errors="surrogatepass")
    return unpacked


# Results and exceptions of a function


def reward_in(returned: Any) -> RewardResult:
    """The reward in a function's return value for one completion: a list, tuple, array or tensor of one number.

    Never raises.
    """
    try:
        values = returned.tolist() if hasattr(returned, "tolist") else returned
        if not isinstance(values, list | tuple):
            return None, f"expected a list of 1 reward, got {type(returned).__name__}"
        if len(values) != 1:
            return None, f"expected a list of 1 reward, got {len(values)}"
        return _number_in(values[0])
    except Exception as error:  # any method of the user's object may raise
        return None, reason_of(error)


def _number_in(value: Any) -> RewardResult:
    if value is None:
        return None, None
    plain = value.item() if hasattr(value, "item") else value
    if not isinstance(plain, int | float):
        return None, f"expected a number or None, got {type(value).__name__}"
    try:
        number = float(plain)
    except OverflowError:  # an int beyond 1.8e308
        number = math.inf
    return (number, None) if math.isfinite(number) else (None, f"expected a finite number, got {number}")


def reason_of(error: BaseException) -> str:
    """One line of at most ``MAX_REASON`` characters that names the exception; never raises."""
    try:
        text = " ".join(str(error)[: 4 * MAX_REASON].split())
    except Exception:
        text = ""
    name = type(error).__name__
    return (f"{name}: {text}" if text else name)[:MAX_REASON]


def timeout_reason(timeout_s: float) -> str:
    """The reason for a completion whose call did not return in time."""
    return f"timed out after {timeout_s:g} s"


# Loading


@dataclass(frozen=True, slots=True)
class LoadedReward:
    """``call`` scores one task: it returns the function's return value, or an awaitable of it if ``is_async``."""

    call: Callable[[RewardTask], Any]
    is_async: bool


def load_reward(function: str, options: str = "{}") -> LoadedReward:
    """The data set's own scorer for ``dataset``, a built-in reward, or the function with an import path.

    ``options``: ``BuiltInOptions`` as JSON.

    Raises:
        RewardLoadError: the function cannot be imported, or cannot be called with keyword arguments.
    """
    if function == DATASET:
        from streamrl.producers.prompts.gym import import_reasoning_gym

        try:
            import_reasoning_gym()  # takes seconds, so it is done before the first completion waits for it
        except UserError as error:
            raise RewardLoadError(f"expected to load the data set's own scorer, got: {error}") from error
        return LoadedReward(score_with_dataset, is_async=False)
    if function in BUILT_IN:
        return _load_built_in(function, BuiltInOptions.of(json.loads(options)))
    loaded = load_function(function, RewardLoadError)
    return LoadedReward(bind(loaded, function), _is_async(loaded))


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _load_built_in(name: str, options: BuiltInOptions) -> LoadedReward:
    from streamrl.producers.rewards.builtin import built_in

    try:
        loaded = built_in(name, options)
        return LoadedReward(bind(loaded, name), _is_async(loaded))
    except ImportError as error:
        if missing := missing_package(error):
            raise RewardLoadError(f"reward {name!r}: {missing}") from error
        raise RewardLoadError(f"expected the library of reward {name!r} to be installed, got: {error}") from error


def bind(function: Callable[..., Any], path: str) -> Callable[[RewardTask], Any]:
    """A caller that passes the keyword arguments that the function takes: all of them if it has ``**kwargs``.

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
        if takes_all or "completion_ids" in wanted:  # thousands of ints, made only if they are needed
            offered["completion_ids"] = [array("i", task["ids"]).tolist()]
        return function(**(offered if takes_all else {name: offered[name] for name in offered.keys() & wanted}))

    return call


def _arguments(task: RewardTask) -> dict[str, Any]:
    """The arguments that TRL's GRPOTrainer passes, for a batch of one. Calls to log functions are ignored."""
    is_chat = not isinstance(task["prompt"], str)
    completion = [{"role": "assistant", "content": task["text"]}] if is_chat else task["text"]
    return {name: [value] for name, value in task["columns"].items() if name not in _RESERVED} | {
        "prompts": [task["prompt"]],
        "completions": [completion],
        "trainer_state": None,
        "log_extra": _ignore,
        "log_metric": _ignore,
    }


def _ignore(*_arguments: Any, **_named: Any) -> None:
    """Ignore values that a function logs: the trainer is in another process."""


# The scorer of a reasoning-gym data set


@cache
def _dataset(name: str) -> "GymDataset":
    from streamrl.producers.prompts.gym import open_dataset  # slow to import, and only this scorer needs it

    return open_dataset(name, {}, size=1)


def score_with_dataset(task: RewardTask) -> list[float]:
    """The score of one completion, 0 to 1, in a list as a reward function returns it.

    Raises:
        DataError: the prompt's data set is not one of reasoning-gym's.
        ValueError: the prompt lacks the columns that the scorer needs.
    """
    from streamrl.producers.prompts.sources import scoring_entry

    dataset, columns = _dataset(task["dataset"]), task["columns"]
    if "answer" not in columns or "metadata" not in columns:
        raise ValueError(f"expected columns 'answer' and 'metadata', got {sorted(columns)}")
    return [dataset.score_answer(answer=task["text"], entry=scoring_entry(columns))]


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), *sys.argv[3:])
