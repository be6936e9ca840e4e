import itertools

from producers.dispatch.window import SLICE, Drafts
from producers.lengths.buckets import Buckets
from producers.lengths.estimators import Completion
from schemas.trajectories import LengthEstimate, Prompt
from tests.producers.dispatch.scene import CountedSource


class _Counting:
    """Each estimate is one longer than the last, and takes its time."""

    buckets = Buckets((100,))

    def __init__(self) -> None:
        self.calls = itertools.count(1)
        self.now, self.takes_s = 0.0, 0.0

    def predict(self, prompt: Prompt, group_id: str = "") -> LengthEstimate:
        self.now += self.takes_s
        length = next(self.calls)
        return LengthEstimate(median=length, upper=length, bucket=0, predictor="counting")

    def observe(self, completion: Completion) -> None:
        """Nothing to learn."""


def _drafts(predictor: _Counting, source: CountedSource) -> Drafts:
    return Drafts(source, predictor, lambda: predictor.now, lambda: None)


async def test_drafts_name_their_group_and_carry_an_estimate() -> None:
    drafts = await _drafts(_Counting(), CountedSource(size=10)).draw([3, 12])
    assert [(draft.position, draft.group_id) for draft in drafts] == [(3, "toy/3/0"), (12, "toy/2/1")]


async def test_what_was_drawn_ahead_is_read_once_and_estimated_anew() -> None:
    predictor, source = _Counting(), CountedSource()
    drafts = _drafts(predictor, source)
    assert not await drafts.prepare([0, 1])
    found = await drafts.draw([0, 1, 2])
    assert source.asked == [0, 1, 2]
    assert [draft.estimate.median for draft in found] == [4, 5, 6]


async def test_a_slow_predictor_is_asked_ahead_and_not_again_for_all() -> None:
    predictor, source = _Counting(), CountedSource()
    drafts = _drafts(predictor, source)
    await drafts.draw([0])
    assert not drafts.is_slow(1000)
    predictor.takes_s = 0.01
    assert await drafts.prepare(list(range(1, 2 * SLICE + 2)))
    assert drafts.is_slow(SLICE)
    found = await drafts.draw(list(range(1, SLICE + 1)))
    assert len(source.asked) == 1 + SLICE
    renewed = [draft for draft in found if draft.estimate.median > 2 + SLICE]
    assert 5 < len(renewed) < 20
