"""A lost rank ends the trainer with a one-line error, and no rank outlives rank 0."""

import socket
import subprocess
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from streamrl.consumers.training.ranks.team import Team
from streamrl.schemas.errors import ModelError, OutOfMemory, RankLost, UserError
from tests.consumers.training.factories import make_micro_batch
from tests.consumers.training.ranks.team import open_ranked, opened, step
from tests.consumers.training.ranks.zygote import STARTED, ForkedRank, Zygote

BOUND_S = 20.0


def test_a_rank_killed_in_the_middle_of_a_step_ends_it(tmp_path: Path, model_path: Path) -> None:
    start = partial(Zygote.started().start, act="die", nth=2)
    with opened(tmp_path, model_path, 2, start=start) as policy:
        policy.accumulate(make_micro_batch(4))
        began = time.monotonic()
        with pytest.raises(RankLost, match="rank 1 is gone"):
            step(policy, [make_micro_batch(4, seed=1)])
        assert time.monotonic() - began < BOUND_S
        with pytest.raises(RankLost):
            policy.discard()


def test_memory_that_ran_out_on_another_rank_is_the_users_to_mend(tmp_path: Path, model_path: Path) -> None:
    start = partial(Zygote.started().start, act="run out of memory", nth=1)
    with opened(tmp_path, model_path, 2, start=start) as policy:
        with pytest.raises(UserError, match=r"token_budget.*rank 1 of 2") as told:
            policy.accumulate(make_micro_batch(4))
        assert not isinstance(told.value, OutOfMemory)  # for that error the trainer would split the micro-batch


def test_a_lost_rank_ends_the_trainer_though_it_idles() -> None:
    codes: list[int] = []
    ended = threading.Event()

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    team = Team(2, Zygote.started().start, end, grace_s=0.1)
    STARTED[-1].kill()
    assert ended.wait(BOUND_S)
    assert codes == [RankLost.exit_code]
    team.close()


def test_a_closed_team_is_no_loss() -> None:
    codes: list[int] = []
    team = Team(3, Zygote.started().start, codes.append, grace_s=0.05)
    team.close()
    assert [rank.wait(1.0) for rank in STARTED[-2:]] == [0, 0]
    time.sleep(0.1)
    assert codes == []


def test_no_rank_outlives_rank_0_even_in_a_collective_operation(tmp_path: Path, model_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        leader = Zygote.started().start(theirs, lead=[str(tmp_path), str(model_path)])
    with ours, ours.makefile() as said:
        rank = int(said.readline())
    process = ForkedRank(rank)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)
    leader.kill()
    process.wait(BOUND_S)


def test_fewer_devices_than_ranks_are_refused_before_anything_is_started(tmp_path: Path, model_path: Path) -> None:
    before = len(STARTED)
    with pytest.raises(ModelError, match="expected a CUDA device for each of"):
        opened(tmp_path, model_path, 2, device="cuda").__enter__()
    assert len(STARTED) == before


def test_a_rank_that_cannot_start_is_named(tmp_path: Path, model_path: Path) -> None:
    def start(end: socket.socket) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(["/bin/false"])

    with pytest.raises(RankLost, match="rank 1 is gone"):
        open_ranked(tmp_path, model_path, 2, start=start)
