"""Environments of other libraries, and of the user: found by name, imported only where they are asked for.

``verifiers``: its environments play their rollouts themselves, by OpenAI's client, which is given the session's
address. ``openenv``: a server's own protocol of reset and step; the action is a text in the field that the options
name.
"""

import json
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import cache
from hashlib import sha256
from importlib import import_module
from itertools import islice
from typing import Any, cast

import aiohttp

from streamrl.producers.environments.shipped import SHIPPED
from streamrl.schemas.environments import (
    AgentProgram,
    Endpoint,
    Environment,
    EnvironmentStep,
    Message,
    PolicyReply,
)
from streamrl.schemas.errors import UserError
from streamrl.schemas.import_path import load_function

MAX_MESSAGE_BYTES = 64 << 20
"""Of a server of OpenEnv's, which may show pictures."""
_KEY_VARIABLE = "STREAMRL_SESSION_KEY"


def _variable_of(key: str) -> str:
    """The environment variable through which verifiers gets a key: its configuration holds the variable's name only.

    Each key has its own variable, which stays: episodes of several sessions run at once, and the library reads it late.
    """
    name = f"{_KEY_VARIABLE}_{sha256(key.encode()).hexdigest()[:16].upper()}"
    os.environ[name] = key
    return name


def loaded(name: str, options: Mapping[str, Any]) -> Environment | AgentProgram:
    """A new environment for one episode.

    Raises:
        UserError: there is none of that name, its library is missing, or it does not take the options.
    """
    kind, _, what = name.partition(":")
    if kind == "verifiers":
        return VerifiersProgram(what, options)
    if kind == "openenv":
        return OpenEnvEnvironment(what, **options)
    make: Callable[..., object] = SHIPPED[name] if name in SHIPPED else load_function(name)
    try:
        made = make(**options)
    except TypeError as error:
        raise UserError(f"expected options that environment {name} takes, got: {error}") from error
    if not isinstance(made, Environment | AgentProgram):
        raise UserError(
            f"expected {name} to make an environment (tools, request, reset, step, close) or a program (play), got "
            f"{type(made).__name__}"
        )
    return made


class VerifiersProgram:
    """An environment of verifiers as it is: its rollout, its tools, its rubric.

    The library has two kinds: packages with ``load_environment``, to which the options are given, and tasksets (its
    ``verifiers.v1``), of which the options are its own ``[env]`` settings: ``taskset``, ``agent.harness`` and so on.
    """

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self._play = _of_verifiers(name, json.dumps(options, sort_keys=True))

    async def play(self, task: int, endpoint: Endpoint) -> float:
        """See ``AgentProgram``."""
        return await self._play(task, endpoint)


@cache
def _of_verifiers(name: str, options: str) -> Callable[[int, Endpoint], Awaitable[float]]:
    """What plays an episode of it. Kept for the process: making it may read a data set."""
    try:
        verifiers = import_module("verifiers")
    except ImportError as error:
        raise UserError(
            f"expected the package verifiers for environment verifiers:{name}, got: {error}; pip install verifiers"
        ) from error
    make = _packaged if hasattr(_module_of(name), "load_environment") else _of_taskset
    try:
        return make(verifiers, name, json.loads(options))
    except Exception as error:  # of the environment's own code
        said = " ".join(str(error).split())
        raise UserError(
            f"expected an environment of verifiers called {name}, got: {said}; install it first, or correct its options"
        ) from error


def _module_of(name: str) -> object:
    # ``owner/name@version`` of its hub is installed as ``name``.
    with suppress(ImportError):
        return import_module(name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_"))
    return None


def _packaged(verifiers: Any, name: str, options: Mapping[str, Any]) -> Callable[[int, Endpoint], Awaitable[float]]:
    environment = verifiers.load_environment(name, **options)
    rows = environment.get_dataset()

    async def play(task: int, endpoint: Endpoint) -> float:
        client = import_module("verifiers.types").ClientConfig(
            client_type="openai_chat_completions",
            api_base_url=endpoint.base_url,
            api_key_var=_variable_of(endpoint.api_key),
        )
        # Its own, such as stop strings; the rollout changes what it is given.
        sampling = deepcopy(environment.sampling_args)
        done = await environment.run_rollout(rows[task % len(rows)], client, endpoint.model, sampling)
        if done.get("error"):
            raise UserError(f"expected a rollout of verifiers:{name}, got: {done['error']}")
        return float(done["reward"] or 0.0)

    return play


def _of_taskset(_verifiers: Any, name: str, options: Mapping[str, Any]) -> Callable[[int, Endpoint], Awaitable[float]]:
    verifiers, loaders = import_module("verifiers.v1"), import_module("verifiers.v1.utils.loaders")
    settings = loaders.resolve_env_config({**options, "taskset": {**options.get("taskset", {}), "id": name}})
    tasks = _Repeated(loaders.load_environment(settings).taskset)

    async def play(task: int, endpoint: Endpoint) -> float:
        client = verifiers.EvalClientConfig(base_url=endpoint.base_url, api_key_var=_variable_of(endpoint.api_key))
        # One for each episode: what it serves its agent with is entered and left in one task.
        environment = loaders.load_environment(settings)
        async with environment.serving():
            episode = await environment.run_episode(
                tasks[task], verifiers.ModelContext(model=endpoint.model, client=client)
            )
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors:
            raise UserError(f"expected a rollout of verifiers:{name}, got: {errors[0].type}: {errors[0].message}")
        if len(episode.traces) != 1:
            raise UserError(
                f"expected one agent in verifiers:{name}, got {len(episode.traces)}: a session is one policy's"
            )
        return float(episode.traces[0].reward)

    return play


class _Repeated:
    """Items by number, beginning again behind the last one; read as far as was asked for, as some never end."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._more, self._read = iter(items), list[Any]()

    def __getitem__(self, index: int) -> Any:
        self._read.extend(islice(self._more, max(0, index + 1 - len(self._read))))
        return self._read[index % len(self._read)]


class OpenEnvEnvironment:
    """An environment behind a server of OpenEnv's, one connection an episode, by its protocol (``/ws``, JSON messages).

    What it observes is told as text, and what the policy says is its action. ``action``: the field of the action that
    holds the text; ``observation``: that of what is told (all of it, if there is none); ``prompt``: told before the
    first one; ``max_tokens``: of a turn, by default as many as the run allows.
    """

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(
        self,
        url: str,
        *,
        action: str = "message",
        observation: str = "",
        prompt: str = "",
        max_tokens: int | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self._url, self._timeout_s = url.rstrip("/") + "/ws", timeout_s
        self._action, self._observation, self._prompt = action, observation, prompt
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self.request: Mapping[str, Any] = {} if max_tokens is None else {"max_tokens": max_tokens}

    async def reset(self, task: int) -> Sequence[Message]:
        """See ``Environment``."""
        try:
            self._http = aiohttp.ClientSession()
            self._socket = await self._http.ws_connect(self._url, max_msg_size=MAX_MESSAGE_BYTES)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise UserError(f"expected a server of OpenEnv's at {self._url}, got: {error}; start it") from error
        found = await self._asked("reset", {"seed": task})
        return [{"role": "user", "content": self._prompt + self._told(found.get("observation"))}]

    async def step(self, reply: PolicyReply) -> EnvironmentStep:
        """See ``Environment``."""
        found = await self._asked("step", {self._action: reply.content})
        told = [{"role": "user", "content": self._told(found.get("observation"))}]
        return EnvironmentStep(told, float(found.get("reward") or 0.0), bool(found.get("done")))

    async def _asked(self, what: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        assert self._socket is not None, "an episode begins with reset"
        await self._socket.send_json({"type": what, "data": dict(data)})
        answer = await self._socket.receive_json(timeout=self._timeout_s)
        found = answer.get("data") or {}
        if answer.get("type") == "error":
            raise UserError(f"expected an answer of {self._url} to {what}, got: {found.get('message')}")
        return cast("Mapping[str, Any]", found)

    async def close(self) -> None:
        """See ``Environment``."""
        if self._socket is not None and not self._socket.closed:
            with suppress(ConnectionError):
                await self._socket.send_json({"type": "close"})
            await self._socket.close()
        if self._http is not None:
            await self._http.close()

    def _told(self, observation: Any) -> str:
        if isinstance(observation, Mapping) and self._observation:
            return str(observation.get(self._observation, ""))
        return str(observation)
