import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from consumers.batching.micro_batcher import MicroBatcher
from consumers.batching.samples import MicroBatch
from consumers.batching.settings import BatchingSettings
from tests.consumers.factories import training_sample

Shape = tuple[int, int]
shapes = st.tuples(st.integers(1, 6), st.integers(0, 40))


def offsets(batches: list[MicroBatch]) -> list[int]:
    return [ref.offset for batch in batches for ref in batch.refs]


def run(groups: list[list[Shape]], budget: int, lookahead: float) -> tuple[list[MicroBatch], list[MicroBatch]]:
    batcher = MicroBatcher(BatchingSettings(token_budget=budget, lookahead=lookahead))
    early: list[MicroBatch] = []
    number = 0
    for group in groups:
        items = []
        for prompt, tokens in group:
            items.append(training_sample(number, prompt=prompt, tokens=tokens))
            number += 1
        early += batcher.add(items)
    return early, batcher.flush()


@given(st.lists(st.lists(shapes, max_size=8), max_size=12), st.integers(1, 120), st.floats(1, 4))
def test_every_sample_is_in_exactly_one_micro_batch(groups: list[list[Shape]], budget: int, lookahead: float) -> None:
    early, rest = run(groups, budget, lookahead)
    assert sorted(offsets(early + rest)) == list(range(sum(map(len, groups))))
    for batch in early + rest:
        assert batch.input_ids.size <= budget or len(batch.refs) == 1


def test_a_sample_over_the_budget_stands_alone() -> None:
    early, rest = run([[(1, 3), (1, 30), (1, 3)]], budget=10, lookahead=1.0)
    assert sorted(len(batch.refs) for batch in early + rest) == [1, 2]


def test_full_micro_batches_come_before_the_batch_is_whole() -> None:
    early, rest = run([[(1, 4)] * 4] * 3, budget=20, lookahead=1.0)
    assert [len(batch.refs) for batch in early] == [4, 4]
    assert [len(batch.refs) for batch in rest] == [4]


def test_samples_of_similar_length_share_a_micro_batch() -> None:
    early, rest = run([[(1, 39), (1, 1)] * 4], budget=160, lookahead=4.0)
    assert early == []
    assert [batch.padding_share for batch in rest] == [0.0, 0.0]


def test_padding_stays_low_on_lengths_as_they_come() -> None:
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(4.5, 0.7, (64, 8)), 1, 1024).astype(int).tolist()
    for lookahead, limit in ((1.5, 0.30), (4.0, 0.15)):
        early, rest = run([[(20, tokens) for tokens in group] for group in lengths], 4096, lookahead)
        held = sum(batch.input_ids.size for batch in early + rest)
        padding = 1 - sum(batch.num_tokens for batch in early + rest) / held
        assert padding < limit, (lookahead, padding)


def test_the_cut_does_not_depend_on_anything_but_the_samples() -> None:
    groups = [[(1, 3), (1, 9), (1, 3)], [(1, 3), (1, 7)]]
    first, second = run(groups, 20, 1.0), run(groups, 20, 1.0)
    assert [offsets([batch]) for part in first for batch in part] == [
        offsets([batch]) for part in second for batch in part
    ]


def test_what_is_cleared_does_not_come_back() -> None:
    batcher = MicroBatcher(BatchingSettings(token_budget=100))
    assert batcher.add([training_sample(0)]) == []
    batcher.clear()
    assert batcher.flush() == []
