"""Interfaces of environments: a task of several turns, or a program that plays a whole episode.

Every episode gets a new object, made by a class or function that takes the user's options. Messages are OpenAI's, as
plain mappings. This module knows no server and no model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

Message = Mapping[str, Any]


@dataclass(frozen=True)
class ToolUse:
    """A tool call by the policy; ``arguments``: JSON, as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class PolicyReply:
    """The policy's answer in one turn. ``message``: the same answer, as the conversation holds it."""

    content: str
    tool_calls: tuple[ToolUse, ...]
    finish_reason: str
    message: Message


@dataclass(frozen=True)
class EnvironmentStep:
    """The result of a turn: messages that answer it, its reward, and whether the episode is over."""

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False


@dataclass(frozen=True)
class Endpoint:
    """Where an episode calls its policy: OpenAI's interface. All calls of an episode are one session."""

    base_url: str
    api_key: str
    model: str


@runtime_checkable
class Environment(Protocol):
    """An episode that is played turn by turn.

    ``tools``: OpenAI's definitions of the tools that the policy may call; ``request``: further fields of each request,
    for example ``stop`` and ``max_tokens``.
    """

    tools: Sequence[Mapping[str, Any]]
    request: Mapping[str, Any]

    async def reset(self, task: int) -> Sequence[Message]:
        """Start the episode of a task and return its first messages. The same number always means the same task."""
        ...

    async def step(self, reply: PolicyReply) -> EnvironmentStep:
        """Process one answer of the policy."""
        ...

    async def close(self) -> None:
        """Release what the episode holds."""
        ...


@runtime_checkable
class AgentProgram(Protocol):
    """An agent that plays a whole episode. It may be written with any library, as long as it calls the endpoint."""

    async def play(self, task: int, endpoint: Endpoint) -> float:
        """Play the episode of a task and return its reward."""
        ...
