"""A gateway with real connections, of which requesters ask for texts, streams and sessions, and reward them."""

import asyncio
import json
import socket
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest

from streamrl.bus.memory import MemoryBus
from streamrl.producers.gateway.calls import ServedModel
from streamrl.producers.gateway.gateway import Gateway
from streamrl.producers.gateway.keys import KeyFile
from streamrl.producers.gateway.settings import GatewaySettings
from streamrl.producers.gateway.tool_calls import HermesToolCalls
from streamrl.producers.generation.engines.port import GenerationRequest, TokenDelta
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.topics import TRAJECTORIES
from streamrl.schemas.trajectories import Trajectory
from tests.chaos.stops.delivered import doubled
from tests.chaos.stops.moment import Subject
from tests.fakes.publisher import FailingBus
from tests.fakes.topics import create_topics, messages_of, send_control
from tests.fakes.waiting import until
from tests.producers.gateway.gateway_harness import RUN, V0, ScriptedEngine, _worker
from tests.producers.gateway.test_sessions import TurnTokenizer
from tests.producers.generation.factories import running_relay

REQUESTERS = 8
TOKEN_S = 0.05
"""Of long texts: such a stream outlasts the time that a stopped gateway gives it."""
GONE = (aiohttp.ClientError, asyncio.TimeoutError, ConnectionError)


class SlowSpeaker(ScriptedEngine):
    """Says long texts slowly."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        is_long = len(request.prompt_token_ids) > 20
        async for delta in super().generate(request):
            await asyncio.sleep(TOKEN_S if is_long else 0)
            yield delta


@dataclass
class Requesters:
    """``kept``: completions that came whole; ``rewarded``, ``ended``: calls and sessions whose reward was accepted."""

    key: str
    random: Random
    kept: set[str] = field(default_factory=set)
    rewarded: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    number: int = 0

    async def work(self, address: str) -> None:
        """Ask until cancelled."""
        headers, timeout = {"Authorization": f"Bearer {self.key}"}, aiohttp.ClientTimeout(total=10)
        async with aiohttp.ClientSession(address, headers=headers, timeout=timeout) as session:
            await asyncio.gather(*(self._ask_on(session) for _ in range(REQUESTERS)))

    async def _ask_on(self, session: aiohttp.ClientSession) -> None:
        while True:
            way = self.random.choice((self._text, self._text, self._stream, self._session))
            try:
                await way(session)
            except GONE:
                await asyncio.sleep(0.01)

    async def _post(self, session: aiohttp.ClientSession, path: str, body: Any, **headers: str) -> Any:
        """The answer, or none if it is refused."""
        async with session.post(path, json=body, headers=headers) as response:
            found = await response.json(content_type=None)
            if response.status == 200:
                return found
            if response.status not in (429, 503):
                self.problems.append(f"{path} was answered with {response.status}: {json.dumps(found)[:200]}")
            return None

    async def _reward(self, session: aiohttp.ClientSession, call_id: str) -> None:
        reward = float(self.random.randrange(8))
        for _ in range(self.random.choice((1, 1, 2))):
            if await self._post(session, "/v1/feedback", {"id": call_id, "reward": reward}) is not None:
                self.rewarded[call_id] = reward

    async def _text(self, session: aiohttp.ClientSession) -> None:
        answer = await self._post(session, "/v1/completions", {"model": RUN, "prompt": "hello"})
        if answer is not None:
            self.kept.add(answer["id"])
            await self._reward(session, answer["id"])

    async def _stream(self, session: aiohttp.ClientSession) -> None:
        prompt = self.random.choice(("a longer text that comes in pieces", *["short"] * 3))
        body = {"model": RUN, "prompt": prompt, "stream": True}
        call_id, is_whole = "", False
        async with session.post("/v1/completions", json=body) as response:
            async for line in response.content:
                is_whole |= line.startswith(b"data: [DONE]")
                if line.startswith(b"data: {"):
                    call_id = json.loads(line[6:]).get("id", "") or call_id
        if is_whole:
            self.kept.add(call_id)
            await self._reward(session, call_id)

    async def _session(self, session: aiohttp.ClientSession) -> None:
        self.number += 1
        name, messages = f"s{self.number}", [{"role": "user", "content": "go"}]
        for _ in range(2):
            path, body = f"/sessions/{name}/v1/chat/completions", {"model": RUN, "messages": messages}
            answer = await self._post(session, path, body)
            if answer is None:
                return
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "on"}]
        reward = float(self.random.randrange(8))
        if await self._post(session, "/v1/feedback", {"session": name, "reward": reward}) is not None:
            self.ended[name] = reward


def make_gateway(bus: MemoryBus, root: Path) -> Gateway:
    settings = GatewaySettings(enabled=True, port=0)
    return Gateway(
        bus,
        RUN,
        ServedModel(
            RUN,
            "transformers",
            LoopSettings(max_prompt_length=256, max_completion_length=128),
            TurnTokenizer(),
            HermesToolCalls(),
        ),
        settings,
        "secret-of-the-run",
        root / "gateway",
    )


@asynccontextmanager
async def gateway(root: Path, random: Random) -> AsyncIterator[Subject]:
    """On sqlite, with one worker that stays."""
    bus = create_topics(FailingBus(), RUN)
    made = make_gateway(bus, root)
    requesters = Requesters(KeyFile(root / "gateway" / "keys.json").make_key("tester", train=True), random)
    engine, stop = SlowSpeaker(max_num_seqs=16), asyncio.Event()

    async def load() -> None:
        while not made.address:
            await asyncio.sleep(0.002)
        await requesters.work(made.address)

    # Stopped requests are cut off soon, so that a stop takes no longer than the test allows.
    with pytest.MonkeyPatch.context() as shortened:
        shortened.setattr("streamrl.producers.gateway.gateway.SHUTDOWN_TIMEOUT_S", 1.0)
        async with running_relay() as relay:
            await send_control(bus, RUN, relay.add(V0, size=64))
            working = asyncio.create_task(_worker(bus, made.model.loop, engine, root, 0, 8).run(stop))
            try:
                yield Subject(
                    made.run,
                    load,
                    lambda: len(requesters.rewarded) + len(requesters.ended) > 4,
                    lambda: _judged(made, bus, requesters, root),
                )
            finally:
                stop.set()
                await working


async def _judged(made: Gateway, bus: MemoryBus, requesters: Requesters, root: Path) -> list[str]:
    problems = [*requesters.problems[:3]]
    if made.address:
        with socket.create_server(("127.0.0.1", int(made.address.rpartition(":")[2]))):
            pass  # or its port was left open
    path = root / "gateway" / "feedback.sqlite"
    if not path.exists():
        return problems + ["accepted, and no file"] * bool(requesters.rewarded or requesters.ended)
    problems += doubled(bus, RUN)
    problems += [f"left by sqlite: {one.name}" for one in path.parent.glob("feedback.sqlite-*")]
    with sqlite3.connect(path) as db:
        (state,) = db.execute("PRAGMA integrity_check").fetchone()
        rows = {
            row[0]: (json.loads(row[1]), row[2]) for row in db.execute("SELECT id, rewards, state FROM completions")
        }
    db.close()
    problems += [f"the store is broken: {state}"] * (state != "ok")
    problems += [f"kept, and not on the disk: {one}" for one in requesters.kept - rows.keys()]
    problems += [
        f"accepted {reward} of {one}, on the disk: {rows.get(one)}"
        for one, reward in requesters.rewarded.items()
        if rows.get(one, ({}, 0))[0] != {"0": reward}
    ]
    told = {
        one.trajectory_id.split("/")[1] for one in messages_of(bus, RUN, TRAJECTORIES, Trajectory) if not one.session
    }
    problems += [
        f"noted as delivered, and is not: {one}" for one, (_, state) in rows.items() if state == 2 and one not in told
    ]
    return problems + await _second_life(bus, requesters, root)


async def _second_life(bus: MemoryBus, requesters: Requesters, root: Path) -> list[str]:
    """The next gateway of the directory delivers the rest."""
    stop = asyncio.Event()
    serving = asyncio.create_task(make_gateway(bus, root).run(stop))

    def missing() -> list[str]:
        found = {
            one.trajectory_id.split("/")[1]: one
            for one in messages_of(bus, RUN, TRAJECTORIES, Trajectory)
            if not one.session
        }
        sessions = {one.session: one for one in messages_of(bus, RUN, TRAJECTORIES, Trajectory) if one.session}
        calls = [f"call {one}" for one, reward in requesters.rewarded.items() if _reward_of(found.get(one)) != reward]
        return calls + [f"session {one}" for one, r in requesters.ended.items() if _reward_of(sessions.get(one)) != r]

    with suppress(TimeoutError):
        await until(lambda: not missing() or serving.done(), timeout_s=5.0)
    stop.set()
    await serving
    contents: dict[str, list[dict[str, float | None]]] = {}
    for one in messages_of(bus, RUN, TRAJECTORIES, Trajectory):
        contents.setdefault(one.trajectory_id, []).append(one.rewards)
    differing = [name for name, found in contents.items() if any(rewards != found[0] for rewards in found)]
    return [f"accepted, and never delivered: {one}" for one in missing()] + [f"two rewards: {one}" for one in differing]


def _reward_of(one: Trajectory | None) -> float | None:
    return None if one is None else one.rewards.get("feedback")
