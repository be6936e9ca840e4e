"""Kills, pauses and restarts of broker nodes."""

import asyncio
import random
import signal
import time
from dataclasses import replace

from aiokafka import TopicPartition as KafkaPartition
from aiokafka.client import AIOKafkaClient, CoordinationType
from aiokafka.errors import KafkaError

from streamrl.schemas.topics import STEPS
from tests.chaos.faults.plan import Event, Fault
from tests.chaos.runs.chaos_run import ChaosRun
from tests.chaos.runs.waiting import FleetFailed
from tests.chaos.soak.samples import look_at

SETTLE_S = 1.5
OUTAGE_BYTES = 64 << 20
"""Most that a worker may grow while nothing can be delivered."""


async def kill_node(run: ChaosRun, event: Event) -> float:
    return await _down_and_up(run, [0], event.lasts_s)


async def outage(run: ChaosRun, event: Event) -> float:
    """A long one: workers must stop generating instead of filling their memory."""
    workers = [await run.fleet.living(name) for name in ("worker-0", "worker-1")]
    before = {pid: sample.memory for pid in workers if (sample := look_at("worker", pid, 0.0)) is not None}
    ended = await _down_and_up(run, [0], event.lasts_s)
    for pid, memory in before.items():
        sample = look_at("worker", pid, 0.0)
        if sample is not None and sample.memory > memory + OUTAGE_BYTES:
            raise FleetFailed(f"a worker grew from {memory} to {sample.memory} bytes while the broker was away")
    return ended


async def pause_node(run: ChaosRun, event: Event) -> float:
    run.broker.send(0, signal.SIGSTOP)
    await asyncio.sleep(event.lasts_s)
    run.broker.send(0, signal.SIGCONT)
    return time.time()


async def restart_node(run: ChaosRun, _event: Event) -> float:
    await run.broker.terminate(0)
    began = time.time()
    await run.broker.start(0)
    return began


async def rolling_restart(run: ChaosRun, event: Event) -> float:
    """One node after the other, cleanly: nobody may notice more than a pause."""
    before = dict(run.fleet.restarts)
    order = random.Random(event.seed).sample(range(3), 3)
    for node in order:
        await run.broker.terminate(node)
        await run.broker.start(node)
        await asyncio.sleep(SETTLE_S)
    if run.fleet.restarts != before:
        raise FleetFailed(f"a rolling restart made processes die: {run.fleet.restarts}")
    return time.time()


async def kill_each_node(run: ChaosRun, event: Event) -> float:
    """SIGKILL of one node after the other, each back before the next: the copies of all topics have to catch up."""
    began = time.time()
    for node in random.Random(event.seed).sample(range(3), 3):
        began = await _down_and_up(run, [node], event.lasts_s)
        await run.until(run.broker.is_whole, f"node {node}")
        await asyncio.sleep(SETTLE_S)
    return began


async def cut_off_leader(run: ChaosRun, event: Event) -> float:
    """The node that leads the steps topic stands still until another leads, and then goes on as if nothing had been."""
    cut = await _leader_of_steps(run)
    run.broker.send(cut - 1, signal.SIGSTOP)
    try:
        await asyncio.sleep(event.lasts_s)
        if await _leader_of_steps(run) in (cut, -1):
            raise FleetFailed(f"node {cut} was cut off for {event.lasts_s} s, and no other leads the steps topic")
    finally:
        run.broker.send(cut - 1, signal.SIGCONT)
    return time.time()


async def partition_leader(run: ChaosRun, event: Event) -> float:
    """The node that leads the steps topic and the two others do not reach each other; clients reach all three.

    The one believes for a while that it leads still, and tells so whoever asks it.
    """
    return await _without(run, event, cut_from_clients=False)


async def isolate_leader(run: ChaosRun, event: Event) -> float:
    """The same, and no client reaches it either: connections to it are taken, and nothing comes back."""
    return await _without(run, event, cut_from_clients=True)


async def _without(run: ChaosRun, event: Event, *, cut_from_clients: bool) -> float:
    network = run.broker.network
    assert network is not None, "a partition needs nodes behind proxies"
    node = await _leader_of_steps(run) - 1
    network.cut_off(node)
    if cut_from_clients:
        network.clients[node].half_open()
    try:
        await asyncio.sleep(event.lasts_s)
        others = ",".join(proxy.address for index, proxy in enumerate(network.clients) if index != node)
        if await _leader_of_steps(run, others) in (node + 1, -1):
            raise FleetFailed(f"node {node + 1} was cut off for {event.lasts_s} s, and no other leads the steps topic")
    finally:
        network.heal()
    return time.time()


async def two_of_three_down(run: ChaosRun, event: Event) -> float:
    nodes = random.Random(event.seed).sample(range(3), 2)
    return await _down_and_up(run, nodes, event.lasts_s)


async def kill_transaction_coordinator(run: ChaosRun, event: Event) -> float:
    """The broker that decides whether the trainer's announcements were made."""
    name = f"{run.setting.name}.{run.setting.settings.algorithm.name}.trainer"
    return await _down_and_up(run, [await _coordinator_of(run.broker.address, name)], event.lasts_s)


async def kill_leader(run: ChaosRun, event: Event) -> float:
    """The broker that leads the steps topic."""
    return await _down_and_up(run, [await _leader_of_steps(run) - 1], event.lasts_s)


async def _leader_of_steps(run: ChaosRun, address: str | None = None) -> int:
    """Its node id, from 1; -1: none. ``address``: of the nodes that are asked."""
    client = AIOKafkaClient(bootstrap_servers=address or run.broker.address)
    await client.bootstrap()
    try:
        metadata = await client.fetch_all_metadata()
        leader = metadata.leader_for_partition(KafkaPartition(STEPS.full_name(run.setting.name), 0))
    finally:
        await client.close()
    return int(leader)


async def _down_and_up(run: ChaosRun, nodes: list[int], down_s: float) -> float:
    """SIGKILL, a while of nothing, and a new start; the moment at which that start began."""
    await asyncio.gather(*(run.broker.kill(node) for node in nodes))
    await asyncio.sleep(down_s)
    began = time.time()
    await asyncio.gather(*(run.broker.start(node) for node in nodes))
    return began


async def _coordinator_of(address: str, transactional_id: str) -> int:
    client = AIOKafkaClient(bootstrap_servers=address)
    await client.bootstrap()
    try:
        for _ in range(20):
            try:
                return int(await client.coordinator_lookup(CoordinationType.TRANSACTION, transactional_id)) - 1
            except KafkaError:
                await asyncio.sleep(0.2)
    finally:
        await client.close()
    raise FleetFailed(f"no broker coordinates the transactions of {transactional_id}")


LONG = {"training": {"max_steps": 180}}
_ONE: tuple[Fault, ...] = (
    Fault("broker-kill", kill_node, ("A1",), lasts=(0.5, 5.0), fresh=True),
    Fault("broker-outage", outage, ("A3",), lasts=(30.0, 40.0), mixes=False, fresh=True),
    Fault("broker-pause", pause_node, ("A2",), lasts=(2.0, 8.0), fresh=True),
    Fault("broker-restart", restart_node, ("A1",), fresh=True),
)
_THREE: tuple[Fault, ...] = (
    Fault("rolling-restart", rolling_restart, ("A4",), mixes=False, settings=LONG),
    Fault("two-of-three-down", two_of_three_down, ("A5",), lasts=(2.0, 5.0), mixes=False),
    Fault("transaction-coordinator-kill", kill_transaction_coordinator, ("A8",), lasts=(1.0, 4.0)),
    Fault("leader-kill", kill_leader, ("A8",), lasts=(1.0, 4.0)),
    Fault("node-by-node-kill", kill_each_node, ("A4a",), lasts=(1.0, 4.0), mixes=False, settings=LONG),
    Fault("leader-cut-off", cut_off_leader, ("A15",), lasts=(14.0, 20.0), mixes=False, settings=LONG),
)
_CUT: tuple[Fault, ...] = (
    Fault("leader-partitioned", partition_leader, ("A15",), lasts=(14.0, 25.0), mixes=False, settings=LONG),
    Fault("leader-isolated", isolate_leader, ("A15",), lasts=(14.0, 25.0), mixes=False, settings=LONG),
)
FAULTS = (
    *_ONE,
    *(replace(fault, broker="three", fresh=True) for fault in _THREE),
    *(replace(fault, broker="partitionable", fresh=True) for fault in _CUT),
)
