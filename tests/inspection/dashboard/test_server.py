import asyncio
import json
from collections.abc import AsyncIterator
from urllib.parse import quote

import aiohttp
import pytest
import pytest_asyncio
from yarl import URL

from streamrl.inspection.dashboard import records, server
from streamrl.inspection.dashboard.server import FOLDERS, TYPES
from streamrl.schemas.topics import TRAJECTORIES
from tests.inspection.dashboard.served import RUN, Served, served
from tests.progress import patience

pytestmark = pytest.mark.asyncio(loop_scope="module")
ASSETS = [
    f"/{name}/{path.name}"
    for name, folder in FOLDERS.items()
    for path in folder.iterdir()
    if path.suffix in TYPES and path.name != "index.html"
]
ABSENT = (
    *("/nothing", "/nowhere/main.js", "/page/nothing.js", "/page/..%2fserver.py", "/page/%2e%2e/server.py"),
    *("/charts/..%2fassets.py", "/charts/%2e%2e/uplot/uPlot.min.css", "/uplot/LICENSE"),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def dashboard() -> AsyncIterator[Served]:
    async with served(20.0) as dashboard:
        async with patience(10):
            while not dashboard.state.progress.step:
                await asyncio.sleep(0.02)
        yield dashboard


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def web(dashboard: Served) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(dashboard.address) as session:
        yield session


async def test_the_page_and_its_parts_are_small_and_guarded(web: aiohttp.ClientSession) -> None:
    total = 0
    for path in ("/", *ASSETS):
        async with web.get(path) as answer:
            assert answer.status == 200
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
            total += len(await answer.read())
    # A page of runs and one of a run, with all charts, uncompressed: a slow line loads it within a second.
    assert total < 150_000


@pytest.mark.parametrize("path", ABSENT)
async def test_nothing_else_is_served(web: aiohttp.ClientSession, path: str) -> None:
    async with web.get(URL(path, encoded=True)) as answer:
        assert answer.status == 404
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


async def test_another_name_for_us_is_refused(web: aiohttp.ClientSession) -> None:
    async with web.get("/api/snapshot", headers={"Host": "evil.example"}) as answer:
        assert answer.status == 421


async def test_the_snapshot_is_the_state(web: aiohttp.ClientSession, dashboard: Served) -> None:
    async with web.get("/api/snapshot") as answer:
        found = await answer.json()
    assert found["loop"]["run"] == RUN
    assert found["loop"]["step"] > 0
    assert len(found["workers"]) == 6


async def test_updates_begin_with_everything_and_go_on_with_what_changed(web: aiohttp.ClientSession) -> None:
    events, begun = [], asyncio.get_running_loop().time()
    async with web.get("/api/updates") as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        async for line in answer.content:
            if line.startswith(b"data: "):
                events.append(json.loads(line[6:]))
            if len(events) == 5:
                break
    assert asyncio.get_running_loop().time() - begun > 0.6
    assert {"loop", "timeline", "curves", "events"} <= set(events[0])
    assert "curves" not in events[1]
    assert "timeline" not in events[1] or "timeline" not in events[2]


async def test_a_trajectory_is_shown_by_token_and_by_hop(web: aiohttp.ClientSession, dashboard: Served) -> None:
    place = next(
        place for place, fate in dashboard.state.trajectories.fates.fates.items() if fate.startswith("trained")
    )
    name = f"{place[0]}@{place[1]}"
    async with web.get(f"/api/trajectory?id={name}") as answer:
        life = await answer.json()
    assert life["length"] == len(life["tokens"])
    assert "".join(text for text, *_ in life["tokens"]) == life["completion"]
    assert sum(end - start for _, start, end in life["spans"]) == life["length"]
    assert [what for _, _, what, _ in life["events"]][-1] in ("weights in use", "weights announced", "reported")
    step = dashboard.state.trajectories.fates.of(place).removeprefix("trained in step ")
    where = f"--run runs/{RUN}"
    assert life["commands"] == [f"streamrl replay {where} --step {step}", f"streamrl show {life['id']} {where}"]
    async with web.get(f"/api/trajectory?id={quote(life['id'])}") as answer:
        assert (await answer.json())["id"] == life["id"]


@pytest.mark.parametrize("name", ["", "nobody", "0@999999", "<script>", "99@0"])
async def test_an_unknown_trajectory_is_one_line(web: aiohttp.ClientSession, name: str) -> None:
    async with web.get("/api/trajectory", params={"id": name}) as answer:
        assert answer.status == 404
        assert "expected" in (await answer.json())["error"]


async def test_a_foreign_page_starts_no_work(web: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch) -> None:
    async def asked(*_: object) -> None:
        raise AssertionError("nothing may be looked up")

    monkeypatch.setattr(server, "inspect", asked)
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
    async with web.get("/api/trajectory?id=x", headers=headers) as answer:
        assert answer.status == 403
        assert "own page" in (await answer.json())["error"]


async def test_expensive_requests_are_limited(web: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = asyncio.Semaphore(0), asyncio.Event()

    async def slow(*_: object) -> dict[str, str]:
        begun.release()
        await go_on.wait()
        return {"id": "a"}

    monkeypatch.setattr(server, "inspect", slow)
    asking = [asyncio.create_task(web.get("/api/trajectory?id=a")) for _ in range(server.MAX_LOOKS)]
    for _ in asking:
        await begun.acquire()
    async with web.get("/api/dead-letters") as answer:
        assert answer.status == 429
        assert answer.headers["Retry-After"]
        assert (await answer.json())[
            "error"
        ] == "expected at most 4 reads of the topics at once, got one more; ask again soon"
    go_on.set()
    assert [(await task).status for task in asking] == [200] * server.MAX_LOOKS
    async with web.get("/api/trajectory?id=a") as answer:
        assert answer.status == 200


async def test_pages_that_are_kept_up_to_date_are_bounded(dashboard: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    # Closed at once at the end, as a browser's tab: its place is free again.
    async with aiohttp.ClientSession(dashboard.address, connector=aiohttp.TCPConnector(limit=0)) as session:
        pages = [await session.get("/api/updates") for _ in range(server.MAX_STREAMS)]
        assert {page.status for page in pages} == {200}
        async with session.get("/api/updates") as refused:
            assert refused.status == 429
            assert "open pages" in (await refused.json())["error"]
        for page in pages:
            page.close()
        async with patience(10):
            while (again := await session.get("/api/updates")).status != 200:
                await asyncio.sleep(0.05)
        again.close()


async def test_a_group_is_shown_by_sample(web: aiohttp.ClientSession, dashboard: Served) -> None:
    place = next(
        place for place, fate in dashboard.state.trajectories.fates.fates.items() if fate.startswith("trained")
    )
    async with web.get(f"/api/trajectory?id={place[0]}@{place[1]}") as answer:
        one = await answer.json()
    assert one["settled"] in (True, False)
    async with web.get("/api/trajectory", params={"id": one["group"]}) as answer:
        group = await answer.json()
    assert group["group"] == one["group"]
    (sample,) = [each for each in group["samples"] if each["id"] == one["id"]]
    assert sample["fate"].startswith("trained in step")
    assert sample["length"] == one["length"]


async def test_a_long_run_says_how_far_its_index_is(
    web: aiohttp.ClientSession, dashboard: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    context = dashboard.context
    monkeypatch.setattr(context.follower, "catch_up", never)
    monkeypatch.setattr(context.follower, "unread", 430_000)
    monkeypatch.setattr(records, "PATIENCE_S", 0.05)
    async with web.get("/api/trajectory?id=nobody/0/0/0") as answer:
        assert answer.status == 503
        told = await answer.json()
    assert "430,000 are left" in told["error"]
    assert told["again"]


async def test_a_missing_answer_is_reported_in_time(
    web: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(server, "inspect", silent)
    monkeypatch.setattr(server, "ANSWER_TIMEOUT_S", 0.2)
    async with web.get("/api/trajectory?id=a") as answer:
        assert answer.status == 503
        assert "ask again" in (await answer.json())["error"]


async def test_only_our_own_page_may_retry(web: aiohttp.ClientSession, dashboard: Served) -> None:
    before = len(dashboard.bus.log(TRAJECTORIES.full_name(RUN)).partitions[3])
    for headers in (
        {},
        {"Origin": "http://evil.example"},
        {"Origin": dashboard.address[:-1], "Content-Type": "text/plain"},
    ):
        async with web.post("/api/dead-letters/0/retry", headers=headers, data=b"{}") as answer:
            assert answer.status == 403
    after = dashboard.bus.log(TRAJECTORIES.full_name(RUN)).partitions[3][before:]
    assert not any(name == "dlq-retry-of" for record in after for name, _ in record.headers)


async def test_dead_letters_are_listed_and_retried_once(web: aiohttp.ClientSession, dashboard: Served) -> None:
    async with web.get("/api/dead-letters") as answer:
        found = await answer.json()
    assert found["total"] == 2
    assert [dead_letter["error_class"] for dead_letter in found["letters"]] == ["MalformedFrame", "UnknownSchema"]
    headers, told = {"Origin": dashboard.address[:-1], "Content-Type": "application/json"}, []
    for offset in (0, 0, 1, 7):
        async with web.post(f"/api/dead-letters/{offset}/retry", headers=headers, data=b"{}") as answer:
            told.append((answer.status, (await answer.json()).get("action")))
    assert told == [(200, "sent"), (200, "already retried"), (200, "refused"), (404, None)]


async def test_two_simultaneous_clicks_send_once() -> None:
    async with served(20.0) as dashboard, aiohttp.ClientSession(dashboard.address) as session:
        headers = {"Origin": dashboard.address[:-1], "Content-Type": "application/json"}

        async def click() -> str:
            async with session.post("/api/dead-letters/0/retry", headers=headers, data=b"{}") as answer:
                return str((await answer.json())["action"])

        assert sorted(await asyncio.gather(click(), click())) == ["already retried", "sent"]
        log = dashboard.bus.log(TRAJECTORIES.full_name(RUN)).partitions[3]
        assert sum(name == "dlq-retry-of" for record in log for name, _ in record.headers) == 1
