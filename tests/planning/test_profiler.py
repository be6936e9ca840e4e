import json
from pathlib import Path
from typing import Any

import pytest

from streamrl.inspection.environment import usable_cores
from streamrl.planning.measuring import endless_model
from streamrl.planning.profiler import Effort, lines, profile
from streamrl.planning.sharing import RunCosts
from streamrl.producers.generation.engines.model_files import read_facts
from streamrl.schemas.errors import ModelError, SettingsError
from streamrl.schemas.profiles import DecodeSettings, DeviceProfile, TrainingCosts
from streamrl.settings.loading import as_toml, load_settings, validated
from streamrl.settings.tree import Settings
from tests.pipeline.tiny_model import save_tiny_model

EMULATED: dict[str, Any] = {
    "data": {"dataset": "chain_sum"},
    "generation": {"engine": "emulated", "max_num_seqs": 24},
    "training": {"backend": "emulated"},
}
MEASURED = DeviceProfile(
    device="a device",
    model="a model",
    engine="vllm",
    max_num_seqs=8,
    decode=DecodeSettings(table=((1, 0.01), (8, 0.03)), adopt_s=0.2),
    training=TrainingCosts(forward_backward_s_per_token=3e-5),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def test_an_emulated_engine_gives_its_curve_back() -> None:
    decode = {"step_s": 0.02, "batch_scale": 10.0}
    settings = validated(EMULATED | {"emulation": {"decode": decode}})
    profiled = profile(settings, Effort(1, 1, 1), lambda line: None)
    assert profiled.profile.decode == settings.emulation.decode
    assert profiled.profile.training == settings.emulation.training
    assert (profiled.profile.engine, profiled.profile.max_num_seqs) == ("emulated", 24)
    assert "20.00 ms x (1 + batch / 10)" in "\n".join(lines(profiled))


@pytest.mark.processes
def test_a_real_model_is_measured_through_all_real_parts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Settings] = []

    def run_costs(found: Settings, scratch: Path) -> RunCosts:
        measured.append(found)
        return RunCosts(0.002, 0.1, 0.0005)

    monkeypatch.setattr("streamrl.planning.profiler.run_costs", run_costs)
    monkeypatch.setattr("streamrl.planning.measuring.SHARING_S", 0.3)
    settings = validated(
        {
            "model": {"path": str(model)},
            "data": {"dataset": "chain_sum"},
            "loop": {"max_prompt_length": 16, "max_completion_length": 32},
            "generation": {"max_num_seqs": 4},
            "batching": {"token_budget": 128},
            "training": {"threads": 1},
        }
    )
    profiled = profile(settings, Effort(4, 1, 2), lambda line: None)
    found = profiled.profile
    assert [batch for batch, _ in found.decode.table] == [1, 2, 4]
    assert found.training.forward_backward_s_per_token + found.training.forward_backward_s_per_micro_batch > 0
    assert 0 < found.training.export_s < 5
    assert 0 < found.weight_transfer_s < 5
    assert found.weight_transfer_s > found.decode.adopt_s
    assert {one.what.split(",")[0] for one in profiled.fitted} == {"decode step", "prefill", "train step"}
    assert found.cores is not None
    assert found.cores.number == usable_cores()
    assert (found.cores.cpu_s_per_trajectory, found.cores.cores_per_run) == (0.0015, 0.1)
    assert found.cores.worker_s_per_trajectory == 0.0005
    assert measured[0].emulation.decode == found.decode  # the run waits as long as this machine takes
    assert measured[0].emulation.training == found.training
    assert "cores, speed" in "\n".join(lines(profiled))
    found.write(tmp_path / "p.json")
    assert DeviceProfile.read(tmp_path / "p.json") == found


def test_an_endless_model_loads_alike_and_knows_no_end(model: Path, tmp_path: Path) -> None:
    endless = endless_model(str(model), tmp_path / "endless")
    assert (endless / "model.safetensors").resolve() == (model / "model.safetensors").resolve()
    before, after = (json.loads((place / "config.json").read_text()) for place in (model, endless))
    assert before["eos_token_id"] == 1
    assert after == before | {"eos_token_id": None}
    assert read_facts(str(model), None).ends.ids == {1}
    assert read_facts(str(endless), None).ends.ids == frozenset()
    with pytest.raises(ModelError, match="expected a local model"):
        endless_model("nobody/no-such-model", tmp_path / "other")


def test_emulation_takes_the_times_of_a_profile(tmp_path: Path) -> None:
    MEASURED.write(tmp_path / "p.json")
    settings = validated(EMULATED | {"emulation": {"profile": str(tmp_path / "p.json"), "time_scale": 7.0}})
    assert settings.emulation.decode == MEASURED.decode
    assert settings.emulation.training == MEASURED.training
    (tmp_path / "resolved.toml").write_text(as_toml(settings))
    assert load_settings(tmp_path / "resolved.toml", []) == settings


@pytest.mark.parametrize(("section", "key"), [("decode", "step_s"), ("training", "optimizer_step_s")])
def test_times_that_contradict_the_profile_are_refused(tmp_path: Path, section: str, key: str) -> None:
    MEASURED.write(tmp_path / "p.json")
    emulation = {"profile": str(tmp_path / "p.json"), section: {key: 0.5}}
    with pytest.raises(SettingsError, match=rf"expected emulation\.{section} to come from the profile"):
        validated(EMULATED | {"emulation": emulation})
