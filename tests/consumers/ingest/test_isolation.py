from streamrl.consumers.ingest.limits import IntakeLimits
from streamrl.schemas.reports import SkipReason
from tests.consumers.ingest.reader_harness import ReaderHarness, next_group, refs_of

FULL = IntakeLimits(high_water_bytes=2, low_water_bytes=1)
"""Reading pauses as soon as a group is ready."""


async def test_an_algorithm_that_stalls_changes_nothing_for_another_on_the_same_topic() -> None:
    harness = ReaderHarness()
    stalled, lively = harness.reader(algorithm="rloo", limits=FULL), harness.reader()
    async with harness.running(stalled), harness.running(lively):
        for number in range(6):
            await harness.publish_group(number, partition=number % 4)
        await harness.until_read(stalled, 2)
        for number in range(6):
            group = await next_group(lively)
            assert group.group_id == f"d/{number}/0"
            lively.ledger.mark_trained(refs_of(group))
        lags = [sum((await reader.lag()).values()) for reader in (lively, stalled)]
        assert lags == [0, 12]
        await lively.flush()
    assert lively.ledger.counts().trained == 12
    assert harness.skips() == []


async def test_a_group_skipped_by_one_algorithm_reaches_another() -> None:
    harness = ReaderHarness()
    strict, lenient = harness.reader(algorithm="rloo"), harness.reader()
    async with harness.running(strict), harness.running(lenient):
        await harness.publish_group(0)
        strict.ledger.mark_skipped(await next_group(strict), SkipReason.ZERO_ADVANTAGE, "equal")
        await strict.flush()
        assert len((await next_group(lenient)).samples) == 2
    assert {(skip.algorithm, skip.reason) for skip in harness.skips()} == {("rloo", SkipReason.ZERO_ADVANTAGE)}
