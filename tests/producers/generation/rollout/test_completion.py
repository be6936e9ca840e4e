from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.generation.engines.port import TokenDelta
from producers.generation.rollout import SampledCompletion
from schemas.errors import EngineError
from schemas.identifiers import PolicyVersion
from schemas.trajectories import FinishReason

DELTAS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-100, 0, width=32)), max_size=5), st.integers(0, 2)
    )
)


@given(DELTAS)
def test_spans_tile_the_completion_and_name_the_version_of_every_token(
    deltas: list[tuple[list[tuple[int, float]], int]],
) -> None:
    completion, expected = SampledCompletion(), []
    for tokens, number in deltas:
        version = PolicyVersion(1, number)
        completion.extend(TokenDelta([token for token, _ in tokens], [logprob for _, logprob in tokens], version))
        expected += [(token, logprob, version) for token, logprob in tokens]
    token_ids, logprobs = completion.arrays()
    assert (token_ids.dtype, logprobs.dtype) == (np.int32, np.float32)
    assert token_ids.tolist() == [token for token, _, _ in expected]
    assert logprobs.tolist() == [logprob for _, logprob, _ in expected]
    spans = completion.version_spans()
    assert [span.version for span in spans for _ in range(span.start, span.end)] == [
        version for *_, version in expected
    ]
    assert all(before.version != after.version for before, after in pairwise(spans))


def test_the_last_delta_may_be_empty_and_ends_the_completion() -> None:
    completion = SampledCompletion()
    completion.extend(TokenDelta([1], [-0.5], PolicyVersion(1, 0)))
    completion.extend(TokenDelta([], [], PolicyVersion(1, 1), FinishReason.LENGTH))
    assert completion.finish_reason is FinishReason.LENGTH
    assert [span.version.number for span in completion.version_spans()] == [0]


@pytest.mark.parametrize(
    ("token_ids", "logprobs"), [([1, 2], [-0.5]), ([2**31], [-0.5]), (["a"], [-0.5]), ([1], [None])]
)
def test_what_is_no_run_of_tokens_is_an_engine_error(token_ids: list[int], logprobs: list[float]) -> None:
    with pytest.raises(EngineError):
        SampledCompletion().extend(TokenDelta(token_ids, logprobs, PolicyVersion(1, 0)))
