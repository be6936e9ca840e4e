from pathlib import Path

import pytest

from schemas.errors import SettingsError
from settings.contradictions import RULES
from settings.keys import known_keys
from settings.loading import as_toml, load_settings

EXAMPLE = Path(__file__).parents[2] / "benchmarks" / "pipeline" / "example.toml"
BASE = '[model]\npath = "m"\n[data]\npath = "p.jsonl"\n'


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "a.toml"
    path.write_text(text)
    return path


def test_nothing_is_set_twice(tmp_path: Path) -> None:
    path = write(tmp_path, BASE + '[loop]\nmode = "synchronous"\nmax_staleness = 2\n')
    with pytest.raises(SettingsError, match=r'no loop\.max_staleness with loop\.mode = "synchronous".*a\.toml, line 7'):
        load_settings(path, [])


def test_a_later_layers_decision_replaces_what_an_earlier_one_said(tmp_path: Path) -> None:
    path = write(tmp_path, BASE + "[loop]\nmax_staleness = 2\n")
    settings = load_settings(path, ["--loop.mode", "stream"])
    assert settings.loop.staleness_bound == 0
    with pytest.raises(SettingsError, match=r"--loop\.max_staleness"):
        load_settings(path, ["--loop.mode", "stream", "--loop.max_staleness=1"])


def test_what_means_nothing_is_not_written(tmp_path: Path) -> None:
    path = write(tmp_path, BASE + "[loop]\nmax_staleness = 2\n")
    text = as_toml(load_settings(path, ["--loop.mode", "stream"]))
    assert "max_staleness" not in text
    assert "format_pattern" not in text
    again = write(tmp_path, text)
    assert as_toml(load_settings(again, [])) == text


def test_a_default_of_ours_is_no_contradiction_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = {"model": {"path": "m"}, "data": {"dataset": "gcd"}, "loop": {"max_staleness": 3}}
    assert load_settings(None, ["--loop.mode=synchronous"], defaults).loop.mode == "synchronous"


def test_every_rule_names_settings_that_exist() -> None:
    keys = set(known_keys())
    assert {key for rule in RULES for key in (*rule.keys, *rule.deciders)} <= keys


def test_the_example_contradicts_nothing() -> None:
    load_settings(EXAMPLE, [])
