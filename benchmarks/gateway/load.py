"""What one gateway bears: readers at once, too many requests, replicas. Before engines that cost no processor."""

import statistics
import time
from contextlib import ExitStack
from typing import Any

import uvloop

from benchmarks.gateway.asking import at_rate, ms, part, so_many

PACED_STEP_MS = 100.0
"""A token of each completion ten times a second: about as fast as people read."""
OVERLOAD_SLOTS, OVERLOAD_TOKENS, OVERLOAD_STEP_MS = 32, 32, 20.0
REPLICA_SLOTS, REPLICA_STEP_MS = 16, 100.0


def readers(clients: int, tokens: int, limit_s: float) -> dict[str, Any]:
    """So many streams at once."""
    with (
        part("engine", "--slots", clients, "--step-ms", PACED_STEP_MS, limit_s=limit_s) as engine,
        part("gateway", engine.door.address, "--queued", clients, "--wait-s", 60, limit_s=limit_s) as gateway,
    ):
        before, began = gateway.processor_s(), time.monotonic()
        answers, rate = uvloop.run(so_many(gateway.door, clients, clients, tokens))
        took, spent = time.monotonic() - began, gateway.processor_s() - before
    return {
        "clients": clients,
        "tokens_each": tokens,
        "answered": answers.statuses.get(200, 0),
        "broken": answers.broken,
        "seconds": round(took, 1),
        "least_seconds": round(tokens * PACED_STEP_MS / 1000, 1),
        "tokens_per_s": round(rate),
        "first_token_ms_p50": ms(statistics.median(answers.first_s)),
        "first_token_ms_p99": ms(_quantile(answers.first_s, 0.99)),
        "between_tokens_ms_p99": ms(_quantile(answers.between_s, 0.99)),
        "gateway_processor_us_per_token": round(1e6 * spent / max(1, answers.tokens), 1),
    }


def overload(factor: int, seconds: float, limit_s: float) -> dict[str, Any]:
    """Requests at ``factor`` times what the slots can serve; the tokens that are served, of those at full load."""
    capacity_per_s = OVERLOAD_SLOTS / (OVERLOAD_TOKENS * OVERLOAD_STEP_MS / 1000)
    with (
        part("engine", "--slots", OVERLOAD_SLOTS, "--step-ms", OVERLOAD_STEP_MS, limit_s=limit_s) as engine,
        part("gateway", engine.door.address, "--queued", OVERLOAD_SLOTS, "--wait-s", 5, limit_s=limit_s) as gateway,
    ):
        count = round(capacity_per_s * seconds)
        _, full = uvloop.run(so_many(gateway.door, count, OVERLOAD_SLOTS, OVERLOAD_TOKENS))
        began = time.monotonic()
        answers = uvloop.run(at_rate(gateway.door, factor * capacity_per_s, seconds, OVERLOAD_TOKENS))
        rate = answers.tokens / (time.monotonic() - began)
    return {
        "factor": factor,
        "offered_per_s": round(factor * capacity_per_s),
        "statuses": {str(status): number for status, number in sorted(answers.statuses.items())},
        "broken": answers.broken,
        "tokens_per_s_at_full_load": round(full),
        "tokens_per_s": round(rate),
        "first_token_ms_p50": ms(statistics.median(answers.first_s)),
        "goodput": round(rate / full, 3),
    }


def replicas(seconds: float, limit_s: float) -> dict[str, Any]:
    """The tokens that one gateway brings from 8 replicas to those from one, each as busy as it can be."""
    rates = {}
    for number in (1, 8):
        with ExitStack() as stack:
            engine = ("engine", "--slots", REPLICA_SLOTS, "--step-ms", REPLICA_STEP_MS)
            doors = [stack.enter_context(part(*engine, limit_s=limit_s)).door.address for _ in range(number)]
            gateway = stack.enter_context(
                part("gateway", *doors, "--queued", 1000, "--wait-s", 60, limit_s=limit_s)
            ).door
            at_once = number * REPLICA_SLOTS
            uvloop.run(so_many(gateway, at_once, at_once, 4))
            rounds = max(1, round(seconds / (OVERLOAD_TOKENS * REPLICA_STEP_MS / 1000)))
            _, rates[number] = uvloop.run(so_many(gateway, rounds * at_once, at_once, OVERLOAD_TOKENS))
    return {
        "slots_of_a_replica": REPLICA_SLOTS,
        "tokens_per_s_of_1": round(rates[1]),
        "tokens_per_s_of_8": round(rates[8]),
        "scaling_8": round(rates[8] / rates[1], 2),
    }


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
