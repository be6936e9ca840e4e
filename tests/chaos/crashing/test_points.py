"""A process dies exactly where its point says."""

import subprocess
import sys

import pytest

from tests.chaos.crashing.commit import POINTS
from tests.chaos.crashing.points import CrashPoint, arm

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


def test_there_are_at_least_25_points_and_each_has_a_name_of_its_own() -> None:
    assert len({point.name for point in POINTS}) == len(POINTS) >= 25
