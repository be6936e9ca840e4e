"""Scores completions with every reward function of the settings, outside the event loop and with time-outs.

Invariant a_failing_reward_is_recorded_and_harms_no_other: whatever a function does, its reward becomes none with a
one-line reason, and the other functions and completions are scored as if nothing had happened.
"""

import asyncio
import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import msgpack

from producers.rewards.lane import FunctionLane
from producers.rewards.settings import RewardSettings
from schemas.messages.prompts import Prompt


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A finished completion: its text and token ids, and the prompt with the columns that functions ask for."""

    prompt: Prompt
    completion_text: str
    completion_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Scores:
    """Raw rewards by name (none: not applicable, or failed), and why those that failed did."""

    rewards: dict[str, float | None]
    errors: dict[str, str]


class RewardRunner:
    """One process per function. ``start`` before ``score``, ``close`` at the end."""

    def __init__(self, settings: RewardSettings) -> None:
        self.names = settings.names
        options = json.dumps(asdict(settings.built_in_options))
        self._lanes = [
            FunctionLane(
                function,
                name,
                timeout_s=settings.timeout_s,
                load_timeout_s=settings.load_timeout_s,
                concurrency=settings.concurrency,
                options=options,
            )
            for function, name in zip(settings.functions, settings.names, strict=True)
        ]

    async def start(self) -> None:
        """Load every function.

        Raises:
            RewardLoadError: one of them cannot be loaded; none is left running.
        """
        outcomes = await asyncio.gather(*(lane.start() for lane in self._lanes), return_exceptions=True)
        failed = [outcome for outcome in outcomes if outcome is not None]
        if failed:
            await self.close()
            raise failed[0]

    async def score(self, request: ScoreRequest) -> Scores:
        """Score one completion with all functions; never raises for what a function does."""
        task = _packed(request)
        calls = [lane.call(task) for lane in self._lanes]
        verdicts = {name: await call for name, call in zip(self.names, calls, strict=True)}
        return Scores(
            {name: reward for name, (reward, _) in verdicts.items()},
            {name: reason for name, (_, reason) in verdicts.items() if reason is not None},
        )

    async def close(self) -> None:
        """End every reward process; calls still waiting are cancelled. Idempotent."""
        await asyncio.gather(*(lane.close() for lane in self._lanes))


def _packed(request: ScoreRequest) -> bytes:
    prompt, ids = request.prompt, request.completion_ids
    turns = () if isinstance(prompt.content, str) else prompt.content
    packed: bytes = msgpack.packb(
        {
            "prompt": [{"role": turn.role, "content": turn.content} for turn in turns] or prompt.text,
            "dataset": prompt.dataset,
            "columns": prompt.columns,
            "text": request.completion_text,
            "ids": (ids if isinstance(ids, array) and ids.typecode == "i" else array("i", ids)).tobytes(),
        },
        unicode_errors="surrogatepass",
    )
    return packed
