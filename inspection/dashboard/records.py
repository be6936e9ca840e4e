"""What the dashboard's page asks for beyond the state: one trajectory with its history, and the dead letters.

Knows no web. A trajectory is shown token by token with its log-probs, the weights that made it, its rewards, and what
happened to it since its prompt was ordered.
"""

import asyncio
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bus.history import BusHistory, Extent
from bus.port import Bus
from inspection.dead_letters import DeadLetter, as_json, dead_letter_of, plan_retries, send_retries
from inspection.replay.history import HistoryReader, TrajectoryHistory
from inspection.replay.show import Piece
from observability.run_state.state import RunState
from schemas.errors import UserError
from schemas.topics import DEAD_LETTERS
from schemas.trajectories import Trajectory

CLIENT_ID = "streamrl-ui"
PLAIN: Piece = "#{}".format
"""A token without a tokenizer: its id."""
SHOWN = 100
"""Dead letters in the list."""
HEAD = 96
"""Bytes of one of them."""
SHOWN_TOKENS = 4000
SHOWN_CHARACTERS = 20_000
_STEP = re.compile(r"trained in step (\d+)")


@dataclass
class DashboardContext:
    """What the handlers share: the run that is looked at, and how its topics are reached.

    ``run_path``: how the run is named on a command line. ``load_pieces``: slow; loads what spells tokens.

    ``advice``: what a user can do when the broker does not answer.
    """

    bus: Bus
    state: RunState
    run_path: str
    load_pieces: Callable[[], Piece] = lambda: PLAIN
    advice: str = ""
    _pieces: Piece | None = None
    _loading: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def history(self) -> BusHistory:
        """The run's topics up to now."""
        return BusHistory(self.bus, CLIENT_ID)

    async def pieces(self) -> Piece:
        """Gives a token's text; loaded once, in a thread."""
        async with self._loading:
            if self._pieces is None:
                self._pieces = await asyncio.to_thread(self.load_pieces)
        return self._pieces


async def newest_dead_letters(context: DashboardContext) -> dict[str, Any]:
    """How many there are, and the newest, newest first."""
    topic, history = DEAD_LETTERS.full_name(context.state.run), context.history
    extents = {tp.partition: held for tp, held in (await history.extents(topic)).items()}
    total = sum(held.end - held.first for held in extents.values())
    newest = {partition: Extent(max(held.first, held.end - SHOWN), held.end) for partition, held in extents.items()}
    dead_letters = [dead_letter_of(record) async for record in history.records(topic, newest)]
    return {"total": total, "letters": [_shown(dead_letter) for dead_letter in reversed(dead_letters)]}


async def retry_dead_letter(context: DashboardContext, offset: int) -> dict[str, str]:
    """Send a dead letter once more, unless it was sent before or still does not decode.

    Raises:
        UserError: there is no such dead letter.
        BusError: the broker refuses, or does not answer.
    """
    outcomes, missing = await plan_retries(context.history, context.state.run, [offset])
    if missing:
        raise UserError(f"expected a dead letter at offset {offset}, found none")
    (outcome,) = await send_retries(context.bus, outcomes)
    return {"action": outcome.action.value, "detail": outcome.detail}


def _shown(dead_letter: DeadLetter) -> dict[str, Any]:
    return {**as_json(dead_letter), "head": (dead_letter.record.value or b"")[:HEAD].hex(" ")}


async def inspect(context: DashboardContext, name: str) -> dict[str, Any]:
    """The history of a trajectory, by id or as ``partition@offset``.

    Raises:
        UserError: there is none, or its record is gone or does not decode.
    """
    history = await HistoryReader(context.history, context.state.run, context.state.algorithm).trace(name)
    return history_json(history, await context.pieces(), context.run_path)


def history_json(history: TrajectoryHistory, piece: Piece, run_path: str) -> dict[str, Any]:
    """Everything there is to show; at most 4,000 tokens, and 20,000 characters of a text."""
    trajectory = history.trajectory
    return {
        "id": trajectory.trajectory_id,
        "sample": f"{trajectory.sample_index + 1} of {trajectory.num_generations}",
        "dataset": trajectory.dataset,
        "worker": trajectory.worker_id,
        "finish": trajectory.finish_reason.value,
        "bucket": trajectory.bucket,
        "predicted": trajectory.predicted_length,
        "length": len(trajectory.token_ids),
        "temperature": trajectory.temperature,
        "prompt": _cut(trajectory.prompt_text),
        "completion": _cut(trajectory.completion_text),
        "rewards": trajectory.rewards,
        "reward_errors": trajectory.reward_errors,
        "tokens": _tokens(trajectory, piece),
        "spans": [[str(span.version), span.start, span.end] for span in trajectory.version_spans],
        "records": [[f"{seen.partition}@{seen.offset}", seen.fate] for seen in history.records],
        "events": [[event.at, event.since, event.what, event.detail] for event in history.events],
        "commands": commands_for(history, run_path),
    }


def _cut(text: str) -> str:
    rest = len(text) - SHOWN_CHARACTERS
    return text if rest <= 0 else f"{text[:SHOWN_CHARACTERS]}… and {rest:,} characters more"


def commands_for(history: TrajectoryHistory, run_path: str) -> list[str]:
    """What to type to see more: the trajectory, and the step that it was trained in."""
    run = shlex.quote(run_path)
    steps = [match[1] for seen in history.records if (match := _STEP.match(seen.fate))]
    shown = f"streamrl show {shlex.quote(history.trajectory.trajectory_id)} {run}"
    return [*(f"streamrl replay {run} --step {step}" for step in steps), shown]


def _tokens(trajectory: Trajectory, piece: Piece) -> list[list[Any]]:
    """Text, log-prob, and whether it is trained, of each token."""
    rows = zip(trajectory.token_ids.tolist(), trajectory.logprobs.tolist(), trajectory.loss_mask.tolist(), strict=True)
    shown = list(rows)[:SHOWN_TOKENS]
    return [[piece(token), round(logprob, 4), trained] for token, logprob, trained in shown]
