"""Slow, narrow, silent and broken connections, through a proxy between all our processes and the broker."""

import asyncio
import time

from tests.chaos.faults.plan import Event, Fault
from tests.chaos.runs.chaos_run import ChaosRun
from tests.faults.proxy import FaultProxy

ONE_WAY_S = 0.25
BYTES_PER_S = 1e6
RESETS = 5


def _proxy(run: ChaosRun) -> FaultProxy:
    assert run.broker.proxy is not None, "a network fault needs a broker behind a proxy"
    return run.broker.proxy


async def slow(run: ChaosRun, event: Event) -> float:
    """500 ms there and back, and 1 MB/s."""
    proxy = _proxy(run)
    proxy.latency_s, proxy.bandwidth = ONE_WAY_S, BYTES_PER_S
    await asyncio.sleep(event.lasts_s)
    proxy.heal()
    return time.time()


async def half_open(run: ChaosRun, event: Event) -> float:
    """Connections stay open and nothing arrives."""
    _proxy(run).half_open()
    await asyncio.sleep(event.lasts_s)
    _proxy(run).heal()
    return time.time()


async def one_way(run: ChaosRun, event: Event) -> float:
    """The broker hears us, and is not heard: everything it does for us has an unknown outcome."""
    _proxy(run).blackhole("to_client")
    await asyncio.sleep(event.lasts_s)
    _proxy(run).heal()
    return time.time()


async def reset(run: ChaosRun, event: Event) -> float:
    """All connections are reset, several times over."""
    for _ in range(RESETS):
        _proxy(run).reset()
        await asyncio.sleep(event.lasts_s / RESETS)
    return time.time()


async def cut(run: ChaosRun, event: Event) -> float:
    """Nobody can connect for a while."""
    await _proxy(run).cut(event.lasts_s)
    return time.time()


FAULTS = (
    Fault("network-slow", slow, ("A7",), lasts=(4.0, 8.0), broker="proxied"),
    Fault("network-half-open", half_open, ("A6",), lasts=(3.0, 9.0), broker="proxied"),
    Fault("network-one-way", one_way, ("A6", "B2"), lasts=(2.0, 6.0), broker="proxied"),
    Fault("network-reset", reset, (), lasts=(1.0, 3.0), broker="proxied"),
    Fault("network-cut", cut, (), lasts=(1.0, 5.0), broker="proxied"),
)
