from streamrl.bus.port import TopicPartition
from streamrl.schemas.reports import SkipReason
from tests.consumers.ingest.scene import Scene, next_group, refs_of


async def test_an_algorithm_that_stalls_changes_nothing_for_another_on_the_same_topic() -> None:
    scene = Scene()
    stalled, lively = scene.reader(algorithm="rloo", low_water_bytes=1, high_water_bytes=2), scene.reader()
    async with scene.running(stalled), scene.running(lively):
        for number in range(6):
            await scene.publish_group(number, partition=number % 4)
        await scene.until_read(stalled, 2)
        for number in range(6):
            group = await next_group(lively)
            assert group.group_id == f"d/{number}/0"
            lively.ledger.mark_trained(refs_of(group))
        lags = [sum((await reader.lag()).values()) for reader in (lively, stalled)]
        assert lags == [0, 12]
        await lively.commit()
        await lively.flush()
    assert lively.ledger.counts().trained == 12
    assert scene.skips() == []
    groups = {group for group, tp in scene.bus.committed if tp == TopicPartition(scene.topic, 0)}
    assert groups == {"r.grpo"}


async def test_what_one_algorithm_skips_another_still_gets() -> None:
    scene = Scene()
    strict, lenient = scene.reader(algorithm="rloo"), scene.reader()
    async with scene.running(strict), scene.running(lenient):
        await scene.publish_group(0)
        strict.ledger.mark_skipped(await next_group(strict), SkipReason.ZERO_ADVANTAGE, "equal")
        await strict.flush()
        assert len((await next_group(lenient)).samples) == 2
    assert {(skip.algorithm, skip.reason) for skip in scene.skips()} == {("rloo", SkipReason.ZERO_ADVANTAGE)}
