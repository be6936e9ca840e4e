"""Keeps completions of requesters who consent until their reward arrives, then publishes them as trajectories.

A file holds the completions, so a restart of the gateway or an outage of the broker loses nothing. A completion is
open, then rewarded, then delivered. It is rewarded when all of its choices are, or when its time is up and some of them
are. The choices of one prompt are one group.

Invariants, each with a test of its name:
- feedback_may_be_repeated: the same reward again changes nothing and gets the same answer; another reward is refused;
- a_reward_is_never_lost: an accepted reward is on the disk, and its trajectory reaches the topic at least once;
- kept_completions_are_bounded: in number and in time; dropped ones are counted.
"""

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import structlog
import xxhash
from cachetools import FIFOCache

from streamrl.bus.port import Outgoing
from streamrl.bus.waiting import in_thread, wait_for_event
from streamrl.producers.gateway.calls import DATASET, FEEDBACK, CompletionCall, Reply, RunningCall
from streamrl.producers.gateway.ended_sessions import SCHEMA, EndedSessions, packed, unpacked
from streamrl.producers.gateway.refusals import ApiError, invalid, unavailable
from streamrl.producers.gateway.requests import SessionGroup
from streamrl.producers.gateway.sessions import SessionBook
from streamrl.producers.generation.outbox import Outbox
from streamrl.schemas.codec import TURNS_HEADER
from streamrl.schemas.errors import BusError, UserError, WireError
from streamrl.schemas.identifiers import SERVED_POLICY, PolicyVersion, make_trajectory_id
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.trajectories import Trajectory, TrajectoryPart

log = structlog.get_logger()

REMEMBERED_CONSTRAINED = 1 << 14
"""Latest constrained calls that are remembered: feedback to them is refused with the reason, to earlier ones as
unknown.
"""
MAX_KEPT = 100_000
"""Requests kept until they have feedback and are published; beyond that the oldest are dropped, and counted. On the
disk they take some kilobytes each."""
MAX_PENDING_WRITES = 4096
"""Completions that may wait for the disk; further ones are dropped and counted."""
SWEEP_S = 1.0
RETRY_S = 1.0
DELIVERED_AT_ONCE = 64
"""Most completions, and most groups of sessions, in one delivery. Singly, each would wait for the broker and disk."""
_OPEN, _REWARDED, _DELIVERED = 0, 1, 2
_SCHEMA = """
CREATE TABLE IF NOT EXISTS completions (
    id TEXT PRIMARY KEY, key TEXT NOT NULL, ended_at REAL NOT NULL, state INTEGER NOT NULL, choices INTEGER NOT NULL,
    rewards TEXT NOT NULL, body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS by_state ON completions (state, ended_at);
"""


class _Ready(NamedTuple):
    """Trajectories to deliver together, and the operation that marks them as delivered."""

    note_delivered: Callable[[], None]
    name: str
    trajectories: list[Trajectory]


def _marks_of(delivered: Sequence[_Ready]) -> list[Callable[[], None]]:
    return [one.note_delivered for one in delivered]


def trajectories_of(running: RunningCall) -> list[Trajectory]:
    """The replies of a finished call as trajectories, still without rewards."""
    return [_trajectory(running, reply) for reply in running.replies]


def _trajectory(running: RunningCall, reply: Reply) -> Trajectory:
    call = running.call
    group_id, prompt_id = call.group_id(reply.index), f"{DATASET}/{call.public_id}"
    token_ids, logprobs = reply.sampled.arrays()
    spans = reply.sampled.version_spans()
    parts = tuple(
        TrajectoryPart(worker_id=worker_id, attempt=attempt, start=start)
        for attempt, (worker_id, start) in enumerate(reply.sequence.parts)
    )
    return Trajectory(
        trajectory_id=call.trajectory_id(reply.index),
        group_id=group_id,
        prompt_id=prompt_id,
        dataset=DATASET,
        sample_index=reply.index % call.n,
        num_generations=call.n,
        prompt_token_ids=np.array(reply.prompt.token_ids, dtype="<i4"),
        token_ids=token_ids,
        logprobs=logprobs,
        loss_mask=np.ones(len(token_ids), dtype="<u1"),
        version_spans=spans,
        finish_reason=reply.sampled.finish_reason,
        prompt_text=reply.prompt.text,
        completion_text=reply.text.text,
        rewards={},
        temperature=call.sampling.temperature,
        bucket=reply.estimate.bucket,
        predicted_length=reply.estimate.median,
        worker_id=parts[-1].worker_id,
        parts=parts if len(parts) > 1 else (),
        attempt=parts[-1].attempt,
        admitted_version=spans[0].version,
        source="request",
        created_at=call.created_at,
        started_at=reply.started_at,
        finished_at=reply.finished_at,
    )


@dataclass
class FeedbackCounts:
    """Since the start: completions kept, dropped and expired, rewards accepted, trajectories delivered.

    ``constrained``: completions that were not kept because a format was forced on them. They were sampled from another
    distribution than the one that the trainer computes.
    """

    kept: int = 0
    dropped: int = 0
    rewarded: int = 0
    delivered: int = 0
    expired: int = 0
    constrained: int = 0


@dataclass
class FeedbackStore:
    """The feedback file. Its methods block, and only one thread at a time may use it: see ``FeedbackDesk``.

    ``lone_refusal``: why the algorithm learns nothing from a group of one; empty if it does learn from it.
    """

    path: Path
    timeout_s: float
    max_kept: int = MAX_KEPT
    lone_refusal: str = ""
    counts: FeedbackCounts = field(default_factory=FeedbackCounts)
    clock: Callable[[], float] = time.time
    sessions: EndedSessions = field(init=False)
    _db: sqlite3.Connection = field(init=False)

    def open(self) -> None:
        """Open the file, or create it.

        Raises:
            UserError: it cannot be written, or is not a feedback file.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # The caller makes sure that only one thread at a time uses the connection.
            self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
            with ExitStack() as failing:
                failing.callback(self._db.close)
                self.path.chmod(0o600)  # it contains what requesters wrote
                self._db.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;" + _SCHEMA + SCHEMA)
                self.sessions = EndedSessions(self._db, self.clock, self.lone_refusal)
                failing.pop_all()  # from here on the caller closes it
        except (OSError, sqlite3.Error) as error:
            raise UserError(f"expected a file for feedback at {self.path}, got: {error}; move it away") from error

    def close(self) -> None:
        """Close it, if it is open."""
        if hasattr(self, "_db"):
            self._db.close()

    def apply(self, operations: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run operations in one transaction; the result of each, or the ``ApiError`` that it raised."""
        results: list[Any] = []
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for operation in operations:
                try:
                    results.append(operation())
                except ApiError as error:
                    results.append(error)
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")
        return results

    def keep(self, call_id: str, key: str, trajectories: Sequence[Trajectory]) -> None:
        """Keep a completion that has just ended."""
        row = (call_id, key, self.clock(), _OPEN, len(trajectories), "{}", packed(trajectories))
        self._db.execute("INSERT OR IGNORE INTO completions VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        self.counts.kept += 1

    def reward(self, call_id: str, key: str, by_choice: Mapping[int, float], trainable_from: int = 0) -> dict[str, Any]:
        """Record rewards of a completion; the answer to the feedback, with all rewards so far.

        ``trainable_from``: number of the oldest weights whose completions the trainer still takes.

        Raises:
            ApiError: the completion is unknown, another key's, or too old, or has other rewards.
        """
        query = "SELECT ended_at, state, choices, rewards, body FROM completions WHERE id = ? AND key = ?"
        found = self._db.execute(query, (call_id, key)).fetchone()
        if found is None:
            alone = f", or was the only completion of its prompt: {self.lone_refusal}" if self.lone_refusal else ""
            raise ApiError(
                404,
                f"expected the id of a completion of this key that was kept for feedback, got {call_id!r:.80}: it is "
                f"unknown, too old, or not to be trained on{alone}",
                kind="not_found_error",
                param="id",
                code="completion_not_found",
            )
        ended_at, state, choices, text, body = found
        known = {int(choice): reward for choice, reward in json.loads(text).items()}
        if max(by_choice) >= choices:
            raise invalid("choice", f"expected a choice below {choices}, got {max(by_choice)}")
        if any(known.get(choice, reward) != reward for choice, reward in by_choice.items()):
            raise ApiError(409, "expected the same reward as before, got another: the first one counts", param="id")
        news = {choice: reward for choice, reward in by_choice.items() if choice not in known}
        if news:
            if state != _OPEN or self.clock() - ended_at > self.timeout_s:
                late = f"expected feedback within {self.timeout_s:g} s of the completion's end, got it later"
                raise ApiError(410, late, param="id", code="feedback_window_closed")
            # Decoded only if it can be too old: the body has all tokens of all choices.
            oldest = min(one.oldest_version for one in unpacked(body)) if trainable_from > 0 else None
            if oldest is not None and oldest.number < trainable_from:
                raise ApiError(
                    410,
                    "expected feedback while the trainer takes the completion's weights, got it too late: it was "
                    f"sampled by {oldest}, and step {trainable_from} is the oldest that is trained",
                    param="id",
                    code="completion_stale",
                )
            known |= news
            state = _REWARDED if len(known) == choices else _OPEN
            self.counts.rewarded += len(news)
            text = json.dumps(known)
            self._db.execute("UPDATE completions SET rewards = ?, state = ? WHERE id = ?", (text, state, call_id))
        return {
            "id": call_id,
            "object": "feedback",
            "status": "open" if state == _OPEN else "complete",
            "rewards": [known.get(choice) for choice in range(choices)],
        }

    def sweep(self) -> None:
        """Expire completions and sessions that are too old, and drop the oldest if there are too many."""
        old = self.clock() - self.timeout_s
        # Choices with a reward are trained without the choices that have none.
        self._db.execute(
            "UPDATE completions SET state = ? WHERE state = ? AND ended_at < ? AND rewards != '{}'",
            (_REWARDED, _OPEN, old),
        )
        # Delivered completions are remembered for as long as feedback may be repeated.
        expired = self._db.execute("DELETE FROM completions WHERE state = ? AND ended_at < ?", (_OPEN, old)).rowcount
        self._db.execute("DELETE FROM completions WHERE state = ? AND ended_at < ?", (_DELIVERED, old))
        self.counts.expired += expired + self.sessions.sweep(old)
        (kept,) = self._db.execute("SELECT count(*) FROM completions WHERE state != ?", (_DELIVERED,)).fetchone()
        if kept > self.max_kept:
            self._db.execute(
                "DELETE FROM completions WHERE id IN (SELECT id FROM completions WHERE state != ? "
                "ORDER BY state, ended_at LIMIT ?)",
                (_DELIVERED, kept - self.max_kept),
            )
            self.counts.dropped += kept - self.max_kept
            log.warning("too many completions wait for feedback, the oldest are dropped", dropped=kept - self.max_kept)
        if (more := self.sessions.waiting() - self.max_kept) > 0:
            self.sessions.drop_oldest(more)
            self.counts.dropped += more
            log.warning("too many sessions wait for their groups, the oldest are dropped", dropped=more)

    def rewarded(self) -> list[_Ready]:
        """The next trajectories to deliver: completions, then groups of sessions, each in the order of their end."""
        query = "SELECT id, rewards, body FROM completions WHERE state = ? ORDER BY ended_at LIMIT ?"
        found = list[_Ready]()
        for call_id, text, body in self._db.execute(query, (_REWARDED, DELIVERED_AT_ONCE)):
            rewards = {int(choice): reward for choice, reward in json.loads(text).items()}
            ready = self._rewarded_trajectories(unpacked(body), rewards)
            found.append(_Ready(partial(self._mark_delivered, call_id), call_id, ready))
        for group in self.sessions.whole(DELIVERED_AT_ONCE):
            found.append(_Ready(partial(self.sessions.delivered, group.ids), group.ids[0], group.trajectories))
        return found

    def _mark_delivered(self, call_id: str) -> None:
        self._db.execute("UPDATE completions SET state = ?, body = x'' WHERE id = ?", (_DELIVERED, call_id))

    def _rewarded_trajectories(self, kept: Sequence[Trajectory], rewards: Mapping[int, float]) -> list[Trajectory]:
        """The trajectories that have a reward, renumbered: choices without a reward leave their group."""
        groups: dict[str, list[tuple[Trajectory, float]]] = {}
        for choice, trajectory in enumerate(kept):
            if choice in rewards:
                groups.setdefault(trajectory.group_id, []).append((trajectory, rewards[choice]))
        return [
            trajectory.replace(
                trajectory_id=make_trajectory_id(group_id, index),
                sample_index=index,
                num_generations=len(members),
                rewards={FEEDBACK: reward},
            )
            for group_id, members in groups.items()
            if len(members) > 1 or not self.lone_refusal
            for index, (trajectory, reward) in enumerate(members)
        ]


@dataclass
class FeedbackDesk:
    """The store for use in an event loop: a thread runs the operations in order, many in one transaction.

    Invariant the_store_closes_after_its_last_operation: one operation runs at a time; ``close`` waits for it, runs the
    accepted operations that still wait, and then closes the file.

    ``trained_as``: the served policy, which rewarded completions train. ``newest``: its newest announced weights.
    """

    store: FeedbackStore
    loop: LoopSettings
    topic: str
    book: SessionBook
    trained_as: str = field(init=False, default=SERVED_POLICY)
    newest: PolicyVersion | None = field(init=False, default=None)
    _constrained: "FIFOCache[str, str]" = field(default_factory=lambda: FIFOCache(REMEMBERED_CONSTRAINED))
    _pending: "list[tuple[Callable[[], Any], asyncio.Future[Any]]]" = field(default_factory=list)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _rewarded: asyncio.Event = field(default_factory=asyncio.Event)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def learns_alone(self) -> bool:
        """Whether the algorithm learns from a completion that is the only one of its prompt."""
        return not self.store.lone_refusal

    def train(self, policy: str) -> None:
        """Note which policy is served: completions rewarded from now on train it."""
        self.trained_as = policy

    def announce(self, version: PolicyVersion) -> None:
        """Note new weights of the served policy."""
        self.newest = version

    def keep(self, running: RunningCall) -> None:
        """Keep a finished call. Returns at once; the disk has it soon after."""
        if len(self._pending) >= MAX_PENDING_WRITES:
            self.store.counts.dropped += 1
            return
        call = running.call
        trajectories = trajectories_of(running)
        self._enqueue(lambda: self.store.keep(call.public_id, call.requester.use.key.name, trajectories))

    def pass_over(self, call: CompletionCall) -> None:
        """Note a finished call that cannot be trained on because a format was forced on it, though its requester
        consented.
        """
        self.store.counts.constrained += len(call.prompts) * call.n
        self._constrained[call.public_id] = call.requester.use.key.name

    async def reward(self, call_id: str, key: str, by_choice: Mapping[int, float]) -> dict[str, Any]:
        """See the store. Returns when the reward is on the disk.

        Raises:
            ApiError: as the store does, and for a constrained call.
        """
        if self._constrained.get(call_id) == key:
            raise invalid(
                "id",
                "expected a completion that can be trained on, got one with a response_format or a forced tool_choice: "
                "its tokens were sampled from those that fit the format only, so the trainer's probabilities differ",
                "completion_constrained",
            )
        trainable_from = 0 if self.newest is None else self.newest.number - self.loop.staleness_bound
        return await self._record(lambda: self.store.reward(call_id, key, by_choice, trainable_from))

    async def reward_turn(self, call_id: str, key: str, by_choice: Mapping[int, float]) -> dict[str, Any] | None:
        """Like ``reward``, for a call of an open session, which is only in memory; None if there is no such call."""
        if [*by_choice] != [0]:
            return None
        return self.book.reward_turn(call_id, key, by_choice[0])

    async def end_session(
        self, key: str, name: str, reward: float, group: SessionGroup | None, dataset: str
    ) -> dict[str, Any]:
        """End a session with its reward. Returns when it is on the disk.

        Raises:
            ApiError: there is no such session, it has another reward, or nothing can be learnt from it.
        """
        if self.store.lone_refusal and (group is None or group.size < 2):
            raise invalid(
                "group", f"expected a group of sessions at one task, got a single session: {self.store.lone_refusal}"
            )
        ended = self.book.ended(key, name, reward, dataset, self.loop)
        if ended is None:
            return await self._record(lambda: self.store.sessions.again(key, name, reward))
        answer = await self._record(lambda: self.store.sessions.end(key, name, reward, group, ended))
        # Closed only now, so that the requester can end the session again if the write fails.
        self.book.close(key, name, ended[0])
        return answer

    async def _record(self, operation: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        answer: dict[str, Any] = await self._enqueue(operation)
        if answer["status"] == "complete":
            self._rewarded.set()
        return answer

    def _enqueue(self, operation: Callable[[], Any]) -> "asyncio.Future[Any]":
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        # Retrieves the exception: otherwise asyncio logs the errors of futures that are not awaited.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._pending.append((operation, future))
        self._wake.set()
        return future

    async def write_loop(self) -> None:
        """Run pending operations, and sweep every ``SWEEP_S``, until cancelled; ``close`` runs the rest."""
        swept_at = 0.0
        while True:
            await wait_for_event(self._wake, SWEEP_S)
            self._wake.clear()
            await self._write()
            if time.monotonic() - swept_at > SWEEP_S:
                swept_at = time.monotonic()
                await self._run(lambda: [self.store.sweep])
                self.book.sweep()

    async def close(self) -> None:
        """Run the operations that still wait, then close the store. Nothing is accepted afterwards."""
        try:
            await self._write()
        finally:
            async with self._lock:
                await in_thread(self.store.close)

    async def _write(self) -> None:
        waiting: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []
        results: list[Any] = []

        def take_pending() -> list[Callable[[], Any]]:
            waiting[:], self._pending = self._pending, []
            return [operation for operation, _ in waiting]

        try:
            await self._run(take_pending, results)
        except sqlite3.Error as error:
            results = _unwritten(error, waiting)
        except asyncio.CancelledError as cancelled:
            if isinstance(cause := cancelled.__cause__, sqlite3.Error):
                results = _unwritten(cause, waiting)
            elif not results:
                self._pending[:0] = waiting  # no thread had started them, so ``close`` runs them
            raise
        finally:
            for (_, future), result in zip(waiting, results, strict=False):
                _answer(future, result)

    async def _run(
        self, take: Callable[[], Sequence[Callable[[], Any]]], results: list[Any] | None = None
    ) -> list[Any]:
        """Run the operations that ``take`` returns, once no other runs; their results.

        The results are also added to ``results``, even if the caller is cancelled after the operations ran.
        """
        found = [] if results is None else results
        async with self._lock:
            if operations := take():
                await in_thread(lambda: found.extend(self.store.apply(operations)))
        return found

    async def deliver_loop(self, outbox: Outbox) -> None:
        """Publish rewarded trajectories, oldest first, until cancelled. During an outage of the broker it waits."""
        while True:
            self._rewarded.clear()
            (found,) = await self._run(lambda: [self.store.rewarded])
            await asyncio.gather(*(self._deliver(one, outbox) for one in found))
            if found:
                await self._run(partial(_marks_of, found))
            else:
                # Looks again even without new feedback: for rewards from before a restart and completions timed out.
                await wait_for_event(self._rewarded, RETRY_S)

    async def _deliver(self, found: _Ready, outbox: Outbox) -> None:
        try:
            for trajectory in found.trajectories:
                # The whole group goes to one partition of its predicted bucket.
                shard = xxhash.xxh32_intdigest(trajectory.group_id.encode())
                partition = self.loop.partition_of(min(trajectory.bucket, self.loop.num_buckets - 1), shard)
                record = Outgoing.of(self.topic, trajectory, key=trajectory.group_id, partition=partition)
                if trajectory.turns:
                    turns = (TURNS_HEADER, str(len(trajectory.turns)).encode())
                    record = record._replace(headers=(*record.headers, turns))
                await outbox.deliver(record)
        except (BusError, WireError) as error:  # the broker refused it, or it is too large: a retry would fail too
            self.store.counts.dropped += 1
            log.error("a rewarded trajectory was refused and is dropped", name=found.name, error=str(error))
        else:
            self.store.counts.delivered += len(found.trajectories)


def _unwritten(error: sqlite3.Error, waiting: Sequence[object]) -> list[ApiError]:
    log.error("feedback was not written", error=str(error), operations=len(waiting))
    return [unavailable(f"expected to write this to the gateway's disk, got: {error}")] * len(waiting)


def _answer(future: "asyncio.Future[Any]", result: Any) -> None:
    if future.done():
        return
    if isinstance(result, ApiError):
        future.set_exception(result)
    else:
        future.set_result(result)
