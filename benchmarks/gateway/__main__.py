"""Measures the gateway as users meet it: engine, gateway and requesters are processes of their own.

First tokens and throughput are compared with the same engine asked in its own process, in turns, so that both see one
machine. Readers, overload and replicas are measured before engines whose steps take a set time and no processor. What
the stream of tokens onto the bus costs is measured in ``tap``.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from benchmarks.conditions import conditions
from benchmarks.gateway.parts import MODEL
from deploy.wiring.broker import broker_for

RESULT = Path(__file__).parents[1] / "results" / "gateway.json"
SLOTS, PROMPT, TOKENS = 16, 32, 64
PACED_STEP_MS = 100.0
"""A token of each completion ten times a second: about as fast as people read."""
OVERLOAD_SLOTS, OVERLOAD_TOKENS, OVERLOAD_STEP_MS = 32, 32, 20.0
REPLICA_SLOTS, REPLICA_STEP_MS = 16, 100.0


@dataclass
class Answers:
    """What requesters saw: seconds to first tokens and between tokens, tokens, and statuses."""

    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    tokens: int = 0
    statuses: dict[int, int] = field(default_factory=dict)
    broken: int = 0


@contextmanager
def part(*arguments: str) -> Iterator["tuple[subprocess.Popen[str], str]"]:
    """A process of ``parts``, and its address."""
    command = [sys.executable, "-P", "-m", "benchmarks.gateway.parts", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield process, str(_answer(process)["address"])
        finally:
            process.terminate()


def _answer(process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdout is not None
    while line := process.stdout.readline():
        if line.startswith("{"):  # not one of the log's lines
            found: dict[str, Any] = json.loads(line)
            return found
    raise SystemExit("a process of the benchmark ended")


async def ask(session: aiohttp.ClientSession, address: str, answers: Answers, tokens: int) -> None:
    """One request as a stream, read to its end."""
    body = {"model": MODEL, "prompt": "x" * 4 * PROMPT, "max_tokens": tokens, "stream": True}
    began = last = time.monotonic()
    async with session.post(f"{address}/v1/completions", json=body) as response:
        answers.statuses[response.status] = answers.statuses.get(response.status, 0) + 1
        if response.status != 200:
            await response.read()
            return
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            now = time.monotonic()
            (answers.between_s if last > began else answers.first_s).append(now - last)
            last = now
            said = json.loads(line.removeprefix(b"data: "))
            if "error" in said:
                answers.broken += 1
            else:
                answers.tokens += len(said["choices"][0]["text"])  # a letter a token


async def through_gateway(address: str, requests: int, at_once: int, tokens: int) -> tuple[Answers, float]:
    """So many requests, so many at once; what was seen, and tokens a second."""
    answers, places = Answers(), asyncio.Semaphore(at_once)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one() -> None:
            async with places:
                await ask(session, address, answers, tokens)

        began = time.monotonic()
        await asyncio.gather(*(one() for _ in range(requests)))
    return answers, answers.tokens / (time.monotonic() - began)


async def offered(address: str, per_s: float, seconds: float, tokens: int) -> Answers:
    """Requests that come at a rate, whatever becomes of those before."""
    answers = Answers()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        loop, asking = asyncio.get_running_loop(), list[asyncio.Task[None]]()
        began = due = loop.time()
        while due < began + seconds:
            await asyncio.sleep(max(0.0, due - loop.time()))
            asking.append(asyncio.create_task(ask(session, address, answers, tokens)))
            due += 1 / per_s
        await asyncio.gather(*asking)
    return answers


def cost(rounds: int, requests: int) -> dict[str, Any]:
    """First tokens one at a time, and throughput with all slots busy: directly and through the gateway, in turns."""
    direct_first: list[float] = []
    gateway_first: list[float] = []
    ratios: list[float] = []
    with (
        part("engine", "--slots", str(SLOTS)) as (engine, door),
        part("gateway", door, "--queued", "1000", "--wait-s", "60") as (_, address),
    ):

        def directly(count: int, at_once: int) -> dict[str, Any]:
            assert engine.stdin is not None
            wanted = {"requests": count, "at_once": at_once, "prompt": [7] * PROMPT, "tokens": TOKENS}
            engine.stdin.write(json.dumps(wanted) + "\n")
            engine.stdin.flush()
            return _answer(engine)

        directly(2, 1)
        uvloop.run(through_gateway(address, 2, 1, TOKENS))
        for _ in range(rounds):
            direct_first += directly(requests, 1)["first_s"]
            gateway_first += uvloop.run(through_gateway(address, requests, 1, TOKENS))[0].first_s
            plain = directly(4 * SLOTS, SLOTS)["tokens_per_s"]
            ratios.append(uvloop.run(through_gateway(address, 4 * SLOTS, SLOTS, TOKENS))[1] / plain)
    median_direct, median_gateway = statistics.median(direct_first), statistics.median(gateway_first)
    return {
        "first_token_direct_ms_p50": _ms(median_direct),
        "first_token_gateway_ms_p50": _ms(median_gateway),
        "first_token_added_ms_p50": _ms(median_gateway - median_direct),
        "throughput_ratio": round(statistics.median(ratios), 3),
        "throughput_ratios": [round(ratio, 3) for ratio in ratios],
    }


def readers(clients: int, tokens: int) -> dict[str, Any]:
    """So many streams at once."""
    with (
        part("engine", "--slots", str(clients), "--step-ms", str(PACED_STEP_MS)) as (_, door),
        part("gateway", door, "--queued", str(clients), "--wait-s", "60") as (gateway, address),
    ):
        before = _processor_s(gateway.pid)
        began = time.monotonic()
        answers, rate = uvloop.run(through_gateway(address, clients, clients, tokens))
        took = time.monotonic() - began
        spent = _processor_s(gateway.pid) - before
    return {
        "clients": clients,
        "tokens_each": tokens,
        "answered": answers.statuses.get(200, 0),
        "broken": answers.broken,
        "seconds": round(took, 1),
        "least_seconds": round(tokens * PACED_STEP_MS / 1000, 1),
        "tokens_per_s": round(rate),
        "first_token_ms_p50": _ms(statistics.median(answers.first_s)),
        "first_token_ms_p99": _ms(_quantile(answers.first_s, 0.99)),
        "between_tokens_ms_p99": _ms(_quantile(answers.between_s, 0.99)),
        "gateway_processor_us_per_token": round(1e6 * spent / max(1, answers.tokens), 1),
    }


def overload(factor: int, seconds: float) -> dict[str, Any]:
    """Requests at ``factor`` times what the slots can serve; the tokens that are served, of those at full load."""
    capacity_per_s = OVERLOAD_SLOTS / (OVERLOAD_TOKENS * OVERLOAD_STEP_MS / 1000)
    with (
        part("engine", "--slots", str(OVERLOAD_SLOTS), "--step-ms", str(OVERLOAD_STEP_MS)) as (_, door),
        part("gateway", door, "--queued", str(OVERLOAD_SLOTS), "--wait-s", "5") as (_, address),
    ):
        count = round(capacity_per_s * seconds)
        _, full = uvloop.run(through_gateway(address, count, OVERLOAD_SLOTS, OVERLOAD_TOKENS))
        began = time.monotonic()
        answers = uvloop.run(offered(address, factor * capacity_per_s, seconds, OVERLOAD_TOKENS))
        rate = answers.tokens / (time.monotonic() - began)
    return {
        "factor": factor,
        "offered_per_s": round(factor * capacity_per_s),
        "statuses": {str(status): number for status, number in sorted(answers.statuses.items())},
        "broken": answers.broken,
        "tokens_per_s_at_full_load": round(full),
        "tokens_per_s": round(rate),
        "first_token_ms_p50": _ms(statistics.median(answers.first_s)),
        "goodput": round(rate / full, 3),
    }


def scaling(seconds: float) -> dict[str, Any]:
    """The tokens that one gateway brings from 8 replicas to those from one, each as busy as it can be."""
    rates = {}
    for replicas in (1, 8):
        with ExitStack() as stack:
            doors = [
                stack.enter_context(part("engine", "--slots", str(REPLICA_SLOTS), "--step-ms", str(REPLICA_STEP_MS)))[1]
                for _ in range(replicas)
            ]
            _, address = stack.enter_context(part("gateway", *doors, "--queued", "1000", "--wait-s", "60"))
            at_once = replicas * REPLICA_SLOTS
            uvloop.run(through_gateway(address, at_once, at_once, 4))
            rounds = max(1, round(seconds / (OVERLOAD_TOKENS * REPLICA_STEP_MS / 1000)))
            _, rates[replicas] = uvloop.run(through_gateway(address, rounds * at_once, at_once, OVERLOAD_TOKENS))
    return {
        "slots_of_a_replica": REPLICA_SLOTS,
        "tokens_per_s_of_1": round(rates[1]),
        "tokens_per_s_of_8": round(rates[8]),
        "scaling_8": round(rates[8] / rates[1], 2),
    }


def tap(rounds: int) -> dict[str, Any]:
    """The stream of tokens onto a broker of its own, beside vLLM where its environment is, else beside transformers."""
    vllm = Path(__file__).parents[2] / ".venv-vllm"
    python, engine = (
        (vllm / "bin" / "python", "vllm") if (vllm / "ready").exists() else (sys.executable, "transformers")
    )
    with broker_for(None, print) as address:
        command = [str(python), "-P", "-m", "benchmarks.gateway.tap", address, engine, "--rounds", str(rounds)]
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(vllm.parent)}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, timeout=300, check=True)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 2)


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    began = time.monotonic()
    costs = cost(arguments.rounds, arguments.requests)
    print(json.dumps(costs))
    streams = readers(arguments.clients, arguments.tokens)
    print(json.dumps(streams))
    over = overload(10, arguments.seconds)
    print(json.dumps(over))
    more = scaling(arguments.seconds)
    print(json.dumps(more))
    tapped = tap(arguments.rounds + 1)
    print(json.dumps(tapped))
    result = {
        "conditions": conditions(began, 0, ("fastapi", "uvicorn", "aiohttp", "torch"), "make bench-gateway"),
        "tap_ms_per_token": tapped["tap_ms_per_token"],
        "tap_throughput_cost": tapped["tap_throughput_cost"],
        **costs,
        "clients": streams["clients"],
        "goodput_at_10x": over["goodput"],
        "scaling_8": more["scaling_8"],
        "readers": streams,
        "overload": over,
        "replicas": more,
        "tap": tapped,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
