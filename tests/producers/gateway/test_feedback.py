"""From a served completion to a trajectory on the topic: consent, rewards, time limits, and an absent broker."""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.producers.gateway.feedback import FeedbackDesk, FeedbackStore
from streamrl.producers.gateway.refusals import ApiError
from streamrl.producers.gateway.sessions import SessionBook
from streamrl.schemas.control import Served, WeightsReady
from streamrl.schemas.errors import BusUnavailable, UserError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.settings import LoopSettings
from tests.fakes.clock import FakeClock
from tests.fakes.topics import send_control
from tests.fakes.waiting import until
from tests.producers.gateway.gateway_harness import (
    RUN,
    CharacterTokenizer,
    GatewayHarness,
    ScriptedEngine,
    running_gateway,
)
from tests.schemas.examples import examples, trajectory

BOOK = SessionBook(CharacterTokenizer(), timeout_s=100, max_open=1)
"""Of a gateway without sessions."""


async def reward(it: GatewayHarness, call_id: str, **fields: Any) -> Any:
    return await it.client.post("/v1/feedback", json={"id": call_id} | fields)


async def test_a_rewarded_completion_becomes_a_trajectory(tmp_path: Path) -> None:
    engine = ScriptedEngine(says={"6 x 7": "forty-two"})
    async with running_gateway(tmp_path, engines=[engine]) as it:
        answer = await it.chat("6 x 7")
        assert answer.headers["x-streamrl-feedback"] == "open"
        call_id = answer.json()["id"]
        assert not it.trajectories, "nothing is trained on without feedback"
        told = await reward(it, call_id, reward=1.5)
        assert told.json() == {
            "id": call_id,
            "object": "feedback",
            "status": "complete",
            "rewards": [1.5],
            "trained_as": "policy",
        }
        await until(lambda: bool(it.trajectories))
        (made,) = it.trajectories
        assert made.trajectory_id == f"gateway/{call_id}/0/0"
        assert (made.source, made.dataset, made.num_generations, made.worker_id) == ("request", "gateway", 1, "w0")
        assert made.rewards == {"feedback": 1.5}
        assert made.completion_text == "forty-two"
        assert made.token_ids.tolist() == [*map(ord, "forty-two"), 0]
        assert np.array_equal(made.logprobs, np.full(10, -0.5, np.float32))
        assert "".join(map(chr, made.prompt_token_ids)) == "user: 6 x 7"
        assert [(str(span.version), span.start, span.end) for span in made.version_spans] == [("1-0", 0, 10)]
        assert made.loss_mask.all()


async def test_the_answer_to_feedback_names_the_trained_policy(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as it:
        call_id = (await it.chat()).json()["id"]
        await send_control(it.bus, RUN, Served(sequence=1, sent_at=0.0, policy="second", since=PolicyVersion(1, 0)))
        await until(lambda: it.gateway.desk.trained_as == "second")
        assert (await reward(it, call_id, reward=1.5)).json()["trained_as"] == "second"


async def test_feedback_that_comes_too_late_to_be_trained_is_refused(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as it:
        first, second = [(await it.chat()).json()["id"] for _ in range(2)]
        ready, bound = examples()["control-weights-ready"], it.gateway.desk.loop.staleness_bound
        assert isinstance(ready, WeightsReady)
        for number, call_id, status in ((bound, first, 200), (bound + 1, second, 410), (bound + 2, first, 200)):
            version = PolicyVersion(1, number)
            await send_control(it.bus, RUN, ready.replace(sequence=number, version=version))
            await until(lambda: it.gateway.desk.newest == version)  # noqa: B023
            answer = await reward(it, call_id, reward=1.5)
            assert answer.status_code == status
            if status == 410:
                assert answer.json()["error"]["code"] == "completion_stale"
                assert "sampled by 1-0, and step 1 is the oldest that is trained" in answer.text
        await until(lambda: len(it.trajectories) == 1)


async def test_choices_of_a_prompt_are_a_group(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as it:
        call_id = (await it.text(["ab", "cd"], n=2)).json()["id"]
        assert (await reward(it, call_id, reward=0.0, choice=3)).json()["status"] == "open"
        assert (await reward(it, call_id, rewards=[1.0, 2.0, 3.0, 0.0])).json()["status"] == "complete"
        await until(lambda: len(it.trajectories) == 4)
        found = {one.trajectory_id: (one.rewards["feedback"], one.num_generations) for one in it.trajectories}
        prefix = f"gateway/{call_id}"
        assert found == {
            f"{prefix}/0/0": (1.0, 2),
            f"{prefix}/0/1": (2.0, 2),
            f"{prefix}/1/0": (3.0, 2),
            f"{prefix}/1/1": (0.0, 2),
        }


async def test_feedback_may_be_repeated(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as it:
        call_id = (await it.text("ab")).json()["id"]
        first = await reward(it, call_id, reward=1.0)
        assert (await reward(it, call_id, reward=1.0)).json() == first.json()
        other = await reward(it, call_id, reward=2.0)
        assert other.status_code == 409
        await until(lambda: bool(it.trajectories))
        assert (await reward(it, call_id, reward=1.0)).json() == first.json(), "also when it is delivered"
        await asyncio.sleep(0.05)
        assert len(it.trajectories) == 1


async def test_nothing_is_kept_without_consent(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as it:
        for fields in ({"store": False}, {"temperature": 0}):
            answer = await it.text("ab", **fields)
            assert answer.headers["x-streamrl-feedback"] == "none"
            assert (await reward(it, answer.json()["id"], reward=1.0)).status_code == 404
        theirs = (await it.text("ab")).json()["id"]
        stranger = it.gateway.keys.make_key("stranger")
        it.client.headers["Authorization"] = f"Bearer {stranger}"
        own = await it.text("ab")
        assert own.headers["x-streamrl-feedback"] == "none", "this key has not agreed"
        assert (await reward(it, own.json()["id"], reward=1.0)).status_code == 404
        assert (await reward(it, theirs, reward=1.0)).status_code == 404, "another's completion"
        wrongs: tuple[dict[str, Any], ...] = (
            {},
            {"reward": 1.0, "rewards": [1.0]},
            {"reward": 1e9},
            {"rewards": []},
            {"reward": "1"},
        )
        for wrong in wrongs:
            assert (await reward(it, theirs, **wrong)).status_code == 400


async def test_a_reward_is_never_lost(tmp_path: Path) -> None:
    """The broker is away, the gateway ends, and another one goes on where it was."""
    async with running_gateway(tmp_path) as it:
        it.bus.fail = lambda record: BusUnavailable("no broker") if "trajectories" in record.topic else None
        ids = [(await it.text("ab")).json()["id"] for _ in range(3)]
        for number, call_id in enumerate(ids):
            assert (await reward(it, call_id, reward=float(number))).status_code == 200
        assert not it.trajectories
    async with running_gateway(tmp_path, holder="again") as again:
        await until(lambda: len(again.trajectories) == 3)
        assert [one.rewards["feedback"] for one in sorted(again.trajectories, key=lambda one: one.created_at)] == [
            0,
            1,
            2,
        ]


async def test_many_rewards_wait_for_the_disk_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_gateway(tmp_path) as it:
        it.bus.fail = lambda record: BusUnavailable("no broker") if "trajectories" in record.topic else None
        for _ in range(40):
            call_id = (await it.text("ab")).json()["id"]
            assert (await reward(it, call_id, reward=1.0)).status_code == 200
        store, transactions = it.gateway.desk.store, 0
        apply = store.apply

        def counted(operations: Sequence[Callable[[], Any]]) -> list[Any]:
            nonlocal transactions
            transactions += 1
            return apply(operations)

        monkeypatch.setattr(store, "apply", counted)
        it.bus.fail = lambda record: None
        await until(lambda: len(it.trajectories) == 40, timeout_s=20)
        assert transactions < 20


async def test_a_call_that_did_not_end_is_not_kept(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, engines=[ScriptedEngine(failures=3, fail_at=1)]) as it:
        assert (await it.text("ab")).status_code == 502
        assert it.gateway.desk.store.counts.kept == 0


async def test_the_store_closes_after_its_last_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that stops while a slow disk takes feedback: never two threads on one connection, and nothing lost."""
    inside, together, closed_under = 0, list[int](), list[int]()
    apply, close = FeedbackStore.apply, FeedbackStore.close

    def slow_apply(store: FeedbackStore, operations: Sequence[Callable[[], Any]]) -> list[Any]:
        nonlocal inside
        inside += 1
        together.append(inside)
        time.sleep(0.05)
        try:
            return apply(store, operations)
        finally:
            inside -= 1

    def watched_close(store: FeedbackStore) -> None:
        closed_under.append(inside)
        close(store)

    made = FeedbackStore(tmp_path / "f.sqlite", timeout_s=100, max_kept=100)
    made.open()
    for number in range(20):
        kept(made, f"c{number}")
    monkeypatch.setattr(FeedbackStore, "apply", slow_apply)
    monkeypatch.setattr(FeedbackStore, "close", watched_close)
    desk = FeedbackDesk(made, LoopSettings(), "trajectories", BOOK)
    writing = asyncio.create_task(desk.write_loop())
    first = asyncio.create_task(desk.reward("c0", "k", {0: 1.0}))
    await until(lambda: inside == 1)
    others = [asyncio.create_task(desk.reward(f"c{number}", "k", {0: 1.0})) for number in range(1, 20)]
    await asyncio.sleep(0)
    writing.cancel()
    await asyncio.wait([writing])
    assert inside == 0, "the loop ends after its thread"
    await desk.close()
    _, unanswered = await asyncio.wait([first, *others], timeout=10)
    assert not unanswered
    answers = await asyncio.gather(first, *others, return_exceptions=True)
    assert [answer["status"] for answer in answers if isinstance(answer, dict)] == ["complete"] * 20
    assert set(together) == {1}
    assert closed_under == [0]
    again = FeedbackStore(tmp_path / "f.sqlite", timeout_s=100, max_kept=100)
    again.open()
    rewarded = again._db.execute("SELECT count(*) FROM completions WHERE rewards != '{}'").fetchone()
    again.close()
    assert rewarded == (20,)


async def test_feedback_that_no_thread_had_started_on_is_written_at_the_end(tmp_path: Path) -> None:
    made = FeedbackStore(tmp_path / "f.sqlite", timeout_s=100, max_kept=100)
    made.open()
    kept(made, "c0")
    desk, free = FeedbackDesk(made, LoopSettings(), "trajectories", BOOK), threading.Event()
    with ThreadPoolExecutor(1) as executor:
        asyncio.get_running_loop().set_default_executor(executor)
        executor.submit(free.wait)
        writing = asyncio.create_task(desk.write_loop())
        rewarding = asyncio.create_task(desk.reward("c0", "k", {0: 1.0}))
        await until(lambda: desk._lock.locked() and not desk._pending)
        writing.cancel()
        await asyncio.sleep(0)
        free.set()
        await asyncio.wait([writing])
        await desk.close()
    assert (await rewarding)["status"] == "complete"
    with sqlite3.connect(tmp_path / "f.sqlite") as db:
        assert db.execute("SELECT rewards FROM completions").fetchall() == [('{"0": 1.0}',)]
    db.close()


@pytest.mark.parametrize("chmod_fails", [False, True])
def test_a_file_that_is_not_opened_is_closed(
    chmod_fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f.sqlite"
    if chmod_fails:
        monkeypatch.setattr(Path, "chmod", lambda *_: path.joinpath("of another user").read_bytes())
    else:
        path.write_text("no database, and long enough to look like one" * 100)
    store = FeedbackStore(path, 60.0, 4)
    with pytest.raises(UserError, match="move it away"):
        store.open()
    with pytest.raises(sqlite3.ProgrammingError, match="closed database"):
        store._db.execute("SELECT 1")
    store.close()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(tmp_path: Path, clock: FakeClock) -> Iterator[FeedbackStore]:
    made = FeedbackStore(tmp_path / "f.sqlite", timeout_s=100, max_kept=3, clock=clock)
    made.open()
    yield made
    made.close()


def kept(store: FeedbackStore, call_id: str, choices: int = 1) -> None:
    group = f"gateway/{call_id}/0"
    store.keep(
        call_id,
        "k",
        [
            trajectory(trajectory_id=f"{group}/{n}", group_id=group, sample_index=n, num_generations=choices)
            for n in range(choices)
        ],
    )


def test_feedback_has_a_time_limit(store: FeedbackStore, clock: FakeClock) -> None:
    kept(store, "a")
    kept(store, "b", choices=3)
    assert store.reward("b", "k", {1: 0.5})["rewards"] == [None, 0.5, None]
    clock.advance(101)
    with pytest.raises(ApiError, match="within 100 s") as late:
        store.reward("a", "k", {0: 1.0})
    assert late.value.status == 410
    store.sweep()
    with pytest.raises(ApiError) as forgotten:
        store.reward("a", "k", {0: 1.0})
    assert forgotten.value.status == 404
    (found,) = store.rewarded()
    (made,) = found.trajectories
    # The choice that has a reward is trained, as the group that is left.
    assert (made.trajectory_id, made.num_generations, made.rewards) == ("gateway/b/0/0", 1, {"feedback": 0.5})
    found.note_delivered()
    assert not store.rewarded()
    assert store.counts.expired == 1


def test_kept_completions_are_bounded(store: FeedbackStore, clock: FakeClock) -> None:
    for name in "abcde":
        kept(store, name)
        clock.advance(1)
    store.reward("a", "k", {0: 1.0})
    store.sweep()
    # Of five kept for three places the oldest go that nobody has rewarded.
    assert store.counts.dropped == 2
    assert [one.name for one in store.rewarded()] == ["a"]
    for name, there in (("b", False), ("c", False), ("d", True), ("e", True)):
        if there:
            assert store.reward(name, "k", {0: 1.0})["status"] == "complete"
        else:
            with pytest.raises(ApiError):
                store.reward(name, "k", {0: 1.0})


def test_operations_of_one_transaction_fail_one_by_one(store: FeedbackStore) -> None:
    kept(store, "a")
    results = store.apply(
        [lambda: store.reward("a", "k", {0: 1.0}), lambda: store.reward("x", "k", {0: 1.0}), lambda: store.sweep()]
    )
    assert results[0]["status"] == "complete"
    assert isinstance(results[1], ApiError)
    assert store.reward("a", "k", {0: 1.0})["status"] == "complete"


async def test_one_completion_alone_is_kept_only_where_something_is_learnt_from_it(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, lone_refusal="grpo compares the completions of a prompt") as it:
        alone = await it.text("ab")
        assert alone.headers["x-streamrl-feedback"] == "none"
        refused = await reward(it, alone.json()["id"], reward=1.0)
        assert refused.status_code == 404
        assert "grpo compares" in refused.json()["error"]["message"]
        both = await it.text("ab", n=2)
        assert both.headers["x-streamrl-feedback"] == "open"
        assert (await reward(it, both.json()["id"], rewards=[0.0, 1.0])).status_code == 200
        await until(lambda: len(it.trajectories) == 2)
