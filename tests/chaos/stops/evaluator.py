"""An evaluator among workers that answer its orders, stopped in the middle of evaluations."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

from streamrl.bus.memory import MemoryBus
from streamrl.producers.dispatch.settings import DispatchSettings
from streamrl.producers.evaluation.evaluator import Evaluator, HeldOutTask
from streamrl.producers.evaluation.settings import HeldOutSettings
from streamrl.producers.prompts.settings import DataSettings
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.topics import STEPS
from tests.chaos.stops.moment import Subject
from tests.chaos.stops.second_life import second_life
from tests.coordinator.factories import step_report
from tests.producers.evaluation.evaluator_harness import RUN, EvaluatorHarness, held_out

EVERY_S = 0.1


class _Played(EvaluatorHarness):
    """``newest``: the number of the version that its worker holds."""

    newest = 0


def evaluator_on(bus: MemoryBus, directory: Path) -> Evaluator:
    """An evaluator that evaluates every step, and writes into this directory."""
    data = {"easy": DataSettings(dataset="chain_sum"), "hard": DataSettings(dataset="chain_sum")}
    evaluator = Evaluator(
        bus,
        RUN,
        LoopSettings(heartbeat_timeout_s=10.0),
        DispatchSettings(order_timeout_s=20.0),
        HeldOutTask(held_out, HeldOutSettings(data=data, every=1, samples=2), {"right": 1.0}),
        directory / "metrics.jsonl",
    )
    evaluator.max_attempts = 3
    return evaluator


@asynccontextmanager
async def evaluator(root: Path, _random: Random) -> AsyncIterator[Subject]:
    harness = _Played(root)

    async def answer() -> None:
        """Play the worker: beat, and deliver what is ordered."""
        answered = set[tuple[str, int]]()
        while True:
            await harness.beat("w0", harness.newest)
            for number, order in enumerate(harness.orders):
                if (order.group_id, number) not in answered:
                    answered.add((order.group_id, number))
                    await harness.deliver(order)
            await asyncio.sleep(0.01)

    async def step() -> None:
        while True:
            harness.newest += 1
            await harness.send(STEPS, step_report(1, harness.newest))
            await asyncio.sleep(EVERY_S)

    async def load() -> None:
        await harness.send(STEPS, step_report(1, 0))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(answer())
            tasks.create_task(step())

    async def judge() -> list[str]:
        """Who comes after it evaluates the newest version, and reports nothing a second time."""
        harness.newest = wanted = harness.newest + 1
        await harness.send(STEPS, step_report(1, wanted))

        def left_to_do() -> list[str]:
            is_reported = any(report.version.number == wanted for report in harness.reports)
            return [] if is_reported else [f"it never reports 1-{wanted}"]

        problems = await second_life(evaluator_on(harness.bus, root).run, answer, left_to_do)
        counts = Counter(report.version for report in harness.reports)
        problems += [f"{version} is reported {count} times" for version, count in counts.items() if count > 1]
        written = [line["evaluated"] for line in harness.lines if "evaluated" in line]
        twice = [one for one, count in Counter(written).items() if count > 1]
        problems += [f"{one} stands twice in the metrics" for one in twice]
        missing = {str(version) for version in counts} - {*written}
        return problems + [f"{one} is reported, and not in the metrics" for one in missing]

    yield Subject(evaluator_on(harness.bus, root).run, load, lambda: bool(harness.reports), judge)
