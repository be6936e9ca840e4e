"""The environments' driver: plays episodes through the gateway, one group for each task, and sends their rewards.

Invariants, each with a test of its name:
- groups_in_flight_are_bounded: no more groups are being played or untrained than admission would allow;
- a_failed_episode_leaves_its_group: the other episodes are compared without it. If a single one is left and the
  algorithm learns nothing from it, it is dropped, too;
- an_environment_that_always_fails_ends_the_run: with the reason of its last failure. Time-outs do not count, since a
  policy that is away for long causes them, too.
"""

import asyncio
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp
import structlog

from streamrl.bus.port import Bus
from streamrl.bus.waiting import end_tasks, wait_for_event
from streamrl.producers.dispatch.policies import OnePolicyDispatch, PolicyDispatch
from streamrl.producers.environments.episodes import LOAD_ONLY
from streamrl.producers.environments.following import GroupAccounts, GroupFollower
from streamrl.producers.environments.made_up_policy import made_up_policy
from streamrl.producers.environments.settings import FUNCTION, EnvironmentSettings
from streamrl.producers.rewards.child import timeout_reason
from streamrl.producers.rewards.runner import RewardQueue, ScoreRequest, packed_request
from streamrl.schemas.environments import Endpoint
from streamrl.schemas.errors import UserError
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.trajectories import Prompt

log = structlog.get_logger()

POLL_S = 0.5
RETRY_S = 1.0
MAX_FAILED_IN_A_ROW = 64
"""Failed episodes of one environment in a row that end the run, as failed rewards do (``IntakeLimits``)."""
LOG_EVERY = 16
"""Groups between two log lines."""


@dataclass(frozen=True)
class Door:
    """Access to the gateway: its address, an API key, and the model's name there."""

    address: str
    api_key: str
    model: str


@dataclass
class PlayedGroups:
    """Counts of groups: started, failed, played to their end, and ended by the trainer. ``errors``: failed episodes."""

    begun: int = 0
    failed: int = 0
    played: int = 0
    errors: int = 0
    ended: int = 0
    reward_sum: float = 0.0

    @property
    def under_way(self) -> int:
        """Groups that are being played, or that the trainer has not ended yet."""
        return self.begun - self.failed - self.ended


@dataclass
class EpisodeFailures:
    """Failed episodes in a row, by environment. ``timed_out``: the reason that does not count."""

    timed_out: str
    in_a_row: Counter[str] = field(default_factory=Counter)
    latest: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, reason: str | None) -> None:
        """Note an episode that was played (None), or why it failed."""
        if reason is None:
            self.in_a_row[name] = 0
        elif reason != self.timed_out:
            self.in_a_row[name] += 1
            self.latest[name] = reason

    def check(self, name: str) -> None:
        """Raise if too many failed.

        Raises:
            UserError: the environment's last ``MAX_FAILED_IN_A_ROW`` episodes failed.
        """
        if (failed := self.in_a_row[name]) >= MAX_FAILED_IN_A_ROW:
            raise UserError(
                f"expected episodes of environment {name} that can be played, got {failed} in a row that failed, the "
                f"latest: {self.latest[name]}; correct the environment (streamrl run --dry-run plays an episode)"
            )


@dataclass
class Environments:
    """The environments' process, one per run. ``learns_alone``: whether the algorithm learns from a single episode.

    ``on_tick`` is called with a loop's name at each turn of that loop. ``policies``: creates the view of the policies
    that share the run.
    """

    bus: Bus
    run_name: str
    loop: LoopSettings
    settings: EnvironmentSettings
    door: Door
    learns_alone: bool = True
    on_tick: Callable[[str], None] = lambda name: None
    policies: Callable[[], PolicyDispatch] = OnePolicyDispatch
    counts: PlayedGroups = field(default_factory=PlayedGroups)
    accounts: GroupAccounts = field(init=False)
    failures: EpisodeFailures = field(init=False)
    _room: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.failures = EpisodeFailures(timeout_reason(self.settings.episode_timeout_s))
        self.accounts = GroupAccounts(
            frozenset(dataset_of(name) for name in self.settings.names), self._max_groups, self.policies()
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Play until stopped, or until the run is finished.

        Consumes: trainers' reports on the groups' fates (``GroupFollower``).
        Produces: episodes on the gateway, and their rewards.
        Waits for: room under the staleness bound; the gateway.
        On failure: raises ``UserError`` if an environment cannot be loaded, or if its episodes always fail; a failed
        episode is counted.
        On stop: cancels running episodes.
        """
        queues = {name: RewardQueue(FUNCTION, name, self.settings.process_settings()) for name in self.settings.names}
        follower = GroupFollower(self.bus, self.run_name, self.accounts, self._make_room, self.on_tick)
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(follower.run())]
        try:
            await asyncio.gather(*(_load(self.settings, name, queue) for name, queue in queues.items()))
            async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {self.door.api_key}"}) as http:
                tasks += [asyncio.create_task(self._play_loop(name, queue, http)) for name, queue in queues.items()]
                tasks.append(asyncio.create_task(stop.wait()))
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            await end_tasks(tasks)
            await asyncio.gather(*(queue.close() for queue in queues.values()))
        log.info("environments ended", groups=self.counts.played, episodes_failed=self.counts.errors)

    def _task(self, name: str, task: int, session: str) -> bytes:
        base_url = f"{self.door.address}/sessions/{session}/v1"
        return _request(self.settings, name, task, Endpoint(base_url, self.door.api_key, self.door.model))

    @property
    def _max_groups(self) -> int:
        return self.loop.max_groups_in_flight

    async def _play_loop(self, name: str, queue: RewardQueue, http: aiohttp.ClientSession) -> None:
        """Start a group for each task, one after another, while there is room."""
        size = self.loop.num_generations
        places = asyncio.Semaphore(self.settings.max_concurrent)
        # After a restart the tasks continue about where they were: each step took ``groups_per_step`` groups.
        last, playing = self.accounts.current.last, set[asyncio.Task[None]]()
        number = 0 if last is None else last.step * self.loop.groups_per_step
        try:
            while True:
                self.on_tick("environments")
                self.failures.check(name)
                if self.counts.under_way >= self._max_groups:
                    self._room.clear()
                    await wait_for_event(self._room, POLL_S)
                    continue
                self.counts.begun += 1
                group = asyncio.create_task(self._group(name, number, size, queue, http, places))
                playing.add(group)
                group.add_done_callback(playing.discard)
                number += 1
                # Groups take their places one after another, so that the groups that start first end first.
                await places.acquire()
                places.release()
        finally:
            await end_tasks(playing)

    async def _group(
        self,
        name: str,
        number: int,
        size: int,
        queue: RewardQueue,
        http: aiohttp.ClientSession,
        places: asyncio.Semaphore,
    ) -> None:
        stem = f"env-{uuid.uuid4().hex}"
        sessions = [f"{stem}-{index}" for index in range(size)]

        async def played(session: str) -> tuple[float | None, str | None]:
            async with places:
                return await queue.call(self._task(name, number, session))

        results = dict(zip(sessions, await asyncio.gather(*map(played, sessions)), strict=True))
        rewards = {session: reward for session, (reward, _) in results.items() if reward is not None}
        for _, reason in results.values():
            self._count_episode(name, reason)
        kept = bool(rewards) and (len(rewards) > 1 or self.learns_alone)
        if kept and await self._deliver(name, stem, rewards, http):
            self.counts.played += 1
            self.counts.reward_sum += sum(rewards.values()) / len(rewards)
            if self.counts.played % LOG_EVERY == 0:
                mean = self.counts.reward_sum / LOG_EVERY
                self.counts.reward_sum = 0.0
                log.info("episodes played", environment=name, groups=self.counts.played, last_reward=round(mean, 3))
        else:
            self.counts.failed += 1
            self._room.set()

    def _count_episode(self, name: str, reason: str | None) -> None:
        """Count an episode that was played, or failed for this reason."""
        self.failures.add(name, reason)
        if reason is not None:
            self.counts.errors += 1
            if self.counts.errors.bit_count() == 1:
                log.warning("an episode failed", environment=name, reason=reason, failed=self.counts.errors)

    async def _deliver(self, name: str, stem: str, rewards: Mapping[str, float], http: aiohttp.ClientSession) -> bool:
        """Send the rewards of all sessions of a group; whether they were accepted. Waits while the gateway is down."""
        group = {"id": stem, "size": len(rewards)}
        for session, reward in rewards.items():
            body: dict[str, Any] = {
                "session": session,
                "reward": reward,
                "group": group,
                "dataset": dataset_of(name),
            }
            while True:
                try:
                    async with http.post(f"{self.door.address}/v1/feedback", json=body) as response:
                        status, said = response.status, (await response.text())[:300]
                except aiohttp.ClientError:
                    status, said = 503, ""
                if status not in (429, 502, 503):
                    break
                await asyncio.sleep(RETRY_S)
            if status != 200:
                log.error("an episode's reward was refused", environment=name, status=status, answer=said)
                return False
        return True

    def _make_room(self) -> None:
        self.counts.ended = self.accounts.current.ended
        self._room.set()


async def try_environments(settings: EnvironmentSettings) -> dict[str, float]:
    """Load each environment in a process of its own, as a run does, and play one episode with a made-up policy.

    Returns the reward of each environment's episode.

    Raises:
        UserError: one cannot be loaded, or its episode fails.
    """
    rewards: dict[str, float] = {}
    async with made_up_policy() as endpoint:
        for name in settings.names:
            queue = RewardQueue(FUNCTION, name, settings.process_settings())
            try:
                await _load(settings, name, queue)
                reward, reason = await queue.call(_request(settings, name, 0, endpoint))
            finally:
                await queue.close()
            if reward is None:
                raise UserError(f"expected an episode of {name} that can be played, got: {reason}; correct it")
            rewards[name] = reward
    return rewards


async def _load(settings: EnvironmentSettings, name: str, queue: RewardQueue) -> None:
    await queue.start()
    _, reason = await queue.call(_request(settings, name, LOAD_ONLY, Endpoint("", "", "")))
    if reason is not None:
        raise UserError(reason)


def _request(settings: EnvironmentSettings, name: str, task: int, endpoint: Endpoint) -> bytes:
    columns: dict[str, Any] = {
        "environment": name,
        "options": settings.options.get(name, {}),
        "task": task,
        "endpoint": asdict(endpoint),
        "max_turns": settings.max_turns,
    }
    prompt = Prompt(prompt_id=f"{name}/{task}", dataset=name[:64], content="", columns=columns)
    return packed_request(ScoreRequest(prompt, "", ()))


def dataset_of(name: str) -> str:
    """The data set of an environment's trajectories in metrics: its name, in the characters that data sets allow."""
    plain = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name.lower())
    return plain.strip("-")[:64] or "environment"
