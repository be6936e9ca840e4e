import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streamrl.producers.prompts.columns import ARGUMENTS
from streamrl.producers.rewards.child import MAX_REASON, bind, reason_of, reward_in

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner),
)


@given(ANYTHING)
def test_every_returned_value_gives_a_finite_reward_or_none(returned: object) -> None:
    reward, reason = reward_in(returned)
    assert reward is None or (isinstance(reward, float) and np.isfinite(reward) and reason is None)
    assert reason is None or "\n" not in reason


def test_arrays_and_numpy_scalars_are_numbers() -> None:
    assert reward_in(np.array([0.5])) == (0.5, None)
    assert reward_in([np.float32(0.5)]) == (0.5, None)
    assert reward_in((np.int64(2),)) == (2.0, None)


def test_an_error_that_cannot_be_shown_still_has_a_name() -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert reason_of(Unprintable()) == "Unprintable"


def test_a_reason_is_one_bounded_line() -> None:
    reason = reason_of(ValueError("line\n" * 10_000))
    assert len(reason) <= MAX_REASON
    assert "\n" not in reason


def test_columns_may_have_no_name_of_an_argument_that_a_function_gets_anyway() -> None:
    passed = dict[str, object]()

    def reward(**arguments: object) -> list[float]:
        passed.update(arguments)
        return [0.0]

    bind(reward, "tests:reward")({"prompt": "2 + 2", "text": "4", "ids": b"", "columns": {"answer": "4"}})
    assert set(passed) - {"answer"} == set(ARGUMENTS)
