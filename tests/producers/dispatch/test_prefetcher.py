import itertools

from streamrl.producers.dispatch.dispatcher import SLICE, PromptPrefetcher
from streamrl.producers.lengths.buckets import Buckets
from streamrl.producers.lengths.predictor import ObservedCompletion
from streamrl.schemas.trajectories import LengthEstimate, Prompt
from tests.producers.dispatch.dispatcher_harness import CountedSource


class _Counting:
    """Each estimate is one longer than the last, and takes its time."""

    buckets = Buckets((100,))

    learns_from_the_past = False

    def __init__(self) -> None:
        self.calls = itertools.count(1)
        self.now, self.takes_s = 0.0, 0.0

    def predict(self, prompt: Prompt, group_id: str = "") -> LengthEstimate:
        self.now += self.takes_s
        length = next(self.calls)
        return LengthEstimate(median=length, upper=length, bucket=0, predictor="counting")

    def observe(self, completion: ObservedCompletion) -> None:
        """Nothing to learn."""


def _prefetcher(predictor: _Counting, source: CountedSource) -> PromptPrefetcher:
    return PromptPrefetcher(source, predictor, lambda: predictor.now, lambda: None)


async def test_pending_prompts_name_their_group_and_carry_an_estimate() -> None:
    pending = await _prefetcher(_Counting(), CountedSource(size=10)).draw([3, 12])
    assert [(one.position, one.group_id) for one in pending] == [(3, "toy/3/0"), (12, "toy/2/1")]


async def test_prefetched_prompts_are_read_once_and_estimated_again() -> None:
    predictor, source = _Counting(), CountedSource()
    prefetcher = _prefetcher(predictor, source)
    assert not await prefetcher.prepare([0, 1])
    found = await prefetcher.draw([0, 1, 2])
    assert source.asked == [0, 1, 2]
    assert [one.estimate.median for one in found] == [4, 5, 6]


async def test_a_slow_predictor_is_asked_ahead_and_not_again_for_all() -> None:
    predictor, source = _Counting(), CountedSource()
    prefetcher = _prefetcher(predictor, source)
    await prefetcher.draw([0])
    assert not prefetcher.is_slow(1000)
    predictor.takes_s = 0.01
    assert await prefetcher.prepare(list(range(1, 2 * SLICE + 2)))
    assert prefetcher.is_slow(SLICE)
    found = await prefetcher.draw(list(range(1, SLICE + 1)))
    assert len(source.asked) == 1 + SLICE
    renewed = [one for one in found if one.estimate.median > 2 + SLICE]
    assert 5 < len(renewed) < 20
