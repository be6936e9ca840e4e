from pathlib import Path

import pytest

from streamrl.cli.arguments import split
from streamrl.schemas.errors import SettingsError


def test_the_file_may_stand_anywhere_between_overrides() -> None:
    assert split(["--a.b", "3", "run.toml", "--c.d=4"]) == (Path("run.toml"), ["--a.b", "3", "--c.d=4"])


def test_two_files_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"got a\.toml and b\.toml"):
        split(["a.toml", "b.toml"])
