from collections.abc import Collection

from streamrl.producers.grading.scoring import LONGEST_PAUSE_S, scored
from streamrl.producers.rewards.runner import ScoreRequest, Scores
from streamrl.schemas.trajectories import Prompt

REQUEST = ScoreRequest(Prompt(prompt_id="p/0", dataset="p", content="?"), "answer", [1, 2])


class Flaky:
    """``fails``: how often each function fails before it gives a reward."""

    def __init__(self, **fails: int) -> None:
        self.fails, self.asked = fails, list[tuple[str, ...]]()
        self.names = tuple(fails)

    async def start(self) -> None:
        pass

    async def score(self, request: ScoreRequest, only: Collection[str] | None = None) -> Scores:
        names = self.names if only is None else tuple(only)
        self.asked.append(names)
        failed = {name for name in names if self.fails[name] > 0}
        for name in failed:
            self.fails[name] -= 1
        return Scores({name: None if name in failed else 1.0 for name in names}, dict.fromkeys(failed, "busy"))

    async def close(self) -> None:
        pass


async def test_only_what_failed_is_asked_again_after_growing_pauses() -> None:
    scorer, pauses = Flaky(sure=0, busy=2), list[float]()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    assert await scored(scorer, REQUEST, 3, sleep) == Scores({"sure": 1.0, "busy": 1.0}, {})
    assert scorer.asked == [("sure", "busy"), ("busy",), ("busy",)]
    assert 0.5 <= pauses[0] <= 0.75 < 1.0 <= pauses[1] <= 1.5


async def test_after_the_last_attempt_the_failure_is_final_and_other_samples_keep_their_rewards() -> None:
    scorer, pauses = Flaky(sure=0, never=99), list[float]()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    assert await scored(scorer, REQUEST, 8, sleep) == Scores({"sure": 1.0, "never": None}, {"never": "busy"})
    assert len(scorer.asked) == 8
    assert len(pauses) == 7
    assert max(pauses) <= 1.5 * LONGEST_PAUSE_S
