"""Answers the dashboard's requests about records: a trajectory with its history, a group, and the dead letters.

This module knows no web server. A trajectory is shown token by token with its log-probs, with the weights that sampled
it, its rewards, and its history since its prompt was ordered.
"""

import asyncio
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from streamrl.bus.history import BusHistory, ConnectedHistory, Extent
from streamrl.bus.port import Bus
from streamrl.bus.waiting import in_thread
from streamrl.inspection.dead_letters import DeadLetter, as_json, dead_letter_of, retry
from streamrl.inspection.replay.events import parts_of
from streamrl.inspection.replay.history import GroupHistory, GroupSample, HistoryReader, TrajectoryHistory
from streamrl.inspection.replay.show import Piece
from streamrl.observability.record_index.entries import Fold
from streamrl.observability.record_index.following import IndexFollower
from streamrl.observability.record_index.store import RecordIndex
from streamrl.observability.run_state.state import RunState
from streamrl.schemas.errors import StreamRLError, UserError
from streamrl.schemas.topics import DEAD_LETTERS
from streamrl.schemas.trajectories import Trajectory

CLIENT_ID = "streamrl-ui"
PLAIN: Piece = "#{}".format
"""A token's text if there is no tokenizer: its id."""
SHOWN = 100
"""Dead letters in the list."""
HEAD = 96
"""Bytes shown of a dead letter."""
PATIENCE_S = 2.0
"""Seconds between two checks of a look-up that waits for the index."""
MANY_UNREAD = 20_000
"""Unindexed records from which a look-up returns an error instead of waiting: they take about a second."""
SHOWN_TOKENS = 4000
SHOWN_CHARACTERS = 20_000
_STEP = re.compile(r"trained in step (\d+)")


class NotIndexedYet(StreamRLError):
    """The records of a long run are still being indexed for the first time."""


@dataclass
class DashboardContext:
    """State that the handlers share: the run, and how to reach its topics.

    ``run_path``: the run's name on a command line. ``load_pieces``: loads the function that gives a token's text; it is
    slow. ``advice``: what a user can do when the broker does not answer. ``index``: the index of the run's records.
    ``looks``: the same bus with little prefetching, to read single records.
    """

    bus: Bus
    state: RunState
    run_path: str
    load_pieces: Callable[[], Piece] = lambda: PLAIN
    advice: Callable[[], str] = str
    index: RecordIndex = field(default_factory=lambda: RecordIndex(None))
    looks: Bus | None = None
    follower: IndexFollower = field(init=False)
    retrying: asyncio.Lock = field(default_factory=asyncio.Lock)
    _pieces: Piece | None = None
    _loading: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        bus = self.looks or self.bus
        kept = ConnectedHistory(bus, Fold(self.state.run).topics, CLIENT_ID, bulk=self.bus)
        self.follower = IndexFollower(kept, self.state.run, self.index)

    @property
    def history(self) -> BusHistory:
        """The history of the run's topics."""
        return BusHistory(self.bus, CLIENT_ID)

    async def pieces(self) -> Piece:
        """The function that gives a token's text. It is loaded once, in a thread."""
        async with self._loading:
            if self._pieces is None:
                self._pieces = await in_thread(self.load_pieces)
        return self._pieces


async def newest_dead_letters(context: DashboardContext) -> dict[str, Any]:
    """The number of dead letters, and the newest ones, newest first."""
    topic, history = DEAD_LETTERS.full_name(context.state.run), context.history
    extents = {tp.partition: held for tp, held in (await history.extents(topic)).items()}
    total = sum(held.end - held.first for held in extents.values())
    newest = {partition: Extent(max(held.first, held.end - SHOWN), held.end) for partition, held in extents.items()}
    dead_letters = [dead_letter_of(record) async for record in history.records(topic, newest)]
    return {"total": total, "letters": [_shown(dead_letter) for dead_letter in reversed(dead_letters)]}


async def retry_dead_letter(context: DashboardContext, offset: int) -> dict[str, str]:
    """Send a dead letter again, unless it was retried before or still does not decode.

    Raises:
        UserError: there is no such dead letter.
        BusError: the broker refuses the record, or does not answer.
    """
    # One at a time, because two concurrent retries would fence each other.
    async with context.retrying:
        outcomes, missing = await retry(context.bus, context.follower, [offset])
    if missing:
        raise UserError(f"expected a dead letter at offset {offset}, found none")
    (outcome,) = outcomes
    return {"action": outcome.action.value, "detail": outcome.detail}


def _shown(dead_letter: DeadLetter) -> dict[str, Any]:
    return {**as_json(dead_letter), "head": (dead_letter.record.value or b"")[:HEAD].hex(" ")}


async def inspect(context: DashboardContext, name: str) -> dict[str, Any]:
    """The history of a trajectory, by id or ``partition@offset``, or the state of a group's samples, as JSON.

    Raises:
        UserError: there is no such trajectory or group, or its record is deleted or does not decode.
        NotIndexedYet: the index is not ready; ask again.
    """
    reader = HistoryReader(context.follower, context.state.progress.algorithm)
    looking = asyncio.create_task(reader.look_up(name))
    try:
        while not looking.done():
            await asyncio.wait({looking}, timeout=PATIENCE_S)
            if not looking.done() and (unread := context.follower.unread) > MANY_UNREAD:
                raise NotIndexedYet(f"the run's records are being indexed, {unread:,} are left; ask again")
    finally:
        # This does not stop the indexing, which runs in the task that follows the run.
        looking.cancel()
    found = await looking
    if isinstance(found, GroupHistory):
        return group_json(found)
    return history_json(found, await context.pieces(), context.run_path)


def group_json(group: GroupHistory) -> dict[str, Any]:
    """A group with one row per sample, as JSON."""
    trajectories = [sample.trajectory for sample in group.samples if sample.trajectory is not None]
    return {
        "group": group.group_id,
        "settled": group.settled,
        "prompt": _cut(trajectories[0].prompt_text) if trajectories else "",
        "samples": [_sample_json(sample) for sample in group.samples],
        "awaited": group.awaited,
        "unread": group.unread,
        "workers": list(dict.fromkeys(order.worker_id for order in group.orders)),
    }


def _sample_json(sample: GroupSample) -> dict[str, Any]:
    record, found = sample.record, sample.trajectory
    row = {"id": sample.trajectory_id, "place": f"{record.partition}@{record.offset}", "fate": record.fate}
    if found is None:
        return row
    told = {"length": len(found.token_ids), "rewards": found.rewards, "worker": found.worker_id}
    return row | told | {"advantage": record.advantage}


def history_json(history: TrajectoryHistory, piece: Piece, run_path: str) -> dict[str, Any]:
    """A trajectory in full as JSON, with at most 4,000 tokens, and 20,000 characters of a text."""
    trajectory = history.trajectory
    return {
        "id": trajectory.trajectory_id,
        "group": trajectory.group_id,
        "settled": history.settled,
        "sample": f"{trajectory.sample_index + 1} of {trajectory.num_generations}",
        "dataset": trajectory.dataset,
        "worker": _workers(trajectory),
        "finish": trajectory.finish_reason.value,
        "bucket": trajectory.bucket,
        "predicted": trajectory.predicted_length,
        "length": len(trajectory.token_ids),
        "temperature": trajectory.temperature,
        "prompt": _cut(trajectory.prompt_text),
        "completion": _cut(trajectory.completion_text),
        "rewards": trajectory.rewards,
        "advantage": history.advantage,
        "reward_errors": trajectory.reward_errors,
        "tokens": _tokens(trajectory, piece),
        "session": trajectory.session,
        "turns": [[turn.start, turn.end, turn.rewards] for turn in trajectory.turns],
        "spans": [[trajectory.named(span.version), span.start, span.end] for span in trajectory.version_spans],
        "records": [[f"{seen.partition}@{seen.offset}", seen.fate] for seen in history.records],
        "events": [[event.at, event.since, event.what, event.detail] for event in history.events],
        "commands": commands_for(history, run_path),
    }


def _workers(trajectory: Trajectory) -> str:
    """The worker that sampled the trajectory, or several workers and their ranges of tokens."""
    parts = parts_of(trajectory)
    return ", ".join(worker if len(parts) == 1 else f"{worker} [{start}, {end})" for worker, start, end in parts)


def _cut(text: str) -> str:
    rest = len(text) - SHOWN_CHARACTERS
    return text if rest <= 0 else f"{text[:SHOWN_CHARACTERS]}… and {rest:,} more characters"


def commands_for(history: TrajectoryHistory, run_path: str) -> list[str]:
    """Commands that show more: the steps that trained the trajectory, and the trajectory itself."""
    run = shlex.quote(run_path)
    steps = [match[1] for seen in history.records if (match := _STEP.match(seen.fate))]
    shown = f"streamrl show {shlex.quote(history.trajectory.trajectory_id)} --run {run}"
    return [*(f"streamrl replay --run {run} --step {step}" for step in steps), shown]


def _tokens(trajectory: Trajectory, piece: Piece) -> list[list[Any]]:
    """Each token's text, log-prob, and whether it is trained."""
    rows = zip(trajectory.token_ids.tolist(), trajectory.logprobs.tolist(), trajectory.loss_mask.tolist(), strict=True)
    shown = list(rows)[:SHOWN_TOKENS]
    return [[piece(token), round(logprob, 4), trained] for token, logprob, trained in shown]
