"""The tree of sequences that share prefixes: which tokens it has, and what each sees."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streamrl.consumers.batching.prefixes import Integers, prefix_tree, token_order

sequences = st.lists(st.lists(st.integers(0, 2), max_size=8), min_size=1, max_size=8).filter(any)
"""Of so few tokens that most share prefixes, and some are equal."""


def padded(found: list[list[int]]) -> tuple[Integers, Integers]:
    lengths = np.array([len(each) for each in found], dtype=np.int64)
    ids = np.full((len(found), int(lengths.max())), 9, dtype=np.int64)
    for row, each in enumerate(found):
        ids[row, : len(each)] = each
    return ids, lengths


@given(sequences)
def test_a_shared_token_is_computed_once(found: list[list[int]]) -> None:
    ids, lengths = padded(found)
    tree = prefix_tree(ids, lengths)
    prefixes = [tuple(found[row][: column + 1]) for row, column in zip(tree.row, tree.column, strict=True)]
    assert len(set(prefixes)) == len(prefixes)
    assert set(prefixes) == {tuple(each[:end]) for each in found for end in range(1, len(each) + 1)}
    for row, each in enumerate(found):
        assert [prefixes[place] for place in tree.places[row, : len(each)]] == [
            tuple(each[: end + 1]) for end in range(len(each))
        ]
    order = token_order(ids, lengths)
    assert int((lengths[order.rows] - order.shared).sum()) == len(prefixes)


@given(sequences)
def test_a_token_sees_its_own_sequence_only(found: list[list[int]]) -> None:
    tree = prefix_tree(*padded(found))
    prefixes = [tuple(found[row][: column + 1]) for row, column in zip(tree.row, tree.column, strict=True)]
    expected = np.array([[own[: len(other)] == other for other in prefixes] for own in prefixes], dtype=int)
    # Counted, since a token that is seen twice would have twice its weight.
    seen = np.zeros_like(expected)
    for reading in tree.readings:
        first, last, seen_first, seen_last = reading
        seen[first:last, seen_first:seen_last] += np.tri(last - first, dtype=int) if reading.is_causal else 1
    assert np.array_equal(seen, expected)
    places = np.arange(len(prefixes))
    by_ends = (places <= places[:, None]) & (places[:, None] < tree.ends)
    assert np.array_equal(by_ends, expected)


def test_a_group_is_read_along_its_prompt_once() -> None:
    prompt = list(range(100, 110))
    tree = prefix_tree(*padded([[*prompt, 1, 2, 3], [*prompt, 4], [*prompt, 5, 6]]))
    assert tree.readings == ((0, 13, 0, 13), (13, 14, 13, 14), (14, 16, 14, 16), (13, 16, 0, 10))


@given(sequences)
def test_separate_rows_have_each_sequence_whole_and_each_place_once(found: list[list[int]]) -> None:
    tree = prefix_tree(*padded(found))
    places, own, (count, width) = tree.separate
    prefixes = [tuple(found[row][: column + 1]) for row, column in zip(tree.row, tree.column, strict=True)]
    assert np.array_equal(places[own], np.arange(len(prefixes)))
    by_row = places.reshape(count, width)
    for row, column in zip(*np.divmod(own, width), strict=True):
        whole = prefixes[by_row[row, column]]
        assert [prefixes[place] for place in by_row[row, : column + 1]] == [
            whole[: end + 1] for end in range(len(whole))
        ]
