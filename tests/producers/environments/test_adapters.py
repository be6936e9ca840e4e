import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
from aiohttp import WSMsgType, web

from streamrl.producers.environments.adapters import OpenEnvEnvironment, VerifiersProgram, _verifiers_player, loaded
from streamrl.schemas.environments import Endpoint, PolicyReply
from streamrl.schemas.errors import UserError
from tests.fakes.waiting import until


class Program:
    """A program of the user's."""

    def __init__(self, reward: float = 1.0) -> None:
        self.reward = reward

    async def play(self, task: int, endpoint: Endpoint) -> float:
        return self.reward + task


@asynccontextmanager
async def openenv_server() -> AsyncIterator[tuple[str, list[Any]]]:
    """OpenEnv's protocol, by which its own client and server talk: one JSON message each way."""
    heard: list[Any] = []

    async def serve(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            if message.type is not WSMsgType.TEXT:
                break
            said = message.json()
            heard.append(said)
            match said["type"]:
                case "reset":
                    data: dict[str, Any] = {"observation": {"text": "go", "more": 1}, "reward": None, "done": False}
                    await socket.send_json({"type": "observation", "data": data})
                case "step" if "message" not in said["data"]:
                    faults = [{"loc": ["message"], "msg": "Field required"}, {"loc": ["word"], "msg": "Extra inputs"}]
                    await socket.send_json({"type": "error", "data": {"message": "Invalid message", "errors": faults}})
                case "step" if said["data"]["message"] == "wait":
                    continue
                case "step" if said["data"]["message"] == "leave":
                    break
                case "step" if said["data"]["message"] == "fail":
                    await socket.send_json({"type": "error", "data": {"message": "no such move", "code": "X"}})
                case "step":
                    echo = said["data"]["message"]
                    data = {"observation": {"text": f"heard {echo}"}, "reward": 0.5, "done": echo == "end"}
                    await socket.send_json({"type": "observation", "data": data})
                case "close":
                    break
        return socket

    app = web.Application()
    app.router.add_get("/ws", serve)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}", heard
    finally:
        await runner.cleanup()


async def test_a_server_of_openenv_is_an_environment() -> None:
    async with openenv_server() as (url, heard):
        made = loaded(f"openenv:{url}", {"observation": "text", "prompt": "Play. "})
        assert isinstance(made, OpenEnvEnvironment)
        assert [one["content"] for one in await made.reset(7)] == ["Play. go"]
        step = await made.step(PolicyReply("left", (), "stop", {}))
        assert (step.messages[0]["content"], step.reward, step.done) == ("heard left", 0.5, False)
        with pytest.raises(UserError, match="no such move"):
            await made.step(PolicyReply("fail", (), "stop", {}))
        assert (await made.step(PolicyReply("end", (), "stop", {}))).done
        await made.close()
        assert heard[0] == {"type": "reset", "data": {"seed": 7}}
        assert heard[1] == {"type": "step", "data": {"message": "left"}}
        assert heard[-1] == {"type": "close"}
    away = loaded("openenv:http://127.0.0.1:9", {})
    with pytest.raises(UserError, match="start it"):
        await away.reset(0)  # type: ignore[union-attr]
    await away.close()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("wait", r"to answer step within 0\.1 s, got nothing; look at the server, or set its option timeout_s"),
        ("leave", "to answer step, got the end of the connection; look at the server's log"),
    ],
)
async def test_an_openenv_server_that_does_not_answer_is_named(
    word: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with openenv_server() as (url, _):
        made = OpenEnvEnvironment(url)
        await made.reset(0)
        monkeypatch.setattr(made, "_timeout_s", 0.1)
        with pytest.raises(UserError, match=rf"expected {url}/ws {why}"):
            await made.step(PolicyReply(word, (), "stop", {}))
        await made.close()


async def test_a_server_whose_action_has_another_field_names_it() -> None:
    async with openenv_server() as (url, _):
        made = OpenEnvEnvironment(url, action="word")
        await made.reset(0)
        with pytest.raises(UserError, match="got: Invalid message; message: Field required; word: Extra inputs"):
            await made.step(PolicyReply("left", (), "stop", {}))
        await made.close()


async def test_environments_that_cannot_be_loaded_give_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)  # as where it is not installed
    here = "tests.producers.environments.test_adapters"
    made = loaded(f"{here}:Program", {"reward": 2.0})
    assert await made.play(1, Endpoint("", "", "")) == 3.0  # type: ignore[union-attr]
    for name, options, why in (
        ("verifiers:gsm8k", {}, "pip install verifiers"),
        ("guess", {"nonsense": 1}, "expected options that environment guess accepts"),
        ("openenv:http://here", {"nonsense": 1}, "expected options that environment openenv:http://here accepts"),
        ("openenv:here:80", {}, "expected openenv:http://HOST:PORT, got openenv:here:80"),
        (f"{here}:openenv_server", {}, "to make an environment"),
        (f"{here}:nobody", {}, "nobody"),
    ):
        with pytest.raises(UserError, match=why) as refused:
            loaded(name, options)
        assert "\n" not in str(refused.value)


async def test_episodes_that_run_at_once_have_each_the_key_of_its_own_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is told the name of a variable, and looks there when it likes."""
    gate, begun = asyncio.Event(), []

    class Rollouts:
        sampling_args: ClassVar[dict[str, Any]] = {}

        def get_dataset(self) -> list[int]:
            return [0]

        async def run_rollout(self, row: int, client: Any, model: str, sampling: Any) -> dict[str, Any]:
            begun.append(client.api_key_var)
            await gate.wait()
            return {"reward": float(os.environ[client.api_key_var])}

    types, library = ModuleType("verifiers.types"), ModuleType("verifiers")
    types.ClientConfig = SimpleNamespace  # type: ignore[attr-defined]
    library.load_environment = lambda name: Rollouts()  # type: ignore[attr-defined]
    packaged = ModuleType("packaged")
    packaged.load_environment = library.load_environment  # type: ignore[attr-defined]
    for module in (types, library, packaged):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    _verifiers_player.cache_clear()
    program = VerifiersProgram("packaged", {})
    playing = [asyncio.create_task(program.play(0, Endpoint("http://here", key, "r"))) for key in ("1", "2")]
    await until(lambda: len(begun) == 2, timeout_s=60)
    gate.set()
    assert await asyncio.gather(*playing) == [1.0, 2.0]
    _verifiers_player.cache_clear()
