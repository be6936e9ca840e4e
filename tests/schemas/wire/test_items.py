import contextlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.schemas.codec import refuse_too_many_items
from streamrl.schemas.errors import FrameTooLarge

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=40) | st.binary(),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=5), inner, max_size=20),
    max_leaves=60,
)


def count(value: object) -> int:
    match value:
        case list():
            return 1 + sum(map(count, value))
        case dict():
            return 1 + sum(1 + count(inner) for inner in value.values())
    return 1


@given(VALUES)
def test_as_many_values_as_allowed_pass_and_one_more_is_refused(value: object) -> None:
    data = msgpack.packb(value)
    refuse_too_many_items(data, count(value))
    with pytest.raises(FrameTooLarge):
        refuse_too_many_items(data, count(value) - 1)


def test_the_announced_length_of_a_list_is_checked_before_its_items() -> None:
    with pytest.raises(FrameTooLarge):
        refuse_too_many_items(b"\xdc\x10\x00" + bytes(5000), 1000)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_msgpack_raise_what_the_codec_expects(data: bytes) -> None:
    with contextlib.suppress(ValueError, IndexError, msgpack.UnpackException, FrameTooLarge):
        refuse_too_many_items(data, 50)
