from pathlib import Path

from streamrl.bus.port import Outgoing
from streamrl.inspection.replay.dead_letters import replay_dead_letters
from streamrl.observability.record_index.store import RecordIndex
from streamrl.schemas.codec import encode, headers_of
from streamrl.schemas.topics import DEAD_LETTERS, TRAJECTORIES
from streamrl.schemas.trajectories import Trajectory
from tests.consumers.training.trainer_harness import RUN
from tests.inspection.replay.recorded_run import Recorded, members, record, usual_groups


async def test_dead_letters_that_decode_today_show_what_they_would_have_contributed(
    tmp_path: Path, model_path: Path
) -> None:
    run = await record(tmp_path, model_path, usual_groups(3))
    group = members(50, 3)
    await run.harness.publish(*group[1:])
    await dead_letter(run, encode(group[0]), offset=77)
    await dead_letter(run, encode(group[0])[:-3], offset=78)
    await dead_letter(run, encode(group[0].replace(rewards={})), offset=79)
    async with run.replayer() as replayer:
        version, dead_letters = await replay_dead_letters(replayer, RecordIndex(None))
    good, cut, unrewarded = dead_letters
    assert version == "1-3"
    assert good.row is not None
    assert (good.row.trajectory_id, good.row.offset, good.siblings) == (group[0].trajectory_id, 77, 2)
    rewards = [trajectory.rewards["exact"] for trajectory in group]
    mean = sum(reward for reward in rewards if reward is not None) / 3
    assert good.row.advantage * ((rewards[0] or 0.0) - mean) > 0
    assert good.row.ratio_mean > 0
    assert good.first_error == "was too new"
    assert (cut.row, unrewarded.row) == (None, None)
    assert "trajectory" in cut.problem
    assert "no reward" in unrewarded.problem
    assert cut.origin == f"{TRAJECTORIES.full_name(RUN)}[0]@78"


async def test_without_dead_letters_nothing_is_loaded(tmp_path: Path, model_path: Path) -> None:
    run = await record(tmp_path, model_path, usual_groups(1))
    async with run.replayer() as replayer:
        assert await replay_dead_letters(replayer, RecordIndex(None)) == ("none", [])


async def dead_letter(run: Recorded, value: bytes, offset: int) -> None:
    headers = (
        *headers_of(Trajectory),
        ("dlq-error", b"was too new"),
        ("dlq-topic", TRAJECTORIES.full_name(RUN).encode()),
        ("dlq-partition", b"0"),
        ("dlq-offset", str(offset).encode()),
    )
    publisher = await run.harness.bus.publisher("trainer")
    await publisher.publish(Outgoing(DEAD_LETTERS.full_name(RUN), value, "p/50/0", 0, headers))
