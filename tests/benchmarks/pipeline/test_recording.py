from dataclasses import replace

import numpy as np
import pytest

from benchmarks.pipeline.__main__ import computed
from benchmarks.pipeline.cases import MODES, Case, Mode
from benchmarks.pipeline.recording import Recording, figures, least_step_s, occupancy
from benchmarks.pipeline.workload import Workload
from streamrl.schemas.profiles import DecodeSettings
from streamrl.schemas.reports import StepReport
from tests.fakes.messages import step_report

WORK = Workload(
    name="x", samples=2, slots=2, workers=2, decode=DecodeSettings(step_s=1.0, batch_scale=2.0, adopt_s=3.0)
)
TINY = Workload(name="tiny", samples=32, workers=2, slots=4, cap=3000)


def report(step: int, at: float) -> StepReport:
    return step_report(1, step, metrics={"emulated/train_s": 7.5}, sent_at=at)


RECORDING = Recording(
    positions=np.arange(4),
    workers=np.array(["worker-0", "worker-0", "worker-0", "worker-1"]),
    lengths=np.array([10, 20, 30, 40]),
    prompts=np.ones(4, np.int64),
    predicted=np.array([1, 2, 3, 4]),
    created_at=np.array([0.0, 0.0, 1.0, 1.0]),
    started_at=np.array([0.0, 0.0, 1.0, 1.0]),
    finished_at=np.array([1.0, 2.0, 2.0, 2.0]),
    trained_in=np.array([1, 1, 2, 2]),
    reports=(report(0, 0.0), report(1, 1.0), report(2, 2.0)),
)


def test_rates_are_of_the_steps_after_the_warm_up_in_emulated_time() -> None:
    found = figures(Case(WORK, "stream", "lpt", "oracle", warm_up=1, steps=1), RECORDING)
    assert found.trajectories_per_s == pytest.approx(2 / 15)
    assert found.tokens_per_s == pytest.approx(70 / 15)
    assert found.step_s == found.generation_s == pytest.approx(15.0)
    assert (found.trainer_busy, found.recall) == (0.5, 1.0)


def test_completions_waiting_in_the_engine_do_not_count_as_running() -> None:
    busy = occupancy(RECORDING, 0.0, 2.0, bins=2, slots=1)
    assert busy["worker-0"].tolist() == [1.0, 1.0]
    assert busy["worker-1"].tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("mode", "least_s"),
    [
        # 70 tokens at 2 workers x 2 slots / 2 s; the longest alone, 40 x 1.5 s; trained in as long as all take to
        # sample, with their prompts; 1 s of optimizer and 2 of export, 3 to adopt.
        ("synchronous", 60.0 + 36.0 + 6.0),
        ("stream", 60.0 + 6.0),
        ("one_step_async", 39.0),
        ("trajectory_async", 39.0),
    ],
)
def test_the_ceilings_are_what_their_derivation_says(mode: Mode, least_s: float) -> None:
    assert least_step_s(Case(WORK, mode, "lpt", warm_up=1, steps=1), RECORDING) == pytest.approx(least_s)


@pytest.mark.parametrize("mode", MODES)
def test_real_parts_do_not_beat_the_ceiling_and_known_lengths_help(mode: Mode) -> None:
    plain = computed(Case(TINY, mode, "round_robin", warm_up=5, steps=3), seed=0)
    known = computed(Case(TINY, mode, "skewness_aware", "oracle", warm_up=5, steps=3), seed=0)
    assert 0.3 < plain["of_ceiling"] < 1.05
    assert known["of_ceiling"] < 1.05
    assert known["tokens_per_s"] > 0.98 * plain["tokens_per_s"]
    assert (known["recall"], known["lengths"], known["measured"]) == (1.0, "oracle", False)


def test_a_slow_worker_lowers_the_ceiling() -> None:
    case = Case(WORK, "synchronous", "lpt", warm_up=1, steps=1)
    slow = replace(case, workload=replace(WORK, slow_workers=1))
    assert least_step_s(slow, RECORDING) > least_step_s(case, RECORDING)
