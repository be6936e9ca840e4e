"""A gateway, a worker and a scripted engine around a bus in memory, in one event loop."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from streamrl.bus.port import Bus
from streamrl.policies.dispatching import SeveralPolicyDispatch
from streamrl.producers.gateway.calls import ServedModel
from streamrl.producers.gateway.gateway import Gateway, GatewayObservers
from streamrl.producers.gateway.keys import KeyFile
from streamrl.producers.gateway.settings import GatewaySettings
from streamrl.producers.gateway.tool_calls import HermesToolCalls
from streamrl.producers.gateway.worker_requests import RequestSlots
from streamrl.producers.generation.engines.port import Decode, GenerationRequest, TokenDelta, refuse_unfit
from streamrl.producers.generation.pace import pace_of
from streamrl.producers.generation.settings import GenerationSettings
from streamrl.producers.generation.worker import GenerationWorker, RunContext
from streamrl.schemas.errors import EngineError, PromptRefused
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import Heartbeat
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.topics import HEARTBEATS, TRAJECTORIES
from streamrl.schemas.trajectories import FinishReason, Prompt, SamplingParams, Trajectory
from streamrl.weights.fetch import WeightsFetcher
from tests.fakes.publisher import FailingBus
from tests.fakes.scorer import FakeScorer
from tests.fakes.topics import create_topics, messages_of, send_control
from tests.fakes.waiting import until
from tests.producers.generation.factories import FakeRelay, running_relay

RUN = "r"
EOS, VOCABULARY = 0, 0x1000
V0 = PolicyVersion(1, 0)


@dataclass
class ScriptedEngine:
    """Says what ``says`` has for the end of a prompt, or else echoes it, a character a token, then ends.

    A request with a JSON schema is sampled like any other; ``refuses``: what is said of it instead. ``hold_at``:
    requests wait before this token until ``release`` is set. ``fail_at``: raise there, ``failures`` times.
    """

    name: str = "scripted"
    max_num_seqs: int = 8
    kv_tokens: int | None = None
    says: dict[str, str] = field(default_factory=dict)
    hold_at: int | None = None
    fail_at: int | None = None
    failures: int = 0
    release: asyncio.Event = field(default_factory=asyncio.Event)
    version: PolicyVersion = V0
    refuses: str = ""
    ends_with: FinishReason = FinishReason.STOP
    running: int = 0
    most: int = 0
    requests: list[GenerationRequest] = field(default_factory=list)

    async def start(self) -> None:
        """Nothing is loaded."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        refuse_unfit(request.prompt_token_ids, 1 << 16)
        if max(request.prompt_token_ids) >= VOCABULARY:
            raise PromptRefused("vocabulary", f"expected token ids below {VOCABULARY}, got more")
        if request.json_schema and self.refuses:
            raise PromptRefused("a JSON schema", self.refuses)
        self.requests.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            text = self._answer("".join(map(chr, request.prompt_token_ids)))
            tokens = [*map(ord, text), EOS]
            limit = request.sampling.max_completion_length
            seen = ""
            for number, token in enumerate(tokens):
                if number < len(request.prefix_token_ids):  # another has sampled it
                    assert token == request.prefix_token_ids[number]
                    seen += chr(token)
                    continue
                if self.hold_at is not None and number >= self.hold_at:
                    await self.release.wait()
                if number == self.fail_at and self.failures:
                    self.failures -= 1
                    raise EngineError("a scripted failure")
                await asyncio.sleep(0)
                seen += chr(token) if token else ""
                stopped = token == EOS or request.sampling.find_stop(seen) is not None
                reason = self.ends_with if stopped else FinishReason.LENGTH if number + 1 >= limit else None
                yield TokenDelta([token], [-0.5], self.version, reason)
                if reason is not None:
                    return
        finally:
            self.running -= 1

    def _answer(self, prompt: str) -> str:
        found = [answer for end, answer in self.says.items() if end in prompt]
        return found[0] if found else prompt

    def interrupt(self, request_id: str) -> bool:
        return False

    async def adopt(self, directory: Path, version: PolicyVersion) -> None:
        self.version = version

    async def close(self) -> None:
        """Nothing is held."""


def character(token: int) -> str:
    """As real tokenizers decode: half of a surrogate pair is no text."""
    return "\ufffd" if 0xD800 <= token <= 0xDFFF else chr(token)


class CharacterTokenizer:
    """A token is a character's code point; 0 is special. Its chat template writes one line a turn, tools first."""

    has_chat_template = True
    reads_tools = True

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        return self.encode_text(prompt.text)

    def encode_text(self, text: str) -> list[int]:
        return [*map(ord, text)]

    def encode_more(self, text: str) -> list[int]:
        return self.encode_text(text)

    def encode_chat(
        self, turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        lines = [f"tools: {[tool['function']['name'] for tool in tools]}"] if tools else []
        for turn in turns:
            if turn["content"] == "refuse me":
                raise ValueError("no such turn")
            lines.append(f"{turn['role']}: {turn['content']}")
        return self.encode_text("\n".join(lines))

    def decoder_for(self, sampling: SamplingParams) -> Decode:
        return self.decode

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(character(token) for token in token_ids if token)

    def decode_with_special(self, token_ids: Sequence[int]) -> str:
        return "".join(character(token) if token else "<eos>" for token in token_ids)

    def is_special(self, token_id: int) -> bool:
        return token_id == EOS


@dataclass
class GatewayHarness:
    """All parts; ``client`` asks the gateway's application without a socket, as the holder of ``key``."""

    gateway: Gateway
    bus: FailingBus
    engines: list[ScriptedEngine]
    workers: "list[asyncio.Task[None]]"
    stops: list[asyncio.Event]
    key: str
    client: httpx.AsyncClient
    relay: FakeRelay
    path: Path

    @property
    def engine(self) -> ScriptedEngine:
        return self.engines[0]

    @property
    def trajectories(self) -> list[Trajectory]:
        return messages_of(self.bus, RUN, TRAJECTORIES, Trajectory)

    @property
    def heartbeats(self) -> list[Heartbeat]:
        return messages_of(self.bus, RUN, HEARTBEATS, Heartbeat)

    async def chat(self, text: str = "hello", **changes: Any) -> httpx.Response:
        body = {"model": RUN, "messages": [{"role": "user", "content": text}]} | changes
        return await self.client.post("/v1/chat/completions", json=body)

    async def ask(
        self, path: str, body: bytes, send: Callable[[Any], Awaitable[None]], gone: asyncio.Event | None = None
    ) -> None:
        """Over the application's own interface; the requester leaves when ``gone`` is set."""
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if parts:
                return parts.pop(0)
            await (gone or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        headers = {"host": "localhost", "authorization": f"Bearer {self.key}", "content-type": "application/json"}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
        await self.gateway.app()(scope, receive, send)

    async def text(self, prompt: Any = "hello", **changes: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"model": RUN, "prompt": prompt} | changes)


@asynccontextmanager
async def running_gateway(
    path: Path,
    *,
    engines: Sequence[ScriptedEngine] = (),
    slots: int = 4,
    train: bool = True,
    holder: str = "tester",
    limits: Mapping[str, int] | None = None,
    bus: FailingBus | None = None,
    tokenizer: CharacterTokenizer | None = None,
    lone_refusal: str = "",
    longest: int = 64,
    kind: str = "transformers",
    observers: GatewayObservers | None = None,
    around: Callable[[FailingBus], Bus] = lambda bus: bus,
    prepare: Callable[[Gateway], None] = lambda gateway: None,
    **settings: Any,
) -> AsyncIterator[GatewayHarness]:
    """Everything started, one worker for each engine, all of them connected; ``kind``: of engine, as the gateway knows
    it. The gateway has the bus that ``around`` makes of it.
    """
    bus = create_topics(bus or FailingBus(), RUN)
    loop = LoopSettings(max_prompt_length=longest, max_completion_length=128)
    gateway = Gateway(
        around(bus),
        RUN,
        ServedModel(RUN, kind, loop, tokenizer or CharacterTokenizer(), HermesToolCalls()),
        GatewaySettings(**{"enabled": True, "port": 0} | settings),
        "secret-of-the-run",
        path / "gateway",
        lone_refusal=lone_refusal,
        observers=observers or GatewayObservers(),
        policies=SeveralPolicyDispatch,
    )
    prepare(gateway)
    key = KeyFile(path / "gateway" / "keys.json").make_key(holder, train=train, **dict(limits or {}))
    gateway_stop = asyncio.Event()
    serving = asyncio.create_task(gateway.run(gateway_stop))
    found = list(engines) or [ScriptedEngine()]
    stops = [asyncio.Event() for _ in found]
    async with running_relay() as relay:
        await send_control(bus, RUN, relay.add(V0, size=64))
        workers = [
            asyncio.create_task(_worker(bus, loop, engine, path, number, slots).run(stops[number]))
            for number, engine in enumerate(found)
        ]
        try:
            await until(
                lambda: len(gateway.pool.ready) == len(found) or serving.done() or any(w.done() for w in workers)
            )
            transport = httpx.ASGITransport(app=gateway.app(), raise_app_exceptions=True)
            headers = {"Authorization": f"Bearer {key}", "Host": "localhost"}
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
                yield GatewayHarness(gateway, bus, found, workers, stops, key, client, relay, path)
        finally:
            for stop in (*stops, gateway_stop):
                stop.set()
            for engine in found:
                engine.release.set()
            await asyncio.gather(serving, *workers)


def _worker(
    bus: FailingBus, loop: LoopSettings, engine: ScriptedEngine, path: Path, number: int, slots: int
) -> GenerationWorker:
    return GenerationWorker(
        bus,
        RunContext(
            RUN,
            loop,
            GenerationSettings(),
            pace=lambda loop: replace(pace_of(loop), heartbeat_interval_s=0.05, drain_grace_s=0.2),
        ),
        f"w{number}",
        engine,
        CharacterTokenizer(),
        FakeScorer(),
        WeightsFetcher(path / f"weights-{number}"),
        side_work=[RequestSlots("127.0.0.1", slots, "secret-of-the-run")],
    )
