"""A topic of ungraded samples on a bus in memory, and graders on it whose judge a test plays."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Outgoing, TopicPartition
from streamrl.producers.grading.grader import Grader
from streamrl.producers.rewards.runner import ScoreRequest, Scores
from streamrl.schemas.control import RunFinished
from streamrl.schemas.identifiers import graders_group
from streamrl.schemas.topics import DEAD_LETTERS, TRAJECTORIES, UNGRADED
from streamrl.schemas.trajectories import Prompt, Trajectory, UngradedTrajectory
from tests.fakes.topics import create_topics, records_of, send, send_control
from tests.progress import within
from tests.schemas.examples import trajectory

RUN, PARTITIONS = "r", 4
GROUP = graders_group(RUN)


def ungraded(number: int, *, prompt_json: str | None = None) -> UngradedTrajectory:
    """The only sample of a group of its own."""
    group = f"toy/{number}/0"
    made = trajectory(
        trajectory_id=f"{group}/0",
        group_id=group,
        prompt_id=f"toy/{number}",
        sample_index=0,
        num_generations=1,
        completion_text=f"answer {number}",
        rewards={"format": 1.0},
        reward_errors={},
    )
    prompt = Prompt(prompt_id=f"toy/{number}", dataset="toy", content="?", columns={"answer": str(number)})
    found = UngradedTrajectory.of(made, prompt)
    return found if prompt_json is None else found.replace(prompt_json=prompt_json)


@dataclass
class Judge:
    """``open``: it answers; ``asked``: completions, once for each call. ``fails``: completions it gives no reward."""

    names: tuple[str, ...] = ("judge",)
    open: asyncio.Event = field(default_factory=asyncio.Event)
    asked: Counter[str] = field(default_factory=Counter)
    fails: set[str] = field(default_factory=set)
    closed: bool = False

    async def start(self) -> None:
        pass

    async def score(self, request: ScoreRequest, only: Collection[str] | None = None) -> Scores:
        self.asked[request.completion_text] += 1
        await self.open.wait()
        if request.completion_text in self.fails:
            return Scores({"judge": None}, {"judge": "no answer in time"})
        return Scores({"judge": 0.5 + 0.0 * len(request.prompt.columns["answer"])}, {})  # type: ignore[arg-type]

    async def close(self) -> None:
        self.closed = True


@dataclass
class GraderHarness:
    """Graders of one group on a bus in memory; ``judge`` is that of all members."""

    bus: MemoryBus = field(default_factory=MemoryBus)
    judge: Judge = field(default_factory=Judge)
    concurrency: int = 64
    stops: "dict[asyncio.Task[None], asyncio.Event]" = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.judge.open.set()
        create_topics(self.bus, RUN, PARTITIONS)

    def start(self, name: str = "a") -> "asyncio.Task[None]":
        grader = Grader(self.bus, RUN, name, self.judge, attempts=1, concurrency=self.concurrency)
        stop = asyncio.Event()
        task = asyncio.create_task(grader.run(stop))
        self.stops[task] = stop
        return task

    async def end(self) -> None:
        for task, stop in self.stops.items():
            stop.set()
            if not task.cancelled():
                await within(task, 5)

    async def put(self, *numbers: int) -> None:
        for number in numbers:
            made = ungraded(number)
            await send(self.bus, RUN, UNGRADED, made, made.group_id, number % PARTITIONS)

    async def send(self, record: Outgoing) -> None:
        await (await self.bus.publisher("test")).publish(record)

    async def finish(self) -> None:
        message = RunFinished(sequence=0, sent_at=0.0, step=1)
        await send_control(self.bus, RUN, message)

    @property
    def trajectories(self) -> list[tuple[int, Trajectory]]:
        """With their partitions."""
        found = [(record.partition, record.message()) for record in records_of(self.bus, RUN, TRAJECTORIES)]
        return [(partition, message) for partition, message in found if isinstance(message, Trajectory)]

    @property
    def dead_letters(self) -> list[dict[str, bytes]]:
        return [dict(record.headers) for record in records_of(self.bus, RUN, DEAD_LETTERS)]

    def committed(self) -> dict[int, int]:
        """By partition."""
        topic = UNGRADED.full_name(RUN)
        return {
            tp.partition: offset
            for (group, tp), offset in self.bus.committed.items()
            if group == GROUP and tp == TopicPartition(topic, tp.partition)
        }


Condition = Callable[[], object]
