"""Environments played through a real gateway on emulated workers, in processes of their own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bus.port import Outgoing
from producers.environments.driver import Door, Environments, dataset_of
from producers.environments.settings import EnvironmentSettings
from schemas.errors import UserError
from schemas.identifiers import PolicyVersion
from schemas.reports import StepReport
from schemas.settings import LoopSettings
from schemas.topics import STEPS
from tests.fakes.waiting import until
from tests.producers.gateway.stage import RUN, CharacterTokenizer, ScriptedEngine, Stage, stage

LOOP = LoopSettings(groups_per_step=1, num_generations=2, max_staleness=0, max_prompt_length=64)


class TextTokenizer(CharacterTokenizer):
    """Of a model without a chat template."""

    has_chat_template = False


class Fails:
    """An environment whose every second episode fails."""

    tools: tuple[()] = ()
    request: dict[str, Any] = {"max_tokens": 4}
    made = 0

    def __init__(self) -> None:
        type(self).made += 1

    async def reset(self, task: int) -> list[dict[str, str]]:
        if self.made % 2:
            raise ValueError("it broke")
        return [{"role": "user", "content": "go"}]

    async def step(self, reply: Any) -> Any:
        from producers.environments.port import EnvironmentStep

        return EnvironmentStep(reward=1.0, done=True)

    async def close(self) -> None:
        """Nothing is held."""


def role_of(it: Stage, *names: str, **settings: Any) -> Environments:
    wanted = EnvironmentSettings(names=names, max_concurrent=4, **settings)
    door = Door(it.gateway.address, it.key, RUN)
    return Environments(it.bus, RUN, LOOP, wanted, door, learns_alone=False)


@asynccontextmanager
async def playing(it: Stage, *names: str, **settings: Any) -> AsyncIterator[Environments]:
    await until(lambda: bool(it.gateway.address))
    role = role_of(it, *names, **settings)
    stop = asyncio.Event()
    running = asyncio.create_task(role.run(stop))
    try:
        yield role
        stop.set()
        await running
    finally:
        running.cancel()


async def report(it: Stage, step: int, *groups: str, finished: bool = False) -> None:
    publisher = await it.bus.publisher("trainer")
    made = StepReport(
        algorithm="grpo",
        step=step,
        version=PolicyVersion(1, step),
        manifest_sha256=None,
        group_ids=groups,
        micro_batches=(),
        metrics={},
        finished=finished,
        sent_at=0.0,
    )
    await publisher.publish(Outgoing.of(STEPS.full_name(RUN), made, key="grpo"))


async def test_episodes_of_one_task_are_a_group_and_no_more_is_played_than_can_be_trained(tmp_path: Path) -> None:
    engine = ScriptedEngine(says={"?": "5"})
    async with (
        stage(tmp_path, engines=[engine], tokenizer=TextTokenizer()) as it,
        playing(it, "guess", options={"guess": {"guesses": 3}}) as role,
    ):
        await until(lambda: len(it.trajectories) == 2, timeout_s=20)
        first, second = sorted(it.trajectories, key=lambda one: one.sample_index)
        assert (first.group_id, first.num_generations, first.dataset) == (second.group_id, 2, "guess")
        assert first.prompt_text == "0-9?"
        # The policy always guesses 5, so each turn but a right one is followed by a word of the game's.
        assert first.completion_text.startswith("5<eos>")
        assert first.turns
        assert first.rewards == second.rewards, "one task, one policy"
        await asyncio.sleep(0.3)
        assert role.counts.begun == 1, "the bound is one group at a time"
        await report(it, 1, first.group_id)
        await until(lambda: len(it.trajectories) == 4, timeout_s=20)
        assert len({one.group_id for one in it.trajectories}) == 2
        await report(it, 2, finished=True)


async def test_an_episode_that_fails_costs_its_group_one(tmp_path: Path) -> None:
    own = "tests.producers.environments.test_driver:Fails"
    async with stage(tmp_path, tokenizer=TextTokenizer()) as it, playing(it, own, episodes_per_task=4) as role:
        await until(lambda: len(it.trajectories) == 2, timeout_s=20)
        assert {one.num_generations for one in it.trajectories} == {2}
        assert {one.dataset for one in it.trajectories} == {dataset_of(own)}
        assert role.counts.errors == 2


async def test_an_environment_that_cannot_be_loaded_ends_the_process_with_its_reason(tmp_path: Path) -> None:
    async with stage(tmp_path) as it, asyncio.timeout(20):
        with pytest.raises(UserError, match="pip install verifiers"):
            await role_of(it, "verifiers:gsm8k").run(asyncio.Event())
