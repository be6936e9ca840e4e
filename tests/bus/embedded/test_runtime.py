"""Which Java is taken, and what is made once per machine: by whom it is shared, and when it is made again."""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from streamrl.bus.embedded import runtime
from streamrl.bus.embedded.jars import KAFKA_VERSION, class_path
from streamrl.bus.embedded.runtime import (
    AOT_CACHE_MAJOR,
    Java,
    _archive_path,
    _remove_unusable,
    cache_root,
    find_java,
    prepare,
)
from streamrl.schemas.errors import BrokerError

VERSIONS = [("25.0.2", 25), ("17.0.15+6", 17), ("1.8.0_402", 8), ("22-ea", 22), ("", 0)]


@pytest.mark.parametrize(("version", "major"), VERSIONS)
def test_the_major_version_is_read_from_old_and_new_version_texts(version: str, major: int) -> None:
    assert Java(Path("java"), version).major == major


def test_the_found_runtime_is_new_enough_for_kafka() -> None:
    assert find_java().major >= 17


@pytest.mark.processes
def test_an_old_java_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = tmp_path / "bin" / "java"
    launcher.parent.mkdir()
    launcher.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n")
    launcher.chmod(0o755)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(BrokerError, match=r"17 or later, got .*11\.0\.2.*streamrl\[local\]"):
        find_java()


def installed(home: Path, modules: int = 3) -> Path:
    """A made-up Java of which only the files' sizes are looked at; its launcher."""
    for name, size in {"bin/java": 1, "lib/modules": modules, "lib/server/libjvm.so": 2, "release": 1}.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(b"x" * size)
    return home / "bin" / "java"


def test_copies_of_one_java_share_an_archive_and_other_builds_do_not(tmp_path: Path) -> None:
    one, copy = Java(installed(tmp_path / "one"), "25.0.2"), Java(installed(tmp_path / "copy"), "25.0.2")
    other = Java(installed(tmp_path / "other", modules=4), "25.0.2")
    assert _archive_path(one, tmp_path) == _archive_path(copy, tmp_path)
    assert _archive_path(one, tmp_path) != _archive_path(other, tmp_path)


def test_before_ahead_of_time_caches_an_archive_belongs_to_one_installation(tmp_path: Path) -> None:
    one, copy = Java(installed(tmp_path / "one"), "21.0.1"), Java(installed(tmp_path / "copy"), "21.0.1")
    assert _archive_path(one, tmp_path) != _archive_path(copy, tmp_path)


def test_archives_of_other_javas_stay_and_those_of_other_jars_go(tmp_path: Path) -> None:
    one = _archive_path(Java(installed(tmp_path / "one"), "25.0.2"), tmp_path)
    other = _archive_path(Java(installed(tmp_path / "other", modules=4), "25.0.2"), tmp_path)
    of_old_jars = one.with_name(one.name[:-1] + "x")
    for archive in (one, other, of_old_jars):
        archive.touch()
    _remove_unusable(tmp_path, one)
    assert sorted(tmp_path.glob("classes-*")) == sorted([one, other])


@pytest.mark.processes
def test_a_cache_behind_a_link_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bootstrap_servers: str
) -> None:
    made = prepare(print)
    (tmp_path / "linked").symlink_to(cache_root())
    monkeypatch.setenv("STREAMRL_CACHE", str(tmp_path / "linked"))
    told: list[str] = []
    assert prepare(told.append) == made
    assert not told


@pytest.mark.long
def test_an_archive_is_made_once_for_two_environments_and_is_taken_in_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bootstrap_servers: str
) -> None:
    java = find_java()
    if java.major < AOT_CACHE_MAJOR:
        pytest.skip("this Java has no ahead-of-time cache")
    ours, home = cache_root() / "runtime" / f"kafka-{KAFKA_VERSION}", java.path.parent.parent
    shutil.copytree(ours / "jars", tmp_path / "runtime" / ours.name / "jars")
    javas = [Java(tmp_path / name / "bin" / "java", java.version) for name in ("one", "two")]
    monkeypatch.setenv("STREAMRL_CACHE", str(tmp_path))
    told: list[str] = []
    for each in javas:
        shutil.copytree(home, each.path.parent.parent, dirs_exist_ok=True)
        monkeypatch.setattr(runtime, "find_java", lambda each=each: each)
        archive = prepare(told.append).archive
        classes = os.pathsep.join(map(str, class_path(tmp_path / "runtime" / ours.name / "jars")))
        command = [str(each.path), *runtime._FLAGS, "-Xlog:class+load", f"-XX:AOTCache={archive}", "-cp", classes]
        said = subprocess.run([*command, "kafka.Kafka", "--version"], capture_output=True, text=True, check=True).stdout
        (loaded,) = (line for line in said.splitlines() if " kafka.Kafka$ source" in line)
        assert "shared objects file" in loaded
    assert [line.split(" on ")[0] for line in told] == [f"preparing Kafka {KAFKA_VERSION}"]
