"""Plays episodes in a process of its own: the loop between an environment and the policy behind an endpoint.

``play`` is called like a reward function, so time-outs, limits, restarts and blame are those of ``producers.rewards``.
It returns the reward of the last turn. The session has the rewards of earlier turns by then.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import aiohttp

from streamrl.producers.environments.adapters import loaded
from streamrl.schemas.environments import AgentProgram, Endpoint, Environment, Message, PolicyReply, ToolUse
from streamrl.schemas.errors import StreamRLError

LOAD_ONLY = -1
"""Task number with which the environment is only loaded, so that a mistake shows at the start."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
_TEXT_ONLY: set[str] = set()
"""Models without a chat template, which get the conversation as a text to continue."""


class EpisodeFailed(StreamRLError):
    """An episode failed, so it has no reward. The message is the reason."""


async def play(
    environment: list[str],
    options: list[Mapping[str, Any]],
    task: list[int],
    endpoint: list[Mapping[str, str]],
    max_turns: list[int],
    **_others: object,
) -> list[float]:
    """Play one episode. Returns the reward of its last turn.

    Raises:
        StreamRLError: the episode could not be played to its end.
    """
    made = loaded(environment[0], options[0])
    if task[0] == LOAD_ONLY:
        return [0.0]
    where = Endpoint(**endpoint[0])
    if isinstance(made, AgentProgram):
        return [await made.play(task[0], where)]
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {where.api_key}"}) as http:
        return [await play_turns(made, task[0], PolicyClient(where, http), max_turns[0])]


async def play_turns(environment: Environment, task: int, policy: "PolicyClient", max_turns: int) -> float:
    """Play an episode turn by turn. Returns the last turn's reward; the session gets rewards of earlier turns.

    Raises:
        EpisodeFailed: the policy does not answer.
    """
    try:
        conversation = [*await environment.reset(task)]
        for number in range(max_turns):
            reply, call_id = await policy.ask(conversation, environment.tools, environment.request)
            found = await environment.step(reply)
            if found.done or number + 1 == max_turns:
                return found.reward
            if found.reward:
                await policy.reward(call_id, found.reward)
            conversation += [reply.message, *found.messages]
    finally:
        await environment.close()
    return 0.0


@dataclass
class PolicyClient:
    """A client of OpenAI's API at an endpoint. Sends chats, or plain texts if the model has no chat template."""

    endpoint: Endpoint
    http: aiohttp.ClientSession
    _sleep: Any = field(default=asyncio.sleep)

    async def ask(
        self, conversation: Sequence[Message], tools: Sequence[Mapping[str, Any]], request: Mapping[str, Any]
    ) -> tuple[PolicyReply, str]:
        """The policy's next turn, and the id of the call.

        Raises:
            EpisodeFailed: the call is refused, or fails.
        """
        if self.endpoint.model not in _TEXT_ONLY:
            fields = {"messages": [*conversation]} | ({"tools": [*tools]} if tools else {})
            answer, error = await self._post("/chat/completions", fields | dict(request))
            if answer is not None:
                return _chat_reply(answer)
            if error.get("code") != "no_chat_template":
                raise EpisodeFailed(f"expected an answer from the policy, got: {error.get('message')}")
            _TEXT_ONLY.add(self.endpoint.model)
        text = "".join(str(message["content"]) for message in conversation)
        answer, error = await self._post("/completions", {"prompt": text} | dict(request))
        if answer is None:
            raise EpisodeFailed(f"expected an answer from the policy, got: {error.get('message')}")
        choice = answer["choices"][0]
        message = {"role": "assistant", "content": choice["text"]}
        return PolicyReply(choice["text"], (), choice["finish_reason"], message), answer["id"]

    async def reward(self, call_id: str, reward: float) -> None:
        """Send a turn's reward.

        Raises:
            EpisodeFailed: the reward is refused.
        """
        answer, error = await self._post("/feedback", {"id": call_id, "reward": reward}, names_model=False)
        if answer is None:
            raise EpisodeFailed(f"expected the gateway to accept a turn's reward, got: {error.get('message')}")

    async def _post(
        self, path: str, fields: Mapping[str, Any], *, names_model: bool = True
    ) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """The answer, or the error. Retries while the gateway is down, full or without workers, until the episode's
        time-out.
        """
        body = {"model": self.endpoint.model} | dict(fields) if names_model else dict(fields)
        pause = FIRST_PAUSE_S
        while True:
            try:
                async with self.http.post(self.endpoint.base_url + path, json=body) as response:
                    status, said = response.status, await response.read()
            except aiohttp.ClientError as error:
                status, said = 503, json.dumps({"error": {"message": str(error)}}).encode()
            if status not in (429, 502, 503):
                break
            await self._sleep(pause)
            pause = min(LONGEST_PAUSE_S, 2 * pause)
        answer = cast("dict[str, Any]", json.loads(said))
        return (answer, {}) if status == 200 else (None, answer.get("error", {}))


def _chat_reply(answer: Mapping[str, Any]) -> tuple[PolicyReply, str]:
    choice = answer["choices"][0]
    message = {name: value for name, value in choice["message"].items() if value is not None}
    calls = tuple(
        ToolUse(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    )
    return PolicyReply(message.get("content", ""), calls, choice["finish_reason"], message), answer["id"]
