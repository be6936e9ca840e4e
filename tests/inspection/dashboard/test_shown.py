"""The list of runs, and the pages of the runs in it."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from yarl import URL

from streamrl.inspection.dashboard import shown
from streamrl.inspection.dashboard.shown import ShownRun, ShownRuns
from streamrl.inspection.dashboard.updates import UpdateStream
from streamrl.observability.run_state.state import RunState
from streamrl.schemas.errors import UserError
from tests.inspection.dashboard.served import served
from tests.inspection.dashboard.test_ended import past_run

pytestmark = pytest.mark.asyncio(loop_scope="module")


def row(name: str, path: Path) -> dict[str, Any]:
    times = {"at": 2.0, "started": 1.0}
    return {"name": name, "path": str(path), "state": "finished", "step": 3, "reward": 0.5, "held_out": None, **times}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def web(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[aiohttp.ClientSession]:
    root = tmp_path_factory.mktemp("runs")
    past = await past_run(root / "mine")
    (root.parent / "secret").mkdir()
    (root.parent / "secret" / "config.resolved.toml").write_text("")
    rows = [row("mine", past.directory.path)]
    async with (
        served(5.0, root=root, listed=lambda _: rows) as dashboard,
        aiohttp.ClientSession(dashboard.address) as session,
    ):
        yield session


async def test_the_runs_of_the_directory_are_listed(web: aiohttp.ClientSession) -> None:
    async with web.get("/api/runs") as answer:
        found = await answer.json()
    assert [each["name"] for each in found["runs"]] == ["mine"]
    async with web.get("/runs/") as answer:
        assert answer.status == 200
        assert "/page/runs.js" in await answer.text()


async def test_a_run_of_the_list_is_shown_at_its_own_address(web: aiohttp.ClientSession) -> None:
    async with web.get("/runs/mine/") as answer:
        assert answer.status == 200
    async with web.get("/runs/mine/api/snapshot") as answer:
        assert (await answer.json())["loop"]["run"] == "mine"
    async with web.get("/api/snapshot") as answer:
        assert (await answer.json())["loop"]["run"] != "mine"
    async with web.get("/runs/mine/api/trajectory?id=x") as answer:
        assert answer.status == 404
        assert "streamrl kafka up --data-dir" in (await answer.json())["error"]


@pytest.mark.parametrize("name", ["secret", "..%2fsecret", "%2e%2e%2fsecret", "mine%2f..%2f..%2fsecret", "%00", "."])
async def test_only_listed_runs_are_opened(web: aiohttp.ClientSession, name: str) -> None:
    async with web.get(URL(f"/runs/{name}/api/snapshot", encoded=True)) as answer:
        assert answer.status == 404
        assert "secret" not in await answer.text()


async def test_few_runs_are_open_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown, "MAX_OPEN", 2)
    closed: list[str] = []

    class Closing(ShownRun):
        async def close(self) -> None:
            closed.append(self.stream.state.run)

    async def opened(_target: object, where: str, _pace: object) -> ShownRun:
        return Closing(UpdateStream(RunState(where)), None)

    monkeypatch.setattr(shown, "opened", opened)
    monkeypatch.setattr(shown, "find_target", lambda *_: object())
    rows: list[Mapping[str, Any]] = [row(name, Path(name)) for name in "abcd"]
    runs = ShownRuns(None, Path("runs"), lambda _: rows)
    async with runs.using("a"):
        for name in "bcb":
            async with runs.using(name) as one:
                assert one.stream.state.run == name
        assert closed == ["b", "c"]
        async with runs.using("b"):
            with pytest.raises(UserError, match="at most 2 runs"):
                await asyncio.wait_for(runs.using("d").__aenter__(), 5)


async def test_without_a_run_the_list_is_shown() -> None:
    runs = ShownRuns(None, Path("runs"), lambda _: ())
    with pytest.raises(UserError, match="/runs/ lists all runs"):
        async with runs.using(None):
            pass
