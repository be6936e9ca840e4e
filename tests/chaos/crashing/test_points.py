"""A process dies exactly where its point says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.deploy.local.supervisor import ChildSpec
from tests.chaos.crashing import elsewhere
from tests.chaos.crashing.commit import POINTS, POINTS_OF_RANKS, RANK_DIES
from tests.chaos.crashing.lives import missing, with_points
from tests.chaos.crashing.points import CrashPoint, arm, check_target
from tests.chaos.runs.inside import COMMAND

pytestmark = pytest.mark.processes

EVERY = (*POINTS, *POINTS_OF_RANKS, *RANK_DIES, *elsewhere.ALL)
SCRIPT = """
from tests.chaos.crashing.points import CrashPoint, arm
arm(CrashPoint("x", "tests.pipeline.letter_reward:share_of_a", {moment!r}, 2))
from tests.pipeline import letter_reward
for number in range(3):
    print(number, letter_reward.share_of_a([str(number)]), flush=True)
"""


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_process_kills_itself_at_the_nth_call(moment: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(moment=moment)], capture_output=True, text=True)
    assert done.returncode == -9
    assert [line[0] for line in done.stdout.splitlines()] == ["0"]


def test_a_point_in_code_that_is_gone_is_an_error() -> None:
    with pytest.raises(AttributeError):
        arm(CrashPoint("x", "tests.pipeline.letter_reward:no_such_function", "before", 1))


@pytest.mark.parametrize("point", {point.target: point for point in EVERY}.values(), ids=lambda point: point.target)
def test_every_point_is_in_code_that_exists(point: CrashPoint) -> None:
    check_target(point)


def test_there_are_at_least_25_points_and_each_has_a_name_of_its_own() -> None:
    assert len({point.name for point in POINTS}) == len(POINTS) >= 25


OF_LIVES = """
from tests.pipeline import letter_reward
for number in range(3):
    print(number, letter_reward.share_of_a([str(number)]), flush=True)
"""


def test_each_life_ends_at_the_next_point_and_then_none_does(tmp_path: Path) -> None:
    target = "tests.pipeline.letter_reward:share_of_a"
    points = [CrashPoint("first", target, "after", 2), CrashPoint("second", target, "before", 1)]
    command = [sys.executable, "-c", OF_LIVES, COMMAND]
    spec = with_points(ChildSpec("x", command, tmp_path / "log"), tmp_path / "points", points)
    found = []
    for _ in range(3):
        done = subprocess.run(command, env={**os.environ, **spec.environment}, capture_output=True, text=True)
        found.append((done.returncode, len(done.stdout.splitlines()), missing(tmp_path / "points")))
    assert found == [(-9, 1, ["second"]), (-9, 0, []), (0, 3, [])]


def test_the_code_has_each_point_of_workers_dispatchers_and_relays() -> None:
    script = "from tests.chaos.crashing import elsewhere, points\nfor one in elsewhere.ALL: points.arm(one)"
    assert len({point.name for point in elsewhere.ALL}) == len(elsewhere.ALL) > 12
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
