import gc
from collections.abc import Iterator

import pytest

from inspection.host import settle_collector


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


class Knot:
    def __init__(self) -> None:
        self.me = self


def test_what_is_built_is_left_alone_and_later_cycles_are_still_found() -> None:
    kept = Knot()
    settle_collector()
    assert gc.get_freeze_count() > 0
    assert gc.isenabled()
    later = Knot()
    later_id = id(later)
    assert any(id(each) == later_id for each in gc.get_objects())
    del later
    assert gc.collect() > 0
    assert kept.me is kept
