"""The `datasets` library on local files; its cache lies in the test's own directory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from streamrl.producers.prompts.settings import DataSettings
from streamrl.producers.prompts.sources import StoredSource
from streamrl.producers.prompts.tables import open_table, plain_name
from streamrl.schemas.errors import DataError

ROWS: list[dict[str, Any]] = [
    {
        "data_source": "mine",
        "prompt": [{"role": "user", "content": f"{n}+1?"}],
        "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
        "extra_info": {"index": n},
    }
    for n in range(9)
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def _parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def _source(path: Path | str, **settings: Any) -> StoredSource:
    return StoredSource(DataSettings.model_validate({"path": str(path), **settings}), str(path), 0)


def test_a_parquet_file_of_verl_is_read_at_any_position(tmp_path: Path) -> None:
    source = _source(_parquet(tmp_path / "train.parquet", ROWS), format="verl")
    drawn = [source.prompt_at(position)[0] for position in range(9)]
    assert sorted(prompt.text for prompt in drawn) == [f"{n}+1?" for n in range(9)]
    third = next(prompt for prompt in drawn if prompt.prompt_id == "train/3")
    assert (third.text, third.columns["answer"], third.columns["extra_info"]) == ("3+1?", "4", {"index": 3})
    assert source.prompt_at(9)[1] == 1


def test_csv_json_and_compressed_jsonl_hold_the_same_prompts(tmp_path: Path) -> None:
    rows = [{"input": f"p{n}", "label": n} for n in range(3)]
    pyarrow.csv.write_csv(pa.Table.from_pylist(rows), tmp_path / "a.csv")
    (tmp_path / "a.json").write_text(json.dumps(rows))
    import gzip

    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    for name in ("a.csv", "a.json", "a.jsonl.gz"):
        source = _source(tmp_path / name, format="openrlhf")
        found = {(prompt.text, prompt.columns["answer"]) for prompt, _ in map(source.prompt_at, range(3))}
        assert found == {(f"p{n}", str(n) if name == "a.csv" else n) for n in range(3)}


def test_a_directory_has_splits_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    import datasets

    folder = tmp_path_factory.mktemp("data")  # the library takes a folder named after this test for a test split
    _parquet(folder / "train.parquet", ROWS)
    _parquet(folder / "test.parquet", ROWS[:2])
    assert len(_source(folder, format="verl")) == 9
    assert len(_source(folder, format="verl", split="test")) == 2
    assert len(_source(folder, format="verl", split="train[:4]")) == 4
    saved = datasets.DatasetDict({"train": datasets.Dataset.from_list([{"prompt": "p"}])})
    saved.save_to_disk(folder / "saved")
    assert len(_source(folder / "saved")) == 1
    with pytest.raises(DataError, match=r"Unknown split .test.*set data\.split"):
        _source(folder / "saved", split="test")


def _directory(path: Path, files: dict[str, str]) -> Path:
    path.mkdir()
    for name, content in files.items():
        (path / name).write_text(content)
    return path


def test_csv_files_of_a_directory_are_read_as_written_with_its_own_separator(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    parent = tmp_path_factory.mktemp("data")
    cells = "prompt;answer\n3,4?;007\nNone?;NA\n"
    readme = "---\nconfigs:\n- config_name: default\n  data_files: {}\n  {}\n---\n"
    folder = _directory(parent / "a", {"a.csv": cells, "README.md": readme.format("a.csv", 'sep: ";"')})
    found = [prompt for prompt, _ in map(_source(folder).prompt_at, range(2))]
    assert {(prompt.text, prompt.columns["answer"]) for prompt in found} == {("3,4?", "007"), ("None?", "NA")}
    folder = _directory(parent / "b", {"a.csv": cells, "README.md": readme.format("a.csv", "quoting: 3")})
    with pytest.raises(DataError, match=r"without options of its own for reading, got quoting in its README"):
        _source(folder)


def test_rows_of_several_files_are_named_by_their_own_line(tmp_path_factory: pytest.TempPathFactory) -> None:
    files = dict.fromkeys(("a.jsonl", "b.jsonl"), '{"prompt": "p"}\n' * 3) | {"c.jsonl": '{"prompt": ""}\n'}
    folder = _directory(tmp_path_factory.mktemp("data") / "several", files)
    with pytest.raises(DataError, match=r"c\.jsonl, line 1, got an empty text"):
        _source(folder)
    table = open_table(DataSettings.model_validate({"path": str(folder), "split": "train[2:5]"}), str(folder))
    assert [table.where(index).rpartition("/")[2] for index in range(3)] == [
        "a.jsonl, line 3",
        "b.jsonl, line 1",
        "b.jsonl, line 2",
    ]


def test_a_directory_is_read_whole_or_refused_by_the_file_that_would_be_left_out(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    parent, row = tmp_path_factory.mktemp("data"), '{"prompt": "p"}\n'
    for place, (used, unread) in enumerate((("a.jsonl", "b.csv"), ("train.jsonl", "more.jsonl"))):
        folder = _directory(parent / f"{place}", {used: row, unread: "prompt\nq\n" if "csv" in unread else row})
        with pytest.raises(DataError, match=rf"got 1 that would be left out, such as {unread}: files of one ending"):
            _source(folder)
    others = {"train.jsonl": row, "test.jsonl": row, "dataset_infos.json": "{}", ".b.csv": "", "notes.txt": ""}
    assert len(_source(_directory(parent / "whole", others))) == 1
    card = "---\nconfigs:\n- config_name: default\n  data_files: train.jsonl\n---\n"
    assert len(_source(_directory(parent / "listed", {"train.jsonl": row, "b.jsonl": row, "README.md": card}))) == 1


def test_an_empty_file_of_a_directory_is_named(tmp_path: Path) -> None:
    folder = _directory(tmp_path / "data", {"a.jsonl": '{"prompt": "p"}\n', "b.jsonl": ""})
    with pytest.raises(DataError, match=r"expected rows in every file of data.path, got none in .*b\.jsonl; fetch it"):
        _source(folder)


def test_a_directory_that_lacks_files_which_others_count_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    parent, row = tmp_path_factory.mktemp("data"), '{"prompt": "p"}\n'
    names = [f"train-0000{number}-of-00003.jsonl" for number in range(3)]
    assert len(_source(_directory(parent / "whole", dict.fromkeys([*names, "train-part-1-of-2.jsonl"], row)))) == 4
    folder = _directory(parent / "less", dict.fromkeys([names[0], names[2]], row))
    with pytest.raises(DataError, match=r"3 files train-…-of-00003 in .*less, .* got 2: number 1 is missing"):
        _source(folder)
    folder = _directory(parent / "linked", {"a.jsonl": row})
    (folder / "b.jsonl").symlink_to(parent / "nowhere.jsonl")
    with pytest.raises(DataError, match=r"got 1 that would be left out, such as b\.jsonl"):
        _source(folder)


def test_images_stay_as_they_are_stored(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features({"prompt": datasets.Value("string"), "pictures": datasets.List(datasets.Image())})
    image = {"bytes": b"no picture", "path": None}
    stored = datasets.Dataset.from_dict({"prompt": ["p"], "pictures": [[image]]}, features=features)
    stored.save_to_disk(tmp_path / "saved")
    table = open_table(DataSettings.model_validate({"path": str(tmp_path / "saved")}), str(tmp_path / "saved"))
    assert [*table.scan()] == [table.read(0)] == [{"prompt": "p", "pictures": [image]}]


def test_a_row_without_a_prompt_is_named_by_file_and_row(tmp_path: Path) -> None:
    path = _parquet(tmp_path / "bad.parquet", [{"prompt": "p"}, {"prompt": None}])
    with pytest.raises(DataError, match=r"bad\.parquet, row 1, got nothing"):
        _source(path)


@pytest.mark.parametrize(
    ("name", "content", "settings", "message"),
    [
        ("a.parquet", "no parquet", {}, r"data set at data\.path .*a\.parquet"),
        ("a.txt", "text", {}, r"expected a file that ends in \.arrow, \.csv"),
        ("a.jsonl", "{}", {"split": "test"}, r"expected data.split = .train. or a part of it"),
        ("a.json", '[{"prompt": 1}', {}, r"a list of JSON objects, or one per line, in .*a\.json"),
        ("a.json", "[1]", {}, r"a JSON object in .*a\.json, row 0, got int"),
        ("a.csv", "prompt,answer\na,b,c\n", {}, r"as many cells in each row .*a\.csv: .*got 3.*needs quotes"),
        ("a.csv", "prompt,prompt\na,b\n", {}, r"different names in .*a\.csv, got prompt more than once"),
        ("a.csv", 'prompt,answer\n"say \\"hi\\"",7\n', {}, r"quotes around whole cells in .*a\.csv, got at line 2"),
        ("a.tsv", 'prompt\tanswer\n"12 inch\t7\nb\t8\nc"x\t9\n', {}, r"quotes around whole cells .* at line 4"),
        ("a.jsonl.gz", "prompt", {}, r"a readable file at data\.path, got .*a\.jsonl\.gz"),
        ("a.csv", "prompt\nx\n", {"split": "test"}, r"expected data.split = .train. or a part of it"),
        ("a.csv", "prompt\nx\n", {"subset": "main"}, r"expected no data\.subset"),
    ],
)
def test_what_cannot_be_read_says_so_in_one_line(
    tmp_path: Path, name: str, content: str, settings: dict[str, Any], message: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        _source(tmp_path / name, **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.processes
def test_an_unreachable_hub_is_named_in_one_line() -> None:
    code = (
        "from streamrl.producers.prompts.tables import open_hub\nfrom streamrl.schemas.errors import DataError\n"
        "try: open_hub('nobody/nothing', None, 'train', 'nothing')\nexcept DataError as error: print(error)"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.count("\n") == 1
    assert "'nobody/nothing'" in done.stdout
    assert done.stdout.rstrip().endswith("name a local file, or a data set that can be reached")


def test_a_local_name_without_a_file_is_not_looked_for_on_the_hub() -> None:
    for path in ("missing.parquet", "./missing", "/missing/dir", "a/b/c"):
        with pytest.raises(DataError, match="no such file"):
            open_table(DataSettings.model_validate({"path": path}), path)


@pytest.mark.parametrize(
    ("path", "name"),
    [("a/my data.jsonl", "my-data"), ("gsm8k-v1.1.parquet", "gsm8k-v1.1"), ("openai/gsm8k", "gsm8k"), ("/", "prompts")],
)
def test_prompts_get_a_plain_name(path: str, name: str) -> None:
    assert plain_name(path) == name


def test_a_table_without_the_prompts_column_says_which_it_has_and_what_to_set(tmp_path: Path) -> None:
    path = _parquet(tmp_path / "q.parquet", [{"question": "1+1?", "answer": "2", "level": 3}])
    with pytest.raises(DataError, match=r"got columns \['answer', 'level', 'question'\]; set data\.prompt_column"):
        _source(path)
    path = _parquet(tmp_path / "r.parquet", [{"question": "1+1?", "level": 3}])
    with pytest.raises(DataError, match=r"row 0, got columns \['level', 'question'\]; set data\.prompt_column"):
        _source(path)
    assert _source(path, prompt_column="question").prompt_at(0)[0].text == "1+1?"
