import os
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.planning import sharing
from streamrl.planning.sharing import (
    RunCosts,
    RunWindow,
    SharingMeter,
    family_cpu_s,
    fit_run_costs,
    neighbours,
    run_costs,
)
from streamrl.schemas.errors import StreamRLError
from streamrl.settings.loading import validated
from streamrl.settings.tree import Settings


@given(st.floats(0, 1), st.floats(0, 0.01), st.integers(1, 400), st.integers(401, 4000))
def test_two_windows_give_what_a_run_and_a_trajectory_cost(
    always: float, per_trajectory: float, slow: int, fast: int
) -> None:
    windows = [
        RunWindow(number, 8.0, 8.0 * always + number * per_trajectory, 2.0 * always + number * per_trajectory / 4)
        for number in (slow, fast)
    ]
    found = fit_run_costs(*windows)
    assert found.cores_per_run == pytest.approx(always, abs=1e-6)
    assert found.cpu_s_per_trajectory == pytest.approx(per_trajectory, abs=1e-6)
    assert found.worker_cpu_s_per_trajectory == pytest.approx(per_trajectory / 4, abs=1e-6)


@pytest.mark.parametrize(
    "fast",
    [RunWindow(100, 8.0, 0.2), RunWindow(100, 8.0, 0.5, 0.4), RunWindow(50, 8.0, 4.0), RunWindow(0, 8.0, 0.4)],
)
def test_noise_makes_no_cost_negative(fast: RunWindow) -> None:
    found = fit_run_costs(RunWindow(80, 8.0, 0.4), fast)
    assert found.cores_per_run >= 0
    assert 0 <= found.worker_cpu_s_per_trajectory <= found.cpu_s_per_trajectory
    assert found.cpu_s_per_trajectory <= fast.cpu_s / max(1, fast.trajectories)


@pytest.mark.parametrize(
    ("alone_s", "crowded_s", "cpu_s", "used", "full_speed"),
    [
        (1.0, 1.0, 1.0, 1.0, 1.0),
        (1.0, 1.25, 1.0, 1.0, 0.8),
        (1.0, 0.9, 1.0, 1.0, 1.0),
        # Two threads beside another process: three on two cores, which take turns.
        (1.0, 1.5, 2.0, 2.0, 1.0),
        (1.0, 3.0, 2.0, 2.0, 0.5),
    ],
)
def test_the_speed_on_busy_cores_is_that_beside_neighbours(
    alone_s: float, crowded_s: float, cpu_s: float, used: float, full_speed: float
) -> None:
    meter = SharingMeter(cores=2)
    meter.alone_s, meter.crowded_s, meter.cpu_s = alone_s, crowded_s, cpu_s
    assert meter.used == used
    assert meter.full_speed == pytest.approx(full_speed)


@pytest.mark.processes
def test_neighbours_compute_during_the_block_alone() -> None:
    others = psutil.Process().children()
    before = family_cpu_s(os.getpid())
    with neighbours(1):
        deadline = time.monotonic() + 60
        while family_cpu_s(os.getpid()) < before + 0.2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert family_cpu_s(os.getpid()) >= before + 0.2
    assert psutil.Process().children() == others


def emulated(**sections: object) -> Settings:
    return validated(
        {
            "data": {"dataset": "chain_sum"},
            "loop": {"groups_per_step": 4, "num_generations": 2, "max_completion_length": 32},
            "generation": {"engine": "emulated", "max_num_seqs": 8},
            "training": {"backend": "emulated"},
            "emulation": {"time_scale": 1.0},
            **sections,
        }
    )


@pytest.mark.processes
@pytest.mark.timeout(900)  # two runs, each with a broker of its own
def test_a_run_whose_engines_only_wait_shows_what_the_others_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "MEASURED_S", 2.0)
    monkeypatch.setattr(sharing, "STEP_S", 0.4)
    windows: list[RunWindow] = []

    def fit(*found: RunWindow) -> RunCosts:
        windows.extend(found)
        return fit_run_costs(*found)

    monkeypatch.setattr(sharing, "fit_run_costs", fit)
    others = psutil.Process().children()
    found = run_costs(emulated(), tmp_path)
    assert all(0 < window.worker_cpu_s < window.cpu_s for window in windows)
    assert found.cores_per_run + found.cpu_s_per_trajectory > 0
    assert psutil.Process().children() == others


@pytest.mark.processes
def test_a_run_that_ends_is_told_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "_emulated", lambda *_: {"run": {}, "nonsense": {"key": 1}})
    with pytest.raises(StreamRLError, match=r"(?s)expected an emulated run to make steps .* got: .*nonsense"):
        run_costs(emulated(), tmp_path)


def test_a_measured_run_takes_no_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMRL_KAFKA__BOOTSTRAP_SERVERS", "kafka.example:9092")
    monkeypatch.setenv("STREAMRL_CACHE", "somewhere")
    assert "STREAMRL_KAFKA__BOOTSTRAP_SERVERS" not in sharing.own_environment()
    assert sharing.own_environment()["STREAMRL_CACHE"] == "somewhere"
