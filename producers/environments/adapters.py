"""Environments of other libraries and of the user, found by name and imported only when needed.

``verifiers``: its environments run their rollouts themselves, with OpenAI's client and the session's address.
``openenv``: a server with a protocol of reset and step. The action is a text in the field that the options name.
"""

import json
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import cache, partial
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
"""Largest message of an OpenEnv server, which may send pictures."""
_KEY_VARIABLE = "STREAMRL_SESSION_KEY"


def _variable_of(key: str) -> str:
    """Put a key into an environment variable and return the variable's name, which verifiers' configuration needs.

    Each key has its own variable, which is never removed: episodes of several sessions run at once, and verifiers may
    read the variable late.
    """
    name = f"{_KEY_VARIABLE}_{sha256(key.encode()).hexdigest()[:16].upper()}"
    os.environ[name] = key
    return name


def loaded(name: str, options: Mapping[str, Any]) -> Environment | AgentProgram:
    """A new environment for one episode.

    Raises:
        UserError: no environment has that name, its library is missing, or it does not accept the options.
    """
    kind, _, what = name.partition(":")
    if kind == "verifiers":
        return VerifiersProgram(what, options)
    make: Callable[..., object]
    if kind == "openenv":
        make = partial(OpenEnvEnvironment, what)
    else:
        make = SHIPPED[name] if name in SHIPPED else load_function(name)
    try:
        made = make(**options)
    except TypeError as error:
        raise UserError(f"expected options that environment {name} accepts, got: {error}") from error
    if not isinstance(made, Environment | AgentProgram):
        raise UserError(
            f"expected {name} to make an environment (tools, request, reset, step, close) or a program (play), got "
            f"{type(made).__name__}"
        )
    return made


class VerifiersProgram:
    """An environment of verifiers with its own rollout, tools and rubric.

    The library has two kinds. Packages with ``load_environment`` get the options as arguments. For tasksets (its
    ``verifiers.v1``) the options are its own ``[env]`` settings: ``taskset``, ``agent.harness`` and so on.
    """

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self._play = _verifiers_player(name, json.dumps(options, sort_keys=True))

    async def play(self, task: int, endpoint: Endpoint) -> float:
        """See ``AgentProgram``."""
        return await self._play(task, endpoint)


@cache
def _verifiers_player(name: str, options: str) -> Callable[[int, Endpoint], Awaitable[float]]:
    """A function that plays an episode of the environment. Cached, since making it may read a data set."""
    try:
        verifiers = import_module("verifiers")
    except ImportError as error:
        raise UserError(
            f"expected the package verifiers for environment verifiers:{name}, got: {error}; pip install verifiers"
        ) from error
    make = _package_player if hasattr(_module_of(name), "load_environment") else _taskset_player
    try:
        return make(verifiers, name, json.loads(options))
    except Exception as error:  # the environment's own code may raise any exception
        said = " ".join(str(error).split())
        raise UserError(
            f"expected a verifiers environment called {name}, got: {said}; install it, or correct its options"
        ) from error


def _module_of(name: str) -> object:
    # ``owner/name@version`` of the library's hub is installed as ``name``.
    with suppress(ImportError):
        return import_module(name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_"))
    return None


def _package_player(
    verifiers: Any, name: str, options: Mapping[str, Any]
) -> Callable[[int, Endpoint], Awaitable[float]]:
    environment = verifiers.load_environment(name, **options)
    rows = environment.get_dataset()

    async def play(task: int, endpoint: Endpoint) -> float:
        client = import_module("verifiers.types").ClientConfig(
            client_type="openai_chat_completions",
            api_base_url=endpoint.base_url,
            api_key_var=_variable_of(endpoint.api_key),
        )
        # The environment's own arguments, such as stop strings. Copied, since the rollout modifies its argument.
        sampling = deepcopy(environment.sampling_args)
        done = await environment.run_rollout(rows[task % len(rows)], client, endpoint.model, sampling)
        if done.get("error"):
            raise UserError(f"expected a rollout of verifiers:{name}, got: {done['error']}")
        return float(done["reward"] or 0.0)

    return play


def _taskset_player(
    _verifiers: Any, name: str, options: Mapping[str, Any]
) -> Callable[[int, Endpoint], Awaitable[float]]:
    verifiers, loaders = import_module("verifiers.v1"), import_module("verifiers.v1.utils.loaders")
    settings = loaders.resolve_env_config({**options, "taskset": {**options.get("taskset", {}), "id": name}})
    tasks = _Repeated(loaders.load_environment(settings).taskset)

    async def play(task: int, endpoint: Endpoint) -> float:
        client = verifiers.EvalClientConfig(base_url=endpoint.base_url, api_key_var=_variable_of(endpoint.api_key))
        # Each episode has its own environment, since ``serving`` must be entered and left in the same asyncio task.
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
                f"expected one agent in verifiers:{name}, got {len(episode.traces)}: a session has one policy only"
            )
        return float(episode.traces[0].reward)

    return play


class _Repeated:
    """Items by index, starting over after the last one. Items are read only when needed: some sets are endless."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._more, self._read = iter(items), list[Any]()

    def __getitem__(self, index: int) -> Any:
        self._read.extend(islice(self._more, max(0, index + 1 - len(self._read))))
        return self._read[index % len(self._read)]


class OpenEnvEnvironment:
    """An environment behind an OpenEnv server (``/ws``, JSON messages), with one connection for each episode.

    The policy reads observations as text, and its reply is the action. ``action``: the action's field for the text;
    ``observation``: the observation's field to show (empty: all of it); ``prompt``: text before the first observation;
    ``max_tokens``: most tokens of a turn, by default as many as the run allows. ``timeout_s``: longest wait for an
    answer of the server.

    Raises:
        UserError: the address is not one of HTTP.
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
        if not url.startswith(("http://", "https://")):
            raise UserError(f"expected openenv:http://HOST:PORT, got openenv:{url}")
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
            raise UserError(f"expected an OpenEnv server at {self._url}, got: {error}; start it") from error
        found = await self._request("reset", {"seed": task})
        return [{"role": "user", "content": self._prompt + self._observation_text(found.get("observation"))}]

    async def step(self, reply: PolicyReply) -> EnvironmentStep:
        """See ``Environment``."""
        found = await self._request("step", {self._action: reply.content})
        messages = [{"role": "user", "content": self._observation_text(found.get("observation"))}]
        return EnvironmentStep(messages, float(found.get("reward") or 0.0), bool(found.get("done")))

    async def _request(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        assert self._socket is not None, "an episode starts with reset"
        try:
            await self._socket.send_json({"type": kind, "data": dict(data)})
            message = await self._socket.receive(timeout=self._timeout_s)
        except TimeoutError as error:
            raise UserError(
                f"expected {self._url} to answer {kind} within {self._timeout_s:g} s, got nothing; look at the server, "
                "or set its option timeout_s"
            ) from error
        except ConnectionError as error:
            raise UserError(f"expected {self._url} to answer {kind}, got: {error}") from error
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise UserError(
                f"expected {self._url} to answer {kind}, got the end of the connection; look at the server's log"
            )
        answer = message.json()
        found = answer.get("data") or {}
        if answer.get("type") == "error":
            # pydantic's errors, if the server's action has other fields
            faults = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in found.get("errors") or ()]
            raise UserError(
                f"expected {self._url} to answer {kind}, got: {'; '.join([str(found.get('message')), *faults])}"
            )
        return cast("Mapping[str, Any]", found)

    async def close(self) -> None:
        """See ``Environment``."""
        if self._socket is not None and not self._socket.closed:
            with suppress(ConnectionError):
                await self._socket.send_json({"type": "close"})
            await self._socket.close()
        if self._http is not None:
            await self._http.close()

    def _observation_text(self, observation: Any) -> str:
        if isinstance(observation, Mapping) and self._observation:
            return str(observation.get(self._observation, ""))
        return str(observation)
