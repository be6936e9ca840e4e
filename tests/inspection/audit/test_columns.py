import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streamrl.bus.port import Record
from streamrl.inspection.audit.columns import NameTable, keys_of, position_of
from streamrl.inspection.audit.index import ordered_ids_of
from streamrl.schemas.codec import encode, headers_of
from tests.inspection.test_auditing import order


def test_the_ordered_names_are_those_of_the_order() -> None:
    message = order("d/7/1", 0, 5)
    for value, names in ((encode(message), ["d/7/1/0", "d/7/1/5"]), (b"junk", [])):
        assert ordered_ids_of(Record("t", 0, 0, None, value, headers_of(message), 0.0)) == names


@given(st.lists(st.none() | st.text(min_size=1, max_size=12).filter(lambda text: "\ud800" not in text)))
def test_names_come_back_as_they_were(names: list[str | None]) -> None:
    kept = NameTable()
    for name in names:
        kept.append(name)
    assert [kept[index] for index in range(len(names))] == names
    assert len({int(number) for number in kept.hashes()}) == len(set(names))


@given(st.integers(0, 10_000), st.integers(0, 2**43))
def test_a_place_comes_back_from_its_number(partition: int, offset: int) -> None:
    (key,) = keys_of(np.array([partition]), np.array([offset]))
    assert position_of(int(key)) == (partition, offset)
