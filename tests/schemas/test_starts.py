"""The starts of a run, as its directory keeps them."""

from pathlib import Path

import pytest

from streamrl.schemas.errors import UserError
from streamrl.schemas.starts import ChangedValue, RunInput, RunStart, append_start, changed_inputs, read_starts

FIRST = RunStart(at=1.0, step=0, inputs={"prompts": "a"})
SECOND = RunStart(
    at=2.0, step=4, inputs={"prompts": "b"}, changed=(ChangedValue("prompts", "a", "b"),), earlier_trajectories="skip"
)


def test_starts_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "starts.jsonl"
    assert read_starts(path) == ()
    append_start(path, FIRST)
    append_start(path, SECOND)
    assert read_starts(path) == (FIRST, SECOND)


def test_half_a_line_hides_no_other_start(tmp_path: Path) -> None:
    path = tmp_path / "starts.jsonl"
    append_start(path, FIRST)
    with path.open("a") as file:
        file.write('{"at": 2.0, "st\n')
    append_start(path, SECOND)
    assert read_starts(path) == (FIRST, SECOND)


def test_a_start_that_cannot_be_written_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"expected to write .*starts.jsonl"):
        append_start(tmp_path / "missing" / "starts.jsonl", FIRST)


def test_only_inputs_that_are_known_at_both_starts_are_compared() -> None:
    now = [RunInput("prompts", "b"), RunInput("model", "m"), RunInput("reward a:b", None)]
    assert changed_inputs({"prompts": "a", "reward a:b": "r", "gone": "g"}, now) == [ChangedValue("prompts", "a", "b")]
