import hashlib
from pathlib import Path

import pytest

from streamrl.schemas.files import sha256_of, write_atomically


def test_a_checksum_is_of_the_content(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"content")
    assert sha256_of(tmp_path / "one") == hashlib.sha256(b"content").hexdigest()


def test_a_file_is_replaced_whole_and_nothing_else_is_left(tmp_path: Path) -> None:
    write_atomically(tmp_path / "one.json", "first")
    write_atomically(tmp_path / "one.json", "second")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("one.json", "second")]


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "one.json").mkdir()
    with pytest.raises(OSError, match=r"one\.json"):
        write_atomically(tmp_path / "one.json", "text")
    assert (tmp_path / "one.json").is_dir()
