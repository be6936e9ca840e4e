import pytest

from streamrl.consumers.ingest.opening import first_wanted
from streamrl.consumers.ingest.settings import IngestSettings, offsets_in

HELD = {0: (10, 50), 1: (0, 0), 2: (5, 9)}


@pytest.mark.parametrize(
    ("begin", "wanted"),
    [
        ("beginning", {0: 10, 1: 0, 2: 5}),
        ("now", {0: 50, 1: 0, 2: 9}),
        ("0=20,2=7", {0: 20, 1: 0, 2: 7}),
        ("0=20", {0: 20, 1: 0, 2: 5}),
        ("0=3,1=4,2=1000,7=1", {0: 10, 1: 0, 2: 9}),
    ],
)
def test_reading_begins_within_what_is_held(begin: str, wanted: dict[int, int]) -> None:
    assert IngestSettings(attach_from=begin).attach_from == begin
    assert first_wanted(begin, HELD) == wanted


@pytest.mark.parametrize("begin", ["", "later", "0", "0=", "=3", "0=-1", "0=1;1=2", "0=1,0=2", "0=٣"])
def test_an_invalid_start_of_an_instance_is_refused(begin: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        IngestSettings(attach_from=begin)
    with pytest.raises(ValueError, match="expected"):
        offsets_in(begin)
