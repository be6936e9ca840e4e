"""What processes that were killed had half done is finished by others, from the last token on record.

Long tests all; in one process ``tests/producers/generation/test_partials.py`` and ``tests/simulation`` have the same.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

from streamrl.bus.embedded.cluster import start_cluster
from streamrl.bus.history import BusHistory
from streamrl.consumers.training.checkpoints.catalogue import read_manifests
from streamrl.inspection.audit.audit import audit
from streamrl.schemas.trajectories import Trajectory
from tests.broker_fixture import unique_numbers
from tests.chaos.checking.checkpoints import location_of
from tests.chaos.halfway.half_done_run import HELD, START_S, HalfDoneRun, Left, OnRecord, open_run
from tests.producers.generation.engines.replay import Sampled, load, spanwise_forward, worst

pytestmark = pytest.mark.long

LENGTH = 300
HEAP_MB = 256
SAMPLED_TWICE = 2 * (LENGTH // 16)
"""Most tokens of each completion: a 16th of the longest, not written yet by the worker, and as many in the engine."""
TOLERANCE = 1e-3
"""Nats, of a log-probability: the engine computes in batches and one token at a time, the forward pass all at once."""
_VLLM = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="the vllm package is not installed in this interpreter"),
]
ENGINES = ["transformers", pytest.param("vllm", marks=_VLLM)]
KILLED_S, RESTARTED_S = 560, 900
"""Until a test is given up: processes of vLLM take half a minute of two processors to start, each time."""
_numbers = unique_numbers()


@asynccontextmanager
async def playing(root: Path, address: str, engine: str) -> AsyncIterator[tuple[HalfDoneRun, OnRecord]]:
    """A run under way; at the end nothing of it is left."""
    run = await open_run(root, f"half-done-{next(_numbers)}", address, engine, LENGTH)
    record = await run.on_record()
    try:
        await run.start(run.names)
        yield run, record
    finally:
        left = await run.close()
        await record.subscription.close()
        assert left == []


async def half_done(run: HalfDoneRun, record: OnRecord) -> str:
    """Wait until a worker has 32 completions at half length; its process, as the records name it."""
    found: list[str] = []

    def is_half() -> bool:
        found[:] = [process] if (process := record.half_done(LENGTH)) else []
        return bool(found)

    await run.until(is_half, f"{HELD} completions at half length", record, START_S)
    return found[0]


async def expect_continued(run: HalfDoneRun, left: dict[str, Left], sampled: dict[str, int]) -> None:
    """``left``: on record of what was half done; ``sampled``: those that the dead workers' engines had."""
    delivered = await run.trajectories()
    assert len({one.trajectory_id for one in delivered}) == len(delivered)
    found = {one.trajectory_id: one for one in delivered}
    assert left.keys() <= found.keys()
    twice = 0
    for name, begun in left.items():
        trajectory = found[name]
        before, after = trajectory.parts
        assert (before.attempt, before.start, after.start) == (0, 0, len(begun.tokens))
        assert after.attempt > 0
        assert trajectory.token_ids[: after.start].tolist() == begun.tokens
        assert trajectory.logprobs[: after.start].tolist() == begun.logprobs
        expect_each_token_once(trajectory)
        twice += sampled[name] - after.start
    print(f"{twice} of {len(left) * LENGTH} tokens sampled twice ({twice / (len(left) * LENGTH):.2%})")
    assert 0 <= twice <= SAMPLED_TWICE * len(left)
    expect_right_logprobs(run, [found[name] for name in left])
    continued = [one for one in delivered if one.parts]
    assert {one.trajectory_id for one in continued} >= left.keys()
    await expect_exact_audit(run, delivered)


def expect_each_token_once(trajectory: Trajectory) -> None:
    """Tokens, log-probabilities, spans and parts cover the same LENGTH tokens."""
    assert len(trajectory.token_ids) == len(trajectory.logprobs) == LENGTH
    spans = trajectory.version_spans
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
    assert spans[-1].end == LENGTH
    assert all(one.version < other.version for one, other in pairwise(spans))
    starts = [part.start for part in trajectory.parts]
    assert starts == sorted({0, *starts})
    assert starts[-1] < LENGTH


def expect_right_logprobs(run: HalfDoneRun, trajectories: list[Trajectory]) -> None:
    """Each span's are those of a forward pass of its own version over the whole."""
    versions = {span.version for one in trajectories for span in one.version_spans}
    models = {version: load(run.setting.settings.run.weights_store / str(version)) for version in versions}
    differences = []
    for one in trajectories:
        by = [span.version for span in one.version_spans for _ in range(span.start, span.end)]
        sampled = Sampled(one.prompt_token_ids.tolist(), one.token_ids.tolist(), one.logprobs.tolist(), by)
        differences.append(worst(sampled, spanwise_forward(models, sampled)))
    print(f"{len(versions)} versions, log-probabilities {max(differences):.1e} nats off at most")
    assert max(differences) <= TOLERANCE


async def expect_exact_audit(run: HalfDoneRun, delivered: list[Trajectory]) -> None:
    history = BusHistory(run.bus)
    try:
        location = location_of(run.setting)
        verdict = await audit(history, run.setting.name, lambda: list(read_manifests(location)))
    finally:
        await history.close()
    assert verdict.is_balanced, verdict.violations
    assert verdict.is_finished
    assert verdict.produced == verdict.distinct == len(delivered)
    parts = [len(one.parts) for one in delivered if one.parts]
    assert (verdict.continued, verdict.continuations) == (len(parts), sum(parts) - len(parts))
    (balance,) = verdict.algorithms
    assert balance.produced == balance.trained + balance.skipped_in_all + balance.pending


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.timeout(KILLED_S)
async def test_half_done_completions_of_a_killed_worker_process_are_finished_elsewhere(
    engine: str, tmp_path: Path, bootstrap_servers: str
) -> None:
    async with playing(tmp_path, bootstrap_servers, engine) as (run, record):
        process = await half_done(run, record)
        lost = record.workers[process]
        await run.kill([lost])
        await record.read_all()
        left, sampled = record.left(process), run.tally_of(lost)
        del run.children[lost]
        await run.finish()
        assert len(left) == HELD
        await expect_continued(run, left, sampled)
        delivered = [one for one in await run.trajectories() if one.trajectory_id in left]
        assert {one.parts[0].worker_id for one in delivered} == {lost}
        assert lost not in {one.parts[1].worker_id for one in delivered}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.timeout(RESTARTED_S)
async def test_half_done_completions_are_finished_after_everything_was_killed(
    engine: str, tmp_path: Path, bootstrap_servers: str
) -> None:
    async with playing(tmp_path, bootstrap_servers, engine) as (run, record):
        left, sampled = await everything_killed(run, record)
        await run.start(run.names)
        await run.finish()
        await expect_continued(run, left, sampled)


@pytest.mark.timeout(RESTARTED_S)
async def test_nor_is_anything_sampled_again_where_the_broker_was_killed_too(tmp_path: Path) -> None:
    with start_cluster(tmp_path / "kafka", heap_mb=HEAP_MB) as cluster:
        async with playing(tmp_path, cluster.bootstrap_servers, "transformers") as (run, record):
            left, sampled = await everything_killed(run, record)
            cluster.kill_node(0)
            cluster.restart_node(0)
            await run.start(run.names)
            await run.finish()
            await expect_continued(run, left, sampled)


async def everything_killed(run: HalfDoneRun, record: OnRecord) -> tuple[dict[str, Left], dict[str, int]]:
    """Once a worker is at half length, so is the other; what was on record of both, and what they had sampled."""
    await half_done(run, record)
    await run.kill(run.names)
    await record.read_all()
    left: dict[str, Left] = {}
    sampled: dict[str, int] = {}
    for process, worker in record.workers.items():
        left |= record.left(process)
        sampled |= run.tally_of(worker)
    assert len(left) >= HELD
    return left, sampled
