from pathlib import Path

import pytest

from deploy.settings.loading import as_toml, load_settings
from schemas.errors import SettingsError


def test_settings_written_as_toml_read_back_equal(tmp_path: Path) -> None:
    arguments = ["--model.path=m", "--data.dataset=gsm_symbolic", "--algorithm.epsilon_high=none"]
    settings = load_settings(None, [*arguments, "--algorithm.importance_sampling_cap=none"])
    assert settings.algorithm.epsilon_high is None
    file = tmp_path / "config.toml"
    file.write_text(as_toml(settings))
    assert load_settings(file, []) == settings


def test_a_setting_that_must_have_a_value_cannot_be_unset() -> None:
    with pytest.raises(SettingsError, match=r"loop\.temperature"):
        load_settings(None, ["--model.path=m", "--data.dataset=gsm_symbolic", "--loop.temperature=none"])
