"""The tokens to compute where sequences share prefixes (``training.packing = "shared"``), and what each of them sees.

The sequences form a trie, for example a prompt with a branch for each completion. The code needs no nodes: it sorts
the sequences by their tokens. Then each sequence shares its longest prefix with the previous sequence, and adds the
tokens after that prefix, its *piece*. The pieces follow each other in one row. A *place* is an index in that row.
Knows no torch.

Invariants:
- a_shared_token_is_computed_once: the pieces together have one token for each distinct prefix of the sequences;
- a_token_sees_its_own_sequence_only: a token sees itself, the tokens before it in its piece, and the shared tokens
  before its piece.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
_ID = np.dtype(">u4")
"""Token ids in big-endian order, so that sequences sort as their bytes do."""


def sequence_key(token_ids: NDArray[np.integer]) -> bytes:
    """Bytes that sort in the same order as the sequences: token by token, and a prefix before its continuations."""
    return token_ids.astype(_ID).tobytes()


def shared_tokens(keys: Sequence[bytes]) -> Integers:
    """For each sequence, the length of the prefix that it shares with the previous one; 0 for the first. int64 [N]."""
    return np.array([0, *(_common(*pair) for pair in pairwise(keys))][: len(keys)], dtype=np.int64)


def _common(one: bytes, other: bytes) -> int:
    count = min(len(one), len(other)) // _ID.itemsize
    differs = np.frombuffer(one, _ID, count) != np.frombuffer(other, _ID, count)
    return int(differs.argmax()) if differs.any() else count


class TokenOrder(NamedTuple):
    """Rows sorted by their tokens, and for each row the number of tokens that it shares with the previous one."""

    rows: Integers
    shared: Integers


def token_order(input_ids: Integers, lengths: Integers) -> TokenOrder:
    """The order of right-padded rows, ``input_ids`` [B, S] with ``lengths`` [B]; equal rows keep their order."""
    keys = [sequence_key(ids[:length]) for ids, length in zip(input_ids, lengths.tolist(), strict=True)]
    rows = sorted(range(len(keys)), key=keys.__getitem__)
    return TokenOrder(np.array(rows, dtype=np.int64), shared_tokens([keys[row] for row in rows]))


class Reading(NamedTuple):
    """The tokens at places ``first`` to ``last`` (exclusive) see those at ``seen_first`` to ``seen_last`` (exclusive).

    If both ranges are the same, each token sees itself and the ones before it. Otherwise each sees all of the second.
    """

    first: int
    last: int
    seen_first: int
    seen_last: int

    @property
    def is_causal(self) -> bool:
        """Whether both ranges are the same."""
        return self.first == self.seen_first


class SeparateRows(NamedTuple):
    """The sequences of a tree each by itself: N rows of S tokens, right-padded; only those with a token of their own.

    ``places``: the place of every token, int64 [N * S], 0 for padding. ``own``: for each place of the tree, the index
    in ``places`` where its row has it, int64 [T]. ``shape``: (N, S).
    """

    places: Integers
    own: Integers
    shape: tuple[int, int]


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """The T tokens to compute, at places 0 to T - 1 of one row.

    ``row``, ``column``: where the token of each place is in the input, int64 [T]. ``places``: the place of every token
    of every sequence, int64 [B, S]; 0 for padding. ``ends``: the token at place p is seen from the places p to
    ``ends[p]`` - 1, int64 [T]. ``readings``: the same in blocks; first each piece with itself, then the shared parts of
    earlier pieces.
    """

    row: Integers
    column: Integers
    places: Integers
    ends: Integers
    readings: tuple[Reading, ...]

    @cached_property
    def separate(self) -> SeparateRows:
        """The rows that compute the same without sharing."""
        is_next = np.diff(self.row, prepend=self.row[0]) != 0  # each row's own tokens follow each other
        numbers = np.cumsum(is_next)
        rows = self.row[np.append(0, np.flatnonzero(is_next))]
        width = int(self.column.max()) + 1  # a row's last own token is its last one
        return SeparateRows(self.places[rows, :width].reshape(-1), numbers * width + self.column, (len(rows), width))


@dataclass
class _Part:
    """``count`` tokens of the present sequence: the first is in ``column`` and at ``place``.

    ``piece_end``: the place after the last token of their piece.
    """

    column: int
    place: int
    count: int
    piece_end: int


def prefix_tree(input_ids: Integers, lengths: Integers) -> PrefixTree:
    """The tree of right-padded rows, ``input_ids`` [B, S] with ``lengths`` [B], not all of them 0."""
    order = token_order(input_ids, lengths)
    added = lengths[order.rows] - order.shared  # tokens of each piece; 0: the sequence equals the previous one
    total = int(added.sum())
    places = np.zeros(input_ids.shape, dtype=np.int64)
    ends = np.full(total, total, dtype=np.int64)
    own, shared_parts = list[Reading](), list[Reading]()
    path: list[_Part] = []  # the present sequence, from its first token to its last
    place, before = 0, order.rows[0]
    for row, shared, count in zip(order.rows.tolist(), order.shared.tolist(), added.tolist(), strict=True):
        shared_parts += _leave(path, shared, place, ends)
        places[row, :shared] = places[before, :shared]
        places[row, shared : shared + count] = np.arange(place, place + count)
        if count:
            path.append(_Part(shared, place, count, place + count))
            own.append(Reading(place, place + count, place, place + count))
        place, before = place + count, row
    shared_parts += _leave(path, 0, place, ends)
    columns = [np.arange(first, first + count) for first, count in zip(order.shared, added, strict=True)]
    return PrefixTree(
        row=np.repeat(order.rows, added),
        column=np.concatenate(columns),
        places=places,
        ends=ends,
        readings=(*own, *shared_parts),
    )


def _leave(path: list[_Part], column: int, place: int, ends: Integers) -> list[Reading]:
    """Remove the path from ``column`` on, which the tokens from ``place`` on do not see.

    Returns the readings of the removed parts.
    """
    readings = []
    while path and (last := path[-1]).column + last.count > column:
        kept = max(column - last.column, 0)
        first, end = last.place + kept, last.place + last.count
        ends[first:end] = place
        if place > last.piece_end:
            readings.append(Reading(last.piece_end, place, first, end))
        if kept:
            last.count = kept
        else:
            path.pop()
    return readings
