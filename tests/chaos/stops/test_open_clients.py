"""Cancels roles at each request that they send to the broker: once, and twice in a row."""

import asyncio
import tempfile
from collections.abc import Callable, Coroutine, Iterable
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from streamrl.bus.history import BusHistory, Extent
from streamrl.coordinator import coordinator
from streamrl.coordinator.coordinator import Coordinator
from streamrl.policies import arms
from streamrl.policies.coordinating import SeveralPolicyControl
from streamrl.producers.evaluation import evaluator
from streamrl.producers.grading import grader
from streamrl.producers.grading.grader import Grader
from streamrl.producers.lengths.learned import ranker
from streamrl.producers.lengths.learned.ranker import Ranker
from streamrl.schemas.errors import DataLossRefused
from streamrl.schemas.topics import STEPS, UNGRADED
from tests.chaos.stops.dispatcher import dispatcher_on
from tests.chaos.stops.evaluator import evaluator_on
from tests.chaos.stops.slow_bus import SlowBus, SlowSubscription
from tests.coordinator.factories import step_report

REQUESTS = 40
"""More than any of these roles sends."""
Run = Callable[[SlowBus, asyncio.Event], Coroutine[Any, Any, None]]


@dataclass
class CancellingBus(SlowBus):
    """Cancels the role at the requests with these numbers. ``requests``: how many the role has sent."""

    cancel_at: range = range(0)
    role: "asyncio.Task[None] | None" = None
    requests: int = 0

    async def answer(self) -> None:
        if self.requests in self.cancel_at and self.role is not None:
            self.role.cancel()
        self.requests += 1
        await asyncio.sleep(0)


async def _coordinate(bus: SlowBus, stop: asyncio.Event) -> None:
    await Coordinator(bus, bus.run, policies=SeveralPolicyControl).run(stop)


async def _rank(bus: SlowBus, stop: asyncio.Event) -> None:
    await Ranker(bus, bus.run, mock.Mock()).run(stop)


async def _dispatch(bus: SlowBus, stop: asyncio.Event) -> None:
    await dispatcher_on(bus).run(stop)


async def _grade(bus: SlowBus, stop: asyncio.Event) -> None:
    """Run a grader whose samples have expired, so that it looks for the oldest sample that is left."""
    ungraded, subscribe, is_refused = UNGRADED.full_name(bus.run), bus.subscribe, False

    async def refuse_once(topics: Iterable[str], **options: Any) -> SlowSubscription:
        nonlocal is_refused
        if topics == [ungraded] and not is_refused:
            is_refused = True
            raise DataLossRefused("expected offset 5, it has expired", [(ungraded, 0, 5, 9)])
        return await subscribe(topics, **options)

    judge = mock.Mock(start=mock.AsyncMock(), close=mock.AsyncMock())
    with mock.patch.object(bus, "subscribe", refuse_once):
        await Grader(bus, bus.run, "g", judge, attempts=1, concurrency=1).run(stop)


async def _evaluate(bus: SlowBus, stop: asyncio.Event) -> None:
    with tempfile.TemporaryDirectory() as directory:
        await evaluator_on(bus, Path(directory)).run(stop)


async def _read(bus: SlowBus, _stop: asyncio.Event) -> None:
    history, topic = BusHistory(bus), STEPS.full_name(bus.run)
    for reading in (history.records(topic), history.records(topic, {0: Extent(0, 1)})):
        async with aclosing(reading) as records:
            assert [record async for record in records]


@pytest.mark.parametrize("run", [_coordinate, _rank, _dispatch, _grade, _evaluate, _read])
@pytest.mark.parametrize("times", [1, 2])
async def test_a_role_closes_all_its_clients_wherever_a_cancellation_comes(run: Run, times: int) -> None:
    asked = 0
    with ExitStack() as patches:
        for module in (coordinator, arms, ranker, grader, evaluator):
            patches.enter_context(mock.patch.object(module, "POLL_S", 0.01))
        for number in range(REQUESTS):
            bus, stop = CancellingBus(cancel_at=range(number, number + times)), asyncio.Event()
            await bus.send(STEPS, step_report(1, 1))
            bus.role = asyncio.create_task(run(bus, stop))
            await asyncio.wait({bus.role}, timeout=0.03)
            stop.set()
            await asyncio.wait({bus.role}, timeout=5)
            assert bus.role.done()
            assert bus.role.cancelled() or bus.role.exception() is None
            assert bus.left_open() == [], f"cancelled at request {number}"
            asked = max(asked, bus.requests)
            if number >= bus.requests:
                break
    assert 1 < asked < REQUESTS
