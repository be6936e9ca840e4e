"""A server made with OpenEnv's own package, played through a real gateway. Needs the package."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from streamrl.producers.environments.driver import dataset_of
from tests.fakes.waiting import until
from tests.producers.environments.test_driver import TextTokenizer, playing, report
from tests.producers.gateway.gateway_harness import ScriptedEngine, running_gateway

pytestmark = pytest.mark.skipif(find_spec("openenv") is None, reason="needs openenv: pip install openenv-core")


def application() -> Any:
    """Asks for a word twice; the second is rewarded if it is the first one again."""
    from openenv.core.env_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Word(Action):
        message: str

    class Asked(Observation):
        text: str

    class Twice(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self.words: list[str] = []

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Asked:
            self.words = []
            return Asked(text="a word", done=False, reward=None)

        def step(self, action: Word, **_: Any) -> Asked:
            self.words.append(action.message)
            again = len(self.words) == 2
            return Asked(text="again", done=again, reward=float(again and self.words[0] == self.words[1]))

        @property
        def state(self) -> State:
            return State(episode_id="", step_count=len(self.words))

    return create_fastapi_app(Twice, Word, Asked, max_concurrent_envs=8)


@asynccontextmanager
async def server() -> AsyncIterator[str]:
    import uvicorn

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        serving = uvicorn.Server(uvicorn.Config(application(), log_level="warning"))
        task = asyncio.create_task(serving.serve(sockets=[listening]))
        await until(lambda: serving.started, timeout_s=20)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        serving.should_exit = True
        await task


async def test_a_server_of_openenv_s_own_package_is_played(tmp_path: Path) -> None:
    engine = ScriptedEngine(says={"a word": "yes", "again": "yes"})
    async with server() as url, running_gateway(tmp_path, engines=[engine], tokenizer=TextTokenizer()) as it:
        name = f"openenv:{url}"
        async with playing(it, name, options={name: {"observation": "text"}}) as role:
            await until(lambda: len(it.trajectories) == 2 or role.counts.errors > 0, timeout_s=60)
            assert role.counts.errors == 0
            assert {one.dataset for one in it.trajectories} == {dataset_of(name)}
            assert [list(one.rewards.values()) for one in it.trajectories] == [[1.0], [1.0]]
            await report(it, 1, finished=True)
