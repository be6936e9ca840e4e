"""The processes that are measured: an engine behind a worker's door, a gateway before it, a consumer of the topics.

``python -m benchmarks.gateway.parts engine ...`` prints one JSON line with its address, and for each line on standard
input samples by itself and prints how long that took. ``gateway ADDRESS`` prints its own address, and a key that agrees
to be trained on. ``consumer BROKER`` reads or rests as each line says, and answers how much it has read.
"""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.transport.workload import as_message, ended_trajectories
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.kafka.topic_admin import apply_topics
from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Outgoing, Publisher, message_of
from streamrl.producers.gateway.calls import ServedModel
from streamrl.producers.gateway.gateway import Gateway
from streamrl.producers.gateway.settings import GatewaySettings
from streamrl.producers.gateway.text import ChatTokenizer
from streamrl.producers.gateway.tool_calls import HermesToolCalls
from streamrl.producers.gateway.worker_requests import RequestServer, RequestSlots
from streamrl.producers.generation.engines.emulated import FillerChat
from streamrl.producers.generation.engines.port import Engine, GenerationRequest, TokenDelta
from streamrl.producers.generation.rollout import TokenStream, WorkerLoad
from streamrl.producers.generation.settings import GenerationSettings
from streamrl.producers.generation.status import WorkerStatus
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import Heartbeat, WorkerState
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.topics import CATALOGUE, HEARTBEATS, TOKENS, TRAJECTORIES
from streamrl.schemas.trajectories import FinishReason, SamplingParams

SECRET, MODEL = "bench", "bench"
VERSION = PolicyVersion(1, 0)
POSITIONS = 1024
ORDER_TOKENS, CHUNK = 256, 32


@dataclass
class PacedEngine:
    """A token for each running completion every ``step_s``, as a device would that has room for all: it costs no
    processor, so that what is measured is the way of the tokens.

    ``apart``: each counts its own steps from when it came, so that all wait alike for their first token.
    """

    step_s: float
    max_num_seqs: int
    apart: bool = False
    name: str = "paced"
    kv_tokens: int | None = None
    _mailboxes: "set[asyncio.Queue[int]]" = field(default_factory=set)
    _stepping: "asyncio.Task[None] | None" = None

    async def start(self) -> None:
        """Begin with the steps."""
        self._stepping = asyncio.create_task(self._step())

    async def _step(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due += self.step_s
            await asyncio.sleep(max(0.0, due - loop.time()))
            for mailbox in self._mailboxes:
                mailbox.put_nowait(7)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        """As many tokens as are allowed."""
        last = request.sampling.max_completion_length - 1
        if self.apart:
            loop = asyncio.get_running_loop()
            due = loop.time()
            for number in range(last + 1):
                due += self.step_s
                await asyncio.sleep(max(0.0, due - loop.time()))
                yield TokenDelta([7], [-1.0], VERSION, FinishReason.LENGTH if number == last else None)
            return
        mailbox: asyncio.Queue[int] = asyncio.Queue()
        self._mailboxes.add(mailbox)
        try:
            for left in range(last, -1, -1):
                token = await mailbox.get()
                yield TokenDelta([token], [-1.0], VERSION, None if left else FinishReason.LENGTH)
        finally:
            self._mailboxes.discard(mailbox)

    def interrupt(self, request_id: str) -> bool:
        """It is asked for no more by leaving its deltas."""
        return False

    async def adopt(self, directory: Path, version: PolicyVersion) -> None:
        """It has no weights."""

    async def close(self) -> None:
        """Stop."""
        if self._stepping is not None:
            self._stepping.cancel()


def model_engine(directory: Path, name: str, slots: int, dtype: str) -> Engine:
    """An engine over a model without an end token."""
    from streamrl.producers.generation.engines.factory import build_engine

    settings = GenerationSettings.model_validate(
        {"engine": name, "max_num_seqs": slots, "threads": 1, "dtype": dtype, "max_model_len": POSITIONS}
    )
    return build_engine(settings, directory)


async def sample_directly(
    engine: Engine, requests: int, at_once: int, prompt: list[int], tokens: int
) -> dict[str, Any]:
    """The same requests without a door: seconds to each first token, and tokens a second over all."""
    first: list[float] = []
    places = asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        async with places:
            began, told = time.monotonic(), False
            sampling = SamplingParams(max_completion_length=tokens)
            request = GenerationRequest(f"d/{number}", prompt, sampling, chunk_tokens=1, interactive=True)
            async for _ in engine.generate(request):
                if not told:
                    first.append(time.monotonic() - began)
                    told = True

    began = time.monotonic()
    await asyncio.gather(*map(one, range(requests)))
    return {"first_s": first, "tokens_per_s": requests * tokens / (time.monotonic() - began)}


@asynccontextmanager
async def onto_topics(broker: str, orders: int, step_s: float) -> AsyncIterator[TokenStream | None]:
    """The stream of a worker's tokens, and beside it what its orders bring; None without a broker."""
    if not broker:
        yield None
        return
    await apply_topics(broker, MODEL, 4, 1, KafkaSettings(bootstrap_servers=broker))
    publisher = await KafkaBus(KafkaSettings(bootstrap_servers=broker)).publisher("w0")
    stream = TokenStream(publisher, TOKENS.full_name(MODEL), "w0")
    tasks = [asyncio.create_task(stream.publish_loop()), asyncio.create_task(_bring(publisher, stream, orders, step_s))]
    try:
        yield stream
    finally:
        for task in tasks:
            task.cancel()
        await publisher.close()


async def _bring(publisher: Publisher, stream: TokenStream, orders: int, step_s: float) -> None:
    """So many orders at all times, a chunk of each at once, and a trajectory of each that is over."""
    loop, ended, number = asyncio.get_running_loop(), ended_trajectories(ORDER_TOKENS, 0), 0
    due = loop.time()
    while True:
        for start in range(0, ORDER_TOKENS, CHUNK):
            due += CHUNK * step_s
            await asyncio.sleep(max(0.0, due - loop.time()))
            is_last = start + CHUNK == ORDER_TOKENS
            for index in range(number, number + orders):
                one = ended[index % len(ended)]
                chunk = slice(start, start + CHUNK)
                delta = TokenDelta(
                    one.token_ids[chunk].tolist(),
                    one.logprobs[chunk].tolist(),
                    VERSION,
                    FinishReason.LENGTH if is_last else None,
                )
                stream.offer(f"order/{index}", start, delta)
                if is_last:
                    made = as_message(one, index)
                    await publisher.submit(
                        Outgoing.of(TRAJECTORIES.full_name(MODEL), made, key=made.group_id, partition=index % 4)
                    )
        number += orders


async def serve_engine(arguments: argparse.Namespace) -> None:
    """Open the door, answer commands on standard input (a JSON line each: ``sample_directly``'s arguments)."""
    if arguments.step_ms:
        step_s = arguments.step_ms / 1000
        engine: Engine = PacedEngine(step_s, arguments.slots, apart=bool(arguments.broker))
    else:
        engine = model_engine(arguments.model, arguments.engine, arguments.slots, arguments.dtype)
    await engine.start()
    async with onto_topics(arguments.broker, arguments.orders, arguments.step_ms / 1000) as tokens:
        slots = RequestSlots("127.0.0.1", arguments.slots, SECRET)
        server = RequestServer(engine, WorkerLoad(), "w0", slots, WorkerStatus(version=VERSION), tokens)
        print(json.dumps({"address": await server.open()}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await sample_directly(engine, **json.loads(line))), flush=True)
        await server.close()
    await engine.close()


async def consume(broker: str) -> None:
    """Read and decode all of both topics while told to, from the ends on; how many messages since the last line."""
    bus, reading, seen = KafkaBus(KafkaSettings(bootstrap_servers=broker)), asyncio.Event(), 0

    async def read_loop() -> None:
        nonlocal seen
        while True:
            await reading.wait()
            topics = [topic.full_name(MODEL) for topic in (TOKENS, TRAJECTORIES)]
            subscription = await bus.subscribe(topics, client_id="consumer", start="latest")
            while reading.is_set():
                seen += sum(message_of(record) is not None for record in await subscription.poll(timeout_s=0.2))
            await subscription.close()

    loop = asyncio.create_task(read_loop())
    print(json.dumps({}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        if json.loads(line)["read"]:
            reading.set()
        else:
            reading.clear()
        print(json.dumps({"read": seen}), flush=True)
        seen = 0
    loop.cancel()
    with suppress(asyncio.CancelledError):
        await loop


def heartbeat(worker_id: str, address: str) -> Heartbeat:
    """Of a worker whose door is there."""
    return Heartbeat(
        worker_id=worker_id,
        incarnation="1",
        state=WorkerState.READY,
        engine="paced",
        version=VERSION,
        capacity=1,
        running=0,
        waiting=0,
        generated_tokens=0,
        finished_trajectories=0,
        tokens_per_s=0.0,
        request_address=address,
        sequence=0,
        sent_at=0.0,
    )


def _tokenizer(model: Path | None) -> ChatTokenizer:
    if model is None:
        return FillerChat(4.0)
    from streamrl.producers.generation.tokenizer import ModelTokenizer

    return ModelTokenizer(str(model))


async def serve_gateway(arguments: argparse.Namespace) -> None:
    """A gateway that knows its workers from heartbeats on a bus of its own."""
    bus = MemoryBus()
    for topic in CATALOGUE:
        bus.create_topic(topic.full_name(MODEL), topic.partition_count(8))
    loop = LoopSettings(max_prompt_length=512, max_completion_length=512)
    settings = GatewaySettings(port=0, require_key=arguments.trains, max_queued=arguments.queued)
    with tempfile.TemporaryDirectory() as scratch:
        gateway = Gateway(
            bus,
            MODEL,
            ServedModel(MODEL, "paced", loop, _tokenizer(arguments.model), HermesToolCalls()),
            settings,
            SECRET,
            Path(scratch),
        )
        gateway.pool.queue_timeout_s = arguments.wait_s
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        serving = asyncio.create_task(gateway.run(stop))
        publisher = await bus.publisher("w0")
        while len(gateway.pool.ready) < len(arguments.addresses):
            for number, address in enumerate(arguments.addresses):
                beat = heartbeat(f"w{number}", address)
                await publisher.publish(Outgoing.of(HEARTBEATS.full_name(MODEL), beat, key=beat.worker_id))
            await asyncio.sleep(0.2)
        key = gateway.keys.make_key("bench", train=True) if arguments.trains else ""
        print(json.dumps({"address": gateway.address, "key": key}), flush=True)
        await serving


def main() -> None:
    """Run one of them."""
    parser = argparse.ArgumentParser()
    parts = parser.add_subparsers(dest="part", required=True)
    engine = parts.add_parser("engine")
    engine.add_argument("--slots", type=int, required=True)
    engine.add_argument("--step-ms", type=float, default=0.0, help="a paced engine; else one with a model")
    engine.add_argument("--engine", default="transformers")
    engine.add_argument("--model", type=Path)
    engine.add_argument("--dtype", default="float32")
    engine.add_argument("--broker", default="", help="tokens of requesters and of orders go there")
    engine.add_argument("--orders", type=int, default=0)
    gateway = parts.add_parser("gateway")
    gateway.add_argument("addresses", nargs="+")
    gateway.add_argument("--queued", type=int, required=True)
    gateway.add_argument("--wait-s", type=float, required=True)
    gateway.add_argument("--model", type=Path, help="whose tokenizer it uses; by default one of filler")
    gateway.add_argument("--trains", action="store_true", help="requesters have a key that agrees")
    parts.add_parser("consumer").add_argument("broker")
    arguments = parser.parse_args()
    if arguments.part == "consumer":
        uvloop.run(consume(arguments.broker))
    else:
        uvloop.run(serve_engine(arguments) if arguments.part == "engine" else serve_gateway(arguments))


if __name__ == "__main__":
    main()
