"""Micro-batches whose samples share prefixes: which samples, what counts, and how they are dealt."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.consumers.batching.dealing import deal_in_order, deal_rows
from streamrl.consumers.batching.micro_batches import MicroBatch, MicroBatcher, TrainingSample, collate
from streamrl.consumers.batching.settings import BatchingSettings
from streamrl.schemas.identifiers import group_id_of
from tests.consumers.factories import sample


@st.composite
def groups(draw: st.DrawFn) -> list[list[TrainingSample]]:
    """Groups of up to five samples; some prompts begin alike."""
    found = []
    for number in range(draw(st.integers(0, 6))):
        prompt = [7] * draw(st.integers(0, 10)) + [100 + number]
        completions = draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), min_size=1, max_size=5))
        found.append(group(number, prompt, completions))
    return found


def group(number: int, prompt: Sequence[int], completions: Sequence[Sequence[int]]) -> list[TrainingSample]:
    found = []
    for index, tokens in enumerate(completions):
        made = sample(f"d/{number}/0", index, of=len(completions), offset=100 * number + index, tokens=len(tokens))
        ids = {"prompt_token_ids": np.array(prompt, dtype="<i4"), "token_ids": np.array(tokens, dtype="<i4")}
        found.append(TrainingSample(replace(made, trajectory=made.trajectory.replace(**ids)), 1.0))
    return found


def computed(items: Sequence[TrainingSample]) -> int:
    """Distinct prefixes of the samples."""
    whole = [[*each.sample.trajectory.prompt_token_ids, *each.sample.trajectory.token_ids] for each in items]
    return len({tuple(each[:end]) for each in whole for end in range(1, len(each) + 1)})


def cut(found: list[list[TrainingSample]], budget: int, *, whole: bool, ranks: int) -> list[MicroBatch]:
    batcher = MicroBatcher(BatchingSettings(token_budget=budget), whole, ranks, "shared", lookahead=1.5)
    return [batch for each in found for batch in batcher.hold(each)] + batcher.flush()


@given(groups(), st.integers(1, 80), st.booleans(), st.integers(1, 3))
def test_every_sample_is_in_a_micro_batch_that_computes_no_more_than_the_budget(
    found: list[list[TrainingSample]], budget: int, whole: bool, ranks: int
) -> None:
    items = {each.sample.ref: each for group in found for each in group}
    batches = cut(found, budget, whole=whole, ranks=ranks)
    assert sorted(ref for batch in batches for ref in batch.refs) == sorted(items)
    for batch in batches:
        assert batch.num_positions == computed([items[ref] for ref in batch.refs])
        for share in deal_rows(batch, range(len(batch.refs)), ranks, "shared"):
            assert len(share) <= 1 or batch.take(share).num_positions <= max(budget, int(batch.lengths.max()))


@given(groups(), st.integers(1, 80), st.booleans())
def test_a_prompt_is_computed_once(found: list[list[TrainingSample]], budget: int, whole: bool) -> None:
    """Unless its samples alone exceed the budget; then it is computed once in each part."""
    batches = cut(found, budget, whole=whole, ranks=1)
    for number, members in enumerate(found):
        holding = [
            batch for batch in batches if f"d/{number}/0" in {group_id_of(ref.trajectory_id) for ref in batch.refs}
        ]
        assert len(holding) == 1 or computed(members) > budget


def test_a_group_above_the_budget_is_divided_by_samples() -> None:
    members = group(0, range(100, 120), [[index] * 5 for index in range(4)])
    batches = cut([members], 31, whole=False, ranks=1)
    assert [len(batch.refs) for batch in batches] == [2, 2]
    assert [batch.num_positions for batch in batches] == [30, 30]


def test_what_all_prompts_begin_with_counts_once() -> None:
    found = [group(number, [*range(50, 90), number], [[1, 2], [3, 4]]) for number in range(10)]
    (batch,) = cut(found, 40 + 10 * 5, whole=False, ranks=1)
    assert batch.num_positions == 90
    assert batch.num_tokens == 10 * 2 * 43


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=7), st.integers(1, 3))
def test_the_fullest_share_is_as_small_as_neighbours_allow(found: list[tuple[int, int]], ranks: int) -> None:
    lengths = [length for length, _ in found]
    shared = [
        0,
        *(min(common, *pair) for (_, common), pair in zip(found[1:], itertools.pairwise(lengths), strict=True)),
    ]

    def tokens(share: Sequence[int]) -> int:
        return sum(lengths[row] - (shared[row] if number else 0) for number, row in enumerate(share))

    dealt = deal_in_order(lengths, shared, ranks)
    assert [row for share in dealt for row in share] == list(range(len(found)))
    cuts = itertools.combinations_with_replacement(range(len(found) + 1), ranks - 1)
    ways = ([range(*ends) for ends in itertools.pairwise([0, *places, len(found)])] for places in cuts)
    assert max(map(tokens, dealt)) == min(max(map(tokens, way)) for way in ways)


@pytest.mark.parametrize("packing", ["varlen", "shared"])
def test_ranks_get_whole_groups_where_prefixes_are_shared(packing: str) -> None:
    found = [group(number, [number] * 30, [[1], [2, 2], [3, 3, 3]]) for number in range(2)]
    batch = collate([each for pair in zip(*found, strict=True) for each in pair], "shared")
    shares = deal_rows(batch, range(6), 2, packing)  # type: ignore[arg-type]
    numbers = [{batch.refs[row].trajectory_id[2] for row in share} for share in shares]
    assert numbers == ([{"0"}, {"1"}] if packing == "shared" else [{"0", "1"}] * 2)
