"""Steps over trajectories of several turns: replayed bit-equal, and shown turn by turn."""

from pathlib import Path

import numpy as np
import pytest

from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.inspection.dashboard.records import history_json
from streamrl.inspection.replay.history import TrajectoryHistory
from streamrl.inspection.replay.show import history_text
from streamrl.schemas.trajectories import Trajectory, Turn
from tests.inspection.replay.recorded_run import KEPT, record, usual_groups

STEPS = 2


def in_turns(one: Trajectory) -> Trajectory:
    """Its first token, and its last ones, were sampled; the second was read."""
    length = len(one.token_ids)
    mask = np.ones(length, "<u1")
    logprobs = one.logprobs.copy()
    turns: tuple[Turn, ...] = (Turn(start=0, end=1, rewards={"exact": 0.5}),)
    if length > 2:
        mask[1], logprobs[1] = 0, 0.0
        turns += (Turn(start=2, end=length),)
    else:
        turns += (Turn(start=1, end=length),)
    return one.replace(loss_mask=mask, logprobs=logprobs, session="s", turns=turns, source="request")


@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus"])
async def test_a_step_of_several_turns_replays_bit_equal(tmp_path: Path, model_path: Path, name: str) -> None:
    groups = [[in_turns(one) for one in group] for group in usual_groups(STEPS)]
    settings = AlgorithmSettings.model_validate({"name": name})
    run = await record(tmp_path, model_path, groups, algorithm=settings, training=KEPT)
    found = await run.replays(1, STEPS)
    assert [each.rebuilt.verdict for each in found] == ["bit-equal"] * STEPS
    assert all(pair.equal for each in found for pair in each.rebuilt.metrics)


def test_turns_are_shown() -> None:
    one = in_turns(usual_groups(1)[0][0])
    history = TrajectoryHistory(one, (), (), settled=True)
    text = history_text(history, str).plain
    assert "turns of session s:" in text
    assert "1: tokens [0, 1), exact 0.5" in text
    shown = history_json(history, str, "runs/x")
    assert shown["session"] == "s"
    assert shown["turns"] == [[turn.start, turn.end, turn.rewards] for turn in one.turns]
    assert [trained for _, _, trained in shown["tokens"]] == one.loss_mask.tolist()
