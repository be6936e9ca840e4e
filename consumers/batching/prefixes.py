"""The tokens to compute where sequences share prefixes (``training.packing = "shared"``), and what each of them sees.

The sequences form a trie: a prompt, with a branch for each completion, or the turns of several sessions. It needs no
nodes. Sorted by their tokens, sequences with a common prefix are neighbours, so each sequence shares its longest prefix
with the one before it. It adds the tokens after that prefix, its *piece*. The pieces follow each other in one row.
Knows no torch.

Invariants:
- a_shared_token_is_computed_once: the pieces together have one token for each distinct prefix of the sequences;
- a_token_sees_its_own_sequence_only: the tokens before it in its piece, and the shared ones before its piece.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
_ID = np.dtype(">u4")
"""Token ids in big-endian order, so that sequences sort as their bytes do."""


def sequence_key(token_ids: NDArray[np.integer]) -> bytes:
    """Bytes that sort as the sequence does, a prefix before what it begins."""
    return token_ids.astype(_ID).tobytes()


def shared_tokens(keys: Sequence[bytes]) -> Integers:
    """For each sequence, how many tokens it begins with are those of the one before it; 0 for the first. int64 [N]."""
    return np.array([0, *(_common(*pair) for pair in pairwise(keys))][: len(keys)], dtype=np.int64)


def _common(one: bytes, other: bytes) -> int:
    count = min(len(one), len(other)) // _ID.itemsize
    differs = np.frombuffer(one, _ID, count) != np.frombuffer(other, _ID, count)
    return int(differs.argmax()) if differs.any() else count


class TokenOrder(NamedTuple):
    """Rows sorted by their tokens, and for each of them the tokens that it shares with the one before it."""

    rows: Integers
    shared: Integers


def token_order(input_ids: Integers, lengths: Integers) -> TokenOrder:
    """The order of right-padded rows, ``input_ids`` [B, S] with ``lengths`` [B]; equal rows stay as they are."""
    keys = [sequence_key(ids[:length]) for ids, length in zip(input_ids, lengths.tolist(), strict=True)]
    rows = sorted(range(len(keys)), key=keys.__getitem__)
    return TokenOrder(np.array(rows, dtype=np.int64), shared_tokens([keys[row] for row in rows]))


class Reading(NamedTuple):
    """Tokens ``first`` to ``last`` (exclusive) see the tokens ``seen_first`` to ``seen_last``.

    If both are the same, each sees itself and the ones before it; otherwise each sees all.
    """

    first: int
    last: int
    seen_first: int
    seen_last: int

    @property
    def is_causal(self) -> bool:
        """Whether the tokens see each other."""
        return self.first == self.seen_first


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """The T tokens that are computed, as places 0 to T - 1 of one row.

    ``row``, ``column``: where each is taken from, int64 [T]. ``places``: the place of every token of every sequence,
    int64 [B, S]; undefined for padding. ``ends``: a token is seen by itself and by the later ones before this place,
    int64 [T]. ``readings``: the same in blocks, first each piece in itself, and then shared parts of earlier pieces.
    """

    row: Integers
    column: Integers
    places: Integers
    ends: Integers
    readings: tuple[Reading, ...]


@dataclass
class _Part:
    """Tokens of the present sequence, the first in ``column`` and at ``place``; their piece ends at ``piece_end``."""

    column: int
    place: int
    count: int
    piece_end: int


def prefix_tree(input_ids: Integers, lengths: Integers) -> PrefixTree:
    """The tree of right-padded rows, ``input_ids`` [B, S] with ``lengths`` [B], at least one of which is not 0."""
    order = token_order(input_ids, lengths)
    added = lengths[order.rows] - order.shared  # tokens of each piece; 0: the sequence begins the one before it
    total = int(added.sum())
    places = np.zeros(input_ids.shape, dtype=np.int64)
    ends = np.full(total, total, dtype=np.int64)
    own, shared_parts = list[Reading](), list[Reading]()
    path: list[_Part] = []  # of the present sequence, from its first token to its last
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
    """Cut the path at ``column``, because tokens from ``place`` on see no more of it; returns who has seen the rest."""
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
