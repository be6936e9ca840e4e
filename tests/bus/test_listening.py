from dataclasses import dataclass, field

from streamrl.bus.listening import HeartbeatReader
from streamrl.bus.port import Record, TopicPartition
from streamrl.schemas.errors import BusUnavailable

RECORD = Record("t", 0, 0, None, b"", (), 0.0)


@dataclass
class Reading:
    """A subscription of which each poll takes so long; ``is_down``: no broker answers."""

    now: float = 0.0
    polls_s: float = 0.5
    records: list[Record] = field(default_factory=list)
    is_down: bool = False
    given_back: list[float] = field(default_factory=list)
    asked: int = 0

    async def poll(self, *, max_records: int = 500, timeout_s: float = 1.0) -> list[Record]:
        self.now += self.polls_s
        return [] if self.is_down else self.records

    async def end_offsets(self) -> dict[TopicPartition, int]:
        self.asked += 1
        if self.is_down:
            self.now += 1.0
            raise BusUnavailable("no broker answers")
        return {}

    def listening(self) -> HeartbeatReader:
        return HeartbeatReader(self, 8.0, self.given_back.append, lambda: self.now)  # type: ignore[arg-type]


async def test_silence_of_an_outage_is_given_back_before_any_process_is_lost() -> None:
    reading = Reading(is_down=True)
    listening = reading.listening()
    for _ in range(40):
        await listening.poll(0.5)
        # What is not given back yet never comes near the time-out.
        assert reading.now - sum(reading.given_back) < 8.0 / 2
    reading.is_down, reading.records = False, [RECORD]
    assert await listening.poll(0.5) == [RECORD]
    assert listening.given_back == 0.0


async def test_a_process_that_stood_still_gives_that_time_back_first() -> None:
    for pause in ("outside of a poll", "in a poll"):
        reading = Reading(records=[RECORD])
        listening = reading.listening()
        await listening.poll(0.5)
        if pause == "in a poll":
            reading.polls_s = 60.5
        else:
            reading.now += 60.0
        await listening.poll(0.5)
        assert (reading.given_back, listening.given_back) == ([60.5], 60.5)


async def test_other_processes_silence_is_theirs() -> None:
    """A broker that answers has no news; nothing is given back, and it is asked four times in a time-out at most."""
    reading = Reading()
    listening = reading.listening()
    for _ in range(32):
        await listening.poll(0.5)
    assert reading.given_back == []
    assert 4 <= reading.asked <= 8
    reading.records, reading.asked = [RECORD], 0
    for _ in range(32):
        await listening.poll(0.5)
    assert (reading.given_back, reading.asked) == ([], 0)
