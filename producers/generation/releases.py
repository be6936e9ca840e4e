"""Releases orders that the dispatcher takes back: the worker stops sampling them, so that another can continue.

Invariants, each with a test of its name:
- released_samples_are_recorded_first: a heartbeat names a released order only when its last sampled token is on the
  partial-trajectories topic, so the next worker samples no token twice;
- one_worker_has_a_sample: a sample is released or delivered, never both. Samples that are complete when the dispatcher
  takes the order back are delivered here. The dispatcher orders the others again only after it has read those;
- a_released_order_stays_released: a repetition of a released order is ignored; a later attempt is a new order;
- released_orders_are_kept_until_settled: heartbeats name a released order, and its records, until the dispatcher
  reports that another order continues it, or that it is no longer wanted. This holds while another of its samples is
  being scored, and after a restart of the dispatcher.
"""

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from streamrl.producers.generation.engines.port import Engine
from streamrl.producers.generation.partials import PartialLog, PartialPool
from streamrl.producers.generation.status import WorkerStatus
from streamrl.schemas.reports import ReleasedOrder

log = structlog.get_logger()

WRITE_ATTEMPTS = 40
WRITE_PAUSE_S = 0.5
"""Seconds between two attempts to write the last tokens: 20 seconds in all, then another worker samples them again."""


@dataclass
class _Released:
    order: ReleasedOrder
    logs: list[PartialLog]


@dataclass
class Releases:
    """The orders of one worker that were taken back. Heartbeats name those that are not settled yet.

    Its size is bounded, since the dispatcher settles the orders that it takes back.
    """

    engine: Engine
    pool: PartialPool
    status: WorkerStatus
    _attempts: dict[str, int] = field(init=False, default_factory=dict)
    _released: dict[str, _Released] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._update_status()

    def is_taken_back(self, group_id: str, attempt: int) -> bool:
        """Whether the order of this attempt was taken back and must not start."""
        return attempt <= self._attempts.get(group_id, -1)

    def take_back(
        self, group_id: str, attempt: int, tasks: "Mapping[str, asyncio.Task[bool]]", logs: Mapping[str, PartialLog]
    ) -> Coroutine[Any, Any, None]:
        """Stop an order's samples at once. Returns the coroutine that hands the order over.

        ``tasks``: the tasks of its incomplete samples, by trajectory id; a task's result is true if it delivers after
        all. ``logs``: the samples' records, by trajectory id.
        """
        self._attempts[group_id] = attempt
        # No other task may run before this. Otherwise a sample may become complete and be on its way to the broker;
        # cancelling it there would both deliver and release it.
        for name, task in tasks.items():
            # If the engine does not have the sample yet, there is nothing to hand over.
            if not self.engine.interrupt(name):
                task.cancel()
        return self._hand_over(group_id, attempt, tasks, logs)

    def settle(self, groups: Mapping[str, int]) -> None:
        """Forget released orders that are settled. ``groups``: the settled attempt of each group, by group id."""
        for group_id, attempt in groups.items():
            one = self._released.get(group_id)
            if one is None or one.order.attempt > attempt:
                continue
            self._forget(group_id)
            # If a newer attempt is being released at the same time, its number stays.
            if self._attempts.get(group_id) == one.order.attempt:
                del self._attempts[group_id]
        self._update_status()

    async def _hand_over(
        self, group_id: str, attempt: int, tasks: "Mapping[str, asyncio.Task[bool]]", logs: Mapping[str, PartialLog]
    ) -> None:
        if tasks:
            await asyncio.wait(tasks.values())
        left = [name for name, task in tasks.items() if task.cancelled() or not task.result()]
        kept = {name: logs[name] for name in left if name in logs}
        await asyncio.gather(*map(_write, kept.values()))
        samples = sorted((int(name.rpartition("/")[2]), _tokens_of(kept.get(name))) for name in left)
        order = ReleasedOrder(group_id=group_id, attempt=attempt, samples=tuple(samples))
        self._forget(group_id)  # an earlier attempt
        self._released[group_id] = _Released(order, list(kept.values()))
        log.info("order released", group=group_id, attempt=attempt, samples=len(samples))
        self._update_status()
        self.status.wake()

    def _update_status(self) -> None:
        self.status.released = tuple(one.order for one in self._released.values())

    def _forget(self, group_id: str) -> None:
        if (one := self._released.pop(group_id, None)) is not None:
            for partial_log in one.logs:
                # No tombstones here: the worker that delivers the trajectory writes them.
                self.pool.forget(partial_log)


def _tokens_of(partial_log: PartialLog | None) -> int:
    return len(partial_log.completion.token_ids) if partial_log is not None else 0


async def _write(partial_log: PartialLog) -> None:
    """Write a completion's last tokens to the topic."""
    for _ in range(WRITE_ATTEMPTS):
        await partial_log.flush()
        if partial_log.durable == len(partial_log.completion.token_ids):
            return
        await asyncio.sleep(WRITE_PAUSE_S)
    log.warning("last tokens not written, another worker samples them again", trajectory=partial_log.trajectory_id)
