"""A trainer that was killed in its commit and started again leaves the weights of one that was not, bit for bit."""

from collections.abc import Iterator

import pytest

from streamrl.schemas.errors import RankLost
from tests.chaos.campaign.campaign import problems_of
from tests.chaos.crashing.commit import POINTS, POINTS_OF_RANKS, RANK_DIES, SAMPLE
from tests.chaos.crashing.points import CrashPoint
from tests.chaos.crashing.trial import KILLED, STEPS, Trained, Trials, codes_of
from tests.pipeline.tiny_model import save_tiny_model

UNDISTURBED: dict[str, Trained] = {}
SAMPLED = [point for point in POINTS if point.name in SAMPLE]
IN_A_ROW = SAMPLED[:3]
"""Those that one run can come to one after the other: none needs more steps than the crashes before leave it."""


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory, bootstrap_servers: str) -> Iterator[Trials]:
    root = tmp_path_factory.mktemp("crashing")
    prepared = Trials.prepare(root, save_tiny_model(root / "model"), bootstrap_servers)
    yield prepared
    prepared.server.close()


async def undisturbed(trials: Trials) -> Trained:
    if trials.address not in UNDISTURBED:
        UNDISTURBED[trials.address] = await trials.run(None)
    return UNDISTURBED[trials.address]


async def test_an_undisturbed_trainer_takes_all_steps_and_balances(trials: Trials) -> None:
    whole = await undisturbed(trials)
    assert problems_of(whole, whole, (0,)) == []
    assert len(whole.trained) == STEPS * 2 * 4


@pytest.mark.parametrize("point", [point for point in SAMPLED if point not in IN_A_ROW], ids=str)
async def test_a_trainer_killed_at_a_point_of_its_commit_resumes_bit_equal(trials: Trials, point: CrashPoint) -> None:
    whole = await undisturbed(trials)
    assert problems_of(await trials.kill_at(point), whole, codes_of(point)) == []


async def test_a_trainer_killed_three_times_in_a_row_resumes_bit_equal(trials: Trials) -> None:
    whole = await undisturbed(trials)
    assert problems_of(await trials.run(*IN_A_ROW, None), whole, (KILLED, KILLED, KILLED, 0)) == []


@pytest.mark.long
async def test_two_ranks_resume_bit_equal_whichever_is_killed(trials: Trials) -> None:
    pair = trials.of_ranks(2)
    whole = await pair.run(None)
    assert problems_of(whole, whole, (0,)) == []
    alone = await undisturbed(trials)
    assert whole.trained == alone.trained
    parts = next(point for point in POINTS_OF_RANKS if point.name == "after writing the ranks' parts")
    found = await pair.run(parts, RANK_DIES[0], None)
    assert problems_of(found, whole, (KILLED, RankLost.exit_code, 0)) == []
