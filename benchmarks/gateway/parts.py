"""The processes that are measured: an engine behind a worker's door, and a gateway before it. Run as modules.

``python -m benchmarks.gateway.parts engine ...`` prints one JSON line with its address, and for each line on standard
input samples by itself and prints how long that took. ``gateway ADDRESS`` prints its own address.
"""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from bus.memory import MemoryBus
from bus.port import Outgoing
from producers.gateway.gateway import Gateway
from producers.gateway.settings import GatewaySettings
from producers.gateway.tool_calls import HermesToolCalls
from producers.generation.engines.emulated import FillerChat
from producers.generation.engines.port import Engine, GenerationRequest, TokenDelta
from producers.generation.rollout import WorkerLoad
from producers.generation.serving import RequestServer, RequestSlots
from producers.generation.settings import GenerationSettings
from producers.lengths.settings import LengthSettings
from schemas.identifiers import PolicyVersion
from schemas.reports import Heartbeat, WorkerState
from schemas.settings import LoopSettings
from schemas.topics import CATALOGUE, HEARTBEATS
from schemas.trajectories import FinishReason, SamplingParams

SECRET, MODEL = "bench", "bench"
VERSION = PolicyVersion(1, 0)
POSITIONS = 1024


@dataclass
class PacedEngine:
    """A token for each running completion every ``step_s``, as a device would that has room for all: it costs no
    processor, so that what is measured is the way of the tokens.
    """

    step_s: float
    max_num_seqs: int
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
        mailbox: asyncio.Queue[int] = asyncio.Queue()
        self._mailboxes.add(mailbox)
        try:
            for left in range(request.sampling.max_completion_length - 1, -1, -1):
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


def model_engine(directory: Path, slots: int) -> Engine:
    """The transformers engine over a model of a million parameters."""
    from benchmarks.small_model import build, save
    from producers.generation.engines.factory import build_engine

    save(build(POSITIONS), directory)
    settings = GenerationSettings(max_num_seqs=slots, threads=1, dtype="float32")
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


async def serve_engine(arguments: argparse.Namespace) -> None:
    """Open the door, answer commands on standard input (a JSON line each: ``sample_directly``'s arguments)."""
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.step_ms:
            engine: Engine = PacedEngine(arguments.step_ms / 1000, arguments.slots)
        else:
            engine = model_engine(Path(scratch), arguments.slots)
        await engine.start()
        slots = RequestSlots("127.0.0.1", arguments.slots, SECRET)
        server = RequestServer(engine, WorkerLoad(), "w0", slots, is_open=lambda: True, version=lambda: VERSION)
        print(json.dumps({"address": await server.open()}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await sample_directly(engine, **json.loads(line))), flush=True)
        await server.close()
        await engine.close()


async def serve_gateway(arguments: argparse.Namespace) -> None:
    """A gateway that knows one worker, from a heartbeat on a bus of its own."""
    bus = MemoryBus()
    for topic in CATALOGUE:
        bus.create_topic(topic.full_name(MODEL), topic.partition_count(8))
    loop = LoopSettings(max_prompt_length=512, max_completion_length=512)
    settings = GatewaySettings(port=0, require_key=False, max_queued=arguments.queued, queue_timeout_s=arguments.wait_s)
    with tempfile.TemporaryDirectory() as scratch:
        gateway = Gateway(
            bus,
            MODEL,
            loop,
            settings,
            LengthSettings(),
            "paced",
            FillerChat(4.0),
            HermesToolCalls(),
            SECRET,
            Path(scratch),
        )
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        serving = asyncio.create_task(gateway.run(stop))
        publisher = await bus.publisher("w0")
        beat = Heartbeat(
            worker_id="w0",
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
            request_address=arguments.address,
            sequence=0,
            sent_at=0.0,
        )
        while not gateway.pool.ready:
            await publisher.publish(Outgoing.of(HEARTBEATS.full_name(MODEL), beat, key="w0"))
            await asyncio.sleep(0.2)
        print(json.dumps({"address": gateway.address}), flush=True)
        await serving


def main() -> None:
    """Run one of them."""
    parser = argparse.ArgumentParser()
    parts = parser.add_subparsers(dest="part", required=True)
    engine = parts.add_parser("engine")
    engine.add_argument("--slots", type=int, required=True)
    engine.add_argument("--step-ms", type=float, default=0.0)
    gateway = parts.add_parser("gateway")
    gateway.add_argument("address")
    gateway.add_argument("--queued", type=int, required=True)
    gateway.add_argument("--wait-s", type=float, required=True)
    arguments = parser.parse_args()
    uvloop.run(serve_engine(arguments) if arguments.part == "engine" else serve_gateway(arguments))


if __name__ == "__main__":
    main()
