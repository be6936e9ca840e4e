"""What a worker does when the dispatcher takes an order back: it stops sampling, so that another worker goes on.

Invariants, each with a test of its name:
- what_is_let_go_is_on_record_first: the dispatcher hears of it only once the last token that was sampled is on the
  partial-trajectories topic, so the worker that goes on samples nothing again;
- one_worker_has_a_sample: it is let go or delivered, never both. What is whole when the dispatcher asks is delivered
  here, and the dispatcher gives the others to nobody before it has read that;
- an_order_that_was_let_go_stays_so: its repeat is passed over, a later attempt is a new order;
- what_was_let_go_is_kept_until_it_is_settled: heartbeats name it, and from where on it is on record, until the
  dispatcher says that another order names it, or that nobody wants it. However long a sample beside it is scored, and
  whether or not the dispatcher that asked is still there.
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
        log.info("order let go", group=group_id, attempt=attempt, samples=len(samples))
        self._update_status()
        self.status.wake()

    def _update_status(self) -> None:
        self.status.released = tuple(one.order for one in self._released.values())

    def _forget(self, group_id: str) -> None:
        if (one := self._released.pop(group_id, None)) is not None:
            for begun in one.logs:
                # Without tombstones: those are for whoever delivers the trajectory to write.
                self.pool.forget(begun)


def _tokens_of(begun: PartialLog | None) -> int:
    return len(begun.completion.token_ids) if begun is not None else 0


async def _write(begun: PartialLog) -> None:
    """Put its last tokens on record."""
    for _ in range(WRITE_ATTEMPTS):
        await begun.flush()
        if begun.durable == len(begun.completion.token_ids):
            return
        await asyncio.sleep(WRITE_PAUSE_S)
    log.warning("last tokens not written, another worker samples them again", trajectory=begun.trajectory_id)
