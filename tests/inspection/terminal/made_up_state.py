"""A live state fed with a made-up run, and its records to read whole trajectories from."""

import asyncio
from collections.abc import Iterator
from typing import Any

from streamrl.bus.port import Record
from streamrl.observability.run_state.state import RunState
from streamrl.schemas.errors import UserError
from streamrl.schemas.topics import TRAJECTORIES
from streamrl.schemas.trajectories import Trajectory
from streamrl.settings.features import run_parts
from tests.observability.run_state.made_up_run import Happening, MadeUpRun
from tests.observability.run_state.writing import append, topics_of

RUN = "gsm8k-grpo"
BEGIN = 1_795_000_000.0


class MadeUpState:
    """``clock`` is the time of the last happening; ``go_on`` moves it."""

    def __init__(self, seconds: float = 120.0, **how: Any) -> None:
        self.bus = topics_of(RUN)
        self.made_up = MadeUpRun(BEGIN, **how)
        self.happenings: Iterator[Happening] = self.made_up.happenings()
        self.state = RunState(RUN, parts=run_parts(RUN))
        self.now = BEGIN
        self.reads: list[str] = []
        self.go_on(seconds)

    def go_on(self, seconds: float) -> None:
        until = self.now + seconds
        for happening in self.happenings:
            append(self.bus, RUN, happening)
            self.state.observe_record(self.last_of(happening))
            if happening.at > until:
                break
        self.now = until

    def last_of(self, happening: Happening) -> Record:
        return self.bus.log(happening.topic.full_name(RUN)).partitions[happening.partition][-1]

    def clock(self) -> float:
        return self.now

    async def read(self, place: str) -> Trajectory:
        await asyncio.sleep(0)
        self.reads.append(place)
        partition, offset = map(int, place.split("@"))
        held = self.bus.log(TRAJECTORIES.full_name(RUN)).partitions[partition]
        if offset >= len(held):
            raise UserError(f"expected a trajectory at {place}, found none")
        message = held[offset].message()
        assert isinstance(message, Trajectory)
        return message
