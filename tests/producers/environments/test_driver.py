"""Environments played through a real gateway on emulated workers, in processes of their own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from streamrl.policies.dispatching import SeveralPolicyDispatch
from streamrl.producers.environments.driver import (
    MAX_FAILED_IN_A_ROW,
    Door,
    Environments,
    EpisodeFailures,
    dataset_of,
)
from streamrl.producers.environments.settings import EnvironmentSettings
from streamrl.schemas.control import Control, InstanceState, Served
from streamrl.schemas.errors import UserError
from streamrl.schemas.identifiers import PolicyVersion, scope_of
from streamrl.schemas.reports import SkipReason
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.topics import INSTANCE_TOPICS, SKIPS, STEPS, TRAJECTORIES
from tests.fakes.messages import skip_record, step_report
from tests.fakes.topics import send, send_control
from tests.fakes.waiting import until
from tests.producers.gateway.gateway_harness import (
    RUN,
    CharacterTokenizer,
    GatewayHarness,
    ScriptedEngine,
    running_gateway,
)
from tests.progress import patience

pytestmark = pytest.mark.processes

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
        from streamrl.schemas.environments import EnvironmentStep

        return EnvironmentStep(reward=1.0, done=True)

    async def close(self) -> None:
        """Nothing is held."""


class Raises:
    """An environment whose every step raises."""

    tools: tuple[()] = ()
    request: dict[str, Any] = {"max_tokens": 4}

    async def reset(self, task: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": "go"}]

    async def step(self, reply: Any) -> Any:
        raise KeyError("no such piece")

    async def close(self) -> None:
        """Nothing is held."""


def role_of(it: GatewayHarness, *names: str, loop: LoopSettings = LOOP, **settings: Any) -> Environments:
    wanted = EnvironmentSettings(names=names, max_concurrent=4, **settings)
    door = Door(it.gateway.address, it.key, RUN)
    return Environments(it.bus, RUN, loop, wanted, door, learns_alone=False, policies=SeveralPolicyDispatch)


@asynccontextmanager
async def playing(it: GatewayHarness, *names: str, **settings: Any) -> AsyncIterator[Environments]:
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


async def report(
    it: GatewayHarness, step: int, *groups: str, policy: str = "policy", **changes: bool | PolicyVersion
) -> None:
    await send(it.bus, scope_of(RUN, policy), STEPS, step_report(1, step, group_ids=groups, **changes), "grpo")


async def say(it: GatewayHarness, message: Control) -> None:
    await send_control(it.bus, RUN, message)


async def attach(it: GatewayHarness, policy: str = "second", mode: Literal["run", "detached"] = "run") -> None:
    """As `streamrl attach` does: the instance's topics are there before anybody hears of it."""
    for topic in INSTANCE_TOPICS:
        it.bus.create_topic(topic.full_name(scope_of(RUN, policy)), 1)
    await say(it, InstanceState(sequence=7, sent_at=0.0, policy=policy, algorithm="rloo", mode=mode))


async def serve(it: GatewayHarness, policy: str = "second", number: int = 1) -> None:
    await say(it, Served(sequence=7 + number, sent_at=0.0, policy=policy, since=PolicyVersion(1, number)))


def groups(it: GatewayHarness) -> list[str]:
    """Those that are on the topic whole."""
    counts: dict[str, int] = {}
    for one in it.trajectories:
        counts[one.group_id] = counts.get(one.group_id, 0) + 1
    return [name for name, count in counts.items() if count == 2]


async def test_episodes_of_one_task_are_a_group_and_groups_in_flight_are_bounded(tmp_path: Path) -> None:
    engine = ScriptedEngine(says={"?": "5"})
    async with (
        running_gateway(tmp_path, engines=[engine], tokenizer=TextTokenizer()) as it,
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


async def test_a_failed_episode_leaves_its_group(tmp_path: Path) -> None:
    own = "tests.producers.environments.test_driver:Fails"
    async with (
        running_gateway(tmp_path, tokenizer=TextTokenizer()) as it,
        playing(it, own, loop=LOOP.model_copy(update={"num_generations": 4})) as role,
    ):
        await until(lambda: len(it.trajectories) == 2, timeout_s=20)
        assert {one.num_generations for one in it.trajectories} == {2}
        assert {one.dataset for one in it.trajectories} == {dataset_of(own)}
        assert role.counts.errors == 2


async def test_an_environment_that_always_fails_ends_the_run(tmp_path: Path) -> None:
    own = "tests.producers.environments.test_driver:Raises"
    loop = LOOP.model_copy(update={"num_generations": 4})
    async with running_gateway(tmp_path, tokenizer=TextTokenizer()) as it, patience(30):
        await until(lambda: bool(it.gateway.address))
        with pytest.raises(UserError, match=r"got 64 in a row that failed, the latest: .*no such piece"):
            await role_of(it, own, loop=loop).run(asyncio.Event())
        assert not it.trajectories


def test_time_outs_and_single_failures_end_no_run() -> None:
    failures = EpisodeFailures("timed out after 3 s")
    for _ in range(4):
        for _ in range(MAX_FAILED_IN_A_ROW - 1):
            failures.add("guess", "it broke")
        for _ in range(MAX_FAILED_IN_A_ROW):
            failures.add("guess", "timed out after 3 s")
            failures.add("other", "it broke")
        failures.check("guess")
        failures.add("guess", None)
    with pytest.raises(UserError, match="of environment other that can be played, got 256 in a row"):
        failures.check("other")


async def test_an_environment_that_cannot_be_loaded_ends_the_process_with_its_reason(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as it, patience(20):
        with pytest.raises(UserError, match="no_such_game"):
            await role_of(it, "no_such_game:Game").run(asyncio.Event())


@asynccontextmanager
async def guessing(path: Path) -> AsyncIterator[tuple[GatewayHarness, Environments]]:
    """One group at a time, which is played at once."""
    engine = ScriptedEngine(says={"?": "5"})
    options = {"guess": {"guesses": 1}}
    async with (
        running_gateway(path, engines=[engine], tokenizer=TextTokenizer()) as it,
        playing(it, "guess", options=options) as role,
    ):
        await until(lambda: len(groups(it)) == 1, timeout_s=20)
        yield it, role


async def test_only_the_served_policy_ends_groups(tmp_path: Path) -> None:
    async with guessing(tmp_path) as (it, role):
        await attach(it)
        first = groups(it)[0]
        await until(lambda: "second" in role.accounts.policies)
        await report(it, 1, first, policy="second")
        await until(lambda: role.accounts.of("second").ended == 1)
        await asyncio.sleep(0.2)
        assert role.counts.begun == 1, "another trainer's end makes no room"
        await serve(it)  # and by that of the promoted one there is, at once
        await until(lambda: len(groups(it)) == 2, timeout_s=20)
        (second,) = set(groups(it)) - {first}
        await report(it, 1, first, second, finished=True)  # of the run's own trainer, which goes on beside
        await report(it, 1, finished=True, policy="second")  # of a time when it was not served
        await until(lambda: role.accounts.of("policy").ended == 2)
        await asyncio.sleep(0.2)
        assert role.counts.begun == 2
        await report(it, 2, second, policy="second", served_as=PolicyVersion(2, 3))
        await until(lambda: len(groups(it)) == 3, timeout_s=20)
        assert not role.accounts.is_finished
        await report(it, 3, policy="second", finished=True, served_as=PolicyVersion(2, 4))
        await until(lambda: role.accounts.is_finished)


async def test_groups_before_a_promoted_policy_are_not_awaited(tmp_path: Path) -> None:
    async with guessing(tmp_path) as (it, role):
        await attach(it)
        ends = [len(partition) for partition in it.bus.log(TRAJECTORIES.full_name(RUN)).partitions]
        for partition, end in enumerate(ends):
            if end:
                reason = SkipReason.BEFORE_ATTACH
                row = skip_record(algorithm="rloo", policy="second", reason=reason, partition=partition, end_offset=end)
                await send(it.bus, scope_of(RUN, "second"), SKIPS, row, "rloo")
        await serve(it)
        await until(lambda: len(groups(it)) == 2, timeout_s=20)
        await asyncio.sleep(0.2)
        assert role.counts.begun == 2


async def test_groups_ended_by_an_earlier_life_of_an_instance_are_ignored(tmp_path: Path) -> None:
    engine = ScriptedEngine(says={"?": "5"})
    async with running_gateway(tmp_path, engines=[engine], tokenizer=TextTokenizer()) as it:
        await attach(it, mode="detached")
        await report(it, 1, "guess/of-an-earlier-life/0", policy="second")
        async with playing(it, "guess", options={"guess": {"guesses": 1}}) as role:
            await until(lambda: len(groups(it)) == 1, timeout_s=20)
            await attach(it)
            await serve(it)
            await until(lambda: role.accounts.current is role.accounts.of("second"))
            await report(it, 2, groups(it)[0], policy="second")
            await until(lambda: len(groups(it)) == 2, timeout_s=20)
            await asyncio.sleep(0.2)
            assert (role.counts.begun, role.counts.ended) == (2, 1)


async def test_missing_topics_of_an_instance_stop_no_process(tmp_path: Path) -> None:
    async with guessing(tmp_path) as (it, role):
        await say(it, InstanceState(sequence=7, sent_at=0.0, policy="gone", algorithm="rloo", mode="run"))
        await until(lambda: "gone" in role.accounts.policies)
        await report(it, 1, groups(it)[0])
        await until(lambda: len(groups(it)) == 2, timeout_s=20)
