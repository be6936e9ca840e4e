from typing import Any

import pytest

from streamrl.consumers.ingest.filters import CircuitBreaker
from streamrl.consumers.ingest.limits import IntakeLimits
from streamrl.schemas.errors import BadInput
from streamrl.schemas.reports import SkipReason
from streamrl.schemas.trajectories import FinishReason
from tests.consumers.ingest.reader_harness import ReaderHarness, next_group


def breaker(max_consecutive: int = 50, max_share: float = 0.01) -> CircuitBreaker:
    return CircuitBreaker("undecodable records", max_consecutive, max_share, "correct them")


def test_more_than_the_allowed_number_in_a_row_trips_it() -> None:
    found = breaker(3)
    for _ in range(3):
        found.failed("x")
    with pytest.raises(BadInput, match="undecodable records, got 4 in a row"):
        found.failed("x")


def test_a_good_record_ends_the_row() -> None:
    found = breaker(3)
    for _ in range(20):
        found.failed("x")
        found.good()


def test_a_share_is_judged_only_from_a_hundred_records_on() -> None:
    found = breaker()
    for number in range(98):
        found.good() if number % 8 else found.failed("x")
    with pytest.raises(BadInput, match="the latest: p/0/0: bad"):
        for _ in range(2):
            found.failed("p/0/0: bad")


def test_a_few_faults_are_no_share_however_few_records_there_are() -> None:
    found = breaker()
    for number in range(200):
        found.good() if number % 20 else found.failed("x")
    assert found.bad == 10
    with pytest.raises(BadInput, match="11 among the last 201"):
        found.failed("x")


def test_one_in_a_hundred_is_allowed_and_old_faults_are_forgotten() -> None:
    found = breaker()
    for number in range(5000):
        found.failed("x") if number % 100 == 99 else found.good()
    assert found.bad == 10
    for _ in range(1000):
        found.good()
    assert found.bad == 0


REFUSED: dict[str, Any] = {
    "finish_reason": FinishReason.ABORT,
    "refusal": "longer than 7 tokens",
    "reward_errors": {"exact": "expected a prompt of 1 to 7 tokens, got 9"},
    "tokens": 0,
}


async def test_refused_prompts_are_skipped_by_that_name_and_all_of_them_end_the_trainer() -> None:
    """In a row, by prompts and not by samples; nothing of the last one is left without an outcome."""
    harness = ReaderHarness()
    reader = harness.reader(limits=IntakeLimits(max_consecutive_faults=5))
    async with harness.running(reader):
        for number in range(6):
            await harness.publish_group(number, **REFUSED)
        with pytest.raises(BadInput) as ended:
            await next_group(reader)
    assert str(ended.value).startswith(
        "expected few refused prompts, got 6 in a row and 6 among the last 6, the latest: longer than 7 tokens: prompt "
        "d/5: expected a prompt of 1 to 7 tokens, got 9; correct the prompts or the model"
    )
    assert [row.reason for row in harness.skips()] == [SkipReason.REFUSED] * 12
    assert reader.ledger.counts().pending == 0


async def test_a_share_of_refused_prompts_lets_the_others_be_trained_until_hardly_any_is_left() -> None:
    harness, taken = ReaderHarness(), 0
    reader = harness.reader(limits=IntakeLimits(max_refused_share=0.8))
    async with harness.running(reader):
        for number in range(160):
            await harness.publish_group(number, **({} if number % 4 == 0 else REFUSED))
        for _ in range(40):
            reader.ledger.mark_skipped(await next_group(reader), SkipReason.FILTERED, "taken")
            taken += 1
        for number in range(160, 300):
            await harness.publish_group(number, **({} if number % 20 == 0 else REFUSED))
        with pytest.raises(BadInput, match=r"refused prompts, got \d+ in a row and \d+ among the last 2"):
            while True:
                reader.ledger.mark_skipped(await next_group(reader), SkipReason.FILTERED, "taken")
    assert taken == 40
