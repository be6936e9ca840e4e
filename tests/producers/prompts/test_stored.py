import json
from pathlib import Path
from typing import Any

import pytest

from streamrl.producers.prompts.settings import DataSettings
from streamrl.producers.prompts.sources import StoredSource
from streamrl.schemas.errors import DataError


def is_kept(entry: dict[str, Any]) -> bool:
    return bool(entry["n"] % 3 == 0)


def _write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def _source(path: Path, seed: int = 0, **settings: Any) -> StoredSource:
    return StoredSource(DataSettings.model_validate({"path": str(path), **settings}), str(path), seed)


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    return _write(tmp_path / "numbers.jsonl", [{"prompt": f"n={n} – ü", "n": n} for n in range(30)])


def test_positions_never_end_and_every_pass_is_another_order_of_the_whole_file(numbers: Path) -> None:
    source = _source(numbers)
    drawn = [source.prompt_at(position) for position in range(60)]
    first, second = ([prompt.columns["n"] for prompt, of in drawn if of == data_pass] for data_pass in (0, 1))
    assert sorted(first) == sorted(second) == list(range(30))  # type: ignore[type-var]
    assert first != second != list(range(30))


def test_a_position_names_one_prompt_whichever_is_read_first(numbers: Path) -> None:
    source = _source(numbers, seed=3)
    forwards = [source.prompt_at(position) for position in range(45)]
    again = _source(numbers, seed=3)
    assert [again.prompt_at(position) for position in reversed(range(45))] == forwards[::-1]
    assert [_source(numbers, seed=4).prompt_at(position) for position in range(45)] != forwards


def test_prompts_are_named_by_their_line_and_keep_their_columns(numbers: Path) -> None:
    prompt = next(p for p, _ in map(_source(numbers).prompt_at, range(30)) if p.columns["n"] == 4)
    assert (prompt.prompt_id, prompt.dataset, prompt.content) == ("numbers/5", "numbers", "n=4 – ü")
    assert prompt.columns == {"n": 4}


def test_the_filter_leaves_lines_out_without_renaming_the_others(numbers: Path) -> None:
    source = _source(numbers, filter=f"{__name__}:is_kept")
    kept = [source.prompt_at(position)[0] for position in range(10)]
    assert sorted(prompt.columns["n"] for prompt in kept) == list(range(0, 30, 3))  # type: ignore[type-var]
    assert all(prompt.prompt_id == f"numbers/{prompt.columns['n'] + 1}" for prompt in kept)  # type: ignore[operator]
    assert source.prompt_at(10)[1] == 1
    assert len(source) == 10


def test_blank_lines_are_no_prompts(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", [{"prompt": "one"}, "", {"prompt": "two"}])
    source = _source(path)
    assert {source.prompt_at(position)[0].prompt_id for position in range(2)} == {"a/1", "a/3"}


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("{", "expected a JSON object"),
        ("[1]", "expected a JSON object"),
        ('{"text": "x"}', r"column 'prompt'.*got columns \['text'\]; set data.prompt_column"),
        ('{"prompt": 3}', "got int"),
        ('{"prompt": " "}', "got an empty text"),
        ('{"prompt": []}', "got an empty list"),
        ('{"prompt": [{"role": "user"}]}', "got turn 1 without text as content"),
        ('{"prompt": "x", "y": NaN}', "expected a JSON object"),
        ('{"prompt": "x", "y": 1e400}', "the number 1e400 is too large; give it as text"),
        ('{"prompt": "x", "answer": "1", "answer": "2"}', "the key 'answer' more than once"),
        ('{"prompt": "x", "y": [{"a": 1, "a": 1}]}', "the key 'a' more than once"),
    ],
)
def test_a_malformed_line_is_named_with_its_file(tmp_path: Path, line: str, wrong: str) -> None:
    path = _write(tmp_path / "bad.jsonl", [{"prompt": "fine"}, line])
    with pytest.raises(DataError, match=r"bad\.jsonl, line 2") as caught:
        _source(path)
    assert caught.match(wrong)


def test_a_file_that_is_missing_or_empty_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.path.*no such file"):
        _source(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="at least one prompt"):
        _source(_write(tmp_path / "empty.jsonl", []))


def test_a_file_that_changes_under_the_run_is_noticed(numbers: Path) -> None:
    source = _source(numbers)
    numbers.write_text("x" * 5000)
    with pytest.raises(DataError, match=r"numbers\.jsonl, line"):
        source.prompt_at(0)


TOO_LARGE = {"prompt": "x", "y": "y" * (3 << 20)}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "\ud83d!"}, "half of a surrogate pair"),
        ({"prompt": "x", "y": "\ud83d!"}, "half of a surrogate pair"),
        ({"prompt": "x" * (1 << 20 | 1)}, "at most 1048576 characters"),
        (TOO_LARGE, "bytes of prompt and columns"),
        ({"prompt": "x", "y": [0] * 200_000}, "at most 100000 values"),
    ],
)
def test_a_row_that_cannot_be_sent_is_left_out(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    fine = [{"prompt": f"p{n}"} for n in range(5)]
    source = _source(_write(tmp_path / "a.jsonl", [*fine, row, *fine]))
    assert len(source) == 10
    assert "a/6" not in {source.prompt_at(position)[0].prompt_id for position in range(10)}
    assert source.left_out.startswith("1 of 11 rows are left out; the first: ")
    assert "a.jsonl, line 6" in source.left_out
    assert reason in source.left_out
    assert _source(_write(tmp_path / "b.jsonl", fine)).left_out == ""


def test_without_any_row_that_can_be_sent_the_reason_is_in_the_error(tmp_path: Path) -> None:
    path = _write(tmp_path / "large.jsonl", [TOO_LARGE])
    with pytest.raises(DataError, match=r"at least one prompt.*bytes of prompt and columns at .*large\.jsonl, line 1"):
        _source(path)


def test_a_column_that_some_rows_lack_is_nothing_there(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "answer": "1", "level": 2}, {"prompt": "q"}]
    source = _source(_write(tmp_path / "a.jsonl", rows))
    found = {prompt.text: prompt.columns for prompt, _ in map(source.prompt_at, range(2))}
    assert found == {"p": {"answer": "1", "level": 2}, "q": {"answer": None, "level": None}}


def test_messages_and_a_system_prompt_make_a_chat(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}]
    path = _write(tmp_path / "chat.jsonl", [{"prompt": turns, "answer": "x"}])
    prompt = _source(path, system_prompt="Be brief.").prompt_at(0)[0]
    assert [turn.role for turn in prompt.content if not isinstance(turn, str)] == ["system", "user"]
    assert prompt.columns == {"answer": "x"}
