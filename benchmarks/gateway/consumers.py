"""What attached consumers of a run's topics do to the gateway's latency: first tokens with 0, 2 and 8 of them.

A worker is emulated before a real broker: its orders bring chunks of tokens and trajectories, its requests are sampled
at a set pace and are on the tokens topic, too, since their key agrees. A consumer is a process that reads and decodes
all of both topics, and is told to read or to rest, so that the numbers of them take turns and see one machine.
"""

import statistics
import time
from contextlib import ExitStack
from typing import Any

import uvloop

from benchmarks.gateway.asking import Part, ms, part, so_many
from streamrl.deploy.wiring.broker import broker_for

CONSUMERS = (0, 2, 8)
STEP_MS = 20.0
ORDERS, REQUEST_SLOTS = 64, 16
TOKENS = 4
PAUSE_S = 0.1
"""Most between two requests: else each would begin when all consumers have just been given the last one's end."""
SETTLE_S = 1.0


def consumers(rounds: int, requests: int, limit_s: float) -> dict[str, Any]:
    """A row a number of consumers; ``latency_ratio``: of first tokens to those with none, the median over rounds.

    ``processors``: what the consumers kept busy.
    """
    found: dict[int, list[float]] = {number: [] for number in CONSUMERS}
    first: dict[int, list[float]] = {number: [] for number in CONSUMERS}
    busy: dict[int, list[float]] = {number: [] for number in CONSUMERS}
    read = 0
    with ExitStack() as stack:
        broker = stack.enter_context(broker_for(None, print))
        engine = stack.enter_context(
            part(
                *("engine", "--slots", REQUEST_SLOTS, "--step-ms", STEP_MS, "--broker", broker, "--orders", ORDERS),
                limit_s=limit_s,
            )
        )
        gateway = stack.enter_context(
            part(
                *("gateway", engine.door.address, "--queued", 100, "--wait-s", 60, "--trains"),
                limit_s=limit_s,
            )
        )
        attached = [stack.enter_context(part("consumer", broker, limit_s=limit_s)) for _ in range(max(CONSUMERS))]
        uvloop.run(so_many(gateway.door, 4, 1, TOKENS))
        for number in range(rounds):
            turn = number % len(CONSUMERS)
            for count in (*CONSUMERS[turn:], *CONSUMERS[:turn]):
                read += _reading(attached, count)
                spent, began = _processor_s(attached), time.monotonic()
                seen = uvloop.run(so_many(gateway.door, requests, 1, TOKENS, PAUSE_S))[0].first_s
                busy[count].append((_processor_s(attached) - spent) / (time.monotonic() - began))
                found[count].append(statistics.median(seen))
                first[count] += seen
        read += _reading(attached, 0)
    ratios = {count: [one / none for one, none in zip(found[count], found[0], strict=True)] for count in CONSUMERS}
    return {
        "engine_ms_to_first_token": STEP_MS,
        "orders": ORDERS,
        "messages_read": read,
        "rows": [
            {
                "consumers": count,
                "first_token_ms_p50": ms(statistics.median(first[count])),
                "processors": round(statistics.median(busy[count]), 3),
                "latency_ratio": round(statistics.median(ratios[count]), 4),
                "range": [round(min(ratios[count]), 4), round(max(ratios[count]), 4)]
                if count
                else _own_range(found[0]),
            }
            for count in CONSUMERS
        ],
    }


def _reading(attached: list[Part], count: int) -> int:
    """So many of them read from now on, the others rest; how many messages all have read since the last call."""
    read = sum(one.ask({"read": place < count})["read"] for place, one in enumerate(attached))
    time.sleep(SETTLE_S)
    return int(read)


def _processor_s(attached: list[Part]) -> float:
    return sum(one.processor_s() for one in attached)


def _own_range(medians: list[float]) -> list[float]:
    """By what stretches with none differ from their median by themselves."""
    middle = statistics.median(medians)
    return [round(min(medians) / middle, 4), round(max(medians) / middle, 4)]
