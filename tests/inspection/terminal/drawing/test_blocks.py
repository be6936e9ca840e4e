import pytest
from rich.cells import cell_len
from rich.text import Text

from streamrl.inspection.terminal.drawing import (
    bar,
    coloured,
    columns_of,
    first_that_fits,
    fitted,
    lines,
    resampled,
    short,
)
from streamrl.schemas.plain_text import plain_text


def test_every_line_fits_its_width() -> None:
    for text in ("abc", "a much longer text", "漢字かな交じり", ""):
        for width in range(12):
            assert cell_len(fitted(text, width)) == width
            drawn = lines([Text(text), Text(text)], width, 1)
            assert all(cell_len(line) <= width for line in drawn.plain.split("\n"))


@pytest.mark.parametrize(
    ("value", "told"),
    [(None, "–"), (float("nan"), "–"), (0.0, "0"), (0.1234, "0.123"), (1.5, "1.50"), (12.34, "12.3"), (1234.0, "1234"),
     (12_345.0, "12k"), (3_400_000.0, "3.4M"), (0.0001, "1e-04"), (-2.5, "-2.50")],
)  # fmt: skip
def test_numbers_are_short(value: float | None, told: str) -> None:
    assert short(value) == told
    assert len(told) <= 6


def test_a_bar_fills_its_share_and_a_tiny_share_is_visible() -> None:
    assert [bar(share, 4) for share in (0, 0.5, 1, 7)] == ["    ", "██  ", "████", "████"]
    assert bar(1e-9, 4) == "▏   "
    assert bar(0.3, 0) == ""


def test_columns_rise_from_the_lowest_to_the_highest_and_gaps_are_blank() -> None:
    assert columns_of([0.0, None, 1.0], 2, 0.0, 1.0) == ["  █", "▁ █"]
    assert columns_of([5.0], 2, 5.0, 5.0) == [" ", "█"] or columns_of([5.0], 2, 5.0, 5.0) == ["▁", "█"]


def test_as_many_values_as_columns() -> None:
    assert resampled([1.0, 3.0, None, 5.0], 2) == [2.0, 5.0]
    assert resampled([1.0, 2.0], 4) == [1.0, 1.0, 2.0, 2.0]
    assert resampled([], 4) == []


def test_control_characters_are_spelt_out() -> None:
    assert plain_text("a\x1b[2Jb\u202e\n") == "a\\x1b[2Jb\\u202e\\n"


def test_the_longest_wording_that_fits_is_taken() -> None:
    assert first_that_fits(("a long one", "short"), 7) == "short"
    assert first_that_fits(("a long one", "short"), 3) == "sh…"


def test_full_blocks_fill_their_cell_and_partial_ones_do_not() -> None:
    spans = [(span.start, span.end, str(span.style)) for span in coloured("▁██▂", "red").spans]
    assert spans == [(0, 1, "red"), (1, 3, "red on red"), (3, 4, "red")]
