from pathlib import Path

import pytest

from streamrl.schemas.errors import SettingsError
from streamrl.settings.layers import SettingsLayers, from_arguments, from_environment, from_toml, merged


def test_later_layers_win_key_by_key() -> None:
    assert merged({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}}, {"b": 4}) == {"a": {"x": 1, "y": 3}, "b": 4}


def test_merging_leaves_the_layers_alone() -> None:
    first = {"a": {"x": 1}}
    merged(first, {"a": {"x": 2}})
    assert first == {"a": {"x": 1}}


def test_arguments_are_read_with_space_or_equals_sign_and_typed_as_toml() -> None:
    arguments = ["--loop.max-staleness", "3", "--run.name=demo", "--loop.bucket_boundaries=[4, 8]", "--a.b", "true"]
    assert from_arguments(arguments) == {
        "loop": {"max_staleness": 3, "bucket_boundaries": [4, 8]},
        "run": {"name": "demo"},
        "a": {"b": True},
    }


@pytest.mark.parametrize("text", ["007", "1e5", "59e123456789", "inf", "true", "2026-11-30", "[1]", "{a = 1}"])
def test_a_setting_that_takes_only_text_keeps_it_as_written(text: str) -> None:
    """A container's host name may look like a number: 59e123456789."""
    for section, name in (("run", "name"), ("metrics", "host"), ("loop", "mode"), ("model", "path")):
        assert from_arguments([f"--{section}.{name}={text}"]) == {section: {name: text}}
    assert from_environment({"STREAMRL_METRICS__HOST": text}) == {"metrics": {"host": text}}


def test_a_setting_that_takes_a_number_or_a_word_gets_the_number() -> None:
    assert from_arguments(["--data.name=none", "--loop.top_k=7"]) == {"data": {"name": "none"}, "loop": {"top_k": 7}}
    assert from_arguments(['--run.name="7"']) == {"run": {"name": "7"}}


@pytest.mark.parametrize("arguments", [["--run.name"], ["--name", "x"], ["name"], ["--a.b=1", "--a.b.c=2"]])
def test_arguments_of_another_shape_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SettingsError, match="expected"):
        from_arguments(arguments)


def test_the_environment_is_read_by_its_double_underscores() -> None:
    environ = {"STREAMRL_KAFKA__BOOTSTRAP_SERVERS": "h:1", "STREAMRL_CACHE": "/x", "OTHER__A": "1"}
    assert from_environment(environ) == {"kafka": {"bootstrap_servers": "h:1"}}


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none\.toml, which does not exist"):
        from_toml(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[run\nname = 1")
    with pytest.raises(SettingsError, match=r"expected TOML in .*broken\.toml"):
        from_toml(broken)


def test_inputs_are_found_next_to_the_file_that_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = tmp_path / "task"
    (task / "model").mkdir(parents=True)
    (task / "prompts.jsonl").write_text("")
    sections = {"data": "path", "model": "path", "lengths": "base_model", "run": "directory"}
    values = ("prompts.jsonl", "model", "org/name", "model")
    text = "".join(
        f'[{section}]\n{key} = "{value}"\n' for (section, key), value in zip(sections.items(), values, strict=True)
    )
    for name in ("task.toml", "config.resolved.toml"):
        (task / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    found = SettingsLayers.read(Path("task/task.toml"), ["--emulation.profile=model"]).layers
    assert found[0] == {
        "data": {"path": "task/prompts.jsonl"}, "model": {"path": "task/model"}, "lengths": {"base_model": "org/name"},
        "run": {"directory": "model"},
    }  # fmt: skip
    assert found[2] == {"emulation": {"profile": "model"}}
    assert SettingsLayers.read(Path("task/config.resolved.toml"), []).toml["model"] == {"path": "model"}
    monkeypatch.chdir(task)
    assert SettingsLayers.read(Path("task.toml"), []).toml["data"] == {"path": "prompts.jsonl"}
