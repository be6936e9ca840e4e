from collections import Counter

import pytest

from streamrl.consumers.ingest.rejections import SkipTally
from streamrl.schemas.reports import SkipReason, SkipRecord
from tests.fakes.messages import skip_record


def row(
    sequence: int, *, lineage: int = 1, offset: int = 7, end_offset: int | None = None, **changes: str
) -> SkipRecord:
    reason = SkipReason.STALE if end_offset is None else SkipReason.RETENTION_EXPIRED
    numbers = {"end_offset": end_offset, "step": 3, "lineage": lineage, "sequence": sequence}
    return skip_record(offset, trajectory_id="d/0/0/0", group_id="d/0/0", reason=reason, **numbers, **changes)


def tallied(*rows: SkipRecord) -> SkipTally:
    tally = SkipTally(1)
    for found in rows:
        tally.add(found)
    return tally


def test_a_row_has_one_number() -> None:
    tally = tallied(row(1))
    assert tally.next_sequence == 2
    with pytest.raises(AssertionError):
        tally.add(row(1))


def test_the_hash_depends_on_order_and_places_and_not_on_the_wording() -> None:
    first, second = row(1, offset=1), row(2, offset=2)
    assert tallied(first, second).hash == tallied(row(1, offset=1, detail="else"), second).hash
    assert tallied(first, second).hash != tallied(row(1, offset=2), row(2, offset=1)).hash
    assert len(tallied(first).hash) == 32


def test_a_range_counts_for_all_of_its_records() -> None:
    assert tallied(row(1), row(2, offset=10, end_offset=15)).reasons == Counter(stale=1, retention_expired=5)


def test_the_next_lineage_counts_from_zero_and_continues_the_hash() -> None:
    parent = tallied(row(1))
    child = parent.for_next_lineage(2)
    child.add(row(1, lineage=2))
    assert (child.count, child.reasons["stale"], parent.reasons["stale"]) == (1, 2, 1)
    assert child.hash not in (parent.hash, SkipTally(2).hash)
