import time
from pathlib import Path

import pytest

from streamrl.schemas.errors import SettingsError
from streamrl.schemas.identifiers import is_plain_name
from streamrl.settings.loading import as_toml, load_settings
from streamrl.settings.run_directory import named, require_name
from streamrl.settings.tree import Settings

EMULATED = ("--generation.engine=emulated", "--training.backend=emulated", "--data.dataset=chain_sum")


def nameless(*arguments: str) -> Settings:
    return load_settings(None, [*EMULATED, *arguments])


@pytest.mark.parametrize("folder", ["My Task!", "Ü", "a..b", "x" * 200])
def test_a_run_without_a_name_is_called_after_the_directory_and_the_time(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / folder)
    monkeypatch.setattr(time, "strftime", lambda _format: "20300102-030405")
    first = named(nameless())
    assert is_plain_name(first.run.name)
    assert first.run.name.endswith("-20300102-030405")
    first.run.path.mkdir(parents=True)
    second = named(nameless())
    assert second.run.name == f"{first.run.name}-2"
    assert is_plain_name(second.run.name)


def test_a_name_that_was_given_stays_and_the_resolved_settings_have_one(tmp_path: Path) -> None:
    assert named(nameless("--run.name=mine")).run.name == "mine"
    kept = tmp_path / "config.resolved.toml"
    made = named(nameless())
    kept.write_text(as_toml(made))
    assert load_settings(kept, []).run.path == made.run.path


def test_a_process_by_itself_needs_the_name_of_its_run() -> None:
    with pytest.raises(
        SettingsError, match=r"a worker that is started alone joins a run; name one on this machine with --run NAME"
    ):
        require_name(nameless(), "worker")
    with pytest.raises(SettingsError, match=r"expected run\.name, got none"):
        _ = nameless().run.path
