"""What the stream of tokens onto the bus costs a worker: an engine sampling with and without it, in turns.

``python -m benchmarks.gateway.tap BROKER ENGINE MODEL`` prints one JSON line. Chunks are of one token. Each is
offered as it is sampled, and a process beside reads them from the topic, which says how long each was on its way.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.gateway.models import MILLION, SMOLLM2, SampledModel
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.kafka.topic_admin import apply_topics
from streamrl.bus.port import message_of
from streamrl.producers.generation.engines.factory import build_engine
from streamrl.producers.generation.engines.port import Engine, GenerationRequest
from streamrl.producers.generation.rollout import TokenStream
from streamrl.producers.generation.settings import GenerationSettings
from streamrl.schemas.topics import TOKENS
from streamrl.schemas.trajectories import SamplingParams, TokenChunk

RUN, SLOTS, PROMPT, TOKENS_EACH = "bench-tap", 32, 32, 128
MODELS = {"million": MILLION, "smollm2": SMOLLM2}


@asynccontextmanager
async def stream_to(address: str) -> AsyncIterator[TokenStream]:
    """A stream of tokens onto a broker."""
    publisher = await KafkaBus(KafkaSettings(bootstrap_servers=address)).publisher("tap")
    stream = TokenStream(publisher, TOKENS.full_name(RUN), "tap")
    publishing = asyncio.create_task(stream.publish_loop())
    try:
        yield stream
    finally:
        publishing.cancel()
        await publisher.close()


async def sample(
    engine: Engine, name: str, tokens_each: int, stream: TokenStream | None, told: dict[str, float]
) -> dict[str, float]:
    """All slots once; tokens a second, processor seconds of this process, and seconds within ``offer``."""
    offered = 0.0

    async def one(number: int) -> None:
        nonlocal offered
        request = GenerationRequest(
            f"tap/{name}/{number}", [7] * PROMPT, SamplingParams(max_completion_length=tokens_each), chunk_tokens=1
        )
        start = 0
        async for delta in engine.generate(request):
            if stream is not None:
                began = time.perf_counter()
                stream.offer(request.request_id, start, delta)
                offered += time.perf_counter() - began
                told[f"{request.request_id}@{start}"] = time.time()
            start += len(delta.token_ids)

    began, spent = time.monotonic(), time.process_time()
    await asyncio.gather(*map(one, range(SLOTS)))
    tokens = SLOTS * tokens_each
    seconds = time.monotonic() - began
    if stream is not None:  # what is on its way still costs
        await asyncio.sleep(0.2)
    return {
        "tokens_per_s": tokens / seconds,
        "processor_s": time.process_time() - spent,
        "offer_ms": 1000 * offered / tokens,
    }


async def measure(address: str, name: str, model: SampledModel, rounds: int) -> dict[str, Any]:
    """The engine with and without the stream, in turns."""
    await apply_topics(address, RUN, 4, 1, KafkaSettings(bootstrap_servers=address))
    tokens_each = round(TOKENS_EACH * model.share)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "model"
        model.write(directory)
        threads = max(1, (os.cpu_count() or 2) - 1)
        settings = GenerationSettings.model_validate(
            {"engine": name, "max_num_seqs": SLOTS, "threads": threads, "dtype": model.dtype}
        )
        engine = build_engine(settings, directory, chunk_tokens=1)
        await engine.start()
        told: dict[str, float] = {}
        reader = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "benchmarks.gateway.tap", address, "read"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            limit=64 << 20,
        )
        assert reader.stdout is not None
        try:
            await reader.stdout.readline()  # it listens
            async with stream_to(address) as stream:
                await sample(engine, "first", tokens_each, stream, told)
                told.clear()
                pairs = []
                for number in range(rounds):
                    off = await sample(engine, f"off-{number}", tokens_each, None, told)
                    on = await sample(engine, f"on-{number}", tokens_each, stream, told)
                    pairs.append((off, on))
                await asyncio.sleep(1.0)
                dropped = stream.dropped
            seen: dict[str, float] = json.loads((await reader.communicate(b"stop\n"))[0])
        finally:
            if reader.returncode is None:
                reader.kill()
        await engine.close()
    tokens = SLOTS * tokens_each
    late = [seen[one] - at for one, at in told.items() if one in seen]
    more = [(on["processor_s"] - off["processor_s"]) / tokens for off, on in pairs]
    rate = [on["tokens_per_s"] / off["tokens_per_s"] for off, on in pairs]
    return {
        "engine": name,
        "model": model.name,
        "slots": SLOTS,
        "tokens_per_s": round(statistics.median(off["tokens_per_s"] for off, _ in pairs)),
        "tap_ms_per_token": round(1000 * statistics.median(more), 4),
        "tap_offer_ms_per_token": round(statistics.median(on["offer_ms"] for _, on in pairs), 4),
        "tap_throughput_cost": round(1 - statistics.median(rate), 4),
        "throughput_ratios": [round(one, 3) for one in rate],
        "tokens_on_topic": f"{len(late)} of {len(told)}",
        "dropped_chunks": dropped,
        "sampled_to_read_ms_p50": round(1000 * statistics.median(late), 2),
        "sampled_to_read_ms_p99": round(1000 * sorted(late)[int(0.99 * len(late))], 2),
    }


async def read(address: str) -> None:
    """Note when each token was read, until told to stop; then print it."""
    bus = KafkaBus(KafkaSettings(bootstrap_servers=address))
    subscription = await bus.subscribe([TOKENS.full_name(RUN)], client_id="tap-reader", start="latest")
    await subscription.poll(timeout_s=0.5)
    print("ready", flush=True)
    stopping = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    seen: dict[str, float] = {}
    while not stopping.done():
        for record in await subscription.poll(timeout_s=0.05):
            if isinstance(chunk := message_of(record), TokenChunk):
                seen[f"{chunk.trajectory_id}@{chunk.start}"] = time.time()
    await subscription.close()
    print(json.dumps(seen), flush=True)


def main() -> None:
    """Measure and print, or read."""
    parser = argparse.ArgumentParser()
    parser.add_argument("broker")
    parser.add_argument("engine")
    parser.add_argument("model", nargs="?", choices=MODELS, default="million")
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    if arguments.engine == "read":
        uvloop.run(read(arguments.broker))
    else:
        model = MODELS[arguments.model]
        print(json.dumps(uvloop.run(measure(arguments.broker, arguments.engine, model, arguments.rounds))), flush=True)


if __name__ == "__main__":
    main()
