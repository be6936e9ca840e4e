import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streamrl.producers.lengths.learned.features import ROW_WIDTH, SHOWN_CHARACTERS, text_features
from streamrl.schemas.trajectories import ChatTurn, Prompt


def _prompt(content: str | tuple[ChatTurn, ...], dataset: str = "a") -> Prompt:
    return Prompt(prompt_id="p", dataset=dataset, content=content)


@given(st.text(max_size=200))
def test_any_text_becomes_finite_numbers_of_one_width(text: str) -> None:
    row = text_features(_prompt(text))
    assert row.shape == (ROW_WIDTH,)
    assert row.dtype == np.float32
    assert np.isfinite(row).all()
    assert np.array_equal(row, text_features(_prompt(text)))


def test_endless_numbers_are_numbers_too() -> None:
    assert np.isfinite(text_features(_prompt("9" * 10_000))).all()


def test_size_numbers_turns_and_data_set_all_tell_prompts_apart() -> None:
    rows = [
        text_features(prompt)
        for prompt in (
            _prompt("add 3 and 4"),
            _prompt("add 3 and 5"),
            _prompt("add 3 and 4", "b"),
            _prompt((ChatTurn(role="system", content="add 3"), ChatTurn(role="user", content="and 4"))),
        )
    ]
    assert len({row.tobytes() for row in rows}) == 4


def test_the_beginning_and_the_end_of_a_very_long_text_are_read() -> None:
    middle = "x" * SHOWN_CHARACTERS
    plain, first, last = (text_features(_prompt(text)) for text in (f"a{middle}b", f"7{middle}b", f"a{middle}7"))
    assert not np.array_equal(plain, first)
    assert not np.array_equal(plain, last)
