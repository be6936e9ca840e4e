"""A send of unknown outcome, from the worker's outbox to the trainer's reader and ledger."""

from streamrl.bus.port import Outgoing
from streamrl.producers.generation.outbox import Outbox
from streamrl.schemas.errors import BusError, DeliveryUnknown
from streamrl.schemas.reports import SkipReason
from streamrl.schemas.topics import TRAJECTORIES
from tests.consumers.factories import trajectory
from tests.consumers.ingest.reader_harness import RUN, ReaderHarness, next_group, refs_of
from tests.fakes.publisher import FailingBus
from tests.fakes.topics import records_of


async def test_a_send_that_timed_out_and_was_delivered_all_the_same_is_trained_once() -> None:
    unsure = [True]

    def fail(record: Outgoing) -> BusError | None:
        about = record.topic == TRAJECTORIES.full_name(RUN) and unsure
        return DeliveryUnknown("no answer") if about and unsure.pop() else None

    harness = ReaderHarness(bus=FailingBus(fail=fail, arrives=lambda record: True))
    outbox = Outbox(await harness.bus.publisher("worker"), 10)
    for index in range(2):
        sample = trajectory("d/0/0", index)
        await outbox.deliver(Outgoing.of(harness.topic, sample, key=sample.group_id, partition=0))
    assert len(records_of(harness.bus, RUN, TRAJECTORIES)) == 3
    async with harness.running(harness.reader()) as reader:
        group = await next_group(reader)
        assert len({ref.trajectory_id for ref in refs_of(group)}) == len(refs_of(group)) == 2
        await harness.until_read(reader, 3)
        await harness.until(lambda: len(harness.skips()) == 1)
        assert reader.ledger.rejections.tally.reasons == {"duplicate": 1}
    assert [(skip.trajectory_id, skip.reason) for skip in harness.skips()] == [("d/0/0/0", SkipReason.DUPLICATE)]
