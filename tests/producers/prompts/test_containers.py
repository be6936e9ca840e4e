"""Prompts and answers do not depend on the file that holds them."""

import bz2
import csv
import gzip
import itertools
import json
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.producers.prompts.settings import DataSettings
from streamrl.producers.prompts.sources import StoredSource
from streamrl.schemas.errors import DataError

Rows = list[dict[str, Any]]
count = itertools.count()
NUMBERS = ["007", "84", "84.0", "1e3", "1,000", "-", "1969-07-20", "2001-01-01T00:00:00", "12:30"]
WORDS = ["None", "NA", "null", "nan", "true", "", " 7 ", "\\frac{1}{2}", '{"a": 1}', "[1]", "\u2028", "\x00", "é🙂"]
MISREAD = [*NUMBERS, *WORDS, 'say "hi", then\r\nleave']
texts = st.sampled_from(MISREAD) | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
prompts = texts.map(lambda text: f"{text}?")
numbers = st.integers(-(2**63), 2**63 - 1)
values = st.none() | texts | numbers | st.lists(texts, max_size=2) | st.dictionaries(st.sampled_from("abc"), texts)


@st.composite
def turns(draw: st.DrawFn) -> list[dict[str, Any]]:
    call = {
        "id": "a",
        "function": {"name": "f", "arguments": draw(st.dictionaries(st.sampled_from("xyz"), texts, min_size=1))},
    }
    user = {"role": "user", "content": draw(prompts), **draw(st.sampled_from([{}, {"name": "bob"}]))}
    parts = {"role": "user", "content": [{"type": "text", "text": draw(prompts)}]}
    called = {"role": "assistant", "content": draw(texts | st.none()), "tool_calls": [call]}
    answered = {"role": "tool", "content": draw(texts), "tool_call_id": "a", "name": "f"}
    return draw(
        st.sampled_from([[user], [parts], [user, called, answered], [{"role": "system", "content": "s"}, user]])
    )


text_rows = st.lists(st.fixed_dictionaries({"prompt": prompts, "answer": texts | st.none()}), min_size=1, max_size=5)
rows = st.lists(
    st.fixed_dictionaries({"prompt": prompts | turns()}, optional={"answer": values}), min_size=1, max_size=5
)


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("containers")
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        yield folder


def read(path: Path) -> list[tuple[Any, Any]]:
    """Prompts and answers, in the order of the file."""
    source = StoredSource(DataSettings.model_validate({"path": str(path)}), str(path), 0)
    found = [source.prompt_at(position)[0] for position in range(len(source))]
    found.sort(key=lambda prompt: int(prompt.prompt_id.rsplit("/", 1)[1]))
    return [(prompt.content, prompt.columns.get("answer")) for prompt in found]


def as_lines(rows: Rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write_directory(path: Path, rows: Rows) -> None:
    path.mkdir(exist_ok=True)
    (path / "a.jsonl").write_bytes(as_lines(rows[:2]))
    (path / "b.json").unlink(missing_ok=True)
    if rows[2:]:
        (path / "b.json").write_text(json.dumps(rows[2:], indent=1))


def write_cells(path: Path, rows: Rows, delimiter: str = ",") -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write(f"prompt{delimiter}answer\r\n")
        for row in rows:
            # By hand, because csv's own writer writes nothing and an empty text alike.
            texts = [row["prompt"], row["answer"]]
            cells = ["" if text is None else '"' + text.replace('"', '""') + '"' for text in texts]
            file.write(delimiter.join(cells) + "\r\n")


JSON_CONTAINERS: dict[str, Callable[[Path, Rows], Any]] = {
    "a.jsonl": lambda path, rows: path.write_bytes(as_lines(rows)),
    "a.ndjson": lambda path, rows: path.write_bytes(b"\n\n" + as_lines(rows).replace(b"\n", b"\r\n")),
    "a.jsonl.gz": lambda path, rows: path.write_bytes(gzip.compress(as_lines(rows))),
    "a.jsonl.bz2": lambda path, rows: path.write_bytes(bz2.compress(as_lines(rows))),
    "a.json.xz": lambda path, rows: path.write_bytes(lzma.compress(as_lines(rows))),
    "a.jsonl.zst": lambda path, rows: path.write_bytes(pa.compress(as_lines(rows), "zstd", asbytes=True)),
    "lines.json": lambda path, rows: path.write_bytes(b"\xef\xbb\xbf" + as_lines(rows)),
    "list.json": lambda path, rows: path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8"),
    "indented.json": lambda path, rows: path.write_text(json.dumps(rows, indent=2)),
}
CELLS: dict[str, Callable[[Path, Rows], Any]] = {
    "a.csv": write_cells,
    "a.tsv": lambda path, rows: write_cells(path, rows, "\t"),
}


@given(rows)
@settings(max_examples=40, deadline=None)
def test_every_container_gives_the_same_rows(own_cache: Path, rows: Rows) -> None:
    results = {}
    for name, write in JSON_CONTAINERS.items():
        write(own_cache / name, rows)
        results[name] = read(own_cache / name)
    assert all(result == results["a.jsonl"] for result in results.values())


@given(text_rows)
@settings(max_examples=40, deadline=None)
def test_text_stays_text_in_cells(own_cache: Path, rows: Rows) -> None:
    (own_cache / "a.jsonl").write_bytes(as_lines(rows))
    expected = read(own_cache / "a.jsonl")
    assert [answer for _, answer in expected] == [row["answer"] for row in rows]
    for name, write in CELLS.items():
        write(own_cache / name, rows)
        assert read(own_cache / name) == expected


@given(rows)
@settings(max_examples=5, deadline=None)
def test_directories_give_the_same_prompts_and_answers(own_cache: Path, rows: Rows) -> None:
    (own_cache / "a.jsonl").write_bytes(as_lines(rows))
    write_directory(own_cache / "several", rows)
    assert read(own_cache / "several") == read(own_cache / "a.jsonl")


@given(st.lists(st.fixed_dictionaries({"prompt": turns(), "answer": texts | st.none()}), min_size=1, max_size=4))
@settings(max_examples=5, deadline=None)
def test_parquet_gives_the_same_prompts_and_answers(own_cache: Path, rows: Rows) -> None:
    import datasets

    for row in rows:  # parquet cannot mix text and parts
        for turn in row["prompt"]:
            turn["content"] = turn["content"][0]["text"] if isinstance(turn["content"], list) else turn["content"]
    (own_cache / "a.jsonl").write_bytes(as_lines(rows))
    expected = read(own_cache / "a.jsonl")
    # A new name each time, because the library knows a file by its name and time.
    stored = own_cache / f"{next(count)}.parquet"
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), stored)
    assert read(stored) == expected
    datasets.Dataset.from_list(rows).save_to_disk(own_cache / "saved")
    assert read(own_cache / "saved") == expected


def test_columns_that_the_library_stores_as_json_text_are_values(own_cache: Path) -> None:
    import datasets

    rows: Rows = [{"prompt": [{"role": "user", "content": "a"}], "answer": {"target": 24, "numbers": [1, 2]}}]
    rows.append({"prompt": [{"role": "user", "content": "b", "name": "bob"}], "answer": "Ada"})
    (own_cache / "a.jsonl").write_bytes(as_lines(rows))
    datasets.Dataset.from_list(rows, on_mixed_types="use_json").save_to_disk(own_cache / "mixed")
    assert read(own_cache / "mixed") == read(own_cache / "a.jsonl")


def test_csv_that_other_libraries_write_is_read_as_written(own_cache: Path) -> None:
    import datasets

    rows = [{"prompt": f"{text}?", "answer": text} for text in MISREAD if text not in ("\x00",)]
    (own_cache / "a.jsonl").write_bytes(as_lines(rows))
    expected = read(own_cache / "a.jsonl")
    with (own_cache / "a.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["prompt", "answer"], quoting=csv.QUOTE_ALL)
        writer.writeheader()
        writer.writerows(rows)
    assert read(own_cache / "a.csv") == expected
    datasets.Dataset.from_list(rows).to_csv(own_cache / "b.csv")  # by pandas: no quotes around an empty text
    assert read(own_cache / "b.csv") == [(prompt, answer or None) for prompt, answer in expected]


def test_only_an_unquoted_blank_is_nothing(own_cache: Path) -> None:
    (own_cache / "blank.csv").write_text('prompt,answer\n12*7=,84\n3+4=,007\nopen question:,\nempty:,""\n')
    assert [answer for _, answer in read(own_cache / "blank.csv")] == ["84", "007", None, ""]


def test_names_of_columns_have_no_spaces_around_them(own_cache: Path) -> None:
    (own_cache / "spaces.csv").write_text("prompt, answer\n12*7=, 84\n")
    with pytest.raises(DataError, match=r"without spaces around them in .*spaces.csv, got ' answer'"):
        read(own_cache / "spaces.csv")


def test_a_slice_that_ends_before_it_starts_has_no_rows(own_cache: Path) -> None:
    (own_cache / "two.jsonl").write_bytes(as_lines([{"prompt": "a"}, {"prompt": "b"}]))
    settings = DataSettings.model_validate({"path": str(own_cache / "two.jsonl"), "split": "train[2:1]"})
    with pytest.raises(DataError, match="got none among 0 rows"):
        StoredSource(settings, str(own_cache / "two.jsonl"), 0)


def test_a_slice_of_a_text_file_is_read_as_of_any_other(own_cache: Path) -> None:
    path = own_cache / "ten.jsonl"
    path.write_bytes(as_lines([{"prompt": f"p{n}"} for n in range(10)]))
    source = StoredSource(DataSettings.model_validate({"path": str(path), "split": "train[2:5]"}), str(path), 0)
    assert sorted(source.prompt_at(position)[0].text for position in range(len(source))) == ["p2", "p3", "p4"]
