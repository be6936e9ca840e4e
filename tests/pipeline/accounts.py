"""Reads a run's topics and says what became of every record."""

from collections import Counter
from dataclasses import dataclass, field

from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.port import Record
from streamrl.schemas.errors import WireError
from streamrl.schemas.reports import SkipRecord, StepReport
from streamrl.schemas.topics import DEAD_LETTERS, SKIPS, STEPS, TRAJECTORIES, Topic


@dataclass
class Accounts:
    """Places are (partition, offset) on the trajectories topic; trained ones are of the surviving lineage."""

    produced: dict[tuple[int, int], str | None] = field(default_factory=dict)
    trained: Counter[tuple[int, int]] = field(default_factory=Counter)
    skipped: dict[tuple[int, int], str] = field(default_factory=dict)
    skip_details: list[str] = field(default_factory=list)
    dead_letters: list[Record] = field(default_factory=list)
    workers: Counter[str] = field(default_factory=Counter)
    steps: list[StepReport] = field(default_factory=list)

    @property
    def trained_ids(self) -> list[str]:
        return [name for place, name in self.produced.items() if name is not None and place in self.trained]

    @property
    def pending(self) -> set[tuple[int, int]]:
        return self.produced.keys() - self.trained.keys() - self.skipped.keys()


async def read_accounts(servers: str, run: str) -> Accounts:
    bus = KafkaBus(KafkaSettings(bootstrap_servers=servers))
    accounts = Accounts()
    surviving: dict[int, StepReport] = {}
    for record in await read_all(bus, run, STEPS):
        report = record.message()
        assert isinstance(report, StepReport)
        for later in [step for step in surviving if step > report.step]:
            del surviving[later]  # a resumed trainer takes these steps again
        if report.micro_batches:
            surviving[report.step] = report
    accounts.steps = [surviving[step] for step in sorted(surviving)]
    for report in accounts.steps:
        accounts.trained.update((ref.partition, ref.offset) for batch in report.micro_batches for ref in batch)
    for record in await read_all(bus, run, SKIPS):
        skip = record.message()
        assert isinstance(skip, SkipRecord)
        accounts.skipped[skip.partition, skip.offset] = skip.reason.value
        accounts.skip_details.append(skip.detail)
    # Behind those that refer to them: the run may go on while this reads.
    for record in await read_all(bus, run, TRAJECTORIES):
        try:
            message = record.message()
            accounts.produced[record.partition, record.offset] = message.trajectory_id  # type: ignore[attr-defined]
            accounts.workers[message.worker_id] += 1  # type: ignore[attr-defined]
        except WireError:
            accounts.produced[record.partition, record.offset] = None
    accounts.dead_letters = await read_all(bus, run, DEAD_LETTERS)
    return accounts


async def read_all(bus: KafkaBus, run: str, topic: Topic) -> list[Record]:
    subscription = await bus.subscribe([topic.full_name(run)], client_id="accounts", start="earliest")
    records: list[Record] = []
    try:
        ends = await subscription.end_offsets()
        while any(position < ends[tp] for tp, position in (await subscription.positions()).items()):
            records += await subscription.poll(timeout_s=1.0)
    finally:
        await subscription.close()
    return records
