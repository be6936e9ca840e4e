"""What an environment is: a task of several turns, or a program that plays one by itself. Knows no server and no model.

Both are made anew for every episode, by a class or function that takes the user's options. Messages are OpenAI's, as
plain mappings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

Message = Mapping[str, Any]


@dataclass(frozen=True)
class ToolUse:
    """A tool call of the policy's; ``arguments``: JSON, as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class PolicyReply:
    """What the policy said in one turn. ``message``: the same as the conversation holds it."""

    content: str
    tool_calls: tuple[ToolUse, ...]
    finish_reason: str
    message: Message


@dataclass(frozen=True)
class EnvironmentStep:
    """What came of a turn: messages that answer it, the reward that it earned, and whether the episode is over."""

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False


@dataclass(frozen=True)
class Endpoint:
    """Where an episode's policy is asked: OpenAI's interface, on which all calls are one session."""

    base_url: str
    api_key: str
    model: str


@runtime_checkable
class Environment(Protocol):
    """An episode that is played by turns.

    ``tools``: OpenAI's definitions of what the policy may call; ``request``: more fields of each request, such as
    ``stop`` and ``max_tokens``.
    """

    tools: Sequence[Mapping[str, Any]]
    request: Mapping[str, Any]

    async def reset(self, task: int) -> Sequence[Message]:
        """Begin the episode of that task: the same number, the same task. The first messages."""
        ...

    async def step(self, reply: PolicyReply) -> EnvironmentStep:
        """Take in a turn of the policy's."""
        ...

    async def close(self) -> None:
        """Release what the episode holds."""
        ...


@runtime_checkable
class AgentProgram(Protocol):
    """An agent that plays an episode by itself, whatever it is written with: it only has to ask the endpoint."""

    async def play(self, task: int, endpoint: Endpoint) -> float:
        """Play the episode of that task; its reward."""
        ...
