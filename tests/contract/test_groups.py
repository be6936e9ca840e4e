"""What every bus promises of the members of a consumer group."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from itertools import chain

import pytest

from streamrl.bus.port import Bus, GroupMember, TopicPartition
from streamrl.schemas.errors import BusError, TopicMissing
from tests.contract.buses import BUSES, bus_with_topic
from tests.progress import patience

PARTITIONS = 4


class Group:
    """A bus, a topic, and the members that joined the group of its name."""

    def __init__(self, bus: Bus, topic: str) -> None:
        self.bus = bus
        self.topic = topic
        self.members: list[GroupMember] = []

    async def join(self) -> GroupMember:
        member = await self.bus.join(self.topic, group_id=f"{self.topic}.group", client_id="member")
        self.members.append(member)
        return member

    async def offsets(self) -> dict[int, int]:
        found = await self.bus.group_offsets(self.topic, group_id=f"{self.topic}.group")
        return {tp.partition: offset for tp, offset in found.items()}

    def at(self, partition: int) -> TopicPartition:
        return TopicPartition(self.topic, partition)

    async def shared_out(self, members: Iterable[GroupMember]) -> list[list[int]]:
        """The shares, once each partition is one member's and each member has some."""
        members = list(members)
        async with patience(30):
            while True:
                shares = [sorted(tp.partition for tp in await member.partitions()) for member in members]
                if sorted(chain(*shares)) == list(range(PARTITIONS)) and all(shares):
                    return shares
                await asyncio.sleep(0.05)


@pytest.fixture(params=BUSES)
async def group(request: pytest.FixtureRequest) -> AsyncIterator[Group]:
    found = await bus_with_topic(request, "group", PARTITIONS)
    made = Group(found.bus, found.topic)
    yield made
    for member in made.members:
        await member.close()


async def test_members_share_out_all_partitions_also_when_one_comes_and_goes(group: Group) -> None:
    first = await group.join()
    assert await group.shared_out([first]) == [[0, 1, 2, 3]]
    second = await group.join()
    assert [len(share) for share in await group.shared_out([first, second])] == [2, 2]
    await first.close()
    assert await group.shared_out([second]) == [[0, 1, 2, 3]]
    with pytest.raises(BusError, match="that left"):
        await first.partitions()


async def test_offsets_committed_by_a_member_are_those_of_the_group(group: Group) -> None:
    member = await group.join()
    await group.shared_out([member])
    assert await group.offsets() == {}
    await member.commit({group.at(0): 3, group.at(2): 5})
    await member.commit({group.at(0): 4})
    assert await group.offsets() == {0: 4, 2: 5}
    await member.close()
    assert await group.offsets() == {0: 4, 2: 5}


async def test_a_member_does_not_commit_for_partitions_of_another(group: Group) -> None:
    first, second = await group.join(), await group.join()
    shares = await group.shared_out([first, second])
    with pytest.raises(BusError):
        await first.commit({group.at(shares[1][0]): 3})
    assert await group.offsets() == {}


async def test_a_topic_that_is_not_there_is_refused(group: Group) -> None:
    with pytest.raises(TopicMissing):
        await group.bus.join(f"{group.topic}-none", group_id="g", client_id="member")
