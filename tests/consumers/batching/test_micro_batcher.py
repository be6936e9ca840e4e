from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streamrl.consumers.batching.micro_batches import MicroBatch, MicroBatcher
from streamrl.consumers.batching.settings import BatchingSettings
from tests.consumers.factories import training_sample

Shape = tuple[int, int]
shapes = st.tuples(st.integers(1, 6), st.integers(0, 40))
FULL: dict[str, Any] = {"fixed_cost_fraction": 0.9}
"""Padding hardly matters: micro-batches are as full as they can be."""


def offsets(batches: list[MicroBatch]) -> list[int]:
    return [ref.offset for batch in batches for ref in batch.refs]


def run(
    groups: list[list[Shape]], budget: int, lookahead: float = 1.0, *, whole: bool = False, **changes: Any
) -> tuple[list[MicroBatch], list[MicroBatch]]:
    batcher = MicroBatcher(BatchingSettings(token_budget=budget), whole, lookahead=lookahead, **changes)
    early: list[MicroBatch] = []
    number = 0
    for group in groups:
        items = []
        for prompt, tokens in group:
            items.append(training_sample(number, prompt=prompt, tokens=tokens))
            number += 1
        early += batcher.hold(items)
    return early, batcher.flush()


def padding_of(batches: list[MicroBatch]) -> float:
    return 1 - sum(batch.num_tokens for batch in batches) / sum(batch.input_ids.size for batch in batches)


@given(st.lists(st.lists(shapes, max_size=8), max_size=12), st.integers(1, 120), st.floats(1, 4), st.booleans())
def test_every_sample_is_in_exactly_one_micro_batch(
    groups: list[list[Shape]], budget: int, lookahead: float, whole: bool
) -> None:
    early, rest = run(groups, budget, lookahead, whole=whole)
    assert sorted(offsets(early + rest)) == list(range(sum(map(len, groups))))
    for batch in early + rest:
        assert batch.input_ids.size <= budget or len(batch.refs) == 1


def test_a_sample_over_the_budget_is_a_micro_batch_of_its_own() -> None:
    early, rest = run([[(1, 3), (1, 30), (1, 3)]], budget=10, **FULL)
    assert sorted(len(batch.refs) for batch in early + rest) == [1, 2]


def test_full_micro_batches_come_before_the_batch_is_whole() -> None:
    early, rest = run([[(1, 4)] * 4] * 3, budget=20, **FULL)
    assert [len(batch.refs) for batch in early] == [4, 4]
    assert [len(batch.refs) for batch in rest] == [4]


def test_whole_batches_are_cut_only_when_all_of_it_is_there() -> None:
    early, rest = run([[(1, 4)] * 4] * 3, budget=20, whole=True, **FULL)
    assert early == []
    assert [len(batch.refs) for batch in rest] == [4, 4, 4]


def test_samples_of_similar_length_share_a_micro_batch() -> None:
    early, rest = run([[(1, 39), (1, 1)] * 4], budget=160, lookahead=4.0)
    assert early == []
    assert [batch.num_tokens for batch in rest] == [batch.input_ids.size for batch in rest]


def test_padding_stays_low_on_lengths_as_they_come() -> None:
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(6.9, 1.0, (256, 8)), 1, 10_000).astype(int).tolist()
    for budget, limit in ((16_384, 0.055), (32_768, 0.05)):
        early, rest = run([[(20, tokens) for tokens in group] for group in lengths], budget, lookahead=4.0)
        assert padding_of(early + rest) < limit, budget


def test_the_cut_does_not_depend_on_anything_but_the_samples() -> None:
    groups = [[(1, 3), (1, 9), (1, 3)], [(1, 3), (1, 7)]]
    first, second = run(groups, 20, 1.0), run(groups, 20, 1.0)
    assert [offsets([batch]) for part in first for batch in part] == [
        offsets([batch]) for part in second for batch in part
    ]


def test_a_trainer_with_nothing_to_do_gets_what_is_held_from_one_budget_on() -> None:
    batcher = MicroBatcher(BatchingSettings(token_budget=20), lookahead=4.0, fixed_cost_fraction=0.9)
    batcher.hold([training_sample(number, prompt=1, tokens=4) for number in range(3)])
    assert batcher.cut_for_idle() is None
    batcher.hold([training_sample(number, prompt=1, tokens=4) for number in range(3, 5)])
    batch = batcher.cut_for_idle()
    assert batch is not None
    assert len(batch.refs) == 4
    assert batcher.cut_for_idle() is None
    assert sorted(offsets([batch, *batcher.flush()])) == [0, 1, 2, 3, 4]


def test_a_whole_batch_is_not_begun_because_the_trainer_is_idle() -> None:
    batcher = MicroBatcher(BatchingSettings(token_budget=20), whole_batches=True)
    batcher.hold([training_sample(number, prompt=1, tokens=4) for number in range(9)])
    assert batcher.cut_for_idle() is None


def test_cleared_samples_do_not_come_back() -> None:
    batcher = MicroBatcher(BatchingSettings(token_budget=100))
    assert batcher.hold([training_sample(0)]) == []
    batcher.clear()
    assert batcher.flush() == []
