"""What the bus does about a real broker that dies, hangs, or comes back."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.limits import ClientLimits
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.schemas.errors import BusUnavailable, UserError
from tests.contract.topics import create_topic
from tests.faults.cluster import FaultyCluster, faulty_cluster
from tests.faults.commits import Commits, bus_of
from tests.faults.traffic import Traffic, check

FLOWING_AGAIN_S = 15.0


async def test_after_a_killed_broker_came_back_records_flow_within_fifteen_seconds_and_each_transaction_is_whole(
    faulty: FaultyCluster, topic: str
) -> None:
    loop = asyncio.get_running_loop()
    traffic = Traffic(KafkaBus(KafkaSettings(bootstrap_servers=faulty.bootstrap_servers)), topic)
    committed = f"{topic}-committed"
    await create_topic(faulty.bootstrap_servers, committed, 2)
    commits = Commits(bus_of(faulty), committed)
    await traffic.start()
    await traffic.flowing_after(loop.time(), 10)
    figures = []
    try:
        await commits.start()
        for away_s in (0.0, 6.0):  # the second outage outlasts a transaction's deadline, so that one is repeated
            await asyncio.sleep(1.0)
            faulty.cluster.kill_node(0)
            assert commits.under_way, "expected the broker to die while commits are under way"
            await asyncio.sleep(away_s)
            restarted = loop.time()
            await asyncio.to_thread(faulty.cluster.restart_node, 0)
            serves_s = loop.time() - restarted
            figures.append((serves_s, await traffic.flowing_after(restarted, 60)))
        await commits.finish()
    finally:
        await commits.close()
    await traffic.finish()
    check(traffic)
    await commits.check()
    for serves_s, flowing_s in figures:
        print(f"\nbroker SIGKILL: serves {serves_s:.1f} s after its restart, records flow after {flowing_s:.1f} s")
    # Not from the restart: how long a Java machine needs to start is up to what else the machine does.
    assert max(flowing_s - serves_s for serves_s, flowing_s in figures) <= FLOWING_AGAIN_S


@pytest.mark.parametrize("seconds", [5, 20])
async def test_a_broker_that_hangs_loses_nothing_and_confirms_nothing_falsely(
    faulty: FaultyCluster, topic: str, seconds: int
) -> None:
    loop = asyncio.get_running_loop()
    bus = KafkaBus(KafkaSettings(bootstrap_servers=faulty.bootstrap_servers, request_timeout_ms=4_000))
    traffic = Traffic(bus, topic)
    await traffic.start()
    await traffic.flowing_after(loop.time(), 10)
    (pid,) = faulty.cluster.pids
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(0.5)
        confirmed = len(traffic.written)
        await asyncio.sleep(seconds)
        assert len(traffic.written) == confirmed
    finally:
        os.kill(pid, signal.SIGCONT)
    flowing_s = await traffic.flowing_after(loop.time(), FLOWING_AGAIN_S)
    await traffic.finish()
    check(traffic)
    print(
        f"\nbroker SIGSTOP {seconds} s: records flow {flowing_s:.1f} s after SIGCONT, sent again {traffic.sent_again}"
    )


@pytest.mark.processes
async def test_a_broker_that_was_there_and_is_gone_is_not_the_users_mistake(tmp_path: Path) -> None:
    async with faulty_cluster(tmp_path) as faulty:  # at an address that never answered this process
        await _mistaken_at_first_and_not_later(faulty)


async def _mistaken_at_first_and_not_later(faulty: FaultyCluster) -> None:
    bus = KafkaBus(
        KafkaSettings(bootstrap_servers=faulty.bootstrap_servers), limits=ClientLimits(connect_timeout_s=2.0)
    )
    faulty.proxy.refuse()
    with pytest.raises(UserError, match="streamrl kafka up"):
        await bus.publisher("first")
    faulty.proxy.heal()
    await (await bus.publisher("second")).close()
    faulty.proxy.refuse()
    with pytest.raises(BusUnavailable, match="to answer again") as raised:
        await bus.publisher("third")
    assert not isinstance(raised.value, UserError), "a supervisor starts the process again"
    faulty.proxy.heal()
