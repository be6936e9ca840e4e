"""One trajectory for the inspector: tokens by weight version with log-probs, rewards, and its life hop by hop."""

import re
import shlex
from typing import Any

from consumers.replay.lives.life import Life
from consumers.replay.lives.tracing import Tracer
from deploy.dashboard.room import Room
from deploy.inspection.replays.show import Piece
from schemas.messages.trajectories import Trajectory

SHOWN_TOKENS = 4000
_STEP = re.compile(r"trained in step (\d+)")


async def inspect(room: Room, name: str) -> dict[str, Any]:
    """The life of a trajectory, by id or as ``partition@offset``.

    Raises:
        UserError: there is none, or its record is gone or does not decode.
    """
    life = await Tracer(room.history, room.state.run, room.state.algorithm).trace(name)
    return life_json(life, await room.pieces(), room.run_path)


def life_json(life: Life, piece: Piece, run_path: str) -> dict[str, Any]:
    """Everything there is to show; at most 4,000 tokens."""
    trajectory = life.trajectory
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
        "prompt": trajectory.prompt_text,
        "completion": trajectory.completion_text,
        "rewards": trajectory.rewards,
        "reward_errors": trajectory.reward_errors,
        "tokens": _tokens(trajectory, piece),
        "spans": [[str(span.version), span.start, span.end] for span in trajectory.version_spans],
        "records": [[f"{seen.partition}@{seen.offset}", seen.fate] for seen in life.appearances],
        "hops": [[hop.at, hop.since, hop.what, hop.detail] for hop in life.hops],
        "commands": commands_for(life, run_path),
    }


def commands_for(life: Life, run_path: str) -> list[str]:
    """What to type to see more: the trajectory, and the step that it was trained in."""
    run = shlex.quote(run_path)
    steps = [match[1] for seen in life.appearances if (match := _STEP.match(seen.fate))]
    shown = f"streamrl show {shlex.quote(life.trajectory.trajectory_id)} {run}"
    return [*(f"streamrl replay {run} --step {step}" for step in steps), shown]


def _tokens(trajectory: Trajectory, piece: Piece) -> list[list[Any]]:
    """Text, log-prob, and whether it is trained, of each token."""
    rows = zip(trajectory.token_ids.tolist(), trajectory.logprobs.tolist(), trajectory.loss_mask.tolist(), strict=True)
    shown = list(rows)[:SHOWN_TOKENS]
    return [[piece(token), round(logprob, 4), trained] for token, logprob, trained in shown]
