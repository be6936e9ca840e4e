"""What a worker does when the dispatcher takes an order back: it stops sampling, so that another worker goes on.

Invariants, each with a test of its name:
- what_is_let_go_is_on_record_first: a heartbeat names a released order only once the last token that was sampled is on
  the partial-trajectories topic, so the worker that goes on samples no token again;
- one_worker_has_a_sample: a sample is released or delivered, never both. Samples that are whole when the dispatcher
  asks are delivered here, and the dispatcher orders the others again only after it has read that;
- an_order_that_was_let_go_stays_so: a repeat of a released order is passed over; a later attempt is a new order;
- what_was_let_go_is_kept_until_it_is_settled: heartbeats name a released order, and where it is on record, until the
  dispatcher says that another order names it, or that it is not wanted any more. This holds however long another sample
  of it is scored, and whether or not the dispatcher that asked is still there.
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
"""Between two attempts to put the last tokens on record: 20 seconds in all, after which they are sampled again."""


@dataclass
class _Released:
    order: ReleasedOrder
    logs: list[PartialLog]


@dataclass
class Releases:
    """The orders of one worker that were taken back; the heartbeat names those that are not settled yet.

    What it holds is bounded by what was taken back and not ordered again: a dispatcher that takes back also settles.
    """

    engine: Engine
    pool: PartialPool
    status: WorkerStatus
    _attempts: dict[str, int] = field(init=False, default_factory=dict)
    _released: dict[str, _Released] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._update_status()

    def is_taken_back(self, group_id: str, attempt: int) -> bool:
        """Whether the order of this attempt was taken back, so that it is not to be started."""
        return attempt <= self._attempts.get(group_id, -1)

    def take_back(
        self, group_id: str, attempt: int, tasks: "Mapping[str, asyncio.Task[bool]]", logs: Mapping[str, PartialLog]
    ) -> Coroutine[Any, Any, None]:
        """Release an order. ``tasks`` sample it, by trajectory id, and each is true if it delivers after all; ``logs``
        have what is on record of each. None is whole. They are stopped at once; what is returned does the rest.
        """
        self._attempts[group_id] = attempt
        # Before any other task has a turn: a turn later, a task that was found at work may be whole or on its way to
        # the broker, and cancelled there its trajectory would be delivered and released.
        for name, task in tasks.items():
            # Where the engine has nothing of it yet there is nothing to hand over.
            if not self.engine.interrupt(name):
                task.cancel()
        return self._hand_over(group_id, attempt, tasks, logs)

    def settle(self, groups: Mapping[str, int]) -> None:
        """These need not be kept any more, each up to its attempt."""
        for group_id, attempt in groups.items():
            one = self._released.get(group_id)
            if one is None or one.order.attempt > attempt:
                continue
            self._forget(group_id)
            # The newer one of two that are under way at once has its number there.
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
        self._forget(group_id)  # an earlier attempt of it
        self._released[group_id] = _Released(order, list(kept.values()))
        log.info("order released", group=group_id, attempt=attempt, samples=len(samples))
        self._update_status()
        self.status.wake()

    def _update_status(self) -> None:
        self.status.released = tuple(one.order for one in self._released.values())

    def _forget(self, group_id: str) -> None:
        if (one := self._released.pop(group_id, None)) is not None:
            for partial_log in one.logs:
                # Without tombstones: the worker that delivers the trajectory writes those.
                self.pool.forget(partial_log)


def _tokens_of(partial_log: PartialLog | None) -> int:
    return len(partial_log.completion.token_ids) if partial_log is not None else 0


async def _write(partial_log: PartialLog) -> None:
    """Put its last tokens on record."""
    for _ in range(WRITE_ATTEMPTS):
        await partial_log.flush()
        if partial_log.durable == len(partial_log.completion.token_ids):
            return
        await asyncio.sleep(WRITE_PAUSE_S)
    log.warning("last tokens not written, another worker samples them again", trajectory=partial_log.trajectory_id)
