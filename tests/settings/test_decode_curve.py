from pathlib import Path

import pytest

from streamrl.schemas.errors import SettingsError
from streamrl.schemas.profiles import DEFAULT_CURVE, DecodeSettings, DeviceProfile, TrainingCosts
from streamrl.settings.tree import Settings, decode_curve

MODEL = {"model": {"path": "some/model"}, "data": {"dataset": "chain_sum"}}


def _settings(**sections: dict[str, object]) -> Settings:
    return Settings.model_validate(MODEL | sections)


def test_the_dispatcher_plans_with_the_emulated_curve_on_the_wall_clock() -> None:
    emulation = {"time_scale": 20.0, "decode": {"table": ((1, 0.1), (8, 0.2)), "context_s_per_token": 1e-3}}
    curve = decode_curve(_settings(generation={"engine": "emulated"}, emulation=emulation))
    assert curve.batch_s(8) == pytest.approx(0.01)
    assert curve.settings.context_s_per_token == pytest.approx(5e-5)


def test_a_measured_profile_goes_before_a_typical_curve(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    decode = DecodeSettings(step_s=0.5, batch_scale=4.0)
    profile = DeviceProfile(device="d", model="m", engine="e", max_num_seqs=8, decode=decode, training=TrainingCosts())
    profile.write(path)
    assert decode_curve(_settings(dispatch={"profile": str(path)})).batch_s(4) == 1.0
    assert decode_curve(_settings()) is DEFAULT_CURVE


def test_a_profile_that_is_not_there_is_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(SettingsError):
        decode_curve(_settings(dispatch={"profile": str(tmp_path / "none.json")}))
