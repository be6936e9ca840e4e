"""What a worker leaves unfinished is finished by another one, from its last token on record."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.bus.memory import MemorySubscription
from streamrl.bus.port import Outgoing
from streamrl.producers.generation.engines.port import GenerationRequest, TokenDelta
from streamrl.producers.generation.partials import (
    MAX_CHUNK_TOKENS,
    PartialLog,
    PartialPool,
    PartialReader,
    hash_of_tokens,
    longest_prefix,
)
from streamrl.producers.generation.status import WorkerStatus
from streamrl.schemas.codec import CONTINUATIONS_HEADER
from streamrl.schemas.control import DrainWorker
from streamrl.schemas.errors import BusUnavailable, DeliveryUnknown
from streamrl.schemas.identifiers import PolicyVersion, partial_partition_of
from streamrl.schemas.reports import WorkerState
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.topics import PARTIAL_TRAJECTORIES, TRAJECTORIES
from streamrl.schemas.trajectories import (
    FinishReason,
    PartialSource,
    PartialTrajectory,
    SamplingParams,
    Trajectory,
    TrajectoryPart,
    VersionSpan,
)
from tests.fakes.engine import FakeEngine, FakeTokenizer, fake_tokens
from tests.fakes.publisher import FailingBus
from tests.fakes.waiting import until
from tests.producers.dispatch.dispatcher_harness import DispatcherHarness
from tests.producers.generation.factories import WORKER, work_order
from tests.producers.generation.worker_harness import RUN, V0, V1, MakeWorker, WorkerHarness
from tests.progress import within

TOPIC = PARTIAL_TRAJECTORIES.full_name(RUN)
DURABLE = {"partial_trajectories": "durable", "partial_chunk_tokens": 4, "drain_grace_s": 0.1}
LENGTH, HALF = 240, 124
GROUPS, SAMPLES = 8, 4


def engine(**changes: Any) -> FakeEngine:
    return FakeEngine(**{"max_num_seqs": GROUPS * SAMPLES, "length": LENGTH, "chunk": 4} | changes)


def chunks_on(bus: FailingBus) -> list[PartialTrajectory]:
    records = [record for log in bus.log(TOPIC).partitions for record in log]
    found = [record.message() for record in records if record.value is not None]
    return [chunk for chunk in found if isinstance(chunk, PartialTrajectory)]


def held_after_compaction(bus: FailingBus) -> list[str]:
    """Keys whose last record is no tombstone, partition by partition."""
    last = {(n, one.key): one.value for n, log in enumerate(bus.log(TOPIC).partitions) for one in log}
    return [str(key) for (_, key), value in last.items() if value is not None]


async def killed(it: WorkerHarness) -> None:
    """As by SIGKILL: nothing more is written of what was running."""
    assert it.running is not None
    it.running.cancel()
    await asyncio.wait({it.running})


def expected_tokens(trajectory: Trajectory) -> list[int]:
    sampling = SamplingParams(max_completion_length=LENGTH)
    asked = GenerationRequest(trajectory.trajectory_id, trajectory.prompt_token_ids.tolist(), sampling)
    return fake_tokens(asked, LENGTH)


async def test_half_done_completions_of_a_killed_worker_are_finished_elsewhere(make_worker: MakeWorker) -> None:
    """32 trajectories at half length: at most 2 % of their tokens are sampled twice, and each token tells by whom."""
    bus = FailingBus()
    lost = make_worker(bus=bus, engine=engine(hold_at=HALF), settings=DURABLE)
    await lost.ready()
    for number in range(GROUPS):
        await lost.order(work_order(number, samples=SAMPLES))
    await until(lambda: lost.engine.sampled == GROUPS * SAMPLES * HALF)
    await until(lambda: lost.heartbeats[-1].partials_from is not None)
    await killed(lost)
    source = PartialSource(partition=partial_partition_of(WORKER), offset=lost.heartbeats[-1].partials_from or 0)

    other = make_worker(bus=bus, engine=engine(), settings=DURABLE)
    await other.control(other.relay.add(V1))
    other.start()
    await until(lambda: other.state is WorkerState.READY and other.engine.version == V1)
    for number in range(GROUPS):
        await other.order(work_order(number, samples=SAMPLES, attempt=1, partials=(source,)))
    await until(lambda: len(other.trajectories) == GROUPS * SAMPLES)

    assert {one.trajectory_id for one in other.trajectories} == {
        f"d/{number}/0/{sample}" for number in range(GROUPS) for sample in range(SAMPLES)
    }
    for trajectory in other.trajectories:
        first, second = trajectory.parts
        assert (first.worker_id, first.attempt, first.start, second.attempt) == (WORKER, 0, 0, 1)
        assert HALF - 4 <= second.start <= HALF
        assert trajectory.version_spans == (
            VersionSpan(version=V0, start=0, end=second.start),
            VersionSpan(version=V1, start=second.start, end=LENGTH),
        )
        tokens = expected_tokens(trajectory)
        assert trajectory.token_ids.tolist() == tokens
        assert trajectory.logprobs.tolist() == np.array([-0.5 - token / 128 for token in tokens], np.float32).tolist()
    wanted = GROUPS * SAMPLES * LENGTH
    assert lost.engine.sampled + other.engine.sampled - wanted <= 0.02 * wanted
    records = [record for log in bus.log(TRAJECTORIES.full_name(RUN)).partitions for record in log]
    assert {dict(record.headers)[CONTINUATIONS_HEADER] for record in records} == {b"1"}
    # Of what is delivered nothing is kept, the lost worker's records included.
    await until(lambda: not held_after_compaction(bus))


async def test_heartbeats_say_where_what_is_unfinished_begins_whatever_is_written_or_delivered_next() -> None:
    bus, status = FailingBus(), WorkerStatus()
    bus.create_topic(TOPIC, 16)
    assert WorkerStatus().partials_from is None
    publisher = await bus.publisher("test")
    await publisher.publish(Outgoing(TOPIC, None, "another's", partition=partial_partition_of(WORKER)))
    pool = PartialPool(publisher, PartialReader(bus, TOPIC, "test"), TOPIC, WORKER, "a", 1, 1e6, status)
    known_from = [status.partials_from]
    await pool.open()
    known_from.append(status.partials_from)
    assert known_from == [0, 1]
    logs = [await pool.begin(work_order(number, samples=1), 0, [1, 2]) for number in range(3)]

    async def grow(log: PartialLog) -> int:
        """The offset of its new record."""
        log.completion.extend(TokenDelta([7], [-0.5], V0))
        await log.flush()
        return len(bus.log(TOPIC).partitions[pool.partition]) - 1

    firsts = [await grow(log) for log in logs]
    assert (firsts, status.partials_from) == ([1, 2, 3], 1)
    last = await grow(logs[0])
    assert status.partials_from == 1
    logs[1].close()
    assert status.partials_from == 1
    logs[0].close()
    assert status.partials_from == firsts[2]
    logs[2].close()
    assert status.partials_from == last + 1
    await pool.flush(5.0)
    again = await pool.begin(work_order(3, samples=1), 0, [1, 2])
    assert status.partials_from == last + 1
    first = await grow(again)
    assert status.partials_from == first > last + 1


async def test_chunks_of_orders_that_arrive_together_are_found_in_one_reading(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus, readings = FailingBus(), []
    subscribe = FailingBus.subscribe

    async def counted(self: FailingBus, topics: Any, **how: Any) -> Any:
        if list(topics) == [TOPIC]:
            readings.append(how["partitions"])
        return await subscribe(self, topics, **how)

    monkeypatch.setattr(FailingBus, "subscribe", counted)
    it = make_worker(bus=bus, engine=engine(length=8), settings=DURABLE)
    await it.control(it.relay.add(V0))
    sources = (PartialSource(partition=3, offset=0), PartialSource(partition=5, offset=0))
    it.start()
    await until(lambda: it.state is WorkerState.READY)
    for number in range(GROUPS):
        await it.order(work_order(number, samples=SAMPLES, attempt=2, partials=sources))
    await until(lambda: len(it.trajectories) == GROUPS * SAMPLES)
    # Some may have been polled before the others came.
    assert sorted(map(tuple, readings))[0] == (3,)
    assert len(readings) <= 6
    assert all(one.parts == () for one in it.trajectories)


async def test_everything_restarted_goes_on_where_it_stood(make_worker: MakeWorker) -> None:
    """Dispatcher and worker are killed together; the new ones finish what there was, from its last token."""
    bus = FailingBus()
    loop = LoopSettings(
        groups_per_step=2, num_generations=SAMPLES, max_staleness=3, max_completion_length=LENGTH, max_prompt_length=16
    )
    harness = DispatcherHarness(loop=loop, bus=bus)
    await harness.step(0)
    await harness.start()
    lost = make_worker(bus=bus, engine=engine(hold_at=HALF), settings=DURABLE)
    await lost.ready()
    await until(lambda: lost.engine.sampled == GROUPS * SAMPLES * HALF)
    assert harness.task is not None
    harness.task.cancel()
    await asyncio.gather(killed(lost), asyncio.wait({harness.task}))

    again = DispatcherHarness(loop=loop, bus=bus)
    await again.start()
    other = make_worker(bus=bus, engine=engine(), settings=DURABLE)
    other.start()
    await until(lambda: len(other.trajectories) == GROUPS * SAMPLES)
    await again.end()
    assert len({one.trajectory_id for one in other.trajectories}) == GROUPS * SAMPLES
    assert all(one.token_ids.tolist() == expected_tokens(one) for one in other.trajectories)
    assert all(one.parts[1].start >= HALF - 4 for one in other.trajectories)
    wanted = GROUPS * SAMPLES * LENGTH
    assert lost.engine.sampled + other.engine.sampled - wanted <= 0.02 * wanted


async def test_chunks_of_a_worker_are_looked_for_only_after_its_start(make_worker: MakeWorker) -> None:
    """Whoever goes on after one that died before its first chunk reads nothing that others wrote before it."""
    it = make_worker(engine=engine(hold_at=4), settings=DURABLE | {"partial_chunk_tokens": 256})
    for number in range(3):
        left = written("d/9/0/0", tokens=4)
        await it.send(PARTIAL_TRAJECTORIES, left, f"d/9/0/0@x/{number}", partial_partition_of(WORKER))
    await it.ready()
    await it.order(work_order(0, samples=1))
    await until(lambda: it.engine.sampled == 4)
    assert {one.partials_from for one in it.heartbeats} == {3}


@pytest.mark.parametrize("how", ["stop", "drain"])
async def test_a_worker_that_leaves_hands_over_up_to_its_last_token(make_worker: MakeWorker, how: str) -> None:
    changes = {"partial_chunk_tokens": 256}
    it = make_worker(engine=engine(hold_at=42, chunk=7), settings=DURABLE | changes)
    await it.ready()
    await it.order(work_order(0, samples=3))
    await until(lambda: it.engine.sampled == 3 * 42)
    assert chunks_on(it.bus) == []
    if how == "stop":
        it.stop.set()
    else:
        await it.control(DrainWorker(sequence=9, sent_at=0.0, worker_id=WORKER, reason="preempted"))
    assert it.running is not None
    await within(it.running, 5)
    assert it.state is WorkerState.STOPPED
    found = [longest_prefix(chunks_on(it.bus), f"d/0/0/{index}") for index in range(3)]
    assert [len(one.token_ids) for one in found] == [42, 42, 42]
    assert it.trajectories == []


async def test_decoding_never_waits_for_the_pool(make_worker: MakeWorker) -> None:
    def is_chunk(record: Outgoing) -> bool:
        return record.topic == TOPIC and record.value is not None

    bus = FailingBus(holds=is_chunk)  # nothing of the pool is ever acknowledged
    it = make_worker(bus=bus, engine=engine(), settings=DURABLE)
    await it.ready()
    await it.order(work_order(0, samples=4))
    await until(lambda: len(it.trajectories) == 4)
    assert sum(map(is_chunk, bus.attempts)) == 4  # one chunk under way for each, and what grew since waits for it


async def test_a_record_stays_until_its_trajectory_is_delivered(make_worker: MakeWorker) -> None:
    bus = FailingBus()
    topic = TRAJECTORIES.full_name(RUN)
    bus.fail = lambda record: BusUnavailable("away") if record.topic == topic else None
    it = make_worker(bus=bus, engine=engine(), settings=DURABLE)
    await it.ready()
    await it.order(work_order(0, samples=1))
    await until(lambda: any(record.topic == topic for record in bus.attempts))
    assert held_after_compaction(bus)
    bus.fail = lambda record: None
    await until(lambda: len(it.trajectories) == 1)
    await until(lambda: not held_after_compaction(bus))


async def test_a_chunk_that_failed_is_part_of_the_next_one(make_worker: MakeWorker) -> None:
    bus, refused = FailingBus(), 0

    def fail(record: Outgoing) -> DeliveryUnknown | None:
        nonlocal refused
        refused += record.topic == TOPIC
        return DeliveryUnknown("late") if record.topic == TOPIC and refused <= 3 else None

    bus.fail = fail
    it = make_worker(bus=bus, engine=engine(hold_at=40), settings=DURABLE)
    await it.ready()
    await it.order(work_order(0, samples=1))
    await until(lambda: it.engine.sampled == 40)
    await until(lambda: len(longest_prefix(chunks_on(bus), "d/0/0/0").token_ids) >= 36)
    assert chunks_on(bus)[0].end >= 16


async def test_a_prefix_of_another_prompt_is_not_gone_on_with(make_worker: MakeWorker) -> None:
    """The data, or its template, changed between two starts of a run."""
    bus = FailingBus()
    it = make_worker(bus=bus, engine=engine(length=8), settings=DURABLE)
    await it.ready()
    left = written("d/0/0/0", tokens=6, prompt=[1, 2, 3])
    await it.send(PARTIAL_TRAJECTORIES, left, "d/0/0/0@x/0", 3)
    source = (PartialSource(partition=3, offset=0),)
    await it.order(work_order(0, samples=1, attempt=1, partials=source))
    await until(lambda: len(it.trajectories) == 1)
    assert it.trajectories[0].parts == ()
    prompt = FakeTokenizer().encode_prompt(work_order(1).prompt)
    await it.send(PARTIAL_TRAJECTORIES, written("d/1/0/0", tokens=6, prompt=prompt), "d/1/0/0@x/0", 3)
    await it.order(work_order(1, samples=1, attempt=1, partials=source))
    await until(lambda: len(it.trajectories) == 2)
    assert [part.start for part in it.trajectories[1].parts] == [0, 6]


async def test_a_half_done_completion_of_another_policy_is_not_continued(make_worker: MakeWorker) -> None:
    """The split was changed between two orders of a group."""
    it = make_worker(bus=FailingBus(), engine=engine(length=8), settings=DURABLE)
    await it.ready()
    prompt = FakeTokenizer().encode_prompt(work_order(0).prompt)
    left = written("d/0/0/0", tokens=6, prompt=prompt).replace(policy="rloo")
    await it.send(PARTIAL_TRAJECTORIES, left, "d/0/0/0@x/0", 3)
    await it.order(work_order(0, samples=1, attempt=1, partials=(PartialSource(partition=3, offset=0),)))
    await until(lambda: len(it.trajectories) == 1)
    assert (it.trajectories[0].policy, it.trajectories[0].parts) == ("", ())


async def test_a_completion_that_ended_unscored_is_scored_without_sampling(make_worker: MakeWorker) -> None:
    it = make_worker(engine=engine(length=8), settings=DURABLE)
    await it.ready()
    prompt = FakeTokenizer().encode_prompt(work_order(0).prompt)
    whole = written("d/0/0/0", tokens=6, prompt=prompt).replace(finish_reason=FinishReason.LENGTH)
    await it.send(PARTIAL_TRAJECTORIES, whole, "d/0/0/0@x/0", 3)
    source = (PartialSource(partition=3, offset=0),)
    await it.order(work_order(0, samples=1, attempt=1, partials=source))
    await until(lambda: len(it.trajectories) == 1)
    (found,) = it.trajectories
    assert (len(found.token_ids), found.finish_reason, it.engine.sampled) == (6, FinishReason.LENGTH, 0)
    assert found.rewards == {"length": 6.0}


def written(
    trajectory_id: str,
    *,
    tokens: int,
    start: int = 0,
    prompt: Sequence[int] = (),
    attempt: int = 0,
    incarnation: str = "x",
    parts: tuple[TrajectoryPart, ...] = (),
) -> PartialTrajectory:
    """A chunk whose tokens tell their attempt and place, and whose version is the attempt."""
    end, version = start + tokens, PolicyVersion(1, attempt)
    return PartialTrajectory(
        trajectory_id=trajectory_id,
        group_id=trajectory_id.rpartition("/")[0],
        worker_id=f"w{attempt}",
        incarnation=incarnation,
        attempt=attempt,
        prompt_hash=hash_of_tokens(prompt),
        start=start,
        token_ids=np.arange(start, end, dtype=np.int32) + 1000 * attempt,
        logprobs=np.full(tokens, -float(attempt) - 1.0, np.float32),
        version_spans=(VersionSpan(version=version, start=start, end=end),) if tokens else (),
        parts=parts,
    )


CUTS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 12)), max_size=12)


@given(CUTS, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_every_prefix_is_of_one_process(cuts: list[tuple[int, int, int]], chance: Any) -> None:
    """Whatever chunks are there, in whatever order and however they overlap: no gap, no mixture, and the longest."""
    chunks = [
        written("g/0/0", tokens=tokens, start=start, attempt=attempt, incarnation=str(attempt))
        for attempt, start, tokens in cuts
    ]
    chance.shuffle(chunks)
    found = longest_prefix(chunks, "g/0/0")
    covered = {attempt: set[int]() for attempt in range(3)}
    for attempt, start, tokens in cuts:
        covered[attempt].update(range(start, start + tokens))
    lengths = {attempt: next(n for n in range(50) if n not in held) for attempt, held in covered.items()}
    longest = max(lengths.values())
    assert len(found.token_ids) == longest
    if longest:
        winner = max(attempt for attempt, length in lengths.items() if length == longest)
        assert found.token_ids.tolist() == [1000 * winner + n for n in range(longest)]
        assert found.version_spans() == (VersionSpan(version=PolicyVersion(1, winner), start=0, end=longest),)
        assert [part.attempt for part in found.parts] == [winner]


def test_a_prefix_names_only_the_workers_that_sampled_its_tokens() -> None:
    parts = (
        TrajectoryPart(worker_id="w0", attempt=0, start=0),
        TrajectoryPart(worker_id="w1", attempt=1, start=MAX_CHUNK_TOKENS + 10),
    )
    first = written("g/0/0", tokens=MAX_CHUNK_TOKENS, attempt=1, parts=parts)
    rest = written("g/0/0", tokens=20, start=MAX_CHUNK_TOKENS, attempt=1, parts=parts)
    assert longest_prefix([first], "g/0/0").parts == parts[:1]
    assert longest_prefix([rest, first], "g/0/0").parts == parts


@dataclass
class SlowlyRead(FailingBus):
    """A broker that takes its time with the partial trajectories."""

    async def subscribe(self, topics: Iterable[str], **about: Any) -> MemorySubscription:
        if TOPIC in (wanted := list(topics)):
            await asyncio.sleep(0.5)
        return await super().subscribe(wanted, **about)


async def test_a_worker_that_begins_slowly_beats_and_ends_when_asked(make_worker: MakeWorker) -> None:
    """It counts as one that was suspended: nothing is sent until control was read, so control has to be read."""
    it = make_worker(bus=SlowlyRead(), settings=DURABLE | {"fencing_timeout_s": 0.2})
    running = it.start()
    await until(lambda: bool(it.heartbeats))
    it.stop.set()
    await within(running, 5)
